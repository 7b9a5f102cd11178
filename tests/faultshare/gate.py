"""Where calls wait: latency, rates, and hangs.

Every call passes `Gate.admit` before its effect and `Gate.answer` after it. The rules are looked at
when the wait is over, immediately before the effect: from the moment a test has set a fault, no
matching call takes effect without it, not even one that had arrived before.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from tests.faultshare.faults import UNAWAITED, Faults, Request, Rule, Verdict


@dataclass
class Hung:
    """A call that is being kept. *late* ones have taken effect, only their answer is missing."""

    op: str
    path: str
    since: float
    late: bool
    rule: int
    released: trio.Event = field(default_factory=trio.Event)
    outcome: int = 0


class Gate:
    """Lets calls through when it is their time. One per share."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.hung: list[Hung] = []
        self._closing = trio.Event()

    @property
    def closing(self) -> bool:
        """Whether the share is shutting down: every call then fails with EIO, at once."""
        return self._closing.is_set()

    def close(self) -> None:
        """Fail everything that waits, and everything that comes."""
        self._closing.set()
        self.release(None, errno.EIO)

    def release(self, rules: set[int] | None, outcome: int) -> int:
        """Let go of the calls kept by *rules* (None: all); returns how many there were.

        outcome: 0 carries them out, an errno fails them.
        """
        freed = [call for call in self.hung if rules is None or call.rule in rules]
        for call in freed:
            call.outcome = outcome
            call.released.set()
        return len(freed)

    async def admit(
        self, op: str, request: Callable[[], Request], started: float, incoming: int
    ) -> Verdict:
        """Wait until the call may take effect, and say what is to become of it.

        request: describes the call as of now; names may change while it waits.
        incoming: bytes that travel to the share.
        """
        faults = self.faults
        if not faults.disconnected and not self.closing:
            due = started + faults.delay(op) / 2
            if op not in UNAWAITED:
                due = max(due, faults.iops.reserve(started, 1))
            if incoming:
                due = max(due, faults.bandwidth.reserve(started, incoming))
            await self._until(due)
        seen: set[int] = set()
        while not self.closing:
            now = request()
            rule = None if faults.disconnected else faults.hang(now, seen)
            if rule is None:
                return faults.verdict(now)
            seen.add(rule.id)
            outcome = await self._keep(rule, now, late=False)
            if outcome:
                return Verdict(error=outcome, effect=False)
        return Verdict(error=errno.EIO, effect=False)

    async def answer(
        self, request: Request, verdict: Verdict, started: float, outgoing: int
    ) -> int:
        """Wait until the answer has reached the caller; returns the errno it carries.

        outgoing: bytes that travel back.
        """
        faults = self.faults
        error = verdict.error
        if verdict.hang is not None and not self.closing:
            error = await self._keep(verdict.hang, request, late=True) or error
        if not faults.disconnected and not self.closing:
            due = started + faults.delay(request.op)
            if outgoing:
                due = max(due, faults.bandwidth.reserve(time.monotonic(), outgoing))
            await self._until(due)
        return error

    async def _keep(self, rule: Rule, request: Request, *, late: bool) -> int:
        path = os.fsdecode(request.paths[0])
        call = Hung(request.op, path, time.monotonic(), late, rule.id)
        self.hung.append(call)
        try:
            await call.released.wait()
        finally:
            self.hung.remove(call)
        return call.outcome

    async def _until(self, due: float) -> None:
        left = due - time.monotonic()
        if left > 0:
            with trio.move_on_after(left):
                await self._closing.wait()
