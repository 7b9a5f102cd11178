"""The main job from end to end: the writes of a training run, on a slow share and through wbcache.

Starts the built-in slow share, writes the same things to it directly and through a mount, unmounts,
compares what the share holds with what was written, and prints a table. Run by quickstart.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.faultshare.client import FaultShare  # noqa: E402  (the checkout is put on the path first)

EVENT_BYTES = 42
CHECKPOINT_BYTES = 20 << 20


@dataclass
class Measured:
    """What one run through the workload took, in seconds, and what it wrote."""

    events: list[float] = field(default_factory=list)
    records: list[float] = field(default_factory=list)
    checkpoint: float = 0
    digests: dict[str, str] = field(default_factory=dict)
    """Relative path to SHA-256 of what the file must hold."""


def write_events(path: Path, count: int) -> tuple[list[float], bytes]:
    """As an event writer does: open for appending, write a record, close, for every record."""
    taken, written = [], b""
    for number in range(count):
        record = f"event {number:08d} ".encode().ljust(EVENT_BYTES - 1, b".") + b"\n"
        start = time.perf_counter()
        with open(path, "ab", buffering=0) as file:
            file.write(record)
        taken.append(time.perf_counter() - start)
        written += record
    return taken, written


def write_log(path: Path, count: int) -> tuple[list[float], bytes]:
    """As a logger does: one descriptor held open, a line appended now and then."""
    taken, written = [], b""
    with open(path, "ab", buffering=0) as file:
        for number in range(count):
            line = f"step {number}: loss {1 / (number + 1):.6f}\n".encode()
            start = time.perf_counter()
            file.write(line)
            taken.append(time.perf_counter() - start)
            written += line
    return taken, written


def write_checkpoint(path: Path, content: bytes) -> float:
    """As a careful trainer does: a temporary file, renamed over the last checkpoint."""
    start = time.perf_counter()
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return time.perf_counter() - start


def workload(run: Path, count: int) -> Measured:
    """One short training run in a directory."""
    measured = Measured()
    run.mkdir()
    measured.events, events = write_events(run / "events.out.tfevents.1", count)
    measured.records, log = write_log(run / "train.log", count)
    checkpoint = os.urandom(CHECKPOINT_BYTES)
    measured.checkpoint = write_checkpoint(run / "last.ckpt", checkpoint)
    for name, content in (
        ("events.out.tfevents.1", events),
        ("train.log", log),
        ("last.ckpt", checkpoint),
    ):
        measured.digests[name] = hashlib.sha256(content).hexdigest()
    return measured


def differences(run: Path, digests: dict[str, str]) -> list[str]:
    """Files that are missing, additional, or do not hold what was written."""
    present = {entry.name for entry in run.iterdir()}
    wrong = sorted(present ^ digests.keys())
    for name in sorted(present & digests.keys()):
        if hashlib.sha256((run / name).read_bytes()).hexdigest() != digests[name]:
            wrong.append(name)
    return wrong


def wbcache(*arguments: str) -> None:
    """Run the command; its errors are the user's to see."""
    subprocess.run(
        [sys.executable, "-m", "wbcache.cli", *arguments], check=True, stdout=subprocess.DEVNULL
    )


@contextlib.contextmanager
def mounted(share: Path, mountpoint: Path, cache: Path) -> Iterator[Callable[[], float]]:
    """A mount of the share, taken away at the end; the value unmounts and says how long it took."""
    wbcache("mount", str(share), str(mountpoint), "--cache-dir", str(cache))
    done = False

    def unmount() -> float:
        nonlocal done
        start = time.perf_counter()
        wbcache("umount", str(mountpoint))
        done = True
        return time.perf_counter() - start

    try:
        yield unmount
    finally:
        if not done:
            with contextlib.suppress(subprocess.CalledProcessError):
                wbcache("umount", str(mountpoint), "--timeout", "10")


def table(direct: Measured, cached: Measured, drain: float, wrong: list[str]) -> str:
    """The result for people."""

    def milliseconds(seconds: float) -> str:
        return f"{seconds * 1000:.2f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"

    rows: list[tuple[str, ...]] = [("", "share", "through wbcache")]
    for name, values in (
        ("event write, median", [statistics.median(m.events) for m in (direct, cached)]),
        ("event write, worst", [max(m.events) for m in (direct, cached)]),
        ("log line, median", [statistics.median(m.records) for m in (direct, cached)]),
        ("log line, worst", [max(m.records) for m in (direct, cached)]),
        ("20 MB checkpoint", [m.checkpoint for m in (direct, cached)]),
    ):
        rows.append((name, *map(milliseconds, values)))
    rows.append(("event writes measured", str(len(direct.events)), str(len(cached.events))))
    rows.append(("flush at unmount", "", f"{drain:.1f} s"))
    rows.append(("files on the share equal", "", "no: " + ", ".join(wrong) if wrong else "yes"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}   {row[1]:>{widths[1]}}   {row[2]:>{widths[2]}}".rstrip()
        for row in rows
    )


def main() -> int:
    """Entry point; 0 when the share holds exactly what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", type=Path, required=True, help="an empty directory")
    parser.add_argument("--latency-ms", type=float, default=30, help="of every call on the share")
    parser.add_argument("--direct-writes", type=int, default=60, help="on the share itself")
    parser.add_argument("--writes", type=int, default=2000, help="through the mount")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    for name in ("backing", "share", "mount"):
        (options.workspace / name).mkdir()
    share, mountpoint = options.workspace / "share", options.workspace / "mount"
    print(f"a share that takes {options.latency_ms:g} ms a call, mounted at {share}", flush=True)
    with FaultShare(options.workspace / "backing", share, latency_ms=options.latency_ms):
        print("writing to the share directly ...", flush=True)
        direct = workload(share / "direct", options.direct_writes)
        print("writing through wbcache ...", flush=True)
        with mounted(share, mountpoint, options.workspace / "cache") as unmount:
            cached = workload(mountpoint / "cached", options.writes)
            drain = unmount()
        print("comparing ...", flush=True)
        wrong = differences(share / "cached", cached.digests)
    print("\n" + table(direct, cached, drain, wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        # The command has said what is wrong.
        sys.exit(error.returncode)
