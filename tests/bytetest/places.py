"""Offsets and lengths at which things go wrong: around blocks, pages and what moves in one go."""

from __future__ import annotations

import random

LIMITS = [512, 4096, 16_384, 65_536, 131_072, 1 << 20]


def place(rng: random.Random, limit: int) -> int:
    """A number up to a limit, often one near a multiple of something."""
    if rng.random() < 0.4:
        return rng.randint(0, limit)
    unit = rng.choice([unit for unit in LIMITS if unit <= limit] or [1])
    return min(limit, max(0, rng.randint(0, limit // unit) * unit + rng.randint(-2, 2)))


def length(rng: random.Random, longest: int) -> int:
    """The same for a length, which is never 0."""
    if rng.random() < 0.3:
        return rng.randint(1, min(300, longest))
    return max(1, place(rng, longest))
