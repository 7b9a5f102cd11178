"""After a start: find out what became of changes that had no answer, and tidy up.

Runs in the background once the mount serves, before anything is flushed and before anybody else
asks the share for something: the tree says what the share held before those changes.
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
"""Seconds until a share that does not answer is asked again."""


async def settle_intents(volume: Volume, loaded: Loaded) -> None:
    """Take over what had happened on the share, and queue left-over temporaries for removal."""
    settler = _Settler(volume)
    left = loaded.intents
    while left:
        later, failed = [], False
        for identity, intent in left:
            try:
                await settler.settle(identity, intent)
            except (FileNotFoundError, NotADirectoryError):
                # A directory on the way to it is perhaps what another of them has renamed.
                later.append((identity, intent))
            except OSError as error:
                log.info("recovery waits for the share: %s", error)
                later.append((identity, intent))
                failed = True
        if failed:
            await trio.sleep(RETRY)
        elif len(later) == len(left):
            break  # its directory is gone: so is whatever was done in there
        left = loaded.intents = later
    volume.commit_outcome(extra=lambda: volume.journal.drop_intents([i for i, _ in left]))
    loaded.intents = []
    for node in settler.nodes:
        volume.forget_if_gone(node)
    held = {link for node in volume.tree.nodes.values() for link in node.slinks}
    volume.strays += [name for name in loaded.temporaries if name not in held]
    loaded.temporaries.clear()
    for gen in loaded.orphans:
        volume.discard(gen)
    loaded.orphans.clear()
    volume.share.settled()


class _Settler:
    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._tree = volume.tree
        self._share = volume.share
        self._files = FileFlusher(volume)
        self.nodes: set[Node] = set()
        """Those that had intents."""

    async def settle(self, identity: int, intent: Intent) -> None:
        """Find out about one change and store the answer. Raises OSError."""
        node = self._tree.nodes.get(intent.ino)
        directory = self._tree.nodes.get(intent.parent)
        keep = False
        if node is not None:
            self.nodes.add(node)
            if isinstance(directory, Directory) and directory.on_share:
                at = (directory, intent.name)
                if intent.kind == "publish":
                    await self._publish(node, at, Signature(*intent[4:]))
                elif intent.kind == "make":
                    await self._make(node, at)
                elif intent.kind == "rename":
                    await self._rename(node, at)
            # What was changed in place is compared when it is changed again.
            keep = intent.kind in ("grow", "patch", "attributes")
        if not keep:
            journal = self._volume.journal
            self._volume.commit_outcome(extra=lambda: journal.drop_intents([identity]))

    async def _publish(self, node: Node, at: Name, signature: Signature) -> None:
        st = await self._look(at)
        if st is None or not self._files.is_sent(signature)(st):
            return
        if at[0].share.get(at[1]) is node and node.base == signature:
            return
        sent = list(node.sent)
        old = at[0].share.get(at[1])
        others = self._files.claim(node, at, signature)
        node.sent = sent
        self._found(node, at, old, *others)

    async def _make(self, node: Node, at: Name) -> None:
        directory, name = at
        old = directory.share.get(name)
        st = await self._look(at)
        if old is node or st is None or stat.S_IFMT(st.st_mode) != stat.S_IFMT(node.mode):
            return
        if node.is_symlink:
            parent = await self._share.directory(directory, flush=True)
            if await self._share.work(calls.readlink, parent, name) != node.target:
                return
        elif not node.is_dir:
            other = await self._look(node.slinks[0]) if node.slinks else None
            if other is None or (other.st_dev, other.st_ino) != (st.st_dev, st.st_ino):
                return
        self._tree.set_share(directory, name, node, self._volume.clock())
        if node.base is None:
            node.base = self._volume.signature(st)
        self._found(node, at, old)

    async def _rename(self, node: Node, at: Name) -> None:
        directory, name = at
        old = [link for link in node.slinks if link != at]
        if not old or directory.share.get(name) is node:
            return
        st = await self._look(at)
        if st is None or not self._files.accepts(node)(st):
            return
        if await self._look(old[0]) is not None:
            return
        occupant, now = directory.share.get(name), self._volume.clock()
        self._tree.set_share(*old[0], None, now)
        self._tree.set_share(directory, name, node, now)
        self._found(node, at, occupant, old[0])

    async def _look(self, at: Name) -> os.stat_result | None:
        parent = await self._share.directory(at[0], flush=True)
        return await self._share.work(calls.lstat_or_none, parent, at[1])

    def _found(self, node: Node, at: Name, old: Node | None, *others: Name) -> None:
        """A change had happened: the tree has it now, and the journal gets it."""
        self._tree.settle(node, self._volume.clock())
        gone = [old] if old is not None and old is not node else []
        self.nodes.update(gone)
        self._volume.changed_on_share(*at)
        self._volume.commit_outcome(node, at, *others, *gone)
