"""Attributes as the share's server has them now, whatever its client remembers.

Clients of network file systems answer stat(2) from memory for seconds. Whether another writer has
changed a file must not be answered from there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_AT_SYMLINK_NOFOLLOW = 0x100
_AT_EMPTY_PATH = 0x1000
_AT_STATX_FORCE_SYNC = 0x2000
_STATX_BASIC_STATS = 0x7FF

_STATX = struct.Struct("=II8xIIIH2xQQ16xqI4x16xqI4xqI4x8xII")
"""struct statx up to the device: mask, block size, nlink, uid, gid, mode, inode number, size, and
seconds and nanoseconds of atime, ctime and mtime."""
_SIZE = 256

_libc = ctypes.CDLL(None, use_errno=True)
_UNKNOWN = (errno.ENOSYS, errno.EPERM, errno.EINVAL)
"""Answers of kernels and sandboxes that don't have the call."""


def lstat(directory: int, name: bytes) -> os.stat_result:
    """Attributes of a name in a directory (a descriptor)."""
    found = _statx(directory, name, _AT_SYMLINK_NOFOLLOW)
    return found or os.stat(name, dir_fd=directory, follow_symlinks=False)


def fstat(file: int) -> os.stat_result:
    """Attributes of an open file."""
    return _statx(file, b"", _AT_EMPTY_PATH) or os.fstat(file)


def _statx(descriptor: int, name: bytes, flags: int) -> os.stat_result | None:
    """None where the call does not exist."""
    call = getattr(_libc, "statx", None)
    if call is None:
        return None
    found = ctypes.create_string_buffer(_SIZE)
    flags |= _AT_STATX_FORCE_SYNC
    if call(descriptor, name, flags, _STATX_BASIC_STATS, found):
        code = ctypes.get_errno()
        if code in _UNKNOWN:
            return None
        raise OSError(code, os.strerror(code), os.fsdecode(name))
    _, _, nlink, uid, gid, mode, ino, size, *times, major, minor = _STATX.unpack_from(found)
    stamps = [times[i] * 10**9 + times[i + 1] for i in (0, 4, 2)]
    seconds = [stamp // 10**9 for stamp in stamps]
    return os.stat_result(
        (mode, ino, os.makedev(major, minor), nlink, uid, gid, size, *seconds),
        dict(zip(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), stamps, strict=True)),
    )
