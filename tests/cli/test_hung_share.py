"""Commands while the share does not answer: each ends soon, and says what is the matter."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, wbcache
from tests.waiting import wait_until
from wbcache.daemon.preflight import SHARE_DEADLINE
from wbcache.filesystem.listing import MAX_REFRESHES

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


def told(mounted: Mounted) -> list[str]:
    """What the log says of the share's health."""
    lines = mounted.log().splitlines()
    return [line.split(": ", 1)[1] for line in lines if "wbcache.share.health" in line]


def test_the_share_s_health_is_told_once_a_change(share: FaultShare) -> None:
    for number in range(5):
        (share.backing / f"d{number}").mkdir()
    with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mounted:
        names = os.listdir(mounted.path)
        assert mounted.status()["share"]["state"] == "answering"
        for _ in range(2):
            before = told(mounted)
            share.hang()
            for name in names:
                with pytest.raises(TimeoutError):
                    os.listdir(mounted.path / name)
            status = mounted.status()["share"]
            assert status["state"] == "not answering"
            assert status["silent_seconds"] > 0
            assert told(mounted)[len(before) :] == ["the share does not answer"]
            share.clear()  # first, or what is asked in between hangs for good
            share.release()
            wait_until(lambda: mounted.status()["share"]["state"] == "answering", "it is noticed")
            assert len(told(mounted)) == len(before) + 2
            assert told(mounted)[-1].startswith("the share answers again, after")


def test_a_share_of_which_only_flushes_are_waited_for_is_found_out(
    share: FaultShare, mounted: Mounted
) -> None:
    share.hang()
    (mounted.path / "new").write_text("while it hangs")
    assert wbcache("flush", "--timeout", "0.5", mounted.path / "new").returncode == 3
    wait_until(lambda: mounted.status()["share"]["state"] == "not answering", "it is noticed")
    share.release()
    share.clear()
    assert wbcache("flush", mounted.path / "new").returncode == 0
    assert mounted.status()["share"]["state"] == "answering"


def test_little_is_asked_anew_at_a_time(share: FaultShare) -> None:
    """When a share returns everything known is due for another look."""
    for number in range(100):
        (share.backing / str(number)).touch()
    with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mounted:
        names = os.listdir(mounted.path)
        for name in names:
            (mounted.path / name).stat()
        time.sleep(0.3)  # all are older than their TTL
        share.hang(["lookup", "getattr"])
        for name in names:
            (mounted.path / name).stat()
        share.wait_hung()
        assert len(share.hung()) <= MAX_REFRESHES + 1
        share.release()
        share.clear()
        assert sorted(os.listdir(mounted.path)) == sorted(names)


def test_it_ends_on_sigterm_when_the_time_to_drain_is_over(share: FaultShare) -> None:
    config = {**NEVER_BY_ITSELF, "drain": {"timeout": "1s"}}
    with Mounted(share.mountpoint, config=config) as mounted:
        (mounted.path / "new").write_text("x")
        share.hang()
        os.kill(mounted.pid, signal.SIGTERM)
        wait_until(lambda: not mounted.is_mounted, "it is unmounted")
        wait_until(lambda: "something remains to be flushed" in mounted.log(), "it gives up")
        share.release()
        share.clear()
        mounted.remount()
        assert mounted.umount().returncode == 0
    assert (share.backing / "new").read_text() == "x"
