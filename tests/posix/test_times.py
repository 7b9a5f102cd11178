"""Which times each call changes, of what it is made on and of the directory that this is in."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.posix.kernel import RENAME_EXCHANGE, renameat2
from tests.posix.parity import Case, Parity, State, attempt
from tests.waiting import wait_until

CLOCK_STEP = 20_000_000
"""Nanoseconds after which a disk's clock has surely moved on."""


def _descriptor(top: Path, flags: int, work: Callable[[int], object]) -> None:
    fd = os.open(top, flags, 0o644)
    try:
        work(fd)
    finally:
        os.close(fd)


def _store(fd: int) -> None:
    with mmap.mmap(fd, 0) as mapping:
        mapping[0] = 65
        mapping.flush()


def on(name: str, flags: int, work: Callable[[int], object]) -> Callable[[Path], object]:
    return lambda top: _descriptor(top / name, flags, work)


RW = os.O_RDWR
OPERATIONS: dict[str, Callable[[Path], object]] = {
    "open": on("file", RW, lambda fd: None),
    "write": on("file", RW, lambda fd: os.write(fd, b"x")),
    "write nothing": on("file", RW, lambda fd: os.write(fd, b"")),
    "write the same": on("file", RW, lambda fd: os.write(fd, b"some")),
    "append": on("file", RW | os.O_APPEND, lambda fd: os.write(fd, b"x")),
    "store": on("file", RW, _store),
    "read": lambda top: (top / "file").read_bytes(),
    "cut": on("file", RW, lambda fd: os.ftruncate(fd, 3)),
    "extend": on("file", RW, lambda fd: os.ftruncate(fd, 300)),
    "truncate to the same": lambda top: os.truncate(top / "file", 10),
    "open and truncate": on("file", RW | os.O_TRUNC, lambda fd: None),
    "open and truncate what is empty": on("empty", RW | os.O_TRUNC, lambda fd: None),
    "truncate what is empty": lambda top: os.truncate(top / "empty", 0),
    "create what is there": on("file", RW | os.O_CREAT, lambda fd: None),
    "create": lambda top: (top / "new").touch(),
    "mkdir": lambda top: (top / "new").mkdir(),
    "symlink": lambda top: (top / "new").symlink_to("file"),
    "mkdir in a directory": lambda top: (top / "directory/new").mkdir(),
    "in vain": lambda top: attempt(os.mkdir, top / "directory"),
    "link": lambda top: os.link(top / "file", top / "new"),
    "unlink": lambda top: os.unlink(top / "file"),
    "unlink one of two": lambda top: os.unlink(top / "second"),
    "rmdir": lambda top: os.rmdir(top / "hollow"),
    "rename": lambda top: os.rename(top / "file", top / "new"),
    "rename over": lambda top: os.rename(top / "file", top / "empty"),
    "rename over one of two": lambda top: os.rename(top / "empty", top / "second"),
    "rename to itself": lambda top: os.rename(top / "file", top / "file"),
    "rename to its other name": lambda top: os.rename(top / "first", top / "second"),
    "rename into": lambda top: os.rename(top / "file", top / "directory/new"),
    "rename a directory": lambda top: os.rename(top / "hollow", top / "directory/new"),
    "rename a link": lambda top: os.rename(top / "link", top / "new"),
    "exchange": lambda top: renameat2(top / "file", top / "directory", RENAME_EXCHANGE),
    "exchange between directories": lambda top: renameat2(
        top / "empty", top / "directory/inside", RENAME_EXCHANGE
    ),
    "chmod": lambda top: os.chmod(top / "file", 0o600),
    "chmod to the same": lambda top: os.chmod(top / "file", 0o644),
    "chown": lambda top: os.chown(top / "file", 5, 5),
    "chown to the same": lambda top: os.chown(top / "file", 0, 0),
    "chown to nobody": lambda top: os.chown(top / "file", -1, -1),
    "lchown": lambda top: os.chown(top / "link", 5, 5, follow_symlinks=False),
    "utime": lambda top: os.utime(top / "file", ns=(5 * 10**17, 6 * 10**17)),
    "touch": lambda top: os.utime(top / "file"),
    "set an attribute": lambda top: os.setxattr(top / "file", "user.x", b"1"),
    "remove an attribute": lambda top: os.removexattr(top / "directory", "user.old"),
    "fsync": on("file", RW, os.fsync),
    "list": lambda top: os.listdir(top / "directory"),
    "copy a range": on("file", RW, lambda fd: os.copy_file_range(fd, fd, 3, 0, 5)),
}

NAMES = (
    *("", "file", "first", "second", "empty", "directory", "directory/inside", "directory/new"),
    *("hollow", "link", "new"),
)


TWO_NAMES = ("unlink one of two", "rename over one of two", "rename to its other name")
"""On the share alone a file's second name is a file of its own."""


def build(operations: Sequence[str], top: Path) -> None:
    for name in operations:
        place = top / name
        place.mkdir()
        (place / "file").write_bytes(b"some bytes")
        (place / "empty").touch()
        (place / "first").write_bytes(b"two names")
        if name in TWO_NAMES:
            os.link(place / "first", place / "second")
        (place / "directory").mkdir()
        (place / "directory/inside").write_bytes(b"inside")
        os.setxattr(place / "directory", "user.old", b"1")
        (place / "hollow").mkdir()
        (place / "link").symlink_to("file")


def snapshot(place: Path) -> dict[str, tuple[int, int, int]]:
    """Inode number, modification and change time of everything."""
    found = {}
    for name in NAMES:
        with contextlib.suppress(FileNotFoundError):
            st = os.lstat(place / name)
            found[name] = (st.st_ino, st.st_mtime_ns, st.st_ctime_ns)
    return found


def call(operations: Sequence[str], top: Path) -> object:
    before = {name: snapshot(top / name) for name in operations}
    began = time.time_ns()
    wait_until(lambda: time.time_ns() > began + CLOCK_STEP, "the clock moves on")
    for name in operations:
        OPERATIONS[name](top / name)
    changed: dict[str, list[str]] = {}
    for operation in operations:
        # Things keep their times under another name.
        old = {ino: times for ino, *times in before[operation].values()}
        changed[operation] = []
        for name, (ino, *times) in snapshot(top / operation).items():
            if ino in old:
                letters = zip("mc", times, old[ino], strict=True)
                what = "".join(letter for letter, now, then in letters if now != then)
                changed[operation] += [f"{name}: {what}"] if what else []
    return changed


def test_looking_at_a_directory_changes_nothing(parity: Parity, state: State) -> None:
    """Its times stay as they are on the share, or as they were set, when it is listed first."""

    def build_all(top: Path) -> None:
        for name in ("looked at", "set"):
            (top / name / "below").mkdir(parents=True)
            (top / name / "file").touch()
            os.utime(top / name, ns=(10**17, 10**17))

    def look(top: Path) -> object:
        os.utime(top / "set", ns=(10**17, 2 * 10**17))
        seen = []
        for name in ("looked at", "set"):
            for _ in range(2):
                seen += [os.stat(top / name).st_mtime_ns, sorted(os.listdir(top / name))]
                seen += [os.stat(top / name / "below").st_nlink > 0]
        return seen

    parity.check([Case("looking", build_all, look)], state)


def test_which_times_change(parity: Parity, state: State) -> None:
    names = [name for name in OPERATIONS if state != "share" or name not in TWO_NAMES]
    case = Case("times", functools.partial(build, names), functools.partial(call, names))
    parity.check([case], state)
