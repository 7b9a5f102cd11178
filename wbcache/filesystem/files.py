"""Open files: reading, writing, truncating, making durable.

A write is acknowledged when the cache file and the journal hold it, in this order. Small writes are
made on the event loop; large ones in threads while the disk is slow, so that a stalling disk does
not stop everything else.
"""

from __future__ import annotations

import errno
import os
import time

import trio

from wbcache.extents import END, Extents
from wbcache.filesystem.names import error
from wbcache.filesystem.reading import ShareReader
from wbcache.node import META_TIMES, Content, Node
from wbcache.space import BLOCK, SMALL_FILE
from wbcache.volume import Volume

INLINE_LIMIT = 64 << 10
"""Writes of fewer bytes never go through a thread: the hop costs more than the write."""

SLOW_WRITE = 0.005
"""Seconds; a write that takes longer sends the next large ones through threads."""

THREADED_FOR = 1.0
"""Seconds for which large writes then go through threads."""


class Handle:
    """One open of a file."""

    __slots__ = ("direct", "node", "writable")

    def __init__(self, node: Node, flags: int) -> None:
        self.node = node
        self.writable = flags & os.O_ACCMODE != os.O_RDONLY
        self.direct = flags & os.O_DIRECT != 0
        """Reads come as the program makes them, not as the kernel reads ahead."""


