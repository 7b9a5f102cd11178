"""Nodes: files, directories and links, keyed by inode number, never by path.

A node is known under names in two views: the *local* one, which is what the mount shows, and the
*share* one, which is what the share holds as far as we know. The flusher makes the second equal to
the first. Everything here is plain data; `tree` keeps it consistent.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, NamedTuple

from wbcache.extents import END, Extents
from wbcache.order import OrderedLog

if TYPE_CHECKING:
    import os

    from wbcache.share.descriptor import Descriptor

ROOT_INO = 1

# Bits of Node.meta: attributes that the share does not have yet.
META_MODE = 1
META_OWNER = 2
META_TIMES = 4
META_XATTR = 8

OWNER_ALL = stat.S_IRWXU
_STORED_MAX = (1 << 63) - 1


def storable_time(time_ns: int) -> int:
    """The nearest time that a row of the journal can hold: they reach from 1677 to 2262."""
    return max(-_STORED_MAX, min(time_ns, _STORED_MAX))


def storable_ino(ino: int) -> int:
    """What a row can hold of an inode number of the share's. Some servers use all 64 bits."""
    return ino & _STORED_MAX


class Signature(NamedTuple):
    """How the share reports a file: what tells our version of it from somebody else's."""

    size: int
    mtime_ns: int
    ino: int
    """0 where the share's inode numbers do not last."""


