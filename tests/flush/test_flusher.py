"""The flusher in its own event loop and threads, on a real directory: random operations, kills and
drains, after which the share is the model byte for byte.

`test_plan` has the same operations in chosen steps; here the interleaving is the machine's, and
files are large enough to be written and copied in threads.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from tests.flush.operations import Operations
from tests.flush.programs import ORDINARY, prepare
from tests.flush.stepworld import SteppedWorld
from tests.volumes import QUICK, mounted

OPERATIONS = {
    name: weight for name, weight in ORDINARY.items() if not hasattr(SteppedWorld, name)
    or hasattr(Operations, name)
}  # fmt: skip
"""What programs do, without what is done in steps."""


class Live(Operations):
    """A world whose mount lives by itself."""

    async def ready(self) -> None:
        await self.volume.settled.wait()


async def play(world: Live, cache: str, rng: random.Random, *, kills: int) -> None:
    """Operations on a mount that is killed a few times, then a drain."""
    names, weights = list(OPERATIONS), list(OPERATIONS.values())
    for last in [False] * kills + [True]:
        async with mounted(world.share, cache, config=QUICK) as mount:
            world.attach(mount.volume, mount.filesystem, mount.flusher)
            await world.compare_mount()
            for name in rng.choices(names, weights, k=rng.randint(5, 40)):
                await getattr(world, name)()
                if rng.random() < 0.2:
                    await trio.sleep(rng.uniform(0, 0.02))
            if last:
                await mount.drain()
                await world.compare_share()
                await world.compare_mount()
        world.detach()


@pytest.mark.parametrize("seed", range(40))
async def test_a_drain_brings_everything(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    (tmp_path / "share").mkdir()
    world = Live(str(tmp_path / "share"))
    prepare(world, rng)
    world.longest = rng.choice([12, 12, 200_000])
    await play(world, str(tmp_path / "cache"), rng, kills=rng.randint(0, 3))


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_many_more(tmp_path: Path) -> None:
    for seed in range(1000, 3000):
        rng = random.Random(seed)
        place = tmp_path / str(seed)
        (place / "share").mkdir(parents=True)
        world = Live(str(place / "share"))
        prepare(world, rng)
        world.longest = rng.choice([12, 12, 200_000])
        try:
            await play(world, str(place / "cache"), rng, kills=rng.randint(0, 3))
        except BaseException:
            print(f"seed {seed}")
            raise
