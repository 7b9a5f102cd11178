"""Files that are rewritten in places, all of them open, through a cache that can't hold them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted
from tests.space.test_limit import LIMIT, MIB, block, temporaries

pytestmark = pytest.mark.usefixtures("fuse")

SIZE = 20
"""MiB of each of four files."""

CONFIG = {
    "cache": {"size": f"{LIMIT}MiB"},
    "share": {"deadline": "8s"},
    "flush": {"idle_delay": "50ms", "max_age": "200ms"},
}


@pytest.fixture
def share(tmp_path: Path) -> Iterator[FaultShare]:
    (tmp_path / "backing").mkdir()
    with FaultShare(tmp_path / "backing", bandwidth_mb=40, latency_ms=1) as share:
        yield share


def rewrite(path: Path, seed: int) -> bytes:
    """Change a file in many places, while others do the same; returns what it holds then."""
    chance, held = random.Random(seed), bytearray()
    with open(path, "r+b", buffering=0) as file:
        for number in range(SIZE):
            held += block(seed * SIZE + number)
        for number in range(4 * SIZE):
            at = chance.randrange(SIZE * MIB // 4096) * 4096
            data = chance.randbytes(4096) if number % 4 else block(number)[: SIZE * MIB - at]
            assert os.pwrite(file.fileno(), data, at) == len(data)
            held[at : at + len(data)] = data
    return bytes(held)


@pytest.mark.parametrize("closed", [True, False])
def test_nobody_waits_for_room_that_waits_for_him(share: FaultShare, closed: bool) -> None:
    """What goes in place of what the share has waits for its neighbours that are written, and they
    would wait for the room that it takes."""
    with Mounted(share.mountpoint, config=CONFIG) as mount:
        paths = [mount.path / f"data-{n}" for n in range(4)]
        held = [os.open(path, os.O_CREAT | os.O_WRONLY) for path in paths] if not closed else []
        for seed, path in enumerate(paths):
            with open(path, "r+b" if held else "wb", buffering=0) as file:
                for number in range(SIZE):
                    file.write(block(seed * SIZE + number))
        with ThreadPoolExecutor(4) as pool:
            contents = list(pool.map(rewrite, paths, range(4)))
        for path, content in zip(paths, contents, strict=True):
            assert path.read_bytes() == content
        for descriptor in held:
            os.close(descriptor)
        assert mount.umount().returncode == 0
    for path, content in zip(paths, contents, strict=True):
        assert (share.backing / path.name).read_bytes() == content
    assert not temporaries(share.backing)
