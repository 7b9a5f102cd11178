"""Items that wait for each other in a circle, and the step that ends it.

Every item that waits names one item that it can't go without, so whoever is in a circle of these
waits for ever, whatever else is going on. Circles come from exchanges, from names that move on
(a -> b, b -> c), and from order edges together with both. Only the order edges *within* a circle
are dropped: what lies outside of it, and is slow or refused just now, is still waited for. When
names alone make the circle, an occupant is parked under a temporary name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from wbcache.flush.plan import (
    Copy,
    InPlace,
    MakeDirectory,
    Park,
    Planner,
    Remove,
    SetAttributes,
    Spill,
    Step,
    Wait,
)
from wbcache.tree import Item, Tree

Waiting = Mapping[Item, Item | None]
"""What each waiting item waits for; None when it has to be touched."""


def circles(waiting: Waiting) -> Iterator[list[Item]]:
    """The circles among waiting items; no item is in two of them."""
    walks: dict[Item, int] = {}
    for walk, start in enumerate(list(waiting)):
        at: Item | None = start
        while at is not None and at in waiting and at not in walks:
            walks[at] = walk
            at = waiting[at]
        if at is not None and walks.get(at) == walk:
            found = circle_from(waiting, at)
            if len(found) > 1:  # one that is busy waits for itself
                yield found


def circle_from(waiting: Waiting, start: Item) -> list[Item]:
    """The circle that is met when one follows an item; empty when there is none."""
    path: dict[Item, None] = {}
    at: Item | None = start
    while at is not None and at in waiting and at not in path:
        path[at] = None
        at = waiting[at]
    if at is None or at not in path:
        return []
    items = list(path)
    return items[items.index(at) :]


def way_out(
    planner: Planner,
    tree: Tree,
    waiting: Waiting,
    circle: list[Item],
    *,
    wait: Callable[[Item, Item | None], None],
) -> tuple[Item, Step] | None:
    """The step that ends a circle, and whose it is.

    None when some item of the circle also waits for others, outside of it: ``wait`` is told so.
    """
    group = dict.fromkeys(circle)
    while True:
        steps: list[tuple[Item, Step]] = []
        for item in group:
            plan = planner.plan(item, besides=group)
            if isinstance(plan, Wait):
                wait(item, plan.on)
            elif plan is not None:
                steps.append((item, plan))
            else:
                wait(item, None)
        if steps:
            return min(steps, key=lambda found: _urgency(tree, found[1]))
        larger = next(filter(None, (circle_from(waiting, item) for item in group)), None)
        if larger is None:
            return None
        if group.keys() >= set(larger):
            # Names alone make the circle: free one of them, the topmost first.
            parks = [(item, park) for item in larger if (park := planner.park(item)) is not None]
            return min(parks, key=lambda found: planner.is_moving(found[1].at[0]), default=None)
        group.update(dict.fromkeys(larger))


def _urgency(tree: Tree, step: Step) -> tuple[int, int]:
    """The order in which a circle is undone, lowest first.

    Bytes come first, then names that take nothing away, then what replaces, then removals; among
    equals what was last changed here the longest time ago. It waits for something older of which
    only a newer version is left: for that it would wait in vain.
    """
    node, content = step.node, step.node.content
    if isinstance(step, Copy | Spill):
        return 0, 0
    if isinstance(step, MakeDirectory | SetAttributes):
        return 1, 0
    if isinstance(step, InPlace):
        return 3, node.dirty.since if node.dirty is not None else 0
    change = tree.changes.get(step.at if isinstance(step, Remove | Park) else step.to)
    seq = change.seq if change is not None else 0
    if isinstance(step, Remove | Park):
        return 4, seq
    return (2 if step.occupant is None else 3), max(seq, content.seq if content is not None else 0)
