"""From the journal's rows back to a tree: what every start does, after a kill or not.

docs/internals.md has the crash table: what may be on disk, and what repairs it.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

from wbcache.extents import END, Extents
from wbcache.journal import (
    FLAG_APPEND_ONLY,
    FLAG_FRESH,
    FLAG_OURS,
    FLAG_RENAMED,
    FLAG_TORN,
    Intent,
    Journal,
    extents_of,
)
from wbcache.node import META_XATTR, ROOT_INO, Content, Directory, Dirty, Node, Signature
from wbcache.share.names import is_hidden
from wbcache.store import CacheFiles
from wbcache.tree import Name, NameChange, Tree


@dataclass
class Loaded:
    """What a cache directory holds."""

    tree: Tree
    next_gen: int
    temporaries: list[Name] = field(default_factory=list)
    """Ours on the share, to be removed."""
    intents: list[tuple[int, Intent]] = field(default_factory=list)
    """Changes on the share of which the outcome is not known, with their ids."""
    orphans: list[int] = field(default_factory=list)
    """Cache files that belong to nothing."""
    torn: list[Node] = field(default_factory=list)
    """Files of which a power loss may have taken a part just now."""
    cut: list[Node] = field(default_factory=list)
    """Files of which somebody has taken bytes out of the cache."""


TORN = (
    "it may be incomplete: a power loss came before it was synced,"
    " or its cache file was removed or cut"
)


def load(
    journal: Journal, store: CacheFiles, clock: Callable[[], float], *, power_lost: bool = False
) -> Loaded:
    """Rebuild the tree. Reads the local disk only; after a power loss it cuts unsynced appends."""
    loader = _Loader(journal, store, clock(), power_lost=power_lost)
    loader.nodes()
    loader.names()
    loader.extents()
    loader.xattrs()
    loader.dirty()
    return loader.result()


class _Loader:
    def __init__(
        self, journal: Journal, store: CacheFiles, now: float, *, power_lost: bool
    ) -> None:
        self._power_lost = power_lost
        self._torn: list[Node] = []
        self._cut: list[Node] = []
        self._journal = journal
        self._store = store
        self._now = now
        root = Directory(ROOT_INO, stat.S_IFDIR | 0o755)
        self._tree = Tree(root)
        self._since: dict[Node, int] = {}
        self._contents: dict[int, tuple[Node, Content]] = {}
        self._files = set(store.generations())
        self._marked: set[int] = set()
        """Inode numbers with extended attributes."""

    def nodes(self) -> None:
        tree, contents = self._tree, self._contents
        for row in self._journal.rows("node"):
            ino, mode, uid, gid, rdev, atime, mtime, ctime, size, target, *rest = row
            base_size, base_mtime, base_ino, gen, whole, base_limit, gen_seq, *rest = rest
            meta, since, flags, synced = rest
            node: Node
            if ino == ROOT_INO:
                node = tree.root
            elif stat.S_ISDIR(mode):
                node = Directory(ino, mode)
            else:
                node = Node(ino, mode)
            node.mode, node.uid, node.gid, node.rdev = mode, uid, gid, rdev
            # Mostly the same: one number then does for all.
            node.atime = atime
            node.mtime = atime if mtime == atime else mtime
            node.ctime = node.mtime if ctime == mtime else ctime
            node.size, node.target, node.meta = size, target or b"", meta
            node.append_only = bool(flags & FLAG_APPEND_ONLY)
            node.ours = bool(flags & FLAG_OURS)
            node.journaled = True
            if isinstance(node, Directory):
                node.renamed = bool(flags & FLAG_RENAMED)
            if base_size is not None:
                node.base = Signature(base_size, base_mtime, base_ino)
                node.attrs_at = -math.inf  # known, but not how long ago
            # Two nodes with one generation: the outcome of the older one could not be stored.
            other = contents.get(gen)
            if other is not None and other[1].seq < (gen_seq or 0):
                other[0].content = None
            if gen is not None and (other is None or other[0].content is None):
                content = Content(gen, whole=bool(whole), base_limit=base_limit, seq=gen_seq or 0)
                content.exists = gen in self._files
                content.synced = -1 if synced is None else synced
                content.fresh = bool(flags & FLAG_FRESH)
                content.torn = bool(flags & FLAG_TORN)
                if content.torn:
                    node.trouble = TORN
                node.content = content
                contents[gen] = (node, content)
                if content.seq > tree.seq:
                    tree.seq = content.seq
            if since:
                self._since[node] = since
                if since > tree.seq:
                    tree.seq = since
            tree.add(node)

    def names(self) -> None:
        tree = self._tree
        for row in self._journal.rows("name"):
            parent, name, local, share, seq, time_ns = row
            directory = tree.nodes.get(parent)
            if not isinstance(directory, Directory) or not isinstance(name, bytes):
                continue
            if name in (b"", b".", b"..") or b"/" in name:
                continue  # nobody made it: it would lead elsewhere
            here = tree.nodes.get(local) if isinstance(local, int) else None
            there = tree.nodes.get(share) if isinstance(share, int) else None
            link = (directory, name)
            if here is not None:
                directory.local[name] = here
                here.links += (link,)
                directory.subdirectories += here.is_dir
            if there is not None:
                directory.share[name] = there
                there.slinks += (link,)
                there.spilled = is_hidden(name, at_root=False)
            if isinstance(seq, int):
                tree.seq = max(tree.seq, seq)
                if seq:
                    tree.changes[link] = NameChange(seq, self._now)
            if isinstance(time_ns, int) and seq:
                # A change of a name is a change of its directory, and of the node. When the
                # directory's own row is newer, its times may have been set since.
                if time_ns > directory.ctime:
                    directory.mtime = directory.ctime = time_ns
                    tree.stamped.add(directory)
                if here is not None:
                    here.ctime = max(here.ctime, time_ns)

    def extents(self) -> None:
        ranges: dict[int, list[tuple[int, int, int]]] = {}
        for row in self._journal.rows("extent"):
            _, gen, start, stop, state = row
            ranges.setdefault(gen, []).append((start, stop, state))
        for gen, (node, content) in self._contents.items():
            if gen in ranges:
                dirty, content.clean = extents_of(ranges[gen])
                if not content.whole:
                    content.dirty = dirty
            if self._power_lost:
                self._after_power_loss(node, content)
            st = self._store.stat(gen) if content.exists else None
            if not self._power_lost:
                self._look_for_cuts(node, content, st.st_size if st is not None else 0)
            if st is not None:
                self._measure(node, content, st)

    def _after_power_loss(self, node: Node, content: Content) -> None:
        """Trust only what was synced: appends are cut, anything else is torn and kept aside.

        A rewrite of synced bytes in place is old or new block by block, as on any local disk, and
        is not told from torn; it was marked when it was begun.
        """
        content.clean = Extents()
        path = self._store.path(content.gen)
        length = self._store.stat(content.gen).st_size if content.exists else 0
        if not content.whole and not content.dirty:
            return
        grows = content.dirty.covers(END - 1, END)
        certain = content.synced if grows else max(stop for _, stop in content.dirty)
        if not content.fresh and length >= certain:
            if grows and length > certain >= 0:
                _cut(path, certain)  # the journal has lost that more was written
            return
        base = node.base.size if node.base is not None else 0
        if content.whole or node.spilled:
            appended = not any(d.share.get(n) for d, n in node.links) and content.synced > 0
        else:
            appended = content.dirty.first >= base
        if appended and node.append_only:
            if not content.whole and content.synced == base:
                content.dirty, content.fresh = Extents(), False
                node.size = base  # the share has all that is certain
                return
            if base <= content.synced <= length:
                _cut(path, content.synced)
                content.fresh = False
                return
        content.torn = True
        node.trouble = TORN
        self._torn.append(node)

    def _look_for_cuts(self, node: Node, content: Content, length: int) -> None:
        """No cache file is ever shorter than its row says, unless somebody else was at it: what is
        missing must not be taken for zeros."""
        if content.clean:
            content.clean.remove(length, END)  # the share has it
        if content.whole or content.dirty.covers(END - 1, END):
            certain = node.size
        else:
            certain = max((stop for _, stop in content.dirty), default=0)
        if length < certain:
            content.torn = True
            node.trouble = TORN
            self._cut.append(node)

    def _measure(self, node: Node, content: Content, st: os.stat_result) -> None:
        """Appends are not journaled: what a dirty file's cache file says goes."""
        open_ended = content.whole or content.dirty.covers(END - 1, END)
        if not open_ended:
            content.tail = node.size
        content.blocks = st.st_blocks * 512
        if not content.whole and not content.dirty:
            return
        if open_ended:
            # Of a file that somebody has cut the row says how long it was.
            node.size = st.st_size if self._power_lost else max(node.size, st.st_size)
        # A recycled cache file that was not written yet is older than the node.
        node.mtime = max(node.mtime, st.st_mtime_ns)

    def xattrs(self) -> None:
        for row in self._journal.rows("xattr"):
            ino, name, value = row
            self._marked.add(ino)
            node = self._tree.nodes.get(ino)
            if node is not None:
                node.xattrs = {**(node.xattrs or {}), name: value}
                node.meta |= META_XATTR

    def dirty(self) -> None:
        """Everything that the share does not have is dirty, whatever the rows say."""
        tree = self._tree
        for node in tree.nodes.values():
            if not isinstance(node, Directory):
                continue
            for name in {**node.share, **node.local}:
                key = (node, name)
                if tree.wanted(node, name) is node.share.get(name):
                    tree.changes.pop(key, None)
                    continue
                if key not in tree.changes:
                    tree.changes[key] = NameChange(tree.next_seq(), self._now)
                node.unsynced += 1
        for node in tree.nodes.values():
            if not node.links or node is tree.root or node.local_only:
                continue
            since = self._since.get(node, 0)
            if not since:
                missing = any(d.share.get(n) is not node for d, n in node.links)
                if not (missing or node.content_dirty or node.meta):
                    continue
                since = min(
                    (tree.changes[link].seq for link in node.links if link in tree.changes),
                    default=tree.seq,
                )
            node.dirty = Dirty(since or tree.next_seq(), self._now)
            tree.dirty.add(node)
        for node in tree.nodes.values():  # oldest first, or nearly
            if node.dirty is not None:
                tree.account(node)
        tree.touched.update(tree.dirty, tree.changes)

    def result(self) -> Loaded:
        tree, journal = self._tree, self._journal
        tree.skipped.load(json.loads(str(journal.get_meta("skipped") or "[]")))
        intents = [(row[0], Intent(*row[1:])) for row in journal.rows("intent")]
        # Files that were removed while they were open died with the daemon. Of those that were just
        # going to the share, the share may have a trace.
        unsettled = {intent.ino for _, intent in intents}
        gone = [
            n
            for n in tree.nodes.values()
            if not n.links and not n.slinks and n is not tree.root and n.ino not in unsettled
        ]
        for node in gone:
            del tree.nodes[node.ino]
        journal.changes = tree.changes
        if gone:
            journal.save(*gone)
        kept = {n.content.gen for n in tree.nodes.values() if n.content is not None}
        loaded = Loaded(
            tree,
            next_gen=max([0, *self._contents, *self._files]) + 1,
            intents=intents,
            orphans=sorted(self._files - kept),
            torn=[node for node in self._torn if node.ino in tree.nodes],
            cut=[node for node in self._cut if node.ino in tree.nodes],
        )
        if loaded.cut:
            journal.save(*loaded.cut)
        if self._power_lost:
            changed = [node for node, content in self._contents.values() if node.content is content]
            known = [node for node in changed if node.ino in tree.nodes]
            contents = [node.content for node in known if node.content is not None]

            def store() -> None:
                for content in contents:
                    journal.put_extents(content)

            journal.save(*known, extra=store)
        for gen in journal.ranged - kept:
            journal.forget_extents(gen)
        # What is left of a node that is forgotten must not be taken for another's.
        taken = [ino + 1 for ino in unsettled | self._marked]
        tree.next_ino = max(tree.next_ino, int(journal.get_meta("next_ino") or 0), *taken)
        for name, parent in journal.rows("temporary"):
            directory = tree.nodes.get(parent)
            if isinstance(directory, Directory) and isinstance(name, bytes):
                loaded.temporaries.append((directory, name))
        for _, intent in intents:
            owner = tree.nodes.get(intent.ino)
            if owner is not None:
                owner.busy = True  # it is known until it is settled, though it may be removed here
            if owner is not None and intent.kind in ("publish", "grow", "patch", "attributes"):
                owner.sent += (Signature(intent.size, intent.mtime, intent.sino),)
                if self._power_lost and owner.content is not None:
                    owner.content.cuts += 1  # what was sent may be here no more
        return loaded


def _cut(path: str, length: int) -> None:
    """Cut a cache file; the time of its last write stays."""
    mtime = os.stat(path).st_mtime_ns
    os.truncate(path, length)
    os.utime(path, ns=(mtime, mtime))
