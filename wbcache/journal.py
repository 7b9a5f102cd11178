"""The journal: durable rows of everything the share does not have yet, and of what we know of it.

SQLite in WAL mode, one transaction an operation. A committed transaction survives kill -9 (it is in
the page cache); `sync` makes all of them survive a power loss. The journal describes state, not
operations: each row is the newest version of a node or a name.

Raises OSError (ENOSPC, EIO) when a transaction can't be stored; nothing of it is then.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from wbcache.errors import CacheDirError, CacheDiskError, CacheFormatError
from wbcache.extents import Extents
from wbcache.node import Content, Directory, Node
from wbcache.tree import Item, Name, NameChange

FORMAT = 1
"""Version of the on-disk format; raised when an older wbcache could not read the rows."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS node (
    ino INTEGER PRIMARY KEY, mode INT, uid INT, gid INT, rdev INT,
    atime INT, mtime INT, ctime INT, size INT, target BLOB,
    base_size INT, base_mtime INT, base_ino INT,
    gen INT, whole INT, base_limit INT, gen_seq INT, meta INT, since INT, flags INT,
    synced INT);
CREATE TABLE IF NOT EXISTS name (
    parent INT, name BLOB, local INT, share INT, seq INT, time INT,
    PRIMARY KEY (parent, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS extent (
    id INTEGER PRIMARY KEY, gen INT, start INT, stop INT, state INT);
CREATE INDEX IF NOT EXISTS extent_gen ON extent (gen);
CREATE TABLE IF NOT EXISTS xattr (ino INT, name BLOB, value BLOB, PRIMARY KEY (ino, name))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS temporary (name BLOB PRIMARY KEY, parent INT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS intent (
    id INTEGER PRIMARY KEY, kind TEXT, ino INT, parent INT, name BLOB,
    size INT, mtime INT, sino INT);
CREATE TABLE IF NOT EXISTS seen_directory (
    ino INTEGER PRIMARY KEY, names INT, used INT, complete INT);
CREATE TABLE IF NOT EXISTS seen (
    parent INT, name BLOB, ino INT, mode INT, uid INT, gid INT, size INT, mtime INT, ctime INT,
    atime INT, target BLOB, base_size INT, base_mtime INT, base_ino INT,
    PRIMARY KEY (parent, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS conflict (
    id INTEGER PRIMARY KEY, parent INT, name BLOB, copy BLOB, ours INT, theirs INT, time REAL);
"""

EXTENT_DIRTY, EXTENT_CLEAN, EXTENT_ABSENT = 1, 2, 0

FLAG_APPEND_ONLY = 1
FLAG_OURS = 2
FLAG_RENAMED = 4
FLAG_LISTED = 8
FLAG_FRESH = 16
FLAG_TORN = 32

_CHECKPOINT_BYTES = 16 << 20

BALLAST_BYTES = 8 << 20
"""Disk space held back for the journal."""

_BALLAST = "-ballast"


class Intent(NamedTuple):
    """A change on the share that was about to be made when it was recorded."""

    kind: str
    """publish, grow, patch, attributes, rename or make."""
    ino: int
    parent: int
    name: bytes
    """Where the change shows on the share."""
    size: int
    mtime: int
    sino: int
    """What the share would report afterwards. For `make`, size is the mode of what is made."""


class SeenRow(NamedTuple):
    """A name that the share had, and what was known of it. It holds only where no row of `name`
    says otherwise."""

    parent: int
    name: bytes
    ino: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    ctime: int
    atime: int
    target: bytes | None
    base_size: int | None
    """With the next two the signature; None when the attributes were never asked for."""
    base_mtime: int | None
    base_ino: int | None


class SeenDirectory(NamedTuple):
    """How much is stored of a directory of the share."""

    ino: int
    names: int
    used: int
    """When it was last seen, wall-clock seconds."""
    complete: int
    """Whether that is every name in it."""


class ConflictRow(NamedTuple):
    """A conflict with another writer, see `conflicts.Conflict`; nodes by their inode numbers."""

    id: int
    parent: int
    name: bytes
    copy: bytes
    ours: int
    theirs: int
    time: float


def _to_oserror(error: sqlite3.Error) -> OSError:
    text = str(error)
    if "full" in text:
        return CacheDiskError(errno.ENOSPC, "the cache disk is full: " + text)
    return CacheDiskError(errno.EIO, "the journal can't be written: " + text)


class Journal:
    """An open journal. Used from the event loop only; `sync` and `checkpoint` from threads too."""

    def __init__(self, path: str) -> None:
        """Open or make a journal. Raises CacheFormatError, or CacheDirError for a damaged one."""
        self.path = path
        with self._readable():
            self._open()
        self.changes: Mapping[Name, NameChange] = {}
        """The tree's differing names, whose sequence numbers are stored with the names."""
        self.unsaved: set[Item] = set()
        """Items whose last save failed: the next transaction carries them too."""
        self.unsaved_extra: list[Callable[[], None]] = []
        """What else those saves would have stored; it comes first, what is newer may replace it."""
        self._retired: set[int] = set()
        """Ranged generations that are nobody's any more: the next transaction removes the rows."""

    def _open(self) -> None:
        path = self.path
        new = not os.path.exists(path)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # Small pages: a transaction touches two or three, and pays for whole ones.
        self._db.execute("PRAGMA page_size=1024")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA wal_autocheckpoint=0")
        self._db.execute("PRAGMA cache_size=-16384")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > FORMAT:
            self._db.close()
            raise CacheFormatError(
                f"cache {os.path.dirname(path)}",
                f"it was made by a newer wbcache (format {version}, this one knows {FORMAT})",
                "upgrade wbcache, or use another --cache-dir",
            )
        self._db.executescript(_SCHEMA)
        if new or version < FORMAT:
            self._db.execute(f"PRAGMA user_version={FORMAT}")
        self._execute = self._db.execute
        self._wal_fd = -1
        self.ranged: set[int] = {row[0] for row in self._execute("SELECT gen FROM extent")}
        """Generations that have (or had, after a failure) rows of ranges."""
        rows = self._execute("SELECT ino FROM seen_directory")
        self._seen: set[int] = {row[0] for row in rows}
        """Directories that have (or had, after a failure) rows of what was seen in them."""

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise CacheDirError(
                f"cache directory {os.path.dirname(self.path)}",
                f"its journal can't be read ({error})",
                "use another --cache-dir; the bytes of this one are in its data/",
            ) from error

    def close(self) -> None:
        """Close the journal; everything in it is durable afterwards."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()
        if self._wal_fd >= 0:
            os.close(self._wal_fd)
            self._wal_fd = -1

    # -- writing -------------------------------------------------------------------------------

    def save(self, *items: Item, extra: Callable[[], None] | None = None) -> None:
        """Store the present state of nodes and names in one transaction.

        ``extra`` may put more rows into the same transaction; it may be called twice.
        """
        try:
            self._save(items, extra)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._drop_ballast():
                raise
            self._save(items, extra)

    def _save(self, items: Iterable[Item], extra: Callable[[], None] | None) -> None:
        execute = self._execute
        try:
            execute("BEGIN")
            try:
                for late in self.unsaved_extra:
                    late()
                for gen in self._retired:
                    execute("DELETE FROM extent WHERE gen=?", (gen,))
                for item in (*self.unsaved, *items):
                    self._put(item)
                if extra is not None:
                    extra()
                execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            for item in items:
                if isinstance(item, Node):
                    item.journaled = False
            raise _to_oserror(error) from error
        self.unsaved.clear()
        self.unsaved_extra.clear()
        if self._retired:
            self.ranged -= self._retired
            self._retired.clear()

    def forget_extents(self, gen: int) -> None:
        """A generation is nobody's any more: when its number is given to another content, no row of
        it is left."""
        if gen in self.ranged:
            self._retired.add(gen)

    def _put(self, item: Item) -> None:
        if isinstance(item, Node):
            self._put_node(item)
        else:
            self._put_name(*item)

    def _put_node(self, node: Node) -> None:
        if not node.links and not node.slinks and not node.busy and node.ino != 1:
            self._execute("DELETE FROM node WHERE ino=?", (node.ino,))
            if node.xattrs:
                self._execute("DELETE FROM xattr WHERE ino=?", (node.ino,))
            node.journaled = False
            return
        # A removed node stays while a step on it has no answer: it may yet appear on the share.
        content = node.content if node.links else None
        base, dirty = node.base, node.dirty
        flags = node.append_only * FLAG_APPEND_ONLY | node.ours * FLAG_OURS
        if content is not None:
            flags |= content.fresh * FLAG_FRESH | content.torn * FLAG_TORN
        if isinstance(node, Directory):
            flags |= node.renamed * FLAG_RENAMED | (node.listed_at is not None) * FLAG_LISTED
        self._execute(
            "INSERT OR REPLACE INTO node VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                node.ino,
                node.mode,
                node.uid,
                node.gid,
                node.rdev,
                node.atime,
                node.mtime,
                node.ctime,
                node.size,
                node.target or None,
                base.size if base else None,
                base.mtime_ns if base else None,
                base.ino if base else None,
                content.gen if content else None,
                content.whole if content else None,
                content.base_limit if content else None,
                content.seq if content else None,
                node.meta | node.sending,
                dirty.since if dirty else None,
                flags,
                content.synced if content else None,
            ),
        )
        if not node.journaled:
            node.journaled = True
            # Its place must be known too, up to the root. A name under which the views differ is
            # stored when it changes.
            for link in {*node.links, *node.slinks}:
                if link not in self.changes:
                    self._put_name(*link)

    def _put_name(self, directory: Directory, name: bytes) -> None:
        if not directory.journaled:
            self._put_way(directory)
        local, share = directory.local.get(name), directory.share.get(name)
        if local is None and share is None:
            self._execute("DELETE FROM name WHERE parent=? AND name=?", (directory.ino, name))
            if directory.ino in self._seen:
                self._execute("DELETE FROM seen WHERE parent=? AND name=?", (directory.ino, name))
            self._put_node(directory)  # the row told when the directory was last changed
            return
        for node in (local, share):
            if node is not None and not node.journaled:
                self._put_node(node)
        self._execute(
            "INSERT OR REPLACE INTO name VALUES(?,?,?,?,?,?)",
            (
                directory.ino,
                name,
                local.ino if local else None,
                share.ino if share else None,
                change.seq if (change := self.changes.get((directory, name))) else 0,
                directory.ctime,
            ),
        )

    def _put_way(self, directory: Directory) -> None:
        """Store a directory, and those above it before it: they may be a thousand."""
        way = [directory]
        for at in way:
            above = {parent for parent, _ in (*at.links, *at.slinks)}
            way += [parent for parent in above if not parent.journaled and parent not in way]
        for at in reversed(way):
            if not at.journaled:
                self._put_node(at)

    def add_extent(self, gen: int, start: int, stop: int, state: int) -> None:
        """Record that a range of a generation is now dirty, clean or absent."""
        try:
            self._execute(
                "INSERT INTO extent (gen, start, stop, state) VALUES(?,?,?,?)",
                (gen, start, stop, state),
            )
            self.ranged.add(gen)
        except sqlite3.Error as error:
            raise _to_oserror(error) from error

    def put_extents(self, content: Content) -> None:
        """Replace a generation's ranges by the present ones (inside `save`)."""
        if content.gen in self.ranged:
            self._execute("DELETE FROM extent WHERE gen=?", (content.gen,))
        rows = [(content.gen, a, b, EXTENT_CLEAN) for a, b in content.clean]
        if not content.whole:
            rows += [(content.gen, a, b, EXTENT_DIRTY) for a, b in content.dirty]
        if rows:
            self.ranged.add(content.gen)
        self._db.executemany("INSERT INTO extent (gen, start, stop, state) VALUES(?,?,?,?)", rows)

    def drop_extents(self, gen: int) -> None:
        """Forget a generation's ranges (inside `save`)."""
        if gen in self.ranged:
            self._execute("DELETE FROM extent WHERE gen=?", (gen,))

    def put_xattr(self, ino: int, name: bytes, value: bytes | None) -> None:
        """Record an extended attribute to set (None: to remove) (inside `save`)."""
        self._execute("INSERT OR REPLACE INTO xattr VALUES(?,?,?)", (ino, name, value))

    def drop_xattrs(self, ino: int) -> None:
        """The share has a node's extended attributes (inside `save`)."""
        self._execute("DELETE FROM xattr WHERE ino=?", (ino,))

    def add_temporary(self, directory: Directory, name: bytes) -> None:
        """Record a temporary before it exists on the share."""
        self.save(
            directory,
            extra=lambda: self._run(
                "INSERT OR REPLACE INTO temporary VALUES(?,?)", (name, directory.ino)
            ),
        )

    def drop_temporary(self, name: bytes) -> None:
        """The temporary is gone from the share, or has become a file (also inside `save`)."""
        self._run("DELETE FROM temporary WHERE name=?", (name,))

    def add_intents(self, intents: Iterable[Intent]) -> list[int]:
        """Record what is about to be done on the share; returns the rows' ids."""
        intents = list(intents)
        ids: list[int] = []

        def put() -> None:
            ids[:] = self.put_intents(intents)

        self.save(extra=put)
        return ids

    def put_intents(self, intents: Iterable[Intent]) -> list[int]:
        """The same inside `save`. A step that is tried again leaves one row."""
        ids = []
        for intent in intents:
            self._execute(
                "DELETE FROM intent WHERE kind IS ? AND ino IS ? AND parent IS ? AND name IS ?"
                " AND size IS ? AND mtime IS ? AND sino IS ?",
                intent,
            )
            cursor = self._execute(
                "INSERT INTO intent (kind, ino, parent, name, size, mtime, sino)"
                " VALUES(?,?,?,?,?,?,?)",
                intent,
            )
            assert cursor.lastrowid is not None
            ids.append(cursor.lastrowid)
        return ids

    def intents_of(self, ino: int) -> list[Intent]:
        """What was about to be done with a node and is not known to be done or given up."""
        rows = self._execute("SELECT * FROM intent WHERE ino=? ORDER BY id", (ino,)).fetchall()
        return [Intent(*values) for _, *values in rows]

    def drop_intents(self, ids: Iterable[int]) -> None:
        """The outcome of these is known and stored (inside `save`)."""
        self._db.executemany("DELETE FROM intent WHERE id=?", [(i,) for i in ids])

    def drop_intents_of(self, ino: int) -> None:
        """The outcome of all of a node's intents is known and stored (inside `save`)."""
        self._execute("DELETE FROM intent WHERE ino=?", (ino,))

    def drop_moves_of(self, ino: int) -> None:
        """It is known and stored under which names the share has a node (inside `save`)."""
        self._execute("DELETE FROM intent WHERE ino=? AND kind IN ('rename', 'make')", (ino,))

    def put_seen(self, rows: list[SeenRow], next_ino: int) -> None:
        """Store what the share has shown, and which inode numbers are taken (inside `save`)."""
        self._seen.update(row.parent for row in rows)
        marks = ",".join("?" * len(SeenRow._fields))
        self._db.executemany(f"INSERT OR REPLACE INTO seen VALUES({marks})", rows)
        self.set_meta("next_ino", next_ino)

    def put_seen_directories(self, rows: list[SeenDirectory], next_ino: int) -> None:
        """Store that what is known of directories is stored (inside `save`)."""
        self._seen.update(row.ino for row in rows)
        self._db.executemany("INSERT OR REPLACE INTO seen_directory VALUES(?,?,?,?)", rows)
        self.set_meta("next_ino", next_ino)

    def forget_seen(self, *inos: int) -> None:
        """Remove what was seen in directories."""

        def forget() -> None:
            for ino in inos:
                self._execute("DELETE FROM seen_directory WHERE ino=?", (ino,))
                self._execute("DELETE FROM seen WHERE parent=?", (ino,))

        self.save(extra=forget)
        self._seen.difference_update(inos)

    def put_conflicts(self, rows: Iterable[ConflictRow]) -> None:
        """Record conflicts, in place of those about the same names (inside `save`)."""
        for row in rows:
            self._execute(
                "DELETE FROM conflict WHERE parent=? AND name=? AND copy=?",
                (row.parent, row.name, row.copy),
            )
            self._execute("INSERT INTO conflict VALUES(?,?,?,?,?,?,?)", row)

    def drop_conflicts(self, ids: Iterable[int]) -> None:
        """Somebody has dealt with these (inside `save`)."""
        self._db.executemany("DELETE FROM conflict WHERE id=?", [(i,) for i in ids])

    def set_meta(self, key: str, value: str | int) -> None:
        """Store a fact about the whole cache."""
        self._run("INSERT OR REPLACE INTO meta VALUES(?,?)", (key, value))

    def _run(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            self._execute(statement, values)
        except sqlite3.Error as error:
            found = _to_oserror(error)
            if found.errno == errno.ENOSPC and not self._db.in_transaction and self._drop_ballast():
                self._run(statement, values)
            else:
                raise found from error

    # -- durability ----------------------------------------------------------------------------

    def sync(self) -> None:
        """Make everything committed so far survive a power loss. Blocks; call it in a thread."""
        if self._wal_fd < 0:
            try:
                self._wal_fd = os.open(self.path + "-wal", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
        os.fdatasync(self._wal_fd)

    @property
    def is_long(self) -> bool:
        """Whether the log has grown so long that it should be moved into the database."""
        try:
            return os.stat(self.path + "-wal").st_size >= _CHECKPOINT_BYTES
        except FileNotFoundError:
            return False

    def disk_bytes(self) -> int:
        """Bytes that the journal takes on the disk, its ballast and a full log included."""
        total = BALLAST_BYTES
        for suffix, least in ("", 0), ("-wal", _CHECKPOINT_BYTES), ("-shm", 0):
            try:
                total += max(os.stat(self.path + suffix).st_blocks * 512, least)
            except FileNotFoundError:
                total += least
        return total

    # -- a full disk ---------------------------------------------------------------------------

    def hold_ballast(self) -> None:
        """Hold disk space back, which is given up when the disk is full: removing files, which
        makes room, must be stored first."""
        if os.path.exists(self.path + _BALLAST):
            return
        try:
            fd = os.open(self.path + _BALLAST, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, BALLAST_BYTES)
            finally:
                os.close(fd)
        except OSError:
            self._drop_ballast()  # whatever refuses it: the cache goes on without

    def _drop_ballast(self) -> bool:
        try:
            os.unlink(self.path + _BALLAST)
        except OSError:
            return False
        return True

    def checkpoint(self) -> None:
        """Move the log into the database. Blocks; call it in a thread.

        Operations go on meanwhile, on the other connection; `restart_log` ends it.
        """
        db = sqlite3.connect(self.path, isolation_level=None)
        try:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            db.close()

    def restart_log(self) -> None:
        """Move the rest, which is little after `checkpoint`, and begin the log anew."""
        try:
            self._execute("PRAGMA wal_checkpoint(RESTART)")
        except sqlite3.Error as error:
            raise _to_oserror(error) from error

    # -- reading -------------------------------------------------------------------------------

    def get_meta(self, key: str) -> str | int | None:
        """A fact stored by `set_meta`, or None."""
        with self._readable():
            row = self._execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return row[0] if row else None

    def seen_directories(self) -> list[SeenDirectory]:
        """The rows of `put_seen_directories`, the one seen longest ago first."""
        with self._readable():
            # Numbers are given on the way down, so that a directory comes after what is in it.
            rows = self._execute("SELECT * FROM seen_directory ORDER BY used, ino DESC").fetchall()
        return [SeenDirectory(*row) for row in rows]

    def seen(self, parent: int) -> list[SeenRow]:
        """What was seen in a directory."""
        with self._readable():
            rows = self._execute("SELECT * FROM seen WHERE parent=?", (parent,)).fetchall()
        return [SeenRow(*row) for row in rows]

    def conflicts(self) -> list[ConflictRow]:
        """The recorded conflicts, oldest first."""
        return [ConflictRow(*row) for row in self.rows("conflict")]

    def rows(self, table: str) -> Iterator[tuple[Any, ...]]:
        """All rows of a table, in order of its key."""
        order = {"node": "ino", "name": "parent, name", "extent": "id", "intent": "id"}
        with self._readable():
            yield from self._execute(f"SELECT * FROM {table} ORDER BY {order.get(table, 1)}")


def extents_of(rows: Iterable[tuple[int, int, int]]) -> tuple[Extents, Extents]:
    """Replay (start, stop, state) rows in order; returns (dirty, clean)."""
    dirty, clean = Extents(), Extents()
    for start, stop, state in rows:
        for extents, mine in ((dirty, EXTENT_DIRTY), (clean, EXTENT_CLEAN)):
            if state == mine:
                extents.add(start, stop)
            else:
                extents.remove(start, stop)
    return dirty, clean
