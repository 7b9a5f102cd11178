"""What the soak has found, each as small as it gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted

pytestmark = [pytest.mark.usefixtures("fuse")]


@pytest.fixture
def share(tmp_path: Path) -> Iterator[FaultShare]:
    (tmp_path / "backing").mkdir()
    with FaultShare(tmp_path / "backing") as share:
        yield share


@pytest.fixture
def mount(share: FaultShare) -> Iterator[Mounted]:
    with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
        yield mount


def test_a_directory_whose_making_had_no_answer_is_known_all_the_same(
    share: FaultShare, mount: Mounted
) -> None:
    """Names in it had to be looked up on the share, which may not answer."""
    share.fail(["mkdir"], after=True, times=1)
    (mount.path / "made").mkdir()
    mount.flush()
    assert (share.backing / "made").is_dir()
    share.hang()
    (mount.path / "made" / "new").write_text("at once")
    assert os.listdir(mount.path / "made") == ["new"]
    share.clear()


def test_what_else_is_in_it_shows(share: FaultShare, mount: Mounted) -> None:
    """Somebody else was first, and we don't hear that either."""
    share.fail(["mkdir"], after=True, times=1)
    (mount.path / "made").mkdir()
    (share.backing / "made").mkdir()
    (share.backing / "made" / "theirs").write_text("theirs")
    mount.flush()
    assert os.listdir(mount.path / "made") == ["theirs"]


def test_the_rename_of_one_of_two_links_is_known_after_a_kill(
    share: FaultShare, mount: Mounted
) -> None:
    """It was looked for where the other link is; the new name then seemed to be somebody else's."""
    (mount.path / "one").write_text("data")
    mount.flush()
    os.link(mount.path / "one", mount.path / "two")
    mount.flush()
    (mount.path / "two").rename(mount.path / "three")
    share.hang(["rename"], after=True)
    mount.client.flush([b""], 0.0)
    share.wait_hung("rename")
    (mount.path / "three").unlink()
    mount.strike()
    share.release()
    mount.wait_killed()
    mount.remount()
    mount.flush()
    assert os.listdir(mount.path) == ["one"]
    assert sorted(os.listdir(share.backing)) == [".wbcache", "one"]


def test_a_final_flush_removes_temporaries_though_that_fails_at_first(
    share: FaultShare, mount: Mounted
) -> None:
    """No mount may ever come after it to do so."""
    rule = share.hang(["write"], ".wbcache-*")
    _begin_to_send(mount, "data", 20 << 20)
    share.wait_hung("write")
    (mount.path / "data").unlink()
    share.fail(["unlink"], match=".wbcache-*", times=2)
    share.release(rule)
    done = mount.umount()
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(share.backing) == [".wbcache"]


def test_but_not_for_ever(share: FaultShare, mount: Mounted) -> None:
    rule = share.hang(["write"], ".wbcache-*")
    _begin_to_send(mount, "data", 20 << 20)
    share.wait_hung("write")
    (mount.path / "data").unlink()
    share.fail(["unlink"], match=".wbcache-*")
    share.release(rule)
    assert mount.umount().returncode == 0
    assert len(os.listdir(share.backing)) == 2
    share.clear()
    mount.remount()
    assert mount.umount().returncode == 0
    assert os.listdir(share.backing) == [".wbcache"]


def _begin_to_send(mount: Mounted, name: str, size: int) -> None:
    """Write a file, and have it flushed in the background."""
    (mount.path / name).write_bytes(bytes(range(256)) * (size >> 8))
    assert mount.client.flush([os.fsencode(name)], 0.0)