class Files:
    """Reads and writes of file contents."""

    def __init__(self, volume: Volume, nursery: trio.Nursery) -> None:
        self._volume = volume
        self._tree = volume.tree
        self.share_reader = ShareReader(volume, nursery)
        self._threaded_until = 0.0

    # -- opening -------------------------------------------------------------------------------

    def open(self, node: Node, flags: int) -> Handle:
        """Open a file; O_TRUNC starts a new generation. Permissions are the kernel's to check.

        Raises ESTALE for a file that was removed since its name was looked up; the kernel then
        looks the name up again.
        """
        if not node.links and not node.handles:
            raise error(errno.ESTALE)
        handle = Handle(node, flags)
        if (handle.writable or flags & os.O_TRUNC) and self._volume.read_only:
            raise error(errno.EROFS)
        if flags & os.O_TRUNC:  # also of a descriptor that can only read
            self._restart(node)
        node.handles += 1
        if node.content is not None:
            node.content.pins += 1
        if handle.writable:
            node.writers += 1
            if node.writers == 1:
                self._tree.account(node)
        return handle

    def release(self, handle: Handle) -> None:
        """The last descriptor of an open is closed."""
        node = handle.node
        node.handles -= 1
        content = node.content
        if content is not None:
            content.pins -= 1
            content.used = self._volume.clock()
        if handle.writable:
            node.writers -= 1
            if not node.writers:
                node.closed = node.dirty is not None
                self._tree.account(node)
                if node.dirty is not None:
                    self._tree.touch_item(node)
        if not node.handles:
            node.share_fd = None
            self.share_reader.close(node)
            if not node.links:
                self._volume.forget_if_gone(node)

    def _restart(self, node: Node) -> None:
        """Truncate to nothing: a new generation, whatever became of the old one."""
        volume, tree, now = self._volume, self._tree, self._volume.clock()
        fresh = volume.new_content(whole=True)
        before = (node.size, node.mtime, node.ctime)
        old = volume.replace_content(node, fresh)
        node.size = 0
        node.mtime = node.ctime = time.time_ns()
        node.meta &= ~META_TIMES
        node.trouble = None  # what the share refused, or a power loss tore, is gone
        tree.touch(node, now)
        volume.unsynced[node] = now
        fresh.seq = tree.seq
        tree.account(node)

        def undo() -> None:
            node.content = old
            node.size, node.mtime, node.ctime = before
            if old is not None:
                old.pins += node.handles

        def drop() -> None:
            if old is not None:
                volume.journal.drop_extents(old.gen)

        volume.commit(node, undo=undo, extra=drop)
        volume.retire(old)

    # -- writing -------------------------------------------------------------------------------

    async def write(self, node: Node, offset: int, data: bytes) -> int:
        """Write bytes; returns how many. Raises ENOSPC or EIO when the cache can't hold them, and
        EFBIG when the share could not."""
        volume = self._volume
        length = len(data)
        stop = offset + length
        if stop > volume.capabilities.size_max:
            raise error(errno.EFBIG)
        room = -(-stop // BLOCK) * BLOCK
        while True:
            if volume.freezer:
                while node.content in volume.freezer:
                    await volume.freezer.until_thawed(node.content)
            content = node.content
            if content is None:
                content = volume.content_for_write(node)
            if room == content.room and offset >= room - BLOCK:
                taken = 0
            else:
                taken = room - offset // BLOCK * BLOCK
                if not volume.space.take(taken):
                    await volume.space.wait(taken, small=_is_small(content, length))
                    if content is not node.content or content in volume.freezer:
                        volume.space.settle(taken, 0)
                        continue
            try:
                done = await self._write(node, content, offset, data, taken)
            except OSError as caught:
                if caught.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # Others have filled the disk: more of the cache has to go.
                await volume.space.wait_for_disk(caught)
            else:
                break
        content.room = room if done == length else 0
        self._written(node, content, offset, offset + done)
        return done

    async def _write(
        self, node: Node, content: Content, offset: int, data: bytes, taken: int
    ) -> int:
        volume, length = self._volume, len(data)
        now = volume.clock()
        try:
            fd = content.fd if content.fd >= 0 else volume.store.fd(content)
            self._tree.touch(node, now)
            if content.clean:
                # Were we killed after the write, the journal must not call these the share's.
                for start, stop in content.clean.overlap(offset, offset + length):
                    volume.mark_dirty(node, content, start, stop)
            if length >= INLINE_LIMIT and now <= self._threaded_until:
                return await self._write_in_thread(content, fd, offset, data)
            done = os.pwrite(fd, data, offset)
            if length >= INLINE_LIMIT and volume.clock() - now > SLOW_WRITE:
                self._threaded_until = now + THREADED_FOR
            return done
        finally:
            if taken:
                volume.count_blocks(content, taken)

    async def _write_in_thread(self, content: Content, fd: int, offset: int, data: bytes) -> int:
        volume = self._volume
        span = (offset, offset + len(data))
        content.writing += (span,)
        content.pins += 1
        try:
            return await trio.to_thread.run_sync(
                os.pwrite, fd, data, offset, limiter=volume.local_lane
            )
        finally:
            at = content.writing.index(span)
            content.writing = content.writing[:at] + content.writing[at + 1 :]
            volume.unpin(content)
            volume.freezer.write_ended()

    def _written(self, node: Node, content: Content, start: int, stop: int) -> None:
        if node.content is not content:
            return  # truncated to nothing meanwhile: the bytes went with the old generation
        if start != node.size:
            node.append_only = False
        content.unsynced_error = False
        self._volume.mark_dirty(node, content, start, stop)
        if stop > node.size:
            if not node.size:
                self._tree.touch_item(node)  # a log is due earlier than what is empty
            node.size = stop
        if node.meta & META_TIMES:
            node.meta &= ~META_TIMES
        node.mtime = node.ctime = time.time_ns()

    async def truncate(self, node: Node, size: int) -> None:
        """Set a file's length."""
        volume, tree = self._volume, self._tree
        if volume.read_only:
            raise error(errno.EROFS)
        if size > volume.capabilities.size_max:
            raise error(errno.EFBIG)
        if size == 0:
            self._restart(node)
            return
        marked = False
        while True:
            if node.content in volume.freezer:
                await volume.freezer.until_thawed(node.content)
            elif node.content is not None and node.content.writing:
                await volume.freezer.until_written(node.content)
            elif not marked and node.content is not None and size < node.content.synced:
                # After a power loss what is written in place of durable bytes must not be taken for
                # them.
                node.append_only, node.content.fresh, marked = False, True, True
                volume.commit(node)
                await volume.sync_journal()
            else:
                break
        content = volume.content_for_write(node)
        tree.touch(node, volume.clock())
        old = node.size
        before = (content.dirty.copy(), content.clean.copy(), content.base_limit)
        durable = (content.synced, content.fresh)
        if size != old:
            content.fresh = True
            content.version += 1  # a sync under way does not cover it
            volume.unsynced.setdefault(node, volume.clock())
        if size < old:
            content.cuts += 1
            content.synced = min(content.synced, size)
            content.base_limit = min(content.base_limit, size)
            if not content.whole:
                content.dirty.remove(size, END)
                content.clean.remove(size, END)
            node.append_only = False
        elif size > old:
            os.ftruncate(volume.store.fd(content), size)
            content.mark_dirty(old, END)
            node.append_only = False  # it is to be filled: nobody wants the zeros
            if not old:
                tree.touch_item(node)
        node.size = size
        times = (node.mtime, node.ctime)
        node.mtime = node.ctime = time.time_ns()
        node.meta &= ~META_TIMES
        if not node.content_dirty:
            node.meta |= META_TIMES  # the share has the bytes, but not the time

        def undo() -> None:
            content.dirty, content.clean, content.base_limit = before
            content.synced, content.fresh = durable
            node.size = old
            node.mtime, node.ctime = times

        volume.commit(node, undo=undo, extra=lambda: volume.journal.put_extents(content))
        if size < old:
            # The journal first: it must not call bytes present that are gone.
            for redirty in content.redirty:
                redirty.remove(size, END)
            if content.exists:
                fd = volume.store.fd(content)
                if os.fstat(fd).st_size > size:
                    os.ftruncate(fd, size)
                    content.room = 0
                    volume.count_blocks(content)

    # -- reading -------------------------------------------------------------------------------

    async def read(self, node: Node, offset: int, size: int, *, ahead: bool = False) -> bytes:
        """Read bytes; what is here is read here, the rest from the share.

        Raises ETIMEDOUT when bytes that only the share has do not come within the deadline; with
        ``ahead``, which says that not all of it may be wanted, earlier when some are here.
        """
        pieces: list[tuple[int, int, bytes]] = []
        while True:
            stop = min(offset + size, node.size)
            if offset >= stop:
                return b""
            content = node.content
            if content is None:
                absent = [(offset, stop)]
            else:
                absent = [] if content.whole else content.absent(offset, stop)
            if not absent and content is not None:
                return self._read_cache(content, offset, stop)
            # While we wait for the share, bytes here may be written, cut or evicted.
            have = Extents(*((a, b) for a, b, _ in pieces))
            missing = [gap for a, b in absent for gap in have.gaps(a, b)]
            if not missing:
                break
            reader = self.share_reader
            patient = not ahead or absent == [(offset, stop)]
            for a, b in missing:
                data = await (reader.read if patient else reader.read_soon)(node, a, b)
                pieces.append((a, b, data))
        if len(pieces) == 1 and absent == [pieces[0][:2]] == [(offset, stop)]:
            return pieces[0][2]
        if content is None or absent == [(offset, stop)]:
            buffer = bytearray(stop - offset)
        else:
            buffer = bytearray(self._read_cache(content, offset, stop))
        for start, end in absent:
            for a, b, data in pieces:
                a, b, data = max(a, start), min(b, end), data[max(0, start - a) :]
                if a < b:
                    buffer[a - offset : b - offset] = data[: b - a].ljust(b - a, b"\0")
                    if b == stop and len(data) < b - a:
                        stop = a + len(data)  # the share's file has become shorter
        return bytes(buffer[: stop - offset])

    def _read_cache(self, content: Content, start: int, stop: int) -> bytes:
        content.used = self._volume.clock()
        data = b""
        if content.exists:
            fd = content.fd if content.fd >= 0 else self._volume.store.fd(content)
            data = os.pread(fd, stop - start, start)
        if content.torn and len(data) < stop - start:
            raise error(errno.EIO)  # nobody knows what was there
        # Behind the cache file's end lies a hole.
        return data if len(data) == stop - start else data.ljust(stop - start, b"\0")

    # -- durability ----------------------------------------------------------------------------

    async def fsync(self, node: Node) -> None:
        """Make a file's bytes and attributes survive a power loss. Raises EIO if they can't be."""
        volume, content = self._volume, node.content
        if content is not None:
            await volume.freezer.until_written(content)
            if content.unsynced_error:
                raise error(errno.EIO)
            if content.fresh:
                await volume.sync_content(node)
        await volume.sync_journal()
        if node.dirty is not None and node.size and not node.fsynced:
            node.fsynced = True
            self._tree.account(node)
            self._tree.touch_item(node)

    async def fsync_directory(self) -> None:
        """Make every change of names so far survive a power loss."""
        await self._volume.sync_journal()


def _is_small(content: Content, length: int) -> bool:
    """Whether a write is one of those that never wait behind large files: of a log, say."""
    return length < INLINE_LIMIT and content.blocks < SMALL_FILE
