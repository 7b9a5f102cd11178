"""Every combination of open(2)'s flags with every kind of thing that a path can lead to."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.plain_user import PLAIN_UID
from tests.posix.parity import Case, Parity, State, attempt

DATA = b"0123456789" * 3
ACCESS = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_RDWR)
"""The last is none of them: such a descriptor can neither be read nor written."""

COMBINED = (
    *(os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_DIRECTORY, os.O_NOFOLLOW, os.O_PATH),
)
ALONE = (
    *(os.O_SYNC, os.O_DSYNC, os.O_RSYNC, os.O_NOATIME, os.O_NONBLOCK, os.O_NOCTTY, os.O_CLOEXEC),
    *(os.O_ASYNC, os.O_LARGEFILE),
)


def _all_flags() -> list[int]:
    found = []
    for count in range(len(COMBINED) + 1):
        for some in itertools.combinations(COMBINED, count):
            found.append(functools.reduce(int.__or__, some, 0))
    beside = (0, os.O_CREAT, os.O_CREAT | os.O_EXCL, os.O_TRUNC)
    return found + [one | other for one in ALONE for other in beside]


ALL = [access | flags for flags in _all_flags() for access in ACCESS]


def _file(path: Path) -> None:
    path.write_bytes(DATA)


def _of_the_user(path: Path) -> None:
    path.write_bytes(DATA)
    os.chown(path, PLAIN_UID, 0)
    path.chmod(0o640)


def _link_to(kind: Callable[[Path], object]) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        target = path.with_suffix(".target")
        kind(target)
        path.symlink_to(target.name)

    return make


def _nothing(path: Path) -> None:
    pass


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "file": (_file, ""),
    "a user's file": (_of_the_user, ""),
    "empty": (Path.touch, ""),
    "directory": (Path.mkdir, ""),
    "link": (_link_to(_file), ""),
    "link to a directory": (_link_to(Path.mkdir), ""),
    "dangling": (_link_to(_nothing), ""),
    "circle": (lambda path: path.symlink_to(path.name), ""),
    "missing": (_nothing, ""),
    "below a file": (_file, "/x"),
    "in a directory": (Path.mkdir, "/x"),
    "file and slash": (_file, "/"),
    "directory and slash": (Path.mkdir, "/"),
    "link and slash": (_link_to(Path.mkdir), "/"),
    "missing and slash": (_nothing, "/"),
    "fifo": (os.mkfifo, ""),
    "socket": (lambda path: os.mknod(path, stat.S_IFSOCK | 0o644), ""),
}
"""How it is made, and what is added to its name when it is opened."""

LOCAL_ONLY = ("fifo", "socket")
"""The share is never given them, and what others make of them there serves nobody."""


def opened(path: str, flags: int) -> object:
    """Open, and what the descriptor is good for."""
    fd = os.open(path, flags, 0o640)
    try:
        seen: list[object] = [fcntl.fcntl(fd, fcntl.F_GETFL), attempt(os.read, fd, 5)]
        seen += [attempt(os.write, fd, b"ABC"), attempt(os.read, fd, 2)]
        st = os.fstat(fd)
        return [*seen, oct(st.st_mode), st.st_size if stat.S_ISREG(st.st_mode) else 0]
    finally:
        os.close(fd)


def cases(state: State, combinations: Sequence[int]) -> list[Case]:
    """One for each kind; a combination has a name of its own in it."""

    def build(make: Callable[[Path], object]) -> Callable[[Path], object]:
        return lambda top: [make(top / str(n)) for n in range(len(combinations))]

    def call(kind: str, suffix: str) -> Callable[[Path], object]:
        # Opening a fifo without this waits for somebody at its other end.
        always = os.O_NONBLOCK if kind == "fifo" else 0

        def each(top: Path) -> object:
            found = {}
            for number, flags in enumerate(combinations):
                path = f"{top}/{number}{suffix}"
                found[oct(flags)] = attempt(opened, path, flags | always)
            return found

        return each

    return [
        Case(kind, build(make), call(kind, suffix))
        for kind, (make, suffix) in KINDS.items()
        if state != "share" or kind not in LOCAL_ONLY
    ]


def test_a_selection(parity: Parity, state: State) -> None:
    parity.check(cases(state, ALL[::23]), state)
    parity.check(cases(state, ALL[11::46]), state, user=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_them(parity: Parity, state: State) -> None:
    for user in (False, True):
        for start in range(16):
            parity.check(cases(state, ALL[start::16]), state, user=user)
