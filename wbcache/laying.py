"""Writing nodes of a cache to a directory, under the names that they have in the mount.

Everything is made through descriptors of directories that were made here, and never over or through
something that is there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable
from typing import NamedTuple

from wbcache.escaping import printable
from wbcache.extents import Extents
from wbcache.node import Directory, Node
from wbcache.recovered import RecoveredFile, RecoverReport
from wbcache.store import CacheFiles
from wbcache.tree import Tree

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

RANGES = b".wbcache-ranges"
"""Appended to the name of an incomplete file: a text that says which bytes are there."""

_CHUNK = 4 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FATAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

_libc = ctypes.CDLL(None, use_errno=True)


def is_fatal(error: OSError) -> bool:
    """Whether nothing more can be written."""
    return error.errno in _FATAL


class _Open(NamedTuple):
    """A directory that is being filled."""

    node: Directory
    fd: int
    path: tuple[bytes, ...]
    left: list[bytes]
    """Its names that are still to be written."""


class Layout:
    """Writes nodes, with the directories on the way to them."""

    def __init__(
        self,
        tree: Tree,
        files: CacheFiles,
        nodes: Iterable[Node],
        report: RecoverReport,
        progress: Progress,
        *,
        power_lost: bool,
    ) -> None:
        """After a power loss (``power_lost``) what was not synced is in doubt."""
        self._tree = tree
        self._files = files
        self._report = report
        self._progress = progress
        self._power_lost = power_lost
        self._root = -1
        self._wanted = set(nodes)
        self._needed: dict[Directory, list[bytes]] = {}
        """For each directory on the way, its names to be written."""
        self._first: dict[Node, tuple[bytes, ...]] = {}
        """Where a file with several names was written."""
        self._done = 0
        self._total = 0
        for node in self._wanted:
            self._total += sum(b - a for a, b in self._ranges(node))
            for directory, name in node.links:
                self._need(directory, name)

    def _need(self, directory: Directory, name: bytes) -> None:
        while True:
            names = self._needed.setdefault(directory, [])
            names.append(name)
            if len(names) > 1 or not directory.links:
                return  # the directories above it know already
            directory, name = directory.links[0]

    def write(self, root: int) -> None:
        """Write everything below the directory of a descriptor.

        Raises OSError when its disk takes no more; other errors are reported with their files.
        """
        self._root = root
        stack = [self._enter(self._tree.root, os.dup(root), ())]
        try:
            while stack:
                at = stack[-1]
                if not at.left:
                    stack.pop()
                    self._leave(at)
                    continue
                name = at.left.pop()
                node = at.node.local[name]
                try:
                    if isinstance(node, Directory):
                        os.mkdir(name, 0o700, dir_fd=at.fd)
                        fd = os.open(name, _DIRECTORY, dir_fd=at.fd)
                        stack.append(self._enter(node, fd, (*at.path, name)))
                    else:
                        self._one(at, name, node)
                except OSError as error:
                    if is_fatal(error):
                        raise
                    self._fail(at, name, node, error)
        finally:
            for at in stack:
                os.close(at.fd)
        if _libc.syncfs(root):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def _enter(self, node: Directory, fd: int, path: tuple[bytes, ...]) -> _Open:
        names = sorted(set(self._needed.get(node, ())), reverse=True)
        return _Open(node, fd, path, names)

    def _leave(self, at: _Open) -> None:
        """Everything is in the directory: its attributes come last."""
        if at.node is not self._tree.root:
            problem = _apply(at.fd, at.node)
            if at.node in self._wanted:
                self._report.written.append(RecoveredFile(b"/".join(at.path), 0, problem))
        os.close(at.fd)

    def _fail(self, at: _Open, name: bytes, node: Node, error: OSError) -> None:
        path = b"/".join((*at.path, name))
        reason = error.strerror or str(error)
        below = len(self._needed.get(node, ())) if isinstance(node, Directory) else 0
        if below:
            reason += "; nothing in it was written"
        self._report.incomplete.append(RecoveredFile(path, node.dirty_bytes, reason))

    # -- files and links -----------------------------------------------------------------------

    def _one(self, at: _Open, name: bytes, node: Node) -> None:
        path = (*at.path, name)
        first = self._first.get(node)
        if first is not None and self._link(at, name, first):
            self._report.written.append(RecoveredFile(b"/".join(path), 0))
        elif node.is_symlink:
            os.symlink(node.target, name, dir_fd=at.fd)
            os.utime(name, ns=(node.atime, node.mtime), dir_fd=at.fd, follow_symlinks=False)
            if os.geteuid() == 0:
                os.chown(name, node.uid, node.gid, dir_fd=at.fd, follow_symlinks=False)
            self._report.written.append(RecoveredFile(b"/".join(path), 0))
        else:
            self._file(at, name, node)
        self._first.setdefault(node, path)

    def _link(self, at: _Open, name: bytes, first: tuple[bytes, ...]) -> bool:
        """A further name of something that is written; False where there are no hard links."""
        directory = os.dup(self._root)
        try:
            for part in first[:-1]:
                below = os.open(part, _DIRECTORY, dir_fd=directory)
                os.close(directory)
                directory = below
            os.link(first[-1], name, src_dir_fd=directory, dst_dir_fd=at.fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NO_LINKS:
                return False
            raise
        finally:
            os.close(directory)
        return True

    def _ranges(self, node: Node) -> list[tuple[int, int]]:
        """What of a file is in the cache."""
        content = node.content
        if content is None or not content.exists:
            return []
        have = content.dirty.copy()
        if not self._power_lost:
            for start, stop in content.clean:
                have.add(start, stop)
        return have.overlap(0, node.size)

    def _file(self, at: _Open, name: bytes, node: Node) -> None:
        content = node.content
        assert content is not None
        ranges = self._ranges(node)
        limit = node.size if content.whole else min(content.base_limit, node.size)
        missing = Extents(*ranges).gaps(0, limit)
        target = os.open(name, _NEW, 0o600, dir_fd=at.fd)
        try:
            if ranges:
                source = os.open(self._files.path(content.gen), os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    for start, stop in ranges:
                        self._copy(source, target, start, stop)
                finally:
                    os.close(source)
            os.ftruncate(target, node.size)
            problem = _apply(target, node)
        finally:
            os.close(target)
        path = b"/".join((*at.path, name))
        size = sum(b - a for a, b in ranges)
        if missing:
            beside = self._describe(at, name, ranges)
            reason = f"{sum(b - a for a, b in missing)} of {node.size} bytes are only on the share"
            if content.whole:
                reason = "its cache file is gone"
            file = RecoveredFile(path, size, f"{reason}; {beside} lists those that are here")
            self._report.incomplete.append(file)
        elif content.torn or (self._power_lost and content.fresh):
            reason = "a power loss came before it was synced"
            if content.torn:
                reason = node.trouble or reason
            self._report.torn.append(RecoveredFile(path, size, reason))
        else:
            self._report.written.append(RecoveredFile(path, size, problem))

    def _copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy a range, leaving holes where the cache file has some."""
        at = start
        while at < stop:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
                end = min(stop, os.lseek(source, at, os.SEEK_HOLE))
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break  # only a hole is left
            while at < end:
                data = os.pread(source, min(_CHUNK, end - at), at)
                if not data:
                    return
                view = memoryview(data)
                while view:
                    done = os.pwrite(target, view, at)
                    view, at = view[done:], at + done
                self._progress(self._done + at - start, self._total)
        self._done += stop - start
        self._progress(self._done, self._total)

    def _describe(self, at: _Open, name: bytes, ranges: list[tuple[int, int]]) -> str:
        """Write which bytes of a file are there; returns the name of that text."""
        lines = ["# bytes of the file beside this one that were in the cache: offset and length"]
        lines += [f"{a} {b - a}" for a, b in ranges]
        number = 0
        while True:
            suffix = RANGES + (b"-%d" % number if number else b"")
            own = name[: 255 - len(suffix)] + suffix
            number += 1
            if own in at.node.local:
                continue
            try:
                fd = os.open(own, _NEW, 0o600, dir_fd=at.fd)
            except FileExistsError:
                continue
            with os.fdopen(fd, "w") as file:
                file.write("\n".join(lines) + "\n")
            return printable(own)


def _apply(fd: int, node: Node) -> str:
    """Set a node's attributes as well as this disk and user can; returns what could not be."""
    problem = ""
    for name, value in (node.xattrs or {}).items():
        if value is not None:
            try:
                os.setxattr(fd, name, value)
            except OSError as error:
                if is_fatal(error):
                    raise
                problem = f"without its extended attributes ({error.strerror})"
    try:
        if os.geteuid() == 0:
            os.chown(fd, node.uid, node.gid)
        os.chmod(fd, stat.S_IMODE(node.mode))
        os.utime(fd, ns=(node.atime, node.mtime))
    except PermissionError as error:
        problem = f"without its mode, owner and times ({error.strerror})"
    return problem
