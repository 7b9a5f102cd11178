"""The flusher: takes due items in order, asks the planner, and runs steps in parallel.

An item that must wait is filed under the item it waits for and looked at again when that one
changes. When nothing can move because items wait for each other, the order edges of the cycle are
dropped, and if that is not enough an occupant is parked under a temporary name.
"""

from __future__ import annotations

import errno
import heapq
import logging
import math
import os
from collections.abc import Callable
from itertools import count, islice

import trio

from wbcache.flush import blocking
from wbcache.flush.cycles import circles, way_out
from wbcache.flush.failures import Failures
from wbcache.flush.files import FileFlusher
from wbcache.flush.names import NameFlusher
from wbcache.flush.plan import (
    Copy,
    InPlace,
    Link,
    MakeDirectory,
    Park,
    Planner,
    Publish,
    Remove,
    Rename,
    SetAttributes,
    Spill,
    Step,
    Wait,
)
from wbcache.flush.room import Room
from wbcache.flush.sweeping import Sweeper
from wbcache.flush.timing import LogsFirst, Timing
from wbcache.flush.transfer import SupersededError
from wbcache.flush.workers import Worker, Workers
from wbcache.node import Directory, Node
from wbcache.share.lanes import on_behalf_of
from wbcache.tree import Item, Name
from wbcache.volume import Volume

log = logging.getLogger(__name__)

SMALL = 1 << 20
"""Files up to so many bytes move on the many small workers, larger ones on the few others."""


CIRCLES = 1.0
"""Seconds between looks for items that wait for each other while others are under way."""

LONGEST_CIRCLE = 1000
"""Items that wait in vain for each other, and are noticed to do so for no reason any more."""

BATCH = 1000
"""Changed items looked at in one go, so that operations of the mount are served in between."""

MISPLACED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EINVAL})
"""Errors that tell that something may not be where it was on the share."""
COLLECT = 0.02
"""Seconds for which changes are collected before the flusher looks at them."""


