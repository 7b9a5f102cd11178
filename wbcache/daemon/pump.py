"""How requests reach pyfuse3 without a trip through the scheduler for each.

pyfuse3 takes a trio lock and waits for the FUSE device in every turn of its loop. The lock yields
to the scheduler though nobody holds it, and the wait goes to sleep though the next request of a
busy client is tens of microseconds away; on this path both cost more than the request itself (the
figures are in docs/design.md). So pyfuse3 is given a lock that yields only when it must, and a
wait that looks at the device for `SPIN` seconds before it sleeps. Other tasks still run: every
`TURN` seconds at the latest the wait goes through the scheduler.

pyfuse3 finds trio through the name in its own module; only that name is replaced.
"""

from __future__ import annotations

import os
import select
from time import perf_counter
from types import TracebackType
from typing import Any

import pyfuse3
import trio

SPIN = 50e-6
TURN = 500e-6
MISSES = 4
PAUSE = 32
"""After so many waits in vain, one after the other, so many waits don't spin."""


class _Lock:
    """A mutual exclusion that costs nothing when it is free; the next holder is not chosen."""

    def __init__(self) -> None:
        self._held = False
        self._waiters = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._held:
            await self._waiters.park()
        self._held = True

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._held = False
        if self._waiters:
            self._waiters.unpark()


class _LowLevel:
    """trio.lowlevel with a `wait_readable` that spins."""

    def __init__(self) -> None:
        self._poll: Any = None
        self._fd = -1
        self._turn_ends = 0.0
        self._misses = 0
        self._pause = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(trio.lowlevel, name)

    async def wait_readable(self, fd: int) -> None:
        if fd != self._fd:
            self._fd = fd
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            self._poll = poller.poll
        poll = self._poll
        now = perf_counter()
        if self._pause:
            self._pause -= 1
        elif now < self._turn_ends:
            spin_ends = now + SPIN
            while now < spin_ends:
                if poll(0):
                    self._misses = 0
                    return
                now = perf_counter()
            # The clients are slower than that, or need the processor themselves.
            self._misses += 1
            if self._misses >= MISSES:
                self._misses, self._pause = 0, PAUSE
        await trio.lowlevel.wait_readable(fd)
        self._turn_ends = perf_counter() + TURN


class _Trio:
    """trio as pyfuse3 sees it."""

    Lock = _Lock
    lowlevel = _LowLevel()

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name)


def install() -> None:
    """Let pyfuse3 use it. Without a second processor spinning would only delay the clients."""
    if len(os.sched_getaffinity(0)) > 1:
        pyfuse3.trio = _Trio()  # type: ignore[attr-defined]
