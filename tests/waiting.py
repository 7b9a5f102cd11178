"""Waiting for a condition with a deadline: the one place where a test sleeps."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

DEADLINE = 20.0
INTERVAL = 0.01

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """The first true value of `condition`; an AssertionError naming `what` when none comes."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline:g} s: {what}")
        time.sleep(INTERVAL)


async def wait_until_async(
    condition: Callable[[], T | Awaitable[T]], what: str, deadline: float = DEADLINE
) -> T:
    """Like `wait_until`, letting the event loop run; `condition` may be async."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline:g} s: {what}")
        await trio.sleep(INTERVAL)
