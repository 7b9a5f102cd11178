"""A directory that the share, or the client that reaches it, still sees where it was."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.faults.injection import Call, Fault
from tests.faults.world import FaultyWorld, faulty_world
from tests.faultshare.client import FaultShare
from tests.flush.stepworld import StuckError
from tests.mounting import NEVER_BY_ITSELF, Mounted, contents
from wbcache.node import Directory


def refuse_renames(world: FaultyWorld, times: float) -> list[Call]:
    """A directory can't be moved into itself, it says; what it was asked comes in the list."""
    asked: list[Call] = []

    def decide(call: Call) -> Fault | None:
        if call.operation != "rename" or len(asked) >= times:
            return None
        asked.append(call)
        return Fault(errno.EINVAL)

    world.injector.decide = decide
    return asked


@pytest.mark.parametrize("seed", range(3))
def test_that_it_would_go_into_itself_is_not_believed_at_once(tmp_path: Path, seed: int) -> None:
    with faulty_world(str(tmp_path), seed) as world:
        world.rename("to-move", "tree/moved")
        asked = refuse_renames(world, 1)
        world.again()
        world.settle()
        assert asked and not world.events()
        world.check(attributes=False)


def test_a_refusal_that_stays_is_believed(tmp_path: Path) -> None:
    with faulty_world(str(tmp_path)) as world:
        world.rename("to-move", "tree/moved")
        asked = refuse_renames(world, float("inf"))
        world.again()
        with pytest.raises(StuckError):
            world.settle()
        assert len(asked) == 2
        assert any("quarantined" in text for text in world.events())
        world.injector.decide = lambda call: None
        world.again()
        world.settle()
        world.check(attributes=False)


@pytest.mark.usefixtures("fuse")
def test_the_kernel_of_a_share_that_lost_an_answer(tmp_path: Path) -> None:
    """It goes on seeing the directory where it was, and what held it can't be moved below."""
    with FaultShare(tmp_path) as share, Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
        top = mount.path
        (top / "old" / "deep" / "inner").mkdir(parents=True)
        (top / "new").mkdir()
        (top / "old" / "deep" / "inner" / "file").write_bytes(b"bytes")
        mount.flush()
        share.fail(["rename"], errno.ETIMEDOUT, after=True, times=1)
        os.rename(top / "old" / "deep" / "inner", top / "new" / "inner")
        os.rename(top / "old", top / "new" / "inner" / "old")
        mount.flush()
        assert contents(share.backing) == contents(top)
        assert not any("quarantined" in event["text"] for event in mount.status()["events"])


def test_nothing_is_left_in_a_directory_that_is_gone(tmp_path: Path) -> None:
    """What was in a directory that the share no longer has is not there to be removed."""
    with faulty_world(str(tmp_path)) as world:
        tree = world.fs.tree
        directory = tree.root.share[b"tree"]
        assert isinstance(directory, Directory)
        deep = directory.share[b"deep"]
        assert isinstance(deep, Directory) and deep.share
        world.unlink("tree/deep/file")
        world.rmdir("tree/deep")
        world.rmdir("tree")
        shutil.rmtree(os.path.join(world.share, "tree"))
        tree.set_share(tree.root, b"tree", None, 0.0)
        directory.share_dirfd = deep.share_dirfd = None
        world.again()
        world.settle()
        assert not directory.share and not deep.share
        assert any("no longer where it was" in text for text in world.events())
        world.check(attributes=False)
