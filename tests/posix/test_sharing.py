"""What processes see of each other's work: mappings, sizes, locks, special files."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from tests.descriptors import opened
from tests.posix.parity import Case, Parity, State, attempt
from tests.waiting import wait_until
from wbcache.probe import within

PAGE = mmap.PAGESIZE
DATA = bytes(range(256)) * 64  # four pages
TTL = 0.1
"""Seconds for which the test's mount believes attributes."""


def build(top: Path) -> None:
    """A file of four pages."""
    (top / "file").write_bytes(DATA)


def elsewhere(work: Callable[[], object]) -> object:
    """What something gives in another process."""
    return within(30, lambda: attempt(work))


def test_mappings(parity: Parity, state: State) -> None:
    def coherent(top: Path) -> object:
        """write(2) and stores through a shared mapping see each other at once."""
        seen: list[object] = []
        with opened(top / "file") as fd, mmap.mmap(fd, 0) as shared:
            os.pwrite(fd, b"written", 10)
            seen += [shared[8:20]]
            shared[12:16] = b"MAPS"
            seen += [os.pread(fd, 12, 8), elsewhere(lambda: (top / "file").read_bytes()[8:20])]
            os.ftruncate(fd, 3 * PAGE)
            seen += [os.pread(fd, 10, 3 * PAGE - 5), shared[PAGE : PAGE + 4]]
            shared[2 * PAGE + 1] = 7
            os.pwrite(fd, b"again", 2 * PAGE)
            seen += [shared[2 * PAGE : 2 * PAGE + 8]]
        return seen

    def private(top: Path) -> object:
        with opened(top / "file", os.O_RDONLY) as fd:
            mapping = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        before = mapping[:4]
        mapping[:4] = b"mine"
        return [before, mapping[:8], (top / "file").read_bytes()[:8]]

    def after_close(top: Path) -> object:
        """The descriptor is closed first; the stores come later."""
        with opened(top / "file") as fd:
            shared = mmap.mmap(fd, 0)
        shared[PAGE : PAGE + 5] = b"later"
        shared.flush()
        shared[2 * PAGE :] = b"z" * len(shared[2 * PAGE :])
        shared.close()
        return (top / "file").read_bytes()

    def without_msync(top: Path) -> object:
        with opened(top / "file") as fd:
            shared = mmap.mmap(fd, 0)
        shared[5] = 0x55
        shared.close()
        return elsewhere(lambda: (top / "file").read_bytes()[:10])

    def new(top: Path) -> object:
        """ftruncate to the final size, then fill through the mapping, in any order."""
        with opened(top / "new", os.O_RDWR | os.O_CREAT) as fd:
            os.ftruncate(fd, 8 * PAGE + 100)
            with mmap.mmap(fd, 0) as shared:
                for page in (5, 0, 8, 3):
                    shared[page * PAGE : page * PAGE + 50] = bytes([page]) * 50
        return [(top / "new").stat().st_size, (top / "new").read_bytes()]

    def renamed_and_unlinked(top: Path) -> object:
        with opened(top / "file") as fd:
            shared = mmap.mmap(fd, 0)
        os.rename(top / "file", top / "moved")
        shared[:5] = b"moved"
        shared.flush()
        seen = (top / "moved").read_bytes()[:8]
        os.unlink(top / "moved")
        shared[:5] = b"still"
        found = shared[:8]
        shared.close()
        return [seen, found]

    def second_descriptor(top: Path) -> object:
        """A database's way: one shared mapping to read, a second descriptor with O_DSYNC."""
        seen: list[object] = []
        with opened(top / "file") as fd, opened(top / "file", os.O_WRONLY | os.O_DSYNC) as meta:
            os.ftruncate(fd, 64 * PAGE)
            shared = mmap.mmap(fd, 64 * PAGE, mmap.MAP_SHARED, mmap.PROT_READ)
            os.ftruncate(fd, 3)  # the mapping reaches far behind the end, and the file grows
            for number in range(10):
                os.pwrite(fd, bytes([number]) * 10, PAGE * number)
                os.pwrite(meta, bytes([number]) * 4, 0)
                seen += [shared[:4], shared[PAGE * number : PAGE * number + 10]]
            shared.close()
        return seen

    works = [coherent, private, after_close, without_msync, new]
    works += [renamed_and_unlinked, second_descriptor]
    parity.check([Case(work.__name__, build, work) for work in works], state)


