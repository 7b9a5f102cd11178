"""Attributes: mode, owner, times, extended attributes, and what statfs says."""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass

from wbcache.filesystem.files import Files
from wbcache.filesystem.listing import Listings
from wbcache.filesystem.names import error
from wbcache.node import META_MODE, META_OWNER, META_TIMES, META_XATTR, Node, storable_time
from wbcache.share import calls
from wbcache.share.descriptor import Descriptor
from wbcache.volume import Volume

STATE_XATTR = b"user.wbcache.state"
"""Read-only: where a file stands on its way to the share."""

_USER = b"user."
_FOREIGN = (b"security.", b"trusted.")
"""Name spaces in which nothing is ever found."""

STATFS_TTL = 10.0
"""Seconds for which the share's figures are believed."""


@dataclass
class Changes:
    """What a setattr asks for; None leaves a thing as it is. Times in nanoseconds."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime: int | None = None
    mtime: int | None = None


class Attributes:
    """Reads and changes of attributes."""

    def __init__(self, volume: Volume, listings: Listings, files: Files) -> None:
        self._volume = volume
        self._tree = volume.tree
        self._listings = listings
        self._files = files

    async def change(self, node: Node, changes: Changes) -> None:
        """Apply a setattr; chmod and utimens never fail because the share refuses them."""
        if self._volume.read_only:
            raise error(errno.EROFS)
        if changes.size is not None:
            if not node.is_file:
                raise error(errno.EISDIR if node.is_dir else errno.EINVAL)
            await self._files.truncate(node, changes.size)
        if changes == Changes(size=changes.size):
            return
        can, meta = self._volume.capabilities, 0
        before = (node.mode, node.uid, node.gid, node.atime, node.mtime, node.ctime, node.meta)
        if changes.mode is not None:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(changes.mode)
            meta |= META_MODE if can.chmod else self._kept("modes")
        if changes.uid is not None or changes.gid is not None:
            node.uid = node.uid if changes.uid is None else changes.uid
            node.gid = node.gid if changes.gid is None else changes.gid
            if can.chown or (can.chgrp and changes.uid in (None, before[1])):
                meta |= META_OWNER
            else:
                meta |= self._kept("owners")
        if changes.atime is not None:
            node.atime = storable_time(changes.atime)
            meta |= META_TIMES
        if changes.mtime is not None:
            node.mtime = storable_time(changes.mtime)
            meta |= META_TIMES
        node.ctime = time.time_ns()
        node.ours = True
        if meta & META_TIMES:
            self._stamp_cache_file(node)
        if meta and not node.local_only and node is not self._tree.root:
            node.meta |= meta
            if node.links:
                self._tree.touch(node, self._volume.clock())

        def undo() -> None:
            (
                node.mode,
                node.uid,
                node.gid,
                node.atime,
                node.mtime,
                node.ctime,
                node.meta,
            ) = before

        self._volume.commit(node, undo=undo)

    def _kept(self, what: str) -> int:
        self._volume.report_once(f"the share can't store file {what}; they are kept here only")
        return 0

    def _stamp_cache_file(self, node: Node) -> None:
        """A dirty file's mtime is its cache file's: after a crash it is read from there."""
        content = node.content
        if content is not None and content.exists:
            os.utime(self._volume.store.fd(content), ns=(node.atime, node.mtime))

    # -- extended attributes -------------------------------------------------------------------

    @property
    def xattrs_served(self) -> bool:
        """Whether the mount has extended attributes at all: as the share, unless configured."""
        mode = self._volume.config.xattr
        return mode == "on" or (mode == "auto" and self._volume.capabilities.xattr)

    async def get_xattr(self, node: Node, name: bytes) -> bytes:
        """A value; ENODATA when there is none. Only user.* is looked for on the share."""
        if not name.startswith(_USER):
            raise error(errno.ENODATA if name.startswith(_FOREIGN) else errno.EOPNOTSUPP)
        if name == _USER:
            raise error(errno.EINVAL)
        if name == STATE_XATTR:
            return self.state(node).encode()
        if node.xattrs is not None and name in node.xattrs:
            value = node.xattrs[name]
            if value is None:
                raise error(errno.ENODATA)
            return value
        return (await self._share_xattrs(node, name))[name]

    async def list_xattrs(self, node: Node) -> list[bytes]:
        """The names of a node's extended attributes."""
        names = await self._share_xattrs(node, None)
        for name, value in (node.xattrs or {}).items():
            if value is None:
                names.pop(name, None)
            else:
                names[name] = value
        return sorted(names)

    async def set_xattr(self, node: Node, name: bytes, value: bytes | None, flags: int = 0) -> None:
        """Set (None: remove) a user attribute; flags are XATTR_CREATE and XATTR_REPLACE."""
        if not name.startswith(_USER) or name == STATE_XATTR or not node.is_file | node.is_dir:
            raise error(errno.EOPNOTSUPP)
        if name == _USER:
            raise error(errno.EINVAL)
        if self._volume.read_only:
            raise error(errno.EROFS)
        if value is not None and len(value) > self._volume.capabilities.xattr_max > 0:
            raise error(errno.ERANGE)
        if flags or value is None:
            try:
                await self.get_xattr(node, name)
            except OSError as caught:
                if caught.errno != errno.ENODATA:
                    raise
                if value is None or flags & os.XATTR_REPLACE:
                    raise
            else:
                if flags & os.XATTR_CREATE:
                    raise error(errno.EEXIST)
        before, meta = node.xattrs, node.meta
        node.xattrs = {**(before or {}), name: value}
        node.meta |= META_XATTR
        node.ctime = time.time_ns()
        if node.links:
            self._tree.touch(node, self._volume.clock())

        def undo() -> None:
            node.xattrs, node.meta = before, meta

        self._volume.commit(
            node, undo=undo, extra=lambda: self._volume.journal.put_xattr(node.ino, name, value)
        )

    async def _share_xattrs(self, node: Node, name: bytes | None) -> dict[bytes, bytes]:
        """The share's user attributes of a node: one, or (None) all, with empty values."""
        missing: dict[bytes, bytes] = {}
        if not node.slinks:
            if name is not None:
                raise error(errno.ENODATA)
            return missing
        return await self._volume.at_place(node, self._volume.share.look, _read_xattrs, name)

    def state(self, node: Node) -> str:
        """Where a node stands: clean, dirty, flushing, held, local or quarantined with a reason."""
        if node.trouble:
            return f"quarantined: {node.trouble}"
        if self._tree.excluded(node):
            return "local"
        if node.dirty is None:
            return "clean"
        if node.busy:
            return "flushing"
        return "held" if self._tree.held(node) else "dirty"


def _read_xattrs(parent: Descriptor, own: bytes, name: bytes | None) -> dict[bytes, bytes]:
    held = calls.open_path(parent, own)
    path = calls.proc_path(held)
    try:
        if name is not None:
            return {name: os.getxattr(path, name)}
        names = os.listxattr(path)
    except OSError as caught:
        if caught.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODATA):
            if name is None:
                return {}
            raise error(errno.ENODATA) from None
        raise
    finally:
        del held
    return {os.fsencode(n): b"" for n in names if n.startswith("user.")}
