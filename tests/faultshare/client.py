"""Start a fault share, steer it and question it, from synchronous test code.

`FaultShare` starts one and is a context manager; `ShareClient` steers one that already runs. All
methods are thread-safe, and those of the control socket answer whatever the share does with file
system calls. See `tests.faultshare.remote` for how calls and files are named.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faultshare.mounttable import mounts_at
from tests.faultshare.oplog import Counts, Op
from tests.faultshare.remote import HungCall, ShareClient, ShareError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Counts", "FaultShare", "HungCall", "Op", "ShareClient", "ShareError"]

_REPOSITORY = Path(__file__).resolve().parents[2]


class FaultShare(ShareClient):
    """Starts a fault share over *backing* and ends it, whatever happens in between.

    mountpoint: an existing directory; by default a temporary one, removed at the end.
    log_data: keep what `states` and `replay` need.
    other arguments: see `ShareClient.set` and ``python -m tests.faultshare --help``.

    As a context manager the share is mounted from entry to exit. On exit hung calls fail with EIO,
    the mount is taken away even if it is busy, and the process ends. If the test program itself is
    killed, the share notices and does the same.
    """

    def __init__(
        self,
        backing: str | os.PathLike[str],
        mountpoint: str | os.PathLike[str] | None = None,
        *,
        latency_ms: float = 0,
        jitter_ms: float = 0,
        iops: float = 0,
        bandwidth_mb: float = 0,
        name_max: int = 255,
        mtime_resolution: float = 0,
        read_only: bool = False,
        lack: Iterable[str] = (),
        no_xattr: bool = False,
        squash: bool = False,
        attr_timeout: float = 0,
        entry_timeout: float = 0,
        keep_cache: bool = False,
        direct_io: bool = False,
        readahead_kb: int | None = None,
        fsname: str = "faultshare",
        log_data: bool = False,
        log_limit: int = 1_000_000,
    ) -> None:
        super().__init__("")
        self.backing = Path(backing).absolute()
        self.process: subprocess.Popen[bytes] | None = None
        self._mountpoint = None if mountpoint is None else Path(mountpoint).resolve()
        self._directory: Path | None = None
        self._lifeline = -1
        self._log_data = log_data
        self._arguments = [
            f"--latency-ms={latency_ms}",
            f"--jitter-ms={jitter_ms}",
            f"--iops={iops}",
            f"--bandwidth-mb={bandwidth_mb}",
            f"--name-max={name_max}",
            f"--mtime-resolution={mtime_resolution}",
            f"--attr-timeout={attr_timeout}",
            f"--entry-timeout={entry_timeout}",
            f"--fsname={fsname}",
            f"--log-limit={log_limit}",
            *(f"--lack={capability}" for capability in lack),
        ]
        for flag, wanted in (
            ("--read-only", read_only),
            ("--no-xattr", no_xattr),
            ("--squash", squash),
            ("--keep-cache", keep_cache),
            ("--direct-io", direct_io),
        ):
            if wanted:
                self._arguments.append(flag)
        if readahead_kb is not None:
            self._arguments.append(f"--readahead-kb={readahead_kb}")

    @property
    def mountpoint(self) -> Path:
        """Where the share is mounted."""
        if self._mountpoint is not None:
            return self._mountpoint
        if self._directory is None:
            raise ShareError("the share has no mount point before it is started")
        return self._directory / "mnt"

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start the process and wait until the mount answers. Raises ShareError if it cannot."""
        self._directory = directory = Path(tempfile.mkdtemp(prefix="faultshare-"))
        self._control = str(directory / "control.sock")
        (directory / "mnt").mkdir()
        ready, ready_end = os.pipe()
        lifeline_end, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "tests.faultshare"]
        command += [str(self.backing), str(self.mountpoint)]
        command += [f"--control={self._control}", *self._arguments]
        if self._log_data:
            command.append(f"--log-data={directory}/log")
        command += [f"--ready-fd={ready_end}", f"--lifeline-fd={lifeline_end}"]
        try:
            with open(directory / "stderr", "wb") as stderr:
                self.process = subprocess.Popen(
                    command,
                    cwd=_REPOSITORY,
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    pass_fds=(ready_end, lifeline_end),
                    start_new_session=True,
                )
        finally:
            os.close(ready_end)
            os.close(lifeline_end)
        with os.fdopen(ready, "rb") as pipe:
            line = pipe.readline()
        if not line or "error" in (answer := json.loads(line)):
            reason = answer["error"] if line else "it ended before it was ready"
            errors = self.errors()
            self.close()
            raise ShareError(f"the share did not start: {reason}\n{errors}")

    def errors(self) -> str:
        """What the process has written on its standard error: nothing, if all is well."""
        if self._directory is None:
            return ""
        return (self._directory / "stderr").read_text(errors="replace")

    def close(self) -> None:
        """Unmount, end the process and remove the temporary directory. May be called twice."""
        process = self.process
        if process is not None:
            self._unmount()
            for stop in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(stop)
                    try:
                        process.wait(10)
                    except subprocess.TimeoutExpired:
                        continue
            while self.mounted():
                subprocess.run(["fusermount3", "-uz", self.mountpoint], check=True)
            self.process = None
        super().close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._directory is not None:
            shutil.rmtree(self._directory)
            self._directory = None

    def _unmount(self) -> None:
        """Unmount in an orderly way if that is possible: what is in the kernel's pages arrives."""
        try:
            self.release(late=False)
            self.clear()
            subprocess.run(
                ["fusermount3", "-u", self.mountpoint], capture_output=True, timeout=5, check=False
            )
        except (ShareError, subprocess.TimeoutExpired):
            pass  # it is taken away by force then

    def mounted(self) -> bool:
        """Whether the mount table lists the share, dead or alive."""
        return any(mount.type == "fuse.faultshare" for mount in mounts_at(self.mountpoint))