class Flusher:
    """Brings the share in line with the mount; `run` is its only task."""

    def __init__(self, volume: Volume, gone: Callable[[Directory, bytes], None]) -> None:
        """``gone`` takes over that somebody else removed a name from the share."""
        self._volume = volume
        self._tree = volume.tree
        self.files = FileFlusher(volume)
        self.failures = Failures(volume, self.files, gone)
        self.names = NameFlusher(volume, self.files)
        self.planner = Planner(volume.tree)
        self.timing = Timing(volume)
        self.sweeper = Sweeper(volume)
        self.room = Room(volume, self.files, self.planner, self.sweeper)
        self.suspended = False
        """The share may not be changed (it has not been verified yet)."""
        self._event = trio.Event()
        self._hurried = trio.Event()
        self._tick = count()
        self._due: list[tuple[float, int, Item]] = []
        self._due_at: dict[Item, float] = {}
        self._ready: list[tuple[int, int, Item]] = []
        self._is_ready: set[Item] = set()
        self._waiting: dict[Item, Item | None] = {}
        self._waiters: dict[Item, set[Item]] = {}
        self._large: dict[Item, None] = {}
        """Items for which all large workers are busy, in the order in which they came."""
        self._crowd: list[tuple[int, int, Item]] = []
        """Items that are ready, but for which the share has no room just now."""
        self._behind: dict[Item, None] = {}
        """Items in directories in which several steps are not answered."""
        self._logs = LogsFirst()
        self._circles_at = 0.0
        self.arriving: dict[Name, int] = {}
        """Names to which steps under way give something, and a number that tells one step at a name
        from the next."""
        self._steps = 0
        self._workers = Workers(volume.config.flush)
        volume.tree.wake = self.wake

    # -- for others ----------------------------------------------------------------------------

    def wake(self) -> None:
        """Something changed."""
        self._event.set()

    def hurry(self) -> None:
        """Something is due at once: don't collect changes first."""
        self._hurried.set()
        self._event.set()

    def pull(self, item: Item) -> None:
        """Make an item due at once; one that failed before is tried again."""
        self._workers.orders += 1
        on: Item | None = item
        while on is not None:
            item = on
            on = self._waiting.get(item) if self.is_hopeless(item) else None
            if on is not None:
                self._in_vain(item, None)
            self._pull(item)
        self.hurry()

    def _pull(self, item: Item) -> None:
        if isinstance(item, Node):
            item.pulled = True
            item.retry_at = 0.0
            self.failures.ask_again(item)
            if item.trouble and not (item.content and item.content.torn):
                item.trouble = None
                self._tree.account(item)
            self.timing.release(item)
        else:
            change = self._tree.changes.get(item)
            if change is None:
                return
            change.pulled, change.retry_at, change.trouble = True, 0.0, None
        self._tree.touch_item(item)

    def drain(self) -> None:
        """From now on everything is due at once, logs first."""
        self.timing.all_due = True
        items = self.unfinished()
        self._logs.begin(items, self._volume.clock())
        for queue in (self._ready, self._crowd):
            queue[:] = [(self._seq(item), tick, item) for _, tick, item in queue]
            heapq.heapify(queue)
        for item in items:
            self.pull(item)
        self.sweeper.insist()

    def unfinished(self) -> list[Item]:
        """Every item that the share does not have as it should be."""
        tree = self._tree
        items: list[Item] = [n for n in tree.dirty if not tree.excluded(n)]
        for directory, name in tree.changes:
            if tree.wanted(directory, name) is None:
                node = directory.share.get(name)
                if node is None or not node.spilled or not node.links:
                    items.append((directory, name))
        return items

    def press(self, pressed: bool) -> None:
        """Whether the cache is full, so that everything that can go is due."""
        if pressed != self.timing.pressed:
            self.timing.pressed = self.planner.pressed = pressed
            self._tree.touched.update(self._tree.dirty, self._tree.changes)
            self.hurry()

    def let_pass(self) -> None:
        """Call it now and then: steps in which the share does not answer, though it answers others,
        keep no others from their turn."""
        for worker in self._volume.share.late():
            if isinstance(worker, Worker) and self._workers.let_pass(worker):
                self.hurry()

    def is_hopeless(self, item: Item) -> bool:
        """Whether an item, or what it waits for in the end, was refused by the share for good."""
        state = item if isinstance(item, Node) else self._tree.changes.get(item)
        if state is None:
            return False
        # What it waited for may wait in vain itself by now, and not hold it up any more.
        is_looked_at = item in self._is_ready or item in self._tree.touched
        return bool(state.trouble or (state.in_vain and not is_looked_at))

    @property
    def is_stalled(self) -> bool:
        """Whether nothing runs and nothing will by itself."""
        busy = (
            self.running
            or self._ready
            or self._crowd
            or self._large
            or self._due_at
            or self._tree.touched
        )
        return not busy and not self.sweeper.is_busy

    def is_waiting(self, item: Item) -> bool:
        """Whether an item waits for another, and nothing is under way that could end that."""
        return item in self._waiting and not self.running

    @property
    def running(self) -> int:
        """Steps under way, with those of which the share will tell the outcome, and removals of
        temporaries."""
        failures = self.failures
        unknown = len(failures.inherited) - len(failures.withheld)
        return self._steps + unknown + self.sweeper.running

    @property
    def is_tidying(self) -> bool:
        """Whether temporaries have yet to go from the share; that of a file that was removed when
        it was ready to be published is one."""
        return self.sweeper.is_busy or any(not node.links for node in self.files.transfers)

    # -- the loop ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Flush for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                self._event = trio.Event()
                until = self.turn(nursery)
                if self._tree.touched:
                    await trio.lowlevel.checkpoint()
                    continue
                with trio.move_on_after(max(0.0, until - self._volume.clock())):
                    await self._event.wait()
                # Every operation of the mount touches something. What is due later can be looked
                # at in batches, so that operations don't pay for a task switch each.
                if not self._hurried.is_set():
                    with trio.move_on_after(COLLECT):
                        await self._hurried.wait()
                self._hurried = trio.Event()

    def turn(self, nursery: trio.Nursery) -> float:
        """Start every step that may be started now; returns when the next item is due."""
        while self.failures.heirs:
            nursery.start_soon(self._settle_inherited, self.failures.heirs.pop())
        self.room.look()
        self._take_touched()
        now = self._volume.clock()
        while self._due and self._due[0][0] <= now:
            at, _, item = heapq.heappop(self._due)
            if self._due_at.get(item) == at:
                del self._due_at[item]
                self._make_ready(item)
        self.sweeper.collect()
        if not self.suspended:
            self._start_steps(nursery)
            if self._volume.strays:
                for directory, names in self.sweeper.take().items():
                    nursery.start_soon(self._sweep, directory, names)
        if self._volume.retired.trash:
            nursery.start_soon(self._volume.retired.empty_trash)
        until = min(self._due[0][0] if self._due else math.inf, self.sweeper.due)
        if self._waiting and self.running and not self._ready:
            until = min(until, self._circles_at)
        return min(until, self._logs.until(now))

    def _take_touched(self) -> None:
        touched = self._tree.touched
        if len(touched) > BATCH:  # after a start, or when a full cache makes everything due
            touched = set(islice(touched, BATCH))
            self._tree.touched -= touched
        else:
            self._tree.touched = set()
        for item in touched:
            self._waiting.pop(item, None)
            self._wake_waiters(item)
            self._schedule(item)

    def _wake_waiters(self, item: Item) -> None:
        for waiter in self._waiters.pop(item, ()):
            if self._waiting.get(waiter) == item:
                del self._waiting[waiter]
                self._make_ready(waiter)

    def _schedule(self, item: Item) -> None:
        due = self.timing.due(item)
        if due is None:
            self._due_at.pop(item, None)
        elif due <= self._volume.clock():
            self._make_ready(item)
        else:
            self._schedule_at(item, due)

    def _schedule_at(self, item: Item, due: float) -> None:
        if self._due_at.get(item) != due:
            self._due_at[item] = due
            heapq.heappush(self._due, (due, next(self._tick), item))

    def _make_ready(self, item: Item) -> None:
        if item not in self._is_ready:
            self._is_ready.add(item)
            heapq.heappush(self._ready, (self._seq(item), next(self._tick), item))

    def _seq(self, item: Item) -> int:
        if item in self._logs:
            return 0
        if isinstance(item, Node):
            return item.dirty.since if item.dirty is not None else 0
        change = self._tree.changes.get(item)
        return change.seq if change is not None else 0

    def _start_steps(self, nursery: trio.Nursery) -> None:
        workers = self._workers
        for _ in range(min(len(self._large), workers.idle_large)):
            first = next(iter(self._large))
            del self._large[first]
            self._make_ready(first)
        while workers.idle_small and (item := self._next()) is not None:
            self._is_ready.discard(item)
            self._waiting.pop(item, None)
            due = self.timing.due(item)
            if due is None or due > self._volume.clock():
                self._in_vain(item, None)
                self._logs.pass_over(item)
                if due is not None:
                    self._schedule(item)
                continue
            if isinstance(item, Node) and self.timing.expire(item):
                continue
            plan = self.planner.plan(item)
            if not isinstance(plan, Wait):
                self._in_vain(item, None)
            if not isinstance(plan, InPlace) and plan != Wait(item):
                self._logs.pass_over(item)
            if plan is None:
                self._nothing_to_do(item)
            elif isinstance(plan, Wait):
                self._wait(item, plan.on)
            elif workers.forbid(plan):
                self._behind[item] = None
            else:
                self._start(nursery, item, plan)
        if not self._ready and self.room.wants_removal:
            if (removal := self.room.removal()) is not None:
                self._waiting.pop(removal[0], None)
                self._start(nursery, *removal)
            elif self._crowd:
                # What found no room may need none any more, and nothing else would wake these.
                self._start_steps(nursery)
                return
        if self._large and not self._ready and workers.idle_large:
            self.wake()  # those that had their turn had nothing to send any more
        if self._waiting and not self._ready:
            now = self._volume.clock()
            if not self.running or now >= self._circles_at:
                self._circles_at = now + CIRCLES
                self._break_circles(nursery)
                if self._ready:
                    self.wake()  # a circle waits for something outside of it, which is due now

    def _next(self) -> Item | None:
        """The oldest item that is ready; of those that find no room, while there may be some."""
        queue = self._ready
        if self._crowd and self.room.is_open and (not queue or self._crowd[0] < queue[0]):
            queue = self._crowd
        if not queue or not self._logs.lets_pass(queue[0][-1], self._volume.clock()):
            return None
        return heapq.heappop(queue)[-1]

    def _nothing_to_do(self, item: Item) -> None:
        if not isinstance(item, Node) or item.busy:
            return
        if item.links and item.dirty is not None:
            self._tree.settle_if_clean(item)
        kept_here = item.trouble is not None or self._tree.excluded(item)
        unwanted = not item.links or item.dirty is None or kept_here
        if not unwanted and self._tree.held(item):
            # What it held before can't be shown any more: it waits for its own time.
            self._schedule_at(item, self.timing.held_until(item))
        elif not unwanted and item.content is not None and item.content.writing:
            self._schedule_at(item, self._volume.clock() + COLLECT)  # until it is known what of
        if item.transfer and unwanted:
            # Nobody wants it any more.
            self.files.abandon(item)
            self._volume.forget_if_gone(item)

    def _wait(self, item: Item, on: Item | None) -> None:
        self._in_vain(item, on if on is not None and self._leads_nowhere(on, item) else None)
        self._waiting[item] = on
        if on is None:
            return
        self._waiters.setdefault(on, set()).add(item)
        if on != item and on not in self._waiting and on not in self._is_ready:
            # What others wait for is due, whatever its own time.
            if isinstance(on, Node):
                if not on.busy and not on.pulled:
                    on.pulled = True
                    self._schedule(on)
            elif (change := self._tree.changes.get(on)) is not None and not change.pulled:
                change.pulled = True
                self._schedule(on)

    def _leads_nowhere(self, on: Item, item: Item) -> bool:
        """Whether whoever waits for ``on`` waits in the end for something quarantined, and not for
        ``item``, whatever was noted of either before.

        Nothing changes while that is found out. To note that an item does not wait in vain, and
        then that it does all the same, would have others look again, and so on without an end.
        """
        seen: set[Item | None] = {item}
        at: Item | None = on
        while at is not None and at not in seen:
            state = at if isinstance(at, Node) else self._tree.changes.get(at)
            if state is None or not (state.trouble or state.in_vain):
                return False
            if state.trouble or at not in self._waiting or len(seen) > LONGEST_CIRCLE:
                return True
            seen.add(at)
            at = self._waiting[at]
        return False

    def _in_vain(self, item: Item, on: Item | None) -> None:
        """Note that an item waits for something quarantined (None: it does not any more).

        Whoever waits for it in turn, without having to, does so no longer.
        """
        state = item if isinstance(item, Node) else self._tree.changes.get(item)
        if state is None or (on is None and state.in_vain is None):
            return
        was_in_vain = state.in_vain is not None
        state.in_vain = None if on is None else self._reason(on)
        if was_in_vain == (on is not None):
            return
        if isinstance(item, Node):
            self._tree.account(item)
        self._wake_waiters(item)

    def _reason(self, on: Item) -> str:
        state = on if isinstance(on, Node) else self._tree.changes[on]
        path = self._tree.path(on) if isinstance(on, Node) else self._tree.name_path(*on)
        return state.in_vain or f"waits for {os.fsdecode(path)!r}, which is quarantined"

    def _break_circles(self, nursery: trio.Nursery) -> None:
        """Take a step for each group of items that wait for each other."""
        for circle in list(circles(self._waiting)):
            found = way_out(self.planner, self._tree, self._waiting, circle, wait=self._wait)
            if found is not None:
                self._waiting.pop(found[0], None)
                self._start(nursery, *found)

    # -- steps ---------------------------------------------------------------------------------

    def _start(self, nursery: trio.Nursery, item: Item, step: Step) -> None:
        node = step.node
        if isinstance(step, InPlace | Spill) and node.transfer:
            # It was to be published whole, but meanwhile got a further name, lost bytes here, or is
            # written to again by somebody who waits for room.
            self.files.abandon(node)
        large = isinstance(step, Copy | Spill | InPlace) and node.dirty_bytes > SMALL
        large = large and item not in self._logs
        if large and not self._workers.idle_large:
            self._large[item] = None
            return
        if not self.room.admits(step):
            self._is_ready.add(item)
            heapq.heappush(self._crowd, (self._seq(item), next(self._tick), item))
            return
        self.room.begun(step)
        node.busy = True
        if isinstance(step, Remove | Park) and (change := self._tree.changes.get(step.at)):
            change.busy = True
        if (at := _arrival(step)) is not None:
            at[0].arriving[at[1]] = node
            self.arriving[at] = next(self._tick)
        self._steps += 1
        nursery.start_soon(self._run_step, item, step, self._workers.take(step, large=large))

    async def _run_step(self, item: Item, step: Step, worker: Worker) -> None:
        node = step.node
        on_behalf_of.set(worker)
        error: OSError | None = None
        try:
            try:
                with self._volume.share.moving(node, isinstance(step, Rename | Park)):
                    try:
                        error = await self._try(step)
                    finally:
                        self._release(worker)
                    if error is not None:
                        await self._find_out(node)
            finally:
                node.busy = False
                if isinstance(step, Remove | Park) and (change := self._tree.changes.get(step.at)):
                    change.busy = False
                if (at := _arrival(step)) is not None:
                    del at[0].arriving[at[1]], self.arriving[at]
                self._logs.went(item)
            await self._take_note(item, step, error, worker)
        finally:
            self._steps -= 1  # until now it was not known what else is to be done
        self._volume.step_ended(node, moved=error is None)
        self._tree.touch_item(item)
        self._tree.touch_item(node)
        self.hurry()
        self._volume.forget_if_gone(node)

    async def _settle_inherited(self, node: Node) -> None:
        await self.failures.settle_inherited(node)
        self.hurry()

    async def _find_out(self, node: Node) -> None:
        """See what became of a step that failed. Other steps go on whatever the cache disk says."""
        try:
            await self.failures.find_out(node)
        except Exception:
            log.exception("what became of inode %d stays unknown", node.ino)

    async def _take_note(self, item: Item, step: Step, error: OSError | None, by: Worker) -> None:
        if error is None:
            step.node.retries = 0
        elif error.errno == errno.EACCES and await self.failures.make_way(item, step):
            pass  # it is tried again at once
        else:
            # What was refused before a flush was asked for is tried once more for that.
            self.failures.note(item, step, error, is_final=by.orders == self._workers.orders)
        self.room.ended(item, step, error)
        if error is not None and error.errno in MISPLACED:
            await self.failures.look_for_places(step)

    async def _try(self, step: Step) -> OSError | None:
        """Make the calls of a step; an error of the share is returned."""
        try:
            await self._do(step)
        except blocking.ConflictError:
            return await self.failures.conflict(step)
        except SupersededError:
            pass
        except blocking.LostTemporaryError:
            if isinstance(step, Rename | Park):
                return await self.failures.source_gone(step)
        except OSError as caught:
            return caught
        except Exception as caught:
            log.exception("a flush step failed")
            return OSError(errno.EIO, f"internal error: {caught}")
        return None

    def _release(self, worker: Worker) -> None:
        """A step has made its calls; its outcome may not be known yet."""
        self._workers.release(worker)
        if worker.is_late:
            for item in self._behind:
                self._make_ready(item)
            self._behind.clear()

    async def _do(self, step: Step) -> None:
        if isinstance(step, Remove):
            await self.files.hold(step.node, step.at)
        elif isinstance(step, Publish | Rename | Link) and step.occupant not in (None, step.node):
            await self.files.hold(step.occupant, step.to)
        if isinstance(step, Copy):
            await self.room.check(step.node)
            await self.files.copy(step.node, step.directory)
        elif isinstance(step, Spill):
            await self.files.spill(step.node, step.directory)
        elif isinstance(step, Publish):
            if step.node.is_symlink:
                await self.names.publish_symlink(step.node, step.to, step.occupant)
            else:
                await self.files.publish(step.node, step.to, step.occupant)
        elif isinstance(step, InPlace):
            await self.files.update(step.node, step.at)
        elif isinstance(step, SetAttributes):
            await self.files.set_attributes(step.node, step.at)
        elif isinstance(step, MakeDirectory):
            await self.names.make_directory(step.node, step.to, temporary=step.temporary)
        elif isinstance(step, Rename):
            await self.names.rename(step.node, step.old, step.to, step.occupant)
        elif isinstance(step, Link):
            await self.names.link(step.node, step.old, step.to, step.occupant)
        elif isinstance(step, Remove):
            await self.names.remove(step.node, step.at)
        else:
            await self.names.park(step.node, step.at)

    async def _sweep(self, directory: Directory, names: list[bytes]) -> None:
        await self.sweeper.sweep(directory, names)
        self.hurry()


def _arrival(step: Step) -> Name | None:
    """The name that a step gives to something, other than a temporary."""
    if isinstance(step, MakeDirectory):
        return None if step.temporary else step.to
    return step.to if isinstance(step, Publish | Rename | Link) else None
