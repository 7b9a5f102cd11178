"""A cache disk that loses power: what was not synced is there, missing, or torn, block by block.

Device-mapper is not needed for this: what the daemon writes to cache files goes through a few calls
of `os`, and what is durable is what its syncs have covered. The journal is SQLite's, in WAL mode:
after a power loss its log is durable up to the last sync, and beyond that anything may be in it.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

BLOCK = 4096


class TearingDisk:
    """Watches the files of one cache directory, from `install` on."""

    def __init__(self, cache: Path) -> None:
        self._data = str(cache / "data") + "/"
        self._cache = cache
        self._durable: dict[str, bytes] = {}
        """What a sync has covered, by path; files that are missing here were never synced."""
        self._log = 0
        """How much of the journal's log a sync has covered, bytes."""
        self.count = 0
        """How many syncs of cache files there were."""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Watch the calls that make bytes durable."""

        def watched(call: Callable[[int], None]) -> Callable[[int], None]:
            def sync(fd: int) -> None:
                path = os.readlink(f"/proc/self/fd/{fd}")
                if path.startswith(self._data) and os.path.isfile(path):
                    # What is written while the sync runs may or may not be covered.
                    found = Path(path).read_bytes()
                    call(fd)
                    self._durable[path] = found
                    self.count += 1
                elif path == f"{self._cache}/journal.db-wal":
                    size = os.fstat(fd).st_size
                    call(fd)
                    self._log = size
                else:
                    call(fd)

            return sync

        for name in ("fdatasync", "fsync"):
            patch.setattr(os, name, watched(getattr(os, name)))

    def lose_power(self, into: Path, rng: random.Random) -> None:
        """A copy of the cache directory as it may be when the machine is back."""
        shutil.copytree(self._cache, into)
        (into / "journal.db-shm").unlink(missing_ok=True)
        self._tear_log(into / "journal.db-wal", rng)
        for parent, _, names in os.walk(self._data):
            for name in names:
                path = os.path.join(parent, name)
                self._tear(path, into / os.path.relpath(path, self._cache), rng)

    def _tear_log(self, log: Path, rng: random.Random) -> None:
        """Whole pages are there or not; what they hold is checked by SQLite's own sums."""
        if not log.exists():
            return
        content = bytearray(log.read_bytes())
        for start in range(self._log - self._log % BLOCK, len(content), BLOCK):
            if start >= self._log and rng.random() < 0.5:
                content[start : start + BLOCK] = bytes(len(content[start : start + BLOCK]))
        if rng.random() < 0.5:
            del content[rng.randint(self._log, len(content)) :]
        log.write_bytes(content)

    def _tear(self, path: str, copy: Path, rng: random.Random) -> None:
        now, durable = Path(path).read_bytes(), self._durable.get(path)
        if durable is None and rng.random() < 0.3:
            copy.unlink()  # nor was its name
            return
        before = durable or b""
        # Its length is what it was, or is now, or in between when it has only grown.
        size = rng.choice([len(before), len(now), rng.randint(*sorted((len(before), len(now))))])
        mixed = bytearray(size)
        kept = rng.random()
        for start in range(0, size, BLOCK):
            source = now if rng.random() < kept else before
            part = source[start : min(start + BLOCK, size)]
            mixed[start : start + len(part)] = part
        copy.write_bytes(mixed)
