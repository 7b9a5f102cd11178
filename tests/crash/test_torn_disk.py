"""The machine loses power at a random moment, and the disk keeps any part of what was not synced.

What an fsync covered is there. The rest is a state that the file once had, or is kept aside, torn.
The share never shows anything but states that a file once had.
"""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import pytest
import trio

from tests.crash.tearing import TearingDisk
from tests.volumes import QUICK, Mounted, leftovers, mounted, snapshot
from tests.waiting import wait_until_async
from wbcache.config import ShareConfig
from wbcache.daemon.eviction import Evictor
from wbcache.filesystem import Changes
from wbcache.node import Node

NAMES = (b"log", b"model", b"new", b"other")
OLD = {b"log": b"old line\n" * 40, b"model": b"the last checkpoint" * 3000}
"""What the share has at the start."""


CURIOUS = dataclasses.replace(QUICK, share=ShareConfig(attr_ttl=0.0, dir_ttl=0.0))
"""Believes nothing of what it knows of the share."""


class History:
    """Every state that the files had, oldest first, and which of them are certain."""

    def __init__(self) -> None:
        self.states: dict[bytes, list[bytes]] = {
            name: [OLD[name]] if name in OLD else [] for name in NAMES
        }
        self.certain = {name: 0 if name in OLD else -1 for name in NAMES}
        """Index of the oldest state that may still be found; -1: it may be missing."""
        self.patched: set[bytes] = set()

    def now(self, name: bytes) -> bytes:
        return self.states[name][-1] if self.states[name] else b""


class Player:
    """Makes random changes through the file system layer."""

    def __init__(self, mount: Mounted, history: History, rng: random.Random) -> None:
        self._mount = mount
        self._files = mount.filesystem.files
        self._root = mount.volume.tree.root
        self._history = history
        self._rng = rng
        self.done: list[str] = []

    async def step(self) -> None:
        name = self._rng.choice(NAMES)
        changes = [self.append, self.append, self.append, self.patch, self.rewrite, self.replace]
        changes.append(self.truncate)
        others = [self.fsync, self.fsync, self.pause, self.sync_quietly, self.evict]
        operation = self._rng.choice([*changes, *others])
        self.done.append(f"{operation.__name__} {name.decode()}")
        await operation(name)

    async def append(self, name: bytes) -> None:
        node = await self._node(name)
        await self._write(name, node, node.size, self._bytes(3000))

    async def patch(self, name: bytes) -> None:
        node = await self._node(name)
        if node.size:
            at = self._rng.randrange(node.size)
            self._history.patched.add(name)
            await self._write(name, node, at, self._bytes(5000))

    async def truncate(self, name: bytes) -> None:
        node = await self._node(name)
        size = self._rng.choice([self._rng.randint(1, node.size or 1), node.size + 5000])
        if size < node.size:
            self._history.patched.add(name)
        await self._mount.filesystem.attributes.change(node, Changes(size=size))
        self._history.states[name].append(self._history.now(name)[:size].ljust(size, b"\0"))

    async def rewrite(self, name: bytes) -> None:
        node = await self._node(name)
        handle = self._files.open(node, os.O_WRONLY | os.O_TRUNC)
        self._history.states[name].append(b"")
        await self._write(name, node, 0, self._bytes(60_000))
        self._files.release(handle)

    async def replace(self, name: bytes) -> None:
        names, data = self._mount.filesystem.names, self._bytes(60_000)
        node = await names.create(self._root, b"temporary", 0o644, os.getuid(), os.getgid())
        handle = self._files.open(node, os.O_WRONLY)
        await self._files.write(node, 0, data)
        self._files.release(handle)
        await names.rename(self._root, b"temporary", self._root, name, 0)
        self._history.states[name].append(data)

    async def fsync(self, name: bytes) -> None:
        node = await self._node(name)
        await self._files.fsync(node)
        self._history.certain[name] = len(self._history.states[name]) - 1

    async def pause(self, name: bytes) -> None:
        """The flusher does something."""
        await trio.sleep(self._rng.choice([0.0, 0.005, 0.03]))

    async def sync_quietly(self, name: bytes) -> None:
        """As the daemon does in the background."""
        await self._mount.volume.sync_content(await self._node(name))

    async def evict(self, name: bytes) -> None:
        """Everything that the share has goes."""
        await Evictor(self._mount.volume, self._mount.flusher).evict(1 << 40)

    async def _node(self, name: bytes) -> Node:
        node = await self._mount.filesystem.names.lookup(self._root, name)
        if node is None:
            names = self._mount.filesystem.names
            node = await names.create(self._root, name, 0o644, os.getuid(), os.getgid())
            self._history.states[name].append(b"")
        return node

    async def _write(self, name: bytes, node: Node, at: int, data: bytes) -> None:
        handle = self._files.open(node, os.O_WRONLY)
        await self._files.write(node, at, data)
        self._files.release(handle)
        before = self._history.now(name)
        self._history.states[name].append(before[:at] + data + before[at + len(data) :])

    def _bytes(self, longest: int) -> bytes:
        return self._rng.randbytes(self._rng.randint(1, longest))


