"""System calls that `os` does not have, or not with all that they can do.

Each raises OSError, as those of `os` do. Flags and numbers are Linux's.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import NamedTuple

AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_SYMLINK_FOLLOW = 0x400
AT_EMPTY_PATH = 0x1000

RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4

UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2

AT_STATX_FORCE_SYNC, AT_STATX_DONT_SYNC = 0x2000, 0x4000
STATX_BASIC_STATS, STATX_BTIME = 0x7FF, 0x800

Path = str | bytes | os.PathLike[str]

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Handle(NamedTuple):
    """What name_to_handle_at knows a file by."""

    kind: int
    data: bytes


def invoke(name: str, *arguments: object) -> int:
    """Call a function of the C library; -1 becomes an OSError."""
    result = int(getattr(_libc, name)(*arguments))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def renameat2(old: Path, new: Path, flags: int) -> None:
    """Rename with flags."""
    invoke("renameat2", AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags)


def linkat(source: int, old: Path, new: Path, flags: int) -> None:
    """Link what is found from a descriptor."""
    invoke("linkat", source, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags)


def utimensat(path: Path, access: tuple[int, int], change: tuple[int, int], flags: int = 0) -> None:
    """Set times, as (seconds, nanoseconds); the latter may be UTIME_NOW or UTIME_OMIT."""
    times = (_Timespec * 2)(_Timespec(*access), _Timespec(*change))
    invoke("utimensat", AT_FDCWD, os.fsencode(path), times, flags)


def fallocate(fd: int, mode: int, start: int, length: int) -> None:
    """Allocate, punch or shift, without glibc's emulation."""
    invoke("fallocate", fd, mode, ctypes.c_int64(start), ctypes.c_int64(length))


def sync_file_range(fd: int, start: int, length: int, flags: int) -> None:
    """Begin or await the writing of pages."""
    invoke("sync_file_range", fd, ctypes.c_int64(start), ctypes.c_int64(length), flags)


def readahead(fd: int, start: int, length: int) -> None:
    """Have pages read."""
    invoke("readahead", fd, ctypes.c_int64(start), ctypes.c_size_t(length))


def getxattr(path: Path, name: str, room: int) -> bytes | int:
    """A value that fits into ``room`` bytes; for no room, its length."""
    buffer = ctypes.create_string_buffer(max(room, 1))
    length = invoke("getxattr", os.fsencode(path), name.encode(), buffer, ctypes.c_size_t(room))
    return buffer.raw[:length] if room else length


def listxattr(path: Path, room: int) -> int:
    """The length of the list of names, which has to fit into ``room`` bytes if there is any."""
    buffer = ctypes.create_string_buffer(max(room, 1))
    return invoke("listxattr", os.fsencode(path), buffer, ctypes.c_size_t(room))


def setxattr(path: Path, name: str, value: bytes, flags: int = 0) -> None:
    """Set an attribute; ``flags`` may be ones that do not exist."""
    size = ctypes.c_size_t(len(value))
    invoke("setxattr", os.fsencode(path), name.encode(), value, size, flags)


class Statx(NamedTuple):
    """What statx(2) tells: the part that does not depend on the disk."""

    mask: int
    attributes: int
    """Immutable, append-only and the like."""
    nlink: int
    uid: int
    gid: int
    mode: int
    size: int
    mtime_ns: int


_STATX = struct.Struct("=I4xQIIIH10xQ16x16x16x16xqI4x")


def statx(path: Path, wanted: int, flags: int = 0) -> Statx:
    """Attributes of a file, and which of the wanted ones it has."""
    buffer = ctypes.create_string_buffer(256)
    invoke("statx", AT_FDCWD, os.fsencode(path), flags, wanted, buffer)
    found = _STATX.unpack_from(buffer)
    return Statx._make((*found[:7], found[7] * 10**9 + found[8]))


def filesystem_type(path: Path) -> int:
    """The magic number of the file system that a path is on."""
    buffer = ctypes.create_string_buffer(256)
    invoke("statfs", os.fsencode(path), buffer)
    return int.from_bytes(buffer.raw[:8], "little")


def name_to_handle(path: Path) -> Handle:
    """What a file can be opened by later, without its name."""
    room = 128
    buffer = ctypes.create_string_buffer(room.to_bytes(4, "little"), 8 + room)
    mount = ctypes.c_int()
    invoke("name_to_handle_at", AT_FDCWD, os.fsencode(path), buffer, ctypes.byref(mount), 0)
    length = int.from_bytes(buffer.raw[:4], "little")
    return Handle(int.from_bytes(buffer.raw[4:8], "little"), buffer.raw[8 : 8 + length])


def open_by_handle(mount: int, handle: Handle, flags: int) -> int:
    """Open a file by its handle; ``mount`` is a descriptor of anything on its mount."""
    head = len(handle.data).to_bytes(4, "little") + handle.kind.to_bytes(4, "little")
    return invoke("open_by_handle_at", mount, head + handle.data, flags)
