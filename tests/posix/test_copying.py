"""Calls that move bytes within the kernel, and those that say how bytes are to be moved."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.descriptors import opened
from tests.posix.kernel import readahead, sync_file_range
from tests.posix.parity import Case, Parity, State, attempt

DATA = bytes(range(256)) * 80
FIGETBSZ = 2
HIPRI, DSYNC, SYNC, APPEND, UNKNOWN = 1, 2, 4, 16, 1 << 14


def build(top: Path) -> None:
    (top / "file").write_bytes(DATA)
    (top / "other").write_bytes(b"other")
    (top / "directory").mkdir()


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe for the length of a block."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)


def cases(*calls: Callable[[Path], object]) -> list[Case]:
    return [Case(call.__name__, build, call) for call in calls]


def test_copy_file_range(parity: Parity, state: State) -> None:
    def ranges(top: Path) -> object:
        seen: list[object] = []
        with opened(top / "file") as source, opened(top / "other") as target:
            for count, start, to in (
                *((100, 0, 0), (0, 0, 0), (100, len(DATA) - 10, 50), (10, len(DATA), 0)),
                *((10, 10**6, 0), (5000, 4090, 9000), (1 << 30, 0, 3)),
            ):
                seen += [attempt(os.copy_file_range, source, target, count, start, to)]
                seen += [os.fstat(target).st_size]
            seen += [attempt(os.copy_file_range, source, target, 10)]
            seen += [os.lseek(fd, 0, os.SEEK_CUR) for fd in (source, target)]
        return [*seen, (top / "other").read_bytes()]

    def within_one_file(top: Path) -> object:
        with opened(top / "file") as fd:
            seen = [attempt(os.copy_file_range, fd, fd, 100, 0, 50)]
            seen += [attempt(os.copy_file_range, fd, fd, 100, 0, 200)]
            seen += [attempt(os.copy_file_range, fd, fd, 100, 200, len(DATA))]
        return [*seen, (top / "file").read_bytes()]

    def unsuitable(top: Path) -> object:
        seen: list[object] = []
        modes = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_APPEND, os.O_PATH)
        for one, other in itertools.product(modes, modes):
            with opened(top / "file", one) as source, opened(top / "other", other) as target:
                seen += [attempt(os.copy_file_range, source, target, 4, 0, 0)]
        with opened(top / "directory", os.O_RDONLY) as directory, opened(top / "file") as file:
            seen += [attempt(os.copy_file_range, directory, file, 4, 0, 0)]
            seen += [attempt(os.copy_file_range, file, directory, 4, 0, 0)]
            with pipe() as (reading, writing):
                seen += [attempt(os.copy_file_range, file, writing, 4, 0)]
                seen += [attempt(os.copy_file_range, reading, file, 4)]
        return seen

    parity.check(cases(ranges, within_one_file, unsuitable), state)


def test_sendfile(parity: Parity, state: State) -> None:
    def between_files(top: Path) -> object:
        seen: list[object] = []
        with opened(top / "file") as source, opened(top / "new", os.O_RDWR | os.O_CREAT) as target:
            for offset, count in ((0, 10_000), (None, 50), (len(DATA) - 5, 100), (10**6, 5)):
                seen += [attempt(os.sendfile, target, source, offset, count)]
            seen += [os.lseek(fd, 0, os.SEEK_CUR) for fd in (source, target)]
            seen += [attempt(os.sendfile, target, source, -1, 5)]
        with opened(top / "file") as source, opened(top / "other", os.O_RDWR | os.O_APPEND) as log:
            seen += [attempt(os.sendfile, log, source, 0, 5)]
        with opened(top / "file", os.O_WRONLY) as source, opened(top / "other") as target:
            seen += [attempt(os.sendfile, target, source, 0, 5)]
            seen += [attempt(os.sendfile, source, source, 0, 5)]
        return [*seen, (top / "new").read_bytes(), (top / "other").read_bytes()]

    def through_a_pipe(top: Path) -> object:
        seen: list[object] = []
        with pipe() as (reading, writing), opened(top / "file") as file:
            seen += [os.sendfile(writing, file, 300, 40), os.read(reading, 100)]
            seen += [os.splice(file, writing, 5000, offset_src=100)]
            with opened(top / "new", os.O_RDWR | os.O_CREAT) as target:
                seen += [os.splice(reading, target, 5000, offset_dst=7)]
                os.write(writing, b"more")
                seen += [os.splice(reading, target, 100), os.pread(target, 6000, 0)]
            seen += [attempt(os.splice, file, writing, 10, offset_src=len(DATA))]
            seen += [attempt(os.splice, file, writing, 10, offset_dst=3)]
            os.write(writing, b"again")
            with opened(top / "other", os.O_WRONLY | os.O_APPEND) as log:
                seen += [attempt(os.splice, reading, log, 5)]
            with opened(top / "directory", os.O_RDONLY) as directory:
                seen += [attempt(os.splice, directory, writing, 5)]
        return seen

    parity.check(cases(between_files, through_a_pipe), state)


def test_flags_of_one_read_or_write(parity: Parity, state: State) -> None:
    def writing(top: Path) -> object:
        seen: list[object] = []
        for how in (os.O_RDWR, os.O_RDWR | os.O_APPEND):
            with opened(top / "other", how) as fd:
                for flags in (0, DSYNC, SYNC, APPEND, HIPRI, UNKNOWN):
                    for offset in (0, 3, -1):
                        seen += [attempt(os.pwritev, fd, [b"one", b"", b"two"], offset, flags)]
                        seen += [os.pread(fd, 1000, 0)]
        return seen

    def reading(top: Path) -> object:
        seen: list[object] = []
        with opened(top / "file") as fd:
            for flags in (0, DSYNC, APPEND, HIPRI, UNKNOWN):
                buffers = [bytearray(3), bytearray(0), bytearray(5)]
                seen += [attempt(os.preadv, fd, buffers, len(DATA) - 6, flags), buffers]
            seen += [attempt(os.readv, fd, [bytearray(1)] * 1025)]
            seen += [attempt(os.writev, fd, [b"x"] * 1025), attempt(os.writev, fd, [])]
        return seen

    parity.check(cases(writing, reading), state)


def test_advice_and_synchronisation(parity: Parity, state: State) -> None:
    def of_a_descriptor(top: Path) -> object:
        seen: list[object] = []
        flags = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_PATH)
        places = [("file", how) for how in flags] + [("directory", os.O_RDONLY)]
        for place, how in places:
            with opened(top / place, how) as fd:
                seen += [place, how]
                seen += [attempt(os.posix_fadvise, fd, 10, 500, advice) for advice in range(8)]
                seen += [attempt(os.posix_fadvise, fd, 0, -1, 0)]
                seen += [attempt(readahead, fd, 0, 1 << 20), attempt(readahead, fd, 1 << 40, 10)]
                for bits in (0, 1, 2, 4, 7, 8):
                    seen += [attempt(sync_file_range, fd, 0, 0, bits)]
                seen += [attempt(sync_file_range, fd, -1, 5, 2)]
                seen += [attempt(os.fsync, fd), attempt(os.fdatasync, fd)]
                seen += [attempt(fcntl.ioctl, fd, FIGETBSZ, bytes(4))]
                seen += [attempt(fcntl.ioctl, fd, termios.TCGETS, bytes(100))]
                if place == "file":
                    seen += [attempt(fcntl.ioctl, fd, termios.FIONREAD, bytes(4))]
        return seen

    def after_a_write(top: Path) -> object:
        with opened(top / "file") as fd:
            os.pwrite(fd, b"new", 5)
            for advice in (os.POSIX_FADV_DONTNEED, os.POSIX_FADV_WILLNEED):
                os.posix_fadvise(fd, 0, 0, advice)
            readahead(fd, 0, len(DATA))
            sync_file_range(fd, 0, 100, 7)
            return [os.pread(fd, 20, 0), os.pread(fd, 20, len(DATA) - 10)]

    parity.check(cases(of_a_descriptor, after_a_write), state)


def test_fcntl(parity: Parity, state: State) -> None:
    get_seals, set_pipe_size = 1034, 1031

    def commands(top: Path) -> object:
        seen: list[object] = []
        for place, how in (("file", os.O_RDONLY), ("file", os.O_RDWR), ("directory", os.O_RDONLY)):
            with opened(top / place, how | os.O_CLOEXEC) as fd:
                for command, argument in (
                    *((fcntl.F_GETFD, 0), (fcntl.F_SETFD, 0), (fcntl.F_GETFD, 0)),
                    *((fcntl.F_GETFL, 0), (fcntl.F_SETFL, os.O_NONBLOCK), (fcntl.F_GETFL, 0)),
                    *((fcntl.F_GETOWN, 0), (get_seals, 0), (set_pipe_size, 4096)),
                    *((fcntl.F_NOTIFY, 0), (9999, 0)),
                ):
                    seen += [attempt(fcntl.fcntl, fd, command, argument)]
        return seen

    def leases(top: Path) -> object:
        """Whoever holds one is asked before another process opens the file."""
        seen: list[object] = []
        for how in (os.O_RDONLY, os.O_WRONLY):
            with opened(top / "other", how) as fd:
                for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK):
                    seen += [attempt(fcntl.fcntl, fd, fcntl.F_SETLEASE, kind)]
                    seen += [attempt(fcntl.fcntl, fd, fcntl.F_GETLEASE)]
        return seen

    parity.check(cases(commands, leases), state)
