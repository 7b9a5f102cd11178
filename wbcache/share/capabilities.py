"""What the share can hold, found out once by trying it in `SOURCE/.wbcache/`."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

from wbcache.share import calls
from wbcache.share.descriptor import Descriptor

SIZE_MAX = (1 << 63) - 1
"""Bytes that a file can have at most, as far as the kernel goes."""

SHORTEST_NAMES = 100
"""Bytes of a name that a share must take: a temporary's, or a conflict's with something left of the
file's own name."""

_REFUSED = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EROFS)
_REFUSED_NAME = (*_REFUSED, errno.EILSEQ, errno.ENOENT, errno.ENAMETOOLONG)
_REFUSED_SIZE = (errno.E2BIG, errno.ERANGE, errno.ENOSPC, errno.EDQUOT, *_REFUSED)

_SPECIAL = b':?*<>|"\\'
_CONTROL = bytes(range(1, 32))
_XATTR_SIZES = (65536, 32768, 16000, 8000, 4000, 2000, 1000, 200)


@dataclass(frozen=True)
class Capabilities:
    """The defaults are what a local disk can do; they hold until the share was asked."""

    symlink: bool = True
    link_attributes: bool = True
    """Symbolic links have times and an owner of their own. Elsewhere setting them would change the
    file that the link points to."""
    link: bool = True
    chmod: bool = True
    chown: bool = True
    chgrp: bool = True
    """Files can be given to other groups: by root, or by a user to those that they are in."""
    xattr: bool = True
    xattr_max: int = 65536
    """Bytes of one extended attribute's value."""
    noreplace: bool = True
    name_max: int = 255
    """Bytes of a name."""
    forbidden: str = ""
    """Characters (all below 128) that no name may hold."""
    utf8_only: bool = False
    trims: bool = False
    """Dots and spaces at the end of a name are lost."""
    case_sensitive: bool = True
    size_max: int = SIZE_MAX
    """Bytes of a file."""

    def to_json(self) -> str:
        """For the journal."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Capabilities | None:
        """The inverse of `to_json`; None when another version of wbcache asked for other things."""
        known = json.loads(text)
        return cls(**known) if known.keys() == cls.__dataclass_fields__.keys() else None

    def refusal(self, name: bytes) -> int:
        """Why the share can't hold a name, as an errno; 0 when it can."""
        if len(name) > self.name_max:
            return errno.ENAMETOOLONG
        if self.forbidden and any(char in name for char in self.forbidden.encode()):
            return errno.EINVAL
        if self.trims and name.endswith((b".", b" ")):
            return errno.EINVAL
        if self.utf8_only and not _is_utf8(name):
            return errno.EILSEQ
        return 0

    def same_name(self, a: bytes, b: bytes) -> bool:
        """Whether the share takes two names for one."""
        if self.case_sensitive or len(a) != len(b):
            return a == b
        return (
            a.decode(errors="surrogateescape").casefold()
            == b.decode(errors="surrogateescape").casefold()
        )


def probe(own: Descriptor, tag: bytes) -> Capabilities:
    """Try everything in our own directory on the share. Blocks; call it in a thread.

    Raises OSError when not even a file can be made there.
    """
    file, other, third = b"probe-" + tag, b"probe2-" + tag, b"probe3-" + tag
    _clean(own, tag)
    try:
        descriptor = calls.create(own, file, 0o600)
        path = calls.proc_path(descriptor)
        xattr_max = _longest_xattr(path)
        chmod = _works(lambda: os.chmod(path, 0o640))
        noreplace = _has_noreplace(own, file, third)
        longest = _longest_name(own, tag, os.fstatvfs(descriptor.fd).f_namemax or 255)
        forbidden, utf8_only, trims = _odd_names(own, tag)
        return Capabilities(
            xattr=xattr_max > 0,
            xattr_max=xattr_max,
            chmod=chmod and os.fstat(descriptor.fd).st_mode & 0o777 == 0o640,
            chown=_can_chown(descriptor),
            chgrp=_can_chgrp(descriptor),
            noreplace=noreplace,
            case_sensitive=calls.lstat_or_none(own, third.upper()) is None,
            link=_works(lambda: calls.link(own, third, own, other)),
            symlink=_works(lambda: calls.symlink(own, file, b"target")),
            link_attributes=_has_link_attributes(own, file),
            size_max=_largest_offset(descriptor),
            name_max=longest,
            forbidden=forbidden.decode(),
            utf8_only=utf8_only,
            trims=trims,
        )
    finally:
        _clean(own, tag)


