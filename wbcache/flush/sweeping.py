"""Temporaries that nothing needs any more are removed from the share."""

from __future__ import annotations

import contextlib
import logging
import math

from wbcache.flush import blocking
from wbcache.flush.errors import describe, refused
from wbcache.node import Directory
from wbcache.tree import Name
from wbcache.volume import Volume

log = logging.getLogger(__name__)

TRIES = 6
"""How often the removal of a temporary is tried before the final flush ends without it."""

BROOMS = 8
"""Directories that are swept at a time."""


class Sweeper:
    """Removes what `Volume.strays` lists."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._directories: set[Directory] = set()
        """Those that are being swept."""
        self.later: dict[Name, None] = {}
        """Temporaries whose removal failed; tried again later, and at the next mount."""
        self._later_at = 0.0
        self._tries: dict[Name, int] = {}
        """How often the removal of those failed."""
        self._insists = False

    @property
    def running(self) -> int:
        """Sweeps under way."""
        return len(self._directories)

    @property
    def is_busy(self) -> bool:
        """Whether temporaries still take room that they will give back."""
        hopeful = self._insists and any(self._tries[at] < TRIES for at in self.later)
        return bool(self._volume.strays) or self.running > 0 or hopeful

    def insist(self) -> None:
        """A final flush: no later mount may come to remove what could be removed now."""
        self._insists, self._later_at = True, 0.0

    @property
    def due(self) -> float:
        """When those whose removal failed are tried again, monotonic seconds."""
        return self._later_at if self.later else math.inf

    def collect(self) -> None:
        """Those whose time has come are to be swept away with the others."""
        if self.due <= self._volume.clock():
            self._volume.strays += self.later
            self.later.clear()

    def take(self) -> dict[Directory, list[bytes]]:
        """What is to be removed now, for `sweep`; a directory that hangs holds up no other, for as
        long as few do."""
        taken: dict[Directory, dict[bytes, None]] = {}
        left = []
        for directory, name in self._volume.strays:
            if directory in taken:
                taken[directory][name] = None  # the journal and a listing may both have told of one
            elif directory in self._directories or self.running >= BROOMS:
                left.append((directory, name))
            else:
                self._directories.add(directory)
                taken[directory] = {name: None}
        self._volume.strays = left
        return {directory: list(names) for directory, names in taken.items()}

    async def sweep(self, directory: Directory, names: list[bytes]) -> None:
        """Remove temporaries in a directory."""
        try:
            for name in names:
                await self._sweep_away(directory, name)
        finally:
            self._directories.discard(directory)

    async def _sweep_away(self, directory: Directory, name: bytes) -> None:
        volume = self._volume
        at = (directory, name)
        try:
            if directory.on_share:
                with contextlib.suppress(FileNotFoundError):
                    parent = await volume.share.directory(directory, flush=True)
                    await volume.share.remove(blocking.remove_temporary, parent, name)
            volume.journal.drop_temporary(name)
        except OSError as error:
            log.info("temporary %r stays for now: %s", name, describe(error))
            tries = self._tries[at] = TRIES if refused(error) else self._tries.get(at, 0) + 1
            self.later[at] = None
            retry = volume.config.flush.retry
            delay = min(retry.max, retry.first * 2.0**tries) if self._insists else retry.max
            self._later_at = volume.clock() + delay
            return
        self._tries.pop(at, None)
        self.later.pop(at, None)
