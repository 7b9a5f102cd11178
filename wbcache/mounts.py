"""The kernel's mount table, and taking mounts out of it.

Everything here works on the table's text. Looking at a mount point through the file system can
block for ever when what is mounted there hangs, and fails when its daemon is dead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from shutil import which
from typing import Literal, NoReturn

from wbcache.errors import BusyError, MountpointError, UsageError
from wbcache.occupants import in_words, occupants
from wbcache.probe import ProbeTimeoutError, within

WBCACHE_TYPE = "fuse.wbcache"

# fmt: off
LOCAL_TYPES = frozenset((
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "fuse.fuse-overlayfs", "fuseblk", "jfs",
    "nilfs2", "ntfs3", "overlay", "reiserfs", "xfs", "zfs",
))
"""File systems on a disk of this machine."""
NETWORK_TYPES = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs",
))
"""File systems on other machines."""
MEMORY_TYPES = frozenset(("devtmpfs", "hugetlbfs", "ramfs", "tmpfs"))
"""File systems that are gone when the machine stops."""
# fmt: on

Answer = Literal["alive", "dead", "silent"]

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_MAX_LINKS = 40
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class MountEntry:
    """One line of /proc/self/mountinfo, its escapes resolved."""

    mount_id: int
    parent_id: int
    device: str
    """MAJOR:MINOR, as in st_dev."""
    root: str
    mountpoint: str
    options: tuple[str, ...]
    fstype: str
    source: str

    @property
    def is_wbcache(self) -> bool:
        """Whether wbcache mounted it."""
        return self.fstype == WBCACHE_TYPE

    @property
    def is_network(self) -> bool:
        """Whether its data lives on other machines, as far as the type tells.

        FUSE counts as network: behind it may be anything.
        """
        if self.fstype in LOCAL_TYPES:
            return False
        return self.fstype in NETWORK_TYPES or self.fstype.split(".")[0] == "fuse"

    @property
    def is_memory(self) -> bool:
        """Whether its data is gone when the machine stops."""
        return self.fstype in MEMORY_TYPES

    @property
    def is_local_disk(self) -> bool:
        """Whether it is known to be a disk of this machine."""
        return self.fstype in LOCAL_TYPES


def read_mounts(table: str = "/proc/self/mountinfo") -> list[MountEntry]:
    """The mounts this process sees, in the kernel's order: a later one covers an earlier one."""
    with open(table, "rb") as file:
        return parse_mountinfo(file.read())


def parse_mountinfo(table: bytes) -> list[MountEntry]:
    """The entries of a mount table. Lines of an unknown shape are skipped."""
    entries = []
    for line in table.split(b"\n"):
        before, separator, after = line.partition(b" - ")
        fields, tail = before.split(b" "), after.split(b" ")
        if not separator or len(fields) < 6 or len(tail) < 2:
            continue
        entries.append(
            MountEntry(
                mount_id=int(fields[0]),
                parent_id=int(fields[1]),
                device=fields[2].decode("ascii"),
                root=_unescape(fields[3]),
                mountpoint=_unescape(fields[4]),
                options=tuple(_unescape(option) for option in fields[5].split(b",")),
                fstype=_unescape(tail[0]),
                source=_unescape(tail[1]),
            )
        )
    return entries


def mount_at(mountpoint: str, mounts: Sequence[MountEntry]) -> MountEntry | None:
    """The uppermost mount exactly at a canonical path."""
    for entry in reversed(mounts):
        if entry.mountpoint == mountpoint:
            return entry
    return None


def mount_of(path: str, mounts: Sequence[MountEntry]) -> MountEntry | None:
    """The mount that a canonical path lies in."""
    best: MountEntry | None = None
    for entry in mounts:
        covers = best is None or len(entry.mountpoint) >= len(best.mountpoint)
        if covers and is_below(path, entry.mountpoint):
            best = entry
    return best


