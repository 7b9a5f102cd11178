"""A daemon that kills itself just before its N-th call that changes something.

    python -m tests.crash.killer N ARGUMENTS OF THE DAEMON...

Counted are the system calls that change files, on the cache disk and on the share alike, and the
commits of the journal; not the making of spare cache files, of which there are many. With N = 0 it
lives. On SIGUSR2 the count is written to standard output.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from wbcache.daemon import __main__ as daemon
from wbcache.share import calls
from wbcache.store import Store

CALLS = [
    *("pwrite", "ftruncate", "truncate", "fsync", "fdatasync", "copy_file_range"),
    *("rename", "replace", "link", "unlink", "symlink", "mkdir", "rmdir", "mkfifo"),
    *("utime", "chmod", "fchmod", "chown", "fchown", "setxattr", "removexattr"),
]


class Counter:
    """Counts calls in all threads, and kills the process before one of them."""

    def __init__(self, kill_at: int) -> None:
        self._kill_at = kill_at
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._quiet = threading.local()
        self.count = 0

    def tick(self) -> None:
        """A call is about to be made."""
        if hasattr(self._quiet, "set"):
            return
        with self._lock:
            self.count = next(self._numbers)
            if self.count == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()  # nothing else begins while the signal is on its way

    def uncounted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, in which nothing is counted."""

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._quiet.set = True
            try:
                return call(*args, **kwargs)
            finally:
                del self._quiet.set

        return wrapper

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, counted."""

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return call(*args, **kwargs)

        return wrapper


def install(counter: Counter) -> None:
    """Count the calls of everything in this process."""
    for name in CALLS:
        setattr(os, name, counter.counted(getattr(os, name)))
    Store.make_spares = counter.uncounted(Store.make_spares)  # type: ignore[method-assign]
    make = os.open

    def counted_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_CREAT | os.O_TRUNC):
            counter.tick()
        return make(path, flags, *args, **kwargs)

    os.open = counted_open

    class Library:
        """The C library's calls that Python has no function for."""

        def renameat2(self, *args: Any) -> Any:
            counter.tick()
            return libc.renameat2(*args)

    libc = calls._libc
    calls._libc = Library()  # type: ignore[assignment]

    class Connection(sqlite3.Connection):
        def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
            if statement == "COMMIT" or not (self.in_transaction or statement == "BEGIN"):
                counter.tick()
            return super().execute(statement, *args)

    sqlite3.connect = functools.partial(sqlite3.connect, factory=Connection)  # type: ignore[assignment]


def main() -> int:
    counter = Counter(int(sys.argv.pop(1)))
    install(counter)

    def tell(number: int, frame: FrameType | None) -> None:
        os.write(1, f"{counter.count}\n".encode())

    signal.signal(signal.SIGUSR2, tell)
    return daemon.main()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
