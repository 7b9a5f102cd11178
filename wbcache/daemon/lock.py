"""One daemon a cache directory."""

from __future__ import annotations

import fcntl
import os

from wbcache.errors import CacheInUseError


def lock_cache(cache_dir: str) -> int:
    """Take the cache's lock; returns the descriptor that holds it until it is closed.

    Raises CacheInUseError when another daemon has it.
    """
    path = os.path.join(cache_dir, "lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise CacheInUseError(
            f"cache directory {cache_dir}",
            f"another wbcache daemon is using it (pid {holder or 'unknown'})",
            "unmount that one first, or give another --cache-dir",
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
