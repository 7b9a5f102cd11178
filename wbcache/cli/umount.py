"""`wbcache umount`: unmount, flush everything, and say what could not be flushed."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator, Sequence
from typing import NoReturn

import click

from wbcache.cli import output
from wbcache.control import registry
from wbcache.control.client import ControlClient, Row
from wbcache.control.registry import MountRecord
from wbcache.errors import (
    ConnectionLostError,
    InterruptedWorkError,
    NoSuchMountError,
    NotRunningError,
    RemainsError,
)
from wbcache.mounts import (
    MountEntry,
    abort_connection,
    answer,
    canonical,
    mount_at,
    read_mounts,
    unmount,
)

EXIT_DEADLINE = 5.0
"""Seconds to wait for the daemon's process after its last word."""


@click.command("umount")
@click.argument("mountpoint")
@click.option("--timeout", metavar="S", type=click.FloatRange(min=0), help="Seconds to flush for.")
@click.option("--no-drain", is_flag=True, help="Leave unflushed data in the cache directory.")
@click.option("--json", "as_json", is_flag=True, help="Print what remains as JSON.")
def umount(mountpoint: str, timeout: float | None, no_drain: bool, as_json: bool) -> None:
    """Unmount MOUNTPOINT and return when the share has everything.

    Exits with 3 when something remains. It is listed, it stays safe in the cache directory, and
    the next mount carries on with it.
    """
    remaining = unmount_and_drain(mountpoint, timeout=timeout, drain=not no_drain)
    if as_json:
        output.say_json({"remaining": remaining})
    elif remaining:
        output.say_rows(remaining)
    if remaining:
        raise RemainsError(
            mountpoint,
            f"unmounted, but not on the share yet: {output.summary(remaining)}",
            "mount again with the same cache directory to carry on",
        )


def unmount_and_drain(path: str, *, timeout: float | None, drain: bool) -> list[Row]:
    """Unmount the mount at `path` and wait for the final flush; what remains unflushed.

    Raises RemainsError when the daemon is gone and nobody can say what remains.
    """
    mounts = read_mounts()
    mountpoint = canonical(path, mounts)
    record = registry.find(mountpoint)
    entry = mount_at(mountpoint, mounts)
    if entry is not None and not entry.is_wbcache:
        entry = None
    if record is not None and record.mountpoint != mountpoint:
        record = None
    if record is None:
        if entry is None:
            raise NoSuchMountError(
                path, "is not a wbcache mount", "'wbcache status' lists the mounts"
            )
        _take_down(entry, None)
    with _process(record.pid) as process, output.WorkProgress("flushing") as progress:
        try:
            client = ControlClient(record.cache_dir)
            remaining = client.umount(timeout, drain, progress.update)
        except NotRunningError:
            _take_down(entry, record)
        except ConnectionLostError:
            raise RemainsError(
                mountpoint, "its daemon ended before the final flush was done", _how_on(record)
            ) from None
        except KeyboardInterrupt:
            raise InterruptedWorkError(
                mountpoint,
                "the final flush goes on in the background",
                f"'wbcache umount {mountpoint}' shows it again",
            ) from None
        _wait_for_exit(process)
    return remaining


def _take_down(entry: MountEntry | None, record: MountRecord | None) -> NoReturn:
    """Remove a mount that has no daemon to talk to. Always raises: what remains is not known."""
    if entry is not None:
        # Root may not look into another user's mount, which then seems alive.
        alive = answer(entry) == "alive" and (record is None or _exists(record.pid))
        if not alive:
            abort_connection(entry)  # programs that wait for it get their errors
        unmount(entry.mountpoint, lazy=not alive)
        if alive:
            raise RemainsError(
                entry.mountpoint,
                "unmounted, but its daemon cannot be asked; it flushes on by itself",
                "look into daemon.log in its cache directory",
            )
        if record is None:
            raise RemainsError(
                entry.mountpoint,
                "its daemon had died; the dead mount is removed",
                f"mount {entry.source} again with the same cache directory to flush what it left",
            )
    assert record is not None
    raise RemainsError(
        record.mountpoint, "its daemon had ended without a final flush", _how_on(record)
    )


def _exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _how_on(record: MountRecord) -> str:
    return (
        f"what it left is in {record.cache_dir}; carry on with 'wbcache mount {record.source} "
        f"{record.mountpoint} --cache-dir {record.cache_dir}'"
    )


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int | None]:
    """A descriptor that becomes readable when the process has ended; None if it has already."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for_exit(process: int | None) -> None:
    """Wait a little, so that the cache directory is free for the next mount."""
    waiting: Sequence[int] = [] if process is None else [process]
    if waiting and not select.select(waiting, [], [], EXIT_DEADLINE)[0]:
        output.note("the daemon's process still waits for a call on the share to return")
