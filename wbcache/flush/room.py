"""The share has no room: fewer transfers, in order, and at last removals before their turn.

Temporaries take room as well. When many files move at once the first bytes of each may fill a share
on which every one of them alone would fit; and what is complete but waits for something older keeps
the room that the older one needs. So from the first failure on bytes wait like names do, and what
was moved and can't be published is given up. Transfers go one at a time; each that succeeds lets
twice as many go, so that a share that has room again is soon as fast as before.

Only when a step finds no room though nothing else moves, and no other temporary of ours is left,
does the oldest pending removal go ahead of what it waits for; then the data is tried again. So the
last complete checkpoint goes when nothing else is left to go.
"""

from __future__ import annotations

import errno
import os

from wbcache.flush.errors import describe, is_full
from wbcache.flush.files import FileFlusher
from wbcache.flush.plan import Copy, InPlace, Link, MakeDirectory, Planner, Remove, Spill, Step
from wbcache.flush.sweeping import Sweeper
from wbcache.flush.transfer import Transfer
from wbcache.node import Node
from wbcache.share.descriptor import Descriptor
from wbcache.tree import Item, NameChange
from wbcache.volume import Volume

ENOUGH = 32
"""Steps at a time from which on their number is no limit."""

TAKES_ROOM = Copy | Spill | InPlace | MakeDirectory | Link


