"""While a step puts something under a name on the share, no other step touches what had it: by the
time of its call it could be touching the newcomer."""

from __future__ import annotations

import stat

import pytest

from wbcache.flush.plan import Park, Planner, Rename, SetAttributes, Step, Wait
from wbcache.node import META_MODE, Directory, Node
from wbcache.tree import Tree

FILE = stat.S_IFREG | 0o644


class Scene:
    """`new` is to take a name that `old` has on the share; `old` has moved on to a third one."""

    def __init__(self) -> None:
        self.root = Directory(1, stat.S_IFDIR | 0o755)
        self.tree = Tree(self.root)
        self.planner = Planner(self.tree)
        self.old, self.new = Node(2, FILE), Node(3, FILE)
        for node in (self.old, self.new):
            self.tree.add(node)
        for name in (b"taken", b"other"):
            self.tree.set_share(self.root, name, self.old, 0.0)
        self.tree.set_share(self.root, b"came from", self.new, 0.0)
        self.tree.touch(self.old, 0.0)
        self.tree.set_local(self.root, b"third", self.old, 0.0)
        self.tree.touch(self.new, 0.0)
        self.tree.set_local(self.root, b"taken", self.new, 0.0)

    def plan(self, node: Node) -> Step | Wait | None:
        return self.planner.plan(node)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_it_is_not_parked(scene: Scene) -> None:
    assert scene.planner.park(scene.new) == Park(scene.old, (scene.root, b"taken"))
    scene.root.arriving[b"taken"] = scene.new
    assert scene.planner.park(scene.new) is None


def test_it_is_not_renamed_from_there(scene: Scene) -> None:
    step = scene.plan(scene.old)
    assert isinstance(step, Rename) and step.old == (scene.root, b"taken")
    scene.root.arriving[b"taken"] = scene.new
    assert scene.plan(scene.old) == Wait(scene.new)


def test_its_attributes_are_not_set_there(scene: Scene) -> None:
    scene.old.meta = META_MODE
    assert scene.plan(scene.old) == SetAttributes(scene.old, (scene.root, b"taken"))
    scene.root.arriving[b"taken"] = scene.new
    assert scene.plan(scene.old) == Wait(scene.new)
