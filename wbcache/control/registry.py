"""Which mounts this host has: one small file per mount, so that commands find their daemons.

The files are hints. Whether a daemon lives is decided by talking to it; a file that outlived its
daemon still tells which cache directory holds what that daemon could not flush, and stays until the
next mount there, or until the cache directory is gone.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from wbcache.errors import WbcacheError

MAX_ENTRY_SIZE = 64 << 10


@dataclass(frozen=True)
class MountRecord:
    """One mount as its daemon registered it. The paths are absolute and canonical."""

    mountpoint: str
    source: str
    cache_dir: str
    pid: int


def register(record: MountRecord) -> None:
    """Make the mount findable. It replaces records of the same mount point or cache directory.

    Raises WbcacheError when the registry directory cannot be trusted, OSError when it cannot be
    written.
    """
    directory = _own_directory()
    descriptor = _open_own_directory(directory)
    try:
        for name, other in _records_in(descriptor, directory):
            moved = record.cache_dir == other.cache_dir and record.mountpoint != other.mountpoint
            if moved or _is_gone(other):
                _remove(descriptor, name)
        content = json.dumps(record.__dict__).encode()
        temporary = f".{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o600, dir_fd=descriptor)
        try:
            # Another user may see that the mount is there, and be told whose it is.
            os.fchmod(file, 0o644)
            os.write(file, content)
        finally:
            os.close(file)
        name = _entry_name(record.mountpoint)
        os.rename(temporary, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    finally:
        os.close(descriptor)


def unregister(record: MountRecord) -> None:
    """Forget the mount, unless another daemon has registered its mount point since."""
    directory = _own_directory()
    with contextlib.suppress(OSError, WbcacheError):
        descriptor = _open_own_directory(directory)
        try:
            for name, other in _records_in(descriptor, directory):
                if other == record:
                    _remove(descriptor, name)
        finally:
            os.close(descriptor)


def records() -> list[MountRecord]:
    """Every registered mount that this user may ask about, by mount point.

    Root sees everybody's. Records whose cache directory no longer exists are left out.
    """
    found: dict[str, MountRecord] = {}
    for directory in _searched_directories():
        try:
            descriptor = os.open(
                directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError:
            continue
        try:
            for _name, record in _records_in(descriptor, directory):
                if not _is_gone(record):
                    found.setdefault(record.mountpoint, record)
        finally:
            os.close(descriptor)
    return [found[mountpoint] for mountpoint in sorted(found)]


def find(path: str, among: Iterable[MountRecord] | None = None) -> MountRecord | None:
    """The mount whose mount point is `path` or the nearest directory above it.

    `path` is absolute and canonical (see `mounts.canonical`); nothing is looked up on disk.
    """
    known = {record.mountpoint: record for record in (records() if among is None else among)}
    while True:
        if path in known:
            return known[path]
        parent = os.path.dirname(path)
        if parent == path:
            return None
        path = parent


def _entry_name(mountpoint: str) -> str:
    return hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16] + ".json"


def _own_directory() -> str:
    """The first place that can be ours. Root of a user namespace finds the host's root in one."""
    uid = os.geteuid()
    runtime = "/run" if uid == 0 else os.environ.get("XDG_RUNTIME_DIR", "")
    for place in (os.path.join(runtime, "wbcache"), f"/tmp/wbcache-{uid}"):
        if os.path.isabs(place) and _is_ours_to_take(place):
            return place
    return _home_directory()


def _is_ours_to_take(place: str) -> bool:
    try:
        return os.lstat(place).st_uid == os.geteuid() and os.access(place, os.W_OK | os.X_OK)
    except FileNotFoundError:
        return os.access(os.path.dirname(place), os.W_OK | os.X_OK)
    except OSError:
        return False


def _home_directory() -> str:
    """Where a user's records are when somebody else has taken the places for them elsewhere."""
    return os.path.join(os.path.expanduser("~"), ".local", "state", "wbcache", "mounts")


def _open_own_directory(directory: str) -> int:
    if directory == _home_directory():
        os.makedirs(os.path.dirname(directory), mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o755 if os.geteuid() == 0 else 0o700)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    info = os.fstat(descriptor)
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        os.close(descriptor)
        raise WbcacheError(
            f"registry directory {directory}",
            "belongs to, or can be written by, another user",
            "remove it",
        )
    return descriptor


def _searched_directories() -> Iterator[str]:
    """The own directory first, then those an earlier login of this user, or root, may have used."""
    uid = os.geteuid()
    own = _own_directory()
    yield own
    owners = "*" if uid == 0 else str(uid)
    others = ["/run/wbcache", _home_directory()]
    for pattern in (f"/run/user/{owners}/wbcache", f"/tmp/wbcache-{owners}"):
        others += sorted(glob.glob(pattern))
    yield from (directory for directory in others if directory != own)


def _records_in(descriptor: int, directory: str) -> Iterator[tuple[str, MountRecord]]:
    """The records in an open directory, each written by the directory's owner."""
    owner = os.fstat(descriptor).st_uid
    # Anybody can make a directory in /tmp that looks like another user's.
    named = re.fullmatch(r"/tmp/wbcache-([0-9]+)", directory)
    if named is not None and int(named[1]) != owner:
        return
    for name in sorted(os.listdir(descriptor)):
        if not name.endswith(".json") or name.startswith("."):
            continue
        record = _read(descriptor, name, owner)
        if record is not None:
            yield name, record


def _read(descriptor: int, name: str, owner: int) -> MountRecord | None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(name, flags, dir_fd=descriptor)
    except OSError:
        return None
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != owner:
            return None
        content = json.loads(os.read(file, MAX_ENTRY_SIZE))
        return MountRecord(
            mountpoint=str(content["mountpoint"]),
            source=str(content["source"]),
            cache_dir=str(content["cache_dir"]),
            pid=int(content["pid"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(file)


def _is_gone(record: MountRecord) -> bool:
    """Whether a record certainly is of no use: neither its daemon nor its cache directory exists.

    Another user's directory may be out of reach, and one on a disk that only other mount
    namespaces have seems to be missing.
    """
    try:
        os.stat(record.cache_dir)
    except FileNotFoundError:
        return not os.path.exists(f"/proc/{record.pid}")
    except OSError:
        pass
    return False


def _remove(descriptor: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=descriptor)
