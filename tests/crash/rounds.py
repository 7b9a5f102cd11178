"""Rounds of work and SIGKILL on one cache, with every acknowledged operation checked after each."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.model import Model, Operation, after_kill, differences
from tests.crash.mounting import MountedCache, leftovers

WORKERS = 3
WORKER_DEADLINE = 20.0
DELAYS = ("0s", "50ms", "300ms", "2s")
AGES = ("200ms", "1s", "30s")


@dataclass
class _Worker:
    """One worker's directory: what it should hold, as far as that is known."""

    name: str
    model: Model = field(default_factory=Model)
    process: subprocess.Popen[bytes] | None = None
    operations: int = 0


class Rounds:
    """Runs rounds on a mount; every random choice follows from the seed."""

    def __init__(self, mount: MountedCache, seed: int, *, max_seconds: float = 1.5) -> None:
        self._mount = mount
        self._seed = seed
        self._random = random.Random(seed)
        self._max_seconds = max_seconds
        self._round = 0
        self._workers = [_Worker(f"w{number}") for number in range(WORKERS)]
        self._logs = mount.base / "logs"
        self._logs.mkdir()

    @property
    def operations(self) -> int:
        """How many operations were acknowledged so far."""
        return sum(worker.operations for worker in self._workers)

    def start(self) -> None:
        """The first mount, with an empty directory for each worker."""
        self._configure()
        self._mount.mounted()
        for worker in self._workers:
            (self._mount.mountpoint / worker.name).mkdir(mode=0o755)

    def round(self) -> None:
        """Work, kill, mount, check."""
        self._round += 1
        self._start_workers()
        time.sleep(self._random.choice([0.05, 1.0]) * self._random.random() * self._max_seconds)
        umount = None
        if self._random.random() < 0.15:
            # In the middle of a drain.
            self._stop_workers()
            umount = self._mount.start_command("umount", self._mount.mountpoint)
            time.sleep(self._random.random() * 0.5)
        pid = self._mount.pid
        self._mount.kill()
        if umount is not None:
            umount.wait(WORKER_DEADLINE)
        under_way = self._end_workers()
        if self._random.random() < 0.5:
            self._mount.wait_for_end(pid)
        self._configure()
        self._mount.mounted()
        if self._random.random() < 0.1:
            # Killed again, perhaps before it has found out what became of the last one's calls.
            time.sleep(self._random.random() * 0.05)
            self._mount.kill()
            self._mount.mounted()
        self._check(under_way)

    def finish(self) -> None:
        """Unmount; the share holds what the mount held, and nothing else."""
        self._mount.drained()
        wrong = []
        for worker in self._workers:
            directory = str(self._mount.source / worker.name)
            wrong += differences(directory, worker.model, on_share=True)
        top = set(os.listdir(self._mount.source)) - {worker.name for worker in self._workers}
        wrong += [f"{name}: should not be on the share" for name in top - {".wbcache"}]
        wrong += [f"{path}: left behind" for path in leftovers(self._mount.source)]
        assert not wrong, self._describe("the share differs", wrong)

    def _configure(self) -> None:
        self._mount.configure(
            idle_delay=self._random.choice(DELAYS), max_age=self._random.choice(AGES)
        )

    # -- workers -------------------------------------------------------------------------------

    def _log_path(self, worker: _Worker) -> Path:
        return self._logs / f"{worker.name}-{self._round}.log"

    def _start_workers(self) -> None:
        for worker in self._workers:
            worker.model.handles.clear()
            state = self._logs / f"{worker.name}.state"
            state.write_bytes(pickle.dumps(worker.model))
            directory = self._mount.mountpoint / worker.name
            seed = f"{self._seed}/{self._round}/{worker.name}"
            worker.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.crash.worker"),
                    *(str(directory), str(state), str(self._log_path(worker)), seed),
                ],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
            )

    def _stop_workers(self) -> None:
        for worker in self._workers:
            assert worker.process is not None
            worker.process.send_signal(signal.SIGTERM)
        for worker in self._workers:
            assert worker.process is not None
            worker.process.wait(WORKER_DEADLINE)

    def _end_workers(self) -> dict[str, Operation]:
        """Wait for the workers of a dead mount; returns what each was doing when it died."""
        under_way = {}
        for worker in self._workers:
            assert worker.process is not None
            worker.process.wait(WORKER_DEADLINE)
            worker.process = None
            if (operation := self._replay(worker)) is not None:
                under_way[worker.name] = operation
        return under_way

    def kill_workers(self) -> None:
        """End the workers, whatever they do: for the end of a failed test."""
        for worker in self._workers:
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait(WORKER_DEADLINE)

    def _replay(self, worker: _Worker) -> Operation | None:
        path = self._log_path(worker)
        last: Operation | None = None
        for line in path.read_text().splitlines() if path.exists() else ():
            word, *rest = json.loads(line)
            if word == "try":
                last = rest[0]
            elif word == "done":
                assert last is not None
                worker.model.apply(last)
                worker.operations += 1
                last = None
            else:
                raise AssertionError(self._describe(worker.name, [str(rest), f"at {last}"]))
        return last

    # -- checks --------------------------------------------------------------------------------

    def _check(self, under_way: dict[str, Operation]) -> None:
        for worker in self._workers:
            directory = str(self._mount.mountpoint / worker.name)
            try:
                worker.model = after_kill(directory, worker.model, under_way.get(worker.name))
            except AssertionError as error:
                raise AssertionError(self._describe(worker.name, [str(error)])) from None

    def _describe(self, what: str, wrong: list[str]) -> str:
        lines = [f"seed {self._seed}, round {self._round}: {what}", *wrong[:20], self._mount.log()]
        return "\n".join(lines)
