"""Random operations on a few files, checked byte for byte against a model in memory.

Flushes run meanwhile or are asked for, the cache is far too small for the files so that clean bytes
are evicted, the kernel's pages are dropped so that reads arrive, and the mount is killed at times.
A failure prints its seed and its last operations.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.diskusage import disk_usage
from tests.mounting import NEVER_BY_ITSELF, Mounted, merge
from tests.waiting import wait_until

LONGEST = 300_000
SMALL_CACHE: dict[str, Any] = {
    "cache": {"size": "64MiB"},
    "policies": [{"match": "filling", "flush": "never"}],
}
FILLING = 34 << 20
"""Bytes that leave so little room in the small cache that whatever is clean is evicted."""
AT_ONCE: dict[str, Any] = {"flush": {"idle_delay": "50ms", "max_age": "150ms"}}
EVICTED = 64 << 10
"""Bytes that may remain of the cache files when everything clean is gone."""


class ByteTester:
    """One file, what it should hold, and what can happen to it."""

    def __init__(self, mount: Mounted, name: str, rng: random.Random) -> None:
        self._mount = mount
        self._path = mount.path / name
        self._rng = rng
        self._model = bytearray()
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        self.history: list[str] = []

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    # -- what changes it -----------------------------------------------------------------------

    def _bytes(self, longest: int) -> bytes:
        return self._rng.randbytes(self._rng.randint(1, longest))

    def _put(self, offset: int, data: bytes) -> None:
        if offset > len(self._model):
            self._model.extend(bytes(offset - len(self._model)))
        self._model[offset : offset + len(data)] = data

    def write(self) -> None:
        """pwrite anywhere, also behind the end."""
        offset, data = self._rng.randint(0, LONGEST), self._bytes(40_000)
        self.history.append(f"write {offset} {len(data)}")
        assert os.pwrite(self._descriptor, data, offset) == len(data)
        self._put(offset, data)

    def store(self) -> None:
        """Store through a shared mapping."""
        if not self._model:
            return
        offset = self._rng.randrange(len(self._model))
        data = self._bytes(20_000)[: len(self._model) - offset]
        self.history.append(f"store {offset} {len(data)}")
        with mmap.mmap(self._descriptor, len(self._model)) as mapping:
            mapping[offset : offset + len(data)] = data
        self._put(offset, data)

    def append(self) -> None:
        """Append a little through a descriptor of its own, as a logger does."""
        data = self._bytes(200)
        self.history.append(f"append {len(data)}")
        with open(self._path, "ab") as file:
            file.write(data)
        self._put(len(self._model), data)

    def truncate(self) -> None:
        """Cut or extend."""
        size = self._rng.choice([0, self._rng.randint(0, LONGEST), len(self._model) // 2])
        self.history.append(f"truncate {size}")
        os.ftruncate(self._descriptor, size)
        self._model[size:] = bytes(max(0, size - len(self._model)))

    def rewrite(self) -> None:
        """O_TRUNC and new bytes."""
        data = self._bytes(50_000)
        self.history.append(f"rewrite {len(data)}")
        self._path.write_bytes(data)
        self._model[:] = data

    def replace(self) -> None:
        """Rename a new file over it; the old descriptor is closed later."""
        data = self._bytes(50_000)
        self.history.append(f"replace {len(data)}")
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(data)
        os.replace(temporary, self._path)
        assert os.pread(self._descriptor, LONGEST * 2, 0) == self._model
        self._model[:] = data
        self.reopen()

    # -- what does not -------------------------------------------------------------------------

    def reopen(self) -> None:
        """Close and open; the kernel forgets its pages of it."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._descriptor)
        self._descriptor = os.open(self._path, os.O_RDWR)

    def forget(self) -> None:
        """The kernel forgets its pages; reads arrive at the daemon again."""
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """Read a part, or all of it."""
        size = len(self._model)
        offset = self._rng.choice([0, self._rng.randint(0, size)])
        count = self._rng.randint(1, 2 * LONGEST)
        assert os.fstat(self._descriptor).st_size == size
        found = os.pread(self._descriptor, count, offset)
        wanted = bytes(self._model[offset : offset + count])
        if found != wanted:
            at = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b)
            raise AssertionError(f"byte {offset + at} of {size} is wrong, {count} from {offset}")

    def flush(self) -> None:
        """Bring it to the share, which then holds the same."""
        self.history.append("flush")
        self._mount.flush(self._path.name)
        assert (self._mount.source / self._path.name).read_bytes() == self._model

    def kill(self) -> None:
        """Kill the daemon and mount again: everything is still there."""
        self.history.append("kill")
        self._mount.hand_over()
        self._mount.kill()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._mount.remount()
        self._descriptor = os.open(self._path, os.O_RDWR)
        self.check()

    def evict(self) -> None:
        """Wait until the cache holds nothing that the share has too."""
        self.flush()
        self.history.append("evict")
        wait_until(
            lambda: disk_usage(self._mount.cache_dir / "data") < FILLING + EVICTED, "clean bytes go"
        )
        self.forget()


WEIGHTS: dict[Callable[[ByteTester], None], int] = {
    ByteTester.write: 30,
    ByteTester.store: 15,
    ByteTester.append: 12,
    ByteTester.truncate: 10,
    ByteTester.rewrite: 2,
    ByteTester.replace: 2,
    ByteTester.reopen: 6,
    ByteTester.forget: 8,
    ByteTester.check: 30,
}


@contextlib.contextmanager
def explained(tester: ByteTester, seed: int) -> Iterator[None]:
    """Say what led to a failure."""
    try:
        yield
    except BaseException:
        print(f"seed {seed}, the last operations:", *tester.history[-40:], sep="\n  ")
        raise
    finally:
        tester.close()


def play(
    mount: Mounted, seed: int, length: int, extra: dict[Callable[[ByteTester], None], int]
) -> None:
    """Random operations, then a flush after which the share must hold the same."""
    filling = mount.path / "filling"
    if "policies" in mount.config and not filling.exists():
        filling.write_bytes(bytes(FILLING))
    rng = random.Random(seed)
    tester = ByteTester(mount, f"file{seed}", rng)
    weights = {**WEIGHTS, **extra}
    with explained(tester, seed):
        for operation in rng.choices([*weights], [*weights.values()], k=length):
            operation(tester)
        tester.forget()
        tester.check()
        tester.flush()


@pytest.fixture
def share(fuse: None, tmp_path: Path) -> Path:
    """An empty share."""
    return tmp_path / "share"


def test_while_flushes_and_evictions_run(share: Path) -> None:
    with Mounted(share, config=merge(AT_ONCE, SMALL_CACHE)) as mount:
        for seed in range(2):
            play(mount, seed, 4000, {})


def test_with_flushes_in_between(share: Path) -> None:
    with Mounted(share, config=NEVER_BY_ITSELF) as mount:
        for seed in range(10, 12):
            play(mount, seed, 250, {ByteTester.flush: 6})


def test_after_evictions_and_kills(share: Path) -> None:
    with Mounted(share, config=merge(NEVER_BY_ITSELF, SMALL_CACHE)) as mount:
        play(mount, 20, 150, {ByteTester.flush: 5, ByteTester.evict: 2, ByteTester.kill: 2})


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_for_long(share: Path) -> None:
    for seed in range(100, 400):
        config = merge(AT_ONCE if seed % 2 else NEVER_BY_ITSELF, SMALL_CACHE if seed % 3 else {})
        with Mounted(share.with_name(str(seed)), config=config) as mount:
            play(mount, seed, 1500, {ByteTester.flush: 4, ByteTester.kill: 1})
