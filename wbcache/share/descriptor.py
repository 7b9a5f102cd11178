"""An owned file descriptor: closed when nothing refers to it any more."""

from __future__ import annotations

import _thread
import os
from collections import deque
from queue import Empty, SimpleQueue

MOST_CLOSERS = 64
"""Threads that close files; each may hang in that."""

REST = 5.0
"""Seconds without anything to close after which such a thread ends."""


class Descriptor:
    """A descriptor shared between the event loop and worker threads.

    Whoever uses it holds a reference, so that a cache may drop it at any time without closing it
    under a thread that is stuck in a call with it.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        if self.fd >= 0:
            _close(self.fd)
            self.fd = -1


class FileDescriptor(Descriptor):
    """One of a file that is open for reading or writing.

    To close it the client of a share may ask the server, which may not answer: that is left to a
    thread, since nobody knows who drops the last reference. A descriptor that is only a place
    (O_PATH) is closed by the kernel alone.
    """

    __slots__ = ()

    def __del__(self) -> None:
        if self.fd >= 0:
            _closers.close(self.fd)
            self.fd = -1


class _Closers:
    """As many threads as there are files whose closing hangs, and one for all others."""

    def __init__(self) -> None:
        # Both may be used by a finalizer, in whatever its thread is doing just now.
        self._waiting: SimpleQueue[int] = SimpleQueue()
        self._idle: deque[None] = deque()
        self._threads: deque[None] = deque()

    def close(self, fd: int) -> None:
        """Have a descriptor closed; returns at once."""
        self._waiting.put(fd)
        if len(self._idle) < self._waiting.qsize() and len(self._threads) < MOST_CLOSERS:
            self._threads.append(None)
            _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        while (fd := self._next()) is not None:
            _close(fd)
        self._threads.pop()

    def _next(self) -> int | None:
        self._idle.append(None)
        try:
            return self._waiting.get(timeout=REST)
        except Empty:
            pass
        finally:
            self._idle.pop()
        try:
            return self._waiting.get_nowait()  # put there while this one still counted as idle
        except Empty:
            return None


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass


_closers = _Closers()
