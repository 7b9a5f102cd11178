"""Whether a change on the share has happened, when its answer was lost: by a kill, or by an error.

The share is looked at where the intent says that the change would show. A call that failed may have
been made all the same, as far as anybody can tell: until that is known nothing else is done with
the node or the name.
"""

from __future__ import annotations

import os
import stat
from functools import partial

from wbcache.flush import blocking
from wbcache.flush.files import FileFlusher
from wbcache.flush.transfer import Transfer
from wbcache.journal import Intent
from wbcache.node import Directory, Node, Signature
from wbcache.share import calls
from wbcache.tree import Name
from wbcache.volume import Volume


class Settler:
    """Finds out what became of changes of which only the intent is known."""

    def __init__(self, volume: Volume, files: FileFlusher) -> None:
        self._volume = volume
        self._tree = volume.tree
        self._files = files
        self._touched: set[Node] = set()

    async def settle(self, intent: Intent) -> None:
        """Look at the place that an intent names; if it has happened, the share view says so."""
        directory, node = (self._tree.nodes.get(ino) for ino in (intent.parent, intent.ino))
        if not isinstance(directory, Directory) or not directory.on_share:
            return
        at = (directory, intent.name)
        if node is None:
            if intent.kind != "publish":
                return
            # It was removed here before its publish began.
            node = Node(self._tree.allocate(), stat.S_IFREG | 0o600)
            self._tree.add(node)
        self._touched.add(node)
        if intent.kind == "rename":
            await self._renamed(node, at)
        elif intent.kind == "make":
            await self._made(node, at)
        elif intent.kind == "publish":
            await self._published(node, at, Signature(intent.size, intent.mtime, intent.sino))

    def forget(self, identity: int, intent: Intent) -> None:
        """The outcome is known and stored. What was changed in place is compared with the share
        when it is changed again; until then the intent explains it."""
        if intent.kind not in ("grow", "patch", "attributes") or (
            intent.ino not in self._tree.nodes
        ):
            journal = self._volume.journal
            self._volume.commit_outcome(extra=lambda: journal.drop_intents([identity]))

    def finish(self) -> None:
        """Forget the removed nodes of which the share has no trace."""
        for node in self._touched:
            self._volume.forget_if_gone(node)

    async def _stat(self, at: Name) -> os.stat_result | None:
        parent = await self._volume.share.directory(at[0], flush=True)
        return await self._volume.share.stat(parent, at[1], flush=True)

    async def _published(self, node: Node, at: Name, signature: Signature) -> None:
        if at[0].share.get(at[1]) is node and node.base == signature:
            return
        st = await self._stat(at)
        if st is None or not self._files.is_sent(signature)(st):
            return
        transfer = node.transfer
        if isinstance(transfer, Transfer) and transfer.signature == signature:
            self._files.arrived(node, transfer, at, certain=False)
        else:
            old, doubts = at[0].share.get(at[1]), node.sent
            others = self._files.claim(node, at, signature)
            node.sent = doubts
            self._take_over(node, at, old, others)

    async def _made(self, node: Node, at: Name) -> None:
        directory, name = at
        old = directory.share.get(name)
        st = await self._stat(at)
        if old is node or st is None or stat.S_IFMT(st.st_mode) != stat.S_IFMT(node.mode):
            return
        if node.is_symlink:
            parent = await self._volume.share.directory(directory, flush=True)
            if not await self._volume.share.work(calls.is_link_to, parent, name, node.target):
                return
        elif node.is_dir and (old is not None or node.slinks):
            return
        elif node.is_file:
            own = await self._stat(node.slinks[0]) if node.slinks else None
            if own is None or not os.path.samestat(own, st):
                return
        now = self._volume.clock()
        if isinstance(node, Directory):
            parent = await self._volume.share.directory(directory, flush=True)
            if await self._volume.share.work(blocking.is_empty, parent, name):
                node.listed_at = now  # nobody has to ask what is in it
        if node.base is None:
            node.base = self._volume.signature(st)
        self._tree.set_share(directory, name, node, now)
        self._take_over(node, at, old, [])

    async def _renamed(self, node: Node, at: Name) -> None:
        directory, name = at
        places = [link for link in node.slinks if link != at]
        old = directory.share.get(name)
        if old is node or not places:
            return
        st = await self._stat(at)
        if st is None or not self._files.accepts(node)(st):
            return
        # Of several names of a file any may have been the one.
        gone = [link for link in places if link[0].on_share and await self._stat(link) is None]
        if not gone:
            return
        now = self._volume.clock()
        for link in gone:
            self._tree.set_share(*link, None, now)
        self._tree.set_share(directory, name, node, now)
        self._take_over(node, at, old, gone)

    def _take_over(self, node: Node, at: Name, old: Node | None, others: list[Name]) -> None:
        """The tree has what had happened: the journal gets it too."""
        self._tree.next_seq()
        self._tree.settle(node, self._volume.clock())
        gone = [old] if old is not None and old is not node else []
        self._touched.update(gone)
        keep = partial(self._files.keep_doubts, others)
        self._volume.commit_outcome(node, at, *others, *gone, extra=keep)
