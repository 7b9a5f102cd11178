"""Run every workload over every column, interleaved, and collect the rates."""

from __future__ import annotations

import array
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.bench import load
from tests.bench.awake import processors_awake
from tests.bench.columns import Column, Mounted
from tests.bench.mounting import BenchError
from wbcache.mounts import canonical, mount_of, read_mounts

_LOAD = os.path.abspath(load.__file__)
_LOAD_DEADLINE = 300.0
_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602
_FS_TOPDIR_FL = 0x00020000

_Phase = dict[str, dict[str, Callable[[load.Place], float]]]
Rates = dict[str, dict[str, list[float]]]  # column -> workload -> one rate a round


@dataclass
class Results:
    """What one run found."""

    rates: Rates = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # columns left out, and why
    awake: bool = False  # whether the processors were kept from sleeping
    load_before: float = 0.0  # the machine's load average when the run began


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    rounds: int
    scale: float  # of the amounts of every workload
    write_back: int  # seconds each column holds back what it would send to its share
    workloads: frozenset[str]  # empty: all
    awake: bool = True  # keep the processors from sleeping, where that is possible


def workload_names() -> list[str]:
    """All workloads, in the order they run and are printed."""
    return [
        name for phase in (load.GROUPS, load.LAST) for group in phase.values() for name in group
    ]


def run(
    columns: Sequence[Column], plan: Plan, directory: str, say: Callable[[str], None]
) -> Results:
    """Measure `columns` below `directory`, which must be on the disk that caches would be on.

    Within a round each group of workloads visits every column before the next group starts, and
    each round starts with another column, so that a drift of the machine meets all alike.
    Columns that cannot run are left out and named in the results.
    """
    _refuse_memory(directory)
    results = Results(load_before=os.getloadavg()[0])
    try:
        with ExitStack() as stack:
            work = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=directory))
            _spread(work)
            if plan.awake:
                results.awake = stack.enter_context(processors_awake())
            ready = [
                (column, mounted)
                for column in columns
                if (mounted := _set_up(column, work, plan, stack, results, say))
            ]
            for phase in (load.GROUPS, load.LAST):
                for number in range(plan.rounds):
                    _one_round(phase, number, ready, plan, results, say)
    except BenchError as error:
        results.problems.append(str(error))  # of a column that does not come down
    return results


def _set_up(
    column: Column,
    work: str,
    plan: Plan,
    stack: ExitStack,
    results: Results,
    say: Callable[[str], None],
) -> Mounted | None:
    say(f"setting up {column.title}")
    own = tempfile.mkdtemp(prefix=f"{column.name}-", dir=work)
    try:
        mounted = stack.enter_context(
            column.mounted(own, plan.rounds, _cold_bytes(plan), plan.write_back)
        )
    except BenchError as error:
        results.problems.append(f"{column.title}: {error}")
        return None
    results.titles[column.name] = column.title
    results.rates[column.name] = {}
    return mounted


def _one_round(
    phase: _Phase,
    number: int,
    ready: list[tuple[Column, Mounted]],
    plan: Plan,
    results: Results,
    say: Callable[[str], None],
) -> None:
    for group, members in phase.items():
        names = [name for name in members if not plan.workloads or name in plan.workloads]
        if not names:
            continue
        shift = number % len(ready) if ready else 0
        for column, mounted in ready[shift:] + ready[:shift]:
            say(f"round {number + 1} of {plan.rounds}: {group} on {column.title}")
            try:
                rates = _load(phase, group, names, number, mounted, plan.scale)
            except BenchError as error:
                results.problems.append(f"{column.title}, {group}: {error}")
                continue
            for name, rate in rates.items():
                results.rates[column.name].setdefault(name, []).append(rate)


def _load(
    phase: _Phase, group: str, names: Iterable[str], number: int, mounted: Mounted, scale: float
) -> dict[str, float]:
    command = [
        sys.executable,
        "-I",
        _LOAD,
        group,
        os.path.join(mounted.root, f"{group}-{number}"),
        f"--scale={scale}",
        f"--cold={mounted.cold(number)}",
        f"--below={mounted.share}",
        f"--only={','.join(names)}",
        *(["--last"] if phase is load.LAST else []),
    ]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_LOAD_DEADLINE
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"not done after {_LOAD_DEADLINE:.0f} s") from None
    if done.returncode != 0:
        raise BenchError(done.stderr.strip().splitlines()[-1] if done.stderr else "no output")
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def _cold_bytes(plan: Plan) -> int:
    return load.Size().scaled(plan.scale).bulk


def _refuse_memory(directory: str) -> None:
    """A benchmark in memory says nothing about a disk."""
    mounts = read_mounts()
    place = mount_of(canonical(directory, mounts), mounts)
    if place is not None and place.is_memory:
        raise BenchError(
            f"{directory} is on {place.fstype}; name a directory on a disk with --work-dir"
        )


def _spread(directory: str) -> None:
    """Have ext4 put each directory made in `directory` into a block group of its own.

    Each column then has its own inodes, not those the column or the run before has just freed
    (see the load).  Other file systems may not know the flag, and do not need it.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = array.array("l", [0])
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
        flags[0] |= _FS_TOPDIR_FL
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, flags)
    except OSError:
        pass
    finally:
        os.close(fd)
