"""What is known only from the share is forgotten when the kernel has forgotten it.

Or else a walk over a tree of a million files would take a gigabyte for as long as the mount lasts.
A directory's names go together, once they are all stored (`remembered`): when it is used again they
come back from there, under their inode numbers, as at the start of a mount.
"""

from __future__ import annotations

import time

import trio

from wbcache.filesystem.listing import Listings
from wbcache.node import Directory, Node
from wbcache.volume import Volume

KEEP = 50_000
"""So many nodes may stay in memory, which take about as many kilobytes."""

INTERVAL = 1.0
"""Seconds between two looks at what has been forgotten."""

_PACE = 20
"""It rests for this many times as long as it took."""

_SLICE = 2000
"""Nodes looked at before others are served."""


class Forgetter:
    """Gives back the memory of names that nobody uses."""

    def __init__(self, volume: Volume, listings: Listings, *, keep: int = KEEP) -> None:
        self._volume = volume
        self._listings = listings
        self._tree = volume.tree
        self._keep = keep
        self._candidates: dict[Directory, None] = {}
        """Directories in which something was forgotten by the kernel."""

    def forgotten(self, node: Node) -> None:
        """The kernel knows a node no longer."""
        if node.slinks and not node.journaled:
            self._candidates[node.slinks[0][0]] = None

    async def run(self) -> None:
        """Forget for ever."""
        took = 0.0
        while True:
            await trio.sleep(max(INTERVAL, _PACE * took))
            began = time.perf_counter()
            await self.tidy()
            took = time.perf_counter() - began

    async def tidy(self) -> None:
        """Forget what can be forgotten, until few enough nodes are left."""
        later: dict[Directory, None] = {}
        looked_at = 0
        while self._candidates and len(self._tree.nodes) > self._keep:
            directory, _ = self._candidates.popitem()
            if self._tree.nodes.get(directory.ino) is not directory:
                continue
            if self._is_unused(directory):
                self._forget(directory)
                if not directory.lookups:
                    self.forgotten(directory)
            elif directory.local:
                later[directory] = None
            looked_at += len(directory.local) + 1
            if looked_at > _SLICE:
                looked_at = 0
                await trio.lowlevel.checkpoint()
        self._candidates.update(later)

    def _is_unused(self, directory: Directory) -> bool:
        """Whether nothing is known in a directory but what the share has shown and is stored."""
        return (
            directory.listed_at is not None
            and not _is_looked_into(directory)
            and not directory.unsynced
            and not directory.arriving
            and len(directory.local) == len(directory.share)
            and all(map(self._is_bare, directory.local.values()))
            and self._volume.remembered.keeps(directory)
        )

    def _is_bare(self, node: Node) -> bool:
        """Whether a node is nothing but a name of the share that nobody uses."""
        if node.lookups or node.handles or node.journaled or node.ours or node.busy:
            return False
        if node.content is not None or node.dirty is not None or node.transfer is not None:
            return False
        if len(node.slinks) != 1 or node.links != node.slinks or node.never:
            return False
        if isinstance(node, Directory):
            return not (node.local or node.share or node.pins or _is_looked_into(node))
        return node.share_fd is None and not self._listings.is_asking(node)

    def _forget(self, directory: Directory) -> None:
        volume = self._volume
        for node in directory.local.values():
            del self._tree.nodes[node.ino]
            if isinstance(node, Directory):
                volume.share.drop_directory(node)
                volume.remembered.let_go(node)
        directory.local.clear()
        directory.share.clear()
        directory.subdirectories = 0
        directory.listed_at = None
        volume.remembered.let_go(directory)


def _is_looked_into(directory: Directory) -> bool:
    """Whether somebody uses a directory's names, or they are being listed anew."""
    return bool(
        directory.users or directory.handles or directory.hot or directory.listing is not None
    )
