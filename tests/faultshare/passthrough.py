"""The FUSE side of the share: every call goes through the gate, to the backing, into the log."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FUSEError, RequestContext

from tests.faultshare.backing import Backing, Changes, Handle, Owner
from tests.faultshare.calls import Call, Calls, contained
from tests.faultshare.gate import Gate
from tests.faultshare.nodes import ROOT_ID, Node, fail
from tests.faultshare.oplog import OpLog
from tests.faultshare.squash import Squash
from tests.faultshare.usage import BLOCK


@dataclass(frozen=True)
class Caching:
    """What the kernel may keep: seconds for attributes and names, pages across opens, or nothing.

    direct_io bypasses the page cache; shared writable mappings then fail with ENODEV.
    """

    attr_timeout: float = 0.0
    entry_timeout: float = 0.0
    keep_cache: bool = False
    direct_io: bool = False


@dataclass
class Directory:
    """An open directory: its node, and its names as of the last rewind."""

    node: Node
    names: list[bytes] = field(default_factory=list)


class Share(pyfuse3.Operations):
    """Serves a backing directory through a gate and logs what happens."""

    supports_dot_lookup = False  # a lookup of ".." could leave the backing directory

    def __init__(
        self,
        backing: Backing,
        gate: Gate,
        oplog: OpLog,
        caching: Caching,
        *,
        no_xattr: bool = False,
        squash: Squash | None = None,
    ) -> None:
        super().__init__()
        self._squash = squash
        self.no_xattr = no_xattr  # once answered ENOSYS, the kernel never asks again
        self.backing = backing
        self.gate = gate
        self.faults = gate.faults
        self._calls = Calls(backing, gate, oplog, squash)
        self.oplog = oplog
        self.caching = caching
        self.initialised = trio.Event()
        self.statfs_frozen: tuple[int, ...] | None = None
        self._nodes = backing.nodes
        self._handles: dict[int, Handle] = {}
        self._directories: dict[int, Directory] = {}
        self._next_fh = 1

    def init(self) -> None:
        """The kernel has connected."""
        self.initialised.set()

    def _owner(self, ctx: RequestContext) -> Owner:
        """Whom something new belongs to."""
        return self._squash.owner if self._squash is not None else Owner(ctx.uid, ctx.gid)

    def _attributes(self, node: Node, st: os.stat_result) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = node.id
        entry.generation = node.generation
        entry.attr_timeout = self.caching.attr_timeout
        entry.entry_timeout = self.caching.entry_timeout
        entry.st_mode = st.st_mode
        entry.st_nlink = st.st_nlink
        entry.st_uid = st.st_uid
        entry.st_gid = st.st_gid
        entry.st_rdev = st.st_rdev
        entry.st_size = st.st_size
        entry.st_blksize = st.st_blksize
        entry.st_blocks = st.st_blocks
        grain = self.faults.mtime_resolution_ns
        entry.st_atime_ns = st.st_atime_ns - st.st_atime_ns % grain
        entry.st_mtime_ns = st.st_mtime_ns - st.st_mtime_ns % grain
        entry.st_ctime_ns = st.st_ctime_ns - st.st_ctime_ns % grain
        return entry

    def _entry(self, found: tuple[Node, os.stat_result]) -> EntryAttributes:
        return self._attributes(*found)

    def _forget_entry(self, entry: EntryAttributes) -> None:
        self._nodes.forget(entry.st_ino, 1)

    # Attributes

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for inode, count in inode_list:
            self._nodes.forget(inode, count)

    @contained
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        parent = self._nodes.get(parent_inode)
        call = Call("lookup", parent=parent, name=name, undo=self._forget_entry)
        return await self._calls.run(call, lambda: self._entry(self.backing.lookup(parent, name)))

    @contained
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        node = self._nodes.get(inode)

        def effect() -> EntryAttributes:
            entry = self._attributes(node, self.backing.stat(node))
            if inode == ROOT_ID:
                entry.st_ino = node.key[1]
            return entry

        return await self._calls.run(Call("getattr", node=node), effect)

    @contained
    async def setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        node = self._nodes.get(inode)
        handle = None if fh is None else self._handles.get(fh)
        grain = self.faults.mtime_resolution_ns
        mtime = attr.st_mtime_ns - attr.st_mtime_ns % grain
        changes = Changes(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=mtime if fields.update_mtime else None,
        )
        if changes.size is not None:
            op = "truncate"
        elif changes.mode is not None:
            op = "chmod"
        elif changes.uid is not None or changes.gid is not None:
            op = "chown"
        else:
            op = "utimens"
        details = {name: value for name, value in vars(changes).items() if value is not None}
        call = Call(op, node=node, size=changes.size or 0, details=details)
        return await self._calls.run(
            call, lambda: self._attributes(node, self.backing.change(node, changes, handle))
        )

    @contained
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        node = self._nodes.get(inode)
        return await self._calls.run(
            Call("readlink", node=node), lambda: self.backing.readlink(node)
        )

    @contained
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        return await self._calls.run(Call("statfs"), self._statvfs)

    def freeze_statfs(self, frozen: bool) -> None:
        """Keep answering statfs with the figures of this moment, or stop doing so."""
        self.statfs_frozen = self._figures() if frozen else None

    def _figures(self) -> tuple[int, ...]:
        st = os.statvfs(self.backing.link_path(self._nodes.root))
        scale = st.f_frsize / BLOCK
        usage = self.backing.usage
        blocks, free = usage.free_blocks() or (int(st.f_blocks * scale), int(st.f_bavail * scale))
        files, free_files = usage.free_inodes() or (st.f_files, st.f_favail)
        return blocks, free, files, free_files, st.f_namemax

    def _statvfs(self) -> pyfuse3.StatvfsData:
        blocks, free, files, free_files, namemax = self.statfs_frozen or self._figures()
        answer = pyfuse3.StatvfsData()
        answer.f_bsize = answer.f_frsize = BLOCK
        answer.f_blocks = blocks
        answer.f_bfree = answer.f_bavail = free
        answer.f_files = files
        answer.f_ffree = answer.f_favail = free_files
        answer.f_namemax = min(namemax, self.faults.name_max)
        return answer

    # Names

    @contained
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        parent, owner = self._nodes.get(parent_inode), self._owner(ctx)
        call = Call("mknod", parent=parent, name=name, undo=self._forget_entry)
        call.details = {"type": stat.S_IFMT(mode), "rdev": rdev}
        make = self.backing.mknod
        return await self._make(call, lambda: make(parent, name, mode, rdev, owner))

    @contained
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        parent, owner = self._nodes.get(parent_inode), self._owner(ctx)
        call = Call("mkdir", parent=parent, name=name, undo=self._forget_entry)
        return await self._make(call, lambda: self.backing.mkdir(parent, name, mode, owner))

    @contained
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        parent, owner = self._nodes.get(parent_inode), self._owner(ctx)
        call = Call("symlink", parent=parent, name=name, undo=self._forget_entry)
        call.details = {"target": os.fsdecode(target)}
        return await self._make(call, lambda: self.backing.symlink(parent, name, target, owner))

    async def _make(
        self, call: Call, make: Callable[[], tuple[Node, os.stat_result]]
    ) -> EntryAttributes:
        def effect() -> EntryAttributes:
            node, st = make()
            call.details |= _permissions(st)
            return self._attributes(node, st)

        return await self._calls.run(call, effect)

    @contained
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        node, parent = self._nodes.get(inode), self._nodes.get(new_parent_inode)
        call = Call("link", node=node, parent2=parent, name2=new_name, undo=self._forget_entry)
        return await self._calls.run(
            call, lambda: self._entry(self.backing.link(node, parent, new_name))
        )

    @contained
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        parent = self._nodes.get(parent_inode)
        call = Call("unlink", parent=parent, name=name)
        await self._calls.run(call, lambda: self.backing.unlink(parent, name))

    @contained
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        parent = self._nodes.get(parent_inode)
        call = Call("rmdir", parent=parent, name=name)
        await self._calls.run(call, lambda: self.backing.rmdir(parent, name))

    @contained
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        parent, parent2 = self._nodes.get(parent_inode_old), self._nodes.get(parent_inode_new)
        if flags & ~(pyfuse3.RENAME_NOREPLACE | pyfuse3.RENAME_EXCHANGE):
            raise FUSEError(errno.EINVAL)
        call = Call("rename", None, parent, name_old, parent2, name_new, flags=flags)
        await self._calls.run(
            call, lambda: self.backing.rename(parent, name_old, parent2, name_new, flags)
        )

    # Files

    @contained
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> pyfuse3.FileInfo:
        node = self._nodes.get(inode)
        call = Call("open", node=node, flags=flags, mutates=bool(flags & os.O_TRUNC))
        call.undo = self._close
        return await self._calls.run(call, lambda: self._info(self.backing.open(node, flags)))

    @contained
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[pyfuse3.FileInfo, EntryAttributes]:
        parent, owner = self._nodes.get(parent_inode), self._owner(ctx)
        call = Call("create", parent=parent, name=name, flags=flags)

        def effect() -> tuple[pyfuse3.FileInfo, EntryAttributes]:
            node, st, handle, created = self.backing.create(parent, name, mode, flags, owner)
            call.details |= {"created": created, **_permissions(st)}
            return self._info(handle), self._attributes(node, st)

        def undo(result: tuple[pyfuse3.FileInfo, EntryAttributes]) -> None:
            self._close(result[0])
            self._forget_entry(result[1])

        call.undo = undo
        return await self._calls.run(call, effect)

    def _info(self, handle: Handle) -> pyfuse3.FileInfo:
        fh = self._next_fh
        self._next_fh += 1
        self._handles[fh] = handle
        return pyfuse3.FileInfo(
            fh=fh, direct_io=self.caching.direct_io, keep_cache=self.caching.keep_cache
        )

    def _close(self, info: pyfuse3.FileInfo) -> None:
        self.backing.release(self._handles.pop(info.fh))

    def _handle(self, fh: int) -> Handle:
        try:
            return self._handles[fh]
        except KeyError:
            raise fail(errno.EBADF) from None

    @contained
    async def read(self, fh: int, off: int, size: int) -> bytes:
        handle = self._handle(fh)
        call = Call("read", node=handle.node, offset=off, size=size)
        return await self._calls.run(call, lambda: self.backing.read(handle, off, size))

    @contained
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        handle = self._handle(fh)
        call = Call("write", node=handle.node, offset=off, data=buf)
        return await self._calls.run(call, lambda: self.backing.write(handle, off, buf))

    @contained
    async def flush(self, fh: int) -> None:
        await self._synchronise("flush", fh)

    @contained
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._synchronise("fsync", fh)

    async def _synchronise(self, op: str, fh: int) -> None:
        handle = self._handle(fh)

        def effect() -> None:
            if handle.stale:
                raise fail(errno.ESTALE)

        await self._calls.run(Call(op, node=handle.node), effect)

    @contained
    async def release(self, fh: int) -> None:
        handle = self._handle(fh)
        call = Call("release", node=handle.node)
        try:
            await self._calls.run(call, lambda: None)
        finally:
            del self._handles[fh]
            self.backing.release(handle)

    def stale_handles(self) -> int:
        """Make every file that is open now answer ESTALE; returns how many there are."""
        for handle in self._handles.values():
            handle.stale = True
        return len(self._handles)

    # Directories

    @contained
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        node = self._nodes.get(inode)

        def effect() -> int:
            fh = self._next_fh
            self._next_fh += 1
            self._directories[fh] = Directory(node)
            return fh

        call = Call("opendir", node=node, undo=self._drop_directory)
        return await self._calls.run(call, effect)

    def _drop_directory(self, fh: int) -> None:
        del self._directories[fh]

    @contained
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        directory = self._directories[fh]
        call = Call("readdir", node=directory.node, offset=start_id)
        await self._calls.run(call, lambda: self._list(directory, start_id, token))

    def _list(self, directory: Directory, start: int, token: pyfuse3.ReaddirToken) -> int:
        """Reply with as many entries as the kernel has room for; returns how many."""
        if start == 0:
            directory.names = [b".", b"..", *sorted(self.backing.listing(directory.node))]
        count = 0
        for position in range(start, len(directory.names)):
            try:
                if not self._reply(directory.node, directory.names[position], position + 1, token):
                    break
                count += 1
            except FileNotFoundError:
                continue
        return count

    def _reply(self, parent: Node, name: bytes, next_id: int, token: pyfuse3.ReaddirToken) -> bool:
        if name in (b".", b".."):
            entry = self._attributes(parent, self.backing.stat(parent))
            return pyfuse3.readdir_reply(token, name, entry, next_id)
        node, st = self.backing.lookup(parent, name)
        added = pyfuse3.readdir_reply(token, name, self._attributes(node, st), next_id)
        if not added:
            self._nodes.forget(node.id, 1)
        return added

    @contained
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._calls.run(Call("fsyncdir", node=self._directories[fh].node), lambda: None)

    @contained
    async def releasedir(self, fh: int) -> None:
        directory = self._directories.pop(fh)
        await self._calls.run(Call("releasedir", node=directory.node), lambda: None)

    # Extended attributes

    @contained
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if self.no_xattr:
            raise FUSEError(errno.ENOSYS)
        if name.startswith(b"security."):
            # The kernel asks before every write, not the caller, and no network share is asked.
            raise FUSEError(pyfuse3.ENOATTR)
        node = self._nodes.get(inode)
        call = Call("getxattr", node=node, details={"name": os.fsdecode(name)})
        return await self._calls.run(call, lambda: os.getxattr(self.backing.link_path(node), name))

    @contained
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        if self.no_xattr:
            raise FUSEError(errno.ENOSYS)
        node = self._nodes.get(inode)

        def effect() -> list[bytes]:
            return [os.fsencode(name) for name in os.listxattr(self.backing.link_path(node))]

        return await self._calls.run(Call("listxattr", node=node), effect)

    @contained
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        if self.no_xattr:
            raise FUSEError(errno.ENOSYS)
        node = self._nodes.get(inode)
        details = {"name": os.fsdecode(name), "value": os.fsdecode(value)}
        await self._calls.run(
            Call("setxattr", node=node, details=details),
            lambda: os.setxattr(self.backing.link_path(node), name, value),
        )

    @contained
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        if self.no_xattr:
            raise FUSEError(errno.ENOSYS)
        node = self._nodes.get(inode)
        await self._calls.run(
            Call("removexattr", node=node, details={"name": os.fsdecode(name)}),
            lambda: os.removexattr(self.backing.link_path(node), name),
        )


def _permissions(st: os.stat_result) -> dict[str, Any]:
    return {"mode": stat.S_IMODE(st.st_mode), "uid": st.st_uid, "gid": st.st_gid}
