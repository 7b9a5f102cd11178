"""Sets of byte ranges.

A file's cache knows which of its bytes are dirty, clean or absent; each is a set of half-open
ranges ``[start, stop)`` in bytes. Nearly every file has one or two ranges, so a flat sorted list
with bisection beats a tree in speed and memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

END = (1 << 63) - 1
"""The stop of an open-ended range: it covers every byte the file will ever get."""

_WHOLE = (0, END)
_ALL_OF_IT = (_WHOLE,)


class Extents:
    """Disjoint, non-adjacent byte ranges in ascending order."""

    __slots__ = ("_edges",)

    def __init__(self, *ranges: tuple[int, int]) -> None:
        # [start0, stop0, start1, stop1, …]: an index is odd inside a range, even outside.
        # A tuple until it changes: nearly every file has nothing in one set and all in the other.
        self._edges: list[int] | tuple[int, ...] = ()
        if ranges == _ALL_OF_IT:
            self._edges = _WHOLE
            return
        for start, stop in ranges:
            self.add(start, stop)

    def __bool__(self) -> bool:
        return bool(self._edges)

    def __len__(self) -> int:
        """How many ranges there are."""
        return len(self._edges) // 2

    def __iter__(self) -> Iterator[tuple[int, int]]:
        edges = self._edges
        return iter([(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extents) and [*self._edges] == [*other._edges]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Extents({', '.join(map(str, self))})"

    def copy(self) -> Extents:
        """An independent copy."""
        new = Extents()
        new._edges = self._edges if isinstance(self._edges, tuple) else self._edges.copy()
        return new

    def add(self, start: int, stop: int) -> None:
        """Include ``[start, stop)``, joining ranges that touch it."""
        if start < stop and self._edges is not _WHOLE:
            self._splice(start, stop, inside=True)

    def remove(self, start: int, stop: int) -> None:
        """Exclude ``[start, stop)``."""
        if start < stop and self._edges:
            self._splice(start, stop, inside=False)

    def _splice(self, start: int, stop: int, *, inside: bool) -> None:
        edges = self._edges
        if isinstance(edges, tuple):
            edges = self._edges = list(edges)
        left = bisect_left(edges, start)
        right = bisect_right(edges, stop)
        put: list[int] = []
        if (left % 2 == 0) == inside:
            put.append(start)
        if (right % 2 == 0) == inside:
            put.append(stop)
        edges[left:right] = put

    def covers(self, start: int, stop: int) -> bool:
        """Whether every byte of ``[start, stop)`` is included."""
        edges = self._edges
        if start >= stop:
            return True
        i = bisect_right(edges, start)
        return i % 2 == 1 and edges[i] >= stop

    def end_of(self, at: int) -> int:
        """The stop of the range that includes a byte; the byte itself when none does."""
        i = bisect_right(self._edges, at)
        return self._edges[i] if i % 2 else at

    def overlap(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The included parts of ``[start, stop)``, in ascending order."""
        edges = self._edges
        i = bisect_right(edges, start)
        i -= i % 2
        found = []
        while i < len(edges) and edges[i] < stop:
            a, b = max(edges[i], start), min(edges[i + 1], stop)
            if a < b:
                found.append((a, b))
            i += 2
        return found

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of ``[start, stop)`` that are not included, in ascending order."""
        found = []
        at = start
        for a, b in self.overlap(start, stop):
            if at < a:
                found.append((at, a))
            at = b
        if at < stop:
            found.append((at, stop))
        return found

    def size(self, limit: int = END) -> int:
        """Bytes included below ``limit``."""
        return sum(b - a for a, b in self.overlap(0, limit))

    @property
    def first(self) -> int:
        """The lowest included byte; ``END`` when empty."""
        return self._edges[0] if self._edges else END
