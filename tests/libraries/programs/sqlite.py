"""sqlite3: two processes in one database, in both of its journal modes."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from pathlib import Path

from tests.libraries.programs.frame import main, meet

ROUNDS = 5
ROWS = 20
TURNS = 30
MODES = ("delete", "wal")


def _open(top: Path, mode: str) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(top / f"{mode}.db", timeout=60))


def make(top: Path) -> None:
    """The databases that the others need."""
    for mode in MODES:
        with _open(top, mode) as database:
            assert database.execute(f"PRAGMA journal_mode={mode}").fetchone() == (mode,)
            database.execute("CREATE TABLE trial (n INTEGER PRIMARY KEY, value TEXT)")
            database.execute("CREATE TABLE counter (n INTEGER)")
            database.execute("INSERT INTO counter VALUES (0)")
            database.commit()


def append(top: Path) -> None:
    """A writer whose transactions `follow` reads."""
    with _open(top, "delete") as rollback, _open(top, "wal") as wal:
        meet("open")
        for n in range(ROUNDS):
            for database in (rollback, wal):
                for row in range(n * ROWS, (n + 1) * ROWS):
                    database.execute("INSERT INTO trial VALUES (?, ?)", (row, str(row) * 50))
                database.commit()
            meet(f"round {n}")


def follow(top: Path) -> None:
    """The reader of `append`."""
    with _open(top, "delete") as rollback, _open(top, "wal") as wal:
        meet("open")
        for n in range(ROUNDS):
            for database in (rollback, wal):
                rows = database.execute("SELECT * FROM trial ORDER BY n").fetchall()
                assert rows == [(row, str(row) * 50) for row in range((n + 1) * ROWS)]
            meet(f"round {n}")


def count(top: Path) -> None:
    """One of several that count in the same row."""
    meet("ready")
    for mode in MODES:
        with _open(top, mode) as database:
            for _ in range(TURNS):
                with database:
                    database.execute("UPDATE counter SET n = n + 1")


def endure(top: Path) -> None:
    """Commit and say so, until the disk fails."""
    with _open(top, "delete") as rollback, _open(top, "wal") as wal:
        for n in itertools.count():
            for database in (rollback, wal):
                with database:
                    database.execute("INSERT INTO trial VALUES (?, ?)", (n, str(n) * 50))
                    database.execute("UPDATE counter SET n = n + 1")
            print(n, flush=True)


def survived(top: Path) -> None:
    """Say which was the last that `endure` committed."""
    found = []
    for mode in MODES:
        with _open(top, mode) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            (count,) = database.execute("SELECT n FROM counter").fetchone()
            rows = database.execute("SELECT * FROM trial ORDER BY n").fetchall()
            assert rows == [(row, str(row) * 50) for row in range(count)]
            found.append(count - 1)
    print(min(found))


def _unchanged(top: Path, mode: str) -> contextlib.closing[sqlite3.Connection]:
    name = f"file:{top}/{mode}.db?mode=ro&immutable=1"
    return contextlib.closing(sqlite3.connect(name, uri=True))


def whole(top: Path) -> None:
    """Whether everything that `append` wrote is there."""
    for mode in MODES:
        with _unchanged(top, mode) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            rows = database.execute("SELECT * FROM trial ORDER BY n").fetchall()
            assert rows == [(row, str(row) * 50) for row in range(ROUNDS * ROWS)]


def counted(top: Path) -> None:
    """Whether two of `count` have counted."""
    for mode in MODES:
        with _unchanged(top, mode) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert database.execute("SELECT n FROM counter").fetchone() == (2 * TURNS,)


if __name__ == "__main__":
    main(make, append, follow, count, endure, survived, whole, counted)
