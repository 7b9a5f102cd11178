"""Whether the share answers.

A foreground call that meets its deadline while no other call succeeds opens the circuit: from then
on whatever needs the share fails at once instead of waiting, until a probe is answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

SLOW_SECONDS = 1.0
PROMPT = 0.05


class Health:
    """The share's state as its calls show it. Times are monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: dict[int, float] = {}
        self._questions: dict[int, float] = {}
        self._next = 0
        self._last_answer = clock()
        self.latency = 0.0
        """Moving average of a call's duration, seconds."""
        self.silent_since: float | None = None
        """When the share stopped answering; None while it answers."""
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
        took = now - self._calls.pop(ticket)
        self._questions.pop(ticket, None)
        self.latency += (took - self.latency) * 0.1
        self._last_answer = now
        if self.silent_since is not None:
            log.warning("the share answers again, after %.0f s", now - self.silent_since)
            self.silent_since = None

    def abandoned(self, ticket: int) -> None:
        """Nobody waits for the call any more; its deadline passed."""
        started = self._calls.pop(ticket, None)
        self._questions.pop(ticket, None)
        if started is not None and self.silent_since is None and self._last_answer <= started:
            self.silent_since = started
            log.warning("the share does not answer")
            self.on_silent()

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
    def state(self) -> str:
        """answering, slow or not answering."""
        if self.silent_since is not None:
            return "not answering"
        oldest = min(self._calls.values(), default=None)
        if self.latency > SLOW_SECONDS or (
            oldest is not None and self._clock() - oldest > 5 * SLOW_SECONDS
        ):
            return "slow"
        return "answering"
