"""Conflicts with other writers that nobody has dealt with yet: what `wbcache conflicts` lists.

A record stands for as long as what it tells of is in the mount under the name that it says. Whoever
renames or removes that has dealt with the conflict, and the record goes by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from wbcache.journal import ConflictRow, Journal
from wbcache.node import Directory, Node
from wbcache.tree import Name, Tree

log = logging.getLogger(__name__)

BOTH_KEPT = "both kept"
"""Both sides changed it: theirs has the name, ours is kept beside it."""
REMOVED_HERE = "removed here"
"""We removed what another writer changed: theirs is kept."""
REMOVED_THERE = "removed there"
"""Another writer removed what we changed: ours is kept."""


@dataclass(frozen=True)
class Conflict:
    """A name under which another writer and we wanted different things."""

    id: int
    directory: Directory
    name: bytes
    copy: bytes
    """The name beside it under which ours is kept; empty where it needs none."""
    ours: Node | None
    theirs: Node | None
    time: float
    """When it was found, seconds since the epoch."""

    @property
    def kind(self) -> str:
        """`BOTH_KEPT`, `REMOVED_HERE` or `REMOVED_THERE`."""
        if self.copy:
            return BOTH_KEPT
        return REMOVED_HERE if self.ours is None else REMOVED_THERE

    @property
    def stands(self) -> bool:
        """Whether nobody has dealt with it."""
        node = self.theirs if self.ours is None else self.ours
        return node is not None and self.directory.local.get(self.copy or self.name) is node

    @property
    def shows_theirs(self) -> bool:
        """Whether their side is (still) what the name means."""
        return self.theirs is not None and self.directory.local.get(self.name) is self.theirs


class Conflicts:
    """The records of one mount; they outlive it in the journal."""

    def __init__(self, tree: Tree, journal: Journal) -> None:
        self._journal = journal
        self._all: dict[int, Conflict] = {}
        for identity, parent, name, copy, ours, theirs, found in journal.conflicts():
            directory = tree.nodes.get(parent)
            if isinstance(directory, Directory):
                self._all[identity] = Conflict(
                    identity, directory, name, copy, tree.nodes.get(ours), tree.nodes.get(theirs),
                    found,
                )  # fmt: skip
        self._next = max(self._all, default=0) + 1
        self.standing()  # numbers of forgotten nodes may be given to others from now on

    def add(
        self, at: Name, *, ours: Node | None = None, theirs: Node | None = None, copy: bytes = b""
    ) -> ConflictRow:
        """Note a conflict; returns the row that the journal is to store with its outcome."""
        directory, name = at
        for other in list(self._all.values()):
            if (other.directory, other.name, other.copy) == (directory, name, copy):
                del self._all[other.id]  # the same again
        conflict = Conflict(self._next, directory, name, copy, ours, theirs, time.time())
        self._next += 1
        self._all[conflict.id] = conflict
        return ConflictRow(
            conflict.id,
            directory.ino,
            name,
            copy,
            ours.ino if ours is not None else 0,
            theirs.ino if theirs is not None else 0,
            conflict.time,
        )

    def standing(self) -> list[Conflict]:
        """Those that nobody has dealt with, oldest first; the others are forgotten."""
        self.forget([c.id for c in self._all.values() if not c.stands])
        return list(self._all.values())

    def forget(self, ids: Iterable[int]) -> None:
        """Somebody has dealt with these; unknown ones are fine."""
        known = [identity for identity in ids if self._all.pop(identity, None) is not None]
        if known:
            try:
                self._journal.save(extra=lambda: self._journal.drop_conflicts(known))
            except OSError as error:
                log.error("journal: %s; a conflict that was dealt with may be listed again", error)
