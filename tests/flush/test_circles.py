"""Items that wait for each other, and also for something that was not due by itself."""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

from tests.volumes import QUICK, mounted
from tests.waiting import wait_until_async
from wbcache.config import FlushConfig
from wbcache.flush.plan import Planner, Step, Wait
from wbcache.node import Node
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
