"""Random load, faults, kills and remounts: mount, share and model are equal after each drain.

WBCACHE_SOAK_SEED=…      repeats the choices of an earlier run, which prints its seed
WBCACHE_SOAK_SECONDS=…   how long the long one takes (an hour by default)
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted
from tests.soak.soak import CONFIGS, Soak

SEED = "WBCACHE_SOAK_SEED"
SECONDS = float(os.environ.get("WBCACHE_SOAK_SECONDS", "3600"))
SHORT = 50.0

CONFIG = {**CONFIGS[0], "share": {"lookup_deadline": "5s", "deadline": "5s"}}

pytestmark = [pytest.mark.usefixtures("fuse")]


def _run(base: Path, seconds: float, seed: int) -> None:
    print(f"{SEED}={seed}", flush=True)
    (base / "backing").mkdir()
    share = FaultShare(base / "backing", log_limit=50_000)
    with share, Mounted(share.mountpoint, config=CONFIG) as mount:
        soak = Soak(share, mount, base / "logs", seed)
        soak.run(seconds)
    rounds = ", ".join(f"{count} {name}" for name, count in soak.rounds.items())
    print(f"{soak.team.operations} operations, {soak.weather.changes} changes of weather; {rounds}")
    assert soak.team.operations > seconds


@pytest.mark.timeout(400)
def test_short(tmp_path: Path) -> None:
    _run(tmp_path, SHORT, int(os.environ.get(SEED) or 20))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
def test_long(tmp_path: Path) -> None:
    _run(tmp_path, SECONDS, int(os.environ.get(SEED) or random.randrange(1 << 32)))
