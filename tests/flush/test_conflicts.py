"""Another writer changes the share behind the mount's back: both sides are kept.

A program of ordinary operations is flushed in part; then somebody else writes on the share, while
the mount goes on with what it last knew. After the drain every byte of both is on the share.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.flush.posix import ModelFile
from tests.flush.programs import ORDINARY, prepare
from tests.flush.stepwise import in_steps
from tests.flush.stepworld import SteppedWorld
from tests.flush.world import Setting
from tests.volumes import leftovers, snapshot
from wbcache.node import Directory
from wbcache.share.names import is_hidden

LOCAL = {
    "create": 8, "append": 8, "patch": 4, "restart": 4, "truncate": 3, "mkdir": 4, "unlink": 5,
    "symlink": 1, "rmdir": 2, "rename": 6, "exchange": 2, "replace": 4, "chmod": 1, "utimens": 1,
}  # fmt: skip


class Other:
    """Somebody who writes on the share."""

    def __init__(self, world: SteppedWorld, rng: random.Random) -> None:
        self.world, self.random = world, rng
        self.written: set[bytes] = set()
        """What has to be found at the end."""
        self.replaced: set[bytes] = set()
        """What was on the share, and is not to be expected there any more."""

    def act(self) -> None:
        """Make, change or replace a file that the mount does not know, or knows otherwise.

        Only where the mount has listed: elsewhere it would look first.
        """
        path = self.random.choice(self.places())
        name = self.random.choice([b"a", b"b", b"c", b"d"])
        at = os.path.join(path, name)
        self.world.written += 1
        data = f"[theirs {self.world.written}]".encode()
        if os.path.islink(at) or os.path.isdir(at):
            return
        if os.path.exists(at):
            with open(at, "rb") as file:
                self.replaced.add(file.read())
            if self.random.random() < 0.5:
                os.unlink(at)
        with open(at, "wb") as file:
            file.write(data)
        self.written = {d for d in self.written if self.is_there(d)} | {data}

    def is_there(self, data: bytes) -> bool:
        """Whether a file with these bytes is on the share."""
        return any(entry[1] == data for entry in snapshot(self.world.share).values())

    def places(self) -> list[bytes]:
        """Directories of the share whose listing the mount believes it knows."""
        found = []
        stack: list[tuple[bytes, Directory]] = [
            (os.fsencode(self.world.share), self.world.tree.root)
        ]
        while stack:
            path, directory = stack.pop()
            if directory.listed_at is not None:
                found.append(path)
            for name, node in directory.share.items():
                if isinstance(node, Directory) and not is_hidden(name, at_root=False):
                    stack.append((os.path.join(path, name), node))
        return found


def play(world: SteppedWorld, seed: int) -> None:
    rng = random.Random(seed)
    prepare(world, rng)
    world.start()
    for name in rng.choices(list(ORDINARY), list(ORDINARY.values()), k=rng.randint(0, 20)):
        world.perform(getattr(world, name)())
    while world.tasks:  # a patch of which only a part is there explains anything
        world.tasks.resume(rng)
    world.perform(world.compare_mount())
    other = Other(world, rng)
    for _ in range(rng.randint(1, 8)):
        other.act()
        name = rng.choices(list(LOCAL), list(LOCAL.values()))[0]
        world.perform(getattr(world, name)())
    if rng.random() < 0.3:
        world.kill()
    settle(world)
    judge(world, other)


def settle(world: SteppedWorld) -> None:
    """Drain; what can't be completed may remain, with its reason."""
    try:
        world.settle()
    except AssertionError:
        stuck = [n for n in world.tree.dirty if n.trouble is None and not world.tree.excluded(n)]
        troubled = [n for n in world.tree.dirty if n.trouble is not None]
        assert troubled, f"nothing moves: {stuck}"


def judge(world: SteppedWorld, other: Other) -> None:
    found = snapshot(world.share)
    troubled = [node for node in world.tree.nodes.values() if node.trouble]
    assert troubled or not leftovers(found)
    shown = [data for _, data, *_ in found.values()]
    for data in other.written:
        assert data in shown, f"{data!r} of the other writer is gone: {sorted(found)}"
    for path, entry in world.model.walk():
        if isinstance(entry, ModelFile) and entry.closed and not entry.writers:
            node = world.tree.nodes.get(entry.ino)
            # What can't be completed is told, and holds back what is near it.
            told = node is not None and node.dirty is not None and bool(troubled)
            ours = entry.data in {*shown, *other.replaced}
            assert ours or told, f"{path}: {entry.data!r} is gone: {found}"


@pytest.mark.parametrize("seed", range(300))
def test_both_sides_are_kept(tmp_path: object, seed: int) -> None:
    with in_steps():
        world = SteppedWorld(str(tmp_path), Setting(ORDINARY))
        try:
            play(world, seed)
        finally:
            world.stop()
