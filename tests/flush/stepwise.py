"""The real flusher on a real directory, one call at a time, in an order that the test chooses.

There is no event loop and there are no threads: whatever would run in a thread stops before the
call and after it, and the test decides when each task goes on. The clock is the test's too. So
any interleaving can be had again, a kill can come between any two calls, and when nothing is left
to run and no time is left to pass, what is not flushed then never will be.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import coroutine
from typing import Any, ParamSpec, TypeVar, cast

import trio

from wbcache import store
from wbcache.flush.flusher import Flusher
from wbcache.flush.plan import Step
from wbcache.share.share import Share
from wbcache.tree import Item
from wbcache.volume import Volume

P = ParamSpec("P")
T = TypeVar("T")


@coroutine
def pause() -> Generator[None, None, None]:
    """Let others run."""
    yield


async def run_in_place(
    call: Callable[..., T], *args: Any, limiter: object = None, abandon_on_cancel: bool = False
) -> T:
    """Stands in for `trio.to_thread.run_sync`."""
    await pause()
    result = call(*args)
    await pause()
    return result


class Tasks:
    """Stands in for a nursery: its tasks run when they are told to."""

    def __init__(self) -> None:
        self.waiting: list[Coroutine[Any, Any, Any]] = []

    def start_soon(self, call: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Add a task."""
        self.waiting.append(cast(Coroutine[Any, Any, Any], call(*args)))

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def resume(self, choose: random.Random) -> None:
        """Run one task up to its next call."""
        task = choose.choice(self.waiting)
        try:
            task.send(None)
        except StopIteration:
            self.waiting.remove(task)

    def close(self) -> None:
        """End all tasks where they are."""
        for task in self.waiting:
            task.close()
        self.waiting.clear()

    @property
    def nursery(self) -> trio.Nursery:
        """For code that wants a nursery to start tasks in."""
        return cast(trio.Nursery, self)


class NoTasks(Tasks):
    """A nursery in which nothing ever runs: no listing is made unless the test makes it."""

    def start_soon(self, call: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Forget the task."""


@contextmanager
def in_steps() -> Iterator[None]:
    """Nothing runs in threads, and a store has few directories, so that it is quickly made."""
    threads, fanout = trio.to_thread.run_sync, store._FANOUT
    trio.to_thread.run_sync = run_in_place  # type: ignore[assignment]
    store._FANOUT = 2
    try:
        yield
    finally:
        trio.to_thread.run_sync = threads
        store._FANOUT = fanout


class SteppedShare(Share):
    """A share whose foreground calls answer at once, and that a test may let fail."""

    fault: Callable[[], OSError | None] = staticmethod(lambda: None)
    """Asked before and after each call of the flusher; what it returns is raised."""
    changed: Callable[[], None] = staticmethod(lambda: None)
    """Called after each call of the flusher."""

    async def look(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return call(*args, **kwargs)

    async def fetch(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return call(*args, **kwargs)

    async def work(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        await pause()
        self._fail()
        result = call(*args, **kwargs)
        self.changed()
        self._fail()
        await pause()
        return result

    async def _after_move(self, deadline: float) -> None:
        await pause()

    def _fail(self) -> None:
        error = self.fault()
        if error is not None:
            raise error


class SteppedVolume(Volume):
    """A volume whose journal is synced without a thread."""

    async def _step_end(self, deadline: float) -> None:
        await pause()

    async def sync_journal(self) -> None:
        await pause()
        self.journal.sync()
        await pause()


async def _wait(seconds: float, wake: trio.Event) -> None:
    await pause()


class SteppedFlusher(Flusher):
    """A flusher that shows each step before it begins."""

    on_step: Callable[[Item, Step, bool], None] = staticmethod(lambda item, step, forced: None)
    """Called with the item, its step, and whether a cycle is being broken."""

    def __init__(self, volume: Volume, gone: Callable[..., None]) -> None:
        super().__init__(volume, gone)
        self.failures.wait = _wait
        self._forced = False

    @property
    def waiting(self) -> Collection[Item]:
        """The items that wait for others."""
        return self._waiting.keys()

    def waits_for(self, item: Item) -> Item | None:
        """What a waiting item waits for."""
        return self._waiting.get(item)

    def _break_circles(self, nursery: trio.Nursery) -> None:
        self._forced = True
        super()._break_circles(nursery)
        self._forced = False

    def _start(self, nursery: trio.Nursery, item: Item, step: Step) -> None:
        self.on_step(item, step, self._forced)
        super()._start(nursery, item, step)
