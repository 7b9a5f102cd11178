"""The hang benchmark: a training loop on a share that stops answering in the middle.

    python -m tests.bench.hang [--hang 120] [--columns native,wbcache,rclone,juicefs] [--json FILE]

For each column in turn: a share of its own (`tests.faultshare`), the mount over it with its
defaults, and the loop of `training.py` on it. After some time every call on the share hangs, for
``--hang`` seconds; then it goes on as if nothing had been. Printed are the errors and the times of
the calls that the loop made during the hang, and whether the share holds afterwards what the loop
wrote, to the byte. JuiceFS's files are not files on its share: they are read back through another
mount of it, with an empty cache. The bare disk is there for what the machine itself adds.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tests.bench import training
from tests.bench.columns import WbCache
from tests.bench.mounting import BenchError, take_down
from tests.bench.peers import JuiceFS, Rclone, default_directory, ensure_peers
from tests.faultshare.client import FaultShare
from tests.mounting import wbcache

WORST, P99 = 0.25, 0.01
"""What wbcache is to stay below during the hang, in seconds."""

COMPLETE = 300.0
"""Seconds after the loop until everything has to be on the share."""

ENDS = 90.0
"""Seconds for the loop to end, once the share answers and it was told to."""

Digests = dict[str, str]
"""What a directory holds: {name: SHA-256}."""


@dataclass(frozen=True)
class Plan:
    """One run."""

    hang: float  # seconds
    around: float  # seconds of work before and after
    latency_ms: float
    bandwidth_mb: float
    checkpoint: int  # bytes
    every: float  # seconds between checkpoints


@dataclass
class Result:
    """What a column did while the share hung, and afterwards."""

    name: str
    calls: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # "rename ETIMEDOUT" -> how often
    p50: float = 0.0  # seconds
    p99: float = 0.0
    worst: float = 0.0
    slowest: list[tuple[str, float, float]] = field(default_factory=list)
    """(kind, seconds since the hang began, seconds) of the five worst calls."""
    elsewhere: float = 0.0
    """The worst call before and after the hang."""
    complete: str = ""
    """How long it took until the share had everything, or what it lacked."""


class Peer:
    """A file system under test, on a share that is mounted already."""

    def __init__(self, name: str, programs: str) -> None:
        self.name = name
        self._programs = programs

    def run(self, work: str, share: str) -> AbstractContextManager[Peer]:
        """Mount; what `root` and `arrived` need is there for the length of the block."""
        raise NotImplementedError

    root: str
    """Where the loop works."""

    def arrived(self, wanted: Digests) -> str:
        """Wait until the share has everything; returns what it lacks, or nothing."""
        raise NotImplementedError


class _Native(Peer):
    """The disk that holds the caches, for what the machine itself adds."""

    @contextmanager
    def run(self, work: str, share: str) -> Iterator[Peer]:
        self.root = os.path.join(work, "native")
        os.mkdir(self.root)
        yield self

    def arrived(self, wanted: Digests) -> str:
        return differences(os.path.join(self.root, "run"), wanted)


class _WbCache(Peer):
    @contextmanager
    def run(self, work: str, share: str) -> Iterator[Peer]:
        self._share = share
        self.root = WbCache().mount(work, share, None)
        try:
            yield self
        finally:
            wbcache("umount", "--no-drain", self.root)
            take_down(self.root)

    def arrived(self, wanted: Digests) -> str:
        done = wbcache("umount", self.root, deadline=COMPLETE)
        if done.returncode != 0:
            return f"umount ended with {done.returncode}"
        return differences(os.path.join(self._share, "run"), wanted)


class _Rclone(Peer):
    @contextmanager
    def run(self, work: str, share: str) -> Iterator[Peer]:
        self._share = share
        with Rclone(self._programs).serve(work, share, None, patience=20.0) as self.root:
            yield self

    def arrived(self, wanted: Digests) -> str:
        return _until_equal(os.path.join(self._share, "run"), wanted)


class _JuiceFS(Peer):
    @contextmanager
    def run(self, work: str, share: str) -> Iterator[Peer]:
        column = JuiceFS(self._programs)
        column.format(work, share)
        self._work, self._column = work, column
        self._stack = ExitStack()
        with self._stack:
            served = column.serve(work, "mnt", ["--writeback"], patience=20.0)
            self.root = self._stack.enter_context(served)
            yield self

    def arrived(self, wanted: Digests) -> str:
        end = time.monotonic() + COMPLETE
        while (left := self._staged()) and time.monotonic() < end:
            time.sleep(2.0)
        if left:
            return f"{left} blocks not uploaded after {COMPLETE:g} s"
        self._stack.close()
        # Nothing but the share can answer this one.
        with self._column.serve(self._work, "again", ["--cache-size=0"], patience=20.0) as again:
            return differences(os.path.join(again, "run"), wanted)

    def _staged(self) -> int:
        """Blocks that are not uploaded yet."""
        places = Path(self._work, "mnt-cache").glob("*/rawstaging")
        return sum(len(files) for place in places for _, _, files in os.walk(place))


PEERS: Mapping[str, Callable[[str, str], Peer]] = {
    "native": _Native,
    "wbcache": _WbCache,
    "rclone": _Rclone,
    "juicefs": _JuiceFS,
}


def differences(directory: str, wanted: Digests) -> str:
    """How a directory differs from what it should hold; nothing when it does not."""
    try:
        names = set(os.listdir(directory))
        wrong = [f"{name} missing" for name in sorted(wanted.keys() - names)]
        wrong += [f"{name} should not be there" for name in sorted(names - wanted.keys())]
        for name in sorted(wanted.keys() & names):
            with open(os.path.join(directory, name), "rb") as file:
                digest = hashlib.sha256()
                while block := file.read(training.MIB):
                    digest.update(block)
                if digest.hexdigest() != wanted[name]:
                    wrong.append(f"{name} differs")
    except OSError as error:
        return str(error)
    return ", ".join(wrong)


def _until_equal(directory: str, wanted: Digests) -> str:
    end = time.monotonic() + COMPLETE
    while (wrong := differences(directory, wanted)) and time.monotonic() < end:
        time.sleep(2.0)
    return wrong


def measure(peer: Peer, plan: Plan, base: str, say: Callable[[str], None]) -> Result:
    """Run the loop on one file system and let its share hang."""
    result = Result(peer.name)
    work = tempfile.mkdtemp(prefix=f"{peer.name}-", dir=base)
    backing = tempfile.mkdtemp(prefix="share-", dir=base)
    report = os.path.join(work, "report.json")
    with ExitStack() as stack:
        share = stack.enter_context(
            FaultShare(backing, latency_ms=plan.latency_ms, bandwidth_mb=plan.bandwidth_mb)
        )
        stack.enter_context(peer.run(work, str(share.mountpoint)))
        loop = subprocess.Popen(
            [
                *(sys.executable, "-I", training.__file__, os.path.join(peer.root, "run"), report),
                *(f"--checkpoint={plan.checkpoint}", f"--every={plan.every}"),
            ]
        )
        try:
            say(f"{peer.name}: working")
            time.sleep(plan.around)
            say(f"{peer.name}: the share hangs")
            share.hang()
            began = time.monotonic()
            time.sleep(plan.hang)
            ended = time.monotonic()
            share.release()
            share.clear()
            share.set(latency_ms=plan.latency_ms, bandwidth_mb=plan.bandwidth_mb)
            say(f"{peer.name}: working")
            time.sleep(plan.around)
            loop.send_signal(signal.SIGTERM)
            loop.wait(ENDS)
        except subprocess.TimeoutExpired:
            result.complete = f"the loop does not end in {ENDS:g} s"
            return result
        finally:
            loop.kill()
            loop.wait()
        with open(report, encoding="utf-8") as text:
            found = json.load(text)
        judge(result, found["calls"], began, ended)
        say(f"{peer.name}: waiting until the share has everything")
        start = time.monotonic()
        wrong = peer.arrived(found["digests"])
        result.complete = wrong or f"identical after {time.monotonic() - start:.0f} s"
    return result


def judge(
    result: Result, calls: list[tuple[str, float, float, int]], began: float, ended: float
) -> None:
    """Note what the loop's calls tell of the hang, which lasted from `began` to `ended`."""
    during = [call for call in calls if call[1] < ended and call[1] + call[2] > began]
    times = sorted(call[2] for call in during)
    result.calls = len(during)
    if times:
        result.p50, result.worst = statistics.median(times), times[-1]
        result.p99 = times[max(0, -(-len(times) * 99 // 100) - 1)]
    result.errors = dict(
        Counter(f"{kind} {errno_name(code)}" for kind, _, _, code in during if code)
    )
    worst = sorted(during, key=lambda call: call[2], reverse=True)[:5]
    result.slowest = [(kind, start - began, took) for kind, start, took, _ in worst]
    others = [call[2] for call in calls if call[1] >= ended or call[1] + call[2] <= began]
    result.elsewhere = max(others, default=0.0)


def errno_name(code: int) -> str:
    """ETIMEDOUT, or its number."""
    return errno.errorcode.get(code, str(code))


def print_results(results: list[Result], plan: Plan, console: Console) -> None:
    """The table, and the verdict on wbcache."""
    table = Table(title=f"calls of the loop while the share hung for {plan.hang:g} s")
    for heading in ("", "calls", "errors", "p50", "p99", "worst", "otherwise", "on the share"):
        table.add_column(heading, justify="left" if heading in ("", "on the share") else "right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.calls:,}",
            str(sum(result.errors.values())),
            *(_milliseconds(t) for t in (result.p50, result.p99, result.worst, result.elsewhere)),
            result.complete,
        )
    console.print(table)
    for result in results:
        slow = ", ".join(
            f"{kind} {_milliseconds(t)} at {at:.1f} s" for kind, at, t in result.slowest
        )
        errors = ", ".join(f"{count} x {what}" for what, count in result.errors.items())
        console.print(f"{result.name}: slowest {slow}{'; errors: ' + errors if errors else ''}")
        if result.name == "wbcache":
            met = not result.errors and result.p99 < P99 and result.worst < WORST
            met = met and result.complete.startswith("identical")
            aim = (
                f"no errors, p99 < {_milliseconds(P99)}, worst < {_milliseconds(WORST)}, identical"
            )
            console.print(f"{'pass' if met else 'FAIL'}  wbcache: {aim}")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


@click.command()
@click.option("--hang", default=120.0, show_default=True, help="seconds")
@click.option("--around", default=15.0, show_default=True, help="seconds before and after")
@click.option("--columns", default="native,wbcache,rclone,juicefs", show_default=True)
@click.option("--latency-ms", default=5.0, show_default=True, help="of every call on the share")
@click.option("--bandwidth-mb", default=100.0, show_default=True, help="of the share")
@click.option("--checkpoint-mb", default=200, show_default=True)
@click.option("--every", default=20.0, show_default=True, help="seconds between checkpoints")
@click.option("--work-dir", default=tempfile.gettempdir, help="a directory on the cache's disk")
@click.option("--peers-dir", default=default_directory, help="where rclone and JuiceFS are kept")
@click.option("--json", "json_file", default="", help="write the results here, too")
def main(
    hang: float,
    around: float,
    columns: str,
    latency_ms: float,
    bandwidth_mb: float,
    checkpoint_mb: int,
    every: float,
    work_dir: str,
    peers_dir: str,
    json_file: str,
) -> None:
    """A training loop on a share that hangs: wbcache beside rclone and JuiceFS."""
    console = Console(width=max(150, Console().width))
    names = columns.split(",")
    if unknown := set(names) - PEERS.keys():
        raise click.BadParameter(
            f"no column {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}"
        )
    plan = Plan(hang, around, latency_ms, bandwidth_mb, checkpoint_mb << 20, every)
    results = []
    try:
        programs = ensure_peers(peers_dir) if {"rclone", "juicefs"} & set(names) else ""
        with tempfile.TemporaryDirectory(prefix="hang-", dir=work_dir) as base:
            with console.status("starting") as status:
                for name in names:
                    peer = PEERS[name](name, programs)
                    results.append(measure(peer, plan, base, status.update))
    except BenchError as error:
        raise click.ClickException(str(error)) from None
    finally:
        print_results(results, plan, console)
    if json_file:
        with open(json_file, "w", encoding="utf-8") as text:
            json.dump([asdict(result) for result in results], text, indent=2)


if __name__ == "__main__":
    main()
