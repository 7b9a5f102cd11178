"""Mounts whose daemon answers, hangs, or is dead: told apart, unmounted, and cleared away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.tinymount import tiny_mount
from tests.waiting import wait_until
from wbcache import cli
from wbcache.control import registry
from wbcache.control.registry import MountRecord
from wbcache.daemon import preflight
from wbcache.errors import BusyError, MountpointError
from wbcache.mounts import MountEntry, answer, canonical, mount_at, read_mounts, unmount

pytestmark = pytest.mark.usefixtures("fuse")


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    path = tmp_path / "m with space"
    path.mkdir()
    return path


def entry_at(mountpoint: Path) -> MountEntry:
    entry = mount_at(str(mountpoint), read_mounts())
    assert entry is not None
    return entry


def stop(pid: int) -> None:
    """Stop a process, and wait until it has stopped: until then it may still answer."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text(), "it stops")


def kill(pid: int, mountpoint: Path) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: answer(entry_at(mountpoint)) == "dead", "the kernel notices")


def test_a_live_mount(mountpoint: Path) -> None:
    with tiny_mount(mountpoint):
        entry = entry_at(mountpoint)
        assert entry.is_wbcache
        assert entry.source == "tiny share"
        assert answer(entry) == "alive"
        assert not preflight.clear_dead_mount(str(mountpoint))
        assert answer(entry) == "alive"


def test_a_mount_that_hangs_holds_up_neither_question_nor_path(mountpoint: Path) -> None:
    with tiny_mount(mountpoint) as pid:
        stop(pid)
        start = time.monotonic()
        assert answer(entry_at(mountpoint), deadline=0.2) == "silent"
        assert canonical(str(mountpoint)) == str(mountpoint)
        assert time.monotonic() - start < 5
        # It may come back: nothing is taken away from under its programs.
        assert not preflight.clear_dead_mount(str(mountpoint))
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: answer(entry_at(mountpoint)) == "alive", "it answers again")


def test_a_dead_mount_is_cleared_even_when_it_is_stacked(mountpoint: Path) -> None:
    with tiny_mount(mountpoint) as pid:
        assert os.path.isdir(mountpoint)
        kill(pid, mountpoint)
        with pytest.raises(OSError, match="not connected"):
            os.listdir(mountpoint)
        (detached,) = preflight.clear_dead_mount(str(mountpoint))
        assert mount_at(str(mountpoint), read_mounts()) is None
        assert os.listdir(mountpoint) == []
        assert not preflight.clear_dead_mount(str(mountpoint))
        os.close(detached)


def test_a_busy_mount_stays(mountpoint: Path) -> None:
    with tiny_mount(mountpoint):
        directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with pytest.raises(BusyError, match="is in use"):
                unmount(str(mountpoint))
        finally:
            os.close(directory)
        assert answer(entry_at(mountpoint)) == "alive"
        wait_until(lambda: _unmounted(mountpoint), "the kernel lets go of the directory")
        assert mount_at(str(mountpoint), read_mounts()) is None


def _unmounted(mountpoint: Path) -> bool:
    """Unmount; False when the release of the last handle is still on its way."""
    try:
        unmount(str(mountpoint))
    except BusyError:
        return False
    return True


def test_umount_takes_away_a_dead_mount_and_says_how_to_carry_on(
    mountpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with tiny_mount(mountpoint) as pid:
        record = MountRecord(str(mountpoint), "/mnt/share", str(cache), pid)
        registry.register(record)
        try:
            kill(pid, mountpoint)
            assert cli.run(lambda: cli.command.main(["umount", str(mountpoint)])) == 3
        finally:
            registry.unregister(record)
        assert mount_at(str(mountpoint), read_mounts()) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "its daemon had ended without a final flush" in line
    assert f"wbcache mount /mnt/share {mountpoint} --cache-dir {cache}" in line


def test_umount_of_a_dead_mount_that_nobody_registered(
    mountpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_mount(mountpoint) as pid:
        kill(pid, mountpoint)
        assert cli.run(lambda: cli.command.main(["umount", str(mountpoint)])) == 3
        assert mount_at(str(mountpoint), read_mounts()) is None
    assert "the dead mount is removed" in capsys.readouterr().err


def test_a_lazy_unmount_through_the_helper_returns_at_once(mountpoint: Path) -> None:
    with tiny_mount(mountpoint):
        directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
        try:
            subprocess.run(
                [sys.executable, "-m", "wbcache.cli.umount_helper", str(mountpoint), "-l"],
                check=True,
                timeout=20,
            )
        finally:
            os.close(directory)
        assert mount_at(str(mountpoint), read_mounts()) is None


def test_mounting_over_a_live_mount_is_refused(mountpoint: Path) -> None:
    with tiny_mount(mountpoint), pytest.raises(MountpointError, match="already mounted by wbcache"):
        preflight.check_not_mounted(str(mountpoint), read_mounts(), over_source=False)
