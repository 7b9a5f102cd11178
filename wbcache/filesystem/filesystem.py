"""POSIX semantics over nodes, free of FUSE.

The parts share one volume; this is where they are put together.
"""

from __future__ import annotations

import errno
import json
import os

import trio

from wbcache.filesystem.attributes import STATFS_TTL, Attributes
from wbcache.filesystem.files import Files
from wbcache.filesystem.forgetting import Forgetter
from wbcache.filesystem.listing import Listings
from wbcache.filesystem.names import Names, error
from wbcache.node import Directory, Node
from wbcache.share.descriptor import Descriptor
from wbcache.volume import Volume

_RECOUNT = 5000
"""With more dirty nodes than this their bytes are counted less often."""


class FileSystem:
    """The file system of one mount."""

    def __init__(self, volume: Volume, nursery: trio.Nursery) -> None:
        self.volume = volume
        self.tree = volume.tree
        self._nursery = nursery
        self.listings = Listings(volume, nursery)
        self.names = Names(volume, self.listings)
        self.files = Files(volume, nursery)
        self.attributes = Attributes(volume, self.listings, self.files)
        self.forgetter = Forgetter(volume, self.listings)
        self._statvfs: os.statvfs_result | None = None
        self._statvfs_at = -STATFS_TTL
        self._statvfs_running = False
        self._pending = 0
        self._pending_at = -STATFS_TTL

    def node(self, ino: int) -> Node:
        """The node of an inode number. Raises ESTALE when there is none."""
        node = self.tree.nodes.get(ino)
        if node is None:
            raise error(errno.ESTALE)
        return node

    def directory(self, ino: int) -> Directory:
        """The same, for a directory. Raises ENOTDIR."""
        node = self.node(ino)
        if not isinstance(node, Directory):
            raise error(errno.ENOTDIR)
        return node

    def forget(self, ino: int, count: int) -> None:
        """The kernel forgot a node ``count`` times."""
        node = self.tree.nodes.get(ino)
        if node is not None:
            node.lookups -= count
            if not node.links:
                self.volume.forget_if_gone(node)
            elif not node.lookups:
                self.forgetter.forgotten(node)

    def pending_bytes(self) -> int:
        """Bytes that have not reached the share, a second old at most (half a minute when there
        are very many dirty files)."""
        now = self.volume.clock()
        if now - self._pending_at > (1.0 if len(self.tree.dirty) < _RECOUNT else 30.0):
            self._pending = sum(node.dirty_bytes for node in self.tree.dirty)
            self._pending_at = now
        return self._pending

    def statfs(self) -> os.statvfs_result:
        """The share's figures as last known; never waits for the share."""
        if self.volume.clock() - self._statvfs_at > STATFS_TTL and not self._statvfs_running:
            self._statvfs_running = True
            self._nursery.start_soon(self._refresh_statvfs)
        if self._statvfs is None:
            # What the last mount knew; for the very first moment the cache disk stands in.
            known = self.volume.journal.get_meta("statvfs")
            if known is None:
                return os.statvfs(self.volume.store.directory)
            self._statvfs = os.statvfs_result(json.loads(str(known)))
        return self._statvfs

    async def _refresh_statvfs(self) -> None:
        try:
            self._statvfs = found = await self.volume.share.look(_statvfs, self.volume.share.root)
            self._statvfs_at = self.volume.clock()
            self.volume.journal.set_meta("statvfs", json.dumps(list(found)))
        except OSError:
            self._statvfs_at = self.volume.clock()
        finally:
            self._statvfs_running = False


def _statvfs(root: Descriptor) -> os.statvfs_result:
    return os.fstatvfs(root.fd)