class Content:
    """One generation of a file's bytes: a cache file and what we know of its ranges.

    Bytes in neither `dirty` nor `clean` are absent: below `base_limit` they come from the share,
    above it they are zeros.
    """

    __slots__ = (
        "base_limit",
        "blocks",
        "clean",
        "cuts",
        "dirty",
        "exists",
        "fd",
        "fresh",
        "gen",
        "pins",
        "redirty",
        "retired",
        "room",
        "seq",
        "synced",
        "tail",
        "torn",
        "unsynced_error",
        "used",
        "uses",
        "version",
        "whole",
        "writing",
    )

    def __init__(self, gen: int, *, whole: bool, base_limit: int, seq: int) -> None:
        self.gen = gen
        self.whole = whole
        """Nothing of it comes from the share: it is published whole, as a new or replaced file."""
        self.base_limit = base_limit
        self.seq = seq
        """Sequence number of the operation that started this generation."""
        self.dirty = Extents((0, END)) if whole else Extents()
        self.clean = Extents()
        self.exists = False
        """Whether the cache file has been made; an empty generation has none."""
        self.fd = -1
        self.tail = -1
        """Where the cache file is to be cut when it is opened, bytes; -1: nowhere. Behind it lies
        what a write had left whose daemon was killed before the journal knew of it."""
        self.blocks = 0
        """Bytes that the cache file takes of the disk."""
        self.room = 0
        """End of the disk block that was written last, bytes: up to there a write takes no more."""
        self.pins = 0
        """Open handles and transfers: while there are any the cache file stays."""
        self.uses = 0
        """Threads, and steps of the flush, that have the descriptor just now: it stays open."""
        self.retired = False
        """It is no node's content any more: its file goes with the last pin."""
        self.cuts = 0
        """How often it was truncated to fewer bytes."""
        self.writing: tuple[tuple[int, int], ...] = ()
        """Ranges that threads are writing just now."""
        self.redirty: tuple[Extents, ...] = ()
        """For each flush that is copying: what was written since its snapshot."""
        self.synced = -1 if whole else base_limit
        """Length that is durable on the local disk, bytes; -1: none of it was ever synced."""
        self.fresh = whole
        """Written since it was last durable."""
        self.version = 0
        """Counts the writes."""
        self.torn = False
        """A power loss came before it was durable: it never replaces what the share has."""
        self.unsynced_error = False
        """The disk refused to make it durable: fsync answers EIO until it is rewritten."""
        self.used = 0.0
        """Monotonic time of the last use, seconds; eviction takes the least recent first."""

    def make_whole(self) -> None:
        """All bytes are in the cache and the share has none of them: publish all."""
        self.whole = True
        self.dirty = Extents((0, END))
        self.clean = Extents()

    def mark_dirty(self, start: int, stop: int) -> None:
        """Record that ``[start, stop)`` is newer than what the share has."""
        self.dirty.add(start, stop)
        if self.clean:
            self.clean.remove(start, stop)
        for redirty in self.redirty:
            redirty.add(start, stop)

    def local(self, start: int, stop: int, size: int) -> bool:
        """Whether every byte of ``[start, stop)`` of a file of ``size`` bytes is in the cache."""
        stop = min(stop, size, self.base_limit)
        return start >= stop or not self.absent(start, stop)

    def absent(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of ``[start, stop)`` that only the share holds."""
        stop = min(stop, self.base_limit)
        found = []
        for a, b in self.dirty.gaps(start, stop):
            found += self.clean.gaps(a, b)
        return found


class Dirty:
    """What the flusher needs to know of a node that the share does not have as it is."""

    __slots__ = ("first", "last", "next", "next_time", "since", "snapshot")

    def __init__(self, since: int, now: float) -> None:
        self.since = since
        """Sequence number of the oldest operation that has not reached the share."""
        self.first = now
        """Monotonic time of that operation, seconds."""
        self.last = now
        """Monotonic time of the newest one, seconds."""
        self.snapshot = 0
        """While a flush runs: the sequence number up to which it covers operations."""
        self.next = 0
        """The first operation after the snapshot; 0 when there was none."""
        self.next_time = 0.0


class Node:
    """A file, link or special file. All times are nanoseconds since the epoch."""

    __slots__ = (
        "append_only",
        "atime",
        "attrs_at",
        "base",
        "busy",
        "closed",
        "content",
        "counted",
        "ctime",
        "dirty",
        "dropped",
        "fsynced",
        "gid",
        "handles",
        "in_vain",
        "ino",
        "journaled",
        "links",
        "lookups",
        "meta",
        "mode",
        "mtime",
        "never",
        "ours",
        "pulled",
        "rdev",
        "released",
        "retries",
        "retry_at",
        "sending",
        "sent",
        "share_fd",
        "size",
        "slinks",
        "spill",
        "spilled",
        "target",
        "transfer",
        "trouble",
        "uid",
        "writers",
        "xattrs",
    )

    def __init__(self, ino: int, mode: int, uid: int = 0, gid: int = 0, now_ns: int = 0) -> None:
        self.ino = ino
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.rdev = 0
        self.atime = self.mtime = self.ctime = now_ns
        self.size = 0
        self.target = b""
        # Tuples, since nearly all are empty or have one item: a list takes twice the memory.
        self.links: tuple[tuple[Directory, bytes], ...] = ()
        """Names in the local view."""
        self.slinks: tuple[tuple[Directory, bytes], ...] = ()
        """Names in the share view."""
        self.dropped: tuple[Directory, bytes, int] | None = None
        """The last name that it had in the mount, and the number of the operation that took it."""
        self.lookups = 0
        """How often the kernel was given this inode and has not forgotten it."""
        self.handles = 0
        self.writers = 0
        self.attrs_at: float | None = None
        """Monotonic time at which the share's attributes were last read; None: never."""
        self.base: Signature | None = None
        """The share's file as we last published or saw it."""
        self.sent: tuple[Signature, ...] = ()
        """Signatures of publishes that have no answer yet: also ours when seen on the share."""
        self.content: Content | None = None
        self.meta = 0
        self.sending = 0
        """Bits of `meta` that a step has taken and of which the share has not answered yet."""
        self.xattrs: dict[bytes, bytes | None] | None = None
        """Extended attributes set (or, as None, removed) here and not yet on the share."""
        self.dirty: Dirty | None = None
        self.counted = 0
        """The dirty_since under which `tree` orders others behind this node; 0: not at all."""
        self.never = False
        """A policy keeps it from the share."""
        self.ours = False
        """Last written through this mount: the share's copy is very likely as we left it."""
        self.append_only = True
        self.closed = False
        """Its last writer has closed it since the share last had it: others wait for what it held
        then, also while it is written anew."""
        self.fsynced = False
        """fsync was called on it, not empty, since its generation began."""
        self.released = False
        """It need no longer be held back while it is open for writing."""
        self.spill = False
        """There is no room for it: its bytes go to the share while it is still being written."""
        self.spilled = False
        """They are there, under a temporary name, which its own name will replace."""
        self.pulled = False
        """Due at once: something waits for it, or a flush was asked for."""
        self.busy = False
        """A step on it is under way on the share."""
        self.transfer: object | None = None
        self.share_fd: Descriptor | None = None
        """An open descriptor of the share's file, while handles read through it."""
        self.trouble: str | None = None
        """Why it is quarantined; None when it is not."""
        self.in_vain: str | None = None
        """What quarantined thing it waits for, in words; None when it does not."""
        self.retries = 0
        self.retry_at = 0.0
        self.journaled = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ino} {self.links or self.slinks}>"

    def take_times(self, st: os.stat_result) -> None:
        """Take over the times that the share reports."""
        times = (st.st_mtime_ns, st.st_ctime_ns, st.st_atime_ns)
        self.mtime, self.ctime, self.atime = map(storable_time, times)

    @property
    def is_dir(self) -> bool:
        return False

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def local_only(self) -> bool:
        """Fifos, sockets and devices never reach the share."""
        return stat.S_IFMT(self.mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)

    @property
    def nlink(self) -> int:
        """Number of names in the mount."""
        return len(self.links)

    @property
    def on_share(self) -> bool:
        """Whether the share has it under any name."""
        return bool(self.slinks)

    @property
    def content_dirty(self) -> bool:
        """Whether the share lacks bytes, or has too many."""
        content = self.content
        if content is None:
            return False
        if content.whole:
            return True
        if content.dirty.first < self.size:
            return True
        return self.base is not None and self.base.size != self.size

    @property
    def late_meta(self) -> int:
        """Bits of `meta` that have to wait."""
        return 0

    @property
    def dirty_bytes(self) -> int:
        """Bytes that have not reached the share."""
        return self.content.dirty.size(self.size) if self.content else 0


