"""The two views of the name space, and the order in which they may be made equal.

Every method is synchronous: between two awaits of its callers the tree is consistent. It knows
nothing of time but the ``now`` it is given (monotonic seconds), nothing of the share, and nothing
of durability; `journal` stores what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from wbcache.node import ROOT_INO, Directory, Dirty, Node
from wbcache.order import OrderedLog
from wbcache.skipped import Skipped

Name = tuple[Directory, bytes]
"""A name: a directory and an entry in it."""

Item = Node | Name
"""What the flusher works on: a node that is not on the share as it is, or a name to be removed."""


class NameChange:
    """A name under which the views differ."""

    __slots__ = ("busy", "first", "in_vain", "pulled", "retries", "retry_at", "seq", "trouble")

    def __init__(self, seq: int, now: float) -> None:
        self.seq = seq
        """Sequence number of the operation that last changed the name here."""
        self.first = now
        self.pulled = False
        self.busy = False
        self.trouble: str | None = None
        self.in_vain: str | None = None
        self.retries = 0
        self.retry_at = 0.0


class Tree:
    """All known nodes, their names in both views, and the dirty ones in order."""

    def __init__(self, root: Directory) -> None:
        self.root = root
        self.nodes: dict[int, Node] = {root.ino: root}
        self.next_ino = ROOT_INO + 1
        self.seq = 0
        self.changes: dict[Name, NameChange] = {}
        """The names under which the views differ."""
        self.dirty: set[Node] = set()
        """Nodes with unflushed operations that still have a name in the mount."""
        self.order: OrderedLog[Node] = OrderedLog()
        """The counted nodes by dirty_since: those that others have to wait for."""
        self.holding: dict[Directory, set[Node]] = {}
        """Dirty nodes that are not counted, by the directories they are in: those still written,
        quarantined, or waiting in vain. They hold back only removals near them."""
        self.skipped = Skipped()
        self.stamped: set[Node] = set()
        """Directories in which a name was changed since their row was written. The name's row tells
        when that was, for as long as the share has not got the name."""
        self.touched: set[Item] = set()
        """What changed since the flusher last looked."""
        self.wake: Callable[[], None] = lambda: None

    # -- nodes ---------------------------------------------------------------------------------

    def allocate(self) -> int:
        """A fresh inode number; numbers are never used twice."""
        ino = self.next_ino
        self.next_ino += 1
        return ino

    def add(self, node: Node) -> None:
        """Make a node known."""
        self.nodes[node.ino] = node
        if node.ino >= self.next_ino:
            self.next_ino = node.ino + 1

    def next_seq(self) -> int:
        """The sequence number of a new operation."""
        self.seq += 1
        return self.seq

    def touch(self, node: Node, now: float) -> int:
        """Record an operation on a node that the share has to learn of; returns its number."""
        self.seq = seq = self.seq + 1
        dirty = node.dirty
        if dirty is None:
            node.dirty = Dirty(seq, now)
            if node.links:
                self.dirty.add(node)
                self.account(node)
            self.touch_item(node)
        else:
            dirty.last = now
            if dirty.snapshot and not dirty.next:
                dirty.next = seq
                dirty.next_time = now
        node.ours = True
        return seq

    def touch_item(self, item: Item) -> None:
        """Have the flusher look at an item again."""
        if not self.touched:
            self.wake()
        self.touched.add(item)

    def snapshot(self, node: Node) -> None:
        """A flush of the node begins: later operations are not covered by it."""
        if node.dirty:
            node.dirty.snapshot = self.seq
            node.dirty.next = 0

    def settle(self, node: Node, now: float) -> None:
        """A flush of the node ended (well or not): work out what it still has to flush."""
        dirty = node.dirty
        if dirty is None:
            return
        if self.settle_if_clean(node):
            return
        missing = not self.excluded(node) and any(d.share.get(n) is not node for d, n in node.links)
        if not missing and dirty.next:
            dirty.since, dirty.first = dirty.next, dirty.next_time
        node.closed = not node.writers
        self.account(node)  # a flush also ends that a node is held
        dirty.snapshot = dirty.next = 0
        node.pulled = False
        self.touch_item(node)

    def settle_if_clean(self, node: Node) -> bool:
        """Call a node clean if the share has it as it is; returns whether it does."""
        if node.content_dirty or node.meta:
            return False
        if node.content is not None and node.content.writing:
            return False  # it is about to be dirty, with bytes that nothing tells of yet
        if not self.excluded(node) and any(d.share.get(n) is not node for d, n in node.links):
            return False
        self.clean(node)
        return True

    def clean(self, node: Node) -> None:
        """The share has the node as it is, or need not have it."""
        node.dirty = None
        node.pulled = node.released = node.closed = False
        node.retries, node.retry_at = 0, 0.0
        self.dirty.discard(node)
        self._forget_skipped()
        self.account(node)
        self.touch_item(node)

    # -- names ---------------------------------------------------------------------------------

    def excluded(self, node: Node) -> bool:
        """Whether the node is kept from the share for good."""
        return node.never or node.local_only

    def wanted(self, directory: Directory, name: bytes) -> Node | None:
        """What the share should hold under a name."""
        node = directory.local.get(name)
        if node is None or node.local_only:
            return None
        if node.never:
            return directory.share.get(name)
        return node

    def set_local(
        self, directory: Directory, name: bytes, node: Node | None, now: float
    ) -> Node | None:
        """Let a name of the mount mean ``node`` (None: nothing); returns what it meant before."""
        old = directory.local.get(name)
        if old is node:
            return old
        key = (directory, name)
        if old is not None:
            counted = old.counted
            self._uncount(old)
            old.links = tuple(link for link in old.links if link != key)
            del directory.local[name]
            directory.subdirectories -= old.is_dir
            self._count(old)
            if not old.links:
                old.dropped = directory, name, self.seq
                self.dirty.discard(old)
                if counted and old.dirty and now - old.dirty.first >= self.skipped.scratch_age:
                    self._skip(old, counted)
            self.touch_item(old)
        if node is not None:
            self._uncount(node)
            if node.trouble and not (node.content and node.content.torn):
                node.trouble = None  # it may have been refused for its name, or its place
            directory.local[name] = node
            node.links += (key,)
            directory.subdirectories += node.is_dir
            if node.dirty:
                self.dirty.add(node)
            self._count(node)
            self.touch_item(node)
        self._compare(key, now)
        return old

    def set_share(self, directory: Directory, name: bytes, node: Node | None, now: float) -> None:
        """The share now holds ``node`` (None: nothing) under a name."""
        old = directory.share.get(name)
        if old is node:
            return
        key = (directory, name)
        if old is not None:
            old.slinks = tuple(link for link in old.slinks if link != key)
            old.spilled = False
            del directory.share[name]
            self.touch_item(old)
        if node is not None:
            directory.share[name] = node
            node.slinks += (key,)
            if node.never and directory.local.get(name) is not node:
                self.set_never(node, False, now)  # it was on its way when it got that name
        for moved in (old, node):
            if moved is not None and moved.is_dir:
                self.account(moved)
        self._compare(key, now, by_share=True)

    def _compare(self, key: Name, now: float, *, by_share: bool = False) -> None:
        directory, name = key
        change = self.changes.get(key)
        if self.wanted(directory, name) is directory.share.get(name):
            if change is not None:
                del self.changes[key]
                self._forget_skipped()
                directory.unsynced -= 1
                self.touch_item(key)
                if not directory.unsynced:
                    self.touch_item(directory)
        elif change is None:
            wanted = self.wanted(directory, name)
            if wanted is not None and wanted.dirty is None:
                self.touch(wanted, now)  # the share has lost it, and it has to go there again
            self.changes[key] = NameChange(self.seq, now)
            directory.unsynced += 1
            self.touch_item(key)
        else:
            if not by_share:
                change.seq = self.seq
            change.trouble = None
            self.touch_item(key)

    def set_never(self, node: Node, never: bool, now: float) -> None:
        """A policy now keeps the node from the share, or no longer does."""
        if node.never != never:
            node.never = never
            self.account(node)
            self.touch_item(node)
            for link in node.links:
                self._compare(link, now)

    # -- order ---------------------------------------------------------------------------------
    #
    # A removal waits for every counted node that is older (`latest_before`); a new name for those
    # in its directory and below (`latest_below`). Both return the *latest* such node rather than
    # the first: whoever waits then waits behind a chain of predecessors, so that each completion
    # wakes one waiter instead of all.

    def holds_others(self, node: Node) -> bool:
        """Whether others wait for this node's unflushed operations."""
        return (
            node.dirty is not None
            and bool(node.links)
            and not node.trouble
            and not node.in_vain
            and not node.never
            and not node.local_only
            and (node.closed or not self.held(node))
            and not self._only_attributes(node)
        )

    def _only_attributes(self, node: Node) -> bool:
        """Whether a directory is on the share where it belongs, so that its attributes are all that
        may differ. Nobody waits for those: its times wait for everybody in it."""
        return isinstance(node, Directory) and bool(node.slinks) and node.slinks == node.links

    def held(self, node: Node) -> bool:
        """Whether the node's bytes wait for its writer: new or replaced content, still open."""
        return (
            node.writers > 0
            and node.content is not None
            and (node.content.whole or node.spilled)
            and not node.released
            and not node.fsynced
        )

    def account(self, node: Node) -> None:
        """Bring the order in line with the node's state."""
        since = node.dirty.since if node.dirty is not None and self.holds_others(node) else 0
        if since != node.counted or not since:
            self._uncount(node)
            self._count(node, holds=since > 0)

    def _count(self, node: Node, *, holds: bool | None = None) -> None:
        """``holds``: what `holds_others` says, when that is known."""
        dirty = node.dirty
        if isinstance(node, Directory) and node.below and node.links:
            parent = node.links[0][0]
            if parent.busy_dirs is None:
                parent.busy_dirs = set()
            parent.busy_dirs.add(node)
            self._bump(parent, node.below)
        if dirty is None:
            return
        if not (self.holds_others(node) if holds is None else holds):
            if not self.excluded(node) and not self._only_attributes(node):
                for parent, _ in node.links:
                    self.holding.setdefault(parent, set()).add(node)
            return
        node.counted = since = dirty.since
        self.order.add(since, node)
        for parent, _ in node.links:
            if parent.pending is None:
                parent.pending = OrderedLog()
            parent.pending.add(since, node)
            self._bump(parent, 1)

    def _uncount(self, node: Node) -> None:
        if isinstance(node, Directory) and node.below and node.links:
            parent = node.links[0][0]
            if parent.busy_dirs is not None:
                parent.busy_dirs.discard(node)
            self._bump(parent, -node.below)
        if not node.counted:
            if self.holding:
                self._release(node)
            return
        node.counted = 0
        self.order.discard(node)
        for parent, _ in node.links:
            if parent.pending is not None:
                parent.pending.discard(node)
                if not parent.pending:
                    parent.pending = None
                    if parent.meta:
                        self.touch_item(parent)  # its mode may have waited for that
            self._bump(parent, -1)

    def _release(self, node: Node) -> None:
        for parent, _ in node.links:
            if (holding := self.holding.get(parent)) is not None:
                holding.discard(node)
                if not holding:
                    del self.holding[parent]

    def _bump(self, directory: Directory | None, delta: int) -> None:
        while directory is not None:
            before = directory.below
            directory.below = before + delta
            parent = directory.parent
            if parent is not None:
                if not before:
                    if parent.busy_dirs is None:
                        parent.busy_dirs = set()
                    parent.busy_dirs.add(directory)
                elif not directory.below and parent.busy_dirs is not None:
                    parent.busy_dirs.discard(directory)
            directory = parent

    def _skip(self, node: Node, since: int) -> None:
        self.skipped.add(node, since, self.seq)
        if self.skipped.is_long:
            pending = [change.seq for change in self.changes.values()]
            pending += [n.dirty.since for n in self.dirty if n.dirty is not None]
            self.skipped.forget_before(min(pending, default=self.seq))

    def _forget_skipped(self) -> None:
        if self.skipped and not self.changes and not self.dirty:
            self.skipped.clear()

    def latest_before(
        self, seq: int, exclude: Node | None = None, besides: Container[object] = ()
    ) -> Node | None:
        """The latest counted node whose oldest unflushed operation is older than ``seq``."""
        return self.order.latest_before(seq, exclude, besides)

    def latest_below(
        self,
        directory: Directory,
        seq: int,
        exclude: Node | None = None,
        besides: Container[object] = (),
    ) -> Node | None:
        """The same, among the nodes in a directory and below it."""
        stack = [directory]
        while stack:
            directory = stack.pop()
            if directory.pending is not None:
                node = directory.pending.latest_before(seq, exclude, besides)
                if node is not None:
                    return node
            if directory.busy_dirs:
                stack += directory.busy_dirs
        return None

    # -- paths ---------------------------------------------------------------------------------

    def path(self, node: Node) -> bytes:
        """The node's path in the mount, relative to its root (one of them; b"" for the root).

        A node without a name answers with its last known place on the share, or ``b"?"``.
        """
        links = node.links or node.slinks
        if links:
            return self.name_path(*links[0])
        return b"" if node is self.root else b"?"

    def name_path(self, directory: Directory, name: bytes) -> bytes:
        """The path of a name."""
        parts = [name]
        while directory is not self.root:
            places = directory.links or directory.slinks
            if not places:
                parts.append(b"?")
                break
            directory, name = places[0]
            parts.append(name)
        return b"/".join(reversed(parts))

    def is_below(self, node: Directory, ancestor: Directory) -> bool:
        """Whether ``node`` is ``ancestor`` or inside it, in the mount."""
        at: Directory | None = node
        while at is not None:
            if at is ancestor:
                return True
            at = at.parent
        return False

    def walk_local(self, directory: Directory) -> Iterator[Node]:
        """Every node in a directory and below, the directory itself first."""
        stack: list[Node] = [directory]
        while stack:
            node = stack.pop()
            yield node
            if isinstance(node, Directory):
                stack += node.local.values()
