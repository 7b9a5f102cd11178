"""Who gets room, and who is told that there will be none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted
from tests.volumes import mounted
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
