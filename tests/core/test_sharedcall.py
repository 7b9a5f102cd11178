"""One fdatasync for many callers: nobody returns before a call that began after they asked."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from wbcache.sharedcall import SharedCall


async def test_callers_share_the_call_that_begins_after_them() -> None:
    may_end = threading.Event()
    calls: list[int] = []

    def call() -> None:
        calls.append(len(calls))
        assert may_end.wait(10)

    shared = SharedCall(call, trio.CapacityLimiter(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shared.run)
        while not calls:
            await trio.sleep(0)
        # These asked while the first was under way: it may not cover what they did.
        for _ in range(5):
            nursery.start_soon(shared.run)
        await trio.testing.wait_all_tasks_blocked()
        may_end.set()
    assert calls == [0, 1]


async def test_a_failure_reaches_everybody_who_relied_on_it() -> None:
    may_end = threading.Event()
    calls: list[int] = []

    def call() -> None:
        calls.append(len(calls))
        assert may_end.wait(10)
        if len(calls) > 1:
            raise OSError(5, "disk")

    shared = SharedCall(call, trio.CapacityLimiter(1))
    failed = 0

    async def relying() -> None:
        nonlocal failed
        with pytest.raises(OSError):
            await shared.run()
        failed += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shared.run)
        while not calls:
            await trio.sleep(0)
        for _ in range(3):
            nursery.start_soon(relying)
        await trio.testing.wait_all_tasks_blocked()
        may_end.set()
    assert failed == 3
