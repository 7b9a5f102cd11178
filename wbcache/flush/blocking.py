"""What the flusher does on the share, as blocking functions for worker threads.

Each makes several calls, so that a step costs few hops between threads. None touches wbcache's
state. Whoever retries one after a lost answer gets the same result: "already so" counts as done.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import NamedTuple, ParamSpec

from wbcache.flush.errors import NOT_SETTABLE
from wbcache.node import Signature
from wbcache.share import calls
from wbcache.share.descriptor import Descriptor

P = ParamSpec("P")

CHUNK = 8 << 20
"""Bytes moved in one go: bounds both memory and the time until a hang is noticed."""

HOLE = 1 << 20
"""Holes of fewer bytes are written as zeros: that is cheaper than one more call."""

_PIECE = 1 << 20

OWNER_READS_WRITES = stat.S_IRUSR | stat.S_IWUSR


class ConflictError(Exception):
    """The share's file is not the one that we left there."""


class LostTemporaryError(Exception):
    """A temporary is not on the share any more."""


class Attributes(NamedTuple):
    """What a file or directory shall have; None leaves a thing as it is."""

    mode: int | None
    owner: tuple[int, int] | None
    times: tuple[int, int] | None
    xattrs: Mapping[bytes, bytes | None]


class Ownership(NamedTuple):
    """Owner and mode of something new. A set-gid directory on the share gives it another group."""

    uid: int
    """-1: whoever makes it."""
    gid: int
    mode: int

    def fits(self, st: os.stat_result) -> bool:
        """Whether the share has the owner right."""
        return self.uid in (-1, st.st_uid) and st.st_gid == self.gid


Accepts = Callable[[os.stat_result], bool]
"""Whether the share's file is ours, by its attributes."""


def copy_range(source: int, target: Descriptor, start: int, stop: int, *, pad: bool = True) -> bool:
    """Copy a range of a cache file to the same place of a file on the share.

    What lies behind the end of the cache file is a hole; unless it is to be padded with zeros it is
    left out, and False returned.
    """
    while start < stop:
        data = os.pread(source, min(_PIECE, stop - start), start)
        if not data and not pad:
            return False
        data = data or bytes(min(_PIECE, stop - start))
        calls.pwrite_all(target, memoryview(data), start)
        start += len(data)
    return True


def data_ranges(source: int, start: int, stop: int, fresh: int) -> list[tuple[int, int]]:
    """The parts of a range of a cache file that have to be copied.

    From ``fresh`` on the share's file has nothing yet, so that long holes need not be written.
    """
    found = []
    if start < fresh:
        found.append((start, min(fresh, stop)))
        start = min(fresh, stop)
    while start < stop:
        try:
            data = os.lseek(source, start, os.SEEK_DATA)
            hole = min(os.lseek(source, data, os.SEEK_HOLE), stop)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: only a hole is left
                found.append((start, stop))
            break
        if data >= stop:
            break
        if found and data - found[-1][1] < HOLE:
            found[-1] = (found[-1][0], hole)
        else:
            found.append((data, hole))
        start = hole
    return found


def append_range(
    source: int, target: Descriptor, start: int, stop: int, *, pad: bool = True
) -> bool:
    """The same, made durable: a growing file is a prefix at every instant."""
    whole = copy_range(source, target, start, stop, pad=pad)
    os.fsync(target.fd)
    return whole


class Found(Enum):
    """What a range of a file on the share holds, beside the same of a cache file."""

    SAME = auto()
    HOLES = auto()
    """The same, or zeros: not all of it arrived."""
    OTHER = auto()


def compare_range(source: int, target: Descriptor, start: int, stop: int) -> Found:
    """Compare a range of a cache file and of a file on the share."""
    result = Found.SAME
    while start < stop:
        count = min(_PIECE, stop - start)
        ours, theirs = os.pread(source, count, start), calls.pread(target, count, start)
        if ours != theirs:
            if len(ours) != len(theirs) or any(
                there for here, there in zip(ours, theirs, strict=True) if here != there
            ):
                return Found.OTHER
            result = Found.HOLES
        start += count
    return result


