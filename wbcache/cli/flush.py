"""`wbcache flush`: bring files to the share now and wait until they are there."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence

import click

from wbcache.cli import output
from wbcache.cli.locate import mount_containing, only_mount
from wbcache.control.client import ControlClient, Row
from wbcache.control.registry import MountRecord
from wbcache.errors import RemainsError, UsageError
from wbcache.mounts import canonical, is_below

_libc = ctypes.CDLL(None, use_errno=True)


@click.command("flush")
@click.argument("paths", metavar="[PATH]…", nargs=-1)
@click.option("--timeout", metavar="S", type=click.FloatRange(min=0), help="Give up after S s.")
@click.option("--json", "as_json", is_flag=True, help="Print what remains as JSON.")
def flush(paths: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Bring files, or all that directories hold, to the share; without PATH the whole mount.

    Returns when the share has them. Exits with 3, and lists what remains, when it refuses some or
    the time is up.
    """
    remaining: list[Row] = []
    with output.WorkProgress("flushing") as progress:
        for record, names in _by_mount(paths):
            client = ControlClient(record.cache_dir)
            remaining += client.flush(names, timeout, progress.update)
    if as_json:
        output.say_json({"remaining": remaining})
    elif remaining:
        output.say_rows(remaining)
    if remaining:
        raise RemainsError("flush", f"not on the share yet: {output.summary(remaining)}")


def _by_mount(paths: Sequence[str]) -> list[tuple[MountRecord, list[bytes]]]:
    """The paths relative to their mounts, once the daemon has all that the kernel held of them."""
    if not paths:
        record = only_mount()
        _hand_over(record.mountpoint)
        return [(record, [b""])]
    found: dict[str, tuple[MountRecord, list[bytes]]] = {}
    for path in paths:
        if not os.path.lexists(path):
            raise UsageError(path, "does not exist", "name files or directories on a mount")
        record = mount_containing(path)
        _, names = found.setdefault(record.mountpoint, (record, []))
        for full in _places(path, record):
            _hand_over(full)
            names.append(os.fsencode(os.path.relpath(full, record.mountpoint)))
    for _, names in found.values():
        # The mount itself is the empty name.
        names[:] = [b"" if name == b"." else name for name in names]
    return list(found.values())


def _places(path: str, record: MountRecord) -> list[str]:
    """A path, and if it is a symbolic link then also what it leads to on the same mount."""
    absolute = os.path.abspath(path)
    itself = os.path.join(canonical(os.path.dirname(absolute)), os.path.basename(absolute))
    target = canonical(absolute)
    places = [place for place in (itself, target) if is_below(place, record.mountpoint)]
    return list(dict.fromkeys(places))


def _hand_over(path: str) -> None:
    """Have the kernel give the daemon what it still holds: pages written through a mapping."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        descriptor = os.open(path, flags)
        try:
            if os.path.isdir(path):
                _libc.syncfs(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
