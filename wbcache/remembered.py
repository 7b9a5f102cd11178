"""What was seen of the share, its directories' listings above all, kept over the end of a mount.

A mount that starts while the share does not answer lists and stats what was seen before, under the
inode numbers that it had. It is knowledge, not truth: the first listing that the share answers
takes its place, and wherever the journal's own rows say something of a name, they win. It is
written in the background, a few rows at a time, and read when a directory is first used.
"""

from __future__ import annotations

import logging
import math
import stat
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import trio

from wbcache.journal import Journal, SeenDirectory, SeenRow
from wbcache.node import Directory, Node, Signature
from wbcache.tree import Tree

log = logging.getLogger(__name__)

MAX_NAMES = 1_000_000
"""Names kept for all directories together; the directories seen longest ago go first."""

NAME_BYTES = 160
"""What a name takes of the disk, roughly."""

INTERVAL = 2.0
"""Seconds between two rounds of writing."""

_SLICE = 200
"""Rows written at a time, while nothing else runs."""

_PACE = 10
"""Writing rests for this many times as long as it took."""

_USED_AGAIN = 600
"""Seconds after which it is worth noting that a directory is still in use."""


class Remembered:
    """Stores what is learnt of the share's directories, and gives it back after a start."""

    def __init__(self, tree: Tree, journal: Journal, *, max_names: int = MAX_NAMES) -> None:
        self._tree = tree
        self._journal = journal
        self._max_names = max_names
        self._stored: OrderedDict[int, SeenDirectory] = OrderedDict()
        """By inode number; the directory seen longest ago is first."""
        self._names = 0
        for row in journal.seen_directories():
            self._stored[row.ino] = row
            self._names += row.names + 1
        self._unread = set(self._stored)
        """Directories of which the rows have not been read since the start."""
        self._new_nodes: dict[Node, None] = {}
        self._new_listings: dict[Directory, None] = {}
        self._storing = False
        """What was new a moment ago is being stored."""

    # -- what is learnt --------------------------------------------------------------------------

    def saw(self, node: Node) -> None:
        """A name or the attributes of a node were learnt from the share."""
        self._new_nodes[node] = None

    def listed(self, directory: Directory) -> None:
        """Every name in a directory is known."""
        self._unread.discard(directory.ino)
        known = self._stored.get(directory.ino)
        if known is None:
            self._new_nodes.update(dict.fromkeys(directory.share.values()))
        if known is None or not known.complete:
            self._new_listings[directory] = None
        at: Directory | None = directory
        now = time.time()
        while at is not None:
            # The way to it must be known at least as long.
            known = self._stored.get(at.ino)
            if known is not None:
                self._stored.move_to_end(at.ino)
                if known.names != len(at.share) or now - known.used > _USED_AGAIN:
                    self._new_listings[at] = None
            at = at.parent

    def made(self, directory: Directory) -> Callable[[], None]:
        """A directory was made on the share, where there was none: it holds nothing.

        Returns what stores that, for inside the transaction that stores the directory.
        """
        self._make_room(directory)
        rows = [row for row in [self._stored.get(directory.ino)] if row is not None]
        return lambda: self._journal.put_seen_directories(rows, self._tree.next_ino)

    def keeps(self, directory: Directory) -> bool:
        """Whether all that the tree knows of the names in a directory is stored."""
        known = self._stored.get(directory.ino)
        return (
            known is not None
            and not self._storing
            and bool(known.complete)
            and known.names == len(directory.share)
            and directory not in self._new_listings
            and not any(node in self._new_nodes for node in directory.share.values())
        )

    def let_go(self, directory: Directory) -> None:
        """The tree has forgotten the names in a directory: they are read again when it is used."""
        if directory.ino in self._stored:
            self._unread.add(directory.ino)

    def forget(self) -> None:
        """It is another share from now on."""
        self._try(partial(self._journal.forget_seen, *self._stored))
        self._stored.clear()
        self._unread.clear()
        self._names = 0

    # -- storing ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Store for ever what is learnt, without holding up anything else."""
        while True:
            await trio.sleep(INTERVAL)
            self._storing = True
            for store in self._rounds():
                began = time.perf_counter()
                self._try(store)
                await trio.sleep(_PACE * (time.perf_counter() - began))
            self._storing = False

    def store(self) -> None:
        """Store everything learnt so far: for the end of a mount."""
        for store in self._rounds():
            self._try(store)

    def _try(self, store: Callable[[], None]) -> None:
        try:
            store()
        except OSError as error:
            log.debug("what the share holds is not remembered: %s", error)

    def _rounds(self) -> list[Callable[[], None]]:
        """The transactions that store everything learnt so far, in order."""
        nodes, directories = list(self._new_nodes), self._new_listings
        self._new_nodes, self._new_listings = {}, {}
        for node in nodes:
            if not node.journaled:
                directories.update(dict.fromkeys(parent for parent, _ in node.slinks))
        for directory in directories:
            self._make_room(directory)
        slices = [nodes[at : at + _SLICE] for at in range(0, len(nodes), _SLICE)]
        rounds: list[Callable[[], None]] = [partial(self._store_nodes, part) for part in slices]
        if directories:
            # A directory counts as listed once all of its names are stored.
            rounds.append(partial(self._store_directories, list(directories)))
        return rounds

    def _make_room(self, directory: Directory) -> None:
        """Count a directory, and forget others until it fits. One too large is left out."""
        before = self._stored.pop(directory.ino, None)
        if before is not None:
            self._names -= before.names + 1
        names = len(directory.share)
        if names + 1 > self._max_names // 2:
            if before is not None:
                self._try(partial(self._journal.forget_seen, directory.ino))
            return
        while self._names + names + 1 > self._max_names:
            oldest, row = self._stored.popitem(last=False)
            self._names -= row.names + 1
            self._unread.discard(oldest)
            self._try(partial(self._journal.forget_seen, oldest))
        complete = directory.listed_at is not None
        self._stored[directory.ino] = SeenDirectory(
            directory.ino, names, int(time.time()), complete
        )
        self._names += names + 1

    def _store_nodes(self, nodes: list[Node]) -> None:
        rows: list[SeenRow] = []
        own: list[Node] = []
        for node in nodes:
            if node.journaled:
                if node.dirty is None and node.slinks:
                    own.append(node)
                continue
            for directory, name in node.slinks:
                if directory.ino in self._stored:
                    rows.append(_row(directory, name, node))
        if rows or own:
            next_ino = self._tree.next_ino
            self._journal.save(*own, extra=lambda: self._journal.put_seen(rows, next_ino))

    def _store_directories(self, directories: list[Directory]) -> None:
        rows = [
            self._stored[directory.ino]
            for directory in directories
            if directory.ino in self._stored and directory.on_share
        ]
        next_ino = self._tree.next_ino
        self._journal.save(extra=lambda: self._journal.put_seen_directories(rows, next_ino))

    # -- recalling -------------------------------------------------------------------------------

    def recall(self, directory: Directory, now: float) -> list[Node]:
        """Take over what an earlier mount knew of a directory, if this one has not listed it.

        If all names were known, it counts as listed long ago. Returns the nodes made known.
        """
        if directory.ino not in self._unread:
            return []
        self._unread.discard(directory.ino)
        found = []
        tree = self._tree
        for row in self._journal.seen(directory.ino):
            name = row.name
            known = name in directory.share or name in directory.local
            if known or (directory, name) in tree.changes or row.ino in tree.nodes:
                continue
            node = _node(row)
            tree.add(node)
            tree.set_share(directory, name, node, now)
            tree.set_local(directory, name, node, now)
            found.append(node)
        if self._stored[directory.ino].complete:
            directory.listed_at = -math.inf
        return found


def _row(directory: Directory, name: bytes, node: Node) -> SeenRow:
    base = node.base or (None, None, None)
    return SeenRow(
        directory.ino,
        name,
        node.ino,
        node.mode,
        node.uid,
        node.gid,
        node.size,
        node.mtime,
        node.ctime,
        node.atime,
        node.target or None,
        *base,
    )


def _node(row: SeenRow) -> Node:
    kind = Directory if stat.S_ISDIR(row.mode) else Node
    node = kind(row.ino, row.mode, row.uid, row.gid)
    node.size, node.target = row.size, row.target or b""
    node.mtime, node.ctime, node.atime = row.mtime, row.ctime, row.atime
    if row.base_size is not None:
        assert row.base_mtime is not None and row.base_ino is not None
        node.base = Signature(row.base_size, row.base_mtime, row.base_ino)
        node.attrs_at = -math.inf
    return node
