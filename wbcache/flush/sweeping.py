"""Temporaries that nothing needs any more are removed from the share."""

from __future__ import annotations

import logging
import math

from wbcache.flush import blocking
from wbcache.flush.errors import describe
from wbcache.node import Directory
from wbcache.tree import Name
from wbcache.volume import Volume

log = logging.getLogger(__name__)


class Sweeper:
    """Removes what `Volume.strays` lists."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self.running = 0
        """Sweeps under way."""
        self.later: list[Name] = []
        """Temporaries whose removal failed; tried again later, and at the next mount."""
        self._later_at = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether temporaries still take room that they will give back."""
        return bool(self._volume.strays) or self.running > 0

    @property
    def due(self) -> float:
        """When those whose removal failed are tried again, monotonic seconds."""
        return self._later_at if self.later else math.inf

    def collect(self) -> None:
        """Those whose time has come are to be swept away with the others."""
        if self.due <= self._volume.clock():
            self._volume.strays += self.later
            self.later.clear()

    async def sweep(self) -> None:
        """Remove all that is listed by now."""
        strays, self._volume.strays = self._volume.strays, []
        self.running += 1
        try:
            for directory, name in strays:
                await self._sweep_away(directory, name)
        finally:
            self.running -= 1

    async def _sweep_away(self, directory: Directory, name: bytes) -> None:
        volume = self._volume
        try:
            if directory.on_share:
                parent = await volume.share.directory(directory, flush=True)
                await volume.share.work(blocking.remove_temporary, parent, name)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.info("temporary %r stays for now: %s", name, describe(error))
            self.later.append((directory, name))
            self._later_at = volume.clock() + volume.config.flush.retry.max
            return
        volume.journal.drop_temporary(name)