def test_what_another_process_sees(parity: Parity, state: State) -> None:
    def sizes(top: Path) -> object:
        seen: list[object] = []
        for number in range(5):
            with open(top / "file", "ab") as file:
                file.write(b"x" * number)
            seen += [elsewhere(lambda: os.path.getsize(top / "file"))]
        with opened(top / "file") as fd:
            for size in (100, 5000, 0):
                os.ftruncate(fd, size)
                seen += [elsewhere(lambda: os.path.getsize(top / "file"))]
        elsewhere(lambda: (top / "file").write_bytes(b"from there"))
        seen += [(top / "file").stat().st_size, (top / "file").read_bytes()]
        return seen

    def exclusive(top: Path) -> object:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY

        def make() -> object:
            os.close(os.open(top / "lock", flags))
            return "made"

        seen = [attempt(make), elsewhere(make)]
        os.unlink(top / "lock")
        return [*seen, elsewhere(make), attempt(make)]

    def races(top: Path) -> object:
        """Many processes make the same name: one wins."""
        winners = []
        for _ in range(5):
            receiving, sending = os.pipe()
            children = []
            for number in range(4):
                child = os.fork()
                if not child:
                    with contextlib.suppress(OSError):
                        os.mkdir(top / "race")
                        os.write(sending, bytes([number]))
                    os._exit(0)
                children.append(child)
            for child in children:
                os.waitpid(child, 0)
            os.close(sending)
            winners.append(len(os.read(receiving, 10)))
            os.close(receiving)
            os.rmdir(top / "race")
        return winners

    works = [sizes, exclusive, races]
    parity.check([Case(work.__name__, build, work) for work in works], state)


def test_locks(parity: Parity, state: State) -> None:
    def flock(top: Path) -> object:
        def try_lock(how: int) -> object:
            with opened(top / "file") as fd:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
                return "locked"

        seen: list[object] = []
        with opened(top / "file") as fd:
            for how in (fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN):
                fcntl.flock(fd, how)
                seen += [elsewhere(lambda: try_lock(fcntl.LOCK_EX))]
                seen += [elsewhere(lambda: try_lock(fcntl.LOCK_SH))]
                seen += [attempt(try_lock, fcntl.LOCK_EX)]
            fcntl.flock(fd, fcntl.LOCK_EX)
        return [*seen, elsewhere(lambda: try_lock(fcntl.LOCK_EX))]

    def ranges(top: Path) -> object:
        def try_lock(how: int, start: int, length: int) -> object:
            with opened(top / "file") as fd:
                fcntl.lockf(fd, how | fcntl.LOCK_NB, length, start)
                return "locked"

        seen: list[object] = []
        with opened(top / "file") as fd:
            fcntl.lockf(fd, fcntl.LOCK_EX, 10, 100)
            fcntl.lockf(fd, fcntl.LOCK_SH, 10, 1073741824)
            for start in (90, 95, 105, 110, 1073741824):
                for how in (fcntl.LOCK_EX, fcntl.LOCK_SH):
                    seen += [elsewhere(functools.partial(try_lock, how, start, 10))]
            # Closing another descriptor of the file lets a process's locks go.
            os.close(os.open(top / "file", os.O_RDONLY))
            seen += [elsewhere(lambda: try_lock(fcntl.LOCK_EX, 100, 10))]
        return seen

    def of_descriptions(top: Path) -> object:
        def lock(fd: int, command: int, how: int) -> object:
            fcntl.fcntl(fd, command, struct.pack("hhqqi4x", how, 0, 0, 0, 0))
            return "locked"

        set_lock = fcntl.F_OFD_SETLK
        with opened(top / "file") as first, opened(top / "file") as second:
            seen = [attempt(lock, first, set_lock, fcntl.F_WRLCK)]
            seen += [attempt(lock, second, set_lock, fcntl.F_WRLCK)]
            os.rename(top / "file", top / "moved")
            seen += [attempt(lock, second, set_lock, fcntl.F_RDLCK)]
            seen += [attempt(lock, first, set_lock, fcntl.F_UNLCK)]
            return [*seen, attempt(lock, second, set_lock, fcntl.F_RDLCK)]

    def freed_by_death(top: Path) -> object:
        ready, sending = os.pipe()
        child = os.fork()
        if not child:
            with contextlib.suppress(OSError), opened(top / "file") as fd:
                fcntl.flock(fd, fcntl.LOCK_EX)
                fcntl.lockf(fd, fcntl.LOCK_EX)
                os.write(sending, b"x")
                while True:
                    os.read(os.open("/dev/zero", os.O_RDONLY), 1)
            os._exit(1)
        os.close(sending)
        os.read(ready, 1)
        os.close(ready)
        with opened(top / "file") as fd:
            seen = [attempt(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)]
            os.kill(child, 9)
            os.waitpid(child, 0)
            fcntl.flock(fd, fcntl.LOCK_EX)
            fcntl.lockf(fd, fcntl.LOCK_EX)
        return seen

    works = [flock, ranges, of_descriptions, freed_by_death]
    parity.check([Case(work.__name__, build, work) for work in works], state)


