"""What came and went unseen, against a plain model."""

from __future__ import annotations

import stat

from hypothesis import given
from hypothesis import strategies as st

from wbcache.node import Node
from wbcache.skipped import Skipped

SPANS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.booleans()), max_size=8)


def closure(spans: list[tuple[int, int]], seq: int) -> int:
    """The first number from ``seq`` on that lies in none of the spans."""
    while any(made <= seq <= removed for made, removed in spans):
        seq += 1
    return seq


@given(SPANS, st.integers(0, 90))
def test_an_operation_is_ordered_behind_all_that_it_waited_for(
    spans: list[tuple[int, int, bool]], seq: int
) -> None:
    skipped = Skipped()
    model: list[tuple[int, int]] = []
    nodes: list[tuple[Node, tuple[int, int]]] = []
    for made, length, moving in spans:
        node = Node(len(nodes) + 2, stat.S_IFREG)
        node.transfer = object() if moving else None
        skipped.add(node, made, made + length)
        nodes.append((node, (made, made + length)))
        model.append((made, made + length))
    assert skipped.effective(seq) == closure(model, seq)
    stored = Skipped()
    stored.load(skipped.rows())
    assert stored.effective(seq) == closure(model, seq)
    for node, span in nodes:
        if node.transfer is not None:
            assert skipped.removed_at(node) == span[1]
            others = [other for own, other in nodes if own is not node]
            assert skipped.effective(seq, node) == closure(others, seq)
    for number, (node, span) in enumerate(nodes):
        if node.transfer is None:
            continue
        if number % 2:
            skipped.arrived(node)
            model.remove(span)
        else:
            skipped.give_up(node)
    assert skipped.effective(seq) == closure(model, seq)


def test_what_is_older_than_everything_pending_is_forgotten() -> None:
    skipped = Skipped()
    for made in range(0, 10_000, 4):
        skipped.add(Node(made + 2, stat.S_IFREG), made, made + 1)
    assert skipped.is_long
    skipped.forget_before(9_000)
    assert not skipped.is_long
    assert skipped.effective(8_000) == 8_000
    assert skipped.effective(9_500) == 9_502
