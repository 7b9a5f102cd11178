"""Mounting without a look at what is covered.

libfuse asks for the attributes of the mount point first, which never returns when SOURCE, whose
server hangs, is to be mounted over itself. The system call asks nobody: the root of a mount is in
the kernel's memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

_DEVICE = "/dev/fuse"
_libc = ctypes.CDLL(None, use_errno=True)

_FLAGS = {
    "ro": 1,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "noatime": 1 << 10,
    "nodiratime": 1 << 11,
    "relatime": 1 << 21,
}
_OPPOSITES = {"rw": "ro", "exec": "noexec", "atime": "noatime"}
_PASSED_ON = ("allow_other", "default_permissions")


def mount(source: str, mountpoint: str, options: Iterable[str]) -> int:
    """Mount as root; returns the descriptor over which the file system is served.

    Of options that contradict each other the last one holds. Raises OSError.
    """
    words: dict[str, None] = {}
    for option in options:
        words.pop(_OPPOSITES.get(option, option), None)
        words[option] = None
    flags = sum(_FLAGS.get(word, 0) for word in words)
    fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
    data = ",".join((data, *(word for word in words if word in _PASSED_ON)))
    arguments = (os.fsencode(source), os.fsencode(mountpoint), b"fuse.wbcache")
    if _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode()):
        code = ctypes.get_errno()
        os.close(fd)
        raise OSError(code, os.strerror(code), mountpoint)
    return fd
