"""Unmounting with little time: logs go first, then the rest in order, and what remains is said."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.endtoend.checkpoints import blob
from tests.faultshare.client import FaultShare
from tests.mounting import DEFAULTS, NEVER_BY_ITSELF, Mounted, contents, merge, wbcache
from tests.waiting import wait_until
from wbcache.errors import RemainsError

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("fuse")]

COUNT = 90
SIZE = 20_000
SLOW = 50
"""Calls a second: what is left takes far longer than the time that there is."""

LOGS = {f"log{number}": f"{number}\n".encode() * 2000 for number in range(5)}
PARTS = {f"part{number:03}": blob(f"part{number}", SIZE) for number in range(COUNT)}


@pytest.fixture
def share(tmp_path: Path) -> Iterator[FaultShare]:
    (tmp_path / "backing").mkdir()
    with FaultShare(tmp_path / "backing") as share:
        yield share
        assert share.errors() == ""


def run_and_slow_down(top: Path, share: FaultShare, flush: Any) -> int:
    """A run that logs and saves, none of which is on the share yet; then the share gets slow.

    Returns where the share's log was then.
    """
    for name in LOGS:
        (top / name).write_bytes(b"begin\n")
    flush()
    for name, data in PARTS.items():
        (top / name).write_bytes(data)
    for name, data in LOGS.items():
        with open(top / name, "ab") as log:
            log.write(data)
    share.set(latency_ms=5, iops=SLOW)
    return share.mark()


def check_prefix(share: FaultShare, since: int, left: set[str]) -> None:
    """Logs are complete and came first; of the rest there is what was written first, whole."""
    held = contents(share.backing)
    for name, data in LOGS.items():
        assert held[name][1] == b"begin\n" + data
    there = [name for name in PARTS if name in held]
    assert there == list(PARTS)[: len(there)] and len(there) < COUNT
    assert all(held[name][1] == PARTS[name] for name in there)
    assert left == set(PARTS) - set(there)
    ops = [op for op in share.log(since) if op.effect]
    grown = [op.n for op in ops if op.op == "write" and op.path.startswith("log")]
    begun = [op.n for op in ops if op.op == "create"]
    assert begun and max(grown) < min(begun)


def check_all(share: FaultShare) -> None:
    held = contents(share.backing)
    wanted = PARTS | {name: b"begin\n" + data for name, data in LOGS.items()}
    assert {name: data for name, (_, data) in held.items()} == wanted


def listed(text: str) -> set[str]:
    return {line.split()[-1] for line in text.splitlines()}


def logged(text: str) -> set[str]:
    return {
        line.partition("not on the share yet: b'")[2].partition("'")[0]
        for line in text.splitlines()
        if "not on the share yet" in line
    }


def test_when_time_is_up_a_valid_prefix_is_there_and_the_rest_arrives_later(
    share: FaultShare, tmp_path: Path
) -> None:
    with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
        since = run_and_slow_down(mount.path, share, mount.flush)
        done = mount.umount("--timeout", "3")
        assert done.returncode == RemainsError.exit_code, done.stderr
        left = listed(done.stdout)
        check_prefix(share, since, left)
        assert f"{len(left)} items" in done.stderr
        assert logged(mount.log()) == left

        # Another machine gets the rest out of the cache alone.
        shutil.copytree(mount.cache_dir, tmp_path / "copy")
        (tmp_path / "copy" / "lock").unlink()
        done = wbcache("recover", tmp_path / "copy", "--to", tmp_path / "recovered")
        assert done.returncode == 0, done.stderr
        recovered = contents(tmp_path / "recovered")
        assert {name: data for name, (_, data) in recovered.items()} == {
            name: PARTS[name] for name in left
        }

        # And the next mount carries on.
        share.clear()
        mount.remount()
        assert (mount.path / max(left)).read_bytes() == PARTS[max(left)]
        assert mount.umount().returncode == 0
        check_all(share)


@contextlib.contextmanager
def in_foreground(
    share: FaultShare, base: Path, config: dict[str, Any]
) -> Iterator[subprocess.Popen[str]]:
    """A mount whose exit code its starter gets, as a service manager does."""
    (base / "config.yaml").write_text(yaml.safe_dump(merge(DEFAULTS, config)))
    (base / "mnt").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "wbcache.cli", "mount", "--foreground"]
    command += ["--cache-dir", str(base / "cache"), "--config", str(base / "config.yaml")]
    process = subprocess.Popen(
        [*command, str(share.mountpoint), str(base / "mnt")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "is mounted on" in process.stdout.readline()
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)
        subprocess.run(["umount", "-i", "-l", str(base / "mnt")], capture_output=True, check=False)


def flush(base: Path) -> None:
    assert wbcache("flush", base / "mnt").returncode == 0


def test_a_machine_that_shuts_down_gets_what_the_configuration_allows(
    share: FaultShare, tmp_path: Path
) -> None:
    config = merge(NEVER_BY_ITSELF, {"drain": {"timeout": "3s"}})
    with in_foreground(share, tmp_path, config) as process:
        since = run_and_slow_down(tmp_path / "mnt", share, lambda: flush(tmp_path))
        # A program still has its log open, as when everything is told to end at once.
        descriptor = os.open(tmp_path / "mnt" / "log0", os.O_WRONLY | os.O_APPEND)
        try:
            process.terminate()
            began = time.monotonic()
            assert process.wait(30) == RemainsError.exit_code
            assert time.monotonic() - began > 2
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    check_prefix(share, since, logged((tmp_path / "cache" / "daemon.log").read_text()))
    share.clear()
    with in_foreground(share, tmp_path, NEVER_BY_ITSELF) as process:
        process.terminate()
        assert process.wait(30) == 0
    check_all(share)


def test_a_second_signal_ends_the_final_flush(share: FaultShare, tmp_path: Path) -> None:
    with in_foreground(share, tmp_path, NEVER_BY_ITSELF) as process:
        run_and_slow_down(tmp_path / "mnt", share, lambda: flush(tmp_path))
        process.send_signal(signal.SIGTERM)
        log = tmp_path / "cache" / "daemon.log"
        wait_until(lambda: "SIGTERM: unmounting and draining" in log.read_text(), "it drains")
        wait_until(lambda: not os.path.ismount(tmp_path / "mnt"), "it is unmounted")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == RemainsError.exit_code
        assert "SIGTERM again" in log.read_text()


@pytest.mark.parametrize("arguments", [["--no-drain"], ["--timeout", "0"]])
def test_without_time_nothing_moves(share: FaultShare, arguments: list[str]) -> None:
    with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
        since = run_and_slow_down(mount.path, share, mount.flush)
        done = mount.umount(*arguments)
        assert done.returncode == RemainsError.exit_code
        assert listed(done.stdout) == {*PARTS, *LOGS}
        assert not share.written(since)


def test_a_later_command_says_how_long_the_flush_may_go_on(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
        since = run_and_slow_down(mount.path, share, mount.flush)
        command = [sys.executable, "-m", "wbcache.cli", "umount", str(mount.path)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as first:
            share.wait_for("create", since=since)
            second = wbcache("umount", "--timeout", "0", mount.path)
            output, _ = first.communicate(timeout=30)
        assert first.returncode == second.returncode == RemainsError.exit_code
        assert listed(output) == listed(second.stdout)
        check_prefix(share, since, listed(output))


def test_programs_that_use_the_mount_leave_it_as_it_was(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
        (mount.path / "file").write_bytes(b"x")
        with open(mount.path / "file", "rb"):
            assert mount.umount("--timeout", "0").returncode == 14
            assert mount.umount("--no-drain").returncode == 14
        assert mount.umount().returncode == 0
        assert contents(share.backing).keys() == {"file"}
