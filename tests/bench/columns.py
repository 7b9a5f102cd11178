"""What is measured: the bare disk, the ceiling, and wbcache with and without xattrs.

Every column works in a directory of its own on one disk, and holds back what it would send to
its share by the same delay (`write_back`, seconds), so that no column pays for background
transfers while another does not.
"""

from __future__ import annotations

import abc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from tests.bench.mounting import BenchError, served, take_down
from tests.mounting import wbcache

_COLD = "cold"


class Mounted(NamedTuple):
    """A column ready to be measured."""

    root: str  # where the load works
    share: str  # where its bytes end up

    def cold(self, number: int) -> str:
        """The file that round `number` reads for the first time."""
        return os.path.join(self.root, _COLD, f"r{number}")


class Column(abc.ABC):
    """One file system under test."""

    name: str  # on the command line and in JSON
    title: str  # in the table

    @abc.abstractmethod
    def mounted(
        self, work: str, rounds: int, cold_bytes: int, write_back: int
    ) -> AbstractContextManager[Mounted]:
        """Set up below the empty directory `work`, and take down at the end of the block.

        Raises BenchError when this column cannot run here.
        """

    def directories(self, work: str, *names: str) -> list[str]:
        """Make and return the named directories below `work`."""
        paths = [os.path.join(work, name) for name in names]
        for path in paths:
            os.mkdir(path)
        return paths


def seed_cold(directory: str, rounds: int, size: int) -> None:
    """Put one file of `size` bytes for each round into `directory`, on the disk."""
    os.mkdir(os.path.join(directory, _COLD))
    block = os.urandom(1 << 20)
    for number in range(rounds):
        path = os.path.join(directory, _COLD, f"r{number}")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for offset in range(0, size, len(block)):
                os.write(fd, block[: size - offset])
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Native(Column):
    """A plain directory on the disk that holds the caches."""

    name = "native"
    title = "native disk"

    @contextmanager
    def mounted(
        self, work: str, rounds: int, cold_bytes: int, write_back: int
    ) -> Iterator[Mounted]:
        (root,) = self.directories(work, "root")
        seed_cold(root, rounds, cold_bytes)
        yield Mounted(root, root)


class Ceiling(Column):
    """The bare pyfuse3 pass-through."""

    name = "ceiling"
    title = "pyfuse3 ceiling"

    def __init__(self, *, xattr: bool = True) -> None:
        self._options = [] if xattr else ["--no-xattr"]
        if not xattr:
            self.name, self.title = "ceiling-noxattr", "ceiling, no xattr"

    @contextmanager
    def mounted(
        self, work: str, rounds: int, cold_bytes: int, write_back: int
    ) -> Iterator[Mounted]:
        share, mountpoint = self.directories(work, "share", "mnt")
        seed_cold(share, rounds, cold_bytes)
        command = [sys.executable, "-m", "tests.bench.passthrough", share, mountpoint]
        with served([*command, *self._options], mountpoint, os.path.join(work, "ceiling.log")):
            yield Mounted(mountpoint, share)


class WbCache(Column):
    """The mount of this project: journal and durability on, everything else at its default."""

    name = "wbcache"
    title = "wbcache"

    def __init__(self, *, xattr: bool = True) -> None:
        self._config = "" if xattr else "xattr: off\n"
        if not xattr:
            self.name, self.title = "wbcache-noxattr", "wbcache, xattr off"

    @contextmanager
    def mounted(
        self, work: str, rounds: int, cold_bytes: int, write_back: int
    ) -> Iterator[Mounted]:
        (share,) = self.directories(work, "share")
        seed_cold(share, rounds, cold_bytes)
        mountpoint = self.mount(work, share, write_back)
        try:
            yield Mounted(mountpoint, share)
        finally:
            self._end(mountpoint)

    def mount(self, work: str, share: str, write_back: int | None) -> str:
        """Mount `share`; returns where. With `write_back` None it flushes as it does by default."""
        (mountpoint,) = self.directories(work, "mnt")
        config = os.path.join(work, "config.yaml")
        with open(config, "w", encoding="utf-8") as text:
            text.write(self._config)
            if write_back is not None:
                text.write(f"flush: {{idle_delay: {write_back}s, max_age: {write_back}s}}\n")
        cache = os.path.join(work, "cache")
        done = wbcache("mount", share, mountpoint, "--cache-dir", cache, "--config", config)
        if done.returncode != 0:
            raise BenchError(f"wbcache mount ended with {done.returncode}: {done.stderr.strip()}")
        return mountpoint

    def _end(self, mountpoint: str) -> None:
        """Unmount without bringing gigabytes to a share that is thrown away next."""
        try:
            done = wbcache("umount", mountpoint, "--no-drain")
        except subprocess.TimeoutExpired:
            problem = "does not end"
        else:
            problem = "" if done.returncode in (0, 3) else done.stderr.strip()
        take_down(mountpoint)
        if problem:
            raise BenchError(f"wbcache umount: {problem}")
