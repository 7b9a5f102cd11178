"""inotify, as far as the tests need it."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ALL_EVENTS = 0xFFF
NAMES = {
    0x1: "ACCESS",
    0x2: "MODIFY",
    0x4: "ATTRIB",
    0x8: "CLOSE_WRITE",
    0x10: "CLOSE_NOWRITE",
    0x20: "OPEN",
    0x40: "MOVED_FROM",
    0x80: "MOVED_TO",
    0x100: "CREATE",
    0x200: "DELETE",
    0x400: "DELETE_SELF",
    0x800: "MOVE_SELF",
    0x2000: "UNMOUNT",
    0x4000: "Q_OVERFLOW",
    0x8000: "IGNORED",
    0x40000000: "ISDIR",
}

_HEAD = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class Event(NamedTuple):
    """Something that happened."""

    what: str
    """Names of `NAMES`, joined."""
    name: str
    cookie: int


class Watch:
    """Events of one file or directory."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def events(self) -> list[Event]:
        """What has happened since it was asked last."""
        found = []
        while select.select([self._fd], [], [], 0)[0]:
            data = os.read(self._fd, 1 << 16)
            while data:
                _, mask, cookie, length = _HEAD.unpack_from(data)
                name = data[_HEAD.size : _HEAD.size + length].rstrip(b"\0")
                data = data[_HEAD.size + length :]
                what = " ".join(text for bit, text in NAMES.items() if mask & bit)
                found.append(Event(what, os.fsdecode(name), cookie))
        return found

    def plain(self) -> list[tuple[str, str]]:
        """The same without the cookies, which differ from one time to the next."""
        return [(event.what, event.name) for event in self.events()]


@contextmanager
def watching(path: Path, mask: int = ALL_EVENTS) -> Iterator[Watch]:
    """Watch a path for the length of a block."""
    fd = _libc.inotify_init1(os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    try:
        if _libc.inotify_add_watch(fd, os.fsencode(path), mask) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")
        yield Watch(fd)
    finally:
        os.close(fd)
