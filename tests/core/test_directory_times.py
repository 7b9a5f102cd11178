"""A directory's times, which each change of a name in it sets anew."""

from __future__ import annotations

import os
from pathlib import Path

from tests.volumes import mounted
from wbcache.filesystem import Changes
from wbcache.node import Directory

LONG_AGO = 1_000_000_000_000_000_000


async def test_times_that_were_set_do_not_come_back_after_a_kill(tmp_path: Path) -> None:
    """The name row, which tells when it was made, is in step by then and says nothing."""
    share, cache = str(tmp_path / "share"), str(tmp_path / "cache")
    os.mkdir(share)
    async with mounted(share, cache) as mount:
        names, root = mount.filesystem.names, mount.volume.tree.root
        directory = await names.mkdir(root, b"directory", 0o755, 0, 0)
        assert isinstance(directory, Directory)
        await mount.drain()
        mount.flusher.suspended = True
        times = Changes(atime=LONG_AGO, mtime=LONG_AGO)
        await mount.filesystem.attributes.change(directory, times)
        inner = await names.mkdir(directory, b"inner", 0o755, 0, 0)
        assert isinstance(inner, Directory)
        shown = directory.mtime, directory.ctime
        await mount.flusher.names.make_directory(inner, (directory, b"inner"), temporary=False)
    async with mounted(share, cache) as mount:
        found = await mount.filesystem.names.lookup(mount.volume.tree.root, b"directory")
        assert found is not None and (found.mtime, found.ctime) == shown
        await mount.drain()
        assert os.stat(f"{share}/directory").st_mtime_ns != LONG_AGO
