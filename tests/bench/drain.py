"""How fast many small files reach the share, and how fast a mount with many of them is back.

    python -m tests.bench.drain [--files 1000] [--directories 50] [--latency-ms 30] [--dirty 100000]

First a tree of small files goes to a share of its own that takes so long for every call: once with
``cp -r``, once through the mount, whose flush is timed from the command to its return. Then, with
``--dirty``, a mount over a share that hangs is given so many small files, its daemon is killed, and
the next mount is timed until it shows them and takes another; its memory is what it has then.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import click
from rich.console import Console

from tests.bench.mounting import BenchError
from tests.faultshare.client import FaultShare
from tests.mounting import Mounted, contents

SIZE = 4096
"""Bytes of a file."""

FASTER = 8.0
BACK = 3.0
MEMORY = 250
"""What is aimed at: times as fast as ``cp -r``, seconds until a mount is back, MiB."""

NEVER = {"flush": {"idle_delay": "1d", "max_age": "1d"}}


@dataclass
class Drained:
    """One tree on its way to the share."""

    files: int
    cp_seconds: float
    drain_seconds: float
    calls: dict[str, int] = field(default_factory=dict)
    """Calls on the share during the drain, by name."""

    @property
    def ratio(self) -> float:
        """How many times as fast as ``cp -r`` the drain was."""
        return self.cp_seconds / self.drain_seconds


@dataclass
class Back:
    """A mount after a kill with many dirty files."""

    files: int
    mount_seconds: float
    """Until the command returned."""
    usable_seconds: float
    """Until a directory was listed, a file read and another one made, from the same start."""
    memory_mib: float


def make_tree(top: str, files: int, directories: int) -> None:
    """Small files, evenly spread over directories."""
    for number in range(directories):
        os.makedirs(os.path.join(top, f"d{number:03d}"))
    block = os.urandom(SIZE)
    for number in range(files):
        path = os.path.join(top, f"d{number % directories:03d}", f"f{number:06d}")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, number.to_bytes(8, "little") + block[8:])
        os.close(fd)


def drain(base: str, files: int, directories: int, latency_ms: float) -> Drained:
    """Time ``cp -r`` and the mount's flush. Raises BenchError when the copies differ."""
    tree, backing = os.path.join(base, "tree"), os.path.join(base, "backing")
    make_tree(tree, files, directories)
    os.mkdir(backing)
    with ExitStack() as stack:
        share = stack.enter_context(FaultShare(backing, latency_ms=latency_ms))
        target = str(share.mountpoint)
        start = time.monotonic()
        subprocess.run(["cp", "-r", tree, os.path.join(target, "copied")], check=True)
        copied = time.monotonic() - start
        cache = os.path.join(base, "cache")
        mount = stack.enter_context(Mounted(target, config=NEVER, cache=cache))
        make_tree(os.path.join(mount.path, "drained"), files, directories)
        share.clear_log()
        start = time.monotonic()
        mount.flush(timeout=600.0)
        drained = time.monotonic() - start
        calls = Counter(share.counts().calls)
        shown = {name: data for name, (_, data) in contents(f"{backing}/drained").items()}
        for number in range(files):
            name = f"d{number % directories:03d}/f{number:06d}"
            if shown.get(name, b"")[:8] != number.to_bytes(8, "little"):
                raise BenchError(f"{name} is not on the share as it was written")
    return Drained(files, copied, drained, dict(calls.most_common()))


def back(base: str, files: int) -> Back:
    """Kill a daemon with many dirty files, and time the next."""
    backing, directories = os.path.join(base, "backing"), max(1, files // 1000)
    os.mkdir(backing)
    with ExitStack() as stack:
        share = stack.enter_context(FaultShare(backing))
        mount = stack.enter_context(
            Mounted(share.mountpoint, config=NEVER, cache=os.path.join(base, "cache"))
        )
        make_tree(str(mount.path / "many"), files, directories)
        mount.kill()
        start = time.monotonic()
        mount.remount()
        mounted = time.monotonic() - start
        names = sorted(os.listdir(mount.path / "many" / "d000"))
        first = (mount.path / "many" / "d000" / names[0]).read_bytes()
        (mount.path / "many" / "d000" / "another").write_bytes(first)
        usable = time.monotonic() - start
        if len(names) != -(-files // directories) or first[:8] != bytes(8):
            raise BenchError("what was written before the kill is not there")
        return Back(files, mounted, usable, _memory(mount.pid))


def _memory(pid: int) -> float:
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


@click.command()
@click.option("--files", default=1000, show_default=True)
@click.option("--directories", default=50, show_default=True)
@click.option("--latency-ms", default=30.0, show_default=True, help="of every call on the share")
@click.option("--dirty", default=100_000, show_default=True, help="files at the kill; 0: no kill")
@click.option("--work-dir", default=tempfile.gettempdir, help="a directory on the cache's disk")
@click.option("--json", "json_file", default="", help="write the results here, too")
def main(
    files: int, directories: int, latency_ms: float, dirty: int, work_dir: str, json_file: str
) -> None:
    """Small files to the share, and a mount that is back after a kill."""
    console = Console()
    results: dict[str, object] = {}
    try:
        if files:
            with tempfile.TemporaryDirectory(prefix="drain-", dir=work_dir) as base:
                drained = drain(base, files, directories, latency_ms)
            results["drain"] = asdict(drained)
            console.print(
                f"{files} files of {SIZE} B in {directories} directories, {latency_ms:g} ms a call:"
                f" cp -r {drained.cp_seconds:.1f} s, flush {drained.drain_seconds:.1f} s"
            )
            calls = ", ".join(f"{count} {name}" for name, count in drained.calls.items())
            console.print(f"calls on the share: {calls}")
            _verdict(
                console, drained.ratio >= FASTER, f"{drained.ratio:.1f} times as fast as cp -r"
            )
        if dirty:
            with tempfile.TemporaryDirectory(prefix="back-", dir=work_dir) as base:
                found = back(base, dirty)
            results["back"] = asdict(found)
            console.print(
                f"{dirty} dirty files, killed: mounted after {found.mount_seconds:.1f} s, usable"
                f" after {found.usable_seconds:.1f} s, {found.memory_mib:.0f} MiB resident"
            )
            met = found.usable_seconds < BACK and found.memory_mib < MEMORY
            _verdict(console, met, f"usable in {BACK:g} s with less than {MEMORY} MiB")
    except BenchError as error:
        raise click.ClickException(str(error)) from None
    if json_file:
        with open(json_file, "w", encoding="utf-8") as text:
            json.dump(results, text, indent=2)


def _verdict(console: Console, met: bool, text: str) -> None:
    console.print(f"{'pass' if met else 'FAIL'}  {text}")


if __name__ == "__main__":
    main()
