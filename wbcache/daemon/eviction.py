"""Keeps the cache within its size.

Clean bytes go first, least recently used files first. When that is not enough everything that can
go to the share is due at once; and when what is left are files that are still being written, they
are spilled: they grow on the share under a temporary name, and what has arrived there is clean.
Dirty bytes are never dropped.
"""

from __future__ import annotations

import errno
import logging
import os

import trio

from wbcache.flush.flusher import Flusher
from wbcache.journal import BALLAST_BYTES
from wbcache.node import Content, Node
from wbcache.volume import Volume

log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two looks at the disk."""

PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two rounds while somebody waits for room; more when a round takes long."""

SEARCH_INTERVAL = 2.0
"""Seconds between two searches among all files while somebody waits for room."""

SCRAPS = 1 << 20
"""Fewer clean bytes (in a small cache, less than a 2,048th of it) are left in an open file: its
writers would have to wait while they are given back."""

_BATCH = 500


class Evictor:
    """Makes room when the cache is over its limit or the disk under its floor."""

    def __init__(self, volume: Volume, flusher: Flusher) -> None:
        self._volume = volume
        self._space = volume.space
        self._flusher = flusher
        self._searched_at = -SEARCH_INTERVAL

    async def run(self) -> None:
        """Watch for ever."""
        took = 0.0
        self._volume.journal.hold_ballast()
        while True:
            with trio.move_on_after(INTERVAL):
                await self._space.wanted.wait()
            await trio.sleep(min(max(PAUSE, 5 * took), LONGEST_PAUSE))
            began = self._volume.clock()
            await self._make_room()
            took = self._volume.clock() - began
            if not self._space.waiting:
                self._space.wanted = trio.Event()

    async def _make_room(self) -> None:
        space = self._space
        space.look()
        if space.free > 2 * BALLAST_BYTES:
            self._volume.journal.hold_ballast()
        delivered, self._volume.delivered = self._volume.delivered, []
        if space.missing > 0:
            await self._evict(dict.fromkeys(delivered), space.missing)
        now = self._volume.clock()
        if space.missing > 0 and now - self._searched_at >= SEARCH_INTERVAL:
            self._searched_at = now
            await self.evict(space.missing)
        if space.waiting:
            self._flusher.press(True)
            await self._relieve()
        elif space.missing <= 0:
            self._flusher.press(False)

    async def _relieve(self) -> None:
        """Somebody waits: have dirty files go to the share before they are complete, if need be."""
        going, stuck, held = 0, False, []
        for i, node in enumerate(list(self._volume.tree.dirty)):
            content = node.content
            if content is not None and node.trouble is None and not node.never:
                if node.spill:
                    going += content.blocks
                    self._volume.tree.touch_item(node)  # it may have been written to
                elif self._volume.tree.held(node):
                    held.append((content.blocks, node))
                elif self._flusher.is_waiting(node):
                    stuck = True
                else:
                    going += content.blocks
            if i % _BATCH == 0:
                await trio.lowlevel.checkpoint()
        space = self._space
        if going < space.portion and held:
            blocks, node = max(held, key=lambda found: found[0])
            if blocks and self._volume.tree.held(node):
                node.spill = True
                log.info("no room for %r: it goes to the share as it is written", _name(node))
                self._volume.tree.touch_item(node)
                self._flusher.hurry()
                return
        left = going or stuck or held or self._volume.retired or self._flusher.running
        # What became clean since the last search among all files is room as well.
        if not left and not await self.evict(max(1, space.missing)):
            space.refuse()

    async def evict(self, excess: int) -> int:
        """Free up to ``excess`` bytes; returns how many were freed."""
        clean: list[Node] = []
        for i, node in enumerate(list(self._volume.tree.nodes.values())):
            if node.content is not None and node.content.clean:
                clean.append(node)
            if i % _BATCH == 0:
                await trio.lowlevel.checkpoint()
        clean.sort(key=lambda node: node.content.used if node.content else 0.0)
        return await self._evict(dict.fromkeys(clean), excess)

    async def _evict(self, nodes: dict[Node, None], excess: int) -> int:
        """The same among some nodes, in this order."""
        volume, freed = self._volume, 0
        scraps = min(SCRAPS, self._space.limit >> 11)
        for node in nodes:
            if freed >= excess:
                break
            content = node.content
            if content is None or not content.clean or not _may_lose_bytes(node):
                continue
            if content in volume.freezer:
                continue  # perhaps until the share answers
            before = content.blocks
            if not (node.dirty or node.content_dirty or content.pins or node.busy):
                self._drop(node)
                freed += before
            elif not node.handles or content.clean.size(node.size) >= scraps:
                await self._punch(node, content)
                freed += before - content.blocks
            await trio.lowlevel.checkpoint()
        if volume.retired:
            await volume.sync_journal()
        await volume.retired.empty_trash()
        return freed

    def _drop(self, node: Node) -> None:
        volume, content = self._volume, node.content
        assert content is not None
        gen = content.gen
        node.content = None
        volume.commit_outcome(node, extra=lambda: volume.journal.drop_extents(gen))
        volume.retire(content)

    async def _punch(self, node: Node, content: Content) -> None:
        volume = self._volume
        async with volume.freezer.freeze(content):
            if node.content is not content or not _may_lose_bytes(node):
                return
            ranges, kept = list(content.clean), content.clean.copy()
            for start, stop in ranges:
                content.clean.remove(start, stop)

            def undo() -> None:
                content.clean = kept

            try:
                # The journal first: it must never call bytes present that are gone, not even after
                # a power loss.
                volume.commit(node, undo=undo, extra=lambda: volume.journal.put_extents(content))
                await volume.sync_journal()
                with volume.using(content) as fd:
                    mtime = os.fstat(fd).st_mtime_ns
                    try:
                        # It may have to wait until the disk has written what is punched out.
                        await trio.to_thread.run_sync(
                            volume.store.punch, fd, ranges, limiter=volume.local_lane
                        )
                        os.utime(fd, ns=(mtime, mtime))
                    finally:
                        volume.count_blocks(content)
            except OSError as error:
                log.error("clean bytes stay: %s", os.strerror(error.errno or errno.EIO))


def _may_lose_bytes(node: Node) -> bool:
    """Whether the share can give the clean bytes back.

    Once a finished transfer is published all its bytes count as clean, so they stay until then.
    """
    return node.transfer is None and bool(node.slinks)


def _name(node: Node) -> str:
    return os.fsdecode(node.links[0][1]) if node.links else f"inode {node.ino}"
