"""Names that wbcache keeps on the share and hides from the mount."""

from __future__ import annotations

import re
from itertools import count

OWN_DIRECTORY = b".wbcache"
"""Directory at the share's root: the id file and probes."""

_TEMPORARY = re.compile(rb"\.wbcache-([0-9a-f]{8})-[0-9a-z]+")


def is_hidden(name: bytes, *, at_root: bool) -> bool:
    """Whether a name on the share is wbcache's own, of whichever cache."""
    if not name.startswith(b".wbcache"):
        return False
    return (at_root and name == OWN_DIRECTORY) or _TEMPORARY.fullmatch(name) is not None


class TemporaryNames:
    """Fresh names for temporaries; none is used twice, also not after a restart."""

    def __init__(self, uuid8: str, epoch: int) -> None:
        self._own = f".wbcache-{uuid8}-".encode()
        self._prefix = f".wbcache-{uuid8}-{epoch:x}z"
        self._current = self._prefix.encode()
        self._count = count()

    def is_ours(self, name: bytes) -> bool:
        """Whether a temporary is this cache's, of this mount or an earlier one."""
        return name.startswith(self._own)

    def is_earlier(self, name: bytes) -> bool:
        """Whether a temporary is this cache's, of a mount before this one."""
        return self.is_ours(name) and not name.startswith(self._current)

    def fresh(self) -> bytes:
        """A name that no temporary of this cache ever had."""
        return f"{self._prefix}{next(self._count):x}".encode()
