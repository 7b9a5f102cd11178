"""Cache files: the bytes of each generation, on the local disk.

A generation is a sparse file whose offsets are the offsets of the file it belongs to. One
descriptor serves a generation however often it is open, so that many opens don't run out of them;
when many generations are open the least recently opened idle ones are closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from wbcache.errors import CacheDirError
from wbcache.node import Content
from wbcache.processes import raise_file_limit

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOATIME
_FANOUT = 256

MAX_SPARE = 256
"""Empty cache files kept for reuse."""

MIN_SPARE = 64
"""With fewer than these, more are made in the background while files are being created."""

SPARE_SIZE = 1 << 20
"""Larger files, in bytes, are removed: emptying them takes long."""


class CacheFiles:
    """The directory of cache files, only to be looked at."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def path(self, gen: int) -> str:
        """Where a generation's cache file lies."""
        return f"{self.directory}/{gen % _FANOUT:02x}/{gen:x}"

    def stat(self, gen: int) -> os.stat_result:
        """Length, time and blocks of a generation's cache file."""
        return os.stat(self.path(gen))

    def generations(self) -> Iterable[int]:
        """Every generation that has a cache file."""
        for i in range(_FANOUT):
            try:
                names = os.listdir(os.path.join(self.directory, f"{i:02x}"))
            except FileNotFoundError:
                continue
            for name in names:
                try:
                    gen = int(name, 16)
                except ValueError:
                    continue
                if gen % _FANOUT == i:
                    yield gen