def _longest_name(own: Descriptor, tag: bytes, told: int) -> int:
    """What the share says is not always what it takes."""

    def takes(length: int) -> bool:
        return _holds(own, (b"probe-" + tag).ljust(length, b"x"))

    low, high = len(tag) + 6, min(told, 255)
    if takes(high):
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) else (low, middle)
    return low


def _odd_names(own: Descriptor, tag: bytes) -> tuple[bytes, bool, bool]:
    """Which names the share refuses, or changes, for what they hold: the characters, whether all
    that is not UTF-8, and whether dots and spaces at the end."""
    plain = b"probe-" + tag
    if _holds(own, plain + _SPECIAL + b"\n\x01\xff. "):
        return b"", False, False
    forbidden = bytes(char for char in _SPECIAL if not _holds(own, plain + bytes([char]) + b"x"))
    if not (_holds(own, plain + b"\nx") and _holds(own, plain + b"\x01x")):
        forbidden += _CONTROL
    utf8_only = not _holds(own, plain + b"\xffx")
    trims = not (_holds(own, plain + b".") and _holds(own, plain + b" "))
    return forbidden, utf8_only, trims


def _holds(own: Descriptor, name: bytes) -> bool:
    """Whether the share takes a name and shows it as it was given."""
    try:
        calls.create(own, name, 0o600)
        try:
            return any(entry.name == name for entry in calls.scan(own))
        finally:
            calls.unlink(own, name)
    except OSError as error:
        if error.errno in _REFUSED_NAME:
            return False
        raise


def _longest_xattr(path: str) -> int:
    """Bytes of the longest value that a file can have; 0 where there are no attributes."""
    name = "user.wbcache.probe"
    if not _works(lambda: os.setxattr(path, name, b"1")):
        return 0
    for size in _XATTR_SIZES:
        try:
            os.setxattr(path, name, bytes(size))
        except OSError as error:
            if error.errno not in _REFUSED_SIZE:
                raise
        else:
            return size
    return 1


def _largest_offset(file: Descriptor) -> int:
    """Bytes that a file can have, as the kernel's client of the share knows it.

    Asking the share itself would mean making such a file, which some fill with zeros.
    """
    low, high = 0, SIZE_MAX
    while low < high:
        middle = (low + high + 1) // 2
        try:
            os.lseek(file.fd, middle, os.SEEK_SET)
            low = middle
        except OSError:
            high = middle - 1
    return low


def _has_noreplace(own: Descriptor, file: bytes, third: bytes) -> bool:
    """Move the probe to its third name, by NOREPLACE where that is understood.

    The kernel itself answers EEXIST when the name is taken, so only a move to a free one tells.
    """
    if _works(lambda: calls.rename(own, file, own, third, calls.RENAME_NOREPLACE)):
        return True
    calls.rename(own, file, own, third)
    return False


def _has_link_attributes(own: Descriptor, link: bytes) -> bool:
    """``link`` points to nothing, so whoever follows it fails."""
    stamp = 10**18
    try:
        calls.set_times(own, link, stamp, stamp)
        return abs(calls.lstat(own, link).st_mtime_ns - stamp) < 2 * 10**9
    except OSError:
        return False


def _can_chown(descriptor: Descriptor) -> bool:
    st = os.fstat(descriptor.fd)
    if os.geteuid() != 0:
        return False
    return (
        _works(lambda: os.fchown(descriptor.fd, 12345, 12345))
        and os.fstat(descriptor.fd).st_uid == 12345
        and _works(lambda: os.fchown(descriptor.fd, st.st_uid, st.st_gid))
    )


def _can_chgrp(descriptor: Descriptor) -> bool:
    st = os.fstat(descriptor.fd)
    others = [gid for gid in os.getgroups() if gid != st.st_gid]
    if os.geteuid() == 0:
        others = [12345]
    return (
        bool(others)
        and _works(lambda: os.fchown(descriptor.fd, -1, others[0]))
        and os.fstat(descriptor.fd).st_gid == others[0]
        and _works(lambda: os.fchown(descriptor.fd, -1, st.st_gid))
    )


def _works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        raise
    return True


def _clean(own: Descriptor, tag: bytes) -> None:
    """Remove what this probe, or one that was cut off, has left."""
    for entry in calls.scan(own):
        if entry.name.startswith(b"probe") and tag in entry.name:
            try:
                calls.unlink(own, entry.name)
            except FileNotFoundError:
                pass


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True
