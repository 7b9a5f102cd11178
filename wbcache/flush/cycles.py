"""Items that wait for each other in a circle, and the step that ends it.

Every item that waits names one item that it can't go without, so whoever is in a circle of these
waits for ever, whatever else is going on. Circles come from exchanges, from names that move on
(a -> b, b -> c), and from order edges together with both. Only the order edges *within* a circle
are dropped: what lies outside of it, and is slow or refused just now, is still waited for. When
names alone make the circle, an occupant is parked under a temporary name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
    steps = _steps(planner, group)
    if not steps:
        # They wait for others, and those perhaps for them: all that wait for each other.
        found = _component(planner, waiting, circle[0], wait)
        if found is None:
            return None
        group = dict.fromkeys(found)
        steps = _steps(planner, group)
    if steps:
        return min(steps, key=lambda found: _urgency(tree, found[1]))
    # Names alone make circles in it: free one of them, the topmost first.
    for item in group:
        plan = planner.plan(item, besides=group)
        wait(item, plan.on if isinstance(plan, Wait) else None)
    inner = next(filter(None, (circle_from(waiting, item) for item in group)), ())
    parks = [(item, park) for item in inner if (park := planner.park(item)) is not None]
    return min(parks, key=lambda found: planner.is_moving(found[1].at[0]), default=None)


def _steps(planner: Planner, group: dict[Item, None]) -> list[tuple[Item, Step]]:
    """The steps that items could take if they did not wait for each other."""
    plans = [(item, planner.plan(item, besides=group)) for item in group]
    return [(item, plan) for item, plan in plans if not isinstance(plan, Wait | None)]


def _component(
    planner: Planner, waiting: Waiting, start: Item, wait: Callable[[Item, Item | None], None]
) -> list[Item] | None:
    """Items that all wait for each other, and for nobody else, to which an item's waiting leads.

    None when it leads to something that does not wait; ``wait`` is told of the way there.

    Among hundreds of files that are changed again and again everybody waits for everybody, and a
    plan names only one of those whom an item waits for. So this is the search for strongly
    connected components along a path (H. N. Gabow, Path-based depth-first search, 2000), with few
    plans: each finds somebody new, or that there is nobody, or with whom the path closes.
    """
    order: dict[Item, int] = {start: 0}
    """Whom it has met, and when."""
    met_by: dict[Item, Item] = {}
    bounds = [0]
    """Where, in this order, the groups on the path begin of which all wait for each other."""
    unfinished = [start]
    while unfinished and order[unfinished[-1]] >= bounds[-1]:
        item = unfinished[-1]
        plan = planner.plan(item, besides=order)
        on = plan.on if isinstance(plan, Wait) else None
        known = on is None or on in order or on in waiting
        if plan is None or on == item or not known:
            wait(item, on)
            while (waiter := met_by.get(item)) is not None:
                wait(waiter, item)
                item = waiter
            return None
        if on is not None and on not in order:
            order[on] = len(order)
            met_by[on] = item
            bounds.append(order[on])
            unfinished.append(on)
            continue
        while on is not None or bounds[-1] > 0:
            if on is None:
                plan = planner.plan(item, besides=_AllBut(order, bounds[-1]))
                on = plan.on if isinstance(plan, Wait) else None
            if on is None or order.get(on, bounds[-1]) >= bounds[-1]:
                break
            while bounds[-1] > order[on]:
                bounds.pop()
            on = None
        unfinished.pop()
    return list(order)[bounds[-1] :]


class _AllBut:
    """Everything but what comes before a place in an order."""

    def __init__(self, order: dict[Any, int], place: int) -> None:
        self._order = order
        self._place = place

    def __contains__(self, item: object) -> bool:
        return self._order.get(item, self._place) >= self._place


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
