"""POSIX access control lists, as their extended attributes hold them."""

from __future__ import annotations

import struct

ACCESS = "system.posix_acl_access"
DEFAULT = "system.posix_acl_default"

_OWNER, _USER, _GROUP, _MASK, _OTHERS = 1, 2, 4, 16, 32
_NOBODY = 0xFFFFFFFF


def acl(uid: int) -> bytes:
    """rw for the owner, r for one more user and the group, nothing for others."""
    entries = [(_OWNER, 6, _NOBODY), (_USER, 4, uid), (_GROUP, 4, _NOBODY)]
    entries += [(_MASK, 4, _NOBODY), (_OTHERS, 0, _NOBODY)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
