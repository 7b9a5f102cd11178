"""Keeps the cache within its size: clean bytes go, least recently used files first."""

from __future__ import annotations

import logging
import os

import trio

from wbcache.node import Node
from wbcache.volume import Volume

log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two looks at the disk."""

_BATCH = 500


class Evictor:
    """Drops clean bytes when the cache is over its limit or the disk under its floor."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            await trio.sleep(INTERVAL)
            excess = await self._excess()
            if excess > 0:
                await self.evict(excess)

    async def _excess(self) -> int:
        """Bytes above what the cache may take."""
        volume = self._volume
        disk = os.statvfs(volume.store.directory)
        total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        short = volume.config.cache.min_free.resolve(total) - free
        used = 0
        for i, node in enumerate(list(volume.tree.nodes.values())):
            content = node.content
            if content is not None:
                used += content.dirty.size(node.size) + content.clean.size(node.size)
            if i % _BATCH == 0:
                await trio.lowlevel.checkpoint()
        return max(short, used - volume.config.cache.size.resolve(total))

    async def evict(self, excess: int) -> int:
        """Free up to ``excess`` bytes; returns how many were freed."""
        volume = self._volume
        clean: list[Node] = [
            node
            for node in volume.tree.nodes.values()
            if node.content is not None and node.content.clean and _may_lose_bytes(node)
        ]
        clean.sort(key=lambda node: node.content.used if node.content else 0.0)
        freed = 0
        for node in clean:
            if freed >= excess:
                break
            content = node.content
            if content is None or not _may_lose_bytes(node):
                continue
            freed += content.clean.size(node.size)
            if node.dirty is None and not node.handles:
                self._drop(node)
            else:
                self._punch(node)
            await trio.lowlevel.checkpoint()
        await volume.empty_trash()
        return freed

    def _drop(self, node: Node) -> None:
        volume, content = self._volume, node.content
        assert content is not None
        gen = content.gen
        node.content = None
        volume.commit_outcome(node, extra=lambda: volume.journal.drop_extents(gen))
        content.pins = 0
        volume.retire(content)

    def _punch(self, node: Node) -> None:
        volume, content = self._volume, node.content
        assert content is not None
        ranges = list(content.clean)
        for start, stop in ranges:
            content.clean.remove(start, stop)
        # The journal first: it must never call bytes present that are gone.
        volume.commit_outcome(node, extra=lambda: volume.journal.put_extents(content))
        mtime = os.fstat(volume.store.fd(content)).st_mtime_ns
        for start, stop in ranges:
            volume.store.punch(content, start, stop)
        os.utime(volume.store.fd(content), ns=(mtime, mtime))


def _may_lose_bytes(node: Node) -> bool:
    """Whether the share can give the clean bytes back.

    Once a finished transfer is published all its bytes count as clean, so they stay until then.
    """
    return not node.busy and node.transfer is None and bool(node.slinks)
