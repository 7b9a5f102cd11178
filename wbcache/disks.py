"""Which local disk holds the cache when nobody says so.

The choice must be the same at the next mount, or what an unclean end left in the cache would not be
found: a cache directory that exists for the share wins over everything else.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from wbcache.errors import CacheDirError
from wbcache.mounts import MountEntry, canonical, is_below, mount_of

PLATFORM_DISKS = ("/root/autodl-tmp", "/hy-tmp")
"""Where GPU rental platforms mount the local data disk (AutoDL, Hengyuan)."""
SYSTEM_DIRECTORIES = (
    "/boot",
    "/dev",
    "/efi",
    "/etc",
    "/nix",
    "/proc",
    "/run",
    "/snap",
    "/sys",
    "/usr",
)
"""Disks mounted in these are the system's."""


@dataclass(frozen=True)
class _Candidate:
    directory: str
    disk_bytes: int


def default_cache_dir(source: str, mountpoint: str, mounts: Sequence[MountEntry]) -> str:
    """The cache directory for a share, on the largest local disk; it may not exist yet.

    Both paths are canonical. The directory is below neither. Raises CacheDirError when no local
    disk is writable.
    """
    name = cache_name(source)
    candidates = [
        candidate
        for candidate in _candidates(mounts)
        if not is_below(candidate.directory, source)
        and not is_below(candidate.directory, mountpoint)
    ]
    if not candidates:
        raise CacheDirError(
            "cache directory",
            "no writable local disk was found",
            "name a directory on one with --cache-dir",
        )
    for candidate in candidates:
        existing = os.path.join(candidate.directory, name)
        if os.path.isdir(existing):
            return existing
    for candidate in candidates:
        if os.path.dirname(candidate.directory) in PLATFORM_DISKS:
            return os.path.join(candidate.directory, name)
    largest = max(candidates, key=lambda candidate: candidate.disk_bytes)
    return os.path.join(largest.directory, name)


def cache_name(source: str) -> str:
    """The name of a share's cache directory: readable, and different for every share."""
    base = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(source)) or "root"
    return f"{base[:64]}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:8]}"


def existing_part(path: str) -> str:
    """The longest part of an absolute path that exists."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _candidates(mounts: Sequence[MountEntry]) -> list[_Candidate]:
    """Directories for caches, the one in the user's own place first, then by mount table."""
    found: dict[str, _Candidate] = {}
    for place in [_own_place(), *_platform_places(mounts), *_disk_places(mounts)]:
        # Looked at only once the table says that this cannot hang, and judged by where it leads.
        if not _is_on_local_disk(place, mounts):
            continue
        directory = canonical(place, mounts)
        if directory in found or not _is_on_local_disk(directory, mounts):
            continue
        base = existing_part(directory)
        if not os.path.isdir(base) or not os.access(base, os.W_OK | os.X_OK):
            continue
        disk = os.statvfs(base)
        if not disk.f_flag & os.ST_RDONLY:
            found[directory] = _Candidate(directory, disk.f_blocks * disk.f_frsize)
    return list(found.values())


def _own_place() -> str:
    """A directory for caches beside the user's other data."""
    if os.geteuid() == 0:
        return "/var/lib/wbcache"
    return os.path.join(os.path.expanduser("~"), ".local", "state", "wbcache")


def _platform_places(mounts: Sequence[MountEntry]) -> list[str]:
    return [
        os.path.join(disk, ".wbcache")
        for disk in PLATFORM_DISKS
        if _is_on_local_disk(disk, mounts) and os.path.isdir(disk)
    ]


def _disk_places(mounts: Sequence[MountEntry]) -> list[str]:
    places = []
    for entry in mounts:
        path = entry.mountpoint
        if path == "/" or any(is_below(path, system) for system in SYSTEM_DIRECTORIES):
            continue
        # Overlays other than the root belong to containers.
        if entry.is_local_disk and entry.fstype != "overlay" and "rw" in entry.options:
            places.append(os.path.join(path, ".wbcache"))
    return places


def _is_on_local_disk(path: str, mounts: Sequence[MountEntry]) -> bool:
    """Whether a path is on a local disk and no mount on the way to it can hang."""
    entry = mount_of(path, mounts)
    if entry is None or not entry.is_local_disk:
        return False
    while entry is not None and entry.mountpoint != "/":
        entry = mount_of(os.path.dirname(entry.mountpoint), mounts)
        if entry is not None and entry.is_network:
            return False
    return True
