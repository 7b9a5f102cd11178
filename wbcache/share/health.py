"""Whether the share answers.

A foreground call that meets its deadline while no other call succeeds opens the circuit: from then
on whatever needs the share fails at once instead of waiting, until a probe is answered.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

log = logging.getLogger(__name__)

SLOW_SECONDS = 1.0
"""A share whose calls take so long on average is slow, until they take half of that."""

WAITING_SECONDS = 5.0
"""So is one that leaves a call unanswered for so long."""

PROMPT = 0.05


class Health:
    """The share's state as its calls show it. Times are monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: dict[int, float] = {}
        self._questions: dict[int, float] = {}
        self._next = 0
        self.last_answer = clock()
        """When any call was last answered."""
        self.latency = 0.0
        """Moving average of a call's duration, seconds."""
        self.silent_since: float | None = None
        """When the share stopped answering; None while it answers."""
        self._silent_until = -math.inf
        self._slow = False
        self.on_silent: Callable[[], None] = lambda: None

    def begin(self, *, question: bool = False) -> int:
        """A call starts; returns a ticket for `end`. A question is one that is answered quickly
        or not at all: no data moves."""
        self._next += 1
        self._calls[self._next] = self._clock()
        if question:
            self._questions[self._next] = self._calls[self._next]
        return self._next

    def end(self, ticket: int) -> None:
        """The call was answered (well or with an error)."""
        now = self._clock()
        began = self._calls.pop(ticket)
        self._questions.pop(ticket, None)
        self.last_answer = now
        if self.silent_since is not None:
            log.warning("the share answers again, after %.0f s", now - self.silent_since)
            self.silent_since = None
            self._silent_until = now
            self._slow = False
        if began >= self._silent_until:  # otherwise it says how long the silence was
            self.latency += (now - began - self.latency) * 0.1

    def unanswered(self, ticket: int) -> None:
        """The call failed without the share having had any part in it."""
        self._calls.pop(ticket, None)
        self._questions.pop(ticket, None)

    def abandoned(self, ticket: int, *, alone: bool = False) -> None:
        """Nobody waits for the call any more; its deadline passed. ``alone``: what it was about is
        known to hang while the share answers, so that it says nothing of the share."""
        started = self._calls.pop(ticket, None)
        self._questions.pop(ticket, None)
        if alone or started is None or self.silent_since is not None:
            return
        if self.last_answer <= started:
            self.silent_since = started
            log.warning("the share does not answer")
            self.on_silent()

    def fall_silent(self) -> None:
        """It is known from elsewhere that the share does not answer."""
        if self.silent_since is None:
            self.silent_since = self._clock()
            log.warning("the share does not answer")
            self.on_silent()

    def observe(self) -> None:
        """Call it now and then: whether the share is slow is judged, and logged, here."""
        slow = self.latency > SLOW_SECONDS / (2 if self._slow else 1)
        oldest = next(iter(self._calls.values()), math.inf)
        slow = slow or self._clock() - oldest > WAITING_SECONDS
        if slow != self._slow:
            self._slow = slow
            if self.answering:
                state = "slow" if slow else "as usual"
                took = self.latency * 1000
                log.warning(
                    "the share is %s, %.0f ms a call, %d under way", state, took, self.stuck
                )

    @property
    def answering(self) -> bool:
        """Whether it is worth waiting for the share."""
        return self.silent_since is None

    @property
    def prompt(self) -> bool:
        """Whether a question can be expected to be answered within `PROMPT` seconds."""
        if self.silent_since is not None:
            return False
        # Tickets are in order of time, so the first is the oldest.
        oldest = next(iter(self._questions.values()), None)
        return oldest is None or self._clock() - oldest < PROMPT

    @property
    def stuck(self) -> int:
        """Calls under way."""
        return len(self._calls)

    @property
    def waiting(self) -> float:
        """Seconds for which calls have been under way of which none was answered."""
        oldest = next(iter(self._calls.values()), None)
        return 0.0 if oldest is None else self._clock() - max(oldest, self.last_answer)

    @property
    def state(self) -> str:
        """answering, slow or not answering."""
        if self.silent_since is not None:
            return "not answering"
        return "slow" if self._slow else "answering"
