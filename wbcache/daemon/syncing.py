"""Makes what was written durable within a second or so, though nobody asked for it.

An fsync of the application is not what this is about: that is made at once. This bounds what a
power loss can tear. See `loading._after_power_loss` for what becomes of the rest.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time

import trio

from wbcache.node import Node
from wbcache.volume import Volume

log = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two rounds; more when a round takes long."""

OPEN_AGE = 10.0
"""Seconds after which a file is synced though it is still being written."""

MANY = 32
"""From so many files on the whole disk is synced at once, which is then faster."""

_libc = ctypes.CDLL(None, use_errno=True)


class Syncer:
    """Syncs cache files in the background."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    async def run(self) -> None:
        """Sync for ever."""
        took = 0.0
        while True:
            await trio.sleep(max(INTERVAL, 5 * took))
            began = time.monotonic()
            if self._volume.unsynced:
                await self._round()
            elif self._volume.retired:
                await self._volume.sync_journal()
            took = time.monotonic() - began

    async def _round(self) -> None:
        volume, now = self._volume, self._volume.clock()
        due: list[Node] = []
        for node, since in list(volume.unsynced.items()):
            dirty = node.dirty
            if not node.links or dirty is None or node.content is None or not node.content.fresh:
                del volume.unsynced[node]
            elif not node.writers or now - dirty.last > INTERVAL or now - since > OPEN_AGE:
                del volume.unsynced[node]
                due.append(node)
        if not due:
            return
        if len(due) >= MANY:
            await self._sync_disk(due)
        else:
            for node in due:
                try:
                    await volume.sync_content(node)
                except OSError as error:
                    log.error("the cache disk: %s", error)
        await volume.sync_journal()

    async def _sync_disk(self, nodes: list[Node]) -> None:
        volume = self._volume
        before = [(n, n.content, n.content.version, n.size) for n in nodes if n.content]
        names = volume.store.unsynced_names.copy()
        await trio.to_thread.run_sync(_syncfs, volume.store.directory, limiter=volume.local_lane)
        volume.store.unsynced_names -= names
        items = []
        for node, content, version, size in before:
            if node.content is content and node.links and node.dirty is not None:
                content.synced = size
                content.fresh = content.version != version
                items.append(node)
        volume.commit_outcome(*items)


def _syncfs(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(fd)
