"""Range sets against a plain set of numbers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from wbcache.extents import END, Extents

LIMIT = 24
"""Ranges lie below it, so that the model stays small and edges meet often."""

points = st.integers(0, LIMIT)
operations = st.lists(st.tuples(st.booleans(), points, points), max_size=12)


def build(steps: list[tuple[bool, int, int]]) -> tuple[Extents, set[int]]:
    extents, model = Extents(), set[int]()
    for adds, start, stop in steps:
        if adds:
            extents.add(start, stop)
            model |= set(range(start, stop))
        else:
            extents.remove(start, stop)
            model -= set(range(start, stop))
    return extents, model


def runs(numbers: set[int]) -> list[tuple[int, int]]:
    """The numbers as maximal half-open ranges."""
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    stops = sorted(n + 1 for n in numbers if n + 1 not in numbers)
    return list(zip(starts, stops, strict=True))


@settings(max_examples=500)
@given(operations)
def test_ranges_are_maximal_and_ascending(steps: list[tuple[bool, int, int]]) -> None:
    extents, model = build(steps)
    assert list(extents) == runs(model)
    assert bool(extents) == bool(model)
    assert extents.first == min(model, default=END)
    assert extents == Extents(*runs(model))


@settings(max_examples=500)
@given(operations, points, points)
def test_questions_about_a_range(steps: list[tuple[bool, int, int]], start: int, stop: int) -> None:
    extents, model = build(steps)
    asked = set(range(start, stop))
    assert extents.covers(start, stop) == (asked <= model)
    assert extents.overlap(start, stop) == runs(asked & model)
    assert extents.gaps(start, stop) == runs(asked - model)
    assert extents.size(stop) == len(model & set(range(stop)))


@given(operations, points, points)
def test_a_copy_is_independent(steps: list[tuple[bool, int, int]], start: int, stop: int) -> None:
    extents, model = build(steps)
    copy = extents.copy()
    copy.add(start, stop)
    copy.remove(0, start)
    assert list(extents) == runs(model)


@given(operations, points)
def test_an_open_end_covers_every_later_byte(steps: list[tuple[bool, int, int]], at: int) -> None:
    extents, model = build(steps)
    extents.add(at, END)
    assert extents.covers(max(at, LIMIT), END)
    assert extents.overlap(at, END) == [(at, END)]
    assert extents.size(LIMIT) == len({n for n in range(LIMIT) if n in model or n >= at})
    extents.remove(LIMIT, END)
    assert set().union(*(range(a, b) for a, b in extents)) == model | set(range(at, LIMIT))
