"""The journal refuses for a moment what has happened on the share, and then we are killed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.volumes import mounted
from wbcache.errors import CacheDiskError
from wbcache.tree import Item


async def test_bytes_written_while_a_publish_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, cache = str(tmp_path / "share"), str(tmp_path / "cache")
    os.mkdir(share)
    async with mounted(share, cache) as mount:
        mount.flusher.suspended = True
        files, names, root = mount.filesystem.files, mount.filesystem.names, mount.volume.tree.root
        node = await names.create(root, b"file", 0o644, os.getuid(), os.getgid())
        handle = files.open(node, os.O_WRONLY)
        await files.write(node, 0, b"a" * 100)
        files.release(handle)
        await mount.flusher.files.copy(node, root)
        handle = files.open(node, os.O_WRONLY)
        await files.write(node, 10, b"Z" * 10)
        await files.fsync(node)
        files.release(handle)
        journal = mount.volume.journal
        arrived = mount.flusher.files.arrived

        def refuse(items: Iterable[Item], extra: Callable[[], None] | None) -> None:
            raise CacheDiskError(errno.EIO, "the cache disk fails")

        def arrived_meanwhile(*args: object, **named: object) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(journal, "_save", refuse)
                arrived(*args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(mount.flusher.files, "arrived", arrived_meanwhile)
        await mount.flusher.files.publish(node, (root, b"file"), None)
        await names.create(root, b"other", 0o644, os.getuid(), os.getgid())
    async with mounted(share, cache) as mount:
        found = await mount.filesystem.names.lookup(mount.volume.tree.root, b"file")
        assert found is not None
        wanted = b"a" * 10 + b"Z" * 10 + b"a" * 80
        assert await mount.filesystem.files.read(found, 0, 1000) == wanted
        await mount.drain()
        assert (tmp_path / "share" / "file").read_bytes() == wanted
