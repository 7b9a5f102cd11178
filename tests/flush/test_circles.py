"""Items that wait for each other, and also for something that was not due by itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.volumes import QUICK, mounted
from tests.waiting import wait_until_async
from wbcache.config import FlushConfig
from wbcache.flush import blocking
from wbcache.flush.cycles import circles, way_out
from wbcache.flush.plan import Planner, SetAttributes, Step, Wait
from wbcache.node import Directory, Node
from wbcache.tree import Item, Tree

NOT_BY_ITSELF = replace(QUICK, flush=FlushConfig(idle_delay=3600.0, max_age=3600.0))


class Circle(Planner):
    """Two nodes that wait for each other and, apart from that, for a third."""

    def __init__(self, tree: Tree, one: Node, other: Node, third: Node) -> None:
        super().__init__(tree)
        self._partner = {one: other, other: one}
        self._third = third
        self.done = False

    def plan(self, item: Item, *, besides: Container[object] = ()) -> Step | Wait | None:
        if isinstance(item, Node) and item in self._partner and not self.done:
            partner = self._partner[item]
            return Wait(self._third if partner in besides else partner)
        self.done = self.done or item is self._third
        return super().plan(item, besides=besides)


async def test_what_a_circle_waits_for_is_due(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    share = str(tmp_path / "share")
    async with mounted(share, str(tmp_path / "cache"), config=NOT_BY_ITSELF) as mount:
        names, root, flusher = mount.filesystem.names, mount.volume.tree.root, mount.flusher
        third, one, other = [
            await names.symlink(root, name, b"target", 0, 0) for name in (b"0", b"1", b"2")
        ]
        flusher.planner = Circle(mount.volume.tree, one, other, third)
        for node in (one, other):
            flusher.pull(node)
        await wait_until_async(lambda: len(os.listdir(share)) == 3, "all of it arrives")


class Everybody(Planner):
    """Many that all wait for each other; each names the youngest."""

    def __init__(self, tree: Tree, nodes: list[Node]) -> None:
        super().__init__(tree)
        self._nodes = nodes
        self.asked = 0

    def plan(self, item: Item, *, besides: Container[object] = ()) -> Step | Wait | None:
        assert isinstance(item, Node)
        self.asked += 1
        for other in reversed(self._nodes):
            if other is not item and other not in besides:
                return Wait(other)
        return SetAttributes(item, item.links[0])


async def test_a_large_circle_is_found_with_few_plans(tmp_path: Path) -> None:
    """The event loop stands still meanwhile: it may not take a plan for each pair."""
    (tmp_path / "share").mkdir()
    many = 300
    share = str(tmp_path / "share")
    async with mounted(share, str(tmp_path / "cache"), config=NOT_BY_ITSELF) as mount:
        names, tree = mount.filesystem.names, mount.volume.tree
        nodes = [await names.symlink(tree.root, b"%d" % n, b"target", 0, 0) for n in range(many)]
        planner = Everybody(tree, nodes)
        waiting: dict[Item, Item | None] = dict.fromkeys(nodes[:-1], nodes[-1])
        waiting[nodes[-1]] = nodes[-2]
        (circle,) = circles(waiting)
        found = way_out(planner, tree, waiting, circle, wait=waiting.__setitem__)
        assert found is not None and found[0] in nodes
        assert planner.asked < 5 * many


async def test_those_that_wait_in_vain_come_to_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory's attributes wait for what is made in it, and that for the directory."""
    (tmp_path / "share").mkdir()

    def refuse(*args: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(blocking, "make_directory", refuse)
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        at: Node = mount.volume.tree.root
        nodes = []
        for name in (b"refused", b"outer", b"inner"):
            assert isinstance(at, Directory)
            at = await mount.filesystem.names.mkdir(at, name, 0o755, 0, 0)
            nodes.append(at)
        for node in nodes:
            await mount.filesystem.attributes.set_xattr(node, b"user.test", b"value")
        mount.flusher.drain()
        await wait_until_async(lambda: at.in_vain is not None, "all wait for the refused one")
        with trio.fail_after(10):
            await trio.testing.wait_all_tasks_blocked()
        assert nodes[0].trouble and nodes[1].in_vain and nodes[2].in_vain
        monkeypatch.undo()
        await mount.drain()
        assert (tmp_path / "share" / "refused" / "outer" / "inner").is_dir()