def test_fifos_and_sockets(parity: Parity) -> None:
    """They work on this host, and never reach the share."""

    def fifo(top: Path) -> object:
        os.mkfifo(top / "fifo", 0o640)
        child = os.fork()
        if not child:
            with contextlib.suppress(OSError):
                (top / "fifo").write_bytes(b"through the fifo")
            os._exit(0)
        received = (top / "fifo").read_bytes()
        os.waitpid(child, 0)
        os.rename(top / "fifo", top / "renamed")
        seen = [received, oct(os.stat(top / "renamed").st_mode)]
        os.link(top / "renamed", top / "second")
        os.unlink(top / "renamed")
        return [*seen, os.stat(top / "second").st_nlink]

    def sockets(top: Path) -> object:
        os.chdir(top)
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind("socket")
            server.listen()
            client.connect("socket")
            connection, _ = server.accept()
            with connection:
                client.sendall(b"through the socket")
                seen: list[object] = [connection.recv(100), oct(os.stat("socket").st_mode)]
        with socket.socket(socket.AF_UNIX) as other:
            seen += [attempt(other.bind, "socket"), attempt(other.connect, "socket")]
            os.unlink("socket")
            seen += [attempt(other.connect, "socket"), attempt(other.bind, "socket")]
        return seen

    before = os.getcwd()
    try:
        cases = [Case(work.__name__, build, work) for work in (fifo, sockets)]
        parity.check(cases, "dirty")
    finally:
        os.chdir(before)


def test_inode_numbers_and_times_outlive_a_flush(parity: Parity, state: State) -> None:
    """Nothing that a program remembers of a file changes because it reaches the share."""

    def build_all(top: Path) -> None:
        build(top)
        (top / "dir").mkdir()
        (top / "link").symlink_to("file")
        os.utime(top / "dir", ns=(1, 123_456_789_123))

    ((place, _, _),) = parity.build([Case("x", build_all, lambda top: None)], state)
    (place / "new").write_bytes(b"new")
    with open(place / "file", "ab") as file:
        file.write(b"more")

    def identity() -> dict[str, list[int]]:
        found = {}
        with os.scandir(place) as entries:
            for entry in entries:
                st = entry.stat(follow_symlinks=False)
                found[entry.name] = [entry.inode(), st.st_ino, st.st_mode, st.st_mtime_ns]
        return found

    before = identity()
    assert sorted(before) == ["dir", "file", "link", "new"]
    assert all(found[0] == found[1] for found in before.values())
    with opened(place / "file", os.O_RDONLY) as fd:
        parity.flush(place.parent.name)
        assert identity() == before
        # What the kernel was told and what the share was asked must be asked again.
        expired = time.monotonic() + 5 * TTL
        wait_until(lambda: time.monotonic() > expired, "attributes and listings expire")
        identity()
        wait_until(lambda: identity() == before, "a listing changed nothing")
        assert os.fstat(fd).st_ino == before["file"][0]
    if state == "dirty":
        # What other tests have left need not arrive.
        assert parity.mount.umount("--no-drain").returncode in (0, 3)
        parity.mount.remount()
        assert identity() == before


def test_statfs(parity: Parity) -> None:
    """The share's figures, never zeros."""
    found, native = os.statvfs(parity.mount.path), os.statvfs(parity.native)
    assert (found.f_frsize, found.f_blocks, found.f_namemax) == (
        native.f_frsize,
        native.f_blocks,
        255,
    )
    assert 0 < found.f_bavail <= found.f_blocks and 0 < found.f_ffree <= found.f_files
