"""The load: what is timed, the same code for every column, in a process of its own.

    python -I load.py GROUP DIRECTORY [--scale S] [--cold FILE --below DIRECTORY] [--only NAME,...]

runs the workloads of GROUP one after the other in DIRECTORY (made here if it is not there) and
prints one JSON object {workload: rate}.  Only the standard library, and only os calls inside the
timed loops.  What a workload needs is made before its clock starts, and dirty pages are written
out first, so that one workload does not pay for the one before it.

Small files are removed in the last group only: for minutes after a removal ext4 walks past every
inode freed in a block group each time it creates a file there, so removals would slow down
whoever creates files next, whichever column that is.  Large files, on the contrary, leave memory
at once: on a virtual machine the first touch of a page costs more than the write it serves, and
who has to pay for it would depend on what ran before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MIB = 1 << 20


@dataclass(frozen=True)
class Size:
    """How much each workload does; `scaled` shrinks it for a smoke test."""

    bulk: int = 256 * MIB  # bytes
    appends: int = 20_000
    fsyncs: int = 400
    reopens: int = 3_000
    files: int = 1_500
    listed: int = 1_000  # files in the directory that is listed
    seconds: float = 0.6  # for how long stat and listdir repeat

    def scaled(self, scale: float) -> Size:
        """A copy with every amount multiplied by `scale`, at least one of each."""

        def some(amount: int) -> int:
            return max(1, round(amount * scale))

        return Size(
            bulk=max(MIB, some(self.bulk) // MIB * MIB),
            appends=some(self.appends),
            fsyncs=some(self.fsyncs),
            reopens=some(self.reopens),
            files=some(self.files),
            listed=some(self.listed),
            seconds=self.seconds * scale,
        )


class Place(NamedTuple):
    """Where one round works."""

    directory: str
    size: Size
    cold: str  # a file of `size.bulk` bytes nobody has read since it was put on the share
    below: str  # the directory that holds that file's bytes on the disk


def _rate(amount: float, started: float) -> float:
    return amount / (time.perf_counter() - started)


def _path(place: Place, name: str) -> str:
    return os.path.join(place.directory, name)


# -- bulk

_BLOCK = os.urandom(MIB)


def _write_bulk(place: Place, block: bytes) -> float:
    """Write a file twice and time the second time: the first takes its memory into use."""
    path = _path(place, f"bulk-{len(block)}")
    _write_file(path, block, place.size.bulk)
    os.unlink(path)
    started = time.perf_counter()
    _write_file(path, block, place.size.bulk)
    rate = _rate(place.size.bulk / MIB, started)
    os.unlink(path)
    return rate


def _write_file(path: str, block: bytes, size: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    for _ in range(size // len(block)):
        os.write(fd, block)
    os.close(fd)


def _write_1m(place: Place) -> float:
    return _write_bulk(place, _BLOCK)


def _write_64k(place: Place) -> float:
    return _write_bulk(place, _BLOCK[: 64 * 1024])


# -- appends

_RECORD = _BLOCK[:180]
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def _append_180(place: Place) -> float:
    path = _path(place, "events")
    fd = os.open(path, _APPEND, 0o644)
    for _ in range(50):
        os.write(fd, _RECORD)
    started = time.perf_counter()
    for _ in range(place.size.appends):
        os.write(fd, _RECORD)
    os.close(fd)
    return _rate(place.size.appends, started)


def _append_fsync(place: Place) -> float:
    path = _path(place, "log")
    fd = os.open(path, _APPEND, 0o644)
    os.write(fd, _RECORD)
    os.fsync(fd)
    started = time.perf_counter()
    for _ in range(place.size.fsyncs):
        os.write(fd, _RECORD)
        os.fsync(fd)
    rate = _rate(place.size.fsyncs, started)
    os.close(fd)
    return rate


def _reopen(place: Place) -> float:
    path = _path(place, "metrics.csv")
    os.close(os.open(path, _APPEND, 0o644))
    started = time.perf_counter()
    for _ in range(place.size.reopens):
        fd = os.open(path, _APPEND, 0o644)
        os.write(fd, _RECORD)
        os.close(fd)
    return _rate(place.size.reopens, started)


# -- many files

_PAGE = _BLOCK[:4096]


def _create_files(directory: str, count: int) -> float:
    os.mkdir(directory)
    paths = [os.path.join(directory, f"f{number:05d}") for number in range(count)]
    started = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, _PAGE)
        os.close(fd)
    return _rate(count, started)


def _files(place: Place) -> list[str]:
    """The files the workloads on many files share; made now if `create` did not run."""
    directory = _path(place, "many")
    if not os.path.isdir(directory):
        _create_files(directory, place.size.files)
    return [os.path.join(directory, name) for name in sorted(os.listdir(directory))]


def _create(place: Place) -> float:
    return _create_files(_path(place, "many"), place.size.files)


def _stat(place: Place) -> float:
    paths = _files(place)
    for path in paths:
        os.stat(path)
    count = 0
    started = time.perf_counter()
    end = started + place.size.seconds
    while time.perf_counter() < end:
        for path in paths:
            os.stat(path)
        count += len(paths)
    return _rate(count, started)


def _listdir(place: Place) -> float:
    directory = _path(place, "listed")
    _create_files(directory, place.size.listed)
    os.listdir(directory)
    count = 0
    started = time.perf_counter()
    end = started + place.size.seconds
    while time.perf_counter() < end:
        if len(os.listdir(directory)) != place.size.listed:
            raise AssertionError("a listing is not complete")
        count += 1
    return _rate(count, started)


def _rename(place: Place) -> float:
    paths = _files(place)
    targets = [path + ".done" for path in paths]
    started = time.perf_counter()
    for path, target in zip(paths, targets, strict=True):
        os.rename(path, target)
    return _rate(len(paths), started)


def _unlink(place: Place) -> float:
    paths = _files(place)
    started = time.perf_counter()
    for path in paths:
        os.unlink(path)
    return _rate(len(paths), started)


# -- reads


def _forget_cached(path: str) -> None:
    """Push the pages of a file, or of all files of a directory, out of memory; needs no root."""
    if not os.path.isdir(path):
        _forget_file(path)
    for folder, _, names in os.walk(path):
        for name in names:
            _forget_file(os.path.join(folder, name))


def _forget_file(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass  # nothing a page cache would hold
    finally:
        os.close(fd)


def _read_all(path: str, expected: int) -> float:
    started = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    total = 0
    while block := os.read(fd, MIB):
        total += len(block)
    os.close(fd)
    rate = _rate(total / MIB, started)
    if total != expected:
        raise AssertionError(f"read {total} bytes instead of {expected}")
    return rate


def _read_cold(place: Place) -> float:
    path = _path(place, "warm-up")
    _write_file(path, _BLOCK, place.size.bulk)
    os.unlink(path)
    _forget_cached(place.below)
    return _read_all(place.cold, place.size.bulk)


def _read_warm(place: Place) -> float:
    _read_all(place.cold, place.size.bulk)
    rate = _read_all(place.cold, place.size.bulk)
    _forget_cached(place.cold)
    _forget_cached(place.below)
    return rate


GROUPS: dict[str, dict[str, Callable[[Place], float]]] = {
    "bulk": {"write_1m": _write_1m, "write_64k": _write_64k},
    "log": {"append_180": _append_180, "append_fsync": _append_fsync, "reopen": _reopen},
    "many": {
        "create": _create,
        "stat": _stat,
        "listdir": _listdir,
        "rename": _rename,
    },
    "read": {"read_cold": _read_cold, "read_warm": _read_warm},
}
# Run when every round of the others is done, in the directories the group `many` left behind.
LAST: dict[str, dict[str, Callable[[Place], float]]] = {"many": {"unlink": _unlink}}


def main() -> None:
    """Run one group in one directory and print the rates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("group", choices=sorted(GROUPS))
    parser.add_argument("--last", action="store_true", help="the group's removals")
    parser.add_argument("directory")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--cold", default="")
    parser.add_argument("--below", default="")
    parser.add_argument("--only", default="")
    args = parser.parse_args()

    place = Place(args.directory, Size().scaled(args.scale), args.cold, args.below)
    os.makedirs(place.directory, exist_ok=True)
    only = set(args.only.split(",")) if args.only else None
    rates: dict[str, float] = {}
    for name, workload in (LAST if args.last else GROUPS)[args.group].items():
        if only is None or name in only:
            os.sync()
            rates[name] = workload(place)
    json.dump(rates, sys.stdout)


if __name__ == "__main__":
    main()
