"""System calls on the share, made in worker threads.

All of them name a file by a directory descriptor and one name, never by a path, and never follow a
symbolic link: a link that another user of the share puts in place of a directory leads nowhere.
Nothing here touches wbcache's state; descriptors and bytes go in, results come out.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from typing import NamedTuple

from wbcache.node import Signature, storable_ino, storable_time
from wbcache.share import statx
from wbcache.share.descriptor import Descriptor, FileDescriptor

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

_OPEN_FILE = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_OPEN_DIR = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class Entry(NamedTuple):
    """One line of a directory listing."""

    name: bytes
    mode: int
    """File type bits only."""


def open_directory(parent: Descriptor, name: bytes) -> Descriptor:
    """A descriptor of a subdirectory, good for further calls but not for reading it."""
    return Descriptor(os.open(name, _OPEN_DIR, dir_fd=parent.fd))


def open_chain(base: Descriptor, names: tuple[bytes, ...]) -> list[Descriptor]:
    """Descriptors of nested subdirectories, outermost first."""
    found = []
    for name in names:
        base = open_directory(base, name)
        found.append(base)
    return found


def lstat(parent: Descriptor, name: bytes) -> os.stat_result:
    """Attributes of a name."""
    return os.stat(name, dir_fd=parent.fd, follow_symlinks=False)


def lstat_or_none(parent: Descriptor, name: bytes) -> os.stat_result | None:
    """Attributes of a name; None when there is no such name."""
    try:
        return lstat(parent, name)
    except FileNotFoundError:
        return None


def lstat_now(parent: Descriptor, name: bytes) -> os.stat_result | None:
    """The same as the server has it now: decides whether another writer has changed something."""
    try:
        return statx.lstat(parent.fd, name)
    except FileNotFoundError:
        return None


def fstat_now(file: Descriptor) -> os.stat_result:
    """Attributes of an open file as the server has them now."""
    return statx.fstat(file.fd)


def readlink(parent: Descriptor, name: bytes) -> bytes:
    """A symbolic link's target, byte for byte."""
    return os.readlink(name, dir_fd=parent.fd)


def is_link_to(parent: Descriptor, name: bytes, target: bytes) -> bool:
    """Whether a name is a symbolic link with this target. Some shares don't let links out of them
    be read; their length then has to do."""
    st = lstat_or_none(parent, name)
    if st is None or not stat.S_ISLNK(st.st_mode):
        return False
    try:
        return readlink(parent, name) == target
    except PermissionError:
        return st.st_size == len(target)


def scan(directory: Descriptor, found: list[Entry] | None = None) -> list[Entry]:
    """Every entry of a directory with its type, without the attributes.

    Whoever gives the list sees it grow.
    """
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory.fd)
    try:
        if found is None:
            found = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_symlink():
                    kind = stat.S_IFLNK
                elif entry.is_dir(follow_symlinks=False):
                    kind = stat.S_IFDIR
                elif entry.is_file(follow_symlinks=False):
                    kind = stat.S_IFREG
                else:
                    try:
                        kind = stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode)
                    except FileNotFoundError:
                        continue
                found.append(Entry(os.fsencode(entry.name), kind))
        return found
    finally:
        os.close(fd)


def find(directory: Descriptor, inner: bytes, name: bytes) -> None:
    """Raise FileNotFoundError or NotADirectoryError unless a directory in this one has a file of
    that name. It is opened: a network file system then asks the server."""
    open_file(open_directory(directory, inner), name, os.O_RDONLY)


def open_file(parent: Descriptor, name: bytes, flags: int) -> Descriptor:
    """Open a regular file; anything else in its place is EINVAL, and is not opened: opening a
    planted fifo or device may do something by itself."""
    found = open_path(parent, name)
    if not stat.S_ISREG(os.fstat(found.fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(name))
    return FileDescriptor(os.open(proc_path(found), flags | _OPEN_FILE))


def create(parent: Descriptor, name: bytes, mode: int) -> Descriptor:
    """Make a new file and open it for reading and writing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _OPEN_FILE
    return FileDescriptor(os.open(name, flags, mode, dir_fd=parent.fd))


def pread(file: Descriptor, size: int, offset: int) -> bytes:
    """Read until ``size`` bytes or the end of the file."""
    data = os.pread(file.fd, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]
    got = len(data)
    while got < size:
        data = os.pread(file.fd, size - got, offset + got)
        if not data:
            break
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def pwrite_all(file: Descriptor, data: memoryview, offset: int) -> None:
    """Write all of ``data``."""
    while data:
        done = os.pwrite(file.fd, data, offset)
        data, offset = data[done:], offset + done


def rename(source: Descriptor, old: bytes, target: Descriptor, new: bytes, flags: int = 0) -> None:
    """renameat2; flags are RENAME_NOREPLACE and RENAME_EXCHANGE."""
    if not flags:
        os.rename(old, new, src_dir_fd=source.fd, dst_dir_fd=target.fd)
    elif _libc.renameat2(source.fd, old, target.fd, new, flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fsdecode(new))


def link(source: Descriptor, old: bytes, target: Descriptor, new: bytes) -> None:
    """A second name for a file; EEXIST when ``new`` is taken."""
    os.link(old, new, src_dir_fd=source.fd, dst_dir_fd=target.fd, follow_symlinks=False)


def unlink(parent: Descriptor, name: bytes) -> None:
    """Remove a file's name."""
    os.unlink(name, dir_fd=parent.fd)


def rmdir(parent: Descriptor, name: bytes) -> None:
    """Remove an empty directory."""
    os.rmdir(name, dir_fd=parent.fd)


def mkdir(parent: Descriptor, name: bytes, mode: int) -> None:
    """Make a directory."""
    os.mkdir(name, mode, dir_fd=parent.fd)


def symlink(parent: Descriptor, name: bytes, target: bytes) -> None:
    """Make a symbolic link."""
    os.symlink(target, name, dir_fd=parent.fd)


def set_times(parent: Descriptor, name: bytes, atime_ns: int, mtime_ns: int) -> None:
    """Set a name's times; a link's own, not its target's."""
    os.utime(name, ns=(atime_ns, mtime_ns), dir_fd=parent.fd, follow_symlinks=False)


def set_owner(parent: Descriptor, name: bytes, uid: int, gid: int) -> None:
    """Set a name's owner; a link's own, not its target's."""
    os.chown(name, uid, gid, dir_fd=parent.fd, follow_symlinks=False)


def proc_path(descriptor: Descriptor) -> str:
    """A path that means exactly this descriptor, for the calls that take only paths."""
    return f"/proc/self/fd/{descriptor.fd}"


def open_path(parent: Descriptor, name: bytes) -> Descriptor:
    """A descriptor of whatever a name is, links included, for `proc_path`."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    return Descriptor(os.open(name, flags, dir_fd=parent.fd))


def signature(st: os.stat_result, *, stable_ino: bool) -> Signature:
    """What identifies a version of a file, as the share reports it."""
    ino = storable_ino(st.st_ino) if stable_ino else 0
    return Signature(st.st_size, storable_time(st.st_mtime_ns), ino)
