"""How many steps are under way at a time, and which of them the share does not answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from wbcache.config import FlushConfig
from wbcache.flush.plan import Step, directories
from wbcache.node import Directory

LATE_IN_ONE = 8
"""Steps in one directory that are late; no more begin there then."""

MOST_LATE = 128
"""Late steps that leave their workers to others. Each keeps a thread."""


@dataclass(eq=False)
class Worker:
    """What one step under way takes."""

    large: bool
    directories: list[Directory]
    orders: int
    """How often a flush had been asked for when the step began."""
    is_held: bool = True
    """The step has it, and nobody else can."""
    is_late: bool = False
    """The share does not answer the step, though it answers others."""


class Workers:
    """A few for large files, many for everything else."""

    def __init__(self, config: FlushConfig) -> None:
        self._config = config
        self._large = 0
        self._small = 0
        self.orders = 0
        """How often a flush was asked for."""
        self._late: Counter[Directory] = Counter()
        self._late_steps = 0

    @property
    def idle_large(self) -> int:
        """How many more large files may move."""
        return self._config.workers - self._large

    @property
    def idle_small(self) -> int:
        """How many more steps of other kinds may begin."""
        return max(0, self._config.small_workers - self._small)

    def forbid(self, step: Step) -> bool:
        """Whether a step would only join those that are not answered."""
        return bool(self._late) and any(
            self._late[directory] >= LATE_IN_ONE for directory in directories(step)
        )

    def take(self, step: Step, *, large: bool) -> Worker:
        """A step begins."""
        if large:
            self._large += 1
        else:
            self._small += 1
        return Worker(large, directories(step), self.orders)

    def let_pass(self, worker: Worker) -> bool:
        """The share does not answer a step; returns whether another has its place now."""
        if not worker.is_held or self._late_steps >= MOST_LATE:
            return False
        self._give_back(worker)
        worker.is_late = True
        self._late_steps += 1
        self._late.update(worker.directories)
        return True

    def release(self, worker: Worker) -> None:
        """A step needs its worker no more."""
        if worker.is_held:
            self._give_back(worker)
        if not worker.is_late:
            return
        self._late_steps -= 1
        self._late.subtract(worker.directories)
        self._late = +self._late

    def _give_back(self, worker: Worker) -> None:
        worker.is_held = False
        if worker.large:
            self._large -= 1
        else:
            self._small -= 1
