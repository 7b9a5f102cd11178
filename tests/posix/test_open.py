"""Every way to open a file, and what can be done with the descriptor then."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.posix.parity import Case, Parity, State, attempt

DATA = b"0123456789" * 20


def _linked(top: Path) -> None:
    (top / "file").write_bytes(DATA)
    (top / "link").symlink_to("file")


def _linked_directory(top: Path) -> None:
    (top / "directory").mkdir()
    (top / "to-directory").symlink_to("directory")


MADE: dict[str, Callable[[Path], object]] = {
    "file": lambda top: (top / "file").write_bytes(DATA),
    "void": lambda top: (top / "void").touch(),
    "directory": lambda top: (top / "directory").mkdir(),
    "link": _linked,
    "dangling": lambda top: os.symlink("new", top / "dangling"),
    "to-directory": _linked_directory,
    "missing": lambda top: None,
    "file/x": lambda top: (top / "file").write_bytes(DATA),
}
"""What can be opened, and how it is made."""


def build_file(top: Path) -> None:
    """Only a file."""
    (top / "file").write_bytes(DATA)


ACCESS = {"r": os.O_RDONLY, "w": os.O_WRONLY, "rw": os.O_RDWR}
FLAGS = {
    "create": os.O_CREAT,
    "excl": os.O_EXCL,
    "trunc": os.O_TRUNC,
    "append": os.O_APPEND,
    "directory": os.O_DIRECTORY,
    "nofollow": os.O_NOFOLLOW,
    "path": os.O_PATH,
    "dsync": os.O_DSYNC,
    "noatime": os.O_NOATIME,
}


def use(path: str, flags: int) -> list[object]:
    """Open, then try everything once."""
    descriptor = os.open(path, flags, 0o640)
    try:
        return [
            attempt(os.pread, descriptor, 15, 3),
            attempt(os.read, descriptor, 5),
            attempt(os.write, descriptor, b"ABC"),
            attempt(os.pwrite, descriptor, b"xyz", 100),
            attempt(os.lseek, descriptor, 0, os.SEEK_CUR),
            attempt(os.ftruncate, descriptor, 150),
            attempt(os.write, descriptor, b"end"),
            attempt(os.lseek, descriptor, 0, os.SEEK_END),
            attempt(os.fsync, descriptor),
            attempt(lambda: fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~0o100000),
            attempt(lambda: os.fstat(descriptor).st_size),
        ]
    finally:
        os.close(descriptor)


COMBINATIONS = [
    (),
    *((name,) for name in FLAGS if name != "excl"),
    *(("create", name) for name in ("excl", "trunc", "append", "nofollow", "noatime")),
    *(("trunc", name) for name in ("append", "nofollow", "dsync", "directory")),
    *(("path", name) for name in ("directory", "nofollow")),
    ("create", "excl", "trunc"),
    ("create", "trunc", "append"),
]


def test_open_flags(parity: Parity, state: State) -> None:
    cases = []
    for place, how, names in itertools.product(MADE, ACCESS, COMBINATIONS):
        flags = functools.reduce(int.__or__, (FLAGS[name] for name in names), ACCESS[how])
        call = _only_open if place in ("directory", "to-directory") else use
        cases.append(
            Case(
                f"{place} {how} {' '.join(names)}",
                MADE[place],
                functools.partial(_call, call, place, flags),
            )
        )
    parity.check(cases if state == "dirty" else cases[::3], state)


def _call(call: Callable[[str, int], object], place: str, flags: int, top: Path) -> object:
    return call(f"{top}/{place}", flags)


def _only_open(path: str, flags: int) -> object:
    os.close(os.open(path, flags))
    return "opened"


@pytest.mark.parametrize("prepare", ["as it is", "written first", "truncated first"])
def test_calls_on_one_descriptor(parity: Parity, state: State, prepare: str) -> None:
    """Sequences on one file whose bytes are in any state."""

    def opened(flags: int, work: Callable[[int], object]) -> Callable[[Path], object]:
        def call(top: Path) -> object:
            descriptor = os.open(top / "file", flags)
            try:
                if prepare == "written first":
                    os.pwrite(descriptor, b"written", 50)
                elif prepare == "truncated first":
                    os.ftruncate(descriptor, 77)
                return [work(descriptor), os.pread(descriptor, 1 << 20, 0)]
            finally:
                os.close(descriptor)

        return call

    def truncations(fd: int) -> object:
        seen: list[object] = []
        for size in (10, 300, 0, 5000, 4095, 1 << 20, 3):
            os.ftruncate(fd, size)
            seen += [os.fstat(fd).st_size, os.pread(fd, 400, 0).hex()]
        return seen

    def holes(fd: int) -> object:
        os.pwrite(fd, b"far", 100_000)
        return [os.pread(fd, 10, 99_990), os.pread(fd, 300, 150), os.fstat(fd).st_size]

    def past_the_end(fd: int) -> object:
        return [
            attempt(os.pread, fd, 10, 10_000),
            attempt(os.lseek, fd, -1, os.SEEK_SET),
            attempt(os.lseek, fd, 10_000, os.SEEK_SET),
            os.read(fd, 5),
            os.write(fd, b"there"),
            os.fstat(fd).st_size,
            attempt(os.ftruncate, fd, -1),
            attempt(os.pwrite, fd, b"x", -1),
            attempt(os.pwrite, fd, b"", 1 << 40),
            os.fstat(fd).st_size,
        ]

    def interleaved(fd: int) -> object:
        seen = []
        for number in range(40):
            os.pwrite(fd, bytes([number]) * 3, number * 5)
            seen.append(os.pread(fd, 7, number * 5 - 2 if number else 0))
        return seen

    def vectors(fd: int) -> object:
        buffers = [bytearray(3), bytearray(100), bytearray(5)]
        written = os.pwritev(fd, [b"one", b"", b"two" * 50, b"three"], 30)
        return [written, os.preadv(fd, buffers, 28), buffers]

    def in_kernel(fd: int) -> object:
        at = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            return [
                attempt(os.copy_file_range, fd, at, 40, 0, 500),
                os.pread(at, 60, 490),
                attempt(os.posix_fallocate, at, 0, 700),
                os.fstat(at).st_size,
                attempt(os.lseek, fd, 0, os.SEEK_DATA),
                attempt(os.lseek, fd, 10_000, os.SEEK_HOLE),
                attempt(os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED),
                os.pread(fd, 60, 490),
            ]
        finally:
            os.close(at)

    works = [truncations, holes, past_the_end, interleaved, vectors, in_kernel]
    cases = [Case(w.__name__, build_file, opened(os.O_RDWR, w)) for w in works]
    cases += [
        Case(f"{w.__name__} appending", build_file, opened(os.O_RDWR | os.O_APPEND, w))
        for w in works
    ]
    parity.check(cases, state)


def test_unlinked_while_open(parity: Parity, state: State) -> None:
    def with_open(remove: Callable[[Path], object]) -> Callable[[Path], object]:
        def call(top: Path) -> object:
            fd = os.open(top / "file", os.O_RDWR)
            try:
                early = os.pread(fd, 5, 10)
                remove(top)
                seen: list[object] = [early, os.fstat(fd).st_nlink, os.fstat(fd).st_size]
                seen += [os.pread(fd, 400, 0), os.pwrite(fd, b"new", 190), os.pread(fd, 400, 5)]
                os.ftruncate(fd, 50)
                seen += [os.fstat(fd).st_size, os.pread(fd, 400, 0)]
                os.ftruncate(fd, 90)
                os.fchmod(fd, 0o600)
                os.utime(fd, (5, 6))
                seen += [os.pread(fd, 400, 0), os.fstat(fd).st_mode, os.fstat(fd).st_mtime]
                seen += [attempt(os.fsync, fd), attempt(os.path.getsize, top / "file")]
                return seen
            finally:
                os.close(fd)

        return call

    def replace(top: Path) -> None:
        (top / "temporary").write_bytes(b"the replacement")
        os.replace(top / "temporary", top / "file")

    def make_again(top: Path) -> None:
        os.unlink(top / "file")
        (top / "file").write_bytes(b"made again")

    cases = [
        Case("unlinked", build_file, with_open(lambda top: os.unlink(top / "file"))),
        Case("replaced", build_file, with_open(replace)),
        Case("made again", build_file, with_open(make_again)),
        Case("moved", build_file, with_open(lambda top: os.rename(top / "file", top / "moved"))),
    ]
    parity.check(cases, state)


def test_appending(parity: Parity, state: State) -> None:
    def two(top: Path) -> object:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        first, second = (os.open(top / "log", flags, 0o644) for _ in range(2))
        for number in range(50):
            os.write(first, b"a%d\n" % number)
            os.write(second, b"b%d\n" % number)
        sizes = [os.fstat(first).st_size, os.fstat(second).st_size]
        os.close(first)
        os.close(second)
        return [sizes, (top / "log").read_bytes()]

    def at_an_offset(top: Path) -> object:
        fd = os.open(top / "file", os.O_RDWR | os.O_APPEND)
        try:
            return [os.pwrite(fd, b"at an offset", 3), os.pread(fd, 500, 0)]
        finally:
            os.close(fd)

    def switched_on(top: Path) -> object:
        fd = os.open(top / "file", os.O_RDWR)
        try:
            os.write(fd, b"1")
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
            os.write(fd, b"2")
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
            os.pwrite(fd, b"3", 7)
            return os.pread(fd, 500, 0)
        finally:
            os.close(fd)

    def reopened(top: Path) -> object:
        for number in range(30):
            with open(top / "file", "ab") as file:
                file.write(b"line %d\n" % number)
        return os.stat(top / "file").st_size

    works = [two, at_an_offset, switched_on, reopened]
    parity.check([Case(w.__name__, build_file, w) for w in works], state)


@pytest.mark.parametrize("how", ["unlink", "replace", "replace by a link"])
def test_a_reader_keeps_what_a_flush_takes_away(parity: Parity, state: State, how: str) -> None:
    """The share gets the change while the file is open and was not read yet."""
    ((place, _, shared),) = parity.build([Case("file", build_file, lambda top: None)], state)
    fd = os.open(place / "file", os.O_RDWR)
    try:
        if how == "unlink":
            os.unlink(place / "file")
        elif how == "replace":
            (place / "new").write_bytes(b"new")
            os.replace(place / "new", place / "file")
        else:
            (place / "new").symlink_to("elsewhere")
            os.replace(place / "new", place / "file")
        parity.flush(place.parent.name)
        assert not (shared / "file").exists() or (shared / "file").read_bytes() == b"new"
        assert os.pread(fd, 1000, 0) == DATA
        os.pwrite(fd, b"x", 5)
        assert os.pread(fd, 10, 0) == b"01234x6789"
    finally:
        os.close(fd)


def test_inode_numbers_are_never_used_twice(parity: Parity) -> None:
    place, _ = parity.fresh()
    seen = []
    for _ in range(100):
        (place / "file").touch()
        seen.append(os.stat(place / "file").st_ino)
        os.unlink(place / "file")
    assert len(set(seen)) == 100
