"""When a dirty item is due, and what goes first when time is short."""

from __future__ import annotations

import math
from collections.abc import Iterable

from wbcache.flush.plan import only_grows
from wbcache.flush.transfer import Transfer
from wbcache.node import Node
from wbcache.tree import Item
from wbcache.volume import Volume

LOG_LIMIT = 16 << 20
"""A new file that is only appended to, not empty and smaller than this is taken for a log, in
bytes."""

HELD_LIMIT = 600.0
"""Seconds after which a new file that is still being written goes out as a snapshot, and without a
write after which a replacement does (for a log, with or without)."""


LOGS_FIRST = 10.0
"""Seconds for which, at a drain, nothing else begins while logs still grow."""


class LogsFirst:
    """At a drain there may be little time. What files have grown by goes first: it is little, it
    waits for nothing, and it is what one wants to read of a run that has ended."""

    def __init__(self) -> None:
        self._left: dict[Item, int] = {}
        """The files, and how many steps of each go first: two if one was under way."""
        self._until = 0.0

    def begin(self, items: Iterable[Item], now: float) -> None:
        """A drain begins; times are monotonic seconds."""
        self._left = {
            item: 1 + item.busy
            for item in items
            if isinstance(item, Node)
            and item.content_dirty
            and only_grows(item)
            and not item.spilled
        }
        self._until = now + LOGS_FIRST

    def __contains__(self, item: object) -> bool:
        return item in self._left

    def lets_pass(self, item: Item, now: float) -> bool:
        """Whether an item may begin."""
        return not self._left or item in self._left or now >= self._until

    def until(self, now: float) -> float:
        """When others may pass, should no log be done before; infinite when they may now."""
        return self._until if self._left and now < self._until else math.inf

    def pass_over(self, item: Item) -> None:
        """An item does not grow, or can't just now."""
        self._left.pop(item, None)

    def went(self, item: Item) -> None:
        """A step of an item has ended, well or not."""
        left = self._left.pop(item, 0) - 1
        if left > 0:
            self._left[item] = left


PRESSED_AGE = 0.5
"""Seconds after which everything is due when the cache is full; were it less, a log would go to the
share line by line."""


class Timing:
    """Due times, monotonic seconds."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._tree = volume.tree
        self.all_due = False
        """A drain: nothing waits for its time."""
        self.pressed = False
        """The cache is full: what is not still being written goes as soon as is sensible."""

    def due(self, item: Item) -> float | None:
        """When an item is due; 0 is at once; None when only an event makes it due."""
        if not isinstance(item, Node):
            change = self._tree.changes.get(item)
            if change is None or change.trouble or self._tree.wanted(*item) is not None:
                return None  # what shall be there goes by its own time
            if self.all_due or change.pulled:
                return change.retry_at
            idle_delay = self._volume.config.flush.idle_delay
            if self.pressed:
                idle_delay = min(idle_delay, PRESSED_AGE)
            return max(change.first + idle_delay, change.retry_at)
        kept_here = item.trouble is not None or self._tree.excluded(item)
        if item.dirty is None or not item.links or kept_here:
            return 0.0 if item.transfer else None
        if self._tree.held(item):
            transfer = item.transfer
            if isinstance(transfer, Transfer) and transfer.current:
                return item.retry_at  # what it held before goes out
            if item.spill and item.content_dirty:
                return item.retry_at
            return self.held_until(item)
        if self.all_due or item.pulled:
            return item.retry_at
        idle_delay, max_age = self.delays(item)
        dirty = item.dirty
        if self.pressed:
            max_age = min(max_age, PRESSED_AGE)
        return max(min(dirty.last + idle_delay, dirty.first + max_age), item.retry_at)

    def held_until(self, node: Node) -> float:
        """When something has to be done about a file that is still open for writing, monotonic
        seconds."""
        assert node.dirty is not None
        until = self._snapshot_at(node)
        if not node.closed:
            return until
        # Short of room nobody may wait for a writer who waits for room.
        return 0.0 if self.pressed else min(until, node.dirty.first + HELD_LIMIT)

    def _snapshot_at(self, node: Node) -> float:
        """When it goes out all the same."""
        dirty = node.dirty
        assert dirty is not None
        if self.all_due:
            return 0.0
        is_log = node.append_only and 0 < node.size < LOG_LIMIT
        if node.slinks or node.base is not None:
            # A log that is begun anew, `train.py > log`, may never pause.
            return (dirty.first if is_log else dirty.last) + HELD_LIMIT
        return dirty.first + (self.delays(node)[1] if is_log else HELD_LIMIT)

    def delays(self, node: Node) -> tuple[float, float]:
        """(idle delay, maximum age) of a node, by its policy."""
        flush = self._volume.config.flush
        if not self._volume.config.policies:
            return flush.idle_delay, flush.max_age
        policy = self._volume.policies.for_path(self._tree.path(node))
        return policy.idle_delay, policy.max_age

    def release(self, node: Node) -> None:
        """A held node goes out as it is."""
        if self._tree.held(node):
            node.released = True
            self._tree.account(node)

    def expire(self, node: Node) -> bool:
        """A node is due: if it is held, either it goes out, or (returned) others have waited for
        it for long enough."""
        if not self._tree.held(node):
            return False
        clock = self._volume.clock()
        if node.closed and self.held_until(node) <= clock < self._snapshot_at(node):
            node.closed = False
            self._tree.account(node)
            self._tree.touch_item(node)
            return True
        if self._snapshot_at(node) <= clock:
            self.release(node)
        return False
