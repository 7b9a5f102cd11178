"""The machine loses power: what was fsynced is there, the rest is old, cut or kept aside.

The loss is played on the cache directory: the daemon is killed, cache files lose what was not
synced (a test knows what it synced), and the journal is told that it is another boot.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from functools import partial
from io import FileIO
from pathlib import Path

import pytest

from tests.mounting import NEVER_BY_ITSELF, Mounted
from tests.waiting import wait_until


@pytest.fixture
def share(tmp_path: Path) -> Path:
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "good").write_bytes(b"the good old checkpoint")
    (tmp_path / "share" / "log").write_bytes(b"one\n")
    (tmp_path / "share" / "big").write_bytes(bytes(100_000))
    return tmp_path / "share"


@pytest.fixture
def mount(share: Path) -> Iterator[Mounted]:
    with Mounted(share, config=NEVER_BY_ITSELF) as mounted:
        yield mounted


def lose_power(mount: Mounted, torn: dict[str, int]) -> None:
    """Kill the daemon; the cache files of these paths are cut to these lengths; remount."""
    inodes = {os.stat(mount.path / path).st_ino: length for path, length in torn.items()}
    mount.kill()
    db = sqlite3.connect(Path(mount.cache_dir) / "journal.db")
    for ino, length in inodes.items():
        (gen,) = db.execute("SELECT gen FROM node WHERE ino=?", (ino,)).fetchone()
        os.truncate(Path(mount.cache_dir) / "data" / f"{gen % 256:02x}" / f"{gen:x}", length)
    db.execute("UPDATE meta SET value='another boot' WHERE key='boot_id'")
    db.commit()
    db.close()
    mount.remount()


@contextlib.contextmanager
def held(path: Path, mode: str) -> Iterator[FileIO]:
    """A file that stays open beyond the end of its mount, as a killed program's would."""
    file = FileIO(path, mode)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def synced(mount: Mounted, path: str) -> bool:
    """Whether the background sync has noted a file."""
    ino = os.stat(mount.path / path).st_ino
    db = sqlite3.connect(f"file:{mount.cache_dir}/journal.db?mode=ro", uri=True)
    try:
        flags, length = db.execute("SELECT flags, synced FROM node WHERE ino=?", (ino,)).fetchone()
    finally:
        db.close()
    return not flags & 16 and length == os.stat(mount.path / path).st_size


def test_what_was_fsynced_survives(mount: Mounted, share: Path) -> None:
    with held(mount.path / "new", "w") as file:
        file.write(b"x" * 5000)
        os.fsync(file.fileno())
        lose_power(mount, {})
    assert (mount.path / "new").read_bytes() == b"x" * 5000
    mount.flush()
    assert (share / "new").read_bytes() == b"x" * 5000


def test_a_torn_replacement_never_reaches_the_share(mount: Mounted, share: Path) -> None:
    # Held open: a closed file would be synced within a second.
    with held(mount.path / "good", "w") as file:
        file.write(b"n" * 5000)
        lose_power(mount, {"good": 0})
    with pytest.raises(AssertionError):
        mount.flush(timeout=5.0)
    assert (share / "good").read_bytes() == b"the good old checkpoint"
    (row,) = [row for row in mount.client.pending() if row["path"] == "good"]
    assert "power loss" in row["reason"]
    # Still so after another mount in the same boot; rewriting the file settles it.
    mount.kill()
    mount.remount()
    assert (share / "good").read_bytes() == b"the good old checkpoint"
    (mount.path / "good").write_bytes(b"the good new checkpoint")
    mount.flush()
    assert (share / "good").read_bytes() == b"the good new checkpoint"


def test_fsync_before_the_bytes_does_not_make_them_certain(mount: Mounted, share: Path) -> None:
    # torch.distributed.checkpoint syncs .metadata.tmp while it is empty, then writes and renames.
    with held(mount.path / ".tmp", "w") as file:
        os.fsync(file.fileno())
        file.write(b"m" * 1000)
        os.rename(mount.path / ".tmp", mount.path / "good")
        lose_power(mount, {"good": 0})
    with pytest.raises(AssertionError):
        mount.flush(timeout=5.0)
    assert (share / "good").read_bytes() == b"the good old checkpoint"


def test_unsynced_appends_are_cut(mount: Mounted, share: Path) -> None:
    with held(mount.path / "log", "a") as file:
        file.write(b"two\n")
        os.fsync(file.fileno())
        file.write(b"three\n")
        lose_power(mount, {})
    assert (mount.path / "log").read_bytes() == b"one\ntwo\n"
    mount.flush()
    assert (share / "log").read_bytes() == b"one\ntwo\n"


def test_an_append_that_was_never_synced_leaves_the_old_file(mount: Mounted, share: Path) -> None:
    with held(mount.path / "log", "a") as file:
        file.write(b"two\n")
        lose_power(mount, {"log": 0})
    assert (mount.path / "log").read_bytes() == b"one\n"
    mount.flush()
    assert (share / "log").read_bytes() == b"one\n"


def test_a_torn_patch_stays_aside(mount: Mounted, share: Path) -> None:
    with held(mount.path / "big", "r+") as file:
        file.seek(5000)
        file.write(b"p" * 100)
        lose_power(mount, {"big": 0})
    with pytest.raises(AssertionError):
        mount.flush(timeout=5.0)
    assert (share / "big").read_bytes() == bytes(100_000)


def test_a_closed_file_is_synced_soon(mount: Mounted, share: Path) -> None:
    (mount.path / "good").write_bytes(b"the good new checkpoint")
    for i in range(50):  # many at a time go another way
        (mount.path / f"small-{i}").write_bytes(b"s" * i)
    for path in ("good", "small-0", "small-49"):
        wait_until(partial(synced, mount, path), f"{path} is synced")
    lose_power(mount, {})
    assert (mount.path / "good").read_bytes() == b"the good new checkpoint"
    mount.flush()
    assert (share / "good").read_bytes() == b"the good new checkpoint"
    assert (share / "small-49").read_bytes() == b"s" * 49
