"""Several workers on one mount, each in a directory of its own, and what those should hold.

A worker that works when its daemon is killed ends by itself; `collect` then says what it was doing.
Every random choice of a worker follows from the seed, the round and its name.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.churn.model import Model, Operation, after_kill, differences

WORKERS = 3
DEADLINE = 20.0
HISTORY = 12
"""Operations that are shown of a worker when something is wrong."""


@dataclass
class _Worker:
    """One worker's directory: what it should hold, as far as that is known."""

    name: str
    model: Model = field(default_factory=Model)
    process: subprocess.Popen[bytes] | None = None
    operations: int = 0
    log: Path = Path()
    under_way: Operation | None = None
    """What it was doing when its daemon died, unless it was between two operations."""


class Wrong(AssertionError):
    """The mount or the share is not as it should be."""


class Team:
    """The workers of one mount."""

    def __init__(self, mountpoint: Path, logs: Path, seed: int) -> None:
        """``logs`` is made; the workers keep their logs there, one a round."""
        self._mountpoint = mountpoint
        self._logs = logs
        self._seed = seed
        self._round = 0
        self._workers = [_Worker(f"w{number}") for number in range(WORKERS)]
        logs.mkdir()

    @property
    def operations(self) -> int:
        """How many operations were acknowledged so far."""
        return sum(worker.operations for worker in self._workers)

    @property
    def names(self) -> set[str]:
        """The workers' directories."""
        return {worker.name for worker in self._workers}

    @property
    def directories(self) -> int:
        """How many directories the models hold."""
        return sum(worker.model.directories() for worker in self._workers)

    def make_directories(self) -> None:
        """An empty directory for each worker."""
        for worker in self._workers:
            (self._mountpoint / worker.name).mkdir(mode=0o755)

    def start(self) -> None:
        """A round begins: every worker works until its daemon dies or it is stopped."""
        self._round += 1
        for worker in self._workers:
            worker.model.handles.clear()
            state = self._logs / f"{worker.name}.state"
            state.write_bytes(pickle.dumps(worker.model))
            worker.log = self._logs / f"{worker.name}-{self._round}.log"
            directory = self._mountpoint / worker.name
            seed = f"{self._seed}/{self._round}/{worker.name}"
            worker.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.churn.worker"),
                    *(str(directory), str(state), str(worker.log), seed),
                ],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
            )

    def stop(self) -> None:
        """Tell the workers to stop after the operations they are at."""
        for worker in self._workers:
            assert worker.process is not None
            worker.process.send_signal(signal.SIGTERM)

    def collect(self, deadline: float = DEADLINE) -> None:
        """Wait until the workers have ended and take over what they did. Raises Wrong when one of
        them says so, or has died."""
        for worker in self._workers:
            assert worker.process is not None
            try:
                code = worker.process.wait(deadline)
            except subprocess.TimeoutExpired:
                raise Wrong(self._describe(worker, [f"does not end in {deadline:g} s"])) from None
            worker.process = None
            self._replay(worker)
            # SIGTERM ends one that has not begun yet, or has finished.
            mapped = worker.under_way is not None and worker.under_way[0] == "map"
            # A page of a mapping whose daemon has died cannot be had.
            if code not in (0, -signal.SIGTERM) and not (code == -signal.SIGBUS and mapped):
                raise Wrong(self._describe(worker, [f"the worker ended with {code}"]))

    def end(self) -> None:
        """End the workers, whatever they do: for the end of a failed test."""
        for worker in self._workers:
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait(DEADLINE)
                worker.process = None

    def check_mount(self) -> None:
        """The mount holds what was acknowledged. Raises Wrong otherwise."""
        for worker in self._workers:
            directory = str(self._mountpoint / worker.name)
            try:
                worker.model = after_kill(directory, worker.model, worker.under_way)
            except AssertionError as error:
                raise Wrong(self._describe(worker, str(error).splitlines())) from None
            worker.under_way = None

    def check_share(self, directory: Path) -> None:
        """After a drain the share holds the same. Raises Wrong otherwise."""
        for worker in self._workers:
            if wrong := differences(str(directory / worker.name), worker.model, on_share=True):
                raise Wrong(self._describe(worker, ["the share differs", *wrong]))

    def _replay(self, worker: _Worker) -> None:
        last: Operation | None = None
        text = worker.log.read_text() if worker.log.exists() else ""
        for line in text.splitlines():
            word, *rest = json.loads(line)
            if word == "try":
                last = rest[0]
            elif word == "done":
                assert last is not None
                worker.model.apply(last)
                worker.operations += 1
                last = None
            elif word == "skipped":
                last = None
            else:
                raise Wrong(self._describe(worker, [str(rest), f"at {last}"]))
        worker.under_way = last

    def _describe(self, worker: _Worker, wrong: list[str]) -> str:
        """What is wrong, and what the worker did lately to the paths that are spoken of."""
        lines = [f"seed {self._seed}, round {self._round}, {worker.name}:", *wrong[:20]]
        text = "\n".join(wrong)
        history: list[str] = []
        for number in range(1, self._round + 1):
            log = self._logs / f"{worker.name}-{number}.log"
            for line in log.read_text().splitlines() if log.exists() else ():
                word, *rest = json.loads(line)
                paths = [str(part) for part in rest[0][1:]] if word == "try" else []
                if any(path and f"/{path}:" in text for path in paths):
                    history.append(f"round {number}: {rest[0]}")
        return "\n".join([*lines, f"what it did there (logs: {self._logs}):", *history[-HISTORY:]])
