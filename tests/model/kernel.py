"""Calls the handlers of a mount as the kernel does: looks names up, counts, remembers nothing."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pyfuse3

from tests.model.gate import Listing
from wbcache.fuse import Operations
from wbcache.node import ROOT_INO
from wbcache.share.calls import RENAME_EXCHANGE, RENAME_NOREPLACE

Path = tuple[bytes, ...]

_CONTEXT = cast(Any, SimpleNamespace(uid=0, gid=0, pid=0, umask=0))
_REPLY = 7
"""Directory entries that fit into one reply."""


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Shown(NamedTuple):
    """What a stat shows."""

    ino: int
    mode: int
    nlink: int
    size: int
    mtime: int


def _shown(attributes: Any) -> Shown:
    return Shown(
        int(attributes.st_ino),
        int(attributes.st_mode),
        int(attributes.st_nlink),
        int(attributes.st_size),
        int(attributes.st_mtime_ns),
    )


class Kernel:
    """The system calls of one mount. Raises OSError as those do."""

    def __init__(self, operations: Operations) -> None:
        self._ops = operations
        self._lookups: Counter[int] = Counter()
        self._open: Counter[int] = Counter()

    def _count(self, attributes: Any) -> Shown:
        shown = _shown(attributes)
        self._lookups[shown.ino] += 1
        return shown

    # -- names ---------------------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes) -> Shown | None:
        """A name in a directory; None when there is none."""
        try:
            found = await self._ops.lookup(_ino(parent), _name(name), _CONTEXT)
        except pyfuse3.FUSEError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return self._count(found)

    async def place(self, path: Path) -> tuple[int, bytes]:
        """The directory that a path leads to, and the last name."""
        at = ROOT_INO
        for name in path[:-1]:
            found = await self.lookup(at, name)
            if found is None:
                raise _error(errno.ENOENT)
            if not stat.S_ISDIR(found.mode):
                raise _error(errno.ENOTDIR)
            at = found.ino
        return at, path[-1]

    async def stat(self, path: Path) -> Shown:
        """lstat(2)."""
        if not path:
            return _shown(await self._ops.getattr(_ino(ROOT_INO), _CONTEXT))
        found = await self.lookup(*await self.place(path))
        if found is None:
            raise _error(errno.ENOENT)
        return found

    async def _vacant(self, path: Path) -> tuple[int, bytes]:
        parent, name = await self.place(path)
        if await self.lookup(parent, name) is not None:
            raise _error(errno.EEXIST)
        return parent, name

    async def mkdir(self, path: Path, mode: int) -> None:
        """mkdir(2)."""
        parent, name = await self._vacant(path)
        self._count(await self._ops.mkdir(_ino(parent), _name(name), _mode(mode), _CONTEXT))

    async def symlink(self, target: bytes, path: Path) -> None:
        """symlink(2)."""
        parent, name = await self._vacant(path)
        self._count(await self._ops.symlink(_ino(parent), _name(name), _name(target), _CONTEXT))

    async def readlink(self, path: Path) -> bytes:
        """readlink(2)."""
        found = await self.stat(path)
        if not stat.S_ISLNK(found.mode):
            raise _error(errno.EINVAL)
        return await self._ops.readlink(_ino(found.ino), _CONTEXT)

    async def link(self, old: Path, new: Path) -> None:
        """link(2)."""
        found = await self.stat(old)
        parent, name = await self._vacant(new)
        self._count(await self._ops.link(_ino(found.ino), _ino(parent), _name(name), _CONTEXT))

    async def unlink(self, path: Path) -> None:
        """unlink(2)."""
        parent, name = await self.place(path)
        if await self.lookup(parent, name) is None:
            raise _error(errno.ENOENT)
        await self._ops.unlink(_ino(parent), _name(name), _CONTEXT)

    async def rmdir(self, path: Path) -> None:
        """rmdir(2)."""
        parent, name = await self.place(path)
        if await self.lookup(parent, name) is None:
            raise _error(errno.ENOENT)
        await self._ops.rmdir(_ino(parent), _name(name), _CONTEXT)

    async def rename(self, old: Path, new: Path, flags: int) -> None:
        """renameat2(2)."""
        source, old_name = await self.place(old)
        target, new_name = await self.place(new)
        found = await self.lookup(source, old_name)
        if found is None:
            raise _error(errno.ENOENT)
        other = await self.lookup(target, new_name)
        if other is not None and flags & RENAME_NOREPLACE:
            raise _error(errno.EEXIST)
        if other is None and flags & RENAME_EXCHANGE:
            raise _error(errno.ENOENT)
        if old == new[: len(old)] and old != new:
            raise _error(errno.EINVAL)
        if new == old[: len(new)] and old != new:
            raise _error(errno.EINVAL if flags & RENAME_EXCHANGE else errno.ENOTEMPTY)
        if other is not None and other.ino == found.ino:
            return
        await self._ops.rename(
            _ino(source), _name(old_name), _ino(target), _name(new_name), _flags(flags), _CONTEXT
        )

    # -- files ---------------------------------------------------------------------------------

    async def open(self, path: Path, flags: int) -> tuple[int, int]:
        """open(2) with O_NOFOLLOW; (handle, inode number)."""
        parent, name = await self.place(path)
        found = await self.lookup(parent, name)
        if found is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT)
            made = self._ops.create(
                _ino(parent), _name(name), _mode(0o644), _flags(flags), _CONTEXT
            )
            info, attributes = await made
            found = self._count(attributes)
        else:
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise _error(errno.EEXIST)
            if stat.S_ISLNK(found.mode):
                raise _error(errno.ELOOP)
            if stat.S_ISDIR(found.mode):
                raise _error(errno.EISDIR)
            passed = flags & ~(os.O_CREAT | os.O_EXCL)
            info = await self._ops.open(_ino(found.ino), _flags(passed), _CONTEXT)
        self._open[found.ino] += 1
        return int(info.fh), found.ino

    async def close(self, handle: int, ino: int) -> None:
        """close(2) of the last descriptor of an open."""
        await self._ops.flush(cast(Any, handle))
        await self._ops.release(cast(Any, handle))
        self._open[ino] -= 1

    async def read(self, handle: int, offset: int, size: int) -> bytes:
        """pread(2)."""
        return await self._ops.read(cast(Any, handle), offset, size)

    async def write(self, handle: int, offset: int, data: bytes) -> int:
        """pwrite(2)."""
        return await self._ops.write(cast(Any, handle), offset, data)

    async def fsync(self, handle: int) -> None:
        """fsync(2)."""
        await self._ops.fsync(cast(Any, handle), False)

    async def fstat(self, ino: int) -> Shown:
        """fstat(2)."""
        return _shown(await self._ops.getattr(_ino(ino), _CONTEXT))

    # -- attributes ----------------------------------------------------------------------------

    async def change(self, ino: int, **values: int) -> None:
        """A setattr: mode, size, uid, gid, atime_ns, mtime_ns."""
        names = ("mode", "uid", "gid", "size", "atime", "mtime")
        fields = SimpleNamespace(**{f"update_{n}": _field(n) in values for n in names})
        attributes = pyfuse3.EntryAttributes()
        for name, value in values.items():
            setattr(attributes, f"st_{name}", value)
        await self._ops.setattr(_ino(ino), attributes, cast(Any, fields), None, _CONTEXT)

    async def set_xattr(self, path: Path, name: bytes, value: bytes | None, flags: int) -> None:
        """setxattr(2), or removexattr(2) for None."""
        found = await self.stat(path)
        node = self._ops._fs.node(found.ino)
        await self._ops._fs.attributes.set_xattr(node, name, value, flags)

    async def xattrs(self, path: Path) -> dict[bytes, bytes]:
        """Every extended attribute of a file."""
        ino = _ino((await self.stat(path)).ino)
        names = await self._ops.listxattr(ino, _CONTEXT)
        return {bytes(n): await self._ops.getxattr(ino, n, _CONTEXT) for n in names}

    # -- directories ---------------------------------------------------------------------------

    async def opendir(self, path: Path) -> int:
        """opendir(3)."""
        found = await self.stat(path)
        if not stat.S_ISDIR(found.mode):
            raise _error(errno.ENOTDIR)
        return int(await self._ops.opendir(_ino(found.ino), _CONTEXT))

    async def readdir(self, handle: int, offset: int) -> tuple[list[bytes], int]:
        """One reply: names without the dots, and the offset to go on from; 0 at the end."""
        token = Listing(_REPLY)
        await self._ops.readdir(cast(Any, handle), offset, cast(Any, token))
        for name, attributes, _ in token.entries:
            if name not in (b".", b".."):
                self._count(attributes)
        names = [name for name, _, _ in token.entries if name not in (b".", b"..")]
        return names, token.entries[-1][2] if token.entries else 0

    async def closedir(self, handle: int) -> None:
        """closedir(3)."""
        await self._ops.releasedir(cast(Any, handle))

    async def listdir(self, path: Path) -> list[bytes]:
        """Every name in a directory."""
        handle, offset = await self.opendir(path), 0
        names: list[bytes] = []
        try:
            while True:
                found, offset = await self.readdir(handle, offset)
                if not offset:
                    return names
                names += found
        finally:
            await self.closedir(handle)

    # -- memory --------------------------------------------------------------------------------

    async def forget(self) -> None:
        """Forget everything but open files and the directories that lead to them."""
        kept = {ROOT_INO}
        tree = self._ops._tree
        for ino in +self._open:
            at = tree.nodes.get(ino)
            while at is not None and at.ino not in kept:
                kept.add(at.ino)
                at = at.links[0][0] if at.links else None
        gone = [(_ino(ino), count) for ino, count in self._lookups.items() if ino not in kept]
        for ino, _ in gone:
            del self._lookups[ino]
        await self._ops.forget(gone)


def _ino(number: int) -> pyfuse3.InodeT:
    return pyfuse3.InodeT(number)


def _name(name: bytes) -> pyfuse3.FileNameT:
    return pyfuse3.FileNameT(name)


def _mode(mode: int) -> pyfuse3.ModeT:
    return pyfuse3.ModeT(mode)


def _flags(flags: int) -> pyfuse3.FlagT:
    return pyfuse3.FlagT(flags)


def _field(name: str) -> str:
    return f"{name}_ns" if name in ("atime", "mtime") else name
