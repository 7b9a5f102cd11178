"""One daemon a cache directory."""

from __future__ import annotations

import fcntl
import os
import signal
import time

from wbcache.errors import CacheInUseError

PATIENCE = 10.0
"""Seconds to wait for a killed daemon whose threads still are in calls on the share."""

_INTERVAL = 0.05


def lock_cache(cache_dir: str) -> int:
    """Take the cache's lock; returns the descriptor that holds it until it is closed.

    A daemon that is being killed is waited for. Raises CacheInUseError when one has the lock that
    lives, or does not end.
    """
    path = os.path.join(cache_dir, "lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(fd, cache_dir)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_being_killed(pid: int) -> bool:
    """Whether a process has ended but for threads that wait for a system call to return."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return False
    if fields.get("State", "").split()[:1] == ["Z"]:
        return True
    pending = int(fields.get("SigPnd", "0"), 16) | int(fields.get("ShdPnd", "0"), 16)
    return bool(pending >> (signal.SIGKILL - 1) & 1)


def _lock(fd: int, cache_dir: str) -> None:
    end = time.monotonic() + PATIENCE
    while not _try_lock(fd):
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        killed = holder.isdecimal() and is_being_killed(int(holder))
        if killed and time.monotonic() < end:
            time.sleep(_INTERVAL)
        elif _try_lock(fd):  # it has ended just now
            return
        else:
            raise _in_use(cache_dir, holder, killed=killed)


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
            f"its last daemon (pid {holder}) was killed but still waits for a call on the share",
            "try again when the share answers",
        )
    return CacheInUseError(
        f"cache directory {cache_dir}",
        f"another wbcache daemon is using it (pid {holder or 'unknown'})",
        "unmount that one first, or give another --cache-dir",
    )
