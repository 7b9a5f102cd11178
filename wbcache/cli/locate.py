"""From what the user typed to the mount that is meant."""

from __future__ import annotations

import contextlib

from wbcache.control import registry
from wbcache.control.client import ControlClient
from wbcache.control.registry import MountRecord
from wbcache.errors import NoSuchMountError, UsageError
from wbcache.mounts import canonical


def mount_containing(path: str) -> MountRecord:
    """The registered mount at or above a path. Raises NoSuchMountError."""
    record = registry.find(canonical(path))
    if record is None:
        raise NoSuchMountError(
            path, "is not in a wbcache mount", "'wbcache status' lists the mounts"
        )
    return record


def only_mount() -> MountRecord:
    """The one that the current directory is in, or else the only one that is running."""
    found = registry.records()
    with contextlib.suppress(UsageError):  # it may have been removed
        here = registry.find(canonical("."), found)
        if here is not None:
            return here
    running = [record for record in found if ControlClient(record.cache_dir).is_running()]
    if not running:
        raise NoSuchMountError("no MOUNTPOINT", "nothing is mounted", "see 'wbcache mount --help'")
    if len(running) > 1:
        raise UsageError(
            "no MOUNTPOINT",
            f"there are {len(running)} mounts",
            "name one ('wbcache status' lists them)",
        )
    return running[0]
