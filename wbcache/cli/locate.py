"""From what the user typed to the mount that is meant."""

from __future__ import annotations

from wbcache.control import registry
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
    """The one that the current directory is in, or else the only one there is."""
    found = registry.records()
    here = registry.find(canonical("."), found)
    if here is not None:
        return here
    if not found:
        raise NoSuchMountError("no MOUNTPOINT", "nothing is mounted", "see 'wbcache mount --help'")
    if len(found) > 1:
        raise UsageError(
            "MOUNTPOINT", f"there are {len(found)} mounts", "name one ('wbcache status' lists them)"
        )
    return found[0]
