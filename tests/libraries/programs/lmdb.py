"""lmdb: written through calls and through its mapping, and read by another process meanwhile."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import lmdb

from tests.libraries.programs.frame import main, meet

SIZE = 16 << 20
ROUNDS = 5
KEYS = 200


def _value(n: int) -> bytes:
    return random.Random(n).randbytes(n % 1500)


def _key(n: int) -> bytes:
    return b"%08d" % n


def _open(path: Path, **options: Any) -> Any:
    return lmdb.open(str(path), map_size=SIZE, **options)


def _read(path: Path) -> Any:
    """As from a disk that nothing may be written to."""
    return _open(path, readonly=True, lock=False)


def _fill(environment: Any) -> None:
    for start in range(0, 1000, 100):
        with environment.begin(write=True) as transaction:
            for n in range(start, start + 100):
                transaction.put(_key(n), _value(n))
    with environment.begin(write=True) as transaction:
        for n in range(0, 1000, 3):
            transaction.delete(_key(n))
    with environment.begin(write=True) as transaction:
        transaction.put(b"undone", b"x")
        transaction.abort()


def write(top: Path) -> None:
    with _open(top / "called") as environment:
        _fill(environment)
        environment.copy(str(_made(top / "copied")), compact=True)
    with _open(top / "mapped", writemap=True) as environment:
        _fill(environment)
    with _open(top / "loose", writemap=True, map_async=True, metasync=False) as environment:
        _fill(environment)
        environment.sync(True)
    with _open(top / "file.mdb", subdir=False, sync=False) as environment:
        _fill(environment)


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def check(top: Path) -> None:
    expected = [(_key(n), _value(n)) for n in range(1000) if n % 3]
    for name in ("called", "copied", "mapped", "loose"):
        with _read(top / name) as environment, environment.begin() as transaction:
            assert list(transaction.cursor()) == expected, name
    with (
        _open(top / "file.mdb", subdir=False, readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        assert list(transaction.cursor()) == expected


def _append(top: Path, **options: Any) -> None:
    with _open(top / "live", **options) as environment:
        meet("open")
        for n in range(ROUNDS):
            with environment.begin(write=True) as transaction:
                for key in range(n * KEYS, (n + 1) * KEYS):
                    transaction.put(_key(key), _value(key))
            meet(f"round {n}")


def append(top: Path) -> None:
    """A writer whose transactions `follow` reads."""
    _append(top)


def append_mapped(top: Path) -> None:
    """The same through the mapping."""
    _append(top, writemap=True)


def follow(top: Path) -> None:
    """The reader: sees each transaction as soon as it is committed, and the old one until then."""
    with _open(top / "live", readonly=True) as environment:
        meet("open")
        for n in range(ROUNDS):
            with environment.begin() as transaction:
                expected = [(_key(key), _value(key)) for key in range((n + 1) * KEYS)]
                assert list(transaction.cursor()) == expected
                meet(f"round {n}")
                assert list(transaction.cursor()) == expected


def _endure(top: Path, **options: Any) -> None:
    with _open(top / "live", **options) as environment:
        for n in itertools.count():
            with environment.begin(write=True) as transaction:
                transaction.put(_key(n), _value(n))
            print(n, flush=True)


def endure(top: Path) -> None:
    """Commit and say so, until the disk fails."""
    _endure(top)


def endure_mapped(top: Path) -> None:
    """The same through the mapping."""
    _endure(top, writemap=True)


def survived(top: Path) -> None:
    """Say which was the last that `endure` committed."""
    with _open(top / "live") as environment, environment.begin() as transaction:
        found = list(transaction.cursor())
        assert found == [(_key(n), _value(n)) for n in range(len(found))]
        print(len(found) - 1)


def whole(top: Path) -> None:
    """Whether everything that `append` wrote is there."""
    with _read(top / "live") as environment, environment.begin() as transaction:
        expected = [(_key(key), _value(key)) for key in range(ROUNDS * KEYS)]
        assert list(transaction.cursor()) == expected


if __name__ == "__main__":
    main(write, check, append, append_mapped, follow, endure, endure_mapped, survived, whole)
