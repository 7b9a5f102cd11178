"""What was seen of the share is known again after a start, also when the share says nothing."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.volumes import Mounted, mounted
from tests.waiting import wait_until_async
from wbcache.node import Directory, Node
from wbcache.remembered import Remembered


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """A share with files and directories that were not made through a mount."""
    share = tmp_path / "share"
    (share / "runs" / "old").mkdir(parents=True)
    for name in ("a", "b", "c"):
        (share / "runs" / name).write_text(name * 10)
    os.symlink("runs/a", share / "latest")
    return share


@asynccontextmanager
async def on(share: Path, *, silent: bool = False) -> AsyncIterator[Mounted]:
    """A mount; of a ``silent`` share nothing is ever heard."""
    async with mounted(str(share), str(share.parent / "cache")) as mount:
        if silent:
            mount.volume.share.health.silent_since = 0.0
        yield mount


async def directory(mount: Mounted, *path: bytes) -> Directory:
    node: Node | None = mount.volume.tree.root
    for name in path:
        assert isinstance(node, Directory)
        node = await mount.filesystem.names.lookup(node, name)
    assert isinstance(node, Directory)
    return node


async def listing(mount: Mounted, *path: bytes) -> dict[bytes, int]:
    """The names in a directory, and their inode numbers."""
    found = await directory(mount, *path)
    await mount.filesystem.listings.complete(found)
    return {name: node.ino for name, node in found.local.items()}


async def test_names_numbers_and_attributes_are_known_while_the_share_is_silent(
    share: Path,
) -> None:
    async with on(share) as mount:
        root = await listing(mount)
        runs = await listing(mount, b"runs")
        link = await mount.filesystem.names.lookup(mount.volume.tree.root, b"latest")
        known = await mount.filesystem.names.lookup(await directory(mount, b"runs"), b"a")
        assert link is not None and known is not None
        mount.volume.remembered.store()
    async with on(share, silent=True) as mount:
        names = mount.filesystem.names
        assert await listing(mount) == root
        assert await listing(mount, b"runs") == runs
        found = await names.lookup(await directory(mount, b"runs"), b"a")
        assert found is not None and (found.ino, found.size) == (known.ino, 10)
        assert found.mtime == (share / "runs" / "a").stat().st_mtime_ns
        at = await names.lookup(mount.volume.tree.root, b"latest")
        assert at is not None and at.target == b"runs/a"
        # Certainly not there, as far as anybody knows.
        assert await names.lookup(await directory(mount, b"runs"), b"other") is None
        # Of these the share alone knows more than the name, or anything at all.
        with pytest.raises(TimeoutError):
            await names.lookup(await directory(mount, b"runs"), b"b")
        with pytest.raises(TimeoutError):
            await listing(mount, b"runs", b"old")
        # What is new gets a number that nothing has.
        node = await names.create(await directory(mount, b"runs"), b"new", 0o644, 0, 0)
        assert node.ino not in {*root.values(), *runs.values()}


async def test_what_we_removed_does_not_come_back(share: Path) -> None:
    async with on(share) as mount:
        await listing(mount, b"runs")
        mount.volume.remembered.store()
        runs = await directory(mount, b"runs")
        await mount.filesystem.names.unlink(runs, b"a")
        await mount.filesystem.names.rename(runs, b"b", runs, b"moved", 0)
        await mount.drain()
    assert sorted(os.listdir(share / "runs")) == ["c", "moved", "old"]
    async with on(share, silent=True) as mount:
        assert sorted(await listing(mount, b"runs")) == [b"c", b"moved", b"old"]


async def test_what_we_removed_is_hidden_before_it_is_flushed(share: Path) -> None:
    async with on(share) as mount:
        await listing(mount, b"runs")
        mount.volume.remembered.store()
        mount.flusher.suspended = True
        runs = await directory(mount, b"runs")
        await mount.filesystem.names.unlink(runs, b"a")
        await mount.filesystem.names.rename(runs, b"b", runs, b"moved", 0)
    async with on(share, silent=True) as mount:
        assert sorted(await listing(mount, b"runs")) == [b"c", b"moved", b"old"]


async def test_the_share_has_the_last_word(share: Path) -> None:
    async with on(share) as mount:
        await listing(mount, b"runs")
        await mount.filesystem.names.lookup(await directory(mount, b"runs"), b"b")
        mount.volume.remembered.store()
    (share / "runs" / "a").unlink()
    (share / "runs" / "b").write_text("another")
    (share / "runs" / "new").touch()
    async with on(share) as mount:
        runs, names = await directory(mount, b"runs"), mount.filesystem.names
        assert await names.lookup(runs, b"new") is not None
        assert await names.lookup(runs, b"newer") is None
        assert sorted(await listing(mount, b"runs")) == [b"b", b"c", b"new", b"old"]
        node = await mount.filesystem.names.lookup(await directory(mount, b"runs"), b"b")
        assert node is not None and node.size == len("another")
        mount.volume.remembered.store()
    async with on(share, silent=True) as mount:
        assert sorted(await listing(mount, b"runs")) == [b"b", b"c", b"new", b"old"]


async def test_numbers_of_all_sizes_can_be_stored(share: Path) -> None:
    """There are servers that number files with 64 bits, and files of the year 2500."""
    async with on(share) as mount:
        names = mount.filesystem.names
        node = await names.lookup(await directory(mount, b"runs"), b"a")
        assert node is not None
        fields = (node.mode, (1 << 64) - 2, 1, 1, 0, 0, 5, 0, 0, 0)
        times = dict.fromkeys(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), 1 << 64)
        mount.volume.adopt(node, os.stat_result(fields, times))
        known, shown = node.base, node.mtime
        assert known is not None and known.ino
        mount.volume.remembered.store()
        mount.volume.commit(node)
    async with on(share, silent=True) as mount:
        names = mount.filesystem.names
        node = await names.lookup(await directory(mount, b"runs"), b"a")
        assert node is not None
        assert (node.base, node.mtime) == (known, shown)


async def test_a_new_name_is_found_before_the_directory_is_listed(
    share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on(share) as mount:
        await listing(mount, b"runs")
        mount.volume.remembered.store()
    (share / "runs" / "new").touch()
    async with on(share) as mount:
        runs = await directory(mount, b"runs")

        async def never(*_: object) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(mount.filesystem.listings, "_scan", never)
        assert await mount.filesystem.names.lookup(runs, b"new") is not None
        with pytest.raises(FileExistsError):
            await mount.filesystem.names.create(runs, b"new", 0o644, 0, 0)


async def test_what_is_learnt_is_stored_by_itself(share: Path) -> None:
    async with on(share) as mount:
        runs = await listing(mount, b"runs")
        mount.nursery.start_soon(mount.volume.remembered.run)
        journal = mount.volume.journal
        ino = (await directory(mount, b"runs")).ino
        await wait_until_async(
            lambda: any(row.ino == ino and row.complete for row in journal.seen_directories()),
            "it is stored",
        )
    async with on(share, silent=True) as mount:
        assert await listing(mount, b"runs") == runs


async def test_the_directories_listed_longest_ago_are_forgotten(tmp_path: Path) -> None:
    for at in range(6):
        (tmp_path / "share" / f"d{at}").mkdir(parents=True)
        for number in range(8):
            (tmp_path / "share" / f"d{at}" / str(number)).touch()
    (tmp_path / "share" / "large").mkdir()
    for number in range(20):
        (tmp_path / "share" / "large" / str(number)).touch()
    limit = 40
    async with on(tmp_path / "share") as mount:
        volume = mount.volume
        volume.remembered = Remembered(volume.tree, volume.journal, max_names=limit)
        for name in (b"d0", b"d1", b"d2", b"large", b"d3", b"d4", b"d5"):
            await listing(mount, name)
            await listing(mount)
            volume.remembered.store()
            assert sum(1 for _ in volume.journal.rows("seen")) <= limit
    async with on(tmp_path / "share", silent=True) as mount:
        assert len(await listing(mount)) == 7
        assert len(await listing(mount, b"d5")) == 8
        assert len(await listing(mount, b"d4")) == 8
        for name in (b"d0", b"d1", b"d2", b"large"):
            with pytest.raises(TimeoutError):
                await listing(mount, name)
