"""The mount and a plain directory, through random programs.

WBCACHE_MODEL_SEED=…      repeats the choices of an earlier long run, which prints its seed
WBCACHE_MODEL_SECONDS=…   how long the long one takes (half an hour by default)
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.model.programs import Step, execute, programs, settings_of_mounts
from tests.model.world import Setting

SEED = "WBCACHE_MODEL_SEED"
SECONDS = float(os.environ.get("WBCACHE_MODEL_SECONDS", "1800"))
BATCH = 200
"""Programs between two looks at the clock."""

ALWAYS = settings(
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


def _run(setting: Setting, program: list[Step]) -> None:
    with tempfile.TemporaryDirectory(prefix="model-") as place:
        execute(Path(place), setting, program)


@seed(1)
@settings(ALWAYS, max_examples=60)
@given(settings_of_mounts, programs(60))
def test_random_programs(setting: Setting, program: list[Step]) -> None:
    _run(setting, program)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
def test_for_long() -> None:
    first = int(os.environ.get(SEED) or random.randrange(1 << 32))
    print(f"{SEED}={first}", flush=True)
    until, batch = time.monotonic() + SECONDS, 0
    while time.monotonic() < until:

        @seed(first + batch)
        @settings(ALWAYS, max_examples=BATCH)
        @given(settings_of_mounts, programs(60 if batch % 3 else 250))
        def run(setting: Setting, program: list[Step]) -> None:
            _run(setting, program)

        run()
        batch += 1
    print(f"{batch * BATCH} programs")
