"""A share that says that it is full, where that is not quite true."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.faults.injection import Call, Fault
from tests.faults.world import faulty_world


@pytest.mark.parametrize("seed", range(10))
def test_what_found_no_room_is_there_all_the_same(tmp_path: Path, seed: int) -> None:
    """Others wait for what becomes of it, and go on though it needs nothing any more."""
    with faulty_world(str(tmp_path), seed) as world:
        for name in ("patched", "to-link", "cut"):
            world.link(name, f"{name}-too")
        refused = dict.fromkeys((b"patched-too", b"to-link-too", b"cut-too"), 0)

        def decide(call: Call) -> Fault | None:
            if call.operation != "link":
                return None
            refused[call.path] += 1
            if refused[call.path] > 2:
                return None
            return Fault(errno.ENOSPC, after=refused[call.path] == 2)

        world.injector.decide = decide
        world.again()
        world.settle()
        assert world.was_full()
        world.check(attributes=False)
        world.check_clean()