class Directory(Node):
    """A directory: its entries in both views, and what is known of the share's listing."""

    __slots__ = (
        "arriving",
        "below",
        "busy_dirs",
        "hot",
        "listed_at",
        "listing",
        "listing_cost",
        "local",
        "misses",
        "negative",
        "pending",
        "pins",
        "renamed",
        "share",
        "share_dirfd",
        "subdirectories",
        "unsynced",
        "users",
    )

    def __init__(self, ino: int, mode: int, uid: int = 0, gid: int = 0, now_ns: int = 0) -> None:
        super().__init__(ino, mode, uid, gid, now_ns)
        self.local: dict[bytes, Node] = {}
        self.share: dict[bytes, Node] = {}
        self.subdirectories = 0
        """How many of its names in the mount are directories."""
        self.arriving: dict[bytes, Node] = {}
        """Names under which steps under way put something on the share."""
        self.unsynced = 0
        """How many of its names differ between the views."""
        self.users = 0
        """Operations that look for something in it just now, which may not be forgotten."""
        self.listed_at: float | None = None
        """Monotonic time at which the last applied listing began; None: never listed."""
        self.listing: object | None = None
        """The refresh under way."""
        self.listing_cost = 0.0
        """Seconds the last listing took."""
        self.hot = False
        """Used since the last listing."""
        self.misses = 0
        self.negative: dict[bytes, float] | None = None
        """Names the share did not have, and when (monotonic seconds)."""
        self.pins: dict[bytes, int] | None = None
        """Names changed on the share by us, and the share's clock when that was finished: a
        listing that began before does not know of it."""
        self.renamed = False
        """Renamed since it was made: it is built under a temporary name on the share."""
        self.share_dirfd: Descriptor | None = None
        self.pending: OrderedLog[Node] | None = None
        """The counted nodes that have a name in it, by dirty_since."""
        self.below = 0
        """How many counted nodes are in it or deeper."""
        self.busy_dirs: set[Directory] | None = None
        """Child directories with counted nodes in them or deeper."""

    @property
    def is_dir(self) -> bool:
        return True

    @property
    def parent(self) -> Directory | None:
        """Where it is in the mount; None for the root and for a removed directory."""
        return self.links[0][0] if self.links else None

    @property
    def nlink(self) -> int:
        """2 and one for each subdirectory; 0 once removed.

        1 ("not counted", which is what btrfs says) before it was listed: programs that walk a tree
        believe a number above 1.
        """
        if not self.links and self.ino != ROOT_INO:
            return 0
        return 2 + self.subdirectories if self.complete else 1

    @property
    def on_share(self) -> bool:
        return self.ino == ROOT_INO or bool(self.slinks)

    @property
    def late_meta(self) -> int:
        """What the share gets when nothing has to be done in it there any more: its times, which
        that would change, and a mode that would keep its own owner from doing it."""
        late = META_TIMES if self.unsynced else 0
        if (self.unsynced or self.pending) and self.mode & OWNER_ALL != OWNER_ALL:
            late |= META_MODE
        return late

    @property
    def complete(self) -> bool:
        """Whether every name in it is known."""
        return self.listed_at is not None or not self.on_share
