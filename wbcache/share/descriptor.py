"""An owned file descriptor: closed when nothing refers to it any more."""

from __future__ import annotations

import os


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
            try:
                os.close(self.fd)
            except OSError:
                pass
            self.fd = -1
