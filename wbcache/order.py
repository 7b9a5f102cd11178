"""Numbered entries in ascending order, of which most are added at the end.

Sequence numbers only grow, so a new entry nearly always belongs at the end, and entries leave in
nearly any order. A list with entries that are struck out lazily is then several times faster than
a balanced structure, and every operation of the mount pays for this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator
from operator import itemgetter
from typing import Generic, TypeVar

T = TypeVar("T")

_SLACK = 64
_first = itemgetter(0)


class OrderedLog(Generic[T]):
    """A sorted multiset of (number, item); an item is in it once at most."""

    __slots__ = ("_items", "_live", "_numbers")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._items: list[T] = []
        self._live: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: object) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[tuple[int, T]]:
        """The (number, item) pairs in ascending order."""
        return iter(sorted(((number, item) for item, number in self._live.items()), key=_first))

    def add(self, number: int, item: T) -> None:
        """Add an item that is not in it."""
        numbers = self._numbers
        self._live[item] = number
        if not numbers or number >= numbers[-1]:
            numbers.append(number)
            self._items.append(item)
            return
        at = bisect_left(numbers, number)
        if numbers[at] == number and self._items[at] is item:
            return  # it left a moment ago, and its place is still there
        numbers.insert(at, number)
        self._items.insert(at, item)

    def discard(self, item: T) -> None:
        """Remove an item if it is there."""
        live = self._live
        if live.pop(item, None) is None:
            return
        if not live:
            self._numbers.clear()
            self._items.clear()
        elif len(self._numbers) > 2 * len(live) + _SLACK:
            # An item that left and came back under its old number stands there twice.
            self._items = sorted(live, key=live.__getitem__)
            self._numbers = [live[item] for item in self._items]

    def latest_before(
        self, number: int, exclude: T | None = None, besides: Container[object] = ()
    ) -> T | None:
        """The item with the highest number below ``number`` that is neither ``exclude`` nor in
        ``besides``; None when there is none."""
        live, numbers, items = self._live, self._numbers, self._items
        at = bisect_left(numbers, number) - 1
        while at >= 0:
            item = items[at]
            if item is not exclude and live.get(item) == numbers[at] and item not in besides:
                return item
            at -= 1
        return None
