"""Random programs that act on a world, and the shortest program that still fails.

Each action has random numbers of its own, so that any of them can be left out and the others do the
same as before.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.flush.contract import Watched
from tests.flush.operations import DEPTH, NAMES
from tests.flush.posix import ModelDirectory, ModelLink, Path
from tests.flush.stepwise import in_steps
from tests.flush.world import Setting, World

Action = tuple[str, int]
"""The name of an operation and the seed of its random numbers."""

ORDINARY = {
    "create": 8, "append": 6, "patch": 4, "restart": 3, "truncate": 3, "open_only": 1, "more": 3,
    "close": 4, "fsync": 1, "read": 1, "mkdir": 5, "symlink": 1, "link": 2, "unlink": 4, "rmdir": 2,
    "remove_tree": 1, "rename": 8, "rename_new": 2, "exchange": 3, "replace": 3, "rotate": 1,
    "chmod": 1, "utimens": 1, "look": 1, "read_directory": 2, "check_mount": 1,
    "turn": 4, "resume": 10, "run": 8, "wait": 4, "drain": 1,
}  # fmt: skip
"""What programs do, and how often."""


@dataclass
class Failure:
    """A program that went wrong."""

    seed: int
    actions: list[Action]
    error: Exception

    def __str__(self) -> str:
        log = "\n  ".join(getattr(self.error, "log", [])[-60:])
        return f"seed {self.seed}: {self.error}\nprogram {self.actions}\n  {log}"


def prepare(world: World, rng: random.Random) -> None:
    """What the share holds at first; nobody has listed it yet."""
    world.random = rng
    directories: list[Path] = [()]
    for _ in range(rng.randint(0, 8)):
        parent, name = rng.choice(directories), rng.choice(NAMES)
        entries = world.model.directory(parent).entries
        path = os.path.join(os.fsencode(world.share), *parent, name)
        if name in entries:
            continue
        kind = rng.random()
        if kind < 0.4 and len(parent) < DEPTH:
            os.mkdir(path)
            os.chmod(path, 0o755)
            entries[name] = ModelDirectory()
            directories.append((*parent, name))
        elif kind < 0.5:
            target = world.fresh()
            os.symlink(target, path)
            entries[name] = ModelLink(target)
        else:
            data = world.fresh()
            with open(path, "wb") as file:
                file.write(data)
            os.chmod(path, 0o644)
            entries[name] = world.new_file(data)


def program(seed: int, setting: Setting) -> list[Action]:
    """A random program."""
    rng = random.Random(seed)
    names, weights = list(setting.weights), list(setting.weights.values())
    length = rng.randint(setting.length // 4, setting.length)
    return [(name, rng.getrandbits(32)) for name in rng.choices(names, weights, k=length)]


def execute(place: str, seed: int, setting: Setting, actions: list[Action]) -> None:
    """Run a program from a fresh start, then drain, and compare the share and the mount with the
    model."""
    world = Watched(place, setting)
    with in_steps():
        prepare(world, random.Random(seed))
        world.start()
        try:
            for name, number in actions:
                world.random = random.Random(number)
                world.log.append(f"-- {name}")
                action: Callable[[], Coroutine[Any, Any, None]] = getattr(world, name)
                world.perform(action())
            world.random = random.Random(seed)
            world.faults = False
            world.settle()
            world.perform(world.compare_share())
            world.perform(world.compare_mount())
        except Exception as error:
            error.log = world.log  # type: ignore[attr-defined]
            raise
        finally:
            world.stop()


def run_program(place: str, seed: int, setting: Setting) -> Failure | None:
    """Run the program of a seed; when it fails, look for a shorter one that fails too."""
    actions = program(seed, setting)
    error = _attempt(place, seed, setting, actions)
    if error is None:
        return None
    actions = _shrink(place, seed, setting, actions)
    return Failure(seed, actions, _attempt(place, seed, setting, actions) or error)


def _attempt(place: str, seed: int, setting: Setting, actions: list[Action]) -> Exception | None:
    try:
        execute(place, seed, setting, actions)
    except Exception as error:
        return error
    return None


def _shrink(place: str, seed: int, setting: Setting, actions: list[Action]) -> list[Action]:
    size = max(1, len(actions) // 2)
    while True:
        at, shorter = 0, False
        while at < len(actions):
            candidate = actions[:at] + actions[at + size :]
            if _attempt(place, seed, setting, candidate) is not None:
                actions, shorter = candidate, True
            else:
                at += size
        if size == 1 and not shorter:
            return actions
        size = max(1, size // 2)
