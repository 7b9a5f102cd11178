"""The life of a share's process: mount, serve, and leave nothing behind."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyfuse3
import trio

from tests.faultshare import control
from tests.faultshare.backing import Backing
from tests.faultshare.faults import Faults
from tests.faultshare.gate import Gate
from tests.faultshare.mounttable import mounts_at
from tests.faultshare.oplog import OpLog
from tests.faultshare.passthrough import Caching, Share
from tests.faultshare.squash import Squash
from tests.faultshare.usage import Usage

log = logging.getLogger(__name__)

#: Calls that may wait at the same time; beyond that the mount stands still.
MAX_TASKS = 1024

_WAKE_INTERVAL = 0.05


@dataclass(frozen=True)
class Options:
    """What the command line says.

    settings: the arguments of the control command ``set``.
    lacking: capabilities the share lacks from the start.
    lifeline_fd: a descriptor whose end of file ends the share.
    """

    backing: str
    mountpoint: str
    control: str | None = None
    fsname: str = "faultshare"
    caching: Caching = field(default_factory=Caching)
    settings: dict[str, Any] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()
    xattr: bool = True
    squash: bool = False
    readahead_kb: int | None = None
    log_data: str | None = None
    log_limit: int = 1_000_000
    lifeline_fd: int | None = None


def run(options: Options, ready: Callable[[], None]) -> None:
    """Mount and serve until unmounted or told to end by SIGTERM, SIGINT or the lifeline.

    ready: called once the mount answers. Raises OSError or RuntimeError when it cannot be mounted.
    """
    os.umask(0)  # the kernel has applied the caller's
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    usage = Usage()
    backing = Backing(options.backing, usage)  # held before it may be mounted over
    oplog = OpLog(os.fsencode(options.backing), data_dir=options.log_data, limit=options.log_limit)
    gate = Gate(Faults())
    squash = Squash() if options.squash else None
    share = Share(backing, gate, oplog, options.caching, no_xattr=not options.xattr, squash=squash)
    control_ = control.Control(share, f"/proc/self/fd/{backing.nodes.root.fd}")
    control_.set(**options.settings)
    control_.lack(list(options.lacking), None)

    mount_options = {"default_permissions", f"fsname={options.fsname}", "subtype=faultshare"}
    if os.geteuid() == 0:
        mount_options.add("allow_other")
    pyfuse3.init(share, options.mountpoint, mount_options)
    try:
        with _interrupted_reads():
            trio.run(_main, options, share, control_, ready)
    finally:
        # Lazily: whoever still has files open gets errors as soon as the process is gone.
        pyfuse3.close(unmount=True)
        backing.nodes.close()
        if options.control is not None:
            Path(options.control).unlink(missing_ok=True)


async def _main(
    options: Options, share: Share, control_: control.Control, ready: Callable[[], None]
) -> None:
    gate = share.gate
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_on_signal, gate)
        if options.lifeline_fd is not None:
            nursery.start_soon(_end_with_parent, options.lifeline_fd, gate)
        if options.control is not None:
            listener = await _listen(options.control)
            nursery.start_soon(control.serve, listener, control_)
        nursery.start_soon(_prepare, options, share, ready)
        await pyfuse3.main(min_tasks=4, max_tasks=MAX_TASKS)
        gate.close()
        nursery.cancel_scope.cancel()


async def _prepare(options: Options, share: Share, ready: Callable[[], None]) -> None:
    await share.initialised.wait()  # the kernel sets its own limits when it connects
    # From the table: asking the mount itself would be a call on the share.
    for mount in mounts_at(options.mountpoint)[-1:]:
        _raise_kernel_limits(mount.device)
        if options.readahead_kb is not None:
            _write(f"/sys/class/bdi/{mount.device}/read_ahead_kb", options.readahead_kb)
    ready()


async def _end_on_signal(gate: Gate) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for _ in signals:
            _end(gate)


async def _end_with_parent(fd: int, gate: Gate) -> None:
    await trio.lowlevel.wait_readable(fd)
    _end(gate)


def _end(gate: Gate) -> None:
    # Errors first: a request without an answer leaves its caller in uninterruptible sleep.
    gate.close()
    pyfuse3.terminate()


async def _listen(path: str) -> trio.SocketListener:
    Path(path).unlink(missing_ok=True)
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await sock.bind(path)
    os.chmod(path, 0o600)
    sock.listen(16)
    return trio.SocketListener(sock)


@contextlib.contextmanager
def _interrupted_reads() -> Iterator[None]:
    """Interrupt blocking reads of /dev/fuse again and again.

    libfuse reads the device after it was reported readable. If the caller of that request is
    killed in between, the read blocks, holding the interpreter lock, and with it everything.
    """
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, _WAKE_INTERVAL, _WAKE_INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def _raise_kernel_limits(device: str) -> None:
    """Let as many background requests in as we have tasks, where that is permitted.

    With the default of 12, a dozen hung read-aheads hold up reads that would be answered.
    """
    connection = device.partition(":")[2]
    top = Path("/sys/fs/fuse/connections")
    if (top / connection).exists():
        _set_background(top / connection)
    elif os.geteuid() == 0:
        with tempfile.TemporaryDirectory(prefix="fusectl-") as private:
            mounted = subprocess.run(
                ["mount", "-t", "fusectl", "none", private], capture_output=True, check=False
            )
            if mounted.returncode == 0:
                _set_background(Path(private, connection))
                subprocess.run(["umount", private], check=False)


def _set_background(connection: Path) -> None:
    _write(str(connection / "max_background"), MAX_TASKS)
    _write(str(connection / "congestion_threshold"), MAX_TASKS)


def _write(path: str, value: int) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(str(value))
    except OSError as error:
        log.warning("cannot set %s to %d: %s", path, value, error)
