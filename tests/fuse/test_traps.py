"""The traps of pyfuse3 and the kernel, one by one, on real mounts."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyfuse3 import FUSEError

from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted
from tests.waiting import wait_until
from wbcache.fuse import contained
from wbcache.mounts import mount_at, read_mounts, unmount

pytestmark = pytest.mark.usefixtures("fuse")


@pytest.fixture
def share(tmp_path: Path) -> Path:
    (tmp_path / "share").mkdir()
    return tmp_path / "share"


def test_clients_killed_in_mid_request_do_not_freeze_the_daemon(share: Path) -> None:
    # pyfuse3 reads the device after epoll: when the request has gone with its client the read
    # blocks with the interpreter locked, until somebody else makes a request. Nobody does here:
    # the daemon is asked over its socket.
    chance = random.Random(7)
    with Mounted(share) as mount:
        for _ in range(500):
            client = os.fork()
            if client == 0:
                try:
                    while True:
                        os.statvfs(mount.path)
                finally:
                    os._exit(0)
            time.sleep(chance.uniform(0.0005, 0.004))  # not a wait: when to strike
            os.kill(client, signal.SIGKILL)
            os.waitpid(client, 0)
            assert mount.status()["mounted"]


async def test_nothing_but_a_fuse_error_leaves_a_handler() -> None:
    @contained
    async def handler(error: BaseException) -> None:
        raise error

    for error, code in (
        (KeyError("x"), errno.EIO),
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (OSError("no number"), errno.EIO),
        (FUSEError(errno.ENOENT), errno.ENOENT),
    ):
        with pytest.raises(FUSEError) as caught:
            await handler(error)
        assert caught.value.errno == code


_FAULTY = """
import sys
from wbcache.filesystem.files import Files
real = Files.read
async def read(self, node, offset, size, **how):
    if node.size == 6:
        raise RuntimeError("a fault of ours")
    return await real(self, node, offset, size, **how)
Files.read = read
from wbcache.daemon.__main__ import main
sys.exit(main())
"""


def test_a_fault_of_ours_is_one_error_and_the_mount_lives(share: Path, tmp_path: Path) -> None:
    (share / "poison").write_bytes(b"poison")
    (share / "good").write_bytes(b"fine")
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    (tmp_path / "config.yaml").write_text("cache: {min_free: 1GiB}\n")
    arguments = ["--cache-dir", tmp_path / "cache", "--config", tmp_path / "config.yaml"]
    daemon = subprocess.Popen(
        [sys.executable, "-c", _FAULTY, *map(str, arguments), str(share), str(mountpoint)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert daemon.stdout is not None
        assert b"is mounted" in daemon.stdout.readline()
        for _ in range(3):
            with pytest.raises(OSError) as caught:
                (mountpoint / "poison").read_bytes()
            assert caught.value.errno == errno.EIO
            assert (mountpoint / "good").read_bytes() == b"fine"
        daemon.terminate()
        assert daemon.wait(30) == 0
    finally:
        daemon.kill()
        daemon.wait()
        if daemon.stdout is not None:
            daemon.stdout.close()
        entry = mount_at(str(mountpoint), read_mounts())
        if entry is not None:
            unmount(str(mountpoint), lazy=True)
    assert "a fault of ours" in (tmp_path / "cache" / "daemon.log").read_text()


def test_the_umask_of_whoever_mounted_does_not_matter(share: Path) -> None:
    before = os.umask(0o077)
    try:
        with Mounted(share) as mount:
            os.umask(0)
            (mount.path / "file").touch(0o666)
            (mount.path / "dir").mkdir(0o777)
            assert mount.umount().returncode == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((share / "file").stat().st_mode) == 0o666
    assert stat.S_IMODE((share / "dir").stat().st_mode) == 0o777


def test_a_killed_daemon_leaves_no_dead_mount_for_the_next(share: Path) -> None:
    with Mounted(share, config=NEVER_BY_ITSELF) as mount:
        (mount.path / "file").write_bytes(b"kept")
        mount.kill()
        with pytest.raises(OSError) as caught:
            os.listdir(mount.path)
        assert caught.value.errno == errno.ENOTCONN
        mount.remount()
        assert (mount.path / "file").read_bytes() == b"kept"


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[tuple[FaultShare, Mounted]]:
    backing = tmp_path / "backing"
    (backing / "data").mkdir(parents=True)
    for i in range(150):
        (backing / "data" / str(i)).write_bytes(b"d" * 1000)
    config = {"share": {"lookup_deadline": "20s", "deadline": "20s"}}
    with (
        FaultShare(backing) as fault,
        Mounted(fault.mountpoint, config={**NEVER_BY_ITSELF, **config}) as mount,
    ):
        yield fault, mount
        fault.release()


def test_many_requests_that_wait_for_the_share_stop_nothing_else(
    hung: tuple[FaultShare, Mounted],
) -> None:
    fault, mount = hung
    (mount.path / "known").write_bytes(b"known")
    files = [os.open(mount.path / "data" / str(i), os.O_RDONLY) for i in range(150)]
    fault.hang()
    read: list[bytes | int | None] = []

    def reader(file: int) -> None:
        try:
            read.append(os.read(file, 1000))
        except OSError as error:
            read.append(error.errno)

    readers = [threading.Thread(target=reader, args=(file,)) for file in files]
    for thread in readers:
        thread.start()
    try:
        wait_until(lambda: fault.hung(), "calls hang on the share")
        began = time.monotonic()
        for i in range(20):
            os.statvfs(mount.path)
            (mount.path / f"new-{i}").write_bytes(b"n")
            assert (mount.path / "known").read_bytes() == b"known"
        took = time.monotonic() - began
    finally:
        fault.release()
        for thread in readers:
            thread.join(60)
        for file in files:
            os.close(file)
    assert took < 5.0
    assert len(read) == 150
    assert set(read) <= {b"d" * 1000, errno.ETIMEDOUT}


def test_flags_that_we_do_not_know_are_refused(share: Path) -> None:
    whiteout = 4
    libc = ctypes.CDLL(None, use_errno=True)
    with Mounted(share) as mount:
        (mount.path / "a").touch()
        result = libc.renameat2(
            -100, os.fsencode(mount.path / "a"), -100, os.fsencode(mount.path / "b"), whiteout
        )
        assert (result, ctypes.get_errno()) == (-1, errno.EINVAL)
        assert os.listdir(mount.path) == ["a"]


def test_an_append_descriptor_and_pwrite(share: Path) -> None:
    # The cache file must not have been opened with the caller's O_APPEND.
    with Mounted(share) as mount:
        path = mount.path / "file"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        other = os.open(path, os.O_RDWR)
        try:
            os.write(log, b"0123456789")
            os.pwrite(other, b"XX", 2)
            os.write(log, b"end")
        finally:
            os.close(log)
            os.close(other)
        assert path.read_bytes() == b"01XX456789end"


def test_more_opens_than_descriptors(share: Path) -> None:
    (share / "file").write_bytes(b"content")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))  # for the daemon
        try:
            mount = stack.enter_context(Mounted(share))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        held = []
        try:
            for i in range(300):
                (mount.path / f"new-{i}").write_bytes(b"n" * i)
                held.append(os.open(mount.path / "file", os.O_RDONLY))
            assert all(os.pread(file, 7, 0) == b"content" for file in held)
        finally:
            for file in held:
                os.close(file)
        assert all((mount.path / f"new-{i}").stat().st_size == i for i in range(300))
