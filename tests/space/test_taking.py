"""Who gets room, and who is told that there will be none."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted
from tests.volumes import QUICK, mounted
from wbcache.config import Size
from wbcache.daemon.eviction import Evictor
from wbcache.space import LOOK


async def test_more_than_is_handed_out_between_two_looks(tmp_path: Path) -> None:
    """The local copy of a large file's rewritten bytes: without it writers wait for the share."""
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        space = mount.volume.space
        space.look()
        assert space.free > 8 * LOOK
        assert space.take(2 * LOOK)
        assert space.take(4096)
        space.settle(2 * LOOK, 0)
        space.settle(4096, 0)
        assert not space.take(space.limit + LOOK)


async def test_clean_bytes_are_room_whenever_they_are_needed(tmp_path: Path) -> None:
    """However recently they were looked for: nobody is refused while there are any."""
    (tmp_path / "share").mkdir()
    config = replace(QUICK, cache=replace(QUICK.cache, size=Size(64 << 20)))
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache"), config=config) as mount:
        files, names, root = mount.filesystem.files, mount.filesystem.names, mount.volume.tree.root
        for number in range(20):
            node = await names.create(root, b"%d" % number, 0o644, os.getuid(), os.getgid())
            handle = files.open(node, os.O_WRONLY)
            await files.write(node, 0, bytes(1 << 20))
            files.release(handle)
        await mount.drain()
        mount.nursery.start_soon(Evictor(mount.volume, mount.flusher).run)
        space = mount.volume.space
        space.look()
        await space.wait(space.free - (1 << 20), small=True)
        with trio.fail_after(10):
            for _ in range(14):
                await space.wait(1 << 20, small=False)


@pytest.mark.usefixtures("fuse")
def test_tries_that_fail_are_no_progress(tmp_path: Path) -> None:
    """Errors that come more often than the deadline must not put ENOSPC off for ever."""
    (tmp_path / "backing").mkdir()
    config = {
        "cache": {"size": "96MiB"},
        "share": {"deadline": "3s", "lookup_deadline": "1s"},
        "flush": {"retry": {"first": "200ms", "max": "1s"}},
    }
    with (
        FaultShare(tmp_path / "backing") as share,
        Mounted(share.mountpoint, config=config) as mount,
    ):
        share.fail(["create", "write", "mkdir", "rename", "fsync"], errno.EIO)
        for i in range(6):
            (mount.path / f"small{i}").write_text("x")
        written = 0
        with open(mount.path / "big", "wb", buffering=0) as file:
            with pytest.raises(OSError) as caught:
                for _ in range(200):
                    written += file.write(b"x" * (1 << 20))
            assert caught.value.errno == errno.ENOSPC
        share.clear()
        mount.flush(timeout=60)
        assert os.path.getsize(tmp_path / "backing" / "big") >= written
