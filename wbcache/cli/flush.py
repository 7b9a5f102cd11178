"""`wbcache flush`: bring files to the share now and wait until they are there."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence

import click

from wbcache.cli import output
from wbcache.cli.locate import only_mount
from wbcache.control import registry
from wbcache.control.client import ControlClient, Row
from wbcache.control.registry import MountRecord
from wbcache.errors import NoSuchMountError, RemainsError, UsageError
from wbcache.mounts import canonical

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
    known = registry.records()
    found: dict[str, tuple[MountRecord, list[bytes]]] = {}
    for path in paths:
        if not os.path.lexists(path):
            raise UsageError(path, "does not exist", "name files or directories on a mount")
        on_mounts = [(place, registry.find(place, known)) for place in _places(path)]
        for place, on in on_mounts:
            if on is not None:
                _hand_over(place)
                name = os.path.relpath(place, on.mountpoint)
                _, names = found.setdefault(on.mountpoint, (on, []))
                names.append(b"" if name == "." else os.fsencode(name))
        if not any(on for _, on in on_mounts):
            raise NoSuchMountError(
                path, "is not in a wbcache mount", "'wbcache status' lists the mounts"
            )
    return list(found.values())


def _places(path: str) -> list[str]:
    """A path, and if it is a symbolic link then also what it leads to."""
    directory, name = os.path.split(path)
    target = canonical(path)
    if name in ("", ".", ".."):
        return [target]
    return list(dict.fromkeys((os.path.join(canonical(directory or "."), name), target)))


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
