"""A share that suddenly answers that there is nothing: nobody has removed anything."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted, contents
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fuse")


class Pair(NamedTuple):
    share: FaultShare
    mount: Mounted


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    backing = tmp_path / "backing"
    (backing / "old" / "deep").mkdir(parents=True)
    (backing / "old" / "deep" / "file").write_bytes(b"old")
    (backing / "old" / "removed").write_bytes(b"to be removed")
    with FaultShare(backing) as share, Mounted(share.mountpoint) as mount:
        assert len(contents(mount.path)) == 4
        yield Pair(share, mount)


def problem(pair: Pair) -> str:
    return str(pair.mount.status()["share"]["problem"])


def test_a_share_without_anything_is_not_believed(pair: Pair) -> None:
    share, mount = pair
    share.fail(None, errno.ENOENT)
    (mount.path / "old" / "removed").unlink()
    (mount.path / "old" / "deep" / "new").write_bytes(b"new")
    (mount.path / "old" / "deep" / "file").write_bytes(b"changed")
    wait_until(lambda: "is not there" in problem(pair), "the share is known to be missing")
    # Listings are older than their TTL by now, and nothing is gone.
    assert sorted(os.listdir(mount.path / "old")) == ["deep"]
    assert (mount.path / "old" / "deep" / "file").read_bytes() == b"changed"
    assert sorted(os.listdir(mount.path / "old" / "deep")) == ["file", "new"]
    share.clear()
    wait_until(lambda: not problem(pair), "the share is there again")
    mount.flush()
    assert contents(share.backing) == contents(mount.path)
    assert not list(share.backing.rglob("*.conflict-*"))
    assert not list(share.backing.rglob(".wbcache-*"))


def test_without_the_id_file_nothing_is_removed_or_flushed(pair: Pair) -> None:
    """The directory that the share was mounted on, say, with none of its files."""
    share, mount = pair
    (share.backing / ".wbcache").rename(share.backing / "away")
    (share.backing / "old").rename(share.backing / "away" / "old")
    wait_until(lambda: os.listdir(mount.path) and problem(pair), "the id file is missed")
    (mount.path / "old" / "new").write_bytes(b"new")
    assert mount.client.flush([b""], 1.0)
    assert sorted(os.listdir(mount.path / "old")) == ["deep", "new", "removed"]
    assert not (share.backing / "old").exists()
    (share.backing / "away" / "old").rename(share.backing / "old")
    (share.backing / "away").rename(share.backing / ".wbcache")
    wait_until(lambda: not problem(pair), "it is found again")
    mount.flush()
    assert contents(share.backing) == contents(mount.path)
