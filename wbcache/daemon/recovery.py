"""After a start: find out what became of changes that had no answer, and tidy up.

Runs in the background once the mount serves, before anything is flushed and before any listing of
the share is believed: a file that we had renamed there must not look removed here and new there.
"""

from __future__ import annotations

import logging
import os
import stat

import trio

from wbcache.flush.files import FileFlusher
from wbcache.journal import Intent
from wbcache.loading import Loaded
from wbcache.node import Directory, Node, Signature
from wbcache.share import calls
from wbcache.tree import Name
from wbcache.volume import Volume

log = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds between two tries when the share does not answer as it should."""


async def settle_intents(volume: Volume, loaded: Loaded) -> None:
    """Take over what had happened on the share, and queue left-over temporaries for removal."""
    settler = _Settler(volume)
    for _, intent in loaded.intents:
        while True:
            try:
                await settler.settle(intent)
                break
            except FileNotFoundError:
                break  # its directory is not there either: nothing was done in it
            except OSError as error:
                log.info("recovery waits for the share: %s", error)
                await trio.sleep(RETRY)
    done = [
        identity
        for identity, intent in loaded.intents
        if intent.kind in ("rename", "make", "publish") or intent.ino not in volume.tree.nodes
    ]
    volume.commit_outcome(extra=lambda: volume.journal.drop_intents(done))
    loaded.intents.clear()
    held = {link for node in volume.tree.nodes.values() for link in node.slinks}
    volume.strays += [name for name in loaded.temporaries if name not in held]
    loaded.temporaries.clear()
    for gen in loaded.orphans:
        volume.discard(gen)
    loaded.orphans.clear()
    volume.settled.set()


class _Settler:
    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._tree = volume.tree
        self._files = FileFlusher(volume)

    async def settle(self, intent: Intent) -> None:
        """Look at the place that an intent names; if it has happened, the share view says so."""
        directory = self._tree.nodes.get(intent.parent)
        if intent.kind not in ("rename", "make", "publish"):
            return
        if not isinstance(directory, Directory) or not directory.on_share:
            return
        at = (directory, intent.name)
        node = self._tree.nodes.get(intent.ino)
        if node is not None and directory.share.get(intent.name) is node and not node.sent:
            return
        st = await self._stat(at)
        if st is None:
            return
        if intent.kind == "rename":
            await self._renamed(node, at, st)
        elif intent.kind == "make":
            if stat.S_IFMT(st.st_mode) == stat.S_IFMT(intent.size) and not at[0].share.get(at[1]):
                self._made(node, at, st)
        elif self._files.is_sent(Signature(intent.size, intent.mtime, intent.sino))(st):
            self._made(node, at, st)

    async def _stat(self, at: Name) -> os.stat_result | None:
        parent = await self._volume.share.directory(at[0], flush=True)
        return await self._volume.share.work(calls.lstat_or_none, parent, at[1])

    async def _renamed(self, node: Node | None, at: Name, st: os.stat_result) -> None:
        old = [link for link in node.slinks if link != at] if node is not None else []
        if node is None or not old or not self._files.accepts(node)(st):
            return
        if not old[0][0].on_share or await self._stat(old[0]) is not None:
            return
        self._tree.set_share(*old[0], None, self._volume.clock())
        self._take_over(node, at, old[0])

    def _made(self, node: Node | None, at: Name, st: os.stat_result) -> None:
        """What we were about to make is there; it may have been removed in the mount since."""
        if node is None:
            kind = Directory if stat.S_ISDIR(st.st_mode) else Node
            node = kind(self._tree.allocate(), st.st_mode)
            self._tree.add(node)
        node.base = self._volume.signature(st)
        self._take_over(node, at)

    def _take_over(self, node: Node, at: Name, *others: Name) -> None:
        now = self._volume.clock()
        self._tree.next_seq()
        self._tree.set_share(*at, node, now)
        self._tree.settle(node, now)
        self._volume.commit_outcome(node, at, *others)
