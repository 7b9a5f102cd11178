"""Files that are nearly all hole."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.diskusage import disk_usage
from tests.mounting import NEVER_BY_ITSELF, Mounted, merge

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("fuse")]

MIB = 1 << 20
SMALL_CACHE = merge(NEVER_BY_ITSELF, {"cache": {"size": "128MiB"}})


@pytest.mark.parametrize("size", [256 << 20, pytest.param(64 << 30, marks=pytest.mark.slow)])
def test_a_sparse_file(tmp_path: Path, size: int) -> None:
    """It takes no more here or on the share than what is in it, at any time."""
    places = [0, size // 2 + 12345, size - 4096]
    parts = [bytes([65 + number]) * 4096 for number in range(3)]

    def check(path: Path) -> None:
        assert path.stat().st_size == size
        with open(path, "rb") as file:
            for place, part in zip(places, parts, strict=True):
                assert os.pread(file.fileno(), 4096, place) == part
            assert os.pread(file.fileno(), 100, size // 4) == bytes(100)
            assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
            assert 0 < os.lseek(file.fileno(), 0, os.SEEK_HOLE) <= size

    share = tmp_path / "share"
    with Mounted(share, config=SMALL_CACHE) as mount:
        path = mount.path / "sparse"
        began = time.monotonic()
        with open(path, "wb") as file:
            file.truncate(size)
            for place, part in zip(places, parts, strict=True):
                os.pwrite(file.fileno(), part, place)
        check(path)
        mount.flush(timeout=60)
        assert time.monotonic() - began < 60
        check(share / "sparse")
        assert disk_usage(share) < 8 * MIB
        # Changed in place, and grown.
        with open(path, "r+b") as changed:
            os.pwrite(changed.fileno(), parts[2], places[0])
            parts[0] = parts[2]
            changed.truncate(size := size + MIB)
        mount.flush(timeout=60)
        check(share / "sparse")
        assert disk_usage(share) < 8 * MIB
        # The cache is filled with other things: it is evicted, and read from the share.
        for number in range(4):
            (mount.path / f"other-{number}").write_bytes(os.urandom(32 * MIB))
            mount.flush()
        check(path)
        assert disk_usage(mount.cache_dir) < 160 * MIB
        assert mount.umount().returncode == 0
        mount.remount()
        check(path)
    with Mounted(share, config=SMALL_CACHE) as mount:
        check(mount.path / "sparse")
        if size < 2 << 30:
            copy = tmp_path / "copy"
            subprocess.run(["cp", "--sparse=always", mount.path / "sparse", copy], check=True)
            check(copy)
            assert copy.stat().st_blocks * 512 < 8 * MIB
