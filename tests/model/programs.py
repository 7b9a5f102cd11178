"""Programs that hypothesis makes up, and makes shorter when they fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio
from hypothesis import currently_in_test_context, note
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.faults.injection import injected
from tests.model.actions import Actions
from tests.model.gate import Gate, by_hand
from tests.model.world import Setting
from wbcache.share.capabilities import Capabilities

Step = tuple[str, int, int, int]
"""The name of an action and its numbers."""

WEIGHTS = {
    "nothing": 1,
    "open_file": 12, "write": 8, "read": 5, "read_file": 4, "close_file": 6, "fsync": 2,
    "truncate": 6, "replace": 3, "late_read": 2, "arrive": 2,
    "mkdir": 4, "symlink": 1, "link": 2, "unlink": 4, "rmdir": 2, "remove_tree": 1, "rename": 7,
    "chmod": 2, "chown": 1, "utimens": 2, "set_xattr": 2,
    "opendir": 1, "readdir": 2, "list": 2, "forget": 1,
    "steps": 12, "run": 6, "wait": 6, "flush_all": 2, "look": 2, "evict": 4,
    "fail": 3, "fail_reading": 1, "hang": 1, "slow_disk": 1, "kill": 2, "outside": 1,
}  # fmt: skip
"""What programs do, and how often."""

_NAMES = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
_NUMBERS = st.integers(0, (1 << 12) - 1)

CAPABILITIES = [
    Capabilities(),
    Capabilities(noreplace=False),
    Capabilities(noreplace=False, link=False),
]


def programs(longest: int) -> st.SearchStrategy[list[Step]]:
    """Programs of up to so many actions."""
    step = st.tuples(st.sampled_from(_NAMES), _NUMBERS, _NUMBERS, _NUMBERS)
    # Of lists with only a limit hypothesis makes short ones.
    lengths = st.integers(1, longest)
    return lengths.flatmap(lambda length: st.lists(step, min_size=length, max_size=length))


settings_of_mounts = st.builds(Setting, st.booleans(), st.sampled_from(CAPABILITIES))


def execute(place: Path, setting: Setting, program: Sequence[Step]) -> None:
    """Run a program from an empty share, then drain and compare."""
    clock = MockClock()
    gate = Gate()
    world = Actions(str(place), setting, clock)

    failure: list[Exception] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world.nursery = nursery
            await world.start(gate)
            try:
                for step, *numbers in [action for action in program if action[0] != "nothing"]:
                    world.log.append(f"{step} {numbers}")
                    world.lag = numbers[-1] // 512 % 4
                    await getattr(world, step)(*numbers)
                world.lag = 0
                await world.drain()
            except Exception as error:  # without the nursery's exception groups around it
                failure.append(error)
            await world.stop()
            nursery.cancel_scope.cancel()

    with by_hand(gate), injected(world.injector):
        try:
            trio.run(main, clock=clock)
        finally:
            world.close()
    if failure:
        if currently_in_test_context():
            note("\n".join(world.log[-80:]))
        raise failure[0]
