"""What would run in threads runs when the test lets it, and limits are small.

A call stops twice: before it is made, and when its answer is on the way. So a kill can come in
between, and the application goes on while a flush is anywhere in its work. Constants that stand for
megabytes stand for kilobytes here: a file of 200 KB is large, grows in pieces, and is patched in
place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import pyfuse3
import trio

from wbcache import fuse, journal, space, store
from wbcache.daemon import eviction
from wbcache.filesystem import files as reading_and_writing
from wbcache.filesystem import reading
from wbcache.flush import blocking, flusher, plan, timing
from wbcache.flush import files as flushing
from wbcache.node import Node

T = TypeVar("T")

KIB = 1 << 10

SMALL: list[tuple[ModuleType, str, int]] = [
    (store, "_FANOUT", 2),
    (store, "SPARE_SIZE", 64 * KIB),
    (journal, "BALLAST_BYTES", 4 * KIB),
    (eviction, "BALLAST_BYTES", 4 * KIB),
    (eviction, "SCRAPS", 8 * KIB),
    (space, "MINIMUM", 64 * KIB),
    (space, "SMALL_FILE", 128 * KIB),
    (space, "LOOK", 256 * KIB),
    (reading_and_writing, "SMALL_FILE", 128 * KIB),
    (reading_and_writing, "INLINE_LIMIT", 16 * KIB),
    (reading, "PIECE", 32 * KIB),
    (flushing, "CHUNK", 64 * KIB),
    (blocking, "CHUNK", 64 * KIB),
    (blocking, "HOLE", 16 * KIB),
    (blocking, "_PIECE", 16 * KIB),
    (flusher, "SMALL", 64 * KIB),
    (plan, "REWRITE_LIMIT", 128 * KIB),
    (timing, "LOG_LIMIT", 64 * KIB),
]


class Call:
    """A call on its way through a gate."""

    def __init__(self, call: Callable[[], object], lane: object, task: trio.lowlevel.Task) -> None:
        self.call = call
        self.lane = lane
        self.task = task
        self.made = False
        self._next = trio.Event()

    def advance(self) -> None:
        """Let it go on to where it stops next."""
        self._next.set()

    async def stop(self) -> None:
        """Wait until it may go on."""
        await self._next.wait()
        self._next = trio.Event()


class Gate:
    """Stands in for `trio.to_thread.run_sync`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        """Those under way, oldest first."""
        self.closed = False
        """Nothing goes through any more: the process was killed."""

    async def run_sync(
        self,
        sync_fn: Callable[..., T],
        *args: Any,
        limiter: trio.CapacityLimiter | None = None,
        abandon_on_cancel: bool = False,
    ) -> T:
        """Make a call when the test says so."""
        call = Call(lambda: sync_fn(*args), limiter, trio.lowlevel.current_task())
        borrower = object()
        if limiter is not None:
            await limiter.acquire_on_behalf_of(borrower)
        self.calls.append(call)
        try:
            with trio.CancelScope(shield=not abandon_on_cancel) as scope:
                await call.stop()
                if not self.closed:
                    call.made = True
                    result = sync_fn(*args)
                    await call.stop()
                if self.closed:
                    scope.shield = False
                    await trio.sleep_forever()
            return result
        finally:
            self.calls.remove(call)
            if limiter is not None:
                limiter.release_on_behalf_of(borrower)

    def close(self) -> None:
        """Nobody gets an answer any more."""
        self.closed = True
        for call in list(self.calls):
            call.advance()


class NoInvalidator:
    """There is no kernel that keeps anything."""

    def inode(self, ino: int) -> None:
        """Drop nothing."""

    def entry(self, parent: int, name: bytes) -> None:
        """Drop nothing."""

    def close(self) -> None:
        """Nothing to end."""


class Listing:
    """Takes the place of the token of a readdir request: what fits into one reply."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.entries: list[tuple[bytes, Any, int]] = []

    def reply(self, name: bytes, attributes: Any, number: int) -> bool:
        """Stands in for `pyfuse3.readdir_reply`."""
        if len(self.entries) >= self._limit:
            return False
        self.entries.append((name, attributes, number))
        return True


@contextmanager
def by_hand(gate: Gate) -> Iterator[None]:
    """Threads are a gate's, nothing takes time, and the same program does the same again."""
    with ExitStack() as stack:

        def put(target: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        put(trio.to_thread, "run_sync", gate.run_sync)
        put(fuse, "Invalidator", NoInvalidator)
        put(pyfuse3, "readdir_reply", lambda token, *reply: token.reply(*reply))
        put(Node, "__hash__", lambda node: node.ino)
        for name in ("fsync", "fdatasync"):
            put(os, name, lambda fd: None)
        for module, name, value in SMALL:
            put(module, name, value)
        yield