class Store(CacheFiles):
    """The directory of cache files of a running mount."""

    def __init__(self, directory: str, *, max_open: int | None = None) -> None:
        super().__init__(directory)
        limit = raise_file_limit()
        # The rest is for the descriptors of the store's own directories and of the share.
        self.max_open = max_open or max(64, min(limit // 2 - _FANOUT, 65536))
        self.max_spare = min(MAX_SPARE, limit // 16)
        self._open: OrderedDict[int, Content] = OrderedDict()
        self._spare: list[tuple[int, int]] = []
        """(generation, descriptor) of empty cache files, ready for the next generations."""
        self.unsynced_names: set[int] = set()
        """Generations whose directory entry may not be durable yet."""
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._dirfds = [_own_directory(directory, f"{i:02x}") for i in range(_FANOUT)]

    def stat(self, gen: int) -> os.stat_result:
        """The same, by a shorter way: a start does it for every file."""
        return os.stat(f"{gen:x}", dir_fd=self._dirfds[gen % _FANOUT])

    def close(self) -> None:
        """Close every descriptor."""
        for content in list(self._open.values()):
            self._close(content)
        for _, fd in self._spare:
            os.close(fd)
        self._spare.clear()
        for fd in self._dirfds:
            os.close(fd)
        self._dirfds.clear()

    def fd(self, content: Content) -> int:
        """The generation's descriptor, opened (and the file made) when need be.

        Raises OSError when the cache disk refuses.
        """
        if content.fd >= 0:
            return content.fd
        dirfd = self._dirfds[content.gen % _FANOUT]
        name = f"{content.gen:x}"
        while True:
            try:
                if content.exists:
                    content.fd = _open(name, _FLAGS, dirfd)
                else:
                    content.fd = _open(name, _FLAGS | os.O_CREAT | os.O_EXCL, dirfd)
                    content.exists = True
                    self.unsynced_names.add(content.gen)
                break
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._shed(1):
                    raise
        if content.tail >= 0:
            if os.fstat(content.fd).st_size > content.tail:
                mtime = os.fstat(content.fd).st_mtime_ns
                os.ftruncate(content.fd, content.tail)
                os.utime(content.fd, ns=(mtime, mtime))
            content.tail = -1
        self._opened(content)
        return content.fd

    def _opened(self, content: Content) -> None:
        excess = len(self._open) + 1 - self.max_open
        if excess > 0:
            self._shed(excess)
        self._open[content.gen] = content

    def _shed(self, count: int) -> bool:
        # Open handles don't count: a file that is not used just now is opened again when it is. A
        # flush may have very many files ready that wait for their turn.
        free = (c for c in self._open.values() if not c.uses and not c.writing)
        idle = list(islice(free, count))
        for content in idle:
            self._close(content)
        return bool(idle)

    def _close(self, content: Content) -> None:
        if content.fd >= 0:
            os.close(content.fd)
            content.fd = -1
        self._open.pop(content.gen, None)

    def recycle(self, content: Content) -> bool:
        """Keep a small generation's cache file, emptied, for a later one; False: not this one.

        A disk file system takes longer to make a file the more were removed just before, and
        programs that make files tend to remove as many.
        """
        if content.fd < 0 or len(self._spare) >= self.max_spare:
            return False
        try:
            if os.fstat(content.fd).st_size > SPARE_SIZE:
                return False
            os.ftruncate(content.fd, 0)
        except OSError:
            return False
        self._open.pop(content.gen, None)
        self._spare.append((content.gen, content.fd))
        content.fd = -1
        content.exists = False
        return True

    @property
    def wants_spares(self) -> bool:
        """Whether spare cache files are running out."""
        return len(self._spare) < min(MIN_SPARE, self.max_spare // 2)

    def make_spares(self, gens: range) -> list[tuple[int, int]]:
        """Make empty cache files for later generations. Blocks; call it in a thread."""
        made = []
        for gen in gens:
            try:
                dirfd = self._dirfds[gen % _FANOUT]
                made.append((gen, _open(f"{gen:x}", _FLAGS | os.O_CREAT | os.O_EXCL, dirfd)))
            except OSError:
                break  # whoever needs one makes it, and gets the error
        return made

    def add_spares(self, made: list[tuple[int, int]]) -> None:
        """Keep what `make_spares` made."""
        for gen, fd in made:
            self.unsynced_names.add(gen)
            self._spare.append((gen, fd))

    def take_spare(self) -> tuple[int, int] | None:
        """The (generation, descriptor) of an empty cache file, now the caller's."""
        return self._spare.pop() if self._spare else None

    def adopt(self, content: Content, fd: int) -> None:
        """A spare cache file has become a generation's."""
        content.fd = fd
        content.exists = True
        self._opened(content)

    def release(self, content: Content) -> str | None:
        """The generation is no longer needed: close it; returns the path to unlink, if any.

        Unlinking a large file takes long, so that is left to the caller, in a thread.
        """
        self._close(content)
        self.unsynced_names.discard(content.gen)
        if not content.exists:
            return None
        content.exists = False
        return self.path(content.gen)

    def sync_name(self, gen: int) -> None:
        """Make a generation's directory entry durable. Blocks; call it in a thread."""
        os.fsync(self._dirfds[gen % _FANOUT])

    def punch(self, fd: int, ranges: list[tuple[int, int]]) -> None:
        """Give the disk space of ranges of a cache file back. Blocks; call it in a thread."""
        for start, stop in ranges:
            _punch_hole(fd, start, stop - start)


def _own_directory(parent: str, name: str) -> int:
    """A descriptor of a directory in the store, made if need be. Raises CacheDirError for what
    somebody else has put there."""
    path = os.path.join(parent, name)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise CacheDirError(
            f"cache directory {os.path.dirname(parent)}",
            f"{path} is not a directory",
            "give another directory with --cache-dir",
        ) from None
    return fd


def _open(name: str, flags: int, dirfd: int) -> int:
    try:
        return os.open(name, flags, 0o600, dir_fd=dirfd)
    except PermissionError:  # O_NOATIME is the owner's; after a chown of the cache it fails
        return os.open(name, flags & ~os.O_NOATIME, 0o600, dir_fd=dirfd)


def _punch_hole(fd: int, start: int, length: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch_hole = 1, 2
    if libc.fallocate(fd, keep_size | punch_hole, ctypes.c_int64(start), ctypes.c_int64(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
