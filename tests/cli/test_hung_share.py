"""Commands while the share does not answer: each ends soon, and says what is the matter."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, wbcache
from wbcache.daemon.preflight import SHARE_DEADLINE

pytestmark = pytest.mark.usefixtures("fuse")

SOON = 6.0
"""Seconds for a command that waits for nothing, on a busy machine."""


@pytest.fixture
def share(tmp_path: Path) -> Iterator[FaultShare]:
    (tmp_path / "backing").mkdir()
    with FaultShare(tmp_path / "backing") as share:
        yield share


@pytest.fixture
def mounted(share: FaultShare) -> Iterator[Mounted]:
    with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mounted:
        (mounted.path / "known").write_text("before")
        mounted.flush()
        # A new name needs a directory whose other names are known.
        assert os.listdir(mounted.path) == ["known"]
        yield mounted


def test_mount_gives_up_on_a_share_that_hangs(share: FaultShare, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    share.hang()
    start = time.monotonic()
    done = wbcache("mount", share.mountpoint, tmp_path / "m", "--cache-dir", tmp_path / "cache")
    # That the command ends at all is the point: a thread stuck on the share would keep it.
    assert time.monotonic() - start < SHARE_DEADLINE + SOON
    assert done.returncode == 4
    assert f"did not answer within {SHARE_DEADLINE:g} s" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "cache").exists()


def test_mount_says_that_the_share_is_disconnected(share: FaultShare, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    share.disconnect()
    done = wbcache("mount", share.mountpoint, tmp_path / "m", "--cache-dir", tmp_path / "cache")
    assert done.returncode == 4
    assert "Transport endpoint is not connected" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_status_and_pending_do_not_wait_for_the_share(share: FaultShare, mounted: Mounted) -> None:
    share.hang()
    (mounted.path / "new").write_text("while it hangs")
    for command in ("status", "pending"):
        start = time.monotonic()
        done = wbcache(command, "--json", mounted.path)
        assert time.monotonic() - start < SOON
        assert done.returncode == 0
        answer = json.loads(done.stdout)
    assert [row["path"] for row in answer] == ["new"]


def test_flush_stops_at_its_time_limit(share: FaultShare, mounted: Mounted) -> None:
    (mounted.path / "new").write_text("while it hangs")
    share.hang()
    start = time.monotonic()
    done = wbcache("flush", "--timeout", "1", mounted.path / "new")
    assert time.monotonic() - start < 1 + SOON
    assert done.returncode == 3
    assert done.stdout.rstrip().endswith("new")
    share.release()
    share.clear()
    assert wbcache("flush", mounted.path / "new").returncode == 0
    assert (share.backing / "new").read_text() == "while it hangs"


@pytest.mark.parametrize("arguments", [["--timeout", "1"], ["--no-drain"]])
def test_umount_says_what_remains_and_the_next_mount_carries_on(
    share: FaultShare, mounted: Mounted, arguments: list[str]
) -> None:
    (mounted.path / "new").write_text("while it hangs")
    share.hang()
    start = time.monotonic()
    done = wbcache("umount", *arguments, mounted.path)
    assert time.monotonic() - start < 1 + 2 * SOON
    assert done.returncode == 3
    assert "new" in done.stdout
    assert "not on the share yet: 1 item" in done.stderr
    assert not mounted.is_mounted
    assert os.listdir(mounted.path) == []
    share.release()
    share.clear()
    mounted.remount()
    assert (mounted.path / "new").read_text() == "while it hangs"
    assert mounted.umount().returncode == 0
    assert (share.backing / "new").read_text() == "while it hangs"
