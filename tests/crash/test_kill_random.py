"""SIGKILL at random moments under a mixed load, again and again, on one cache."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.mounting import MountedCache
from tests.crash.rounds import Rounds
from tests.faultshare.client import FaultShare

SEED = "WBCACHE_CRASH_SEED"
"""Environment variable: repeats the choices of an earlier run, which prints its seed."""

pytestmark = [pytest.mark.usefixtures("fuse")]


def seed_of_run() -> int:
    """From the environment, or a new one; it is printed."""
    seed = int(os.environ.get(SEED) or random.randrange(1 << 32))
    print(f"{SEED}={seed}")
    return seed


@contextlib.contextmanager
def _slow_share(base: Path, *lack: str) -> Iterator[Path]:
    """A share where each call takes a few milliseconds, so that most kills meet one under way."""
    backing = base / "backing"
    backing.mkdir()
    with FaultShare(backing, latency_ms=4, jitter_ms=4, lack=lack) as share:
        yield share.mountpoint


def _run(base: Path, source: Path | None, rounds: int, seed: int | None = None) -> None:
    if seed is None:
        seed = seed_of_run()
    with MountedCache(base, source) as mount:
        work = Rounds(mount, seed)
        try:
            work.start()
            for _ in range(rounds):
                work.round()
            work.finish()
        finally:
            work.team.end()
    print(f"{work.team.operations} operations in {rounds} rounds")
    assert work.team.operations > rounds


def test_short_local(tmp_path: Path) -> None:
    _run(tmp_path, None, 6)


def test_short_slow_share(tmp_path: Path) -> None:
    seed = seed_of_run()
    # Without renameat2 a new name is published by another way.
    lack = ["rename_flags"] if seed % 2 else []
    with _slow_share(tmp_path, *lack) as source:
        _run(tmp_path, source, 6, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_local(tmp_path: Path) -> None:
    _run(tmp_path, None, 140)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lack", [[], ["rename_flags"]])
def test_long_slow_share(tmp_path: Path, lack: list[str]) -> None:
    with _slow_share(tmp_path, *lack) as source:
        _run(tmp_path, source, 30)
