"""What a file held at one instant: its writers wait, or it is copied aside on the local disk."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager

import trio

from wbcache.errors import CacheDiskError
from wbcache.extents import END, Extents
from wbcache.node import Content
from wbcache.space import Space


class FrozenCopy:
    """Ranges of a cache file as they were at one instant."""

    def __init__(self, size: int, ranges: list[tuple[int, int]]) -> None:
        self.size = size
        """Of the file, at that instant."""
        self.ranges = ranges
        self.length = sum(stop - start for start, stop in ranges)
        """Bytes of the ranges together."""
        self.source = -1
        """Descriptor of a file that holds them at the same offsets."""
        self._own = -1

    def fill(self, directory: str, source: int) -> None:
        """Copy the ranges to an unnamed file at the same offsets. Blocks. Raises CacheDiskError."""
        try:
            self._fill(directory, source)
        except OSError as error:
            raise CacheDiskError(error.errno, error.strerror) from error

    def _fill(self, directory: str, source: int) -> None:
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        self.source = self._own = os.open(directory, flags, 0o600)
        for start, stop in self.ranges:
            while start < stop:
                count = os.copy_file_range(source, self._own, stop - start, start, start)
                if not count:
                    break
                start += count

    def __enter__(self) -> FrozenCopy:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._own >= 0:
            os.close(self._own)
            self._own = -1


class Freezer:
    """Keeps writers from generations for a moment."""

    def __init__(
        self,
        space: Space,
        directory: str,
        lane: trio.CapacityLimiter,
        using: Callable[[Content], AbstractContextManager[int]],
        *,
        patience: float,
    ) -> None:
        """Copies are made in ``directory``, by threads of ``lane``. While nothing moves a writer
        waits for the share for ``patience`` seconds."""
        self._space = space
        self._directory = directory
        self._lane = lane
        self._using = using
        self._patience = patience
        self._frozen: dict[Content, trio.Event] = {}
        self._held_up: dict[Content, Callable[[], None]] = {}
        """How to let those be written to that are frozen until the share has them."""
        self._write_ended = trio.Event()

    def __bool__(self) -> bool:
        return bool(self._frozen)

    def __contains__(self, content: object) -> bool:
        return content in self._frozen

    def write_ended(self) -> None:
        """A write in a thread has ended."""
        ended, self._write_ended = self._write_ended, trio.Event()
        ended.set()

    async def until_written(self, content: Content) -> None:
        """Wait until no thread writes to a generation."""
        while content.writing:
            await self._write_ended.wait()

    async def until_thawed(self, content: Content | None) -> None:
        """Wait until a generation may be written to: never for the share while nothing moves."""
        while content is not None and (thawed := self._frozen.get(content)) is not None:
            with trio.move_on_after(self._patience):
                await thawed.wait()
                continue
            if content in self._held_up and self._space.stands_still:
                self._held_up.pop(content)()

    @asynccontextmanager
    async def freeze(self, content: Content) -> AsyncIterator[Callable[[], None]]:
        """Have a generation's writers wait until the block is left, or what it gets is called."""
        while content in self._frozen:
            await self._frozen[content].wait()
        self._frozen[content] = thawed = trio.Event()

        def thaw() -> None:
            if self._frozen.get(content) is thawed:
                del self._frozen[content]
            thawed.set()

        try:
            await self.until_written(content)
            yield thaw
        finally:
            thaw()

    @asynccontextmanager
    async def copy(
        self,
        content: Content,
        redirty: Extents,
        ranges: list[tuple[int, int]],
        size_of: Callable[[], int],
    ) -> AsyncIterator[FrozenCopy]:
        """What was rewritten during a transfer, as of one instant.

        The writers wait for a local copy; if there is no room for one, until the block is left. If
        that takes too long they go on, and what was done in it was in vain: raises EAGAIN.
        """
        async with self.freeze(content) as thaw:
            wanted = Extents(*ranges, *redirty)
            redirty.remove(0, END)
            size = size_of()
            copy = FrozenCopy(size, wanted.overlap(0, size))
            if not content.exists or not self._space.take(copy.length):
                self._held_up[content] = thaw
                try:
                    with self._using(content) as copy.source:
                        yield copy
                finally:
                    went_on = self._held_up.pop(content, None) is None
                if went_on:
                    raise OSError(errno.EAGAIN, "it was written to before the share had it")
                return
            try:
                with copy:
                    with self._using(content) as fd:
                        await trio.to_thread.run_sync(
                            copy.fill, self._directory, fd, limiter=self._lane
                        )
                    thaw()
                    yield copy
            finally:
                self._space.settle(copy.length, 0)
