"""Limits on calls under way, such that a call without an answer holds up no other.

A call takes a place in its lane. It loses it when it is late, that is when others were answered
since it began and it takes far longer than they do, or when nobody waits for it any more. Its
thread is in the kernel and stays there for as long as the share likes; nobody can end it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeAlias, cast

import trio

from wbcache.share.descriptor import Descriptor
from wbcache.share.health import Health

Subject: TypeAlias = tuple[Descriptor, bytes | tuple[bytes, ...]]
"""What a call asks about: a descriptor, and a name or a way of names below it, or b""."""

USUAL = 10
"""A call that takes this many times as long as calls usually take may be late."""

LOOK = 0.25
"""Seconds between looks for late calls while others wait for a place."""

IN_ONE_DIRECTORY = 32
"""Names in one directory of which calls are given up; more are not asked about then."""

MOST = 512
"""Threads that nobody waits for any more; nothing is asked of a share that keeps as many."""

on_behalf_of: ContextVar[object] = ContextVar("on_behalf_of", default=None)
"""For whom a task makes its calls: `Lane.late` tells."""


class Lane:
    """Places for calls of one kind."""

    def __init__(
        self, places: int, late_after: float, health: Health, clock: Callable[[], float]
    ) -> None:
        """A call is late after ``late_after`` seconds at the earliest."""
        self._places = trio.CapacityLimiter(places)
        self._late_after = late_after
        self._health = health
        self._clock = clock
        self._under_way: dict[Place, None] = {}
        """Those that hold a place, in the order in which they began."""
        self._late: dict[Place, None] = {}
        self._given_up = 0

    @property
    def threads(self) -> int:
        """Calls that are not over, whether anybody waits for them or not."""
        return len(self._under_way) + len(self._late) + self._given_up

    def late(self) -> list[object]:
        """For whom the calls are made that are late by now."""
        now = self._clock()
        limit = max(self._late_after, USUAL * self._health.latency)
        for place in list(self._under_way):
            if now - place.began <= limit or self._health.last_answer <= place.began:
                break
            self._leave(place)
            self._late[place] = None
        return [place.user for place in self._late]

    async def enter(self, place: Place) -> None:
        """Wait for a place."""
        while True:
            with trio.move_on_after(LOOK if self._places.available_tokens <= 0 else math.inf):
                await self._places.acquire_on_behalf_of(place)
                break
            self.late()
        place.began = self._clock()
        place.is_taken = True
        self._under_way[place] = None

    def _leave(self, place: Place) -> None:
        del self._under_way[place]
        self._places.release_on_behalf_of(place)

    def give_up(self, place: Place) -> None:
        """Nobody waits for the call any more."""
        if place in self._under_way:
            self._leave(place)
        else:
            del self._late[place]
        self._given_up += 1
        place.given_up_at = self._clock()

    def end(self, place: Place) -> None:
        """The call's thread has ended."""
        if place in self._under_way:
            self._leave(place)
        elif place in self._late:
            del self._late[place]
        else:
            self._given_up -= 1


class Place:
    """One call's place in a lane, which trio takes for the limiter of its thread."""

    __slots__ = ("_at_end", "began", "given_up_at", "is_over", "is_taken", "lane", "user")

    def __init__(self, lane: Lane, at_end: Callable[[Place], None]) -> None:
        """``at_end`` is called when the thread has ended."""
        self.lane = lane
        self.user = on_behalf_of.get()
        self.began = self.given_up_at = 0.0
        self.is_taken = False
        """There is, or was, a thread."""
        self.is_over = False
        self._at_end = at_end

    @property
    def limiter(self) -> trio.CapacityLimiter:
        """For `trio.to_thread.run_sync`, which calls the two methods below."""
        return cast("trio.CapacityLimiter", self)

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """The thread is about to be started."""
        await self.lane.enter(self)

    def release_on_behalf_of(self, borrower: object) -> None:
        """It has ended."""
        self.is_over = True
        self.lane.end(self)
        self._at_end(self)


class GivenUp:
    """What calls were about that nobody waits for any more: it is not asked again until they end.

    Otherwise each question about one file that hangs would cost another thread.
    """

    def __init__(self) -> None:
        self._calls: dict[Place, Subject | None] = {}

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def since(self) -> float:
        """When the first of them was given up, monotonic seconds; infinite if there is none."""
        return next((place.given_up_at for place in self._calls), math.inf)

    def add(self, place: Place, subject: Subject | None) -> None:
        """A call was given up, and its thread goes on."""
        self._calls[place] = subject

    def discard(self, place: Place) -> None:
        """Its thread has ended."""
        self._calls.pop(place, None)

    def forget_subjects(self) -> None:
        """What was hanging is reached in another way from now on."""
        self._calls = dict.fromkeys(self._calls)

    def forbid(self, subject: Subject | None) -> bool:
        """Whether something is not to be asked about now."""
        if not self._calls or subject is None:
            return False
        if len(self._calls) >= MOST:
            return True
        directory, name = subject
        others = 0
        for call in self._calls.values():
            if call is None or call[0] is not directory:
                continue
            if call[1] == name:
                return True
            others += isinstance(name, bytes) and isinstance(call[1], bytes)
        return others >= IN_ONE_DIRECTORY
