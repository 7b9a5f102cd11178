"""Everything that can be wrong before a mount, found before anything is touched.

Each check raises the error that names the cause and the way out. What asks the share, or anything
else that may never answer, is asked through `probe.within`. The one thing these checks change is a
dead mount of our own, left at MOUNTPOINT by a crash: it is detached, since nothing can be checked
behind it.

Whether the cache is in use, was made by a newer version, or belongs to another share is found out
by those who open it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from shutil import which

import wbcache
from wbcache.config import Config
from wbcache.control import registry
from wbcache.daemon import log as daemon_log
from wbcache.disks import default_cache_dir, existing_part
from wbcache.errors import CacheDirError, FuseError, MountpointError, SourceError
from wbcache.mounts import (
    MountEntry,
    abort_connection,
    answer,
    canonical,
    is_below,
    mount_at,
    mount_of,
    read_mounts,
    unmount,
)
from wbcache.options import MountOptions
from wbcache.probe import ProbeTimeoutError, within
from wbcache.processes import is_being_killed

SHARE_DEADLINE = 10.0
"""Seconds that SOURCE and MOUNTPOINT have to answer."""
KNOWN_DEADLINE = 3.0
"""Seconds that SOURCE has when there is a cache, which can be served without it."""
SMALL_RESERVE = 64 << 20
"""Bytes that must be free beyond `min_free` for a new cache to be of any use."""
SMALLEST_CACHE = 64 << 20
"""Bytes that `cache.size` must come to."""
JOURNAL_NAME = "journal.db"
_OWN_NAMES = frozenset(
    {
        *(JOURNAL_NAME, JOURNAL_NAME + "-wal", JOURNAL_NAME + "-shm"),
        *(
            "control.sock",
            daemon_log.NAME,
            daemon_log.OLDER_NAME,
            "data",
            "lock",
            "mount.json",
            "mount.json.new",
        ),
    }
)
"""What a daemon makes in its cache directory."""
FUSE_DEVICE = "/dev/fuse"
FUSE_CONF = "/etc/fuse.conf"


_TELLING = frozenset(
    (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.EOPNOTSUPP)
)
"""Errors that tell of what is there, besides that it is missing or closed to us; any other tells of
the way to the share, and may pass."""


class UnreachableError(SourceError):
    """SOURCE gives no answer, or one that says nothing of what is there."""


@dataclass(frozen=True)
class MountRequest:
    """What the user asked for; the paths are absolute, not yet canonical."""

    source: str
    mountpoint: str
    config: Config
    options: MountOptions
    cache_dir: str | None = None
    config_path: str | None = None


@dataclass(frozen=True)
class MountPlan:
    """A mount that passed the checks; the paths are canonical."""

    source: str
    mountpoint: str
    cache_dir: str
    """May not exist yet."""
    over_source: bool
    """MOUNTPOINT is SOURCE: its descriptor must be held before the mount covers it."""
    unreachable: UnreachableError | None
    """Why SOURCE could not be checked: only a cache that belongs to it can do without."""
    read_only: bool
    rebind: bool
    kernel_options: tuple[str, ...]
    """For the mount call, `allow_other` among them where it is wanted and permitted."""
    warnings: tuple[str, ...]
    """For the log and for the user; nothing that stops the mount."""
    detached: tuple[int, ...]
    """Descriptors of dead mounts that were in the way; see `clear_dead_mount`."""


def check(request: MountRequest) -> MountPlan:
    """Check all of it. Raises the error of the first thing that is wrong."""
    warnings: list[str] = []
    check_fuse()
    source, is_guess = _canonical_source(request.source)
    if request.mountpoint == request.source:
        mountpoint = source
    else:
        mountpoint = _canonical(request.mountpoint, MountpointError)
    detached = clear_dead_mount(mountpoint) + clear_dead_mount(source)
    mounts = read_mounts()
    over_source = mountpoint == source
    check_not_mounted(mountpoint, mounts, over_source=over_source)
    wanted = request.cache_dir or request.config.cache.dir
    if wanted is None:
        cache_dir = default_cache_dir(source, mountpoint, mounts)
    else:
        cache_dir = _canonical(wanted, CacheDirError)
    unreachable = None
    try:
        check_source(source, mounts, has_cache=_has_cache(cache_dir))
    except UnreachableError as error:
        if not _has_cache(cache_dir) or (over_source and not _can_be_covered(source)):
            raise
        unreachable = error
    else:
        if is_guess and _canonical(request.source, SourceError) != source:
            raise SourceError(
                request.source, "the share answered too late", "try again, it answers now"
            )
    check_mountpoint(mountpoint, source)
    check_cache_place(
        cache_dir, source, mountpoint, mounts, volatile=request.options.volatile_cache
    )
    warnings += check_cache_dir(cache_dir, request.config)
    if over_source:
        check_own_files(source, request.config_path)
    return MountPlan(
        source=source,
        mountpoint=mountpoint,
        cache_dir=cache_dir,
        over_source=over_source,
        unreachable=unreachable,
        read_only=request.options.read_only,
        rebind=request.options.rebind,
        kernel_options=_kernel_options(request.options, warnings),
        warnings=tuple(warnings),
        detached=tuple(detached),
    )


def check_fuse() -> None:
    """The kernel's FUSE device and, for a plain user, the program that mounts for them."""
    try:
        os.close(os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise FuseError(
            FUSE_DEVICE,
            "does not exist",
            "load the fuse module (modprobe fuse), or start the container with --device /dev/fuse "
            "--cap-add SYS_ADMIN",
        ) from None
    except OSError as error:
        raise FuseError(
            FUSE_DEVICE,
            f"cannot be opened ({error.strerror})",
            "ask the administrator for access to it; a container needs --device /dev/fuse "
            "--cap-add SYS_ADMIN",
        ) from None
    if os.geteuid() != 0 and which("fusermount3") is None:
        raise FuseError(
            "fusermount3",
            "is not installed, and a plain user cannot mount without it",
            "install the package fuse3, or mount as root",
        )
    if os.geteuid() != 0:
        try:
            pwd.getpwuid(os.getuid())
        except KeyError:
            raise FuseError(
                "fusermount3",
                f"mounts only for users with a name, and uid {os.getuid()} has none",
                "add it to /etc/passwd, or mount as root",
            ) from None


def clear_dead_mount(mountpoint: str) -> list[int]:
    """Detach mounts of ours at a canonical path whose daemon is gone.

    Returns a descriptor of each, for the caller to close: that takes as long as the kernel needs to
    forget the files of the mount, half a second for a hundred thousand, which can be done while
    something else is.

    Dead is a mount that answers "not connected", and one that does not answer at all because its
    killed daemon is stuck in a call on a hung share, where it keeps the connection open.
    """
    detached: list[int] = []
    while True:
        entry = mount_at(mountpoint, read_mounts())
        if entry is None or not entry.is_wbcache or not _is_abandoned(entry):
            return detached
        abort_connection(entry)
        with contextlib.suppress(OSError):  # then unmounting takes as long
            detached.append(os.open(mountpoint, os.O_PATH | os.O_CLOEXEC))
        unmount(mountpoint, lazy=True)


def check_not_mounted(mountpoint: str, mounts: Sequence[MountEntry], *, over_source: bool) -> None:
    """Nothing is mounted at MOUNTPOINT, unless it is the share itself that is to be covered."""
    entry = mount_at(mountpoint, mounts)
    if entry is None:
        return
    if entry.is_wbcache:
        raise MountpointError(
            mountpoint,
            "is already mounted by wbcache",
            f"see 'wbcache status {mountpoint}', or unmount it first",
        )
    if not over_source:
        raise MountpointError(
            mountpoint,
            f"is the mount point of another file system ({entry.fstype})",
            "give an empty directory, or SOURCE itself",
        )


def check_source(source: str, mounts: Sequence[MountEntry], *, has_cache: bool = False) -> None:
    """SOURCE is a directory that can be listed, and not behind wbcache already.

    Raises UnreachableError when it does not say, and soon if there is a cache of it.
    """
    entry = mount_of(source, mounts)
    if entry is not None and entry.is_wbcache:
        raise SourceError(
            source, "is itself a wbcache mount", "give the directory of the share behind it"
        )
    deadline = KNOWN_DEADLINE if has_cache else SHARE_DEADLINE
    try:
        is_directory = within(deadline, lambda: _list_directory(source))
    except ProbeTimeoutError:
        raise UnreachableError(
            source,
            f"the share did not answer within {deadline:g} s",
            "check the network and the share's server, then try again",
        ) from None
    except FileNotFoundError:
        raise SourceError(source, "does not exist", "check the path of the share") from None
    except PermissionError:
        raise SourceError(
            source, "is not readable", "run as a user who may list and enter it"
        ) from None
    except OSError as error:
        raise (SourceError if error.errno in _TELLING else UnreachableError)(
            source, f"cannot be read ({error.strerror})", "mount the share again, then try again"
        ) from None
    if not is_directory:
        raise SourceError(source, "is not a directory", "give a directory of the share")


def check_mountpoint(mountpoint: str, source: str) -> None:
    """MOUNTPOINT is a directory that may be covered: an empty one, or SOURCE."""
    if mountpoint == source:
        return
    if is_below(mountpoint, source):
        raise MountpointError(
            mountpoint,
            f"is inside SOURCE ({source})",
            "give a directory outside of it, or SOURCE itself",
        )
    try:
        problem = within(SHARE_DEADLINE, lambda: _mountpoint_problem(mountpoint))
    except ProbeTimeoutError:
        raise MountpointError(
            mountpoint,
            f"did not answer within {SHARE_DEADLINE:g} s",
            "give a directory on a local disk",
        ) from None
    except OSError as error:
        raise MountpointError(mountpoint, f"cannot be used ({error.strerror})") from None
    if problem is not None:
        raise MountpointError(mountpoint, *problem)


def check_cache_place(
    cache_dir: str,
    source: str,
    mountpoint: str,
    mounts: Sequence[MountEntry],
    *,
    volatile: bool = False,
) -> None:
    """The cache is on a local disk, and neither inside nor around what is mounted."""
    for directory, name in ((source, "SOURCE"), (mountpoint, "MOUNTPOINT")):
        if is_below(cache_dir, directory):
            raise CacheDirError(
                f"cache directory {cache_dir}",
                f"is inside {name} ({directory})",
                "give a directory on a local disk with --cache-dir",
            )
    if is_below(mountpoint, cache_dir):
        raise CacheDirError(
            f"cache directory {cache_dir}",
            f"holds MOUNTPOINT ({mountpoint})",
            "give a directory of its own with --cache-dir",
        )
    entry = mount_of(cache_dir, mounts)
    if entry is None:
        return
    if entry.is_network:
        raise CacheDirError(
            f"cache directory {cache_dir}",
            f"is on a network or FUSE file system ({entry.fstype} at {entry.mountpoint})",
            "give a directory on a local disk with --cache-dir",
        )
    if entry.is_memory and not volatile:
        raise CacheDirError(
            f"cache directory {cache_dir}",
            f"is in memory ({entry.fstype} at {entry.mountpoint}) and would not survive a reboot",
            "give a directory on a local disk with --cache-dir, or accept the risk with "
            "-o volatile_cache",
        )


def check_cache_dir(cache_dir: str, config: Config) -> list[str]:
    """The cache directory is ours, or can be made, and its disk has room; returns warnings.

    A full disk refuses a new cache only: one that exists may hold what must still be flushed.
    """
    what = f"cache directory {cache_dir}"
    hint = "give another directory with --cache-dir"
    try:
        exists = _check_existing_cache(cache_dir, what, hint)
        base = existing_part(cache_dir)
        if not os.access(base, os.W_OK | os.X_OK):
            raise CacheDirError(what, f"{base} is not writable", hint)
        disk = os.statvfs(base)
    except OSError as error:
        raise CacheDirError(what, f"cannot be used ({error.strerror})", hint) from None
    total = disk.f_blocks * disk.f_frsize
    free = disk.f_bavail * disk.f_frsize
    size = config.cache.size.resolve(total)
    if size < SMALLEST_CACHE:
        raise CacheDirError(
            what,
            f"cache.size comes to {size >> 20} MiB, of which the journal alone may need half",
            f"allow {SMALLEST_CACHE >> 20} MiB or more, or use a larger disk",
        )
    needed = config.cache.min_free.resolve(total) + SMALL_RESERVE
    if free >= needed:
        return []
    why = (
        f"its disk has {free >> 20} MiB free, and cache.min_free with a little to work in takes "
        f"{needed >> 20} MiB"
    )
    if not exists:
        raise CacheDirError(
            what, why, "free some space, name another disk, or lower cache.min_free"
        )
    return [f"{what}: {why}; what it holds will be flushed, but writes will be slow"]


def check_own_files(source: str, config_path: str | None) -> None:
    """Nothing that the daemon runs from lies below SOURCE: it would wait for itself."""
    used = [
        ("the Python interpreter", sys.executable),
        ("the Python environment", sys.prefix),
        ("the Python installation", sys.base_prefix),
        ("the wbcache package", os.path.dirname(wbcache.__file__)),
        ("the configuration file", config_path),
        *(("a directory of Python modules", path) for path in sys.path),
    ]
    for name, path in used:
        if path and is_below(canonical(path), source):
            raise SourceError(
                source,
                f"cannot be mounted over itself while {name} ({path}) is inside it",
                "keep that on a local disk, or give a separate MOUNTPOINT",
            )


def _has_cache(cache_dir: str) -> bool:
    return os.path.exists(os.path.join(cache_dir, JOURNAL_NAME))


def _can_be_covered(source: str) -> bool:
    """Whether a share that does not answer can be mounted over: its root can, which the kernel
    knows, if whoever mounts is root. Anything below it, and the helper of a plain user, ask."""
    if os.geteuid() != 0:
        return False
    try:
        within(KNOWN_DEADLINE, lambda: os.close(os.open(source, os.O_PATH | os.O_DIRECTORY)))
    except (ProbeTimeoutError, OSError):
        return False
    return True


def _canonical_source(path: str) -> tuple[str, bool]:
    """SOURCE, and whether symbolic links on the share were not looked at: it does not answer."""
    try:
        return _canonical(path, SourceError, KNOWN_DEADLINE), False
    except UnreachableError:
        mounts = read_mounts()
        unseen = [entry.mountpoint for entry in mounts if entry.is_network]
        return canonical(path, mounts, unseen=unseen), True


def _canonical(
    path: str,
    error_class: type[SourceError | MountpointError | CacheDirError],
    deadline: float = SHARE_DEADLINE,
) -> str:
    try:
        return within(deadline, lambda: canonical(path))
    except ProbeTimeoutError:
        raise (UnreachableError if error_class is SourceError else error_class)(
            path,
            f"a directory on the way to it did not answer within {deadline:g} s",
            "check the mounts above it",
        ) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise error_class(path, f"is not a usable path ({why})") from None


def _is_abandoned(entry: MountEntry) -> bool:
    state = answer(entry)
    if state != "silent":
        return state == "dead"
    record = registry.find(entry.mountpoint)
    return (
        record is not None and record.mountpoint == entry.mountpoint and is_being_killed(record.pid)
    )


def _list_directory(path: str) -> bool:
    """Whether the path is a directory; raises when it cannot be entered and listed."""
    if not stat.S_ISDIR(os.stat(path).st_mode):
        return False
    with os.scandir(path) as entries:
        next(entries, None)
    os.stat(os.path.join(path, "."))
    return True


def _mountpoint_problem(mountpoint: str) -> tuple[str, str] | None:
    """Why a directory cannot be a mount point, and what to do; None when it can."""
    try:
        info = os.stat(mountpoint)
    except FileNotFoundError:
        return "does not exist", f"create it: mkdir -p {mountpoint}"
    if not stat.S_ISDIR(info.st_mode):
        return "is not a directory", "give an empty directory"
    if not os.access(mountpoint, os.R_OK | os.W_OK | os.X_OK):
        return "is not writable", "give a directory of your own"
    with os.scandir(mountpoint) as entries:
        if next(entries, None) is not None:
            return "is not empty", "give an empty directory, or SOURCE itself"
    return None


def _check_existing_cache(cache_dir: str, what: str, hint: str) -> bool:
    """Whether a cache is there already; raises when something else is."""
    try:
        info = os.lstat(cache_dir)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(info.st_mode):
        raise CacheDirError(what, "is not a directory", hint)
    if info.st_uid != os.geteuid():
        raise CacheDirError(
            what,
            f"belongs to another user (uid {info.st_uid})",
            "run as that user, or " + hint,
        )
    if info.st_mode & 0o022:
        raise CacheDirError(
            what,
            f"can be written by other users (mode {stat.S_IMODE(info.st_mode):o})",
            f"look what they left there, then chmod go-w {cache_dir}",
        )
    names = set(os.listdir(cache_dir))
    for name in sorted(names & _OWN_NAMES):
        if problem := _planted(os.lstat(os.path.join(cache_dir, name))):
            raise CacheDirError(what, f"{name} in it {problem}", hint)
    if JOURNAL_NAME in names:
        return True
    # A daemon that failed early may have left its log and lock.
    foreign = names - _OWN_NAMES - {"lost+found"}
    if foreign:
        raise CacheDirError(
            what,
            f"holds other things ({min(foreign)} for one) and no cache",
            "give an empty or new directory with --cache-dir",
        )
    return False


def _planted(info: os.stat_result) -> str:
    """Why something in a cache directory can't be ours; empty when it can."""
    if stat.S_ISLNK(info.st_mode):
        return "is a symbolic link"
    if info.st_uid != os.geteuid():
        return f"belongs to another user (uid {info.st_uid})"
    if info.st_mode & 0o022 and stat.S_ISDIR(info.st_mode):
        return "can be written by other users"
    return ""


def _kernel_options(options: MountOptions, warnings: list[str]) -> tuple[str, ...]:
    if os.geteuid() == 0 or _users_may_allow_other():
        return (*options.kernel, "allow_other")
    if options.allow_other:
        warnings.append(
            f"allow_other is left out: {FUSE_CONF} does not hold user_allow_other, so only you "
            "can use the mount"
        )
    return options.kernel


def _users_may_allow_other() -> bool:
    try:
        with open(FUSE_CONF, encoding="utf-8", errors="replace") as file:
            return any(line.strip() == "user_allow_other" for line in file)
    except OSError:
        return False
