"""A mount that does something of everything, on a share whose calls fail."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import cast

from tests.faults.injection import FaultyShare, Injector, injected
from tests.flush.stepwise import SteppedFlusher, in_steps
from tests.flush.stepworld import SteppedWorld
from tests.flush.world import Setting
from tests.volumes import Entry, snapshot
from wbcache.filesystem import FileSystem
from wbcache.filesystem.attributes import Changes
from wbcache.filesystem.files import Handle
from wbcache.flush.plan import Step
from wbcache.node import Directory, Node
from wbcache.share.capabilities import Capabilities
from wbcache.tree import Item

ID = b"id-test"
"""The file by which the share is known."""

OLD = 987_654_321_000_000_000
"""An mtime that nothing gets by itself, nanoseconds."""


def blob(tag: str, size: int = 40) -> bytes:
    """Bytes that tell whose they are."""
    return (f"<{tag}>".encode() * size)[:size]


class _World(SteppedWorld):
    share_type = FaultyShare

    def __init__(self, place: str, capabilities: Capabilities, injector: Injector) -> None:
        super().__init__(place, Setting({}, capabilities=capabilities))
        self._injector = injector
        self.was_full = False

    def step_begins(self, item: Item, step: Step, forced: bool) -> None:
        self.was_full |= self.flusher.room.is_short

    def start(self) -> None:
        super().start()
        share = cast(FaultyShare, self.volume.share)
        share.injector, share.id_name = self._injector, ID


class FaultyWorld:
    """A mount and a plain directory, to which the same is done."""

    def __init__(self, place: str, capabilities: Capabilities) -> None:
        self.share = os.path.join(place, "share")
        self.native = os.path.join(place, "native")
        self.can = capabilities
        os.makedirs(self.native)
        self.injector = Injector(self.share)
        self._world = _World(place, capabilities, self.injector)
        self.start = self._world.start
        self.settle = self._world.settle
        self.kill = self._world.kill
        self.stop = self._world.stop

    @property
    def fs(self) -> FileSystem:
        """The mount's file system, as of the last start."""
        return self._world.fs

    @property
    def flusher(self) -> SteppedFlusher:
        """Its flusher."""
        return self._world.flusher

    def choose(self, chance: random.Random) -> None:
        """Decide by chance which of the flusher's tasks goes on."""
        self._world.random = chance

    # -- what is done --------------------------------------------------------------------------

    def do(self, operation: Callable[[], Awaitable[object]]) -> None:
        """Run an operation of the mount."""

        async def run() -> None:
            await operation()

        self._world.perform(run())

    def at(self, path: str) -> str:
        """A path in the plain directory."""
        return os.path.join(self.native, path)

    async def find(self, path: str) -> Node:
        """A node by its path."""
        await self._world.ready()
        node: Node = self.fs.tree.root
        for name in filter(None, os.fsencode(path).split(b"/")):
            assert isinstance(node, Directory), path
            found = await self.fs.names.lookup(node, name)
            assert found is not None, path
            node = found
        return node

    async def place(self, path: str) -> tuple[Directory, bytes]:
        """A directory and a name in it."""
        parent, name = os.path.split(path)
        directory = await self.find(parent)
        assert isinstance(directory, Directory)
        return directory, os.fsencode(name)

    def write(self, path: str, data: bytes, offset: int | None = None) -> None:
        """Make or rewrite a file; with an offset, overwrite a part of it (-1: append)."""

        async def operation() -> None:
            directory, name = await self.place(path)
            node = await self.fs.names.lookup(directory, name)
            if node is None:
                node = await self.fs.names.create(directory, name, 0o644, 0, 0)
            handle = self.fs.files.open(node, os.O_RDWR | (os.O_TRUNC if offset is None else 0))
            await self.fs.files.write(node, node.size if offset == -1 else offset or 0, data)
            self.fs.files.release(handle)

        self.do(operation)
        with open(self.at(path), "r+b" if offset is not None else "wb") as file:
            file.seek(0, os.SEEK_END) if offset == -1 else file.seek(offset or 0)
            file.write(data)

    def open(self, path: str, flags: int) -> Handle:
        """Open a file and leave it so; what is written to it is not done to the plain directory."""
        handles = []

        async def operation() -> None:
            handles.append(self.fs.files.open(await self.find(path), flags))

        self.do(operation)
        return handles[0]

    def add(self, handle: Handle, data: bytes) -> None:
        """Write to the end of an open file."""

        async def operation() -> None:
            await self.fs.files.write(handle.node, handle.node.size, data)

        self.do(operation)

    def pass_time(self, seconds: float) -> None:
        """Time passes."""
        self._world.now += seconds

    def advance(self) -> bool:
        """Have the flusher start what is due, and one of its tasks go on; False without any."""
        self._world.perform(self._world.turn())
        self._world.perform(self._world.resume())
        return bool(self._world.tasks)

    def truncate(self, path: str, size: int) -> None:
        """Cut a file."""

        async def operation() -> None:
            await self.fs.attributes.change(await self.find(path), Changes(size=size))

        self.do(operation)
        os.truncate(self.at(path), size)

    def mkdir(self, path: str) -> None:
        """Make a directory."""

        async def operation() -> None:
            await self.fs.names.mkdir(*await self.place(path), 0o755, 0, 0)

        self.do(operation)
        os.mkdir(self.at(path))

    def rename(self, old: str, new: str) -> None:
        """Rename."""

        async def operation() -> None:
            await self.find(old)  # as the kernel does
            await self.fs.names.rename(*await self.place(old), *await self.place(new), 0)

        self.do(operation)
        os.rename(self.at(old), self.at(new))

    def link(self, old: str, new: str) -> None:
        """A hard link."""

        async def operation() -> None:
            await self.fs.names.link(await self.find(old), *await self.place(new))

        self.do(operation)
        os.link(self.at(old), self.at(new))

    def symlink(self, target: str, path: str) -> None:
        """A symbolic link."""

        async def operation() -> None:
            await self.fs.names.symlink(*await self.place(path), os.fsencode(target), 0, 0)

        self.do(operation)
        os.symlink(target, self.at(path))

    def unlink(self, path: str) -> None:
        """Remove a file."""

        async def operation() -> None:
            await self.fs.names.unlink(*await self.place(path))

        self.do(operation)
        os.unlink(self.at(path))

    def rmdir(self, path: str) -> None:
        """Remove a directory."""

        async def operation() -> None:
            directory, name = await self.place(path)
            await self._world.list(cast(Directory, await self.find(path)))
            await self.fs.names.rmdir(directory, name)

        self.do(operation)
        os.rmdir(self.at(path))

    def change(self, path: str, *, mode: int | None = None, owner: int | None = None) -> None:
        """Change attributes; without any, the times."""
        mtime = OLD if mode is owner is None else None

        async def operation() -> None:
            changes = Changes(mode=mode, uid=owner, gid=owner, atime=mtime, mtime=mtime)
            await self.fs.attributes.change(await self.find(path), changes)

        self.do(operation)
        if mode is not None:
            os.chmod(self.at(path), mode)
        if owner is not None:
            os.chown(self.at(path), owner, owner)
        if mtime is not None:
            os.utime(self.at(path), ns=(mtime, mtime))

    def set_xattr(self, path: str, value: bytes | None) -> None:
        """Set or remove `user.test`."""

        async def operation() -> None:
            await self.fs.attributes.set_xattr(await self.find(path), b"user.test", value)

        self.do(operation)
        if value is None:
            os.removexattr(self.at(path), "user.test")
        else:
            os.setxattr(self.at(path), "user.test", value)

    # -- what the share was before, and what becomes of it -------------------------------------

    def begin(self) -> None:
        """Fill the share (and the plain directory) and mount it; everything has been seen."""
        for top in (self.share, self.native):
            for name in ("old", "cut", "patched", "to-rename", "to-link", "grown", "attrs", "gone"):
                put(f"{top}/{name}", blob(name))
            os.setxattr(f"{top}/old", "user.test", b"carried")
            os.setxattr(f"{top}/attrs", "user.gone", b"x")
            os.makedirs(f"{top}/tree/deep")
            put(f"{top}/tree/deep/file", b"x")
            os.mkdir(f"{top}/to-move")
            put(f"{top}/to-move/inside", b"inside")
            os.symlink("before", f"{top}/link-to-replace")
        os.mkdir(f"{self.share}/.wbcache")
        put(f"{self.share}/.wbcache/{ID.decode()}", b"{}")
        self.start()

        async def look() -> None:
            for path in ("", "tree", "tree/deep", "to-move"):
                await self._world.list(cast(Directory, await self.find(path)))

        self.do(look)

    def everything(self) -> None:
        """Something of everything that a flush can be asked to do."""
        self.mkdir("new")
        self.mkdir("new/deep")
        self.write("new/deep/file", blob("file", 300))
        self.write("old", blob("replaced"))
        self.write("tmp", blob("tmp"))
        self.rename("tmp", "final")
        self.truncate("cut", 10)
        self.write("patched", b"patch", 5)
        if self.can.link:
            self.link("patched", "patched-too")
            self.link("to-link", "linked")
        self.rename("to-rename", "renamed")
        self.write("grown", b"grown", -1)
        self.change("attrs", mode=0o600)
        if self.can.chown:
            self.change("attrs", owner=1234)
        if self.can.xattr:
            self.set_xattr("attrs", b"value")
        self.change("attrs")
        self.symlink("final", "symlink")
        self.unlink("link-to-replace")
        self.symlink("after", "link-to-replace")
        self.unlink("gone")
        self.unlink("tree/deep/file")
        self.rmdir("tree/deep")
        self.rmdir("tree")
        self.rename("to-move", "moved")
        self.write("moved/inside", b" and more", -1)

    def again(self) -> None:
        """What `wbcache flush` does: everything is due, also what was refused before."""
        self.flusher.drain()

    def trouble(self, item: Item) -> str | None:
        """Why an item is quarantined; None when it is not."""
        state = item if isinstance(item, Node) else self.fs.tree.changes[item]
        return state.trouble

    def check_mount(self) -> None:
        """The mount shows what the plain directory holds."""

        async def compare() -> None:
            for path, (kind, data, mode) in shape(self.native).items():
                node = await self.find(path)
                if kind == "file":
                    assert await self._world.read_all(node) == data, path
                    assert node.mode & 0o7777 == mode, path
                elif kind == "symlink":
                    assert await self.fs.listings.symlink_target(node) == data, path
            for path in ("", *(p for p, e in shape(self.native).items() if e[0] == "directory")):
                directory = await self.find(path)
                assert isinstance(directory, Directory)
                names = {os.fsencode(name) for name in os.listdir(self.at(path))}
                assert directory.local.keys() == names, path

        self.do(compare)

    def check_clean(self) -> None:
        """Nothing is left over in memory or in the journal."""
        self._world.check_clean()

    def events(self) -> list[str]:
        """What the operator was told."""
        return [text for _, text in self._world.volume.events]

    def was_full(self) -> bool:
        """Whether steps were held back for want of room on the share."""
        return self._world.was_full

    def check(self, *, attributes: bool = True) -> None:
        """The share holds what the plain directory holds, and nothing of ours is left."""
        if not attributes:
            held, wanted = shape(self.share), shape(self.native)
            assert {p: e[:2] for p, e in held.items()} == {p: e[:2] for p, e in wanted.items()}
            return
        assert shape(self.share) == shape(self.native)
        for path in shape(self.native):
            at = os.path.join(self.share, path)
            if not os.path.islink(at):
                same = xattrs(at) == xattrs(self.at(path))
                assert same or not self.can.xattr, f"xattrs of {path}"
                assert os.stat(at).st_uid == os.stat(self.at(path)).st_uid, f"owner of {path}"
        assert os.stat(os.path.join(self.share, "attrs")).st_mtime_ns == OLD
        self.check_clean()


def put(path: str, data: bytes) -> None:
    """A file on the share."""
    with open(path, "wb") as file:
        file.write(data)
    os.chmod(path, 0o644)


def shape(top: str) -> dict[str, tuple[str, bytes, int]]:
    """Kind, bytes or target, and permissions by path, without wbcache's own directory."""
    return {path: (entry[0], entry[1], entry[2]) for path, entry in entries(top).items()}


def entries(top: str) -> dict[str, Entry]:
    """A snapshot without wbcache's own directory at the root; temporaries are in it."""
    return {p: e for p, e in snapshot(top).items() if p.split("/")[0] != ".wbcache"}


def xattrs(path: str) -> dict[str, bytes]:
    """The user attributes of a file."""
    return {n: os.getxattr(path, n) for n in os.listxattr(path) if n.startswith("user.")}


@contextmanager
def faulty_world(
    place: str, seed: int = 0, capabilities: Capabilities | None = None
) -> Iterator[FaultyWorld]:
    """A world, mounted, whose flusher's calls go through its injector."""
    world = FaultyWorld(place, capabilities or Capabilities())
    world.choose(random.Random(seed))
    with in_steps(), injected(world.injector):
        world.begin()
        try:
            yield world
        finally:
            world.stop()