async def read_all(mount: Mounted, node: Node) -> bytes:
    """What the mount shows of a file, once it has looked at the share's."""
    began = mount.volume.clock()
    await mount.filesystem.listings.attributes(node)
    await wait_until_async(
        lambda: node.dirty is not None or (node.attrs_at is not None and node.attrs_at >= began),
        "the file's attributes are read",
    )
    return await mount.filesystem.files.read(node, 0, 1 << 20)


def assert_a_state(found: bytes, states: list[bytes], what: str, *, patched: bool) -> None:
    """It is one of the states. When it was patched in place it may be old in some places and new in
    others, as on any local disk, and on the share while a patch is under way."""
    if found in states:
        return
    lengths = [len(state) for state in states]
    assert len(found) in lengths, f"{what}: {len(found)} bytes long, not one of {lengths}"
    odd = [
        at
        for at, byte in enumerate(found)
        if all(state[at : at + 1] != bytes([byte]) for state in states)
    ]
    assert patched and not odd, f"{what}: bytes from {odd[:1]} on are of no state {lengths}"


async def assert_as_promised(mount: Mounted, share: Path, history: History) -> None:
    """What is there after the power loss, in the mount and on the share."""
    filesystem, root = mount.filesystem, mount.volume.tree.root
    torn = set()
    for name in NAMES:
        states, certain = history.states[name], history.certain[name]
        node = await filesystem.names.lookup(root, name)
        if node is None:
            assert certain < 0, f"{name!r} is gone"
            continue
        if node.trouble is not None:
            assert certain < len(states) - 1, f"{name!r} is torn, though all of it was synced"
            torn.add(name)
            continue
        found = await read_all(mount, node)
        assert_a_state(
            found, states[max(0, certain) :], f"{name!r}", patched=name in history.patched
        )
    flusher = mount.flusher
    await filesystem.listings.complete(root)
    flusher.drain()
    with trio.move_on_after(60) as scope:
        while any(not flusher.is_hopeless(item) for item in flusher.unfinished()):
            await trio.sleep(0.005)
        while flusher.running or mount.volume.strays:
            await trio.sleep(0.005)
    assert not scope.cancelled_caught, f"not drained: {flusher.unfinished()}"
    after = snapshot(str(share))
    if not flusher.unfinished():
        assert not leftovers(after)
    for name in NAMES:
        entry = after.get(name.decode())
        if entry is None:
            assert name in torn or history.certain[name] < 0, f"{name!r} is not on the share"
            continue
        assert_a_state(
            entry[1],
            history.states[name],
            f"the share's {name!r}",
            patched=name in history.patched,
        )
        node = await filesystem.names.lookup(root, name)
        if node is not None and node.dirty is None:
            assert await read_all(mount, node) == entry[1]


async def lose_power_once(top: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    share = top / "share"
    share.mkdir(parents=True)
    for name, content in OLD.items():
        (share / os.fsdecode(name)).write_bytes(content)
    history = History()
    disk = TearingDisk(top / "cache")
    with patch.context() as watching:
        disk.install(watching)
        async with mounted(
            str(share), str(top / "cache"), at_end=lambda: disk.lose_power(top / "after", rng)
        ) as mount:
            player = Player(mount, history, rng)
            for _ in range(rng.randint(5, 60)):
                await player.step()
    try:
        async with mounted(
            str(share), str(top / "after"), power_lost=True, config=CURIOUS
        ) as mount:
            await assert_as_promised(mount, share, history)
    except BaseException:
        print(f"seed {seed}:", *player.done, sep="\n  ")
        raise


@pytest.mark.parametrize("first", range(0, 60, 10))
async def test_power_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    for seed in range(first, first + 10):
        await lose_power_once(tmp_path / str(seed), seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_power_is_lost_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000, 3000):
        await lose_power_once(tmp_path / str(seed), seed, monkeypatch)
