"""One share with its cache: the state that the file system and the flusher work on.

It ties the tree to the journal and the store, so that the two never disagree. Methods are
synchronous and atomic on the event loop unless they are marked async.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

import trio

from wbcache import remembered
from wbcache.config import Config
from wbcache.conflicts import Conflicts
from wbcache.extents import END
from wbcache.frozen import Freezer
from wbcache.journal import EXTENT_DIRTY, Journal
from wbcache.node import Content, Directory, Node, Signature
from wbcache.policy import Policies
from wbcache.retired import Retired
from wbcache.share import calls
from wbcache.share.capabilities import Capabilities
from wbcache.share.descriptor import Descriptor
from wbcache.share.names import TemporaryNames
from wbcache.share.share import Share
from wbcache.sharedcall import SharedCall
from wbcache.space import Space
from wbcache.store import Store
from wbcache.tree import Item, Tree

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_SYNC_LANE = 8


class Volume:
    """Tree, journal, store and share of one mount."""

    def __init__(
        self,
        tree: Tree,
        journal: Journal,
        store: Store,
        share: Share,
        config: Config,
        *,
        temporary_names: TemporaryNames,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tree = tree
        self.journal = journal
        self.store = store
        self.share = share
        self.config = config
        self.capabilities = Capabilities()
        self.read_only = False
        self.temporary_names = temporary_names
        self.clock = clock
        self.policies = Policies(
            config.policies,
            idle_delay=config.flush.idle_delay,
            max_age=config.flush.max_age,
        )
        tree.skipped.scratch_age = config.flush.idle_delay
        self.next_gen = 1
        self.share_clock = 0
        """Counts the changes we have made on the share; listings are dated by it."""
        self.invalidate_inode: Callable[[int], None] = lambda ino: None
        self.invalidate_entry: Callable[[int, bytes], None] = lambda parent, name: None
        self.events: deque[tuple[float, str]] = deque(maxlen=200)
        """What the operator should know: (wall-clock seconds, text), newest last."""
        self._told: set[str] = set()
        self.conflicts = Conflicts(tree, journal)
        self.local_lane = trio.CapacityLimiter(_SYNC_LANE)
        """Threads for the cache disk; a hung share can't take them."""
        self.settled = trio.Event()
        """Set when what the last daemon left unanswered on the share is known."""
        self.delivered: list[Node] = []
        """While somebody waits for room: what the share may just have got bytes of."""
        self._step_done = trio.Event()
        self.starved: set[Item] = set()
        """What the share had no room for when it was tried last."""
        self.strays: list[tuple[Directory, bytes]] = []
        """Temporaries to be removed from the share."""
        self.spares_wanted = trio.Event()
        self.unsynced: dict[Node, float] = {}
        """Files written since they were last durable, and since when (monotonic seconds)."""
        self.space = Space(
            store.directory,
            config.cache,
            other=journal.disk_bytes,
            patience=config.share.deadline,
            clock=clock,
        )
        for node in tree.nodes.values():
            if node.content is not None:
                self.space.used += node.content.blocks
        self.space.look()
        self.freezer = Freezer(
            self.space,
            store.directory,
            self.local_lane,
            self.using,
            patience=config.share.deadline,
        )
        names = min(remembered.MAX_NAMES, self.space.limit // 20 // remembered.NAME_BYTES)
        self.remembered = remembered.Remembered(tree, journal, max_names=names)
        self.retired = Retired(store, self.space, self.local_lane)
        self._journal_sync = SharedCall(journal.sync, self.local_lane)
        for node in list(tree.nodes.values()):
            self.policy_changed(node)

    def report(self, text: str) -> None:
        """Tell the operator, in the log and in `status`."""
        log.warning("%s", text)
        self.events.append((time.time(), text))

    def report_once(self, text: str) -> None:
        """The same for what would be said again and again: only the first time in this mount."""
        if text not in self._told:
            self._told.add(text)
            self.report(text)

    # -- transactions --------------------------------------------------------------------------

    def commit(
        self,
        *items: Item,
        undo: Callable[[], None] | None = None,
        extra: Callable[[], None] | None = None,
    ) -> None:
        """Store the state of items that were just changed.

        When the journal refuses, ``undo`` takes the change back and the error goes to the caller,
        who must not acknowledge the operation.
        """
        try:
            if self.tree.skipped.unsaved:
                self._save_skipped()
            self.journal.save(*items, extra=extra)
        except OSError:
            self.journal.unsaved.update(items)
            if undo is not None:
                undo()
            raise

    def _save_skipped(self) -> None:
        """Before the transaction that needs it: too much of it only makes removals wait."""
        self.journal.set_meta("skipped", json.dumps(self.tree.skipped.rows()))
        self.tree.skipped.unsaved = False

    def commit_outcome(self, *items: Item, extra: Callable[[], None] | None = None) -> None:
        """Store what has happened on the share; it can't be undone, so it is tried again later."""
        names = [item for item in items if not isinstance(item, Node)]
        for directory, _ in names:
            if directory in self.tree.stamped:
                self.tree.stamped.discard(directory)
                items = (*items, directory)
        try:
            self.journal.save(*items, extra=extra)
        except OSError as error:
            log.error("journal: %s; will be stored with the next operation", error)
            self.journal.unsaved.update(items)
            if extra is not None:
                self.journal.unsaved_extra.append(extra)

    # -- nodes ---------------------------------------------------------------------------------

    def new_node(self, mode: int, uid: int, gid: int, *, directory: bool = False) -> Node:
        """A node made here; it is known but has no name yet."""
        kind = Directory if directory else Node
        node = kind(self.tree.allocate(), mode, uid, gid, time.time_ns())
        self.tree.add(node)
        node.ours = True
        return node

    def forget_if_gone(self, node: Node) -> None:
        """Give back what a removed node holds: its bytes at once when it is not open, and the
        node itself when neither the kernel nor the share knows it any more."""
        if node.links or node.handles or node.busy or node.transfer or node is self.tree.root:
            return
        if node.content is not None:
            self.drop_content(node)
        node.share_fd = None
        if not node.slinks and isinstance(node, Directory):
            self.share.drop_directory(node)
        if node.dirty is not None:
            node.dirty = None
            self.tree.dirty.discard(node)
            self.tree.account(node)
        self.unsynced.pop(node, None)
        if not node.slinks and (node.sent or node.retries):
            node.sent = ()
            self.commit_outcome(extra=lambda: self.journal.drop_intents_of(node.ino))
        if not node.slinks and not node.lookups:
            self.tree.nodes.pop(node.ino, None)
            self.tree.stamped.discard(node)
            if node.journaled:  # it was removed while a step on it was under way
                self.commit_outcome(node)

    def policy_changed(self, node: Node) -> None:
        """A file has a (new) name: see whether a policy keeps it from the share."""
        if node.is_file and self.config.policies and node.links:
            path = self.tree.path(node)
            # What the share has under another name, with bytes that only it may have, moves there.
            elsewhere = any(d.local.get(n) is not node for d, n in node.slinks)
            never = not elsewhere and self.policies.for_path(path).never
            self.tree.set_never(node, never, self.clock())

    # -- content -------------------------------------------------------------------------------

    def new_content(self, *, whole: bool, base_limit: int = 0) -> Content:
        """A new generation; unless one was spare, it has no cache file until bytes are written."""
        seq = self.tree.next_seq()
        spare = self.store.take_spare()
        if self.store.wants_spares:
            self.spares_wanted.set()
        if spare is not None:
            gen, fd = spare
            content = Content(gen, whole=whole, base_limit=base_limit, seq=seq)
            self.store.adopt(content, fd)
            return content
        gen = self.next_gen
        self.next_gen += 1
        return Content(gen, whole=whole, base_limit=base_limit, seq=seq)

    def content_for_write(self, node: Node) -> Content:
        """The node's content, made if so far the share alone has its bytes."""
        content = node.content
        if content is None:
            content = self.new_content(whole=False, base_limit=node.size)
            node.content = content
            content.pins = node.handles
        return content

    def replace_content(self, node: Node, content: Content) -> Content | None:
        """Begin a new generation; returns the old one for `retire`."""
        old = node.content
        node.content = content
        content.pins = node.handles
        if old is not None:
            old.pins -= node.handles
        node.fsynced = node.released = node.spill = False
        node.append_only = True
        return old

    def retire(self, content: Content | None) -> None:
        """A generation is not a node's content any more; its file goes when nobody needs it.

        The journal must have forgotten it before: its cache file may be another's at once.
        """
        if content is None:
            return
        content.retired = True
        if content.pins > 0:
            return
        self.journal.forget_extents(content.gen)
        self.retired.add(content)

    def count_blocks(self, content: Content, taken: int = 0) -> None:
        """A generation's cache file was changed, for which bytes had been taken: count it anew."""
        blocks = content.blocks + taken  # should the disk not say
        try:
            blocks = os.fstat(self.store.fd(content)).st_blocks * 512 if content.exists else 0
        except OSError as error:
            log.error("the cache disk: %s", error)
        grown, content.blocks = blocks - content.blocks, blocks
        if grown < 0:
            self.space.give(-grown)
            grown = 0
        self.space.settle(taken, grown)

    @contextmanager
    def using(self, content: Content) -> Iterator[int]:
        """A generation's descriptor, for what others do meanwhile too: it stays open, and the cache
        file stays. -1: there is no cache file. Raises OSError when the cache disk refuses."""
        fd = self.store.fd(content) if content.exists else -1
        content.pins += 1
        content.uses += 1
        try:
            yield fd
        finally:
            content.uses -= 1
            self.unpin(content)

    def unpin(self, content: Content) -> None:
        """A user of a generation is done with it."""
        content.pins -= 1
        if content.retired:
            self.retire(content)

    def drop_content(self, node: Node) -> None:
        """Forget a node's cached bytes."""
        content, node.content = node.content, None
        if content is not None:
            content.pins -= node.handles
            self.retire(content)

    def mark_dirty(self, node: Node, content: Content, start: int, stop: int) -> None:
        """Bytes were written: record it, in the journal where it does not follow already.

        Open-ended ranges make appends free: what lies behind the end of the file is dirty from
        the first append on.
        """
        dirty = content.dirty
        content.version += 1
        if node not in self.unsynced:
            self.unsynced[node] = self.clock()
        first, content.fresh = not content.fresh, True
        if stop > node.size:
            start, stop = min(start, node.size), END
        if not dirty.covers(start, stop):
            before = dirty.copy()
            content.mark_dirty(start, stop)
            try:
                self.journal.save(
                    node,
                    extra=lambda: self.journal.add_extent(content.gen, start, stop, EXTENT_DIRTY),
                )
            except OSError:
                content.dirty = before
                raise
            return
        if content.redirty or content.clean:
            content.mark_dirty(start, stop)
        if first:
            self.journal.save(node)  # from here on a power loss may tear it

    async def make_spares(self) -> None:
        """Have empty cache files ready when files are made, for ever.

        Making a file takes the disk's file system longer than all else that a create does.
        """
        while True:
            await self.spares_wanted.wait()
            count = self.store.max_spare // 2
            gens = range(self.next_gen, self.next_gen + count)
            self.next_gen += count
            made = await trio.to_thread.run_sync(
                self.store.make_spares, gens, limiter=self.local_lane
            )
            self.store.add_spares(made)
            self.spares_wanted = trio.Event()
            if len(made) < count:
                await trio.sleep(1.0)

    def discard(self, gen: int) -> None:
        """Remove a cache file that belongs to nothing."""
        self.retired.add_stray(self.store.path(gen))

    def note_clean(self, content: Content, size: int) -> None:
        """The share has ``size`` bytes of a generation: they may be evicted, and a power loss
        can't tear them."""
        content.used = self.clock()
        content.synced = max(content.synced, size)  # an fsync may have covered more
        content.fresh = content.fresh and bool(content.dirty)

    def size_of(self, node: Node, content: Content) -> int:
        """The size of a generation; when it is not the node's any more, what it was at the end."""
        if node.content is content:
            return node.size
        return os.fstat(self.store.fd(content)).st_size if content.exists else 0

    @contextmanager
    def temporary(self, directory: Directory) -> Iterator[bytes]:
        """A fresh temporary name, journaled; if the step fails the temporary is swept away."""
        name = self.temporary_names.fresh()
        self.journal.add_temporary(directory, name)
        try:
            yield name
        except BaseException:
            self.strays.append((directory, name))
            raise
        self.journal.drop_temporary(name)

    def changed_on_share(self, directory: Directory, name: bytes) -> None:
        """We have just changed a name on the share: listings begun before don't know of it."""
        self.share_clock += 1
        if directory.pins is None:
            directory.pins = {}
        directory.pins[name] = self.share_clock

    # -- durability ----------------------------------------------------------------------------

    async def sync_journal(self) -> None:
        """Make all committed transactions durable; calls made meanwhile share the next sync."""
        retired = self.retired.count
        await self._journal_sync.run()
        self.retired.forgotten(retired)

    async def sync_content(self, node: Node) -> None:
        """Make a file's bytes durable on the cache disk, and note it in the journal, which is
        not synced yet. Raises OSError."""
        content, size = node.content, node.size
        if content is None:
            return
        version = content.version
        if content.exists:
            await self._sync_file(content)
        if node.content is content and node.links:
            content.synced = size
            content.fresh = content.version != version
            self.commit_outcome(node)

    async def _sync_file(self, content: Content) -> None:
        with self.using(content) as fd:
            new = content.gen in self.store.unsynced_names
            try:
                await trio.to_thread.run_sync(
                    _sync_file,
                    fd,
                    self.store if new else None,
                    content.gen,
                    limiter=self.local_lane,
                )
            except OSError:
                content.unsynced_error = True
                raise
        if new:
            self.store.unsynced_names.discard(content.gen)

    # -- what the share says -------------------------------------------------------------------

    def signature(self, st: os.stat_result) -> Signature:
        """The signature of a file on the share."""
        return calls.signature(st, stable_ino=self.share.stable_ino)

    def cut_off(self, node: Node, how: str) -> None:
        """The share's copy of a file, which held bytes that are not here, was removed or replaced:
        what is here of it stays, and is shown, but can't be flushed."""
        node.base = None
        node.trouble = f"the share's copy, which held the rest of its bytes, was {how}"
        self.report(f"{os.fsdecode(self.tree.path(node))!r} is incomplete: {node.trouble}")
        self.tree.account(node)
        self.tree.touch_item(node)

    async def at_place(
        self,
        node: Node,
        ask: Callable[..., Awaitable[T]],
        call: Callable[Concatenate[Descriptor, bytes, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Make a reading call with a node's directory and name on the share.

        While a step moves the node there it may be under neither name: then it is waited for, as it
        is for what the last daemon may have done. Raises FileNotFoundError when the share does not
        have it.
        """
        await self.until_settled(self.share.deadline)
        while True:
            if not node.slinks:
                raise FileNotFoundError(errno.ENOENT, "not on the share")
            place = directory, name = node.slinks[0]
            try:
                parent = await self.share.directory(directory)
                result = await ask(call, parent, name, *args, **kwargs)
            except FileNotFoundError:
                if node.busy:
                    await self._step_end(self.share.deadline)
                elif node.slinks and node.slinks[0] == place:
                    raise
            else:
                if node.slinks and node.slinks[0] == place:
                    return result
                # It was moved away, and what was asked may have been another that came after it.

    async def until_settled(self, deadline: float) -> None:
        """Wait until it is known what the last daemon did on the share. Raises ETIMEDOUT."""
        if not self.settled.is_set():
            with trio.move_on_after(deadline):
                await self.settled.wait()
                return
            raise OSError(errno.ETIMEDOUT, "the share did not answer in time")

    def step_ended(self, node: Node, *, moved: bool) -> None:
        """A step of the flusher has ended; ``moved``: the share has something that it had not."""
        if moved:
            self.space.progressed()
        if self.space.waiting:
            self.delivered.append(node)
            self.space.wanted.set()
        done, self._step_done = self._step_done, trio.Event()
        done.set()

    async def _step_end(self, deadline: float) -> None:
        with trio.move_on_after(deadline):
            await self._step_done.wait()
            return
        raise OSError(errno.ETIMEDOUT, "the share does not finish a change")

    def adopt(self, node: Node, st: os.stat_result) -> bool:
        """Take over what the share reports of a node; returns whether its bytes changed there.

        What is dirty here stays: if the share's file changed meanwhile, the flush finds out.
        """
        node.attrs_at = self.clock()
        signature = self.signature(st)
        if node.is_dir:
            if node.base is None:
                node.take_times(st)
            if node.base != signature:
                self.remembered.saw(node)
            node.base = signature
            if not node.ours:
                node.mode, node.uid, node.gid = st.st_mode, st.st_uid, st.st_gid
            return False
        if node.busy or node.dirty is not None or signature in node.sent:
            return False
        first = node.base is None
        if not first and (
            not node.links or any(place in self.tree.changes for place in node.slinks)
        ):
            return False  # removed or replaced here: what that did not know of must stay
        if node.base == signature:
            if not node.ours:
                node.mode, node.uid, node.gid = st.st_mode, st.st_uid, st.st_gid
            return False
        node.base = signature
        node.ours = False
        node.mode, node.uid, node.gid = st.st_mode, st.st_uid, st.st_gid
        node.size = st.st_size
        node.take_times(st)
        self.remembered.saw(node)
        if first:
            return False
        content, node.content = node.content, None
        node.share_fd = None
        if node.journaled:
            self.commit_outcome(node)
        if content is not None:
            content.pins -= node.handles
            self.retire(content)
        self.invalidate_inode(node.ino)
        return True


def _sync_file(fd: int, store: Store | None, gen: int) -> None:
    os.fdatasync(fd)
    if store is not None:
        store.sync_name(gen)
