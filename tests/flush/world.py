"""A mount without a kernel, and a model of what it must show."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tests.flush.posix import Entry, Model, ModelDirectory, ModelFile, ModelLink, Path
from tests.volumes import leftovers, nothing_left, snapshot
from wbcache.config import Config, FlushConfig, RetryConfig, ShareConfig
from wbcache.filesystem import FileSystem
from wbcache.filesystem.files import Handle
from wbcache.flush.flusher import Flusher
from wbcache.node import Directory, Node
from wbcache.share.capabilities import Capabilities
from wbcache.tree import Tree
from wbcache.volume import Volume

CONFIG = Config(
    flush=FlushConfig(workers=2, small_workers=4, retry=RetryConfig(1.0, 8.0)),
    share=ShareConfig(attr_ttl=1e12, dir_ttl=1e12),
)


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
    """One mount and its model; how the mount lives is for others to say."""

    volume: Volume
    tree: Tree
    fs: FileSystem
    flusher: Flusher

    def __init__(self, share: str) -> None:
        self.share = share
        self.model = Model()
        self.random = random.Random(0)
        self.written = 0
        self.longest = 12
        """Bytes that are written at a time, at most about so many."""
        self.handles: list[tuple[Handle, ModelFile]] = []
        self.files: list[ModelFile] = []
        """Every file there ever was."""
        self.directories: dict[int, ModelDirectory] = {}
        """Directories by the inode number in the mount."""

    def attach(self, volume: Volume, fs: FileSystem, flusher: Flusher) -> None:
        """The mount was started, again perhaps: what was open before is closed."""
        self.volume, self.tree, self.fs, self.flusher = volume, volume.tree, fs, flusher

    def detach(self) -> None:
        """The mount was killed."""
        for _, file in self.handles:
            if file.writers:
                file.safe(self.tree.seq)
            file.writers = 0
        self.handles.clear()

    # -- finding things ------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until the share's names may be asked for."""

    async def node(self, path: Path) -> Node:
        """The node at a path, found as the kernel finds it."""
        await self.ready()
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

    async def list(self, directory: Directory) -> None:
        """Make every name in a directory known."""
        await self.fs.listings.complete(directory)

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
        word = f"<{self.written}>".encode()
        return word * self.random.randint(1, max(1, self.longest // len(word)))

    # -- judging -------------------------------------------------------------------------------

    async def compare_share(self) -> None:
        """After a drain the share must be as the model, and nothing be left over."""
        found = snapshot(self.share)
        left = leftovers(found)
        assert not left, f"temporaries on the share: {left}"
        kept_here = set(self.kept_here())
        shape = self.model.shape(without=kept_here)
        for kept in kept_here:
            # What the share had under such a name stays.
            found = {p: e for p, e in found.items() if p != kept and not p.startswith(kept + "/")}
        groups: dict[int, int] = {}
        seen = {}
        for shown in sorted(found, key=lambda p: p.encode().split(b"/")):
            kind, data, _, _, group = found[shown]
            seen[shown] = (kind, data, groups.setdefault(group, len(groups)))
        assert seen == shape, f"the share differs:\n  share {seen}\n  model {shape}"
        for path, entry in self.model.walk():
            name = b"/".join(path).decode()
            if name not in shape:
                continue
            if isinstance(entry, ModelFile | ModelDirectory):
                assert found[name][2] == entry.mode, f"mode of {name}"
            if isinstance(entry, ModelFile):
                node = await self.node(path)
                assert found[name][3] == node.mtime, f"mtime of {name}"
        self.check_clean()

    def kept_here(self) -> Iterator[str]:
        """The files that are kept from the share."""
        for node in self.tree.nodes.values():
            if node.never:
                yield from (self.tree.name_path(*link).decode() for link in node.links)

    def check_clean(self) -> None:
        """Nothing is left over in memory or in the journal."""
        nothing_left(self.volume, self.flusher)

    async def compare_mount(self) -> None:
        """The mount must show what the model holds."""
        expected = dict(self.model.walk())
        for path in [(), *(p for p, e in expected.items() if isinstance(e, ModelDirectory))]:
            directory = await self.directory(path)
            await self.list(directory)
            names = set(directory.local)
            assert names == set(self.model.directory(path).entries), f"names in {path}: {names}"
        by_ino: dict[int, Entry] = {}
        for path, entry in expected.items():
            node = await self.node(path)
            assert by_ino.setdefault(node.ino, entry) is entry, f"{path}: one inode, two files"
            if isinstance(entry, ModelLink):
                assert await self.fs.listings.symlink_target(node) == entry.target, path
            elif isinstance(entry, ModelFile):
                assert node.size == len(entry.data), f"size of {path}: {node.size} {entry.data!r}"
                data = await self.read_all(node)
                assert data == entry.data, f"{path}: {data!r} instead of {entry.data!r}"

    async def read_all(self, node: Node) -> bytes:
        """The bytes of a file."""
        handle = self.fs.files.open(node, os.O_RDONLY)
        try:
            return await self.fs.files.read(node, 0, 1 << 24)
        finally:
            self.fs.files.release(handle)
