"""Room on the cache disk: how much the cache may still take, and who waits for it.

Bytes are counted as the disk counts them, in blocks. Whoever is about to allocate some takes them
first, so that the limit holds however many write at a time; what was not needed is given back.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable

import trio

from wbcache.config import CacheConfig

BLOCK = 4096
"""Bytes; disk file systems allocate no less."""

RESERVE = 16
"""The last part of the cache, one in so many, is for small files only: a log must not wait behind
checkpoints."""

MAX_RESERVE = 64 << 20
"""Bytes that the reserve has at most."""

SMALL_FILE = 16 << 20
"""Files that take fewer bytes may use the reserve."""

PORTIONS = 8
"""Into so many parts the cache is divided when a file larger than it passes through."""

LOOK = 64 << 20
"""Bytes handed out between two looks at the disk, which others fill, too."""

MINIMUM = 16 << 20
"""Bytes that the cache may take though others have filled the disk to its floor: enough to go on at
the share's speed."""


class _Waiter:
    __slots__ = ("count", "done", "served")

    def __init__(self, count: int) -> None:
        self.count = count
        self.done = trio.Event()
        self.served = False

    def serve(self) -> None:
        self.served = True
        self.done.set()


class Space:
    """Counts what the cache takes of its disk. Used from the event loop only."""

    def __init__(
        self,
        directory: str,
        config: CacheConfig,
        *,
        other: Callable[[], int],
        patience: float,
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._config = config
        self._other = other
        """Tells how many bytes the journal takes."""
        self._patience = patience
        """Seconds without any progress after which whoever waits gets ENOSPC."""
        self._clock = clock
        self.used = 0
        """Bytes that data files take."""
        self.limit = 0
        """Bytes that all of the cache may take."""
        self.free = 0
        """Bytes that may still be taken, as of the last look."""
        self._reserve = 0
        self._in_flight = 0
        """Taken, and perhaps not allocated yet."""
        self._budget = 0
        """What large files may take before the disk is looked at again."""
        self._small: deque[_Waiter] = deque()
        self._large: deque[_Waiter] = deque()
        self._stuck: deque[_Waiter] = deque()
        """Those whose write the disk refused."""
        self._moved_at = 0.0
        self.wanted = trio.Event()
        """Set when room should be made; whoever makes it replaces it."""

    # -- taking --------------------------------------------------------------------------------

    def take(self, count: int) -> bool:
        """Take bytes if there are enough; they count until `settle`."""
        if count > self._budget:
            self.look()
            if self.waiting or count > self.free - self._reserve:
                return False
        self._budget -= count
        self._in_flight += count
        return True

    async def wait(self, count: int, *, small: bool) -> None:
        """Take bytes, waiting for them as long as something moves.

        Raises OSError (ENOSPC) when nothing does for the patience given, or nothing can.
        """
        waiter = _Waiter(count)
        queue = self._small if small else self._large
        queue.append(waiter)
        self._serve()
        try:
            await self._until_done(waiter, queue)
        except trio.Cancelled:
            if waiter.served:
                self.settle(count, 0)
            raise
        if not waiter.served:
            raise OSError(
                errno.ENOSPC, "the cache is full, and what it holds can't be flushed just now"
            )

    async def wait_for_disk(self, error: OSError) -> None:
        """The disk refused a write: wait until the cache gives something back.

        Raises ``error`` when it does not for the patience given, or nothing can be.
        """
        waiter = _Waiter(0)
        self._stuck.append(waiter)
        await self._until_done(waiter, self._stuck)
        if not waiter.served:
            raise error

    async def _until_done(self, waiter: _Waiter, queue: deque[_Waiter]) -> None:
        since = self._clock()
        try:
            while not waiter.done.is_set():
                self.wanted.set()
                left = max(since, self._moved_at) + self._patience - self._clock()
                if left <= 0:
                    return
                with trio.move_on_after(left):
                    await waiter.done.wait()
        finally:
            if not waiter.done.is_set():
                queue.remove(waiter)

    def settle(self, taken: int, allocated: int) -> None:
        """Bytes that were taken became ``allocated`` ones, which may be fewer, or even negative."""
        self._in_flight -= taken
        self.used += allocated
        self._budget += taken - allocated
        if self.waiting and taken > allocated:
            self._serve()

    def give(self, count: int) -> None:
        """Data files have given bytes back to the disk."""
        self.used -= count
        self.progressed()
        while count and self._stuck:
            self._stuck.popleft().serve()
        if self.waiting:
            self._serve()

    def progressed(self) -> None:
        """Something moved towards the share: whoever waits for room does not wait in vain."""
        self._moved_at = self._clock()

    @property
    def stands_still(self) -> bool:
        """Whether nothing has moved for as long as anybody is to wait."""
        return self._clock() - self._moved_at >= self._patience

    # -- looking -------------------------------------------------------------------------------

    def look(self) -> None:
        """See how much may still be taken."""
        disk = os.statvfs(self._directory)
        total = disk.f_blocks * disk.f_frsize
        self.limit = self._config.size.resolve(total)
        taken = self.used + self._in_flight
        on_disk = disk.f_bavail * disk.f_frsize - self._in_flight
        above_floor = on_disk - self._config.min_free.resolve(total)
        # When others have filled the disk to its floor, a little goes on all the same.
        least = min(MINIMUM - taken, on_disk - MINIMUM)
        self.free = min(self.limit - taken - self._other(), max(above_floor, least))
        self._reserve = min(self.limit // RESERVE, MAX_RESERVE)
        self._budget = min(self.free - self._reserve, LOOK)
        if self._budget < self._reserve:
            self.wanted.set()

    @property
    def waiting(self) -> bool:
        """Whether anybody waits for room."""
        return bool(self._small or self._large or self._stuck)

    @property
    def portion(self) -> int:
        """Bytes of one file that go to the share at a time when there is no room: what has arrived
        makes room while the next part is on its way."""
        return max(self.limit // PORTIONS, MINIMUM)

    @property
    def missing(self) -> int:
        """Bytes that should be given back so that nobody has to wait soon; none below 1."""
        asked = sum(waiter.count for queue in (self._small, self._large) for waiter in queue)
        return asked + 3 * self._reserve - self.free

    def refuse(self) -> None:
        """Nothing can be given back: whoever waits gets ENOSPC."""
        for queue in (self._small, self._large, self._stuck):
            while queue:
                queue.popleft().done.set()

    def _serve(self) -> None:
        self.look()
        for queue, kept in ((self._small, 0), (self._large, self._reserve)):
            while queue and queue[0].count <= self.free - kept:
                waiter = queue.popleft()
                self.free -= waiter.count
                self._budget -= waiter.count
                self._in_flight += waiter.count
                waiter.serve()
