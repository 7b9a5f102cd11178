"""The kernel interface: translates requests and contains errors; decides nothing.

No exception but FUSEError may leave a handler: anything else would end the mount. So every handler
is wrapped, and an unexpected exception becomes EIO for one caller and a traceback in the log.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
    XAttrNameT,
)

from wbcache.filesystem import Changes, FileSystem, Handle
from wbcache.node import Directory, Node

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

LOCAL_TIMEOUT = 5.0
"""Seconds for which the kernel may keep what the share does not know of yet. It goes on to do so
when the share has it and others can change it."""

BLOCK = 4096


def contained(
    handler: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let only FUSEError out of a handler."""

    @functools.wraps(handler)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(*args, **kwargs)
        except FUSEError:
            raise
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from error
        except Exception as error:
            log.exception("%s failed", handler.__name__)
            raise FUSEError(errno.EIO) from error

    return wrapper


class Operations(pyfuse3.Operations):
    """Serves one mount."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, filesystem: FileSystem) -> None:
        super().__init__()
        self._fs = filesystem
        self._tree = filesystem.tree
        self._handles: dict[int, Handle] = {}
        self._listings: dict[int, tuple[Directory, list[tuple[bytes, Node]]]] = {}
        self._numbers = itertools.count(1)
        share = filesystem.volume.config.share
        self._attr_ttl = share.attr_ttl
        self._dir_ttl = share.dir_ttl
        self._invalidator = Invalidator()
        filesystem.volume.invalidate_inode = self._invalidator.inode
        filesystem.volume.invalidate_entry = self._invalidator.entry

    def close(self) -> None:
        """Stop the invalidation thread."""
        self._invalidator.close()

    # -- attributes ----------------------------------------------------------------------------

    def _attributes(self, node: Node) -> EntryAttributes:
        attr = EntryAttributes()
        attr.st_ino = InodeT(node.ino)
        attr.st_mode = ModeT(node.mode)
        attr.st_nlink = node.nlink
        attr.st_uid = node.uid
        attr.st_gid = node.gid
        attr.st_rdev = node.rdev
        attr.st_size = BLOCK if node.is_dir else node.size
        attr.st_blksize = BLOCK
        attr.st_blocks = (node.size + 511) >> 9
        attr.st_atime_ns = node.atime
        attr.st_mtime_ns = node.mtime
        attr.st_ctime_ns = node.ctime
        if node.on_share:
            attr.attr_timeout = self._attr_ttl
            attr.entry_timeout = self._dir_ttl
        else:
            attr.attr_timeout = attr.entry_timeout = LOCAL_TIMEOUT
        return attr

    def _entry(self, node: Node) -> EntryAttributes:
        node.lookups += 1
        return self._attributes(node)

    @contained
    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        node = await self._fs.names.lookup(self._fs.directory(parent_inode), name)
        if node is None:
            raise FUSEError(errno.ENOENT)
        return self._entry(node)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        try:
            for ino, count in inode_list:
                self._fs.forget(ino, count)
        except Exception:
            log.exception("forget failed")

    @contained
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        node = self._fs.node(inode)
        if node.slinks and node.dirty is None:
            await self._fs.listings.attributes(node)
        return self._attributes(node)

    @contained
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        node = self._fs.node(inode)
        changes = Changes(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime=attr.st_atime_ns if fields.update_atime else None,
            mtime=attr.st_mtime_ns if fields.update_mtime else None,
        )
        await self._fs.attributes.change(node, changes)
        return self._attributes(node)

    @contained
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        return FileNameT(await self._fs.listings.symlink_target(self._fs.node(inode)))

    # -- names ---------------------------------------------------------------------------------

    @contained
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        directory = self._fs.directory(parent_inode)
        bits = mode & ~ctx.umask
        return self._entry(
            await self._fs.names.mknod(directory, name, bits, rdev, ctx.uid, ctx.gid)
        )

    @contained
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> EntryAttributes:
        directory = self._fs.directory(parent_inode)
        bits = mode & ~ctx.umask
        return self._entry(await self._fs.names.mkdir(directory, name, bits, ctx.uid, ctx.gid))

    @contained
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self._fs.names.unlink(self._fs.directory(parent_inode), name)

    @contained
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self._fs.names.rmdir(self._fs.directory(parent_inode), name)

    @contained
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        directory = self._fs.directory(parent_inode)
        return self._entry(await self._fs.names.symlink(directory, name, target, ctx.uid, ctx.gid))

    @contained
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        await self._fs.names.rename(
            self._fs.directory(parent_inode_old),
            name_old,
            self._fs.directory(parent_inode_new),
            name_new,
            flags,
        )

    @contained
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        node = self._fs.node(inode)
        return self._entry(
            await self._fs.names.link(node, self._fs.directory(new_parent_inode), new_name)
        )

    # -- files ---------------------------------------------------------------------------------

    @contained
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        number = next(self._numbers)
        self._handles[number] = self._fs.files.open(self._fs.node(inode), flags)
        return FileInfo(fh=FileHandleT(number))

    @contained
    async def create(
        self,
        parent_inode: InodeT,
        name: FileNameT,
        mode: ModeT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> tuple[FileInfo, EntryAttributes]:
        directory = self._fs.directory(parent_inode)
        try:
            node = await self._fs.names.create(directory, name, mode & ~ctx.umask, ctx.uid, ctx.gid)
        except FileExistsError:
            if flags & os.O_EXCL or name not in directory.local:
                raise
            # It has appeared on the share since the kernel looked the name up, and neither its
            # permissions nor its attributes were looked at: the kernel does that when it asks anew.
            raise FUSEError(errno.ESTALE) from None
        handle = self._fs.files.open(node, flags & ~os.O_TRUNC)
        number = next(self._numbers)
        self._handles[number] = handle
        return FileInfo(fh=FileHandleT(number)), self._entry(node)

    @contained
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        handle = self._handles[fh]
        return await self._fs.files.read(handle.node, off, size, ahead=not handle.direct)

    @contained
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        return await self._fs.files.write(self._handles[fh].node, off, buf)

    async def flush(self, fh: FileHandleT) -> None:
        # close(2) never waits: nothing depends on it.
        return None

    @contained
    async def release(self, fh: FileHandleT) -> None:
        handle = self._handles.pop(fh, None)
        if handle is not None:
            self._fs.files.release(handle)

    @contained
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self._fs.files.fsync(self._handles[fh].node)

    # -- directories ---------------------------------------------------------------------------

    @contained
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        number = next(self._numbers)
        directory = self._fs.directory(inode)
        directory.handles += 1
        self._listings[number] = (directory, [])
        return FileHandleT(number)

    @contained
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        directory, entries = self._listings[fh]
        if start_id == 0:
            await self._fs.listings.complete(directory)
            parent = directory.parent or directory
            entries[:] = [(b".", directory), (b"..", parent), *directory.local.items()]
        for at in range(start_id, len(entries)):
            name, node = entries[at]
            dots = at < 2
            if not dots:
                # Somebody may have replaced it: a name that is there all the time is shown.
                present = directory.local.get(name)
                if present is None:
                    continue
                node = present
            attr = self._attributes(node)
            if node.attrs_at is None and not node.ours:
                # Only the type is known: the kernel has to ask when somebody wants more.
                attr.attr_timeout = attr.entry_timeout = 0.0
            elif self._fs.listings.is_stale(node):
                # Or else who lists again and again would never see a change.
                attr.attr_timeout = 0.0
            if not pyfuse3.readdir_reply(token, FileNameT(name), attr, at + 1):
                break
            if not dots:
                node.lookups += 1

    @contained
    async def releasedir(self, fh: FileHandleT) -> None:
        listing = self._listings.pop(fh, None)
        if listing is not None:
            listing[0].handles -= 1
            self._fs.volume.forget_if_gone(listing[0])

    @contained
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self._fs.files.fsync_directory()

    @contained
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        share, data = self._fs.statfs(), StatvfsData()
        pending = self._fs.pending_bytes() // (share.f_frsize or 1)
        data.f_bsize, data.f_frsize = share.f_bsize, share.f_frsize
        data.f_blocks = share.f_blocks
        data.f_bfree = max(0, share.f_bfree - pending)
        data.f_bavail = max(0, share.f_bavail - pending)
        data.f_files, data.f_ffree = share.f_files, share.f_ffree
        data.f_favail = share.f_favail
        data.f_namemax = self._fs.volume.capabilities.name_max
        return data

    # -- extended attributes -------------------------------------------------------------------

    @contained
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        # ENOSYS makes the kernel stop asking, which it otherwise does before every write.
        if not self._fs.attributes.xattrs_served:
            raise FUSEError(errno.ENOSYS)
        if name.startswith(b"security."):
            raise FUSEError(errno.ENODATA)
        return await self._fs.attributes.get_xattr(self._fs.node(inode), name)

    @contained
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        if not self._fs.attributes.xattrs_served:
            raise FUSEError(errno.ENOSYS)
        names = await self._fs.attributes.list_xattrs(self._fs.node(inode))
        return [XAttrNameT(name) for name in names]

    @contained
    async def setxattr(
        self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext
    ) -> None:
        if not self._fs.attributes.xattrs_served:
            raise FUSEError(errno.EOPNOTSUPP)
        await self._fs.attributes.set_xattr(self._fs.node(inode), name, value)

    @contained
    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        if not self._fs.attributes.xattrs_served:
            raise FUSEError(errno.EOPNOTSUPP)
        await self._fs.attributes.set_xattr(self._fs.node(inode), name, None)


class Invalidator:
    """Tells the kernel what it must not keep, from a thread that nobody waits for.

    Invalidations can block on the very requests that cause them.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="invalidate", daemon=True)
        self._thread.start()

    def inode(self, ino: int) -> None:
        """Drop a file's cached pages and attributes."""
        self._queue.put((ino, None))

    def entry(self, parent: int, name: bytes) -> None:
        """Drop a cached name."""
        self._queue.put((parent, name))

    def close(self) -> None:
        """End the thread; it may be stuck in the kernel, so it is not waited for."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            ino, name = item
            try:
                if name is None:
                    pyfuse3.invalidate_inode(InodeT(ino))
                else:
                    pyfuse3.invalidate_entry(InodeT(ino), FileNameT(name))
            except OSError as error:
                if error.errno != errno.ENOENT:
                    log.debug("invalidation: %s", error)
            except Exception:
                log.exception("invalidation failed")
