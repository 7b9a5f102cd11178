"""The calls of a file system, carried out on the backing directory.

Plain synchronous functions on nodes and names that raise OSError: no FUSE, no waiting, no faults.
Each is atomic with respect to the event loop, so the order of the calls is the order of their
effects.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from tests.faultshare.nodes import Node, NodeTable, fail
from tests.faultshare.usage import Usage, charge

RENAME_EXCHANGE = 2

_STRIPPED = os.O_CREAT | os.O_EXCL | os.O_NOCTTY | os.O_APPEND | os.O_DIRECT | os.O_NOFOLLOW

_renameat2: Callable[..., int] = ctypes.CDLL(None, use_errno=True).renameat2


@dataclass(frozen=True)
class Owner:
    """The user and group a new file belongs to."""

    uid: int
    gid: int


@dataclass
class Handle:
    """One open file. *stale* ones answer ESTALE."""

    node: Node
    fd: int
    stale: bool = False


@dataclass(frozen=True)
class Changes:
    """The attributes that a setattr changes; None leaves one as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


Found = tuple[Node, os.stat_result]


class Backing:
    """A directory tree behind the share."""

    def __init__(self, root: str, usage: Usage) -> None:
        self.nodes = NodeTable(root)
        self.usage = usage
        # Only root can give files away.
        self._chowns = os.geteuid() == 0

    # Nodes

    def link_path(self, node: Node) -> str:
        """A path that leads to *node* itself whatever it is called, for calls without a dir_fd."""
        return f"/proc/self/fd/{self.nodes.fd(node)}"

    def stat(self, node: Node) -> os.stat_result:
        """The attributes of *node*."""
        return os.fstat(self.nodes.fd(node))

    def readlink(self, node: Node) -> bytes:
        """The target of a symbolic link."""
        return os.readlink(b"", dir_fd=self.nodes.fd(node))

    def listing(self, node: Node) -> list[bytes]:
        """The names in a directory."""
        fd = os.open(self.link_path(node), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return [os.fsencode(name) for name in os.listdir(fd)]
        finally:
            os.close(fd)

    def change(self, node: Node, changes: Changes, handle: Handle | None) -> os.stat_result:
        """Change attributes, as chmod, chown, truncate and utimensat do."""
        path = self.link_path(node)
        if changes.size is not None:
            before = self.stat(node)
            self.usage.need(changes.size - before.st_size)
            if handle is not None:
                os.ftruncate(handle.fd, changes.size)
            else:
                os.truncate(path, changes.size)
            self.usage.add(changes.size - before.st_size)
            clear_set_id(path, before)
        if changes.uid is not None or changes.gid is not None:
            uid = -1 if changes.uid is None else changes.uid
            gid = -1 if changes.gid is None else changes.gid
            os.chown(path, uid, gid)
        if changes.mode is not None:
            os.chmod(path, stat.S_IMODE(changes.mode))
        if changes.atime_ns is not None or changes.mtime_ns is not None:
            st = self.stat(node)
            atime = st.st_atime_ns if changes.atime_ns is None else changes.atime_ns
            mtime = st.st_mtime_ns if changes.mtime_ns is None else changes.mtime_ns
            os.utime(path, ns=(atime, mtime))
        return self.stat(node)

    # Open files

    def open(self, node: Node, flags: int) -> Handle:
        """Open an existing regular file; truncates with O_TRUNC."""
        before = self.stat(node) if flags & os.O_TRUNC else None
        fd = os.open(self.link_path(node), (flags & ~_STRIPPED) | os.O_CLOEXEC)
        if before is not None:
            self.usage.add(-before.st_size)
        node.opens += 1
        return Handle(node, fd)

    def create(
        self, parent: Node, name: bytes, mode: int, flags: int, owner: Owner
    ) -> tuple[Node, os.stat_result, Handle, bool]:
        """Create and open a file; also says whether it is new. Counts one reference."""
        directory = self.nodes.fd(parent)
        bare = (flags & ~_STRIPPED) | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self.usage.need(0, 1)
            fd = os.open(name, bare | os.O_CREAT | os.O_EXCL, mode, dir_fd=directory)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            node, st = self.nodes.adopt(parent, name)
            try:
                return node, st, self.open(node, flags), False
            except OSError:
                self.nodes.forget(node.id, 1)
                raise
        self.usage.add(0, 1)
        self._give(parent, name, mode, owner)
        node, st = self.nodes.adopt(parent, name)
        node.opens += 1
        return node, st, Handle(node, fd), True

    def read(self, handle: Handle, offset: int, size: int) -> bytes:
        """Read up to *size* bytes; fewer only at the end of the file."""
        _check(handle)
        data = os.pread(handle.fd, size, offset)
        if not data or len(data) == size:
            return data
        parts = [data]
        done = len(data)
        while done < size and (data := os.pread(handle.fd, size - done, offset + done)):
            parts.append(data)
            done += len(data)
        return b"".join(parts)

    def write(self, handle: Handle, offset: int, data: bytes) -> int:
        """Write all of *data*. On an error before that the file is as it was or partly written."""
        _check(handle)
        st = os.fstat(handle.fd)
        growth = max(0, offset + len(data) - st.st_size)
        self.usage.need(growth)
        view = memoryview(data)
        while view:
            done = os.pwrite(handle.fd, view, offset)
            view = view[done:]
            offset += done
        self.usage.add(growth)
        clear_set_id(f"/proc/self/fd/{handle.fd}", st)
        return len(data)

    def release(self, handle: Handle) -> None:
        """Close an open file; its space goes with the last handle of an unlinked one."""
        node = handle.node
        node.opens -= 1
        if node.doomed and node.opens == 0:
            node.doomed = False
            self.usage.add(-charge(os.fstat(handle.fd)), -1)
        os.close(handle.fd)

    # Names

    def lookup(self, parent: Node, name: bytes) -> Found:
        """What *name* is. Counts one reference."""
        return self.nodes.adopt(parent, name)

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner) -> Found:
        """Make a file, fifo, socket or device. Counts one reference."""
        self.usage.need(0, 1)
        os.mknod(name, mode, rdev, dir_fd=self.nodes.fd(parent))
        return self._made(parent, name, mode, owner)

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner) -> Found:
        """Make a directory. Counts one reference."""
        self.usage.need(0, 1)
        os.mkdir(name, stat.S_IMODE(mode), dir_fd=self.nodes.fd(parent))
        return self._made(parent, name, None, owner)

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner) -> Found:
        """Make a symbolic link. Counts one reference."""
        self.usage.need(len(target), 1)
        os.symlink(target, name, dir_fd=self.nodes.fd(parent))
        return self._made(parent, name, None, owner, len(target))

    def link(self, node: Node, parent: Node, name: bytes) -> Found:
        """Give *node* another name. Counts one reference."""
        source = self.link_path(node)
        os.link(source, name, dst_dir_fd=self.nodes.fd(parent))
        return self.nodes.adopt(parent, name)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove the name of anything but a directory."""
        st = self._victim(parent, name)
        os.unlink(name, dir_fd=self.nodes.fd(parent))
        self._lost_name(parent, name, st)
        self.nodes.removed(parent, name)

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""
        st = self._victim(parent, name)
        os.rmdir(name, dir_fd=self.nodes.fd(parent))
        self._lost_name(parent, name, st)
        self.nodes.removed(parent, name)

    def rename(self, parent: Node, name: bytes, parent2: Node, name2: bytes, flags: int) -> None:
        """Rename, with NOREPLACE or EXCHANGE if *flags* say so."""
        source = self._victim(parent, name)
        target = self._victim(parent2, name2)
        renameat2(self.nodes.fd(parent), name, self.nodes.fd(parent2), name2, flags)
        if flags & RENAME_EXCHANGE:
            self.nodes.exchanged(parent, name, parent2, name2)
            return
        if target is not None and source is not None:
            if (target.st_dev, target.st_ino) == (source.st_dev, source.st_ino):
                return  # two names of one file: rename(2) does nothing
            self._lost_name(parent2, name2, target)
        self.nodes.moved(parent, name, parent2, name2)

    def is_open(self, parent: Node, name: bytes) -> bool:
        """Whether the file of this name has open handles."""
        node = self.nodes.at(parent, name)
        return node is not None and node.opens > 0

    def _victim(self, parent: Node, name: bytes) -> os.stat_result | None:
        """The attributes of what may lose *name*; a node is held, so its number stays taken."""
        node = self.nodes.at(parent, name)
        try:
            if node is not None:
                self.nodes.fd(node)
            return os.lstat(name, dir_fd=self.nodes.fd(parent))
        except OSError:
            return None  # the call itself will say what is wrong

    def _lost_name(self, parent: Node, name: bytes, st: os.stat_result | None) -> None:
        if st is None or (st.st_nlink > 1 and not stat.S_ISDIR(st.st_mode)):
            return
        node = self.nodes.at(parent, name)
        if node is not None and node.opens > 0:
            node.doomed = True
        else:
            self.usage.add(-charge(st), -1)

    def _made(
        self, parent: Node, name: bytes, mode: int | None, owner: Owner, size: int = 0
    ) -> Found:
        self.usage.add(size, 1)
        self._give(parent, name, mode, owner)
        return self.nodes.adopt(parent, name)

    def _give(self, parent: Node, name: bytes, mode: int | None, owner: Owner) -> None:
        """Make *owner* own a new file, unless its directory decides on the group."""
        if not self._chowns:
            return
        directory = self.stat(parent)
        gid = directory.st_gid if directory.st_mode & stat.S_ISGID else owner.gid
        if (owner.uid, gid) == (os.geteuid(), os.getegid()):
            return
        fd = self.nodes.fd(parent)
        os.chown(name, owner.uid, gid, dir_fd=fd, follow_symlinks=False)
        if mode is not None and mode & (stat.S_ISUID | stat.S_ISGID):
            os.chmod(name, stat.S_IMODE(mode), dir_fd=fd)  # chown has taken these bits away


def clear_set_id(path: str | bytes, st: os.stat_result) -> None:
    """Clear set-id bits after a change of content, which the kernel leaves to the file system."""
    cleared = st.st_mode & ~stat.S_ISUID
    if st.st_mode & stat.S_IXGRP:
        cleared &= ~stat.S_ISGID
    if cleared != st.st_mode and stat.S_ISREG(st.st_mode):
        os.chmod(path, stat.S_IMODE(cleared))


def renameat2(directory: int, name: bytes, directory2: int, name2: bytes, flags: int) -> None:
    """renameat2(2). Raises OSError."""
    if _renameat2(directory, name, directory2, name2, ctypes.c_uint(flags)) != 0:
        raise fail(ctypes.get_errno())


def _check(handle: Handle) -> None:
    if handle.stale:
        raise fail(errno.ESTALE)
