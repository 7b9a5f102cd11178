"""A file that is larger than the cache, written through the mount.

    python -m tests.bench.through [--size 20480] [--cache 2048] [--bandwidth 100]

The same bytes go to a slow share (`tests.faultshare`) directly and through a mount with a small
cache, side by side in one run, while a log beside the file gets a line every few milliseconds.
Printed are both speeds until the share has everything, the most that the cache took of its disk,
and how long the lines took.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tests.diskusage import disk_usage
from tests.faultshare.client import FaultShare
from tests.mounting import Mounted

MIB = 1 << 20
LEAST = 0.9
"""Of the share's own speed."""
LOG_P99 = 0.05
"""Seconds."""
LINE_EVERY = 0.005
LOOK_EVERY = 0.02


@dataclass
class Watched:
    """What was seen while the file was written."""

    peak: int = 0  # bytes that the cache took
    lines: list[float] = field(default_factory=list)  # seconds each


def write(path: Path, mebibytes: int) -> str:
    """Write a file in calls of a MiB, each different; returns its SHA-256."""
    digest = hashlib.sha256()
    filling = os.urandom(MIB - 8)
    with open(path, "wb", buffering=0) as file:
        for number in range(mebibytes):
            data = number.to_bytes(8, "big") + filling
            digest.update(data)
            file.write(data)
        os.fsync(file.fileno())
    return digest.hexdigest()


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(MIB):
            digest.update(data)
    return digest.hexdigest()


def watch(
    cache_dir: Path, log: Path, until: threading.Event
) -> tuple[Watched, list[threading.Thread]]:
    """Follow the cache's size, and write lines to a log, in threads."""
    seen = Watched()

    def look() -> None:
        while not until.wait(LOOK_EVERY):
            seen.peak = max(seen.peak, disk_usage(cache_dir))

    def lines() -> None:
        with open(log, "ab", buffering=0) as file:
            while not until.wait(LINE_EVERY):
                began = time.perf_counter()
                file.write(b"x" * 179 + b"\n")
                seen.lines.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work) for work in (look, lines)]
    for thread in threads:
        thread.start()
    return seen, threads


def timed(work: Callable[[], str]) -> tuple[str, float]:
    """What ``work`` returns, and the seconds that it took."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


@click.command(help="Write a file that is larger than the cache through the mount.")
@click.option("--size", default=20480, show_default=True, help="of the file, MiB")
@click.option("--cache", default=2048, show_default=True, help="cache.size, MiB")
@click.option("--bandwidth", default=100.0, show_default=True, help="of the share, MB/s")
@click.option("--latency", default=1.0, show_default=True, help="of the share, ms a call")
@click.option("--work-dir", default=tempfile.gettempdir, help="a directory on the disk to use")
def main(size: int, cache: int, bandwidth: float, latency: float, work_dir: str) -> None:
    """Run it and print the table."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="through-", dir=work_dir) as name:
        backing = Path(name, "share")
        backing.mkdir()
        with FaultShare(backing, bandwidth_mb=bandwidth, latency_ms=latency) as share:
            _, direct = timed(lambda: write(share.mountpoint / "direct", size))
            (backing / "direct").unlink()
            config = {"cache": {"size": f"{cache}MiB"}}
            with Mounted(share.mountpoint, cache=Path(name, "cache"), config=config) as mount:
                end = threading.Event()
                seen, threads = watch(mount.cache_dir, mount.path / "log", end)
                try:
                    digest, wrote = timed(lambda: write(mount.path / "file", size))
                finally:
                    end.set()
                    for thread in threads:
                        thread.join()
                done, drained = timed(lambda: str(mount.umount().returncode))
            same = done == "0" and digest_of(backing / "file") == digest
    through = wrote + drained
    seen.lines.sort()
    p99 = seen.lines[len(seen.lines) * 99 // 100]
    table = Table(title=f"{size} MiB through a cache of {cache} MiB, share {bandwidth:g} MB/s")
    for column in ("", "measured", "aim"):
        table.add_column(column, justify="left" if not column else "right")
    ratio = direct / through
    table.add_row("directly", f"{size / direct:.1f} MiB/s", "")
    table.add_row("through the mount", f"{size / through:.1f} MiB/s", "")
    table.add_row("of the share's speed", f"{ratio:.2f}", f"at least {LEAST}")
    table.add_row("most that the cache took", f"{seen.peak / MIB:.0f} MiB", f"at most {cache}")
    table.add_row("log lines, p99", f"{p99 * 1000:.1f} ms", f"under {LOG_P99 * 1000:.0f} ms")
    table.add_row("log lines, worst", f"{seen.lines[-1] * 1000:.1f} ms", "")
    table.add_row("identical on the share", "yes" if same else "no", "yes")
    console.print(table)
    kept = same and ratio >= LEAST and seen.peak <= cache * MIB and p99 < LOG_P99
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
