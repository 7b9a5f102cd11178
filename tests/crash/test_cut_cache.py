"""Somebody has removed or cut files in the cache directory: said aloud, never taken for zeros."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounting import NEVER_BY_ITSELF, Mounted, wbcache

OLD = b"the good old checkpoint" * 1000
NEW = b"the good new checkpoint" * 1200


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounted]:
    (tmp_path / "share").mkdir()
    for name in ("replaced", "appended", "patched", "clean"):
        (tmp_path / "share" / name).write_bytes(OLD)
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF) as mounted:
        yield mounted


def write(mount: Mounted, name: str) -> bytes:
    """Make a file dirty in one way; what it then holds."""
    path = mount.path / name
    if name in ("new", "replaced"):
        path.write_bytes(NEW)
        return NEW
    if name == "appended":
        with open(path, "ab") as file:
            file.write(NEW)
        return OLD + NEW
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"patch")
    if name == "clean":
        mount.flush(name)
    return OLD[:5000] + b"patch" + OLD[5005:]


def damage(mount: Mounted, names: list[str], length: int) -> None:
    """Kill the daemon, cut the cache files of these to a length, or (-1) remove them; remount."""
    inodes = [os.stat(mount.path / name).st_ino for name in names]
    mount.kill()
    with contextlib.closing(sqlite3.connect(mount.cache_dir / "journal.db")) as db:
        for ino in inodes:
            (gen,) = db.execute("SELECT gen FROM node WHERE ino=?", (ino,)).fetchone()
            path = mount.cache_dir / "data" / f"{gen % 256:02x}" / f"{gen:x}"
            if length < 0:
                path.unlink()
            else:
                os.truncate(path, length)
    mount.remount()


@pytest.mark.parametrize("length", [-1, 3000], ids=["removed", "cut"])
def test_what_is_gone_is_not_flushed(mount: Mounted, length: int) -> None:
    names = ["appended", "new", "patched", "replaced"]
    expected = {name: write(mount, name) for name in names}
    for name in names:
        with open(mount.path / name, "rb") as file:
            os.fsync(file.fileno())
    damage(mount, names, length)

    def check() -> None:
        rows = {row["path"]: row["reason"] for row in mount.client.pending()}
        assert sorted(rows) == names
        assert all("removed or cut" in reason for reason in rows.values())
        with pytest.raises(AssertionError):
            mount.flush(timeout=1.0)
        held = {path.name: path.read_bytes() for path in mount.source.iterdir() if path.is_file()}
        assert held == dict.fromkeys(("appended", "clean", "patched", "replaced"), OLD)

    check()
    for name in names:
        with pytest.raises(OSError) as caught:
            (mount.path / name).read_bytes()
        assert caught.value.errno == errno.EIO
        # What is written now does not make it whole, in this mount or the next.
        with open(mount.path / name, "ab") as again:
            again.write(b"more")
    check()
    mount.kill()
    mount.remount()
    check()
    assert "removed or cut by somebody" in mount.log()
    # A file that is written anew is as good as any.
    for name in names:
        (mount.path / name).write_bytes(expected[name])
    assert mount.umount().returncode == 0
    for name in names:
        assert (mount.source / name).read_bytes() == expected[name]


def test_what_the_share_has_is_read_from_there(mount: Mounted) -> None:
    expected = write(mount, "clean")
    damage(mount, ["clean"], -1)
    assert (mount.path / "clean").read_bytes() == expected
    assert mount.client.pending() == []
    with open(mount.path / "clean", "ab") as file:
        file.write(b"more")
    assert mount.umount().returncode == 0
    assert (mount.source / "clean").read_bytes() == expected + b"more"


def test_recover_tells_of_it(mount: Mounted, tmp_path: Path) -> None:
    write(mount, "new")
    with open(mount.path / "new", "rb") as file:
        os.fsync(file.fileno())
    damage(mount, ["new"], 3000)
    mount.kill()
    done = wbcache("recover", mount.cache_dir, "--to", tmp_path / "recovered")
    assert done.returncode != 0
    assert "removed or cut" in done.stdout + done.stderr
    assert (tmp_path / "recovered" / "new").read_bytes()[:3000] == NEW[:3000]
