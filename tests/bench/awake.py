"""Keep the processors from sleeping while rates are measured."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_LATENCY = "/dev/cpu_dma_latency"


@contextmanager
def processors_awake() -> Iterator[bool]:
    """Ask the kernel for no idle states for the length of the block; yields whether it agreed.

    A call on a FUSE mount wakes another process twice.  Where a processor that went to sleep in
    between takes tens of microseconds to come back (virtual machines above all), that is most of
    the call, and differs by a factor of two from one minute to the next.  The request holds while
    the file is open; only root may make it.
    """
    try:
        fd = os.open(_LATENCY, os.O_WRONLY)
    except OSError:
        yield False
        return
    try:
        os.write(fd, struct.pack("i", 0))
        yield True
    finally:
        os.close(fd)
