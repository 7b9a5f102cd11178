"""Sequential reads of what only the share has keep its line busy; other reads don't read ahead."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.faultshare.client import FaultShare, Op
from tests.mounting import NEVER_BY_ITSELF, Mounted

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


LONG = 300.0
"""Seconds for which the share's bytes may be waited for: longer than the test takes."""


@pytest.mark.timeout(120)
def test_what_is_here_is_not_held_back_by_what_is_read_ahead_of_it(tmp_path: Path) -> None:
    """The kernel asks for a few pages more than a program; those are only on a share that hangs."""
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing" / "data").write_bytes(bytes(SIZE))
    config = {**NEVER_BY_ITSELF, "share": {"lookup_deadline": "500ms", "deadline": f"{LONG:g}s"}}
    with (
        FaultShare(tmp_path / "backing") as share,
        Mounted(share.mountpoint, config=config) as mount,
    ):
        assert (mount.path / "data").stat().st_size == SIZE
        with opened(mount.path / "data") as file:
            places = (0, 1 << 20, SIZE - 4096)
            for at in places:
                os.pwrite(file, b"here" * 1024, at)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            share.hang()
            for at in places:
                assert os.pread(file, 4096, at) == b"here" * 1024
            share.release()
            share.clear()


@pytest.mark.timeout(120)
def test_a_share_that_takes_long_to_read_is_waited_for_all_the_same(tmp_path: Path) -> None:
    """Longer than a look-up may take: whoever wants the bytes waits, and gets them."""
    size = 5 * 4096
    (tmp_path / "backing").mkdir()
    data = random.Random(4).randbytes(size)
    (tmp_path / "backing" / "data").write_bytes(data)
    config = {**NEVER_BY_ITSELF, "share": {"lookup_deadline": "300ms"}}
    with (
        FaultShare(tmp_path / "backing") as share,
        Mounted(share.mountpoint, config=config) as mount,
    ):
        assert (mount.path / "data").stat().st_size == size
        with opened(mount.path / "data") as file:
            os.pwrite(file, b"here", 4096)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            share.set(latency_by_op={"read": 600})
            assert os.pread(file, size, 0) == data[:4096] + b"here" + data[4100:]
