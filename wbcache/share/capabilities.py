"""What the share can hold, found out once by trying it in `SOURCE/.wbcache/`."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass

from wbcache.share import calls
from wbcache.share.descriptor import Descriptor

_REFUSED = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EROFS)


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
    xattr: bool = True
    noreplace: bool = True
    name_max: int = 255

    def to_json(self) -> str:
        """For the journal."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Capabilities:
        """The inverse of `to_json`; unknown keys are left out."""
        known = json.loads(text)
        return cls(**{k: v for k, v in known.items() if k in cls.__dataclass_fields__})


def probe(own: Descriptor, tag: bytes) -> Capabilities:
    """Try everything in our own directory on the share. Blocks; call it in a thread.

    Raises OSError when not even a file can be made there.
    """
    file, other, third = b"probe-" + tag, b"probe2-" + tag, b"probe3-" + tag
    _clean(own, file, other, third)
    try:
        descriptor = calls.create(own, file, 0o600)
        path = calls.proc_path(descriptor)
        return Capabilities(
            xattr=_works(lambda: os.setxattr(path, "user.wbcache.probe", b"1")),
            chmod=_works(lambda: os.chmod(path, 0o640))
            and os.fstat(descriptor.fd).st_mode & 0o777 == 0o640,
            chown=_can_chown(descriptor),
            noreplace=_has_noreplace(own, file, third),
            link=_works(lambda: calls.link(own, third, own, other)),
            symlink=_works(lambda: calls.symlink(own, file, b"target")),
            link_attributes=_has_link_attributes(own, file),
            name_max=os.fstatvfs(descriptor.fd).f_namemax or 255,
        )
    finally:
        _clean(own, file, other, third)


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


def _works(attempt: object) -> bool:
    assert callable(attempt)
    try:
        attempt()
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        raise
    return True


def _clean(own: Descriptor, *names: bytes) -> None:
    for name in names:
        try:
            calls.unlink(own, name)
        except FileNotFoundError:
            pass
