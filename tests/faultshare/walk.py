"""Random operations on a few names, to compare two directories or to fill one."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faultshare.backing import renameat2

NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
AT_FDCWD = -100


def outcome(call: Callable[[Path], Any], root: Path) -> Any:
    """What a call below *root* returned, or the name of its errno."""
    try:
        return call(root)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def rename_with(flags: int, old: Path, new: Path) -> None:
    renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags)


def write_at(path: Path, offset: int, data: bytes, flags: int = 0) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | flags, 0o640)  # a fifo would block
    try:
        return os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def append(path: Path, data: bytes) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)


def read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def status(path: Path) -> tuple[Any, ...]:
    st = path.lstat()
    is_directory = stat.S_ISDIR(st.st_mode)
    return st.st_mode, st.st_nlink, None if is_directory else st.st_size


class Walk:
    """Random operations over a few names, the same for every root that is given one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = [f"{d}{n}" for d in ("", "d/", "e/", "d/x/") for n in ("a", "b", "x", "é")]
        self.names += ["d", "e"]

    def step(self) -> tuple[str, Callable[[Path], Any]]:
        rnd = self.random
        one, two = rnd.choice(self.names), rnd.choice(self.names)
        offset, data = rnd.randrange(0, 9000), rnd.randbytes(rnd.choice([1, 100, 5000]))
        mode, flags = (
            rnd.choice([0o600, 0o644, 0o755, 0o1777]),
            rnd.choice([0, NOREPLACE, EXCHANGE]),
        )
        ns = rnd.randrange(10**18, 2 * 10**18)
        steps: dict[str, Callable[[Path], Any]] = {
            f"write {one} @{offset}": lambda r: write_at(r / one, offset, data, os.O_CREAT),
            f"excl {one}": lambda r: write_at(r / one, 0, data, os.O_CREAT | os.O_EXCL),
            f"rewrite {one}": lambda r: write_at(r / one, 0, data, os.O_CREAT | os.O_TRUNC),
            f"append {one}": lambda r: append(r / one, data),
            f"truncate {one} {offset}": lambda r: os.truncate(r / one, offset),
            f"mkdir {one}": lambda r: os.mkdir(r / one, 0o750),
            f"mkdir {one} again": lambda r: os.mkdir(r / one, 0o750),
            f"rmdir {one}": lambda r: os.rmdir(r / one),
            f"unlink {one}": lambda r: os.unlink(r / one),
            f"rename {one} {two}": lambda r: os.rename(r / one, r / two),
            f"rename {one} {two} {flags}": lambda r: rename_with(flags, r / one, r / two),
            f"link {one} {two}": lambda r: os.link(r / one, r / two, follow_symlinks=False),
            f"symlink {one}": lambda r: os.symlink("../" + two, r / one),
            f"readlink {one}": lambda r: os.readlink(r / one),
            f"chmod {one} {mode:o}": lambda r: os.chmod(r / one, mode),
            f"utime {one}": lambda r: os.utime(r / one, ns=(ns, ns), follow_symlinks=False),
            f"mtime {one}": lambda r: (r / one).lstat().st_mtime_ns == ns,
            f"stat {one}": lambda r: status(r / one),
            f"list {one}": lambda r: sorted(os.listdir(r / one)),
            f"read {one}": lambda r: read(r / one),
            f"setxattr {one}": lambda r: os.setxattr(r / one, "user.k", data[:50]),
            f"getxattr {one}": lambda r: os.getxattr(r / one, "user.k"),
            f"fifo {one}": lambda r: os.mkfifo(r / one, 0o620),
        }
        return rnd.choice(list(steps.items()))


def start(root: Path) -> None:
    """Make the directories that the names of a walk lie in."""
    (root / "d/x").mkdir(parents=True)
    (root / "e").mkdir()
