"""A mount without a kernel: the real volume and flusher on a real directory, and a model beside it.

Everything runs in steps that the test chooses; see `stepwise`.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from tests.flush.posix import Entry, Model, ModelDirectory, ModelFile, ModelLink, Path
from tests.flush.stepwise import NoTasks, SteppedFlusher, SteppedShare, SteppedVolume, Tasks
from tests.volumes import close_volume, leftovers, open_volume, snapshot
from wbcache.config import Config, FlushConfig, RetryConfig, ShareConfig
from wbcache.daemon.recovery import settle_intents
from wbcache.filesystem import FileSystem
from wbcache.filesystem.files import Handle
from wbcache.flush.plan import Step
from wbcache.node import Directory, Node
from wbcache.share import calls
from wbcache.share.capabilities import Capabilities
from wbcache.tree import Item

LIMIT = 20_000
"""Calls on the share within which a drain has to end."""

CONFIG = Config(
    flush=FlushConfig(workers=2, small_workers=4, retry=RetryConfig(1.0, 8.0)),
    share=ShareConfig(attr_ttl=1e12, dir_ttl=1e12),
)

T = TypeVar("T")


class StuckError(AssertionError):
    """The views differ, and nothing will ever make them equal."""


@dataclass(frozen=True)
class Setting:
    """What kind of programs: the weight of each action, and what the share is like."""

    weights: dict[str, int]
    length: int = 40
    config: Config = CONFIG
    capabilities: Capabilities = field(default_factory=Capabilities)
    fault_rate: float = 0.0
    """How often a call of the flusher fails, before or after it was made."""
    circles: bool = True
    """Whether order edges may be dropped because items wait for each other."""

    def but(self, **weights: int) -> Setting:
        """The same with other weights."""
        return replace(self, weights={**self.weights, **weights})


class World:
    """One mount and its model."""

    def __init__(self, place: str, setting: Setting) -> None:
        self.share, self.cache = os.path.join(place, "share"), os.path.join(place, "cache")
        for path in (self.share, self.cache):
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
        self.setting = setting
        self.model = Model()
        self.now = 1000.0
        self.random = random.Random(0)
        self.written = 0
        self.faults = True
        self.handles: list[tuple[Handle, ModelFile]] = []
        self.log: list[str] = []
        self.files: list[ModelFile] = []
        """Every file there ever was."""
        self.directories: dict[int, ModelDirectory] = {}
        """Directories by the inode number in the mount."""
        self.patched: set[int] = set()
        """Inode numbers in the mount of files that were changed in place on the share."""
        self.patched_on_share: set[int] = set()
        """The same, as the share numbers them."""
        self.tasks = Tasks()

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the cache: at first, and after a kill."""
        self.volume, self.loaded = open_volume(
            self.share,
            self.cache,
            config=self.setting.config,
            capabilities=self.setting.capabilities,
            clock=lambda: self.now,
            share_type=SteppedShare,
            volume_type=SteppedVolume,
        )
        share = cast(SteppedShare, self.volume.share)
        share.fault, share.changed = self.fault, self.share_changes
        self.tree = self.volume.tree
        self.tasks = Tasks()
        self.fs = FileSystem(self.volume, NoTasks().nursery)
        self.flusher = SteppedFlusher(self.volume, self.fs.listings.gone)
        self.flusher.on_step = self.step_begins
        self.tasks.start_soon(settle_intents, self.volume, self.loaded)

    @property
    def recovering(self) -> bool:
        """Whether it is still found out what the share had done before a kill."""
        return not self.volume.settled.is_set()

    def fault(self) -> OSError | None:
        """Whether a call of the flusher fails now."""
        if self.faults and not self.recovering and self.random.random() < self.setting.fault_rate:
            return OSError(errno.EIO, "injected")
        return None

    def kill(self) -> None:
        """End everything where it is, as SIGKILL does, and start again."""
        self.stop()
        for _, file in self.handles:
            if file.writers:
                file.safe(self.tree.seq)
            file.writers = 0
        self.handles.clear()
        seq = self.tree.seq
        self.start()
        # The model compares numbers from before with those from now.
        self.tree.seq = max(self.tree.seq, seq)

    def stop(self) -> None:
        """Close what is open."""
        close_volume(self.volume)
        # What a task does while it is ended can't reach the journal any more.
        self.tasks.close()

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

    # -- finding things ------------------------------------------------------------------------

    async def node(self, path: Path) -> Node:
        """The node at a path, found as the kernel finds it."""
        while self.recovering:
            self.tasks.resume(self.random)
        node: Node = self.tree.root
        for name in path:
            assert isinstance(node, Directory)
            found = await self.fs.names.lookup(node, name)
            assert found is not None, f"{path} is not there"
            node = found
        entry = self.model.find(path)
        if isinstance(entry, ModelDirectory):
            self.directories[node.ino] = entry
        elif isinstance(entry, ModelFile):
            entry.ino = node.ino
        return node

    async def directory(self, path: Path) -> Directory:
        """The same, for a directory."""
        node = await self.node(path)
        assert isinstance(node, Directory), f"{path} is no directory"
        return node

    def list(self, directory: Directory) -> None:
        """List a directory of the share at once, if it was not."""
        if directory.on_share and directory.listed_at is None:
            parent = self.perform(self.volume.share.directory(directory))
            entries = calls.scan(parent)
            self.fs.listings._apply(directory, entries, self.volume.share_clock, self.now)

    def pick(self, *kinds: type[Entry]) -> Path | None:
        """A path of one of these kinds."""
        found = sorted(p for p, e in self.model.walk() if isinstance(e, kinds))
        return self.random.choice(found) if found else None

    def pick_directory(self) -> Path:
        """A directory, the root included."""
        return self.random.choice(sorted(self.model.directories()))

    def new_file(self, data: bytes = b"") -> ModelFile:
        """A file of the model."""
        file = ModelFile(data)
        self.files.append(file)
        return file

    def fresh(self) -> bytes:
        """Bytes that were never written before."""
        self.written += 1
        return f"<{self.written}>".encode() * self.random.randint(1, 3)

    # -- ends ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Go on until nothing is left to be done. Raises StuckError when that is too early."""
        for _ in range(LIMIT):
            if not self.recovering:
                until = self.flusher.turn(self.tasks.nursery)
            if self.tasks:
                self.tasks.resume(self.random)
            elif self.tree.touched:
                continue
            elif until < float("inf") and (self.flusher.unfinished() or self.flusher.later):
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
        if isinstance(item, Node):
            dirty = item.dirty.since if item.dirty else 0
            return f"{item} since {dirty} {item.trouble or ''}"
        return f"{item} {self.tree.changes[item].seq} {self.tree.changes[item].trouble or ''}"

    def compare(self) -> None:
        """The share must be as the model."""
        found = snapshot(self.share)
        left = leftovers(found)
        assert not left, f"temporaries on the share: {left}"
        shape = self.model.shape()
        groups: dict[int, int] = {}
        seen = {}
        for shown in sorted(found, key=lambda p: p.encode().split(b"/")):
            kind, data, _, _, group = found[shown]
            seen[shown] = (kind, data, groups.setdefault(group, len(groups)))
        assert seen == shape, f"the share differs:\n  share {seen}\n  model {shape}"
        for path, entry in self.model.walk():
            name = b"/".join(path).decode()
            if isinstance(entry, ModelFile | ModelDirectory):
                assert found[name][2] == entry.mode, f"mode of {name}"
            if isinstance(entry, ModelFile):
                node = self.perform(self.node(path))
                assert found[name][3] == node.mtime, f"mtime of {name}"
        self.check_clean()

    def check_clean(self) -> None:
        """Nothing is left over in memory or in the journal."""
        tree, volume = self.tree, self.volume
        assert not tree.changes and not tree.dirty and not tree.holding
        assert not len(tree.order)
        assert not volume.strays and not self.flusher.later
        removed = {n.ino for n in tree.nodes.values() if n.handles and not n.links}
        intents = [row for row in volume.journal.rows("intent") if row[2] not in removed]
        rows = [*intents, *volume.journal.rows("temporary"), *volume.journal.rows("xattr")]
        assert not rows, f"left in the journal: {rows}"
        for node in tree.nodes.values():
            assert node.transfer is None and not node.busy, node
            assert not node.sent or node.ino in removed, node

    def compare_mount(self) -> None:
        """The mount must show what the model holds."""
        expected = dict(self.model.walk())
        for path in [(), *(p for p, e in expected.items() if isinstance(e, ModelDirectory))]:
            directory = self.perform(self.directory(path))
            self.list(directory)
            names = set(directory.local)
            assert names == set(self.model.directory(path).entries), f"names in {path}: {names}"
        by_ino: dict[int, Entry] = {}
        for path, entry in expected.items():
            node = self.perform(self.node(path))
            assert by_ino.setdefault(node.ino, entry) is entry, f"{path}: one inode, two files"
            if isinstance(entry, ModelLink):
                assert self.perform(self.fs.listings.symlink_target(node)) == entry.target, path
            elif isinstance(entry, ModelFile):
                assert node.size == len(entry.data), f"size of {path}: {node.size} {entry.data!r}"
                data = self.perform(self.fs.files.read(node, 0, 1 << 20))
                assert data == entry.data, f"{path}: {data!r} instead of {entry.data!r}"
