"""Every byte, on a real mount over a slow share, while flushes, evictions and kills happen.

WBCACHE_BYTES_SEED=…      repeats the choices of an earlier run, which prints its seed
WBCACHE_BYTES_SECONDS=…   how long the long ones take (a quarter of an hour each by default)
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bytetest.tester import FILLING, ByteTester, Operation, play
from tests.bytetest.worker import RANGES
from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, merge

SEED = "WBCACHE_BYTES_SEED"
SECONDS = float(os.environ.get("WBCACHE_BYTES_SECONDS", "900"))

SMALL_CACHE: dict[str, Any] = {
    "cache": {"size": "64MiB"},
    "policies": [{"match": "filling", "flush": "never"}],
}
AT_ONCE: dict[str, Any] = {"flush": {"idle_delay": "50ms", "max_age": "150ms"}}
SOMETIMES: dict[Operation, int] = {ByteTester.flush: 4, ByteTester.kill: 1}
EVICTING: dict[Operation, int] = {ByteTester.flush: 4, ByteTester.leave_only_on_share: 2}
PROCESSES = 4

pytestmark = pytest.mark.usefixtures("fuse")


@pytest.fixture
def share(tmp_path: Path) -> Iterator[FaultShare]:
    """A share whose calls take a few milliseconds."""
    (tmp_path / "backing").mkdir()
    with FaultShare(tmp_path / "backing", latency_ms=2, jitter_ms=3, log_limit=1000) as share:
        yield share


def _seed(default: int | None = None) -> int:
    given = os.environ.get(SEED)
    seed = int(given) if given else default if default is not None else random.randrange(1 << 32)
    print(f"{SEED}={seed}", flush=True)
    return seed


def _fill(mount: Mounted) -> None:
    """So little room is left that whatever is clean is evicted."""
    (mount.path / "filling").write_bytes(bytes(FILLING))


def _count(operations: int) -> Callable[[int], bool]:
    return lambda done: done < operations


def _until(end: float) -> Callable[[int], bool]:
    return lambda done: time.monotonic() < end


def test_while_flushes_and_evictions_run(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=merge(AT_ONCE, SMALL_CACHE)) as mount:
        _fill(mount)
        play(mount, share.backing, _seed(1), {}, _count(1000))


def test_with_kills(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=AT_ONCE) as mount:
        play(mount, share.backing, _seed(2), SOMETIMES, _count(150))


def test_only_on_the_share(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=merge(NEVER_BY_ITSELF, SMALL_CACHE)) as mount:
        _fill(mount)
        play(mount, share.backing, _seed(3), EVICTING, _count(60))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_for_long(share: FaultShare) -> None:
    seed, until, done = _seed(), time.monotonic() + SECONDS, 0
    while time.monotonic() < until:
        config, extra = [
            (merge(AT_ONCE, SMALL_CACHE), SOMETIMES),
            (AT_ONCE, {**SOMETIMES, ByteTester.kill: 3}),
            (merge(NEVER_BY_ITSELF, SMALL_CACHE), {**EVICTING, ByteTester.kill: 1}),
        ][seed % 3]
        print(f"{SEED}={seed}", flush=True)
        share.set(latency_ms=[0, 2, 20][seed // 3 % 3])
        turn = min(until, time.monotonic() + 60)
        with Mounted(share.mountpoint, config=config) as mount:
            if "policies" in mount.config:
                _fill(mount)
            done += play(mount, share.backing, seed, extra, _until(turn))
        seed += 1
    print(f"{done} operations")


# -- several processes -------------------------------------------------------------------------


def _together(mount: Mounted, backing: Path, logs: Path, seed: int, seconds: float) -> None:
    """Processes share a file for some time; then the mount and the share hold all they wrote."""
    rng = random.Random(seed)
    size = rng.choice([4096, 10_000, 65_536, 70_001])
    shared, lines = mount.path / "shared", mount.path / "lines"
    shared.write_bytes(rng.randbytes(PROCESSES * RANGES * size))
    lines.write_bytes(b"")
    if rng.random() < 0.5:
        mount.flush()
    results = [logs / f"{number}" for number in range(PROCESSES)]
    command = [sys.executable, "-m", "tests.bytetest.worker", str(mount.path)]
    workers = [
        subprocess.Popen(
            [*command, *map(str, (number, PROCESSES, size, seconds, seed + number, path))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, path in enumerate(results)
    ]
    try:
        while any(worker.poll() is None for worker in workers):
            mount.flush(rng.choice(["", "shared", "lines"]))
            for worker in workers:
                assert worker.poll() in (None, 0), "a process found something wrong"
        counts = [int(worker.communicate()[0]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    parts = [path.read_bytes() for path in results]
    wanted = b"".join(
        part[turn * size : (turn + 1) * size] for turn in range(RANGES) for part in parts
    )
    _check(mount.path, wanted, counts)
    mount.flush()
    _check(backing, wanted, counts)


def _check(top: Path, wanted: bytes, counts: list[int]) -> None:
    found = (top / "shared").read_bytes()
    assert len(found) == len(wanted)
    wrong = [i for i in range(0, len(wanted), 512) if found[i : i + 512] != wanted[i : i + 512]]
    assert not wrong, f"{top}: {len(wrong)} pieces differ, from byte {wrong[0]} on"
    seen: dict[int, int] = {}
    for line in (top / "lines").read_bytes().splitlines():
        number, turn = map(int, line.split()[:2])
        assert turn == seen.get(number, 0), f"{top}: line {turn} of process {number}"
        seen[number] = turn + 1
    assert [seen.get(number, 0) for number in range(len(counts))] == counts


def test_several_processes(share: FaultShare, tmp_path: Path) -> None:
    with Mounted(share.mountpoint, config=merge(AT_ONCE, SMALL_CACHE)) as mount:
        _fill(mount)
        _together(mount, share.backing, tmp_path, _seed(4), 2.0)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_several_processes_for_long(share: FaultShare, tmp_path: Path) -> None:
    seed, until = _seed(), time.monotonic() + SECONDS
    with Mounted(share.mountpoint, config=merge(AT_ONCE, SMALL_CACHE)) as mount:
        _fill(mount)
        while time.monotonic() < until:
            print(f"{SEED}={seed}", flush=True)
            _together(mount, share.backing, tmp_path, seed, 20.0)
            mount.kill()
            mount.remount()
            seed += 100
