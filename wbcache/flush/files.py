"""How a file's bytes reach the share: to a temporary, by growing in place, by patching.

While a flush reads a file its node is busy: no other step touches it. The mount goes on writing,
and what it writes meanwhile is collected in a `redirty` set, so that nothing is called clean that
the share does not have.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from functools import partial

import trio

from wbcache.extents import END, Extents
from wbcache.flush import blocking
from wbcache.flush.attributes import AttributeSender
from wbcache.flush.blocking import CHUNK, Accepts, Attempts, ConflictError, Found
from wbcache.flush.errors import is_full
from wbcache.flush.transfer import SupersededError, Transfer
from wbcache.journal import Intent
from wbcache.node import META_TIMES, Content, Directory, Node, Signature
from wbcache.share import calls
from wbcache.share.descriptor import Descriptor
from wbcache.tree import Name
from wbcache.volume import Volume

log = logging.getLogger(__name__)

ROUNDS = 3
"""After so many rounds of copying what was written meanwhile the writers are blocked briefly."""

IN_PLACE = -1
"""As a signature's mtime: a change in place was begun, and the share may show any part of it."""

_PATCH = 1
"""Then, as its inode number: not one that only appends."""


class FileFlusher:
    """Moves bytes and attributes of single files."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._tree = volume.tree
        self._share = volume.share
        self.sender = AttributeSender(volume)
        self.bytes_sent = 0
        self.transfers: set[Node] = set()
        """Files of which the share has a temporary, complete or not."""
        self.reached: dict[Node, int] = {}
        """Bytes for which there was room, of files that found no more when they were tried."""

    # -- whose file is it ----------------------------------------------------------------------

    def accepts(self, node: Node) -> Accepts:
        """A test for the share's file being the one that we know under this node."""
        base, sent = node.base, node.sent
        stable = self._share.stable_ino
        kind = stat.S_IFMT(node.mode)
        # Known by its name alone, since nobody has asked for its attributes: any file will do.
        anything = node.is_dir or (base is None and bool(node.slinks))

        def test(st: os.stat_result) -> bool:
            if stat.S_IFMT(st.st_mode) != kind:
                return False
            found = calls.signature(st, stable_ino=stable)
            return anything or found == base or any(_explains(known, found, base) for known in sent)

        return test

    def _was_published(self, node: Node) -> Accepts:
        """A test for the share's file being something that we published of a node."""
        sent = [known for known in node.sent if known.mtime_ns != IN_PLACE]
        stable = self._share.stable_ino

        def test(st: os.stat_result) -> bool:
            found = calls.signature(st, stable_ino=stable)
            return stat.S_ISREG(st.st_mode) and any(_explains(k, found, None) for k in sent)

        return test

    def is_sent(self, signature: Signature) -> Accepts:
        """A test for the share's file being what we have just sent."""
        stable = self._share.stable_ino

        def test(st: os.stat_result) -> bool:
            found = calls.signature(st, stable_ino=stable)
            return stat.S_ISREG(st.st_mode) and found == signature

        return test

    async def hold(self, node: Node, at: Name) -> None:
        """A name is about to be taken from a file: if somebody reads bytes of it that only the
        share has, an open descriptor keeps them."""
        content = node.content
        if not node.handles or node.share_fd is not None or not node.is_file:
            return
        if content is None or not content.local(0, node.size, node.size):
            directory, name = at
            parent = await self._share.directory(directory, flush=True)
            try:
                node.share_fd = await self._share.work(calls.open_file, parent, name, os.O_RDONLY)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EINVAL, errno.ELOOP, errno.EISDIR):
                    raise
                # It is not ours any more: the step itself finds out.

    # -- attributes ----------------------------------------------------------------------------

    async def set_attributes(self, node: Node, at: Name) -> None:
        """Bring a node's attributes to the share."""
        directory, name = at
        attributes = self.sender.attributes(node, new=False)
        self._tree.snapshot(node)
        meta, xattrs = self.sender.take(node)
        try:
            if not node.is_dir and node.base is not None and attributes.times is not None:
                await self._announce(
                    node, at, "attributes", Signature(node.base.size, node.mtime, node.base.ino)
                )
            parent = await self._share.directory(directory, flush=True)
            attempt = Attempts()
            before, after = await self._share.work(
                blocking.set_attributes,
                parent,
                name,
                attributes,
                attempt,
                stat.S_IFMT(node.mode),
            )
        except BaseException:
            self.sender.put_back(node, meta)
            raise
        self.sender.delivered(node, meta, self.sender.kept_here(node, xattrs, attempt))
        if node.base is None or self.accepts(node)(before):
            node.base = self._volume.signature(after)
            node.attrs_at = self._volume.clock()
        node.sent = ()
        self._tree.settle(node, self._volume.clock())
        journal = self._volume.journal

        def store() -> None:
            journal.drop_intents_of(node.ino)
            if xattrs and not node.xattrs:
                journal.drop_xattrs(node.ino)

        self._volume.commit_outcome(node, extra=store)

    async def _announce(self, node: Node, at: Name, kind: str, signature: Signature) -> None:
        """Record durably what the share is about to show under a name."""
        node.sent += (signature,)
        self._volume.journal.add_intents([Intent(kind, node.ino, at[0].ino, at[1], *signature)])
        await self._volume.sync_journal()

    # -- temporaries ---------------------------------------------------------------------------

    async def copy(self, node: Node, directory: Directory) -> None:
        """Move a file's bytes to a temporary in ``directory``, ready to be published."""
        volume, content = self._volume, node.content
        if content is None or self._tree.held(node):
            raise SupersededError  # truncated to nothing since the step was planned
        if not content.whole and not content.local(0, node.size, node.size):
            if node.slinks:
                raise SupersededError  # its clean bytes were evicted since the step was planned
            # It was to be changed in place, and its place is gone.
            self._volume.cut_off(node, "removed")
            return
        self.abandon(node)  # what was copied before is of no use any more
        await self._transfer(
            node, Transfer(node, content, directory, volume.temporary_names.fresh())
        )

    async def spill(self, node: Node, directory: Directory) -> None:
        """Move the first part of a file that is still being written to a temporary in
        ``directory``, where the file grows on until it gets its name.

        It is how a file passes that is larger than the cache.
        """
        volume, content = self._volume, node.content
        if content is None or not content.whole or not node.links:
            raise SupersededError
        temporary = volume.temporary_names.fresh()
        transfer = Transfer(node, content, directory, temporary, volume.space.portion)
        await self._transfer(node, transfer)
        if not node.links or node.content is not content:
            self.abandon(node)
            raise SupersededError
        self.arrived(node, transfer, (directory, temporary))
        node.spilled = True
        self._tree.account(node)

    async def _transfer(self, node: Node, transfer: Transfer) -> None:
        self._tree.snapshot(node)
        transfer.content.pins += 1
        transfer.content.redirty += (transfer.redirty,)
        node.transfer = transfer
        self.transfers.add(node)
        try:
            await self._copy(node, transfer)
        except BaseException:
            self.abandon(node)
            raise

    async def _copy(self, node: Node, transfer: Transfer) -> None:
        volume, content = self._volume, transfer.content
        volume.journal.add_temporary(transfer.directory, transfer.temporary)
        parent = await self._share.directory(transfer.directory, flush=True)
        file = await self._share.work(
            calls.create, parent, transfer.temporary, stat.S_IMODE(node.mode) & 0o777 | 0o200
        )
        carried: dict[bytes, bytes] = {}
        if node.slinks and volume.capabilities.xattr:
            old, name = node.slinks[0]
            carried = await self._share.work(
                blocking.read_xattrs, await self._share.directory(old, flush=True), name
            )
        ranges, longest = await self._data(content, [(0, transfer.size)], 0), 0
        if not ranges or ranges[-1][1] < transfer.size:
            await self._share.work(os.ftruncate, file.fd, transfer.size)
        for _ in range(ROUNDS):
            await self._send(node, transfer, file, ranges)
            size = min(volume.size_of(node, content), transfer.limit)
            if size >= transfer.size and not transfer.redirty.overlap(0, transfer.size):
                break  # what was appended meanwhile can come later
            # What was rewritten may belong to what was appended: it all goes.
            longest, transfer.size = max(longest, transfer.size), size
            ranges = transfer.redirty.overlap(0, size)
            transfer.redirty.remove(0, size)
        else:
            # It is rewritten faster than it moves. The writers are blocked for as long as a local
            # copy of the rest takes, never for the share.
            size_of = partial(volume.size_of, node, content)
            async with volume.freezer.copy(content, transfer.redirty, ranges, size_of) as frozen:
                longest = max(longest, transfer.size)
                transfer.size = min(frozen.size, transfer.limit)
                for start, stop in frozen.ranges:
                    stop = min(stop, transfer.size)
                    await self._send_from(node, transfer, frozen.source, file, start, stop)
        if transfer.size < longest:
            await self._share.work(os.ftruncate, file.fd, transfer.size)
        attributes = self.sender.attributes(node, new=True)
        if carried:
            attributes = attributes._replace(xattrs={**carried, **attributes.xattrs})
        if not attributes.mode and not node.mode & 0o200 and volume.capabilities.chmod:
            attributes = attributes._replace(mode=stat.S_IMODE(node.mode))
        transfer.meta, transfer.xattrs = self.sender.take(node)
        attempt, ownership = Attempts(), self.sender.ownership(node)
        st = await self._share.work(
            blocking.finish, file, transfer.size, attributes, attempt, ownership
        )
        transfer.xattrs = self.sender.kept_here(node, transfer.xattrs, attempt)
        transfer.signature, transfer.times = volume.signature(st), attributes.times

    async def _data(
        self, content: Content, ranges: list[tuple[int, int]], fresh: int
    ) -> list[tuple[int, int]]:
        """The ranges without the long holes behind ``fresh``, where the share has nothing yet."""
        found = []
        for start, stop in ranges:
            if stop - max(start, fresh) < blocking.HOLE:
                found.append((start, stop))
            elif content.exists:
                with self._volume.using(content) as fd:
                    found += await trio.to_thread.run_sync(
                        partial(blocking.data_ranges, fd, start, stop, fresh),
                        limiter=self._volume.local_lane,
                    )
        return found

    async def _send(
        self, node: Node, transfer: Transfer, file: Descriptor, ranges: list[tuple[int, int]]
    ) -> None:
        if transfer.content.exists:  # an empty file has no cache file
            with self._volume.using(transfer.content) as fd:
                for start, stop in ranges:
                    await self._send_from(node, transfer, fd, file, start, stop)

    async def _send_from(
        self,
        node: Node,
        transfer: Transfer,
        fd: int,
        file: Descriptor,
        start: int,
        stop: int,
    ) -> None:
        for at in range(start, stop, CHUNK):
            end = min(at + CHUNK, stop)
            if not transfer.wanted(node):
                raise SupersededError
            try:
                await self._share.work(blocking.copy_range, fd, file, at, end)
            except OSError as error:
                if is_full(error):
                    with contextlib.suppress(OSError):
                        st = await self._share.work(os.fstat, file.fd)
                        self.reached[node] = st.st_size
                raise
            self._sent(end - at)

    def _sent(self, count: int) -> None:
        self.bytes_sent += count
        self._volume.space.progressed()

    def abandon(self, node: Node) -> None:
        """Give a transfer up; its temporary is removed, now or by the next sweep."""
        transfer, node.transfer = node.transfer, None
        self.transfers.discard(node)
        if not isinstance(transfer, Transfer):
            return
        self._tree.skipped.give_up(node)
        content = transfer.content
        content.redirty = tuple(r for r in content.redirty if r is not transfer.redirty)
        self._volume.unpin(content)
        self.sender.put_back(node, transfer.meta)
        self._volume.strays.append((transfer.directory, transfer.temporary))

    async def publish(self, node: Node, to: Name, occupant: Node | None) -> None:
        """Let a name show a finished transfer."""
        volume, transfer = self._volume, node.transfer
        assert isinstance(transfer, Transfer) and transfer.signature is not None
        directory, name = to
        signature = transfer.signature
        # A publish of ours that had no answer may be there too: that one is to be replaced.
        known = [self._was_published(node)] if node.sent else []
        if occupant is not None:
            known.append(self.accepts(occupant))
        if signature not in node.sent:
            await self._announce(node, to, "publish", signature)
        source = await self._share.directory(transfer.directory, flush=True)
        target = await self._share.directory(directory, flush=True)
        try:
            await self._share.work(
                blocking.move,
                source,
                transfer.temporary,
                target,
                name,
                is_ours=self.is_sent(signature),
                may_replace=(lambda st: any(test(st) for test in known)) if known else None,
                noreplace=volume.capabilities.noreplace,
                link=volume.capabilities.link,
            )
        except (ConflictError, blocking.LostTemporaryError):
            node.sent = tuple(known for known in node.sent if known != signature)
            volume.journal.drop_intents_of(node.ino)
            self.abandon(node)
            raise
        self.arrived(node, transfer, to)
        volume.forget_if_gone(node)

    def arrived(self, node: Node, transfer: Transfer, to: Name, *, certain: bool = True) -> None:
        """Take over that a name shows what a transfer brought.

        Unless that is ``certain``, its temporary may be there too, as a second name.
        """
        volume, tree, signature = self._volume, self._tree, transfer.signature
        assert signature is not None
        directory, name = to
        occupant = directory.share.get(name)
        node.transfer = None
        self.transfers.discard(node)
        tree.skipped.arrived(node)
        self.sender.delivered(node, transfer.meta, transfer.xattrs)
        others = self.claim(node, to, signature)
        self._published(node, transfer)
        volume.changed_on_share(directory, name)
        if not certain:
            volume.strays.append((transfer.directory, transfer.temporary))
        journal = volume.journal

        def store() -> None:
            if certain:
                journal.drop_temporary(transfer.temporary)
            journal.drop_intents_of(node.ino)
            self.keep_doubts(others)
            if node.content is not None:
                journal.put_extents(node.content)
            if transfer.xattrs and not node.xattrs:
                journal.drop_xattrs(node.ino)

        tree.settle(node, volume.clock())
        gone = [occupant] if occupant is not None and occupant is not node else []
        volume.commit_outcome(node, to, *others, *gone, extra=store)
        for other in gone:
            volume.forget_if_gone(other)

    def claim(self, node: Node, to: Name, signature: Signature) -> list[Name]:
        """Take over that a name on the share shows what was published of a node.

        Returns its other names there, which still show the file as it was before.
        """
        tree, now = self._tree, self._volume.clock()
        others = [link for link in node.slinks if link != to]
        for directory, name in others:
            ghost = Node(tree.allocate(), node.mode)
            ghost.base = node.base
            ghost.sent = tuple(sent for sent in node.sent if sent != signature)
            tree.add(ghost)
            tree.set_share(directory, name, ghost, now)
        tree.set_share(*to, node, now)
        node.base = signature
        node.sent = ()
        node.attrs_at = now
        node.share_fd = None
        return others

    def keep_doubts(self, names: list[Name]) -> None:
        """Store what the share may show under names besides what we know (inside `save`)."""
        journal = self._volume.journal
        for directory, name in names:
            node = directory.share.get(name)
            if node is not None:
                at = (node.ino, directory.ino, name)
                journal.put_intents(Intent("attributes", *at, *sent) for sent in node.sent)

    def _published(self, node: Node, transfer: Transfer) -> None:
        """What a transfer carried need not be sent again."""
        volume, content = self._volume, transfer.content
        content.redirty = tuple(r for r in content.redirty if r is not transfer.redirty)
        volume.unpin(content)
        if content is not node.content:
            return
        size = transfer.size
        content.whole = False
        content.dirty = transfer.redirty
        _keep_written(content, content.dirty, node.size)
        if node.size > size:
            content.dirty.add(size, END)
        content.base_limit = min(size, node.size)
        content.clean = Extents((0, content.base_limit))
        for start, stop in content.dirty:
            content.clean.remove(start, stop)
        _note_times(node, transfer.times)
        volume.note_clean(content, content.base_limit)

    # -- in place ------------------------------------------------------------------------------

    async def update(self, node: Node, at: Name) -> None:
        """Append to the share's file, patch it, or cut it."""
        volume, tree, share = self._volume, self._tree, self._share
        content, base = node.content, node.base
        if content is None or content.whole:
            raise SupersededError  # truncated to nothing since the step was planned
        directory, name = at
        size = node.size
        grows = base is not None and size >= base.size and content.dirty.first >= base.size
        if grows and base is not None and volume.space.waiting:
            size = min(size, base.size + volume.space.portion)
        partly = size < node.size
        ranges = content.dirty.overlap(0, size)
        limit = min(content.base_limit, size)
        # Nobody sees a temporary: it need not be a prefix at every instant.
        append = blocking.copy_range if node.spilled else blocking.append_range
        tree.snapshot(node)
        cuts = content.cuts
        accepts = self.accepts(node)
        redirty = Extents(*content.writing)
        content.redirty += (redirty,)
        longest = size if grows else max(size, base.size if base is not None else 0)
        intent = Signature(longest, IN_PLACE, 0 if grows else _PATCH)
        before, opened = node.sent, False
        try:
            with volume.using(content) as fd:  # it may be replaced meanwhile
                await self._announce(node, at, "grow" if grows else "patch", intent)
                parent = await share.directory(directory, flush=True)
                file, found = await share.work(blocking.open_for_update, parent, name, accepts)
                opened = True
                if grows and base is not None and found.size > base.size:
                    await self._take_over(node, content, fd, file, found.size, size)
                if found.size > limit and not grows:
                    await share.work(os.ftruncate, file.fd, limit)
                fresh = base.size if grows and base is not None else limit
                parts = await self._data(content, ranges, fresh)
                for start, stop in parts:
                    for chunk in range(start, stop, CHUNK):
                        end = min(chunk + CHUNK, stop)
                        whole = await share.work(append, fd, file, chunk, end, pad=False)
                        if content.cuts != cuts:
                            raise SupersededError  # what is missing is no hole
                        if not whole:
                            await share.work(append, fd, file, chunk, end)
                        self._sent(end - chunk)
                if content.cuts != cuts:
                    raise SupersededError
                if max([fresh, *(stop for _, stop in parts)]) < size:
                    await share.work(os.ftruncate, file.fd, size)
                attributes = self.sender.attributes(node, new=True)
                if attributes.mode is None and volume.capabilities.chmod and _is_guarded(node):
                    attributes = attributes._replace(mode=stat.S_IMODE(node.mode))
                meta, xattrs = self.sender.take(node)
                try:
                    attempt = Attempts()
                    st = await share.work(
                        blocking.finish_in_place, file, size, attributes, attempt, parent, name
                    )
                except BaseException:
                    self.sender.put_back(node, meta)
                    raise
                self.sender.delivered(node, meta, self.sender.kept_here(node, xattrs, attempt))
        except ConflictError:
            node.sent = ()  # nothing that we sent is there
            volume.journal.drop_intents_of(node.ino)
            raise
        except OSError:
            if not opened and not before:
                # Nothing was changed: what the share shows from now on is not of our making.
                node.sent = ()
                volume.commit_outcome(extra=lambda: volume.journal.drop_intents_of(node.ino))
            raise
        finally:
            content.redirty = tuple(r for r in content.redirty if r is not redirty)
        if node.content is content and content.cuts == cuts:
            for start, stop in ranges:
                content.dirty.remove(start, stop)
                content.clean.add(start, stop)
            # Behind the end nothing is left unless the file has grown meanwhile.
            content.dirty.remove(size, END)
            if node.size > size:
                content.dirty.add(size, END)
            _keep_written(content, redirty, node.size)
            for start, stop in redirty:
                content.dirty.add(start, stop)
                content.clean.remove(start, stop)
            content.base_limit = size
            volume.note_clean(content, size)
        node.base = volume.signature(st)
        node.sent = ()
        node.attrs_at = volume.clock()
        _note_times(node, attributes.times)
        volume.changed_on_share(directory, name)
        if partly and node.dirty is not None:
            node.dirty.next = 0  # it is as old as before
        tree.settle(node, volume.clock())
        journal = volume.journal

        def store() -> None:
            journal.drop_intents_of(node.ino)
            if node.content is not None:
                journal.put_extents(node.content)
            if xattrs and not node.xattrs:
                journal.drop_xattrs(node.ino)

        volume.commit_outcome(node, extra=store)

    async def _take_over(
        self, node: Node, content: Content, fd: int, file: Descriptor, length: int, size: int
    ) -> None:
        """The share's file has grown: by an earlier try, perhaps of what has changed here since, or
        by another writer: raises ConflictError."""
        share, base = self._share, node.base
        start = base.size if base is not None else 0
        left = await share.work(blocking.compare_range, fd, file, start, min(length, size))
        rewritten = content.cuts or content.writing or not node.append_only
        if left is Found.OTHER and not rewritten:
            raise ConflictError
        if left is not Found.SAME or length > size:
            await share.work(os.ftruncate, file.fd, start)


def _keep_written(content: Content, dirty: Extents, size: int) -> None:
    """What threads are writing just now is dirty: were we killed, it could be on the disk."""
    for start, stop in content.writing:
        dirty.add(start, min(stop, size))


def _is_guarded(node: Node) -> bool:
    """Whether its mode keeps its own owner from changing it, unless that is root: it may have been
    given another mode to write to it."""
    return node.mode & blocking.OWNER_READS_WRITES != blocking.OWNER_READS_WRITES


def _note_times(node: Node, sent: tuple[int, int] | None) -> None:
    """What was written during a flush may have been cut off again: only its time is left of it."""
    if not node.content_dirty and sent is not None and sent[1] != node.mtime:
        node.meta |= META_TIMES


def _explains(known: Signature, found: Signature, base: Signature | None) -> bool:
    """Whether something that we sent explains what the share shows."""
    if known.mtime_ns == IN_PLACE:
        if base is not None and found.ino != base.ino:
            return False  # what is changed in place stays the same file
        shortest = base.size if base is not None and known.ino != _PATCH else 0
        return base is not None and shortest <= found.size <= known.size
    # The share may keep times more coarsely than we send them.
    return known.size == found.size and 0 <= known.mtime_ns - found.mtime_ns < 2_000_000_000
