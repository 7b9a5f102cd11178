"""A directory's times, which each change of a name in it sets anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.volumes import Mounted, mounted
from wbcache.filesystem import Changes
from wbcache.node import Directory

LONG_AGO = 1_000_000_000_000_000_000


@pytest.mark.parametrize("kills", [1, 2])
@pytest.mark.parametrize("delivered", [False, True])
async def test_times_that_were_set_do_not_come_back_after_a_kill(
    tmp_path: Path, delivered: bool, kills: int
) -> None:
    """The name row, which tells when it was made, is in step by then and says nothing."""
    share, cache = str(tmp_path / "share"), str(tmp_path / "cache")
    os.mkdir(share)
    async with mounted(share, cache) as mount:
        names, root = mount.filesystem.names, mount.volume.tree.root
        directory = await names.mkdir(root, b"directory", 0o755, 0, 0)
        await mount.drain()
        times = Changes(atime=LONG_AGO, mtime=LONG_AGO)
        mount.flusher.suspended = not delivered
        await mount.filesystem.attributes.change(directory, times)
        if delivered:
            await mount.drain()
            mount.flusher.suspended = True
        assert isinstance(directory, Directory)
        await names.mkdir(directory, b"inner", 0o755, 0, 0)
        shown = directory.mtime, directory.ctime
        if kills == 1:
            await make_inner(mount)
    if kills == 2:
        async with mounted(share, cache) as mount:
            mount.flusher.suspended = True
            await make_inner(mount)
    async with mounted(share, cache) as mount:
        found = await mount.filesystem.names.lookup(mount.volume.tree.root, b"directory")
        assert found is not None and (found.mtime, found.ctime) == shown


async def make_inner(mount: Mounted) -> None:
    directory = mount.volume.tree.root.local[b"directory"]
    assert isinstance(directory, Directory)
    inner = directory.local[b"inner"]
    assert isinstance(inner, Directory)
    await mount.flusher.names.make_directory(inner, (directory, b"inner"), temporary=False)
