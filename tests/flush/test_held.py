"""A file that is written for long holds back what is near it for ten minutes, not for days."""

from __future__ import annotations

import os
from pathlib import Path

from tests.faults.world import FaultyWorld, faulty_world, shape


def go_on(world: FaultyWorld, seconds: float) -> None:
    """Let time pass, and everything be flushed that is due then."""
    world.pass_time(seconds)
    while world.advance():
        pass


def test_a_log_that_is_begun_anew_arrives_while_it_is_written(tmp_path: Path) -> None:
    """`train.py > log` over the log of the last run, with checkpoints beside it."""
    with faulty_world(str(tmp_path)) as world:
        world.write("log", b"of the last run")
        world.write("ckpt", b"1")
        world.settle()
        log = world.open("log", os.O_WRONLY | os.O_TRUNC)
        world.add(log, b"started\n")
        world.write("tmp", b"2")
        world.rename("tmp", "ckpt")
        for step in range(20):
            world.add(log, b"step %d\n" % step)
            go_on(world, 30.0)
        assert shape(world.share)["log"][1] == b"of the last run"
        assert shape(world.share)["ckpt"][1] == b"1"
        for step in range(3):
            world.add(log, b"step %d\n" % step)
            go_on(world, 30.0)
        assert shape(world.share)["log"][1].startswith(b"started\nstep 0\n")
        assert shape(world.share)["ckpt"][1] == b"2"
