"""What came and went before the share ever saw it, for the order of removals.

A removal of older data waits for the files that were made before it. When such a file is itself
removed before it was flushed, the removal waits in its place for everything made until then. So a
checkpoint whose successor was rotated away while the share was slow stays until there is another.
"""

from __future__ import annotations

from wbcache.extents import Extents
from wbcache.node import Node

_MANY = 1000


class Skipped:
    """Ranges of operations ``[made, removed]`` of files that the share never saw."""

    def __init__(self, scratch_age: float = 0.0) -> None:
        self.scratch_age = scratch_age
        """Seconds; what is removed sooner than this after it was made leaves no trace."""
        self.unsaved = False
        """Whether the journal does not know of the latest changes."""
        self._for_good = Extents()
        self._open: dict[Node, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._for_good) or bool(self._open)

    def add(self, node: Node, made: int, removed: int) -> None:
        """A file was removed, by operation number ``removed``.

        While its bytes are still on their way the share may yet see it: `give_up` or `arrived`.
        """
        if node.transfer is not None:
            self._open[node] = (made, removed + 1)
        else:
            self._for_good.add(made, removed + 1)
        self.unsaved = True

    def give_up(self, node: Node) -> None:
        """The bytes of a removed file will not arrive."""
        span = self._open.pop(node, None)
        if span is not None:
            self._for_good.add(*span)

    def arrived(self, node: Node) -> None:
        """The share has a removed file after all."""
        if self._open.pop(node, None) is not None:
            self.unsaved = True

    def removed_at(self, node: Node) -> int | None:
        """The number of the operation that removed a file whose bytes are still on their way."""
        span = self._open.get(node)
        return span[1] - 1 if span is not None else None

    def effective(self, seq: int, besides: Node | None = None) -> int:
        """The number under which an operation that takes older data away is ordered; what became
        of ``besides`` does not matter to it."""
        while True:
            seq, before = self._for_good.end_of(seq), seq
            for node, (start, stop) in self._open.items():
                if start <= seq < stop and node is not besides:
                    seq = stop
            if seq == before:
                return seq

    def clear(self) -> None:
        """Nothing is pending any more."""
        self._for_good = Extents()
        self._open.clear()
        self.unsaved = True

    @property
    def is_long(self) -> bool:
        """Whether `forget_before` is worth its while."""
        return len(self._for_good) > _MANY

    def forget_before(self, seq: int) -> None:
        """No pending operation is older than ``seq``."""
        self._for_good.remove(0, seq)

    def rows(self) -> list[tuple[int, int]]:
        """Everything, to be stored; transfers don't survive the daemon."""
        return list(Extents(*self._for_good, *self._open.values()))

    def load(self, rows: list[tuple[int, int]]) -> None:
        """Take over what `rows` returned."""
        for start, stop in rows:
            self._for_good.add(start, stop)
