"""Many that wait for the share leave room for those that need nothing of it."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.waiting import wait_until_async
from wbcache.share.share import MAX_CALLERS, Share

DEADLINE = 60.0


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Share]:
    share = Share(
        os.open(tmp_path, os.O_PATH), lookup_deadline=DEADLINE, deadline=DEADLINE, workers=1
    )
    yield share
    share.close()


class Crowd:
    """Callers in a nursery, and what became of them."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self.answer = threading.Event()
        self.ends: Counter[int] = Counter()
        """How many got which errno; 0 is an answer."""

    async def call(self) -> None:
        """Ask for something that is answered when `answer` is set."""
        try:
            await self._share.fetch(self.answer.wait)
        except OSError as error:
            self.ends[error.errno or 0] += 1
        else:
            self.ends[0] += 1


async def test_those_beyond_a_quarter_are_turned_away(share: Share) -> None:
    crowd = Crowd(share)
    async with trio.open_nursery() as nursery:
        for _ in range(MAX_CALLERS + 50):
            nursery.start_soon(crowd.call)
        try:
            await wait_until_async(lambda: crowd.ends.total() == 50, "the rest is turned away")
            assert crowd.ends == {errno.ETIMEDOUT: 50}
            await crowd.call()  # whoever comes then is turned away at once
            assert crowd.ends == {errno.ETIMEDOUT: 51}
        finally:
            crowd.answer.set()
    assert crowd.ends == {errno.ETIMEDOUT: 51, 0: MAX_CALLERS}


async def test_a_share_that_answers_slowly_answers_all(share: Share) -> None:
    crowd = Crowd(share)
    done = 0

    async def answer() -> None:
        nonlocal done
        await share.fetch(lambda: None)
        done += 1

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(crowd.call)  # of the 32 that are called at a time
        for _ in range(3 * MAX_CALLERS):
            nursery.start_soon(answer)
        await wait_until_async(lambda: done == 3 * MAX_CALLERS, "all are answered")
        crowd.answer.set()
    assert crowd.ends == {0: 20}
