"""The cache keeps to its size, and what is larger passes through it at the share's speed."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.crash.test_power_loss import held, lose_power
from tests.diskusage import disk_usage
from tests.faultshare.client import FaultShare
from tests.mounting import Mounted
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fuse")

MIB = 1 << 20
LIMIT = 64
SMALL_CACHE: dict[str, Any] = {"cache": {"size": f"{LIMIT}MiB"}}


@pytest.fixture
def share(tmp_path: Path) -> Iterator[FaultShare]:
    (tmp_path / "backing").mkdir()
    with FaultShare(tmp_path / "backing", bandwidth_mb=150, latency_ms=1) as share:
        yield share


class Watch:
    """Follows how much of the disk a cache takes."""

    def __init__(self, cache_dir: Path) -> None:
        self._directory = cache_dir
        self._end = threading.Event()
        self.peak = 0

    def run(self) -> None:
        while not self._end.wait(0.01):
            self.peak = max(self.peak, disk_usage(self._directory))

    @contextmanager
    def running(self) -> Iterator[Watch]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield self
        finally:
            self._end.set()
            thread.join()


def block(number: int) -> bytes:
    """A mebibyte that differs from every other."""
    return random.Random(number).randbytes(MIB)


def write_blocks(path: Path, numbers: range) -> None:
    with open(path, "wb", buffering=0) as file:
        for number in numbers:
            file.write(block(number))


def assert_blocks(path: Path, numbers: range) -> None:
    with open(path, "rb", buffering=0) as file:
        for number in numbers:
            assert file.read(MIB) == block(number), f"block {number}"
        assert not file.read(1)


def temporaries(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".wbcache-")]


def test_many_writers_stay_within_the_limit(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=SMALL_CACHE) as mount:
        parts = [range(n * 20, n * 20 + 20) for n in range(8)]
        with Watch(mount.cache_dir).running() as watch, ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda part: write_blocks(mount.path / str(part.start), part), parts))
        assert watch.peak <= LIMIT * MIB
        for part in parts:
            assert_blocks(mount.path / str(part.start), part)
        assert mount.umount().returncode == 0
        for part in parts:
            assert_blocks(share.backing / str(part.start), part)
        assert not temporaries(share.backing)


def test_a_file_larger_than_the_cache_passes(share: FaultShare) -> None:
    """It is complete when it gets its name on the share, which has shown the old one until then."""
    count = 150
    (share.backing / "model").write_bytes(b"the last one")
    with Mounted(share.mountpoint, config=SMALL_CACHE) as mount:
        log = os.open(mount.path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        with Watch(mount.cache_dir).running() as watch:
            with open(mount.path / "model", "wb", buffering=0) as file:
                for number in range(count):
                    file.write(block(number))
                    os.write(log, b"step %d\n" % number)
                    assert (share.backing / "model").read_bytes() == b"the last one"
            assert_blocks(mount.path / "model", range(count))
        os.close(log)
        assert watch.peak <= LIMIT * MIB
        assert mount.umount().returncode == 0
    assert_blocks(share.backing / "model", range(count))
    lines = [b"step %d\n" % number for number in range(count)]
    assert (share.backing / "log").read_bytes() == b"".join(lines)
    assert not temporaries(share.backing)


def test_two_open_files_fill_the_cache_together(share: FaultShare) -> None:
    """Neither is larger than the cache, and neither can be published before the other goes on."""
    with Mounted(share.mountpoint, config=SMALL_CACHE) as mount:
        parts = [range(40), range(100, 140)]
        with (
            open(mount.path / "0", "wb", buffering=0) as one,
            open(mount.path / "100", "wb", buffering=0) as other,
        ):
            for first, second in zip(*parts, strict=True):
                one.write(block(first))
                other.write(block(second))
        assert mount.umount().returncode == 0
        for part in parts:
            assert_blocks(share.backing / str(part.start), part)


def test_a_kill_while_a_large_file_passes(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=SMALL_CACHE) as mount:
        file = os.open(mount.path / "model", os.O_CREAT | os.O_WRONLY)
        count = 0
        while share.written().total() < 50 * MIB:
            os.write(file, block(count))
            count += 1
        mount.kill()
        with pytest.raises(OSError, match="not connected"):
            os.write(file, b"x")
        with pytest.raises(OSError, match="not connected"):
            os.close(file)
        mount.remount()
        assert_blocks(mount.path / "model", range(count))
        assert mount.umount().returncode == 0
    assert_blocks(share.backing / "model", range(count))
    assert not temporaries(share.backing)


def test_a_power_loss_while_a_large_file_passes(share: FaultShare) -> None:
    """Nobody knows what is missing at its end: it does not replace what the share has."""
    (share.backing / "model").write_bytes(b"the last one")
    with Mounted(share.mountpoint, config=SMALL_CACHE) as mount:
        with held(mount.path / "model", "w") as file:
            for number in range(80):
                file.write(block(number))
            lose_power(mount, {"model": 60 * MIB})
        with pytest.raises(AssertionError):
            mount.flush(timeout=2.0)
        assert (share.backing / "model").read_bytes() == b"the last one"
        (row,) = [row for row in mount.client.pending() if row["path"] == "model"]
        assert "power loss" in row["reason"]
        (mount.path / "model").write_bytes(b"the next one")
        mount.flush()
        assert (share.backing / "model").read_bytes() == b"the next one"
        wait_until(lambda: not temporaries(share.backing), "the temporary is removed")


def test_a_large_file_is_rewritten_while_it_passes(share: FaultShare) -> None:
    """As formats do that have an index at the front."""
    count = 100
    with Mounted(share.mountpoint, config=SMALL_CACHE) as mount:
        rng = random.Random(1)
        model = bytearray()
        with open(mount.path / "model", "w+b", buffering=0) as file:
            for number in range(count):
                file.seek(0, os.SEEK_END)
                file.write(block(number))
                model += block(number)
                for _ in range(3):
                    at, data = rng.randrange(len(model)), rng.randbytes(rng.randrange(1, 5000))
                    data = data[: len(model) - at]
                    file.seek(at)
                    file.write(data)
                    model[at : at + len(data)] = data
            assert (mount.path / "model").read_bytes() == model
            file.truncate(len(model) - 5 * MIB)
            del model[-5 * MIB :]
        assert mount.umount().returncode == 0
    assert (share.backing / "model").read_bytes() == model
    assert not temporaries(share.backing)


@pytest.mark.parametrize("gone", ["removed", "emptied", "replaced"])
def test_a_large_file_is_given_up_while_it_passes(share: FaultShare, gone: str) -> None:
    with Mounted(share.mountpoint, config=SMALL_CACHE) as mount:
        path = mount.path / "model"
        with open(path, "wb", buffering=0) as file:
            for number in range(80):
                file.write(block(number))
            assert temporaries(share.backing)
            if gone == "removed":
                path.unlink()
            elif gone == "emptied":
                file.truncate(0)
                file.seek(0)
                file.write(b"new")
            else:
                (mount.path / "other").write_bytes(b"new")
                os.rename(mount.path / "other", path)
        mount.flush()
        wait_until(lambda: not temporaries(share.backing), "the temporary is removed")
        if gone == "removed":
            assert not (share.backing / "model").exists()
        else:
            assert (share.backing / "model").read_bytes() == b"new"


def test_a_full_cache_over_a_dead_share_refuses_after_the_deadline(share: FaultShare) -> None:
    config = {**SMALL_CACHE, "share": {"deadline": "1s", "lookup_deadline": "500ms"}}
    with Mounted(share.mountpoint, config=config) as mount:
        log = os.open(mount.path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(log, b"before\n")
        mount.flush()
        assert os.listdir(mount.path) == ["log"]
        rule = share.hang()
        file = os.open(mount.path / "model", os.O_CREAT | os.O_WRONLY)
        count = 0
        with pytest.raises(OSError) as refused:
            for _ in range(2 * LIMIT):
                os.write(file, block(count))
                count += 1
        assert refused.value.errno == errno.ENOSPC
        # A log is written to all the same.
        for _ in range(100):
            os.write(log, b"meanwhile\n")
        share.release(rule)
        share.clear()
        os.write(file, block(count))
        os.close(file)
        os.close(log)
        assert mount.umount().returncode == 0
    assert_blocks(share.backing / "model", range(count + 1))
    assert (share.backing / "log").read_bytes() == b"before\n" + b"meanwhile\n" * 100


def test_clean_bytes_make_room_before_anybody_waits(share: FaultShare) -> None:
    """What the share has is dropped, the least recently used first, without a call on the share."""
    with Mounted(share.mountpoint, config=SMALL_CACHE) as mount:
        for n in range(6):
            write_blocks(mount.path / str(n), range(n * 5, n * 5 + 5))
        mount.flush()
        assert len(os.listdir(mount.path)) == 6
        share.hang()
        write_blocks(mount.path / "new", range(100, 125))
        assert_blocks(mount.path / "new", range(100, 125))
        assert disk_usage(mount.cache_dir) <= LIMIT * MIB
        share.clear()
        share.release()
        assert mount.umount().returncode == 0
    assert_blocks(share.backing / "new", range(100, 125))
