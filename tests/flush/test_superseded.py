"""Between planning a step and its first call a program may truncate the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.volumes import mounted
from wbcache.flush.transfer import SupersededError


async def test_a_file_that_was_truncated_since_is_neither_copied_nor_changed(
    tmp_path: Path,
) -> None:
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        filesystem, flusher, root = mount.filesystem, mount.flusher, mount.volume.tree.root
        node = await filesystem.names.create(root, b"file", 0o644, os.getuid(), os.getgid())
        handle = filesystem.files.open(node, os.O_WRONLY)
        await filesystem.files.write(node, 0, b"good")
        filesystem.files.release(handle)
        await mount.drain()

        handle = filesystem.files.open(node, os.O_WRONLY | os.O_TRUNC)
        with pytest.raises(SupersededError):
            await flusher.files.copy(node, root)
        with pytest.raises(SupersededError):
            await flusher.files.update(node, (root, b"file"))
        assert (tmp_path / "share" / "file").read_bytes() == b"good"

        await filesystem.files.write(node, 0, b"better")
        filesystem.files.release(handle)
        await mount.drain()
        assert (tmp_path / "share" / "file").read_bytes() == b"better"