XATTRS = "extended attributes"
_ACL = "system.posix_acl_access"


class Attempts:
    """Sets attributes, and goes on without those that a file on the share can't have: its bytes
    matter more."""

    def __init__(self) -> None:
        self.refused: list[tuple[str, OSError]] = []
        """What could not be set, in words, and why."""

    def __call__(
        self, what: str, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Make a call that sets something."""
        try:
            call(*args, **kwargs)
        except OSError as error:
            if error.errno not in NOT_SETTABLE:
                raise
            self.refused.append((what, error.with_traceback(None)))


def apply(path: str, attributes: Attributes, attempt: Attempts) -> None:
    """Set attributes through a /proc/self/fd path. Owner before mode, since it clears set-id bits,
    and what needs permission to write before what may take it."""
    if attributes.owner is not None:
        attempt("owner", os.chown, path, *attributes.owner)
    for name, value in attributes.xattrs.items():
        if value is not None:
            attempt(XATTRS, os.setxattr, path, name, value)
        else:
            attempt(XATTRS, _remove_xattr, path, name)
    if attributes.mode is not None:
        attempt("mode", os.chmod, path, attributes.mode)
    if attributes.times is not None:
        attempt("times", os.utime, path, ns=attributes.times)


def _remove_xattr(path: str, name: bytes) -> None:
    try:
        os.removexattr(path, name)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise


def finish(
    file: Descriptor,
    size: int,
    attributes: Attributes,
    attempt: Attempts,
    ownership: Ownership | None = None,
) -> os.stat_result:
    """Complete a file: attributes, then fsync; returns what the share reports of it.

    ``ownership`` is that of a temporary.
    """
    path = calls.proc_path(file)
    apply(path, attributes, attempt)
    os.fsync(file.fd)
    st = os.fstat(file.fd)
    if ownership is not None and not ownership.fits(st) and not attempt.refused:
        attempt("owner", os.chown, path, ownership.uid, ownership.gid)
        attempt("mode", os.chmod, path, ownership.mode)
        st = os.fstat(file.fd)
    if st.st_size != size:
        raise OSError(errno.EIO, f"the share reports {st.st_size} bytes instead of {size}")
    close(file)
    return st


def finish_in_place(
    file: Descriptor,
    size: int,
    attributes: Attributes,
    attempt: Attempts,
    parent: Descriptor,
    name: bytes,
) -> os.stat_result:
    """Complete a file that was changed under its name; raises ConflictError when the name means
    another one by now, FileNotFoundError when it means nothing: nobody will see what was written.
    """
    st = finish(file, size, attributes, attempt)
    shown = calls.lstat(parent, name)
    if not os.path.samestat(shown, st) and not _same_size(shown, st):
        raise ConflictError
    return st


def close(file: Descriptor) -> None:
    """Close a file that was written; some shares report errors only now."""
    fd, file.fd = file.fd, -1
    os.close(fd)


def read_xattrs(parent: Descriptor, name: bytes) -> dict[bytes, bytes]:
    """The user attributes and the ACL of a file on the share, to be carried over to its
    replacement."""
    path = calls.proc_path(held := calls.open_path(parent, name))
    try:
        names = [n for n in os.listxattr(path) if n.startswith("user.") or n == _ACL]
        return {os.fsencode(n): os.getxattr(path, n) for n in names}
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODATA):
            return {}
        raise
    finally:
        del held


def move(
    source: Descriptor,
    old: bytes,
    target: Descriptor,
    new: bytes,
    *,
    is_ours: Accepts,
    may_replace: Accepts | None,
    noreplace: bool,
    link: bool,
) -> None:
    """Give ``old`` the name ``new``.

    ``is_ours`` tells whether ``new`` shows what ``old`` was, so that the move has happened.
    ``may_replace`` tells whether what has the name otherwise is known to us and may go; None when
    nothing may. Raises ConflictError for anything else there, LostTemporaryError when ``old`` is
    gone.
    """
    st = calls.lstat_now(target, new) if may_replace is not None else None
    if st is not None:
        _check_replaceable(source, old, st, is_ours, may_replace)
        if is_ours(st) and calls.lstat_or_none(source, old) is None:
            return
    try:
        linked = st is not None and st.st_nlink > 1 and is_ours(st)
        if st is not None and linked and os.path.samestat(calls.lstat(source, old), st):
            calls.unlink(source, old)  # between two names of one file rename does nothing
        elif st is not None:
            calls.rename(source, old, target, new)
        elif noreplace:
            calls.rename(source, old, target, new, calls.RENAME_NOREPLACE)
        else:
            _move_to_free_name(source, old, target, new, link=link)
    except FileExistsError:
        st = calls.lstat_or_none(target, new)
        if st is None:
            raise
        if is_ours(st):
            left = calls.lstat_or_none(source, old)
            if left is not None and os.path.samestat(left, st):
                calls.unlink(source, old)  # linked, and the answer was lost
                return
            if left is None:
                return  # moved, and the answer was lost
        if may_replace is not None and may_replace(st):
            raise  # it has no reason to say so
        raise ConflictError from None
    except FileNotFoundError:
        st = calls.lstat_or_none(target, new)
        if st is not None and is_ours(st):
            return
        if calls.lstat_or_none(source, old) is None:
            raise LostTemporaryError from None
        raise


def check(parent: Descriptor, name: bytes, accepts: Accepts) -> None:
    """Raise ConflictError when a name is not as we know it."""
    st = calls.lstat_now(parent, name)
    if st is not None and not accepts(st):
        raise ConflictError


def _check_replaceable(
    source: Descriptor,
    old: bytes,
    st: os.stat_result,
    is_ours: Accepts,
    may_replace: Accepts | None,
) -> None:
    if may_replace is not None and may_replace(st):
        return
    if is_ours(st) and calls.lstat_or_none(source, old) is None:
        return
    raise ConflictError


def _move_to_free_name(
    source: Descriptor, old: bytes, target: Descriptor, new: bytes, *, link: bool
) -> None:
    if link and not stat.S_ISDIR(calls.lstat(source, old).st_mode):
        calls.link(source, old, target, new)
        calls.unlink(source, old)
        return
    if calls.lstat_or_none(target, new) is not None:
        raise FileExistsError
    calls.rename(source, old, target, new)


def make_link(
    source: Descriptor, old: bytes, target: Descriptor, new: bytes, is_ours: Accepts
) -> None:
    """A further name for a file on the share."""
    try:
        calls.link(source, old, target, new)
    except FileExistsError:
        ours = calls.lstat(source, old)
        st = calls.lstat_or_none(target, new)
        if st is None or st.st_nlink < 2 or not is_ours(st) or not _same_size(ours, st):
            raise ConflictError from None


def _same_size(a: os.stat_result, b: os.stat_result) -> bool:
    return (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)


def make_symlink(parent: Descriptor, name: bytes, target: bytes) -> None:
    """A symbolic link under a free name."""
    try:
        calls.symlink(parent, name, target)
    except FileExistsError:
        if not calls.is_link_to(parent, name, target):
            raise ConflictError from None


def make_directory(
    parent: Descriptor,
    name: bytes,
    mode: int,
    ownership: Ownership | None,
    attempt: Attempts,
    *,
    chmod: bool,
) -> tuple[os.stat_result, bool]:
    """Make a directory; returns its attributes and whether it was new."""
    new = True
    try:
        calls.mkdir(parent, name, mode)
    except FileExistsError:
        new = False
        if not stat.S_ISDIR(calls.lstat(parent, name).st_mode):
            raise ConflictError from None
    st = calls.lstat(parent, name)
    if not new:
        return st, False
    owner = None
    if ownership is not None and not ownership.fits(st):
        owner = (ownership.uid, ownership.gid)
    # mkdir itself takes only the permissions.
    wrong = chmod and (owner is not None or stat.S_IMODE(st.st_mode) != mode)
    if owner is None and not wrong:
        return st, True
    made = calls.open_directory(parent, name)
    apply(calls.proc_path(made), Attributes(mode if wrong else None, owner, None, {}), attempt)
    return calls.lstat(parent, name), True


def is_empty(parent: Descriptor, name: bytes) -> bool:
    """Whether there is nothing in a directory."""
    return not calls.scan(calls.open_directory(parent, name))


def remove_file(parent: Descriptor, name: bytes, accepts: Accepts) -> bool:
    """Remove a file that is as we know it; returns whether it was there."""
    st = calls.lstat_now(parent, name)
    if st is None:
        return False
    if stat.S_ISDIR(st.st_mode) or not accepts(st):
        raise ConflictError
    try:
        calls.unlink(parent, name)
    except FileNotFoundError:
        return False
    return True


def remove_directory(parent: Descriptor, name: bytes, is_ours: Callable[[bytes], bool]) -> bool:
    """Remove an empty directory; returns whether it was there. One with somebody's files is a
    conflict.

    Temporaries for which ``is_ours`` holds go with it.
    """
    for last in (False, True):
        try:
            calls.rmdir(parent, name)
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            if stat.S_ISDIR(calls.lstat(parent, name).st_mode):
                raise
            raise ConflictError from None
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if last:
                raise ConflictError from None
            directory = calls.open_directory(parent, name)
            names = [entry.name for entry in calls.scan(directory)]
            if not all(map(is_ours, names)):
                raise ConflictError from None
            for temporary in names:
                remove_temporary(directory, temporary)
        else:
            break
    return True


def remove_temporary(parent: Descriptor, name: bytes) -> bool:
    """Remove a temporary of ours: a file, or a directory that never got its name. Returns whether
    it was there."""
    try:
        calls.unlink(parent, name)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        try:
            calls.rmdir(parent, name)
        except FileNotFoundError:
            return False
    return True


def set_attributes(
    parent: Descriptor, name: bytes, attributes: Attributes, attempt: Attempts, kind: int
) -> tuple[os.stat_result, os.stat_result]:
    """Set a name's attributes; returns what the share reported before and after.

    Raises FileNotFoundError when it is not of the kind (the type bits of a mode) that it should be.
    """
    held = calls.open_path(parent, name)
    before = os.fstat(held.fd)
    if stat.S_IFMT(before.st_mode) != kind:
        raise FileNotFoundError(errno.ENOENT, "something else is there", os.fsdecode(name))
    if kind == stat.S_IFLNK:
        if attributes.owner not in (None, (before.st_uid, before.st_gid)):
            attempt("owner", calls.set_owner, parent, name, *attributes.owner)
        if attributes.times is not None:
            attempt("times", calls.set_times, parent, name, *attributes.times)
    else:
        apply(calls.proc_path(held), attributes, attempt)
    return before, calls.lstat(parent, name)


def let_in(parent: Descriptor, name: bytes, bits: int) -> bool:
    """Give the owner of a file or directory these permissions; returns whether they were missing.

    Who is not root may not change what their own mode denies them. Raises PermissionError when it
    is somebody else's.
    """
    held = calls.open_path(parent, name)
    mode = stat.S_IMODE(os.fstat(held.fd).st_mode)
    if mode & bits == bits:
        return False
    os.chmod(calls.proc_path(held), mode | bits)
    return True


def _open_own(parent: Descriptor, name: bytes) -> Descriptor:
    """Open a file that was made read-only after it was written; its mode is set afterwards."""
    try:
        return calls.open_file(parent, name, os.O_RDWR)
    except PermissionError as error:
        st = calls.lstat(parent, name)
        if error.errno != errno.EACCES or not stat.S_ISREG(st.st_mode):
            raise
        try:
            changed = let_in(parent, name, OWNER_READS_WRITES)
        except PermissionError:
            raise error from None
        if not changed:
            raise
        return calls.open_file(parent, name, os.O_RDWR)


def open_for_update(
    parent: Descriptor, name: bytes, accepts: Accepts
) -> tuple[Descriptor, Signature]:
    """Open the share's file to change it in place."""
    try:
        file = _open_own(parent, name)
    except OSError as error:
        st = calls.lstat_or_none(parent, name)
        if st is not None and not stat.S_ISREG(st.st_mode):
            raise ConflictError from None
        raise error from None
    st = calls.fstat_now(file)
    if not accepts(st):
        raise ConflictError
    return file, calls.signature(st, stable_ino=False)
