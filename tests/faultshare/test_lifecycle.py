"""The process: it starts, ends and leaves nothing behind, whatever state it is in."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare, ShareClient, ShareError
from tests.faultshare.mounttable import mounts_at

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.faultshare"]


def wait_until(condition: Callable[[], bool], timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hung_process(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["stat", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    path = tmp_path / "mount point"
    path.mkdir()
    return path


def test_closing_while_everything_hangs(backing: Path, mountpoint: Path) -> None:
    (backing / "f").write_text("x")
    share = FaultShare(backing, mountpoint)
    with share:
        pid = share.pid
        share.hang()
        client = hung_process(mountpoint / "f")
        share.wait_hung()
        begin = time.monotonic()
    assert time.monotonic() - begin < 5
    assert client.wait(5) == 1
    client.communicate()
    assert mounts_at(mountpoint) == []
    assert not Path(f"/proc/{pid}").exists()
    share.close()


def test_closing_while_files_are_open(backing: Path, mountpoint: Path) -> None:
    with FaultShare(backing, mountpoint) as share:
        pid = share.pid
        file = (mountpoint / "f").open("wb", buffering=0)
        file.write(b"x")
    assert mounts_at(mountpoint) == []
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(OSError, match=r"not connected|abort"):
        file.write(b"y")
    with pytest.raises(OSError, match=r"not connected|abort"):
        file.close()
    assert (backing / "f").read_bytes() == b"x"


def test_a_failing_test_leaves_nothing(backing: Path, mountpoint: Path) -> None:
    with pytest.raises(ZeroDivisionError), FaultShare(backing, mountpoint) as share:
        pid = share.pid
        share.disconnect()
        _ = 1 / 0
    assert mounts_at(mountpoint) == []
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_share_is_cleaned_up(backing: Path, mountpoint: Path) -> None:
    with FaultShare(backing, mountpoint) as share:
        os.kill(share.pid, signal.SIGKILL)
        assert share.process is not None
        share.process.wait()
        assert share.mounted(), "the kernel keeps the dead mount"
        with pytest.raises(OSError, match="not connected"):
            os.listdir(mountpoint)
        with pytest.raises(ShareError):
            share.mark()
    assert mounts_at(mountpoint) == []


def test_the_share_ends_with_the_test_program(backing: Path, mountpoint: Path) -> None:
    code = f"""
import os, signal
from tests.faultshare.client import FaultShare
share = FaultShare({str(backing)!r}, {str(mountpoint)!r})
share.start()
share.hang()
print(share.pid, share._directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    pid, directory = child.stdout.split()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() and mounts_at(mountpoint) == [])
    for path in sorted(Path(directory).iterdir()):
        path.rmdir() if path.is_dir() else path.unlink()
    Path(directory).rmdir()


def test_starting_fails_with_the_reason(backing: Path, tmp_path: Path) -> None:
    with pytest.raises(ShareError, match="must be directories"):
        FaultShare(backing, tmp_path / "missing").start()


def test_background_and_signals(backing: Path, mountpoint: Path, tmp_path: Path) -> None:
    socket = tmp_path / "control"
    options = ["--background", "--control", str(socket), "--latency-ms", "20", "--lack", "symlink"]
    done = subprocess.run(
        [*COMMAND, str(backing), str(mountpoint), *options],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
        timeout=20,
    )
    assert (done.stdout, done.stderr) == (b"", b"")
    assert mounts_at(mountpoint)[-1].type == "fuse.faultshare"
    with ShareClient(socket) as client:
        pid = client.pid
        begin = time.monotonic()
        (mountpoint / "f").touch()
        assert time.monotonic() - begin > 0.06
        with pytest.raises(PermissionError):
            (mountpoint / "l").symlink_to("f")
        client.hang()
        hung = hung_process(mountpoint)
        client.wait_hung()
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        assert hung.wait(5) == 1
        hung.communicate()
    assert mounts_at(mountpoint) == []
    assert not socket.exists()


def test_unmounting_ends_the_process(backing: Path, mountpoint: Path) -> None:
    with FaultShare(backing, mountpoint) as share:
        subprocess.run(["fusermount3", "-u", str(mountpoint)], check=True)
        assert share.process is not None
        assert share.process.wait(10) == 0
        assert share.errors() == ""


def test_serving_a_directory_over_itself(backing: Path) -> None:
    (backing / "f").write_text("x")
    with FaultShare(backing, backing) as share:
        assert (backing / "f").read_text() == "x"
        assert "read" in share.counts().calls
        (backing / "g").write_text("y")
    assert (backing / "g").read_text() == "y"


def test_killed_clients_do_not_freeze_the_share(share: FaultShare) -> None:
    """A request that vanishes between the poll and the read must not stop the process."""
    path = share.mountpoint / "f"
    path.touch()
    moment = random.Random(0)
    slowest = 0.0
    for _ in range(250):
        client = os.fork()
        if client == 0:
            try:
                while True:
                    os.stat(path)
            finally:
                os._exit(1)
        time.sleep(moment.uniform(0.0005, 0.004))  # when to kill, not something to wait for
        os.kill(client, signal.SIGKILL)
        os.waitpid(client, 0)
        begin = time.monotonic()
        share.mark()  # nothing else asks the share now
        slowest = max(slowest, time.monotonic() - begin)
    assert slowest < 3
