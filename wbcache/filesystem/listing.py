"""What the share's directories hold, and how it becomes names in the mount.

A directory that was listed before is answered from memory. Past its TTL it is refreshed in the
background; a directory in use is refreshed before anybody has to wait, and the first user after a
long pause waits a moment for the refresh if the share answers at all.

A listing that began before one of our own changes on the share was finished does not know of it.
Each change is therefore pinned with the share clock of its end until a newer listing is applied.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
import time

import trio

from wbcache.node import Directory, Node
from wbcache.share import calls
from wbcache.share.names import is_hidden
from wbcache.volume import Volume

log = logging.getLogger(__name__)

PATIENCE = 0.1
"""Seconds that something known is held back in the hope of fresher knowledge."""

MAX_REFRESHES = 16
"""So much of what is known is asked for anew at a time: when a share returns, all of it is due."""

_MAX_NEGATIVE = 4096
_SLICE = 500
"""Names of a listing taken over at a time."""
_LISTING_SHARE, _LONGEST_TTL = 10, 60.0
"""A listing is repeated no sooner than after this many times the time it takes, and after so many
seconds at the latest, unless it takes half of that itself."""


class Listings:
    """Keeps the tree's knowledge of the share fresh."""

    def __init__(self, volume: Volume, nursery: trio.Nursery) -> None:
        self._volume = volume
        self._tree = volume.tree
        self._share = volume.share
        self._nursery = nursery
        self._stats: dict[Node, trio.Event] = {}
        """Nodes whose attributes are being asked for, or are to be."""
        self._refreshes = trio.CapacityLimiter(MAX_REFRESHES)

    # -- names ---------------------------------------------------------------------------------

    async def find(self, directory: Directory, name: bytes) -> Node | None:
        """The node under a name of the mount; asks the share only for what is not known.

        Raises OSError (ETIMEDOUT) when the share has to be asked and does not answer.
        """
        directory.users += 1
        try:
            return await self._find(directory, name)
        finally:
            directory.users -= 1

    async def _find(self, directory: Directory, name: bytes) -> Node | None:
        if directory.listed_at is None:
            self._recall(directory)
        node = directory.local.get(name)
        if node is not None:
            if directory.on_share and directory.listed_at is not None:
                await self._freshen(directory, patient=not node.ours)
                node = directory.local.get(name)
            return node
        if not directory.on_share or name in directory.share:
            return None
        if directory.listed_at == -math.inf and self._share.is_usable:
            # An earlier mount did not see it, which may be long ago.
            self._start_listing(directory)
            if self._share.health.prompt:
                try:
                    return await self._ask(directory, name)
                except TimeoutError:
                    pass
            return directory.local.get(name)
        if directory.listed_at is not None:
            await self._freshen(directory, patient=True)
            return directory.local.get(name)
        return await self._ask(directory, name)

    async def _ask(self, directory: Directory, name: bytes) -> Node | None:
        """Look a name up in a directory on the share that was never listed."""
        volume = self._volume
        now = volume.clock()
        negative = directory.negative
        if negative is not None and name in negative:
            if now - negative[name] < volume.config.share.dir_ttl:
                return None
            del negative[name]
        change = (directory, name)
        if change in self._tree.changes:
            return None
        directory.misses += 1
        if directory.misses >= 2:
            # Somebody goes through many names: one listing beats a question each.
            self._start_listing(directory)
        if len(name) > volume.capabilities.name_max:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        await self._volume.until_settled(self._volume.config.share.lookup_deadline)
        began = volume.share_clock
        parent = await self._share.directory(directory)
        st = await self._share.look(calls.lstat_or_none, parent, name)
        if self._pinned(directory, name, began) or name in directory.local:
            return directory.local.get(name)
        if st is None:
            if directory.negative is None:
                directory.negative = {}
            if len(directory.negative) >= _MAX_NEGATIVE:
                directory.negative.clear()
            directory.negative[name] = now
            return None
        if name not in directory.share and change not in self._tree.changes:
            node = self._discover(directory, name, st.st_mode)
            self._volume.adopt(node, st)
        return directory.local.get(name)

    def made(self, directory: Directory, name: bytes) -> None:
        """A name was made here: forget that the share did not have it."""
        if directory.negative is not None:
            directory.negative.pop(name, None)

    def _discover(self, directory: Directory, name: bytes, mode: int) -> Node:
        """A name on the share that we did not know."""
        kind = Directory if stat.S_ISDIR(mode) else Node
        # Until the attributes are asked for, the type is known and the rest is a guess.
        permissions = 0o755 if stat.S_ISDIR(mode) else 0o644
        node = kind(self._tree.allocate(), stat.S_IFMT(mode) | permissions)
        self._tree.add(node)
        now = self._volume.clock()
        self._tree.set_share(directory, name, node, now)
        self._tree.set_local(directory, name, node, now)
        self._volume.policy_changed(node)
        self._volume.remembered.saw(node)
        return node

    def _recall(self, directory: Directory) -> None:
        """What an earlier mount knew of a directory does until the share answers."""
        for node in self._volume.remembered.recall(directory, self._volume.clock()):
            self._volume.policy_changed(node)

    def _appeared(self, directory: Directory, name: bytes, mode: int) -> bool:
        """Somebody else made a name on the share; returns whether the mount shows it now."""
        # A name that is new on both sides is settled when ours is flushed.
        if name in directory.local or (directory, name) in self._tree.changes:
            return False
        self._discover(directory, name, mode)
        if directory.listed_at is not None:
            self._volume.invalidate_entry(directory.ino, name)
        return True

    # -- attributes ----------------------------------------------------------------------------

    def is_asking(self, node: Node) -> bool:
        """Whether the share is being asked for a node's attributes, or is to be."""
        return node in self._stats

    def is_stale(self, node: Node) -> bool:
        """Whether the share has to be asked for a node's attributes, sooner or later."""
        if not node.on_share or node.dirty is not None or node is self._tree.root:
            return False
        ttl = self._volume.config.share.attr_ttl
        return node.attrs_at is None or self._volume.clock() - node.attrs_at > ttl

    async def attributes(self, node: Node) -> None:
        """Make sure that the node's attributes are known, and reasonably fresh."""
        if not node.on_share or node.dirty is not None or node is self._tree.root:
            return
        age = None if node.attrs_at is None else self._volume.clock() - node.attrs_at
        if age is None and not node.ours:
            await self._stat(node)
        elif not self._share.is_usable:
            return
        elif age is None or age > self._volume.config.share.attr_ttl:
            prompt = self._share.health.prompt
            if age == math.inf and not node.ours and prompt:
                # Known from an earlier mount, which may be long ago.
                try:
                    await self._stat(node)
                except FileNotFoundError:
                    raise
                except OSError as error:
                    log.debug("attributes of inode %d stay as they were: %s", node.ino, error)
                return
            if node not in self._stats:
                self._stats[node] = done = trio.Event()
                self._nursery.start_soon(self._stat_quietly, node, done)
            if not node.ours and prompt and age is not None:
                with trio.move_on_after(PATIENCE):
                    while node in self._stats:
                        await self._stats[node].wait()

    async def _stat_quietly(self, node: Node, done: trio.Event) -> None:
        try:
            async with self._refreshes:
                await self._ask_attributes(node)
        except OSError as error:
            log.debug("attributes of inode %d: %s", node.ino, error)
        except Exception:
            log.exception("attributes of inode %d failed", node.ino)
        finally:
            del self._stats[node]
            done.set()

    async def _stat(self, node: Node) -> None:
        while node in self._stats:
            await self._stats[node].wait()
            if node.attrs_at is not None:
                return
        self._stats[node] = done = trio.Event()
        try:
            await self._ask_attributes(node)
        finally:
            del self._stats[node]
            done.set()

    async def _ask_attributes(self, node: Node) -> None:
        if not node.slinks:
            return
        directory, name = node.slinks[0]
        await self._volume.until_settled(self._volume.config.share.lookup_deadline)
        began = self._volume.share_clock
        parent = await self._share.directory(directory)
        st = await self._share.stat(parent, name)
        if directory.share.get(name) is not node or self._pinned(directory, name, began):
            return
        if st is None or stat.S_IFMT(st.st_mode) != stat.S_IFMT(node.mode):
            self.gone(directory, name)
            if st is None:
                raise OSError(errno.ENOENT, "removed on the share")
            return
        target = None
        if node.is_symlink and (node.base is None or node.base != self._volume.signature(st)):
            target = await self._share.look(calls.readlink, parent, name)
        if len(node.slinks) > 1 and await self._split_off(node, st, began):
            return
        self._volume.adopt(node, st)
        if target is not None and node.dirty is None:
            node.target = target

    async def _split_off(self, node: Node, st: os.stat_result, began: int) -> bool:
        """See which of a file's names on the share show another file by now: those are taken from
        it. Returns whether the first, of which the share said ``st``, is one."""
        first = node.slinks[0]
        shown = {first: st}
        for place in node.slinks[1:]:
            parent = await self._share.directory(place[0])
            other = await self._share.look(calls.lstat_or_none, parent, place[1])
            if other is not None:  # that it is gone a listing will tell
                shown[place] = other
        signatures = {place: self._volume.signature(found) for place, found in shown.items()}
        kept = node.base if node.base in signatures.values() else signatures[first]
        for place, found in shown.items():
            directory, name = place
            ours = directory.share.get(name) is not node or self._pinned(directory, name, began)
            if signatures[place] != kept and not ours:
                self.gone(directory, name)
                self._appeared(directory, name, found.st_mode)
        return signatures[first] != kept

    async def symlink_target(self, node: Node) -> bytes:
        """Where a symbolic link points, byte for byte."""
        if not node.target and node.slinks:
            node.target = await self._volume.at_place(node, self._share.look, calls.readlink)
            self._volume.remembered.saw(node)
        return node.target

    # -- listings ------------------------------------------------------------------------------

    async def complete(self, directory: Directory) -> None:
        """Make sure that every name in a directory is known.

        Raises OSError (ETIMEDOUT) when that needs the share and it does not answer: a partial
        listing is never shown.
        """
        if not directory.on_share:
            return
        directory.users += 1
        try:
            await self._complete(directory)
        finally:
            directory.users -= 1

    async def _complete(self, directory: Directory) -> None:
        if directory.listed_at is None:
            self._recall(directory)
        if directory.listed_at is not None:
            await self._freshen(directory, patient=True, certain=True)
            return
        refresh = self._start_listing(directory)
        seen = -1
        while not refresh.done.is_set() and len(refresh.entries) != seen:
            # A very large directory takes its time, though the share answers.
            seen = len(refresh.entries)
            with trio.move_on_after(self._volume.config.share.lookup_deadline):
                await refresh.done.wait()
        if directory.listed_at is None and directory.on_share:
            if refresh.error is not None:
                raise refresh.error
            raise OSError(errno.ETIMEDOUT, "the share did not list the directory in time")

    async def _freshen(self, directory: Directory, *, patient: bool, certain: bool = False) -> None:
        """Have a listing that is past its TTL repeated. A ``patient`` caller waits a moment for it
        while the share answers; longer when it wants to know what is not there (``certain``) and
        nothing but an earlier mount has said so."""
        directory.hot = True
        age = math.inf
        if directory.listed_at is not None:
            age = self._volume.clock() - directory.listed_at
        if age <= self._ttl(directory) or not self._share.is_usable:
            return
        prompt = self._share.health.prompt
        refresh = self._start_listing(directory)
        if patient and prompt and not refresh.slow:
            recalled = certain and age == math.inf
            patience = self._volume.config.share.lookup_deadline if recalled else PATIENCE
            with trio.move_on_after(patience):
                await refresh.done.wait()
                return
            refresh.slow = True

    def _ttl(self, directory: Directory) -> float:
        cost = directory.listing_cost  # it may have hung
        longest = max(_LONGEST_TTL, 2 * cost)
        return max(self._volume.config.share.dir_ttl, min(cost * _LISTING_SHARE, longest))

    def _start_listing(self, directory: Directory) -> _Refresh:
        refresh = directory.listing
        if not isinstance(refresh, _Refresh):
            refresh = directory.listing = _Refresh()
            self._nursery.start_soon(self._list, directory, refresh)
        return refresh

    async def _list(self, directory: Directory, refresh: _Refresh) -> None:
        """List a directory, and again after each TTL for as long as it is in use."""
        volume = self._volume
        try:
            while True:
                await volume.settled.wait()
                began, began_at = volume.share_clock, volume.clock()
                directory.hot = False
                if directory.listed_at is None:
                    await self._scan(directory, refresh)  # somebody has to wait for it
                else:
                    async with self._refreshes:
                        began, began_at = volume.share_clock, volume.clock()
                        await self._scan(directory, refresh)
                directory.listing_cost = volume.clock() - began_at
                await self._apply(directory, refresh.entries, began, began_at)
                refresh.entries = []  # of no use while it sleeps
                refresh.done.set()
                directory.listing = None
                await trio.sleep(max(0.05, self._ttl(directory) - directory.listing_cost))
                if not directory.hot or (not directory.slinks and directory is not self._tree.root):
                    return
                if directory.listing is not None or not self._share.is_usable:
                    return
                refresh = directory.listing = _Refresh()
        except OSError as error:
            # Its traceback would hold this frame, and that the directory's descriptor.
            refresh.error = error.with_traceback(None)
        except Exception:
            log.exception("listing inode %d failed", directory.ino)
            refresh.error = OSError(errno.EIO, "the listing failed")
        finally:
            refresh.done.set()
            if directory.listing is refresh:
                directory.listing = None

    async def _scan(self, directory: Directory, refresh: _Refresh) -> None:
        parent = await self._share.directory(directory)
        try:
            await self._share.fetch(calls.scan, parent, refresh.entries)
            if not directory.share.keys() <= {entry.name for entry in refresh.entries}:
                await self._share.confirm()
                refresh.entries = []
                await self._share.fetch(calls.scan, parent, refresh.entries)
        except OSError as error:
            if error.errno in (errno.ESTALE, errno.ENOENT):
                self._share.forget_directory(directory)
            raise

    def _pinned(self, directory: Directory, name: bytes, began: int) -> bool:
        """Whether we changed a name on the share after ``began``, or are about to."""
        if directory.pins is not None and directory.pins.get(name, -1) > began:
            return True
        if name in directory.arriving:
            return True
        change = self._tree.changes.get((directory, name))
        if change is not None and change.busy:
            return True
        node = directory.share.get(name)
        return node is not None and node.busy

    async def _apply(
        self, directory: Directory, entries: list[calls.Entry], began: int, began_at: float
    ) -> None:
        """Take over a listing, never undoing what we did meanwhile, and in between serve others: a
        hundred thousand names take half a second."""
        at_root = directory is self._tree.root
        if not directory.on_share:
            return  # removed while it was listed: nothing is in it
        seen = {entry.name for entry in entries}
        missing = [name for name in directory.share if name not in seen]
        changed = False
        for at, name in enumerate(missing, 1):
            if not self._pinned(directory, name, began):
                self.gone(directory, name)
                changed = True
            if not at % _SLICE:
                await trio.lowlevel.checkpoint()
        for at, (name, mode) in enumerate(entries, 1):
            if not at % _SLICE:
                await trio.lowlevel.checkpoint()
            if not directory.on_share:
                return  # removed meanwhile
            if is_hidden(name, at_root=at_root):
                earlier = self._volume.temporary_names.is_earlier(name)
                if earlier and name not in directory.share:
                    # A power loss can take the journal's last rows: nobody knows of it any more.
                    self._volume.strays.append((directory, name))
                    self._tree.wake()
                continue
            known = directory.share.get(name)
            if known is not None and stat.S_IFMT(known.mode) == mode:
                continue
            if self._pinned(directory, name, began):
                continue
            if known is not None:
                self.gone(directory, name)
            changed |= self._appeared(directory, name, mode)
        first = directory.listed_at is None
        directory.listed_at = began_at
        directory.negative = None
        if directory.pins is not None:
            directory.pins = {n: at for n, at in directory.pins.items() if at > began} or None
        if changed and not first:
            directory.mtime = directory.ctime = time.time_ns()
        self._volume.remembered.listed(directory)

    def gone(self, directory: Directory, name: bytes) -> None:
        """Somebody else removed a name from the share.

        What is clean here goes with it; what is dirty stays, and is published anew.
        """
        # What was in it first, the deepest first.
        names = [(directory, name)]
        for at, own in names:
            node = at.share.get(own)
            if isinstance(node, Directory):
                names += [(node, child) for child in node.share]
        for at, own in reversed(names):
            self._gone(at, own)

    def _gone(self, directory: Directory, name: bytes) -> None:
        volume, tree = self._volume, self._tree
        node = directory.share.get(name)
        if node is None:
            return
        now = volume.clock()
        if isinstance(node, Directory):
            node.share_dirfd = None
        if len(node.slinks) > 1 and directory.local.get(name) is node:
            tree.set_local(directory, name, None, now)  # one of several names, and no bytes
            volume.invalidate_entry(directory.ino, name)
        keeps = self._keeps(node)  # what the share has lost counts as changed from here on
        tree.set_share(directory, name, None, now)
        if node.slinks or not node.links:
            volume.commit_outcome((directory, name), node)
            volume.forget_if_gone(node)
            return
        if keeps:
            path = os.fsdecode(tree.path(node))
            node.base = None
            if node.content is None or node.content.local(0, node.size, node.size):
                volume.report(
                    f"{path!r} was removed on the share by another writer;"
                    " it has changes here and is written again"
                )
                if node.content is not None:
                    node.content.make_whole()
                tree.touch(node, now)
            else:
                volume.cut_off(node, "removed")
            rows = [] if node.is_dir else [volume.conflicts.add(node.links[0], ours=node)]
            volume.commit_outcome(
                node, (directory, name), extra=lambda: volume.journal.put_conflicts(rows)
            )
            return
        for parent, own in list(node.links):
            tree.set_local(parent, own, None, now)
            volume.invalidate_entry(parent.ino, own)
        volume.commit_outcome(node, (directory, name))
        volume.forget_if_gone(node)

    def _keeps(self, node: Node) -> bool:
        if isinstance(node, Directory):
            return bool(node.local) or node.dirty is not None
        if node.dirty is None:
            return False
        return node.is_symlink or (node.content is not None and bool(node.content.dirty))


class _Refresh:
    """One listing under way."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.entries: list[calls.Entry] = []
        """What has been listed so far."""
        self.error: OSError | None = None
        self.slow = False
        """Somebody waited for it in vain: nobody else does."""
