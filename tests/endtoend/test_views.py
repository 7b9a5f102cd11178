"""What the mount shows while things move: nothing jumps, and others' changes come through."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.endtoend.checkpoints import blob
from tests.endtoend.stage import Stage
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

DATASET = 200_000_000


def test_inode_numbers_and_times_outlive_a_flush(stage: Stage) -> None:
    (stage.path / "d" / "e").mkdir(parents=True)
    (stage.path / "d" / "new").write_bytes(b"new")
    (stage.path / "d" / "log").write_bytes(b"log")
    os.symlink("new", stage.path / "d" / "link")
    os.link(stage.path / "d" / "new", stage.path / "d" / "second")
    os.utime(stage.path / "d" / "log", ns=(10**18, 10**18 + 123_456_789))
    os.chmod(stage.path / "d" / "new", 0o640)
    os.rename(stage.path / "d", stage.path / "renamed")

    def facts() -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for directory, subdirectories, files in os.walk(stage.path):
            for name in [".", *subdirectories, *files]:
                st = os.lstat(os.path.join(directory, name))
                key = os.path.join(directory, name)
                found[key] = (st.st_ino, st.st_mode, st.st_size, st.st_mtime_ns, st.st_nlink)
        return found

    before = facts()
    with os.scandir(stage.path / "renamed") as entries:
        listed = {entry.name: entry.inode() for entry in entries}
    stage.flush()
    assert facts() == before
    with os.scandir(stage.path / "renamed") as entries:
        assert {entry.name: entry.inode() for entry in entries} == listed
    with open(stage.path / "renamed" / "log", "ab") as file:
        file.write(b"more")
    grown = os.stat(stage.path / "renamed" / "log")
    stage.flush()
    assert os.stat(stage.path / "renamed" / "log").st_mtime_ns == grown.st_mtime_ns
    assert os.stat(stage.path / "renamed" / "log").st_ino == grown.st_ino
    # And past the time for which attributes are believed.
    wait_until(lambda: stage.ops("getattr", match="renamed/log"), "the share is asked again")
    assert os.stat(stage.path / "renamed" / "log").st_mtime_ns == grown.st_mtime_ns
    share = os.stat(stage.backing / "renamed" / "log")
    assert share.st_mtime_ns == grown.st_mtime_ns


def test_a_listing_merges_both_sides(stage: Stage) -> None:
    for name in ("kept", "removed", "replaced", "renamed"):
        stage.put(name, name.encode())
    stage.appears("renamed")
    (stage.path / "removed").unlink()
    (stage.path / "replaced").write_bytes(b"ours")
    os.rename(stage.path / "renamed", stage.path / "other")
    (stage.path / "new").write_bytes(b"new")
    for _ in range(2):
        assert sorted(os.listdir(stage.path)) == ["kept", "new", "other", "replaced"]
        assert (stage.path / "replaced").read_bytes() == b"ours"
        assert (stage.path / "other").read_bytes() == b"renamed"
        assert not os.path.exists(stage.path / "renamed")
        stage.flush()
    assert sorted(os.listdir(stage.backing)) == ["kept", "new", "other", "replaced"]


def test_changes_of_others_are_seen(stage: Stage) -> None:
    stage.put("changed", b"old")
    stage.put("gone", b"x")
    stage.put("d/inside", b"x")
    stage.appears("d/inside")
    assert (stage.path / "changed").read_bytes() == b"old"
    assert (stage.path / "gone").exists()
    assert not (stage.path / "later").exists()
    assert sorted(os.listdir(stage.path)) == ["changed", "d", "gone"]

    (stage.backing / "changed").write_bytes(b"newer")
    (stage.backing / "gone").unlink()
    (stage.backing / "later").write_bytes(b"new")
    (stage.backing / "d" / "inside").rename(stage.backing / "d" / "moved")
    # One TTL (here 200 ms for names), one access that notices, and a moment for the answer.
    end = time.monotonic() + 10
    wait_until(lambda: not (stage.path / "gone").exists(), "a removal is seen")
    wait_until(lambda: (stage.path / "later").exists(), "a new name is seen")
    wait_until(lambda: (stage.path / "changed").read_bytes() == b"newer", "new bytes are seen")
    wait_until(lambda: os.listdir(stage.path / "d") == ["moved"], "a rename is seen")
    assert sorted(os.listdir(stage.path)) == ["changed", "d", "later"]
    assert time.monotonic() < end
    with pytest.raises(FileNotFoundError):
        (stage.path / "gone").read_bytes()


def test_a_reader_keeps_the_file_that_it_opened(stage: Stage) -> None:
    stage.put("cold", b"cold" * 1000)
    stage.appears("cold")
    (stage.path / "dirty").write_bytes(b"dirty" * 1000)
    with open(stage.path / "cold", "rb") as cold, open(stage.path / "dirty", "rb") as dirty:
        os.rename(stage.path / "dirty", stage.path / "cold")
        (stage.path / "dirty").write_bytes(b"another")
        stage.flush()
        (stage.path / "cold").unlink()
        stage.flush()
        assert cold.read() == b"cold" * 1000
        assert dirty.read() == b"dirty" * 1000
        assert os.fstat(dirty.fileno()).st_nlink == 0
    assert sorted(os.listdir(stage.backing)) == ["dirty"]


def test_small_files_do_not_wait_for_a_large_one(stage: Stage) -> None:
    stage.share.set(bandwidth_mb=20)
    (stage.path / "a").mkdir()
    (stage.path / "b").mkdir()
    (stage.path / "a" / "large").write_bytes(os.urandom(DATASET))
    flush = threading.Thread(target=stage.flush, kwargs={"timeout": 100})
    flush.start()
    try:
        stage.share.wait_for("write", f"{stage.name}/a/.wbcache-*")
        for n in range(10):
            (stage.path / "b" / f"{n}").write_bytes(blob(f"{n}", 1000))
            started = time.monotonic()
            stage.flush(f"b/{n}", timeout=60)
            assert time.monotonic() - started < 5
        assert not (stage.backing / "a" / "large").exists()
        assert len(os.listdir(stage.backing / "b")) == 10
    finally:
        stage.share.set(bandwidth_mb=0)
        flush.join(60)
    assert (stage.backing / "a" / "large").stat().st_size == DATASET


def test_local_work_goes_on_while_the_share_hangs(stage: Stage) -> None:
    """Nothing that is known locally waits for the share."""
    (stage.path / "d").mkdir()
    (stage.path / "d" / "log").write_bytes(b"")
    stage.flush()
    rule = stage.share.hang()
    try:
        started = time.monotonic()
        for n in range(200):
            with open(stage.path / "d" / "log", "ab", buffering=0) as file:
                file.write(b"line\n")
            if n % 20 == 0:
                (stage.path / "d" / f"{n}.tmp").write_bytes(b"x" * 1000)
                os.replace(stage.path / "d" / f"{n}.tmp", stage.path / "d" / f"{n}")
                with open(stage.path / "d" / f"{n}", "rb") as file:
                    os.fsync(file.fileno())
        assert len(os.listdir(stage.path / "d")) == 11
        assert time.monotonic() - started < 10
    finally:
        stage.share.release(rule)
    stage.settle()
    assert (stage.backing / "d" / "log").read_bytes() == b"line\n" * 200


def test_what_another_writer_removed_does_not_come_back(stage: Stage) -> None:
    """Of every kind: what is not changed here goes with it."""
    for name in ("file", "full/file"):
        stage.put(name, b"theirs")
    (stage.backing / "empty").mkdir()
    (stage.backing / "link").symlink_to("file")
    wait_until(lambda: len(os.listdir(stage.path)) == 4, "the mount shows it")
    for name in ("file", "full/file", "link"):
        os.lstat(stage.path / name)
    for name in ("file", "link", "full/file"):
        (stage.backing / name).unlink()
    for name in ("full", "empty"):
        (stage.backing / name).rmdir()
    wait_until(lambda: not os.listdir(stage.path), "the mount shows it no more")
    stage.flush()
    assert not os.listdir(stage.backing)
