"""One directory with very many entries."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tests import volumes
from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, merge
from wbcache.config import ShareConfig
from wbcache.node import Directory
from wbcache.share import calls
from wbcache.share.descriptor import Descriptor

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("fuse")]

SIZES = [2_000, pytest.param(100_000, marks=pytest.mark.slow)]
PATIENT = merge(NEVER_BY_ITSELF, {"share": {"deadline": "300s", "lookup_deadline": "60s"}})


def fill(directory: Path, count: int) -> list[str]:
    """Make so many files, every fourth with a line in it; their names."""
    names = [f"sample-{number:07d}.png" for number in range(count)]
    for number, name in enumerate(names):
        fd = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        if not number % 4:
            os.write(fd, b"line\n")
        os.close(fd)
    return names


class Neighbour:
    """Somebody who works in the same directory meanwhile, and how long their calls take."""

    def __init__(self, directory: Path) -> None:
        self.took: list[float] = []
        self._directory = directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        path = self._directory / "neighbour"
        while not self._stop.wait(0.02):
            began = time.monotonic()
            path.write_bytes(b"x")
            path.stat()
            path.unlink()
            self.took.append(time.monotonic() - began)


def listed(directory: Path) -> tuple[set[str], float]:
    """The names in a directory, and the seconds it takes to list them."""
    began = time.monotonic()
    names = os.listdir(directory)
    took = time.monotonic() - began
    assert len(names) == len(set(names))
    return set(names), took


@pytest.mark.parametrize("count", SIZES)
def test_filled_here(tmp_path: Path, count: int) -> None:
    """It stays usable meanwhile, listing takes time in proportion, and so does what follows."""
    with Mounted(tmp_path / "share", config=PATIENT) as mount:
        took = {}
        for size in (count // 4, count):
            directory = mount.path / f"{size}"
            directory.mkdir()
            with Neighbour(directory) as neighbour:
                names = fill(directory, size)
            neighbour.took.sort()
            assert neighbour.took[len(neighbour.took) // 2] < 0.5, "the median"
            assert neighbour.took[-1] < 10
            took[size] = min(listed(directory)[1] for _ in range(3))
            assert listed(directory)[0] == set(names)
        # Linear would be 4, quadratic 16.
        assert took[count] < 10 * took[count // 4] + 0.5, took
        # Renames there, while everything is dirty.
        began = time.monotonic()
        for number in range(200):
            os.rename(directory / names[number], directory / f"renamed-{number}")
        assert time.monotonic() - began < 20
        mount.flush(timeout=600)
        with os.scandir(mount.source / str(count)) as entries:
            assert {entry.name for entry in entries} == set(os.listdir(directory))
        assert mount.umount("--timeout", "600").returncode == 0
        began = time.monotonic()
        mount.remount()
        assert time.monotonic() - began < 60
        assert len(listed(directory)[0]) == count


@pytest.fixture
def slow_directory(tmp_path: Path) -> Iterator[FaultShare]:
    (tmp_path / "backing").mkdir()
    with FaultShare(tmp_path / "backing", log_limit=2_000_000) as share:
        yield share
        assert share.errors() == ""


@pytest.mark.parametrize("count", SIZES)
def test_only_on_the_share(slow_directory: FaultShare, count: int) -> None:
    """Listing asks for the listing, not for each entry, and does not keep others waiting."""
    share = slow_directory
    (share.backing / "data").mkdir()
    (share.backing / "other").mkdir()
    names = fill(share.backing / "data", count)
    share.set(latency_ms=1)
    with Mounted(share.mountpoint, config=PATIENT) as mount:
        assert sorted(os.listdir(mount.path)) == ["data", "other"]
        share.clear_log()
        with Neighbour(mount.path / "other") as neighbour:
            found, _ = listed(mount.path / "data")
        assert found == set(names)
        assert max(neighbour.took, default=0.0) < 5
        calls = share.counts().calls
        assert calls.get("lookup", 0) + calls.get("getattr", 0) < max(100, count // 50), calls
        assert calls["readdir"] < count / 8
        # Again, from memory; then with every file's attributes.
        share.set(latency_ms=200)
        again, took = listed(mount.path / "data")
        assert again == found and took < 30
        share.set(latency_ms=0)
        some = names[:: max(1, count // 2000)]
        assert sum(os.stat(mount.path / "data" / name).st_size for name in some) == 5 * len(
            [name for name in some if not int(name[7:14]) % 4]
        )


def test_a_long_listing_is_waited_for_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is for an answer, not for all of a very large directory."""
    (tmp_path / "share").mkdir()
    stalled = threading.Event()
    config = replace(volumes.QUICK, share=ShareConfig(lookup_deadline=1.0))

    def slowly(directory: Descriptor, found: list[calls.Entry]) -> list[calls.Entry]:
        for number in range(8):
            time.sleep(0.2)
            found.append(calls.Entry(b"%d" % number, stat.S_IFREG))
        return found

    def never(directory: Descriptor, found: list[calls.Entry]) -> list[calls.Entry]:
        found.append(calls.Entry(b"first", stat.S_IFREG))
        stalled.wait(60)
        return found

    async def run() -> None:
        async with volumes.mounted(
            str(tmp_path / "share"), str(tmp_path / "cache"), config=config
        ) as mount:
            listings, root = mount.filesystem.listings, mount.volume.tree.root
            monkeypatch.setattr(calls, "scan", slowly)
            await listings.complete(root)
            assert len(root.local) == 8
            made = await mount.filesystem.names.mkdir(root, b"stalls", 0o755, 0, 0)
            assert isinstance(made, Directory)
            await mount.drain()
            made.listed_at = None
            monkeypatch.setattr(calls, "scan", never)
            with pytest.raises(TimeoutError):
                await listings.complete(made)
            assert made.local == {}
            stalled.set()

    trio.run(run)
