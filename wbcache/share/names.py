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
        """``uuid8``: the beginning of the cache's id; ``epoch``: a number that no earlier mount of
        the cache had."""
        self._epoch = epoch
        self._count = count()
        self.belong_to(uuid8)

    def belong_to(self, uuid8: str) -> None:
        """The cache has this id, since now or still. The count goes on in any case: what was named
        so far in this mount may be on its way, or lie on the share."""
        self._own = f".wbcache-{uuid8}-".encode()
        self._prefix = f".wbcache-{uuid8}-{self._epoch:x}z"
        self._current = self._prefix.encode()

    def is_ours(self, name: bytes) -> bool:
        """Whether a temporary is this cache's, of this mount or an earlier one."""
        return name.startswith(self._own)

    def is_earlier(self, name: bytes) -> bool:
        """Whether a temporary is this cache's, of a mount before this one."""
        return self.is_ours(name) and not name.startswith(self._current)

    def fresh(self) -> bytes:
        """A name that no temporary of this cache ever had."""
        return f"{self._prefix}{next(self._count):x}".encode()
