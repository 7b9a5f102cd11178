"""The quota of the share: how much it holds, and how much more it takes."""

from __future__ import annotations

import errno
import os
import stat

from tests.faultshare.nodes import fail

BLOCK = 4096


class Usage:
    """Counts stored bytes (file sizes and link targets) and inodes against limits.

    Without limits nothing is counted. What changes the backing directory behind the share's back
    is only seen by the next `limit`.
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self.limit_inodes: int | None = None
        self.errno = errno.EDQUOT
        self.bytes = 0
        self.inodes = 0

    @property
    def limited(self) -> bool:
        """Whether there is a quota at all."""
        return self.limit_bytes is not None or self.limit_inodes is not None

    def limit(self, root: str, bytes_: int | None, inodes: int | None, error: int) -> None:
        """Set the quota (None: no limit) and count what *root* holds now."""
        self.limit_bytes, self.limit_inodes, self.errno = bytes_, inodes, error
        self.bytes = self.inodes = 0
        if self.limited:
            self.bytes, self.inodes = measure(root)

    def need(self, bytes_: int, inodes: int = 0) -> None:
        """Raise the quota's error if this much more does not fit."""
        if self.limit_bytes is not None and bytes_ > max(0, self.limit_bytes - self.bytes):
            raise fail(self.errno)
        if self.limit_inodes is not None and inodes > max(0, self.limit_inodes - self.inodes):
            raise fail(self.errno)

    def add(self, bytes_: int, inodes: int = 0) -> None:
        """Count a change that has happened; negative numbers give space back."""
        if self.limited:
            self.bytes = max(0, self.bytes + bytes_)
            self.inodes = max(0, self.inodes + inodes)

    def free_blocks(self) -> tuple[int, int] | None:
        """Total and free blocks of `BLOCK` bytes under the quota, or None."""
        if self.limit_bytes is None:
            return None
        return self.limit_bytes // BLOCK, max(0, self.limit_bytes - self.bytes) // BLOCK

    def free_inodes(self) -> tuple[int, int] | None:
        """Total and free inodes under the quota, or None."""
        if self.limit_inodes is None:
            return None
        return self.limit_inodes, max(0, self.limit_inodes - self.inodes)


def charge(st: os.stat_result) -> int:
    """The bytes that an inode counts for."""
    return st.st_size if stat.S_ISREG(st.st_mode) or stat.S_ISLNK(st.st_mode) else 0


def measure(root: str) -> tuple[int, int]:
    """Bytes and inodes below *root*, the root itself not counted, hard links once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for directory, names, files in os.walk(root):
        for name in names + files:
            st = os.lstat(os.path.join(directory, name))
            if (st.st_dev, st.st_ino) not in seen:
                seen.add((st.st_dev, st.st_ino))
                total += charge(st)
    return total, len(seen)
