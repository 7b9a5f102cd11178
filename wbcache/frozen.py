"""What a file held at one instant, copied aside on the local disk."""

from __future__ import annotations

import os

from wbcache.errors import CacheDiskError


class FrozenCopy:
    """Ranges of a cache file as they were at one instant."""

    def __init__(self, size: int, ranges: list[tuple[int, int]]) -> None:
        self.size = size
        """Of the file, at that instant."""
        self.ranges = ranges
        self.length = sum(stop - start for start, stop in ranges)
        """Bytes of the ranges together."""
        self.source = -1
        """Descriptor of a file that holds them at the same offsets."""
        self._own = -1

    def fill(self, directory: str, source: int) -> None:
        """Copy the ranges to an unnamed file at the same offsets. Blocks. Raises CacheDiskError."""
        try:
            self._fill(directory, source)
        except OSError as error:
            raise CacheDiskError(error.errno, error.strerror) from error

    def _fill(self, directory: str, source: int) -> None:
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        self.source = self._own = os.open(directory, flags, 0o600)
        for start, stop in self.ranges:
            while start < stop:
                count = os.copy_file_range(source, self._own, stop - start, start, start)
                if not count:
                    break
                start += count

    def __enter__(self) -> FrozenCopy:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._own >= 0:
            os.close(self._own)
            self._own = -1
