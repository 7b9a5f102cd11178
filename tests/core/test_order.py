"""The lazily struck order against a dictionary."""

from __future__ import annotations

import random

import pytest

from wbcache.order import OrderedLog


@pytest.mark.parametrize("seed", range(40))
def test_questions_are_answered_as_by_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    order, model = OrderedLog[str](), dict[str, int]()
    items = [f"item {i}" for i in range(30)]
    last = 0
    for _ in range(600):
        item = rng.choice(items)
        if rng.random() < 0.6:
            # Numbers are unique and mostly grow; an item may come back under an earlier one.
            last += 1
            number = model.pop(item, 0) if rng.random() < 0.3 else last
            order.discard(item)
            if number:
                order.add(number, item)
                model[item] = number
        else:
            order.discard(item)
            model.pop(item, None)
        assert list(order) == sorted((n, i) for i, n in model.items())
        assert (len(order), item in order) == (len(model), item in model)
        asked, exclude = rng.randint(0, last + 1), rng.choice(items)
        older = [i for i, n in model.items() if n < asked and i != exclude]
        assert order.latest_before(asked, exclude) == max(
            older, key=model.__getitem__, default=None
        )
