"""A bare pyfuse3 pass-through: the ceiling any pyfuse3 file system can be measured against.

Lean, but honest: it serves every call a full file system serves, keeps nodes by inode number
(so that renames, hard links and open-unlinked files work), answers getxattr through a handler,
checks permissions in the kernel, and leaves the kernel's write-back cache off.  It has no
journal, no cache and no second copy: each call is the same call on the directory below, made
inline on the event loop.  Attributes and names stay valid in the kernel for `_TIMEOUT` seconds,
so changes made below the mount are not seen.

    python -m tests.bench.passthrough SOURCE MOUNTPOINT [--no-xattr]

runs in the foreground until the mount point is unmounted or SIGTERM comes.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import functools
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import pyfuse3
import trio
from pyfuse3 import FUSEError

_TIMEOUT = 3600.0
# O_APPEND would make pwrite ignore its offset; the kernel has dealt with the others already.
_STRIP = ~(os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_NOFOLLOW)
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2

_libc = ctypes.CDLL(None, use_errno=True)

_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[object]])


def _answers_errno(handler: _Handler) -> _Handler:
    """Turn an OSError of the directory below into the errno the caller sees."""

    @functools.wraps(handler)
    async def call(*args: object) -> object:
        try:
            return await handler(*args)
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None

    return call  # type: ignore[return-value]


class _Node:
    """One inode the kernel knows: where it is below (all known names), and who has it open."""

    __slots__ = ("below", "children", "dir_fd", "fds", "ino", "lookups", "nlink", "places")

    def __init__(self, ino: int, below: int) -> None:
        self.ino = ino
        self.below = below  # its inode number in the directory below
        self.lookups = 0
        self.nlink = 1
        self.places: list[tuple[_Node, bytes]] = []
        self.children: dict[bytes, _Node] = {}
        self.dir_fd = -1
        self.fds: list[int] = []


class PassThrough(pyfuse3.Operations):
    """Serve the directory `source`; with `xattr` false, getxattr and the like answer ENOSYS."""

    def __init__(self, source: str, *, xattr: bool = True) -> None:
        super().__init__()
        self._xattr = xattr
        self._uid = os.getuid()
        root = _Node(pyfuse3.ROOT_INODE, os.stat(source).st_ino)
        root.dir_fd = os.open(source, os.O_PATH | os.O_DIRECTORY)
        root.lookups = 1
        self._nodes: dict[int, _Node] = {root.ino: root}
        self._below: dict[int, _Node] = {root.below: root}
        self._open: dict[int, _Node] = {}
        self._listings: dict[int, tuple[_Node, list[bytes]]] = {}
        self._next_ino = root.ino + 1
        self._next_listing = 1

    # -- nodes

    def _dir_fd(self, node: _Node) -> int:
        if node.dir_fd < 0:
            parent, name = self._place(node)
            node.dir_fd = os.open(
                name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._dir_fd(parent)
            )
        return node.dir_fd

    def _place(self, node: _Node) -> tuple[_Node, bytes]:
        if not node.places:
            raise FUSEError(errno.ESTALE)
        return node.places[-1]

    def _enter(self, parent: _Node, name: bytes, st: os.stat_result) -> _Node:
        """The node of what `st` describes, now known to be at `name` in `parent`."""
        node = self._below.get(st.st_ino)
        if node is None:
            node = _Node(self._next_ino, st.st_ino)
            self._next_ino += 1
            self._nodes[node.ino] = self._below[st.st_ino] = node
        if parent.children.get(name) is not node:
            parent.children[name] = node
            node.places.append((parent, name))
        node.nlink = st.st_nlink
        return node

    def _leave(self, parent: _Node, name: bytes) -> None:
        """`name` is gone from `parent`, by removal or because another took its place."""
        node = parent.children.pop(name, None)
        if node is None:
            return
        node.places.remove((parent, name))
        node.nlink -= 1
        if node.nlink <= 0 or node.dir_fd >= 0:
            # The number below may be used again at once; it must not lead to this node.
            self._below.pop(node.below, None)

    def _attributes(self, node: _Node, st: os.stat_result) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = node.ino
        entry.st_mode = st.st_mode
        entry.st_nlink = st.st_nlink
        entry.st_uid = st.st_uid
        entry.st_gid = st.st_gid
        entry.st_rdev = st.st_rdev
        entry.st_size = st.st_size
        entry.st_blksize = st.st_blksize
        entry.st_blocks = st.st_blocks
        entry.st_atime_ns = st.st_atime_ns
        entry.st_mtime_ns = st.st_mtime_ns
        entry.st_ctime_ns = st.st_ctime_ns
        entry.entry_timeout = _TIMEOUT
        entry.attr_timeout = _TIMEOUT
        return entry

    def _stat(self, node: _Node) -> os.stat_result:
        if node.fds:
            return os.fstat(node.fds[-1])
        if node.dir_fd >= 0:
            return os.fstat(node.dir_fd)
        parent, name = self._place(node)
        return os.stat(name, dir_fd=self._dir_fd(parent), follow_symlinks=False)

    def _look(self, parent: _Node, name: bytes) -> pyfuse3.EntryAttributes:
        st = os.stat(name, dir_fd=self._dir_fd(parent), follow_symlinks=False)
        node = self._enter(parent, name, st)
        node.lookups += 1
        return self._attributes(node, st)

    def _own(self, fd_or_name: int | bytes, parent_fd: int, ctx: pyfuse3.RequestContext) -> None:
        """What was made for another user belongs to that user."""
        if ctx.uid == self._uid:
            return
        if isinstance(fd_or_name, int):
            os.fchown(fd_or_name, ctx.uid, ctx.gid)
        else:
            os.chown(fd_or_name, ctx.uid, ctx.gid, dir_fd=parent_fd, follow_symlinks=False)

    # -- names

    @_answers_errno
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = self._nodes[parent_inode]
        if name == b"..":
            parent, name = self._place(parent)[0], b"."
        if name == b".":
            parent.lookups += 1
            return self._attributes(parent, self._stat(parent))
        return self._look(parent, name)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, count in inode_list:
            node = self._nodes[ino]
            node.lookups -= count
            if node.lookups > 0:
                continue
            del self._nodes[ino]
            for parent, name in node.places:
                if parent.children.get(name) is node:
                    del parent.children[name]
            if self._below.get(node.below) is node:
                del self._below[node.below]
            if node.dir_fd >= 0:
                os.close(node.dir_fd)

    @_answers_errno
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = self._nodes[parent_inode]
        fd = self._dir_fd(parent)
        os.mkdir(name, mode & 0o7777, dir_fd=fd)
        self._own(name, fd, ctx)
        return self._look(parent, name)

    @_answers_errno
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = self._nodes[parent_inode]
        fd = self._dir_fd(parent)
        os.mknod(name, mode, rdev, dir_fd=fd)
        self._own(name, fd, ctx)
        return self._look(parent, name)

    @_answers_errno
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = self._nodes[parent_inode]
        fd = self._dir_fd(parent)
        os.symlink(target, name, dir_fd=fd)
        self._own(name, fd, ctx)
        return self._look(parent, name)

    @_answers_errno
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        old_parent, old_name = self._place(self._nodes[inode])
        parent = self._nodes[new_parent_inode]
        os.link(
            old_name,
            new_name,
            src_dir_fd=self._dir_fd(old_parent),
            dst_dir_fd=self._dir_fd(parent),
            follow_symlinks=False,
        )
        return self._look(parent, new_name)

    @_answers_errno
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        parent, name = self._place(self._nodes[inode])
        return os.readlink(name, dir_fd=self._dir_fd(parent))

    @_answers_errno
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        parent = self._nodes[parent_inode]
        os.unlink(name, dir_fd=self._dir_fd(parent))
        self._leave(parent, name)

    @_answers_errno
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        parent = self._nodes[parent_inode]
        os.rmdir(name, dir_fd=self._dir_fd(parent))
        self._leave(parent, name)

    @_answers_errno
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        old, new = self._nodes[parent_inode_old], self._nodes[parent_inode_new]
        old_fd, new_fd = self._dir_fd(old), self._dir_fd(new)
        if not flags:
            os.rename(name_old, name_new, src_dir_fd=old_fd, dst_dir_fd=new_fd)
        elif flags in (_RENAME_NOREPLACE, _RENAME_EXCHANGE):
            if _libc.renameat2(old_fd, name_old, new_fd, name_new, flags) != 0:
                raise FUSEError(ctypes.get_errno())
        else:
            raise FUSEError(errno.EINVAL)
        moved = old.children.get(name_old)
        replaced = new.children.get(name_new)
        if moved is not None and moved is replaced:
            return  # two names of one file: POSIX leaves both
        if flags == _RENAME_EXCHANGE:
            self._move(moved, old, name_old, new, name_new)
            self._move(replaced, new, name_new, old, name_old)
            return
        self._leave(new, name_new)
        if moved is not None:
            del old.children[name_old]
        self._move(moved, old, name_old, new, name_new)

    @staticmethod
    def _move(node: _Node | None, old: _Node, old_name: bytes, new: _Node, new_name: bytes) -> None:
        if node is None:
            new.children.pop(new_name, None)
            return
        new.children[new_name] = node
        node.places[node.places.index((old, old_name))] = (new, new_name)

    # -- attributes

    @_answers_errno
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        node = self._nodes[inode]
        return self._attributes(node, self._stat(node))

    @_answers_errno
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        node = self._nodes[inode]
        target, dir_fd, follow = self._reach(node)
        if fields.update_size:
            if fh is not None:
                os.ftruncate(fh, attr.st_size)
            else:
                fd = os.open(target, os.O_WRONLY, dir_fd=dir_fd)
                try:
                    os.ftruncate(fd, attr.st_size)
                finally:
                    os.close(fd)
        if fields.update_uid or fields.update_gid:
            uid = attr.st_uid if fields.update_uid else -1
            gid = attr.st_gid if fields.update_gid else -1
            os.chown(target, uid, gid, dir_fd=dir_fd, follow_symlinks=follow)
        if fields.update_mode:
            os.chmod(target, attr.st_mode & 0o7777, dir_fd=dir_fd)
        if fields.update_atime or fields.update_mtime:
            st = self._stat(node)
            atime = attr.st_atime_ns if fields.update_atime else st.st_atime_ns
            mtime = attr.st_mtime_ns if fields.update_mtime else st.st_mtime_ns
            os.utime(target, ns=(atime, mtime), dir_fd=dir_fd, follow_symlinks=follow)
        return self._attributes(node, self._stat(node))

    def _reach(self, node: _Node) -> tuple[bytes, int | None, bool]:
        """(path, directory descriptor, follow) that lead to `node` for calls that take a path."""
        if node.ino == pyfuse3.ROOT_INODE:
            return b"/proc/self/fd/%d" % node.dir_fd, None, True
        if node.places:
            parent, name = node.places[-1]
            return name, self._dir_fd(parent), False
        if node.fds:
            return b"/proc/self/fd/%d" % node.fds[-1], None, True
        raise FUSEError(errno.ESTALE)

    @_answers_errno
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        below = os.statvfs(self._nodes[pyfuse3.ROOT_INODE].dir_fd)
        answer = pyfuse3.StatvfsData()
        answer.f_bsize = below.f_bsize
        answer.f_frsize = below.f_frsize
        answer.f_blocks = below.f_blocks
        answer.f_bfree = below.f_bfree
        answer.f_bavail = below.f_bavail
        answer.f_files = below.f_files
        answer.f_ffree = below.f_ffree
        answer.f_favail = below.f_favail
        answer.f_namemax = below.f_namemax
        return answer

    # -- extended attributes

    def _xattr_path(self, inode: int) -> bytes:
        path, dir_fd, _ = self._reach(self._nodes[inode])
        return path if dir_fd is None else b"/proc/self/fd/%d/%s" % (dir_fd, path)

    @_answers_errno
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if not self._xattr:
            raise FUSEError(errno.ENOSYS)
        if not name.startswith(b"user."):
            raise FUSEError(errno.ENODATA)
        return os.getxattr(self._xattr_path(inode), name)

    @_answers_errno
    async def setxattr(
        self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        if not self._xattr:
            raise FUSEError(errno.ENOSYS)
        if not name.startswith(b"user."):
            raise FUSEError(errno.EOPNOTSUPP)
        os.setxattr(self._xattr_path(inode), name, value)

    @_answers_errno
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        if not self._xattr:
            raise FUSEError(errno.ENOSYS)
        names = os.listxattr(self._xattr_path(inode))
        return [os.fsencode(name) for name in names if name.startswith("user.")]

    @_answers_errno
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        if not self._xattr:
            raise FUSEError(errno.ENOSYS)
        os.removexattr(self._xattr_path(inode), name)

    # -- files

    def _opened(self, node: _Node, fd: int) -> pyfuse3.FileInfo:
        node.fds.append(fd)
        self._open[fd] = node
        return pyfuse3.FileInfo(fh=fd)

    @_answers_errno
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        parent = self._nodes[parent_inode]
        parent_fd = self._dir_fd(parent)
        wanted = (flags & _STRIP) | os.O_CREAT | (flags & os.O_EXCL)
        fd = os.open(name, wanted, mode & 0o7777, dir_fd=parent_fd)
        self._own(fd, parent_fd, ctx)
        st = os.fstat(fd)
        node = self._enter(parent, name, st)
        node.lookups += 1
        return self._opened(node, fd), self._attributes(node, st)

    @_answers_errno
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        node = self._nodes[inode]
        path, dir_fd, _ = self._reach(node)
        return self._opened(node, os.open(path, flags & _STRIP, dir_fd=dir_fd))

    @_answers_errno
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return os.pread(fh, size, off)

    @_answers_errno
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return os.pwrite(fh, buf, off)

    async def flush(self, fh: int) -> None:
        return

    async def release(self, fh: int) -> None:
        self._open.pop(fh).fds.remove(fh)
        os.close(fh)

    @_answers_errno
    async def fsync(self, fh: int, datasync: bool) -> None:
        if datasync:
            os.fdatasync(fh)
        else:
            os.fsync(fh)

    # -- directories

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        handle = self._next_listing
        self._next_listing += 1
        self._listings[handle] = (self._nodes[inode], [])
        return handle

    @_answers_errno
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        node, names = self._listings[fh]
        if start_id == 0:
            names[:] = [b".", b"..", *self._names_below(node)]
        for position in range(start_id, len(names)):
            name = names[position]
            if name in (b".", b".."):
                known, st = node, self._stat(node)
            else:
                try:
                    st = os.stat(name, dir_fd=self._dir_fd(node), follow_symlinks=False)
                except FileNotFoundError:
                    continue
                known = self._enter(node, name, st)
            entry = self._attributes(known, st)
            if not pyfuse3.readdir_reply(token, name, entry, position + 1):
                return
            if name not in (b".", b".."):
                known.lookups += 1

    def _names_below(self, node: _Node) -> list[bytes]:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._dir_fd(node))
        try:
            return [os.fsencode(name) for name in os.listdir(fd)]
        finally:
            os.close(fd)

    async def releasedir(self, fh: int) -> None:
        del self._listings[fh]

    @_answers_errno
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        node, _ = self._listings[fh]
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._dir_fd(node))
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


async def _serve() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_on_signal)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


async def _end_on_signal() -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            pyfuse3.terminate()


def main() -> None:
    """Mount and serve until unmounted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source")
    parser.add_argument("mountpoint")
    parser.add_argument("--no-xattr", action="store_true", help="answer getxattr with ENOSYS")
    args = parser.parse_args()

    os.umask(0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    operations = PassThrough(args.source, xattr=not args.no_xattr)
    options = {"default_permissions", "nosuid", "nodev", "fsname=passthrough", "subtype=ceiling"}
    pyfuse3.init(operations, args.mountpoint, options)
    try:
        trio.run(_serve)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    main()
