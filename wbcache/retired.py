"""Cache files that are nobody's any more: emptied and used again, or unlinked.

After a power loss the journal may be at any point since its last sync. A cache file that it may
then still speak of, and call durable, must be as it was: it is kept until a sync of the journal has
made durable that nobody needs it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque

import trio

from wbcache.node import Content
from wbcache.space import Space
from wbcache.store import Store

log = logging.getLogger(__name__)


class Retired:
    """Gives back what cache files take, as early as it is safe."""

    def __init__(self, store: Store, space: Space, lane: trio.CapacityLimiter) -> None:
        self._store = store
        self._space = space
        self._lane = lane
        self._kept: deque[tuple[int, Content]] = deque()
        """Those that the journal may still speak of, numbered."""
        self.count = 0
        """How many were kept so far."""
        self._trash: list[tuple[str, int]] = []
        """Paths to be unlinked, and the bytes that they take."""

    def __bool__(self) -> bool:
        """Whether a sync of the journal would give anything back."""
        return bool(self._kept)

    def add(self, content: Content) -> None:
        """A generation is not needed any more, and the journal has been told."""
        if content.exists and content.synced >= 0:
            self.count += 1
            self._kept.append((self.count, content))
        else:
            self._give_back(content)

    def forgotten(self, upto: int) -> None:
        """That the first ``upto`` are not needed is durable."""
        while self._kept and self._kept[0][0] <= upto:
            self._give_back(self._kept.popleft()[1])

    def add_stray(self, path: str) -> None:
        """A cache file that never belonged to anything."""
        self._trash.append((path, 0))

    def _give_back(self, content: Content) -> None:
        taken, content.blocks = content.blocks, 0
        if not self._store.recycle(content):
            path = self._store.release(content)
            if path is not None:
                self._trash.append((path, taken))
                return
        if taken:
            self._space.give(taken)

    @property
    def trash(self) -> int:
        """How many cache files wait to be unlinked."""
        return len(self._trash)

    async def empty_trash(self) -> None:
        """Unlink them, which takes long for large files."""
        while self._trash:
            trash, self._trash = self._trash, []
            paths = [path for path, _ in trash]
            await trio.to_thread.run_sync(_unlink_all, paths, limiter=self._lane)
            self._space.give(sum(taken for _, taken in trash))


def _unlink_all(paths: list[str]) -> None:
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.error("can't remove a cache file: %s", os.strerror(error.errno or errno.EIO))
