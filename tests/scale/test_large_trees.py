"""A data set of very many files that only the share has: walked, forgotten, walked again."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import trio

from tests import volumes
from tests.mounting import NEVER_BY_ITSELF, Mounted
from tests.scale.memory import MIB, drop_caches, peak, resident
from wbcache.filesystem.forgetting import Forgetter
from wbcache.node import Directory

pytestmark = [pytest.mark.usefixtures("fuse")]

IN_EACH = 200
"""Files in a directory."""


def plant(top: Path, count: int) -> None:
    """So many files in directories of directories, as data sets lie about."""
    for number in range(0, count, IN_EACH):
        directory = top / f"shard-{number // (IN_EACH * 50):03d}" / f"class-{number // IN_EACH:05d}"
        directory.mkdir(parents=True)
        for file in range(IN_EACH):
            fd = os.open(directory / f"image-{number + file:07d}.jpeg", os.O_CREAT | os.O_WRONLY)
            os.close(fd)


def walk(top: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(top))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_walk_over_200_000_files_does_not_fill_the_memory(tmp_path: Path) -> None:
    count = 200_000
    (tmp_path / "share").mkdir()
    plant(tmp_path / "share", count)
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF) as mount:
        figures = [("mounted", resident(mount.pid))]
        assert walk(mount.path) == count
        figures.append(("os.walk", resident(mount.pid)))
        found = subprocess.run(["find", mount.path, "-type", "f"], stdout=-1, check=True).stdout
        assert found.count(b"\n") == count
        figures.append(("find", resident(mount.pid)))
        subprocess.run(["du", "-s", mount.path], stdout=subprocess.DEVNULL, check=True)
        figures.append(("du", resident(mount.pid)))
        assert peak(mount.pid) < 400 * MIB, figures
        # The kernel forgets, and so does the daemon; the second walk takes no more.
        nodes = mount.status()["nodes"]
        end = time.monotonic() + 120
        while mount.status()["nodes"] > nodes // 2 and time.monotonic() < end:
            drop_caches()
            time.sleep(1)
        assert mount.status()["nodes"] <= nodes // 2
        figures.append(("forgotten", resident(mount.pid)))
        assert walk(mount.path) == count
        figures.append(("second walk", resident(mount.pid)))
        figures.append(("peak", peak(mount.pid)))
        print(*(f"{what} {size / MIB:.0f} MiB" for what, size in figures), sep="\n")
        assert peak(mount.pid) < 400 * MIB, figures
        assert mount.umount().returncode == 0
        began = time.monotonic()
        mount.remount()
        assert time.monotonic() - began < 10
        assert walk(mount.path) == count


def test_what_the_kernel_forgets_is_forgotten_and_comes_back_as_it_was(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    plant(share, 3 * IN_EACH)

    async def everything(mount: volumes.Mounted) -> dict[bytes, int]:
        """Walk it as the kernel does, and forget it again: inode numbers by path."""
        fs, tree = mount.filesystem, mount.volume.tree
        found: dict[bytes, int] = {}
        todo = [tree.root]
        for directory in todo:
            await fs.listings.complete(directory)
            for name in list(directory.local):
                node = await fs.names.lookup(directory, name)
                assert node is not None
                found[tree.path(node)] = node.ino
                node.lookups += 1
                if isinstance(node, Directory):
                    todo.append(node)
        for ino in found.values():
            fs.forget(ino, 1)
        return found

    async def until_quiet(mount: volumes.Mounted) -> None:
        """What is listed again and again in the background has its rest."""
        tree = mount.volume.tree
        with trio.fail_after(30):
            while any(n.hot or n.listing for n in tree.nodes.values() if isinstance(n, Directory)):
                await trio.sleep(0.02)

    async def run() -> None:
        async with volumes.mounted(str(share), str(tmp_path / "cache")) as mount:
            fs, volume, tree = mount.filesystem, mount.volume, mount.volume.tree
            forgetter = fs.forgetter = Forgetter(volume, fs.listings, keep=0)
            found = await everything(mount)
            before = len(tree.nodes)
            # Not while it is not stored, nor while somebody uses it.
            await forgetter.tidy()
            assert len(tree.nodes) == before
            await until_quiet(mount)
            volume.remembered.store()
            used = await fs.names.lookup(tree.root, b"shard-000")
            assert isinstance(used, Directory)
            used = await fs.names.lookup(used, b"class-00001")
            assert isinstance(used, Directory)
            kept = next(iter(used.local.values()))
            kept.lookups += 1
            await until_quiet(mount)
            volume.remembered.store()
            await forgetter.tidy()
            assert len(tree.nodes) == 1 + 1 + 3 + IN_EACH  # the way to what is kept, and beside it
            fs.forget(kept.ino, 1)
            await until_quiet(mount)
            await forgetter.tidy()
            assert set(tree.nodes) == {tree.root.ino}
            # It comes back under its numbers, also what is new on the share meanwhile.
            (share / "shard-000" / "class-00000" / "new").touch()
            again = await everything(mount)
            assert {path: ino for path, ino in again.items() if path in found} == found
            assert [path for path in again if path not in found] == [b"shard-000/class-00000/new"]
            # What was changed here stays.
            directory = await fs.names.lookup(tree.root, b"shard-000")
            assert isinstance(directory, Directory)
            await fs.names.create(directory, b"own", 0o644, 0, 0)
            await until_quiet(mount)
            volume.remembered.store()
            await forgetter.tidy()
            assert b"own" in directory.local
            await mount.drain()
            assert (share / "shard-000" / "own").exists()

    trio.run(run)
