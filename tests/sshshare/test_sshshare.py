"""The share is a real one: what is done on the mount happens below, slowly, or not yet."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounting import NEVER_BY_ITSELF, Mounted
from tests.sshshare import SshShare

pytestmark = pytest.mark.skipif(
    bool(SshShare.missing()),
    reason=f"not installed: {', '.join(SshShare.missing())} (apt install sshfs openssh-server)",
)


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    path = tmp_path / "backing"
    path.mkdir()
    return path


@pytest.fixture
def share(backing: Path) -> Iterator[SshShare]:
    with SshShare(str(backing), cache_timeout=0) as share:
        yield share


def test_files_arrive_below(share: SshShare, backing: Path) -> None:
    mount = Path(share.mountpoint)
    (mount / "a").write_bytes(b"one")
    with open(mount / "a", "ab") as file:
        file.write(b" two")
        file.flush()
        os.fsync(file.fileno())
    os.rename(mount / "a", mount / "b")
    os.link(mount / "b", mount / "c")
    os.symlink("b", mount / "s")

    assert (backing / "b").read_bytes() == b"one two"
    assert os.stat(backing / "c").st_nlink == 2
    assert os.readlink(backing / "s") == "b"
    assert sorted(os.listdir(mount)) == ["b", "c", "s"]


def test_changes_below_are_seen_without_caches(share: SshShare, backing: Path) -> None:
    (backing / "x").write_bytes(b"1")
    assert (Path(share.mountpoint) / "x").read_bytes() == b"1"
    (backing / "x").write_bytes(b"22")
    assert (Path(share.mountpoint) / "x").read_bytes() == b"22"


def test_delay_is_paid_both_ways(share: SshShare) -> None:
    missing = os.path.join(share.mountpoint, "missing")

    def seconds() -> float:
        started = time.monotonic()
        assert not os.path.exists(missing)
        return time.monotonic() - started

    quick = min(seconds() for _ in range(5))
    share.set_delay(100)
    assert min(seconds() for _ in range(3)) >= 0.2
    share.set_delay(0)
    assert min(seconds() for _ in range(5)) < 0.1 + quick


def test_delay_does_not_limit_bandwidth(backing: Path) -> None:
    size = 8 << 20
    with SshShare(str(backing), delay_ms=50) as share:
        started = time.monotonic()
        (Path(share.mountpoint) / "big").write_bytes(bytes(size))
        elapsed = time.monotonic() - started
    assert (backing / "big").stat().st_size == size
    # One after the other, 64 KiB each, the chunks alone would take 128 x 50 ms one way.
    assert elapsed < 5


def test_hang_holds_calls_back_and_resume_answers_them(share: SshShare, backing: Path) -> None:
    (backing / "x").write_bytes(b"content")
    share.hang()
    answers: list[bytes] = []
    reader = threading.Thread(
        target=lambda: answers.append((Path(share.mountpoint) / "x").read_bytes())
    )
    reader.start()
    reader.join(0.5)
    assert reader.is_alive()
    share.resume()
    reader.join(10)
    assert answers == [b"content"]


def test_a_hung_and_busy_share_is_cleaned_up(backing: Path) -> None:
    with SshShare(str(backing), cache_timeout=0) as share:
        mountpoint = share.mountpoint
        pids = [share.sshd_pid, share.sshfs_pid]
        busy = subprocess.Popen(["sleep", "60"], cwd=mountpoint)
        share.hang()
    try:
        assert not os.path.exists(mountpoint)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert mountpoint not in Path("/proc/self/mountinfo").read_text()
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.parametrize("over", [False, True], ids=["beside", "over"])
def test_a_mount_begins_while_it_hangs(share: SshShare, backing: Path, over: bool) -> None:
    (backing / "known").write_text("theirs")
    mountpoint = share.mountpoint if over else None
    with Mounted(share.mountpoint, config=NEVER_BY_ITSELF, mountpoint=mountpoint) as mounted:
        assert os.listdir(mounted.path) == ["known"]
        before = (mounted.path / "known").stat()
        (mounted.path / "dirty").write_text("before")
        assert mounted.umount("--no-drain").returncode == 3
        share.hang()
        mounted.remount()
        assert mounted.status()["share"]["state"] == "not answering"
        assert sorted(os.listdir(mounted.path)) == ["dirty", "known"]
        after = (mounted.path / "known").stat()
        assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
        (mounted.path / "new").write_text("while it hangs")
        assert sorted(os.listdir(backing)) == [".wbcache", "known"]
        share.resume()
        assert mounted.umount().returncode == 0
    assert (backing / "dirty").read_text() == "before"
    assert (backing / "new").read_text() == "while it hangs"