def is_below(path: str, directory: str) -> bool:
    """Whether a canonical path is a directory or lies in it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def canonical(
    path: str, mounts: Sequence[MountEntry] | None = None, *, unseen: Sequence[str] = ()
) -> str:
    """The absolute path without symbolic links, found without touching any mount point.

    `os.path.realpath` calls lstat on each component, which hangs on a mount point whose server
    hangs. A mount point is never a symbolic link, so it need not be looked at. Components below a
    hung share are looked up; where that can happen, call this through `probe.within`, or take what
    lies below the directories ``unseen`` as it is.
    """
    if mounts is None:
        mounts = read_mounts()
    mountpoints = {entry.mountpoint for entry in mounts}
    waiting = _components(path if path.startswith("/") else f"{current_directory()}/{path}")
    done = "/"
    links = 0
    while waiting:
        name = waiting.pop()
        if name == "..":
            done = os.path.dirname(done)
            continue
        candidate = os.path.join(done, name)
        if candidate in mountpoints or any(is_below(done, place) for place in unseen):
            done = candidate
            continue
        try:
            target = os.readlink(candidate)
        except OSError:
            # Not a link, or not there: what uses the path will find out.
            done = candidate
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if target.startswith("/"):
            done = "/"
        waiting.extend(_components(target))
    return done


def current_directory() -> str:
    """Where this process is. Raises UsageError when that was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the current directory", "does not exist any more", "give paths from the root"
        ) from None


def answer(entry: MountEntry, deadline: float = 2.0) -> Answer:
    """Whether the FUSE daemon behind a mount answers.

    "dead" is certain: the kernel says that the transport endpoint is not connected. "silent" means
    only that no answer came within `deadline` seconds.
    """
    try:
        dead = within(deadline, lambda: _is_disconnected(entry.mountpoint))
    except ProbeTimeoutError:
        return "silent"
    return "dead" if dead else "alive"


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmount the uppermost mount at a canonical path. No umount helper is run.

    Waits until the kernel has handed all mapped pages back to the daemon; with `lazy` it detaches
    the mount from the tree and returns. Raises BusyError while programs use the mount and
    MountpointError for anything else.
    """
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        if _libc.umount2(os.fsencode(mountpoint), flags) != 0:
            code = ctypes.get_errno()
            _raise_unmount_error(mountpoint, code == errno.EBUSY, os.strerror(code))
        return
    program = which("fusermount3") or which("fusermount")
    if program is None:
        raise MountpointError(
            mountpoint, "cannot be unmounted without fusermount3", "install the package fuse3"
        )
    command = [program, "-u", *(["-z"] if lazy else []), "--", mountpoint]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    if result.returncode != 0:
        why = result.stderr.strip().rpartition(": ")[2] or f"status {result.returncode}"
        _raise_unmount_error(mountpoint, "busy" in result.stderr, why)


def unmount_everywhere(mountpoint: str) -> None:
    """The same, for who then ends the mount in all mount namespaces: not while one of them has
    programs that use it, or is a container's, which would lose it in the middle of its work."""
    entry = mount_at(mountpoint, read_mounts())
    if entry is not None:
        who = [str(user) for user in occupants(entry.device, elsewhere=True)]
        if who:
            _raise_busy(mountpoint, who)
    unmount(mountpoint)


def _raise_busy(mountpoint: str, who: Sequence[str]) -> NoReturn:
    """Raise BusyError: these use the mount, as far as is known."""
    if not who:
        raise BusyError(
            mountpoint, "is in use", f"end what uses it (fuser -vm {mountpoint}) and try again"
        )
    raise BusyError(mountpoint, f"is in use by {in_words(who)}", "end that and try again")


def abort_connection(entry: MountEntry) -> None:
    """Fail every waiting and future request of a FUSE mount whose daemon will never answer.

    Does nothing where the control file system is not mounted or not writable.
    """
    minor = entry.device.partition(":")[2]
    try:
        with open(f"/sys/fs/fuse/connections/{minor}/abort", "w", encoding="ascii") as file:
            file.write("1")
    except OSError:
        pass


def _raise_unmount_error(mountpoint: str, busy: bool, why: str) -> None:
    if busy:
        mounts = read_mounts()
        entry = mount_at(mountpoint, mounts)
        who: list[str] = []
        if entry is not None:
            who += [str(user) for user in occupants(entry.device, elsewhere=False)]
            below = [other for other in mounts if other.parent_id == entry.mount_id]
            who += [f"the mount at {other.mountpoint}" for other in below]
        _raise_busy(mountpoint, who)
    raise MountpointError(mountpoint, f"cannot be unmounted ({why})")


def _is_disconnected(mountpoint: str) -> bool:
    try:
        # Attributes may come from the kernel's memory; this always asks the daemon.
        os.statvfs(mountpoint)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def _components(path: str) -> list[str]:
    """The names of a path, last first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _unescape(field: bytes) -> str:
    """A field as file names are elsewhere in Python; the kernel writes \\040 for a space."""
    if b"\\" in field:
        field = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)
    return os.fsdecode(field)
