"""Sequential reads of what only the share has keep its line busy; other reads don't read ahead."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.faultshare.client import FaultShare, Op
from tests.mounting import Mounted

SIZE = 12 << 20


def _reads(share: FaultShare) -> list[Op]:
    return [op for op in share.log() if op.op == "read"]


def _most_at_once(reads: list[Op]) -> int:
    edges = sorted(
        edge for op in reads if op.end is not None for edge in ((op.start, 1), (op.end, -1))
    )
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def test_a_sequential_reader_has_several_reads_on_their_way(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    data = random.Random(1).randbytes(SIZE + 12345)
    (backing / "data").write_bytes(data)
    share = FaultShare(backing, latency_ms=20, attr_timeout=10, entry_timeout=10, readahead_kb=1024)
    with share, Mounted(share.mountpoint) as mount:
        share.clear_log()
        assert (mount.path / "data").read_bytes() == data
        reads = _reads(share)
        assert _most_at_once(reads) >= 3
        # Nothing is fetched twice to speak of.
        assert sum(op.size for op in reads) < 1.3 * len(data)


def test_random_reads_fetch_what_they_ask_for(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    data = random.Random(2).randbytes(SIZE)
    (backing / "data").write_bytes(data)
    order = random.Random(3)
    share = FaultShare(backing, attr_timeout=10, entry_timeout=10, direct_io=True)
    with share, Mounted(share.mountpoint) as mount:
        share.clear_log()
        file = os.open(mount.path / "data", os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            for _ in range(20):
                at = order.randrange(2 << 20, SIZE - 4096)
                assert os.pread(file, 4096, at) == data[at : at + 4096]
        finally:
            os.close(file)
        assert sum(op.size for op in _reads(share)) < 20 * (256 << 10)


def test_what_was_read_ahead_of_a_change_is_not_served_after_it(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    old, new = b"o" * SIZE, b"n" * SIZE
    (backing / "data").write_bytes(old)
    with FaultShare(backing, latency_ms=5) as share, Mounted(share.mountpoint) as mount:
        with open(mount.path / "data", "rb", buffering=0) as file:
            file.read(2 << 20)  # the next megabytes are on their way
            (mount.path / "new").write_bytes(new)
            os.rename(mount.path / "new", mount.path / "data")
            mount.flush()
            # The descriptor keeps the file it opened, the name shows the new one.
            assert file.read(1 << 20) == b"o" * (1 << 20)
        assert (mount.path / "data").read_bytes() == new
