"""The registry of mounts: hints that must be found again and cannot be forged by others."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from wbcache.control import registry
from wbcache.control.registry import MountRecord, find, records, register, unregister
from wbcache.errors import WbcacheError


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The registry's directory, in place of the machine's."""
    directory = tmp_path / "registry"
    monkeypatch.setattr(registry, "_own_directory", lambda: str(directory))
    monkeypatch.setattr(registry, "_searched_directories", lambda: [str(directory)])
    return directory


def record(tmp_path: Path, mountpoint: str, cache: str = "cache", pid: int = 1) -> MountRecord:
    cache_dir = tmp_path / cache
    cache_dir.mkdir(exist_ok=True)
    return MountRecord(mountpoint, "/mnt/share", str(cache_dir), pid)


def test_a_mount_is_found_at_its_mount_point_and_below(directory: Path, tmp_path: Path) -> None:
    outer = record(tmp_path, "/m", "a")
    inner = record(tmp_path, "/m/in\udcffner", "b")
    register(outer)
    register(inner)
    assert records() == [outer, inner]
    assert find("/m") == outer
    assert find("/m/x/y") == outer
    assert find("/m/in\udcffner/x") == inner
    assert find("/mm") is None
    assert find("/") is None


def test_a_new_mount_replaces_what_it_makes_wrong(directory: Path, tmp_path: Path) -> None:
    register(record(tmp_path, "/m", "a"))
    again = record(tmp_path, "/m", "b", pid=2)
    register(again)
    assert records() == [again]
    moved = record(tmp_path, "/elsewhere", "b", pid=3)
    register(moved)
    assert records() == [moved]


def test_unregistering_leaves_a_successor_alone(directory: Path, tmp_path: Path) -> None:
    first = record(tmp_path, "/m", "a", pid=1)
    second = record(tmp_path, "/m", "a", pid=2)
    register(first)
    register(second)
    unregister(first)
    assert records() == [second]
    unregister(second)
    assert records() == []
    unregister(second)


def test_a_record_outlives_its_daemon_but_not_its_cache(directory: Path, tmp_path: Path) -> None:
    dead = record(tmp_path, "/m", "a", pid=2**22 + 1)
    register(dead)
    assert records() == [dead]
    os.rmdir(dead.cache_dir)
    assert records() == []
    alive = record(tmp_path, "/n", "b")
    register(alive)
    assert len(list(directory.iterdir())) == 1


def test_damaged_and_foreign_files_are_passed_over(directory: Path, tmp_path: Path) -> None:
    good = record(tmp_path, "/m")
    register(good)
    (directory / "empty.json").write_text("")
    (directory / "list.json").write_text("[]")
    (directory / "half.json").write_text('{"mountpoint": "/x"')
    (directory / "wrong.json").write_text(json.dumps({**good.__dict__, "pid": "one"}))
    (directory / "note.txt").write_text("hello")
    os.mkfifo(directory / "fifo.json")
    (directory / "link.json").symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "elsewhere.json").write_text(json.dumps({**good.__dict__, "mountpoint": "/x"}))
    forged = directory / "forged.json"
    forged.write_text(json.dumps({**good.__dict__, "mountpoint": "/forged"}))
    os.chown(forged, 12345, 12345)
    assert records() == [good]


def test_a_directory_that_others_can_write_is_not_used(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(mode=0o755)
    os.chmod(directory, 0o777)
    with pytest.raises(WbcacheError, match="another user"):
        register(record(tmp_path, "/m"))
    os.chmod(directory, 0o755)
    register(record(tmp_path, "/m"))
    (file,) = directory.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_where_users_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry._own_directory() == "/run/wbcache"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert registry._own_directory() == str(tmp_path / "wbcache")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert registry._own_directory() == "/tmp/wbcache-1000"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert registry._own_directory() == "/tmp/wbcache-1000"
    # A user may be told that a mount is root's.
    assert "/run/wbcache" in list(registry._searched_directories())
