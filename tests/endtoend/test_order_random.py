"""Random training runs over a share that is slow, stuck or fast; every state of it is judged."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.endtoend.checkpoints import SAVERS, save_by_rename, save_plainly
from tests.endtoend.history import History, Judge, Reader, Value
from tests.endtoend.stage import Stage
from tests.faultshare.client import FaultShare

pytestmark = pytest.mark.timeout(300)

CONFIG = {"flush": {"idle_delay": "0", "max_age": "1h"}}

LOGS = ("train.log", "logs/events")

PASSING = (".part", ".new")
"""Names that a file has for a moment within one operation."""


class Run:
    """A program that saves, rotates, logs and points, one operation after the other."""

    def __init__(self, top: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.history = History(LOGS)
        self._top = top
        self._reader = Reader()
        self._step = 0
        self._files: list[str] = []
        self._directories: list[str] = []
        self._point = self.rng.choice([self._point_plainly, self._point_by_rename, self._link])
        self._moves: list[tuple[Callable[[], None], int]] = [
            (self._save_file, 4),
            (self._save_directory, 3),
            (self._rotate, 5),
            (self._log, 6),
            (self._point, 3),
            (self._scratch, 2),
            (self._move, 1),
        ]

    def step(self) -> None:
        """One operation of the program."""
        moves, weights = zip(*self._moves, strict=True)
        self.rng.choices(moves, weights)[0]()

    def _done(self, moved: tuple[str, str] | None = None) -> None:
        self.history.record(self._reader.read(self._top), moved)

    def _data(self) -> bytes:
        return self.rng.randbytes(self.rng.choice([1, 500, 5_000, 60_000, 300_000]))

    def _save_file(self) -> None:
        self._step += 1
        name = self.rng.choice(["", "models/"]) + f"step-{self._step}.ckpt"
        (self._top / name).parent.mkdir(exist_ok=True)
        self.rng.choice(SAVERS)(self._top / name, self._data())
        self._files.append(name)
        self._done()

    def _save_directory(self) -> None:
        self._step += 1
        final = self._top / f"run-{self._step}"
        renamed = self.rng.random() < 0.7
        made = final.with_suffix(".tmp") if renamed else final
        (made / "shards").mkdir(parents=True)
        self._done()
        for shard in range(self.rng.randrange(1, 4)):
            (made / "shards" / f"{shard}.bin").write_bytes(self._data())
            self._done()
        if self.rng.random() < 0.5:
            (made / "DONE").write_bytes(b"done")
            self._done()
        if renamed:
            os.rename(made, final)
            self._done((made.name, final.name))
        self._directories.append(final.name)

    def _rotate(self) -> None:
        if len(self._files) > 1 and self.rng.random() < 0.6:
            (self._top / self._files.pop(0)).unlink()
        elif len(self._directories) > 1:
            shutil.rmtree(self._top / self._directories.pop(0))
        self._done()

    def _log(self) -> None:
        path = self._top / self.rng.choice(LOGS)
        path.parent.mkdir(exist_ok=True)
        with open(path, "ab") as file:
            file.write(self.rng.randbytes(self.rng.randrange(1, 200)))
        self._done()

    def _newest(self) -> str:
        return (self._files or self._directories or ["nothing"])[-1]

    def _point_plainly(self) -> None:
        save_plainly(self._top / "latest", f"{self._newest()} {self.history.now}".encode())
        self._done()

    def _point_by_rename(self) -> None:
        save_by_rename(self._top / "latest", f"{self._newest()} {self.history.now}".encode())
        self._done()

    def _link(self) -> None:
        os.symlink(self._newest(), self._top / "latest.new")
        os.replace(self._top / "latest.new", self._top / "latest")
        self._done()

    def _scratch(self) -> None:
        (self._top / "scratch").mkdir()
        (self._top / "scratch" / "file").write_bytes(self._data())
        self._done()
        shutil.rmtree(self._top / "scratch")
        self._done()

    def _move(self) -> None:
        if len(self._files) > 2:
            old = self._files.pop(1)
            new = f"models/moved-{Path(old).name}"
            (self._top / "models").mkdir(exist_ok=True)
            os.rename(self._top / old, self._top / new)
            self._files.append(new)
            self._done((old, new))


class JudgeOfNew(Judge):
    """Does not mind what is taken away too early: on a full share nothing else may help."""

    def _nothing_is_lost(self, shown: dict[str, Value]) -> None:
        pass


def limit(share: FaultShare, rng: random.Random) -> None:
    """Let the share hold little more than it does."""
    held = 0
    for directory, _, files in os.walk(share.backing):
        for name in files:
            with contextlib.suppress(FileNotFoundError):  # things move all the time
                held += os.lstat(os.path.join(directory, name)).st_size
    share.quota(held + rng.choice([0, 5_000, 50_000, 400_000, 1_000_000]))


def run_and_judge(
    stage: Stage, tmp_path: Path, seed: int, steps: int, *, full: bool = False
) -> None:
    run = Run(stage.path, seed)
    said = len(stage.mount.log())
    rng = random.Random(-seed)
    share = stage.share
    share.set(latency_ms=rng.choice([0, 2, 5]), jitter_ms=rng.choice([0, 3]))
    stuck = 0
    for _ in range(steps):
        run.step()
        chance = rng.random()
        if stuck and chance < 0.2:
            share.release(stuck)
            stuck = 0
        elif not stuck and chance < 0.1:
            stuck = share.hang(["mutations"], f"{stage.name}/*")
        elif chance < 0.3:
            time.sleep(rng.random() * 0.06)  # a pace of its own, not a wait for anything
        if full and rng.random() < 0.2:
            limit(share, rng)
    if full:
        stage.mount.client.flush([b""], 1.0)
    share.clear()
    stage.settle()

    suspended = "order suspended" in stage.mount.log()[said:]
    judge = (JudgeOfNew if suspended else Judge)(run.history, unordered=("latest",))
    reader = Reader()
    for number, top in enumerate(stage.states(tmp_path / "replay")):
        try:
            shown = reader.read(top)
            judge.look({p: v for p, v in shown.items() if not p.endswith(PASSING)})
        except AssertionError as error:
            error.add_note(f"seed {seed}, state {number}") if hasattr(error, "add_note") else None
            raise


@pytest.mark.parametrize("seed", range(6))
def test_every_state_of_the_share_can_be_trusted(stage: Stage, tmp_path: Path, seed: int) -> None:
    run_and_judge(stage, tmp_path, seed, 70)


@pytest.mark.parametrize("seed", range(1000, 1003))
def test_every_state_of_a_full_share_can_be_trusted(
    stage: Stage, tmp_path: Path, seed: int
) -> None:
    run_and_judge(stage, tmp_path, seed, 60, full=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1100, 1160))
def test_every_state_of_a_full_share_can_be_trusted_at_length(
    stage: Stage, tmp_path: Path, seed: int
) -> None:
    run_and_judge(stage, tmp_path, seed, 120, full=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_every_state_of_the_share_can_be_trusted_at_length(
    stage: Stage, tmp_path: Path, seed: int
) -> None:
    run_and_judge(stage, tmp_path, seed, 200)
