"""Lengths and offsets: negative, huge, on the wrong kind of thing, and past a process's limit."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from tests.descriptors import opened
from tests.posix.kernel import fallocate
from tests.posix.parity import Case, Parity, State, attempt
from wbcache.probe import within

DATA = b"0123456789" * 20
HUGE = 1 << 45
"""More than a file of ext4 can have, in bytes."""
LAST = (1 << 63) - 1


def build(top: Path) -> None:
    (top / "file").write_bytes(DATA)
    (top / "directory").mkdir()
    (top / "link").symlink_to("file")
    (top / "dangling").symlink_to("nowhere")
    (top / "circle").symlink_to("circle")


def cases(*calls: Callable[[Path], object]) -> list[Case]:
    return [Case(call.__name__, build, call) for call in calls]


def test_truncating(parity: Parity, state: State) -> None:
    def by_name(top: Path) -> object:
        seen: list[object] = []
        places = ("link", "directory", "dangling", "circle", "missing", "file/x", "file/", "file")
        for place in places:
            for size in (-1, 0, 5, 300, 1 << 40, HUGE, LAST, 7):
                seen += [attempt(os.truncate, f"{top}/{place}", size)]
                seen += [os.stat(top / "file").st_size]
        return seen

    def by_descriptor(top: Path) -> object:
        seen: list[object] = []
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_PATH, os.O_WRONLY | os.O_APPEND):
            with opened(top / "file", flags) as fd:
                for size in (-5, 300, HUGE, LAST, 100):
                    seen += [attempt(os.ftruncate, fd, size), os.fstat(fd).st_size]
        with opened(top / "directory", os.O_RDONLY) as fd:
            seen += [attempt(os.ftruncate, fd, 0)]
        return [*seen, attempt(os.ftruncate, 1 << 20, 0)]

    parity.check(cases(by_name, by_descriptor), state)


def test_offsets(parity: Parity, state: State) -> None:
    def writing(top: Path) -> object:
        with opened(top / "file") as fd:
            seen = [attempt(os.pwrite, fd, b"x", at) for at in (-1, HUGE, LAST - 1, LAST)]
            seen += [attempt(os.pwrite, fd, b"", at) for at in (-1, HUGE, LAST)]
            seen += [attempt(os.pread, fd, 5, at) for at in (-1, 195, 199, 200, HUGE, LAST)]
            return [*seen, os.fstat(fd).st_size]

    def seeking(top: Path) -> object:
        seen: list[object] = []
        with opened(top / "file") as fd:
            for how in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END, os.SEEK_DATA, os.SEEK_HOLE, 9):
                for offset in (-300, -1, 0, 7, 199, 200, 201, 10**6):
                    seen += [attempt(os.lseek, fd, offset, how)]
                os.lseek(fd, 50, os.SEEK_SET)
            os.lseek(fd, 10, os.SEEK_END)
            os.write(fd, b"behind")
        return [*seen, (top / "file").read_bytes()]

    def allocating(top: Path) -> object:
        """What is wrong whatever a file system supports."""
        seen: list[object] = []
        with opened(top / "file") as fd:
            for start, length in ((-1, 10), (0, 0), (0, -5), (LAST, 10)):
                seen += [attempt(fallocate, fd, 0, start, length)]
                seen += [attempt(os.posix_fallocate, fd, start, length)]
            seen += [attempt(fallocate, fd, 1 << 20, 0, 10)]
        with opened(top / "file", os.O_RDONLY) as fd:
            seen += [attempt(fallocate, fd, 0, 0, 10), attempt(os.posix_fallocate, fd, 0, 10)]
        with opened(top / "directory", os.O_RDONLY) as fd:
            seen += [attempt(fallocate, fd, 0, 0, 10)]
        return [*seen, os.stat(top / "file").st_size]

    parity.check(cases(writing, seeking, allocating), state)


def test_a_process_s_limit(parity: Parity, state: State) -> None:
    """RLIMIT_FSIZE: the signal, the error, and what is written up to there."""

    def limited(top: Path) -> object:
        signals: list[int] = []

        def work() -> object:
            resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))
            signal.signal(signal.SIGXFSZ, lambda number, frame: signals.append(number))
            seen: list[object] = []
            with opened(top / "file") as fd:
                for offset, length in ((240, 10), (245, 10), (250, 1), (300, 0), (10, 5)):
                    seen += [attempt(os.pwrite, fd, b"w" * length, offset), len(signals)]
                for size in (250, 251, HUGE, 200):
                    seen += [attempt(os.ftruncate, fd, size), len(signals)]
                    seen += [attempt(os.truncate, top / "file", size), len(signals)]
                seen += [attempt(os.copy_file_range, fd, fd, 100, 0, 240), len(signals)]
                seen += [attempt(os.copy_file_range, fd, fd, 100, 0, 400), len(signals)]
            with opened(top / "file", os.O_WRONLY | os.O_APPEND) as fd:
                seen += [attempt(os.write, fd, b"a" * 100), attempt(os.write, fd, b"b")]
            with opened(top / "new", os.O_WRONLY | os.O_CREAT) as fd:
                seen += [attempt(os.write, fd, b"n" * 1000), attempt(os.write, fd, b"n")]
            return [*seen, len(signals)]

        return within(30, work)

    parity.check(cases(limited), state)
