"""One daemon a cache directory, and what is left of daemons that were killed.

A thread that waits for a hung share keeps its process from ending, and with it everything that the
process has open: the lock of the cache, and SQLite's locks on the journal. Once nothing else of it
is left it can't touch the cache any more, and the next daemon takes over: the lock's file is moved
aside and the journal's files are replaced by copies, which nobody has locked. What the killed
daemon may still do on the share is over when the lock that was moved aside is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import time

from wbcache.errors import CacheInUseError
from wbcache.processes import is_being_killed, is_zombie

log = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds for which a daemon that is being killed is waited for."""

GRACE = 1.0
"""Seconds that the threads of a killed daemon have to end what they do on the cache disk."""

_INTERVAL = 0.05
_LOCK = "lock"
_ASIDE = "lock.held-"
_GUARD = "lock.guard"
_JOURNAL = ("journal.db", "journal.db-wal")


class CacheLock:
    """The lock of a cache directory, held until `release`."""

    def __init__(self, cache_dir: str, fd: int) -> None:
        self._cache_dir = cache_dir
        self._fd = fd
        self._aside: dict[str, int] = {}
        for name in os.listdir(cache_dir):
            if name.startswith(_ASIDE):
                path = os.path.join(cache_dir, name)
                self._aside[path] = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def lingering(self) -> list[str]:
        """The ids of killed daemons that may still do something on the share."""
        found = []
        for path, fd in list(self._aside.items()):
            if _try_lock(fd):
                os.unlink(path)
                os.close(fd)
                del self._aside[path]
            else:
                found.append(_holder(fd))
        return found

    def release(self) -> None:
        """Give the lock back."""
        for fd in (self._fd, *self._aside.values()):
            os.close(fd)
        self._aside.clear()


def lock_cache(cache_dir: str) -> CacheLock:
    """Take the cache's lock.

    A daemon that is being killed is waited for, and taken over from when all that is left of it are
    calls on the share. Raises CacheInUseError when one has the lock that lives, or does not end.
    """
    fd = _lock(cache_dir)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return CacheLock(cache_dir, fd)
    except BaseException:
        os.close(fd)
        raise


def _lock(cache_dir: str) -> int:
    began = time.monotonic()
    while True:
        fd = _open(cache_dir, _LOCK)
        if _try_lock(fd):
            if _is_current(cache_dir, fd):
                return fd
            os.close(fd)  # its file was moved aside just now
            continue
        holder = _holder(fd)
        pid = int(holder) if holder.isdecimal() else 0
        killed = pid > 0 and is_being_killed(pid)
        waited = time.monotonic() - began
        if killed and waited > GRACE and is_zombie(pid):
            # Its event loop ran in its first thread, which has ended.
            _take_over(cache_dir, fd, pid)
        elif killed and waited < PATIENCE:
            time.sleep(_INTERVAL)
        elif not _try_lock(fd):  # unless it has ended just now
            os.close(fd)
            raise _in_use(cache_dir, holder, killed=killed)
        os.close(fd)


def _take_over(cache_dir: str, held: int, pid: int) -> None:
    """Move a killed daemon's lock aside, unless somebody else has done it meanwhile."""
    guard = _open(cache_dir, _GUARD)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not _is_current(cache_dir, held):
            return
        log.warning("daemon %d was killed and hangs in a call on the share: taken over", pid)
        _copy_journal(cache_dir)
        path = os.path.join(cache_dir, _LOCK)
        os.rename(path, os.path.join(cache_dir, _ASIDE + secrets.token_hex(4)))
    finally:
        os.close(guard)


def _copy_journal(cache_dir: str) -> None:
    """Give the journal new files with the same bytes: whatever happens in between, they fit."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(cache_dir, "journal.db-shm"))  # made anew from the rest
    for name in _JOURNAL:
        path = os.path.join(cache_dir, name)
        try:
            shutil.copyfile(path, path + ".new", follow_symlinks=False)
        except FileNotFoundError:
            continue
        copy = os.open(path + ".new", os.O_RDONLY | os.O_CLOEXEC)
        os.fsync(copy)
        os.close(copy)
        os.chmod(path + ".new", 0o600)
        os.rename(path + ".new", path)


def _open(cache_dir: str, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(os.path.join(cache_dir, name), flags, 0o600)


def _is_current(cache_dir: str, fd: int) -> bool:
    """Whether an open lock file is the one under the lock's name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(os.path.join(cache_dir, _LOCK)))
    except FileNotFoundError:
        return False


def _holder(fd: int) -> str:
    return os.pread(fd, 32, 0).decode("ascii", "replace").strip()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(cache_dir: str, holder: str, *, killed: bool) -> CacheInUseError:
    if killed:
        return CacheInUseError(
            f"cache directory {cache_dir}",
            f"its last daemon (pid {holder}) was killed but has not ended",
            "try again when it has",
        )
    return CacheInUseError(
        f"cache directory {cache_dir}",
        f"another wbcache daemon is using it (pid {holder or 'unknown'})",
        "unmount that one first, or give another --cache-dir",
    )