class Room:
    """What the flusher may do while the share is full; otherwise everything."""

    def __init__(
        self, volume: Volume, files: FileFlusher, planner: Planner, sweeper: Sweeper
    ) -> None:
        self._volume = volume
        self._tree = volume.tree
        self._files = files
        self._planner = planner
        self._sweeper = sweeper
        self.is_short = False
        """A step found no room, and it is not certain yet that there is enough again."""
        self.order_suspended = False
        """Removals went ahead of their turn."""
        self._window = 1
        self._moving: dict[Node, bool] = {}
        """Steps under way that take room, and whether nothing else takes any meanwhile."""
        self._predicted: dict[Node, int] = {}
        """Bytes that were free, as the share said, before a file was tried in vain."""
        self._freed = 0
        """Bytes that removals have given back so far."""
        self._lacking: dict[Node, tuple[int, float]] = {}
        """What that has to come to before a file fits; and when it is tried all the same (monotonic
        seconds), since others may have made room."""
        self._wanted = False
        """Something must go before anything else fits."""
        self._removing = 0
        self._ahead: Item | None = None
        """The removal under way that goes ahead of its turn."""

    def admits(self, step: Step) -> bool:
        """Whether a step may begin now."""
        return self.is_open or not isinstance(step, TAKES_ROOM)

    @property
    def is_open(self) -> bool:
        """Whether steps that take room may begin now."""
        if not self.is_short:
            return True
        if self._sweeper.is_busy or self._wanted or self._ahead is not None:
            return False
        return len(self._moving) < self._window

    def begun(self, step: Step) -> None:
        """A step begins."""
        if isinstance(step, TAKES_ROOM):
            alone = self.is_short and not self._moving and not self._others(step.node)
            self._moving = dict.fromkeys(self._moving, False)
            self._moving[step.node] = alone
        elif isinstance(step, Remove):
            self._removing += 1

    def ended(self, item: Item, step: Step, error: OSError | None) -> None:
        """A step has ended; called when it is known when the item is to be tried again."""
        alone = self._moving.pop(step.node, None)
        if isinstance(step, Remove):
            self._removing -= 1
            if item == self._ahead:
                self._ahead = None
            if error is None:
                self._freed += step.node.base.size if step.node.base is not None else 0
                self._try_again()
        reached = self._files.reached.pop(step.node, None)
        if error is not None and is_full(error):
            if alone and reached is not None:
                until = self._volume.clock() + self._volume.config.flush.retry.max
                self._lacking[step.node] = (self._freed + step.node.size - reached, until)
            self._found_none(item, step, error, alone)
        elif error is None and alone is not None and _has_happened(step):
            self._volume.starved.discard(item)
            self._predicted.pop(step.node, None)
            self._lacking.pop(step.node, None)
            self._window = min(2 * self._window, ENOUGH)

    async def check(self, node: Node) -> None:
        """Before a file moves: don't send in vain, and again and again, what has no room.

        The share is believed that there is none when it was right before. What was tried alone is
        not tried again while the removals since have not given back what it lacked. Raises OSError
        (ENOSPC).
        """
        content = node.content
        if not self.is_short or content is None or not content.exists:
            return
        enough, until = self._lacking.get(node, (0, 0.0))
        if self._freed < enough and self._volume.clock() < until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        share = self._volume.share
        free = await share.work(_free, share.root)
        needed = min(node.size, os.fstat(self._volume.store.fd(content)).st_blocks * 512)
        before = self._predicted.get(node)
        self._predicted[node] = free
        if before is not None and before < needed and free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @property
    def wants_removal(self) -> bool:
        """Whether it is time that something goes: nothing fits, and nothing else is under way."""
        return self._wanted and not self._moving and not self._removing

    def removal(self) -> tuple[Item, Step] | None:
        """The removal that makes room; it may be ahead of its turn. Without one, what waits is
        tried all the same."""
        self._wanted = False
        tree, now = self._tree, self._volume.clock()
        pending = [
            (change.seq, at)
            for at, change in tree.changes.items()
            if tree.wanted(*at) is None and at[1] in at[0].share and change.retry_at <= now
        ]
        for _, at in sorted(pending, key=lambda found: found[0]):
            plan = self._planner.plan(at)
            if not isinstance(plan, Remove):
                plan = self._planner.plan(at, besides=_Everything())
                if not isinstance(plan, Remove):
                    continue
                if not self.order_suspended:
                    self.order_suspended = True
                    self._volume.report(
                        "order suspended: the share has no room for what is older, so removals"
                        " go ahead of their turn"
                    )
            self._ahead = at
            return at, plan
        return None

    def look(self) -> None:
        """See whether the share has enough room again."""
        if not self.is_short:
            return
        tree = self._tree
        starved = self._volume.starved
        starved -= {item for item in starved if not self._is_pending(item)}
        if starved:
            return
        if self._window < ENOUGH and (
            tree.changes or any(not tree.excluded(node) for node in tree.dirty)
        ):
            return
        self.is_short = self._planner.bytes_wait = False
        self._predicted.clear()
        self._lacking.clear()
        again = "; order is kept again" if self.order_suspended else ""
        self.order_suspended = False
        self._volume.report(f"the share has room again{again}")
        tree.touched.update(tree.dirty)

    # -- internals -----------------------------------------------------------------------------

    def _found_none(self, item: Item, step: Step, error: OSError, alone: bool | None) -> None:
        first = not self.is_short
        if first:
            self.is_short = self._planner.bytes_wait = True
            self._volume.report(f"{describe(error)}: files go one at a time, oldest first")
        self._volume.starved.add(item)
        self._window = 1
        if alone is None:
            alone = not self._moving and not self._others(step.node)
        if self._give_back(step.node) or first:
            # Without those there may be room.
            self._state(item).retry_at = 0.0
        elif alone:
            self._wanted = True

    def _give_back(self, besides: Node) -> bool:
        """Have all other temporaries go; returns whether that makes any room, now or soon."""
        makes = bool(self._moving)
        for node in self._others(besides):
            transfer = node.transfer
            assert isinstance(transfer, Transfer)
            if not node.busy:
                self._files.abandon(node)
                self._tree.touch_item(node)
                makes = True
            elif not transfer.current:
                transfer.given_up = True
        return makes

    def _others(self, besides: Node) -> list[Node]:
        return [node for node in self._files.transfers if node is not besides]

    def _try_again(self) -> None:
        """Something has gone from the share: perhaps there is room now."""
        self._wanted = False
        for item in self._volume.starved:
            if self._is_pending(item):
                self._state(item).retry_at = 0.0
                self._tree.touch_item(item)

    def _is_pending(self, item: Item) -> bool:
        if isinstance(item, Node):
            return item.dirty is not None and bool(item.links) and not item.trouble
        change = self._tree.changes.get(item)
        return change is not None and not change.trouble

    def _state(self, item: Item) -> Node | NameChange:
        return item if isinstance(item, Node) else self._tree.changes[item]


class _Everything:
    """Holds whatever it is asked for."""

    def __contains__(self, item: object) -> bool:
        return True


def _has_happened(step: Step) -> bool:
    """Whether a step without an error has moved anything; a transfer may have been given up."""
    transfer = step.node.transfer
    if isinstance(step, Spill):
        return step.node.spilled
    return not isinstance(step, Copy) or (isinstance(transfer, Transfer) and transfer.current)


def _free(root: Descriptor) -> int:
    found = os.fstatvfs(root.fd)
    return found.f_bavail * (found.f_frsize or found.f_bsize)
