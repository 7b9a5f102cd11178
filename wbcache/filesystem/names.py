"""Making, finding, renaming and removing names.

Each operation first makes sure that what it needs of the share is known (the only waits), then
changes the tree and the journal in one synchronous step. Errors are OSErrors with the errno that
the caller of the mount gets.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from wbcache.filesystem.listing import Listings
from wbcache.node import META_TIMES, Directory, Node
from wbcache.share.calls import RENAME_EXCHANGE, RENAME_NOREPLACE
from wbcache.share.names import is_hidden
from wbcache.tree import Item
from wbcache.volume import Volume


def error(code: int) -> OSError:
    """An OSError with its usual text."""
    return OSError(code, os.strerror(code))


class Names:
    """The name space of the mount."""

    def __init__(self, volume: Volume, listings: Listings) -> None:
        self._volume = volume
        self._tree = volume.tree
        self._listings = listings

    # -- finding -------------------------------------------------------------------------------

    async def lookup(self, directory: Directory, name: bytes) -> Node | None:
        """The node under a name, with its attributes known; None when there is none."""
        if name.startswith(b".wbcache") and is_hidden(name, at_root=directory is self._tree.root):
            return None
        directory.users += 1
        try:
            node = await self._listings.find(directory, name)
            if node is not None and node.slinks and node.dirty is None:
                try:
                    await self._listings.attributes(node)
                except FileNotFoundError:
                    return None
                node = directory.local.get(name)
        finally:
            directory.users -= 1
        if node is None and len(name) > self._volume.capabilities.name_max:
            raise error(errno.ENAMETOOLONG)
        return node

    async def _vacant(self, directory: Directory, name: bytes) -> None:
        """Check that a name may be made."""
        self._check_name(directory, name)
        if self._volume.read_only:
            raise error(errno.EROFS)
        if not directory.links and directory is not self._tree.root:
            raise error(errno.ENOENT)
        if name.startswith(b".wbcache") and is_hidden(name, at_root=directory is self._tree.root):
            raise OSError(errno.EPERM, "names of this form are wbcache's own")
        if name in directory.local:
            raise error(errno.EEXIST)
        if directory.slinks or directory is self._tree.root:
            if await self._listings.find(directory, name) is not None:
                raise error(errno.EEXIST)
            if not directory.links and directory is not self._tree.root:
                raise error(errno.ENOENT)

    def _check_name(self, directory: Directory, name: bytes) -> None:
        """Refuse what the share can't hold."""
        can = self._volume.capabilities
        if code := can.refusal(name):
            raise error(code)
        if not can.case_sensitive:
            for names in (directory.local, directory.share):
                if any(other != name and can.same_name(other, name) for other in names):
                    raise OSError(errno.EEXIST, "the share takes it for another name")

    async def _existing(self, directory: Directory, name: bytes) -> Node:
        if self._volume.read_only:
            raise error(errno.EROFS)
        node = directory.local.get(name) or await self.lookup(directory, name)
        if node is None:
            raise error(errno.ENOENT)
        return node

    # -- making --------------------------------------------------------------------------------

    async def create(
        self, directory: Directory, name: bytes, mode: int, uid: int, gid: int
    ) -> Node:
        """Make an empty regular file."""
        await self._vacant(directory, name)
        node = self._volume.new_node(stat.S_IFREG | stat.S_IMODE(mode), uid, gid)
        node.content = self._volume.new_content(whole=True)
        self._volume.unsynced[node] = self._volume.clock()
        return self._make(directory, name, node)

    async def mkdir(self, directory: Directory, name: bytes, mode: int, uid: int, gid: int) -> Node:
        """Make a directory."""
        await self._vacant(directory, name)
        bits = stat.S_IMODE(mode) | directory.mode & stat.S_ISGID
        node = self._volume.new_node(stat.S_IFDIR | bits, uid, gid, directory=True)
        return self._make(directory, name, node)

    async def symlink(
        self, directory: Directory, name: bytes, target: bytes, uid: int, gid: int
    ) -> Node:
        """Make a symbolic link; its target is kept byte for byte."""
        if not self._volume.capabilities.symlink:
            raise OSError(errno.EPERM, "the share can't hold symbolic links")
        await self._vacant(directory, name)
        node = self._volume.new_node(stat.S_IFLNK | 0o777, uid, gid)
        node.target = target
        node.size = len(target)
        return self._make(directory, name, node)

    async def mknod(
        self, directory: Directory, name: bytes, mode: int, rdev: int, uid: int, gid: int
    ) -> Node:
        """Make a regular file, or a fifo, socket or device, which never reach the share."""
        if stat.S_IFMT(mode) in (0, stat.S_IFREG):
            return await self.create(directory, name, mode, uid, gid)
        await self._vacant(directory, name)
        self._volume.report_once("fifos, sockets and devices are kept here only")
        node = self._volume.new_node(mode, uid, gid)
        node.rdev = rdev
        return self._make(directory, name, node)

    def _make(self, directory: Directory, name: bytes, node: Node) -> Node:
        tree, now = self._tree, self._volume.clock()
        if directory.mode & stat.S_ISGID:
            node.gid = directory.gid
        before = (directory.mtime, directory.ctime)
        tree.touch(node, now)
        tree.set_local(directory, name, node, now)
        self._stamp(directory, node.mtime)
        self._volume.policy_changed(node)
        self._listings.made(directory, name)

        def undo() -> None:
            tree.set_local(directory, name, None, now)
            directory.mtime, directory.ctime = before
            self._volume.forget_if_gone(node)

        self._volume.commit(node, (directory, name), undo=undo)
        return node

    def _stamp(self, directory: Directory, now_ns: int) -> None:
        """A name in a directory changed; times that were set before no longer matter."""
        directory.mtime = directory.ctime = now_ns
        if directory.journaled:
            self._tree.stamped.add(directory)
        if directory.meta & META_TIMES:
            directory.meta &= ~META_TIMES
            self._tree.touch_item(directory)

    async def link(self, node: Node, directory: Directory, name: bytes) -> Node:
        """Give a node a further name."""
        if node.is_dir:
            raise error(errno.EPERM)
        if not self._volume.capabilities.link and not node.local_only:
            raise OSError(errno.EPERM, "the share can't hold hard links")
        await self._vacant(directory, name)
        if not node.links:
            raise error(errno.ENOENT)
        tree, now = self._tree, self._volume.clock()
        before = (directory.mtime, directory.ctime, node.ctime)
        tree.touch(node, now)
        tree.set_local(directory, name, node, now)
        node.ctime = time.time_ns()
        self._stamp(directory, node.ctime)
        self._listings.made(directory, name)

        def undo() -> None:
            tree.set_local(directory, name, None, now)
            directory.mtime, directory.ctime, node.ctime = before

        self._volume.commit(node, (directory, name), undo=undo)
        return node

    # -- removing ------------------------------------------------------------------------------

    async def unlink(self, directory: Directory, name: bytes) -> None:
        """Remove a name that is not a directory."""
        node = await self._existing(directory, name)
        if node.is_dir:
            raise error(errno.EISDIR)
        self._remove(directory, name, node)

    async def rmdir(self, directory: Directory, name: bytes) -> None:
        """Remove an empty directory."""
        node = await self._existing(directory, name)
        if not isinstance(node, Directory):
            raise error(errno.ENOTDIR)
        await self._check_empty(node)
        if directory.local.get(name) is not node:
            raise error(errno.ENOENT)
        self._remove(directory, name, node)

    async def _check_empty(self, node: Directory) -> None:
        if not node.local:
            await self._listings.complete(node)
        if node.local:
            raise error(errno.ENOTEMPTY)

    def _remove(self, directory: Directory, name: bytes, node: Node) -> None:
        tree, now = self._tree, self._volume.clock()
        before = (directory.mtime, directory.ctime, node.ctime)
        tree.next_seq()
        tree.set_local(directory, name, None, now)
        node.ctime = time.time_ns()
        self._stamp(directory, node.ctime)

        def undo() -> None:
            tree.set_local(directory, name, node, now)
            directory.mtime, directory.ctime, node.ctime = before

        self._volume.commit((directory, name), node, undo=undo)
        if not node.links:
            self._volume.forget_if_gone(node)

    # -- renaming ------------------------------------------------------------------------------

    async def rename(
        self, old_dir: Directory, old: bytes, new_dir: Directory, new: bytes, flags: int
    ) -> None:
        """renameat2 with NOREPLACE and EXCHANGE; other flags are EINVAL."""
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == 3:
            raise error(errno.EINVAL)
        self._check_name(new_dir, new)
        if is_hidden(new, at_root=new_dir is self._tree.root):
            raise OSError(errno.EPERM, "names of this form are wbcache's own")
        node = await self._existing(old_dir, old)
        target = new_dir.local.get(new) or await self._listings.find(new_dir, new)
        if not new_dir.links and new_dir is not self._tree.root:
            raise error(errno.ENOENT)
        if flags & RENAME_EXCHANGE:
            if target is None:
                raise error(errno.ENOENT)
            self._check_not_inside(target, old_dir)
        elif flags & RENAME_NOREPLACE and target is not None:
            raise error(errno.EEXIST)
        self._check_not_inside(node, new_dir)
        if target is node:
            return
        if target is not None and not flags & RENAME_EXCHANGE:
            if isinstance(target, Directory):
                if not node.is_dir:
                    raise error(errno.EISDIR)
                await self._check_empty(target)
            elif node.is_dir:
                raise error(errno.ENOTDIR)
        if old_dir.local.get(old) is not node or new_dir.local.get(new) is not target:
            raise error(errno.ENOENT)  # changed while we asked the share
        self._rename(old_dir, old, node, new_dir, new, target, flags & RENAME_EXCHANGE != 0)

    def _check_not_inside(self, node: Node, directory: Directory) -> None:
        if isinstance(node, Directory) and self._tree.is_below(directory, node):
            raise error(errno.EINVAL)

    def _rename(
        self,
        old_dir: Directory,
        old: bytes,
        node: Node,
        new_dir: Directory,
        new: bytes,
        target: Node | None,
        exchange: bool,
    ) -> None:
        volume, tree, now = self._volume, self._tree, self._volume.clock()
        # A node that was dirty before is in the journal as it is.
        moved = [(node, node.journaled and node.dirty is not None)]
        tree.touch(node, now)
        if target is not None:
            if exchange:
                moved.append((target, target.journaled and target.dirty is not None))
                tree.touch(target, now)
            elif target.dirty is not None and node.dirty is not None:
                # A name that is replaced again and again is due as early as if it were one file.
                node.dirty.first = min(node.dirty.first, target.dirty.first)
        tree.set_local(old_dir, old, None, now)
        tree.set_local(new_dir, new, None, now)
        tree.set_local(new_dir, new, node, now)
        if exchange:
            tree.set_local(old_dir, old, target, now)
        stamp = time.time_ns()
        stamped = [n for n in (old_dir, new_dir, node, target) if n is not None]
        before = [(n, n.mtime, n.ctime) for n in stamped]
        flags = [(n, n.renamed) for n, _ in moved if isinstance(n, Directory)]
        for parent in (old_dir, new_dir):
            self._stamp(parent, stamp)
        node.ctime = stamp
        if target is not None:
            target.ctime = stamp
        for directory, _ in flags:
            if not directory.slinks:
                directory.renamed = True
        self._listings.made(new_dir, new)
        for n, _ in moved:
            volume.policy_changed(n)
        items: list[Item] = [(old_dir, old), (new_dir, new)]
        items += [n for n, known in moved if not known or n.is_dir]
        if target is not None and not exchange:
            items.append(target)

        def undo() -> None:
            tree.set_local(new_dir, new, None, now)
            tree.set_local(old_dir, old, None, now)
            tree.set_local(old_dir, old, node, now)
            tree.set_local(new_dir, new, target, now)
            for n, mtime, ctime in before:
                n.mtime, n.ctime = mtime, ctime
            for directory, renamed in flags:
                directory.renamed = renamed

        volume.commit(*items, undo=undo)
        if target is not None and not target.links:
            volume.forget_if_gone(target)
