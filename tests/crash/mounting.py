"""One mount of a test: start its daemon, kill it, unmount it, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from wbcache.mounts import MountEntry, canonical, mount_at, read_mounts

if TYPE_CHECKING:
    from typing_extensions import Self

COMMAND_DEADLINE = 60.0
END_DEADLINE = 20.0

CONFIG = """\
cache: {{min_free: 512MiB}}
flush: {{idle_delay: {idle_delay}, max_age: {max_age}, retry: {{first: 100ms, max: 1s}}}}
drain: {{timeout: {drain_timeout}}}
"""


class MountedCache:
    """A share, a mount point and a cache directory, and the daemons that serve them in turn.

    As a context manager it ends whatever daemon runs and removes its mount on exit.
    """

    def __init__(self, base: Path, source: Path | None = None) -> None:
        self.base = base
        self.source = source or base / "share"
        self.mountpoint = base / "mount"
        self.cache = base / "cache"
        self.config = base / "config.yaml"
        for directory in (self.source, self.mountpoint):
            directory.mkdir(exist_ok=True)
        self.configure()
        self._pids: list[int] = []

    def configure(
        self, *, idle_delay: str = "100ms", max_age: str = "1s", drain_timeout: str = "0s"
    ) -> None:
        """Settings of the next daemon."""
        self.config.write_text(
            CONFIG.format(idle_delay=idle_delay, max_age=max_age, drain_timeout=drain_timeout)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in self._pids:
            if is_daemon(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        while (entry := self.entry()) is not None and entry.is_wbcache:
            subprocess.run(["umount", "-l", str(self.mountpoint)], check=True)

    # -- commands ------------------------------------------------------------------------------

    def run(
        self, *arguments: str | Path, deadline: float = COMMAND_DEADLINE
    ) -> subprocess.CompletedProcess[str]:
        """Run a wbcache command; its exit code is the caller's to judge."""
        return subprocess.run(
            [sys.executable, "-m", "wbcache.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=deadline,
            check=False,
        )

    def mount(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`wbcache mount`; the result is the caller's to judge."""
        done = self.run(
            "mount",
            self.source,
            self.mountpoint,
            "--cache-dir",
            self.cache,
            "--config",
            self.config,
            *options,
        )
        if done.returncode == 0:
            self._pids.append(self.pid)
        return done

    def mounted(self, *options: str) -> Self:
        """Mount; fails the test when that does not work."""
        done = self.mount(*options)
        assert done.returncode == 0, f"mount: {done.stderr}{self.log()}"
        return self

    def umount(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`wbcache umount`; the result is the caller's to judge."""
        return self.run("umount", self.mountpoint, *options)

    def drained(self) -> None:
        """Unmount; fails the test unless the share has everything."""
        done = self.umount()
        assert done.returncode == 0, f"umount: {done.stdout}{done.stderr}{self.log()}"

    def start_command(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """Start a wbcache command without waiting for it."""
        return subprocess.Popen(
            [sys.executable, "-m", "wbcache.cli", *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def status(self) -> dict[str, Any]:
        """What `wbcache status --json` says of this mount."""
        done = self.run("status", self.mountpoint, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    # -- the daemon ----------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process of the newest daemon."""
        return int(json.loads((self.cache / "mount.json").read_text())["pid"])

    def watch_pid(self, pid: int) -> None:
        """A daemon that was started otherwise is ended at the end, too."""
        self._pids.append(pid)

    def kill(self) -> None:
        """SIGKILL; returns at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait_for_end(self, pid: int | None = None, deadline: float = END_DEADLINE) -> None:
        """Wait until a daemon's process has ended, by default the newest one's."""
        pid = pid or self.pid
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            ended = select.select([descriptor], [], [], deadline)[0]
        finally:
            os.close(descriptor)
        assert ended, f"the daemon did not end within {deadline:g} s\n{self.log()}"

    def entry(self) -> MountEntry | None:
        """What is mounted at the mount point."""
        return mount_at(canonical(str(self.mountpoint)), read_mounts())

    def log(self, lines: int = 40) -> str:
        """The end of the daemons' log."""
        try:
            text = (self.cache / "daemon.log").read_text(errors="replace")
        except FileNotFoundError:
            return "(no daemon.log)"
        return "\n".join(text.splitlines()[-lines:])


def is_daemon(pid: int) -> bool:
    """Whether a process is one of wbcache's daemons (or a test's wrapper of one)."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word.startswith((b"wbcache.daemon", b"tests.crash")) for word in words)


def leftovers(share: Path) -> Sequence[str]:
    """Temporaries of wbcache on a share, except for its own directory at the top."""
    found = []
    for directory, names, files in os.walk(share):
        for name in (*names, *files):
            if name.startswith(".wbcache") and not (directory == str(share) and name == ".wbcache"):
                found.append(os.path.join(directory, name))
    return found
