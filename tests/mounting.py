"""A real mount for the length of a block, and nothing left of it afterwards.

    with Mounted(source) as mount:
        (mount.path / "file").write_text("x")
        mount.flush()

The daemon is started by the command line, as users start it, so a test sees what they see.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml

from wbcache.control.client import ControlClient
from wbcache.errors import WbcacheError
from wbcache.mounts import abort_connection, canonical, mount_at, read_mounts, unmount

if TYPE_CHECKING:
    from typing_extensions import Self

COMMAND_DEADLINE = 60.0
END_DEADLINE = 10.0
LOG_TAIL = 6000

DEFAULTS: dict[str, Any] = {
    "cache": {"min_free": "1GiB"},
    "flush": {"idle_delay": "200ms", "max_age": "2s", "retry": {"first": "100ms", "max": "1s"}},
    "share": {"attr_ttl": "100ms", "dir_ttl": "200ms"},
}
"""Settings under which things happen soon enough for a test to wait for them."""

NEVER_BY_ITSELF: dict[str, Any] = {"flush": {"idle_delay": "1d", "max_age": "1d"}}
"""Settings under which nothing is flushed that the test does not ask for."""

_libc = ctypes.CDLL(None, use_errno=True)


def wbcache(
    *arguments: str | os.PathLike[str],
    deadline: float = COMMAND_DEADLINE,
    prefix: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a command of wbcache, behind the words of ``prefix``; its exit code is the caller's to
    look at."""
    command = [*prefix, sys.executable, "-m", "wbcache.cli"]
    return subprocess.run(
        [*command, *[os.fspath(argument) for argument in arguments]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=deadline,
    )


class Mounted:
    """A share mounted with a cache.

    ``config`` is merged over `DEFAULTS`. Without ``cache`` or ``mountpoint`` they are made in a
    temporary directory, which goes at the end. Nothing is drained at the end: a test that wants
    what it wrote on the share calls `flush` or `umount`.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        config: Mapping[str, Any] | None = None,
        cache: str | os.PathLike[str] | None = None,
        mountpoint: str | os.PathLike[str] | None = None,
        options: str = "",
        tracebacks: bool = False,
        umask: int = -1,
        prefix: Sequence[str] = (),
    ) -> None:
        """``options`` are mount options. A traceback in the daemon's log fails the test, unless
        ``tracebacks`` says that it may. ``umask`` is the daemon's. ``prefix`` goes before each
        command, to run it as somebody else."""
        self.source = Path(source)
        self.config = merge(DEFAULTS, config or {})
        self.pid = 0
        self.said = ""
        """What the last mount has said on its standard error."""
        self._given = (cache, mountpoint)
        self._options = options
        self._tracebacks = tracebacks
        self._umask = umask
        self._prefix = prefix
        self._cleanup = contextlib.ExitStack()
        self._pidfd = -1

    # -- the block -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            base = Path(tempfile.mkdtemp(prefix="wbcache-mount-"))
            stack.callback(shutil.rmtree, base, ignore_errors=True)
            base.chmod(0o755)  # other users get to the mount point
            cache, mountpoint = self._given
            self.cache_dir = Path(cache or base / "cache")
            self.path = Path(mountpoint or base / "mnt")
            self.path.mkdir(exist_ok=True)
            self.source.mkdir(exist_ok=True)
            self._config_path = base / "config.yaml"
            stack.callback(self._take_down)
            self._mount()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._cleanup:
            if error is not None:
                sys.stderr.write(f"\n--- {self.cache_dir}/daemon.log\n{self.log()[-LOG_TAIL:]}")
            elif not self._tracebacks:
                # What the daemon still does at its end counts too.
                self._take_down()
                log = self.log()
                assert "Traceback (most recent call last)" not in log, log[-LOG_TAIL:]

    # -- what it is ----------------------------------------------------------------------------

    @property
    def mountpoint(self) -> str:
        """The mount point, as the calls of `os` take it."""
        return str(self.path)

    @property
    def is_mounted(self) -> bool:
        """Whether the kernel lists the mount; a dead one counts."""
        mounts = read_mounts()
        return mount_at(canonical(self.mountpoint, mounts), mounts) is not None

    @property
    def client(self) -> ControlClient:
        """The daemon's control socket."""
        return ControlClient(str(self.cache_dir))

    def status(self) -> dict[str, Any]:
        """The daemon's status."""
        return self.client.status()

    def log(self) -> str:
        """The daemon's log so far."""
        try:
            return (self.cache_dir / "daemon.log").read_text(errors="replace")
        except OSError:
            return ""

    # -- what is done to it --------------------------------------------------------------------

    def hand_over(self) -> None:
        """Have the kernel give the daemon all pages written through mappings."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            return  # a plain user's mount; nothing there may be mapped then
        try:
            _libc.syncfs(descriptor)
            os.fsync(
                descriptor
            )  # the kernel asks for it after the pages, for which it does not wait
        finally:
            os.close(descriptor)

    def flush(self, *paths: str | bytes, timeout: float | None = 30.0) -> None:
        """Bring paths relative to the mount (none: everything) to the share.

        Raises AssertionError when something remains after ``timeout`` seconds.
        """
        self.hand_over()
        remaining = self.client.flush([os.fsencode(p) for p in paths] or [b""], timeout)
        assert not remaining, f"{len(remaining)} remain: {remaining[:5]}"

    def umount(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `wbcache umount` on it; the daemon has ended when this returns, unless the exit
        code says otherwise."""
        done = wbcache("umount", *arguments, self.path, prefix=self._prefix)
        if done.returncode in (0, 3):
            self._wait_for_end(END_DEADLINE)
        return done

    def kill(self) -> None:
        """SIGKILL the daemon and wait until it is gone. The dead mount stays."""
        self.strike()
        self.wait_killed()

    def strike(self) -> None:
        """SIGKILL the daemon; returns at once."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait_killed(self) -> None:
        """Wait until the daemon is gone."""
        assert self._wait_for_end(END_DEADLINE), "the killed daemon did not end"

    def remount(self, config: Mapping[str, Any] | None = None) -> None:
        """Mount again with the same cache, after `umount` or `kill`; ``config`` adds to before."""
        self.config = merge(self.config, config or {})
        self._mount()

    # -- internals -----------------------------------------------------------------------------

    def _mount(self) -> None:
        self._config_path.write_text(yaml.safe_dump(self.config))
        arguments: list[str | Path] = ["--cache-dir", self.cache_dir, "--config", self._config_path]
        if self._options:
            arguments += ["-o", self._options]
        before = os.umask(self._umask) if self._umask >= 0 else None
        try:
            done = wbcache("mount", *arguments, "--", self.source, self.path, prefix=self._prefix)
        finally:
            if before is not None:
                os.umask(before)
        assert done.returncode == 0, f"mount: {done.stderr}\n{self.log()[-LOG_TAIL:]}"
        self.said = done.stderr
        self.pid = int(self.status()["pid"])
        self._close_pidfd()
        self._pidfd = os.pidfd_open(self.pid)

    def _wait_for_end(self, deadline: float) -> bool:
        return bool(select.select([self._pidfd], [], [], deadline)[0])

    def _take_down(self) -> None:
        """End the daemon and remove the mount, whatever state they are in."""
        if self._pidfd >= 0 and not self._wait_for_end(0):
            with contextlib.suppress(WbcacheError):
                ControlClient(str(self.cache_dir), answer_deadline=END_DEADLINE).umount(0, False)
                self._wait_for_end(END_DEADLINE)
            if not self._wait_for_end(0):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        mounts = read_mounts()
        while entry := mount_at(canonical(self.mountpoint, mounts), mounts):
            abort_connection(entry)
            unmount(entry.mountpoint, lazy=True)
            mounts = read_mounts()
        if self._pidfd >= 0:
            # A thread of it may hang on the share, which ends after us.
            self._wait_for_end(1.0)
        self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others laid over them, section by section."""
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(old, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def contents(root: str | os.PathLike[str]) -> dict[str, tuple[int, bytes]]:
    """Everything below a directory: path relative to it -> (mode, bytes or link target).

    Names of wbcache's own on a share are left out.
    """
    found: dict[str, tuple[int, bytes]] = {}
    top = os.fspath(root)

    def scan(relative: str) -> None:
        with os.scandir(os.path.join(top, relative)) as entries:
            for entry in entries:
                name = os.path.join(relative, entry.name)
                mode = entry.stat(follow_symlinks=False).st_mode
                if not relative and entry.name == ".wbcache":
                    continue
                if entry.is_symlink():
                    found[name] = (mode, os.fsencode(os.readlink(entry.path)))
                elif entry.is_dir():
                    found[name] = (mode, b"")
                    scan(name)
                elif entry.is_file():
                    found[name] = (mode, Path(entry.path).read_bytes())
                else:
                    found[name] = (mode, b"")

    scan("")
    return found
