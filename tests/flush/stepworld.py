"""A world whose mount runs in steps that the test chooses, see `stepwise`."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from tests.flush.operations import Operations
from tests.flush.stepwise import NoTasks, SteppedFlusher, SteppedShare, SteppedVolume, Tasks
from tests.flush.world import Setting
from tests.volumes import close_volume, open_volume
from wbcache.daemon.recovery import settle_intents
from wbcache.filesystem import FileSystem
from wbcache.flush.plan import Step
from wbcache.node import Directory, Node
from wbcache.share import calls
from wbcache.tree import Item

LIMIT = 20_000
"""Calls on the share within which a drain has to end."""

T = TypeVar("T")


class StuckError(AssertionError):
    """The views differ, and nothing will ever make them equal."""


class SteppedWorld(Operations):
    """Operations with the flusher's steps, time and kills in between, all of them actions."""

    flusher: SteppedFlusher
    share_type: type[SteppedShare] = SteppedShare

    def __init__(self, place: str, setting: Setting) -> None:
        super().__init__(os.path.join(place, "share"))
        self.cache = os.path.join(place, "cache")
        for path in (self.share, self.cache):
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
        self.setting = setting
        self.now = 1000.0
        self.faults = True
        self.log: list[str] = []
        self.tasks = Tasks()

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the cache: at first, and after a kill."""
        volume, loaded = open_volume(
            self.share,
            self.cache,
            config=self.setting.config,
            capabilities=self.setting.capabilities,
            clock=lambda: self.now,
            share_type=self.share_type,
            volume_type=SteppedVolume,
        )
        share = cast(SteppedShare, volume.share)
        share.fault, share.changed = self.fault, self.share_changes
        fs = FileSystem(volume, NoTasks().nursery)
        flusher = SteppedFlusher(volume, fs.listings.gone)
        flusher.on_step = self.step_begins
        self.attach(volume, fs, flusher)
        self.recall(volume.tree.root)
        self.tasks = Tasks()
        self.tasks.start_soon(settle_intents, volume, loaded, flusher.failures.inherit)

    def recall(self, directory: Directory) -> None:
        """Use all that was remembered: it has to be right without another look."""
        self.fs.listings._recall(directory)
        if directory.listed_at is not None:
            directory.listed_at = self.now
        for node in list(directory.local.values()):
            if isinstance(node, Directory):
                self.recall(node)

    def kill(self) -> None:
        """End everything where it is, as SIGKILL does, and start again."""
        if self.random.random() < 0.5:
            self.volume.remembered.store()
        self.stop()
        self.detach()
        seq = self.tree.seq
        self.start()
        # The model compares numbers from before with those from now.
        self.tree.seq = max(self.tree.seq, seq)

    def stop(self) -> None:
        """Close what is open."""
        close_volume(self.volume)
        # What a task does while it is ended can't reach the journal any more.
        self.tasks.close()

    def fault(self) -> OSError | None:
        """Whether a call of the flusher fails now."""
        if self.faults and not self.recovering and self.random.random() < self.setting.fault_rate:
            return OSError(errno.EIO, "injected")
        return None

    def step_begins(self, item: Item, step: Step, forced: bool) -> None:
        """The flusher begins a step; ``forced`` when it breaks a circle."""

    def share_changes(self) -> None:
        """The share may have changed."""

    def perform(self, task: Coroutine[Any, Any, T]) -> T:
        """Run an operation to its end; when it has to wait, the flusher goes on."""
        while True:
            try:
                task.send(None)
            except StopIteration as end:
                return cast(T, end.value)
            if self.tasks:
                self.tasks.resume(self.random)

    @property
    def recovering(self) -> bool:
        """Whether it is still found out what the share had done before a kill."""
        return not self.volume.settled.is_set()

    async def ready(self) -> None:
        while self.recovering:
            self.tasks.resume(self.random)

    async def list(self, directory: Directory) -> None:
        if directory.on_share and directory.listed_at is None:
            parent = await self.volume.share.directory(directory)
            entries = calls.scan(parent)
            await self.fs.listings._apply(directory, entries, self.volume.share_clock, self.now)

    # -- actions -------------------------------------------------------------------------------

    async def turn(self) -> None:
        """One turn of the flusher's loop."""
        if not self.recovering:
            self.flusher.turn(self.tasks.nursery)

    async def resume(self) -> None:
        """One task goes on to its next call on the share."""
        if self.tasks:
            self.tasks.resume(self.random)

    async def run(self) -> None:
        """Several of these."""
        for _ in range(self.random.randint(1, 30)):
            await self.turn()
            await self.resume()

    async def wait(self) -> None:
        """Time passes."""
        self.now += self.random.choice([0.5, 6.0, 40.0])

    async def drain(self) -> None:
        """Flush everything."""
        self.settle()
        await self.compare_share()

    async def check_mount(self) -> None:
        """The mount shows what it should."""
        await self.compare_mount()

    async def kill_now(self) -> None:
        """Kill and start again."""
        self.kill()
        if self.random.random() < 0.5:
            await self.compare_mount()

    # -- the end -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Go on until nothing is left to be done. Raises StuckError when that is too early."""
        for _ in range(LIMIT):
            until = float("inf")
            if not self.recovering:
                until = self.flusher.turn(self.tasks.nursery)
            if self.tasks:
                self.tasks.resume(self.random)
            elif self.tree.touched:
                continue
            elif until < float("inf") and (self.flusher.unfinished() or self.flusher.sweeper.later):
                self.now = max(self.now, until)
            else:
                break
        else:
            raise StuckError(f"no end after {LIMIT} calls: {self.flusher.unfinished()}")
        if self.flusher.unfinished():
            raise StuckError(f"nothing moves: {self.stuck_state()}")

    def stuck_state(self) -> str:
        """Everything that is not flushed, and what it waits for."""
        planner, lines = self.flusher.planner, []
        for item in self.flusher.unfinished():
            plan = planner.plan(item)
            on = self.flusher.waits_for(item) if item in self.flusher.waiting else "nothing"
            lines.append(f"{self.describe(item)}: plan {plan}, waits for {on}")
        return "\n  ".join(["", *lines])

    def describe(self, item: Item) -> str:
        """An item with its age and trouble."""
        if isinstance(item, Node):
            dirty = item.dirty.since if item.dirty else 0
            return f"{item} since {dirty} {item.trouble or ''}"
        return f"{item} {self.tree.changes[item].seq} {self.tree.changes[item].trouble or ''}"
