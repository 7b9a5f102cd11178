"""What eviction may take from a cache, and when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.volumes import Mounted, mounted
from wbcache.daemon.eviction import Evictor
from wbcache.flush.transfer import SupersededError
from wbcache.node import Node

SIZE = 2_000_000
DATA = bytes(range(250)) * (SIZE // 250)


async def published(mount: Mounted) -> Node:
    """A file that the share has, and that is here too."""
    filesystem, root = mount.filesystem, mount.volume.tree.root
    node = await filesystem.names.create(root, b"file", 0o644, os.getuid(), os.getgid())
    handle = filesystem.files.open(node, os.O_WRONLY)
    await filesystem.files.write(node, 0, DATA)
    filesystem.files.release(handle)
    await mount.drain()
    return node


async def test_clean_bytes_go_and_come_back_from_the_share(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        node = await published(mount)
        handle = mount.filesystem.files.open(node, os.O_RDWR)
        await mount.filesystem.files.write(node, 10, b"dirty")
        assert await Evictor(mount.volume, mount.flusher).evict(1 << 30) >= SIZE - 2 * 4096
        assert node.content is not None and not node.content.clean
        found = await mount.filesystem.files.read(node, 0, SIZE)
        assert found == DATA[:10] + b"dirty" + DATA[15:]
        mount.filesystem.files.release(handle)


async def test_nothing_goes_between_a_transfer_and_its_publish(tmp_path: Path) -> None:
    """After the publish all bytes count as being here: none may have been lost meanwhile."""
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        node = await published(mount)
        flusher, files, root = mount.flusher, mount.filesystem.files, mount.volume.tree.root
        flusher.suspended = True
        handle = files.open(node, os.O_WRONLY)
        await files.write(node, 10, b"patch")
        files.release(handle)
        await flusher.files.copy(node, root)
        assert await Evictor(mount.volume, mount.flusher).evict(1 << 30) == 0
        await flusher.files.publish(node, (root, b"file"), node)
        wanted = DATA[:10] + b"patch" + DATA[15:]
        assert (tmp_path / "share" / "file").read_bytes() == wanted
        assert await files.read(node, 0, SIZE) == wanted


async def test_what_is_being_synced_keeps_its_cache_file(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        node = await published(mount)
        content = node.content
        assert content is not None
        content.pins += 1
        assert await Evictor(mount.volume, mount.flusher).evict(1 << 30) >= SIZE - 4096
        assert node.content is content and not content.retired and content.pins == 1


async def test_what_goes_just_before_a_transfer_does_not_cut_the_file_off(tmp_path: Path) -> None:
    """It was to be published whole, as all of it was here; now it is patched in place."""
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        node = await published(mount)
        flusher, files, root = mount.flusher, mount.filesystem.files, mount.volume.tree.root
        flusher.suspended = True
        handle = files.open(node, os.O_WRONLY)
        await files.write(node, 10, b"patch")
        files.release(handle)
        await Evictor(mount.volume, mount.flusher).evict(1 << 30)
        with pytest.raises(SupersededError):
            await flusher.files.copy(node, root)
        assert node.trouble is None
        flusher.suspended = False
        await mount.drain()
        wanted = DATA[:10] + b"patch" + DATA[15:]
        assert (tmp_path / "share" / "file").read_bytes() == wanted
