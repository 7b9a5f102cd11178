"""What a listing may change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tests.volumes import mounted
from wbcache.node import Directory
from wbcache.share.calls import Entry


async def test_a_late_listing_puts_nothing_into_a_directory_that_is_gone(tmp_path: Path) -> None:
    """Names in a directory that is not there could never be removed again."""
    (tmp_path / "share" / "directory").mkdir(parents=True)
    (tmp_path / "share" / "directory" / "file").touch()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        listings, tree = mount.filesystem.listings, mount.volume.tree
        directory = await mount.filesystem.names.lookup(tree.root, b"directory")
        assert isinstance(directory, Directory)
        assert await mount.filesystem.names.lookup(directory, b"file") is not None
        began, began_at = mount.volume.share_clock, mount.volume.clock()
        os.rename(tmp_path / "share" / "directory", tmp_path / "elsewhere")
        listings.gone(tree.root, b"directory")
        entries = [Entry(b"file", stat.S_IFREG)]
        await listings._apply(directory, entries, began, began_at)
        assert not directory.share and not directory.local
