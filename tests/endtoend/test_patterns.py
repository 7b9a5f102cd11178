"""System call patterns of real programs, on a share that takes 20 ms a call.

Each works on the mount as on a disk, and the share holds the same in the end.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import multiprocessing
import os
import shutil
import socket
import sqlite3
import struct
import subprocess
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.descriptors import opened
from tests.endtoend.checkpoints import blob
from tests.endtoend.stage import Stage

pytestmark = pytest.mark.timeout(120)

CONFIG = {"flush": {"idle_delay": "100ms", "max_age": "300ms"}}

STAMP = 1_500_000_000_123_456_789

WINS = 5


@pytest.fixture(autouse=True)
def slowly(stage: Stage) -> None:
    stage.share.set(latency_ms=20)


def in_child(work: Callable[[], object]) -> object:
    """What a function returns in a process of its own, or the errno of its OSError."""

    def run(connection: object) -> None:
        try:
            result = work()
        except OSError as error:
            result = error.errno
        connection.send(result)  # type: ignore[attr-defined]

    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=run, args=(theirs,))
    process.start()
    try:
        assert ours.poll(30), "no answer from the child"
        return ours.recv()
    finally:
        process.join(10)


def test_a_move_across_devices_keeps_times_and_modes(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(blob("ckpt", 3_000_000))
    os.utime(tmp_path / "model.ckpt", ns=(STAMP, STAMP))
    os.chmod(tmp_path / "model.ckpt", 0o640)
    with pytest.raises(OSError) as caught:
        os.rename(tmp_path / "model.ckpt", stage.path / "model.ckpt")
    assert caught.value.errno == errno.EXDEV
    shutil.move(tmp_path / "model.ckpt", stage.path / "model.ckpt")
    with open(stage.path / "model.ckpt", "rb") as source, open(stage.path / "copy", "wb") as copy:
        while os.sendfile(copy.fileno(), source.fileno(), None, 8 << 20):
            pass
    stage.settle()
    for place in (stage.path, stage.backing):
        st = os.stat(place / "model.ckpt")
        assert (st.st_mtime_ns, st.st_mode & 0o777) == (STAMP, 0o640)
        assert (place / "copy").read_bytes() == blob("ckpt", 3_000_000)


def test_exactly_one_creator_wins(stage: Stage) -> None:
    wins: list[str] = []

    def create(name: str) -> None:
        for n in range(WINS):
            try:
                with opened(stage.path / f"lock{n}", os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
                    os.write(fd, name.encode())
                wins.append(f"{n}")
            except FileExistsError:
                pass
            (stage.path / f"own{name}{n}").write_bytes(name.encode())
            try:
                os.link(stage.path / f"own{name}{n}", stage.path / f"shared{n}")
                wins.append(f"link{n}")
            except FileExistsError:
                pass

    threads = [threading.Thread(target=create, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == sorted(f"{kind}{n}" for kind in ("", "link") for n in range(WINS))
    stage.settle()
    assert os.stat(stage.backing / "shared0").st_nlink == 2


def test_locks_exclude_other_processes(stage: Stage) -> None:
    path = stage.path / "db.lock"
    path.touch()

    def try_flock() -> object:
        with opened(path, os.O_RDWR) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "locked"

    def try_range() -> object:
        with opened(path, os.O_RDWR) as fd:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1073741824)
            return "locked"

    def try_ofd() -> object:
        with opened(path, os.O_RDWR) as fd:
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 5, 10, 0)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
            return "locked"

    with opened(path, os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert in_child(try_flock) in (errno.EAGAIN, errno.EACCES)
        fcntl.flock(fd, fcntl.LOCK_UN)
        assert in_child(try_flock) == "locked"
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, 1073741824)
        assert in_child(try_range) in (errno.EAGAIN, errno.EACCES)
        stage.share.disconnect()  # locks are this host's own
        assert in_child(try_ofd) == "locked"
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.lockf(fd, fcntl.LOCK_UN)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
        assert in_child(try_ofd) in (errno.EAGAIN, errno.EACCES)
        stage.share.reconnect()
    assert in_child(try_ofd) == "locked"


def test_pages_dirtied_after_close_arrive(stage: Stage) -> None:
    array = np.memmap(stage.path / "array.dat", dtype="float32", mode="w+", shape=(200, 1000))
    stage.flush()
    array[100] = 7.0
    array.flush()
    array[199, 999] = 9.0
    del array  # unmapped, never closed or synced again
    expected = np.zeros((200, 1000), dtype="float32")
    expected[100], expected[199, 999] = 7.0, 9.0
    stage.settle()
    assert (stage.backing / "array.dat").read_bytes() == expected.tobytes()


def test_a_mapping_and_a_synchronous_writer_see_one_file(stage: Stage) -> None:
    """lmdb: pages through a mapping, the meta page through a descriptor opened O_DSYNC."""
    with opened(stage.path / "data.mdb", os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, 64 << 10)
        mapping = mmap.mmap(fd, 64 << 10)
        with opened(stage.path / "data.mdb", os.O_RDWR | os.O_DSYNC) as meta:
            for turn in range(20):
                os.pwrite(fd, b"page%04d" % turn * 512, 4096 * (2 + turn % 8))
                mapping[40_000 + turn : 40_001 + turn] = b"m"
                os.pwrite(meta, b"meta%04d" % turn, 4096 * (turn % 2))
                assert mapping[4096 * (turn % 2) :][:8] == b"meta%04d" % turn
                assert mapping[4096 * (2 + turn % 8) :][:8] == b"page%04d" % turn
                assert os.pread(fd, 1, 40_000 + turn) == b"m"
        mapping.close()
    stage.settle()


def test_any_order_of_offsets_with_the_header_last(stage: Stage) -> None:
    """h5py and zip files: reads behind the end, parts in any order, the header rewritten."""
    with opened(stage.path / "file.h5", os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert os.pread(fd, 8, 0) == b""
        os.pwrite(fd, b"\x89HDF\r\n\x1a\n", 0)
        for at in (90_000, 2048, 500_000, 10_000):
            assert os.pread(fd, 512, at + 10_000_000) == b""
            os.pwrite(fd, blob(f"{at}", 8000), at)
            stage.flush("file.h5")
        os.pwrite(fd, b"header rewritten", 8)
    np.savez(stage.path / "arrays.npz", a=np.arange(1000), b=np.ones((50, 50)))
    with np.load(stage.path / "arrays.npz") as arrays:
        assert arrays["a"].sum() == 499_500
    stage.settle()


def test_sync_returns_while_the_share_is_down(stage: Stage) -> None:
    (stage.path / "d").mkdir()
    (stage.path / "d" / "known").write_bytes(b"x")
    stage.flush()
    stage.share.disconnect()
    with opened(stage.path / "d" / "new", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"durable")
        os.fsync(fd)
        os.write(fd, b"!")
        os.fdatasync(fd)
    with opened(stage.path / "d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)
    with open(stage.path / "d" / "known", "ab") as file:
        file.write(b"more")
        os.fsync(file.fileno())
    stage.share.reconnect()
    stage.settle()
    assert (stage.backing / "d" / "new").read_bytes() == b"durable!"
    assert (stage.backing / "d" / "known").read_bytes() == b"xmore"


@pytest.mark.parametrize("when", ["open", "closed", "flushed"])
def test_attributes_survive_the_flush(stage: Stage, when: str) -> None:
    """tar sets them before close, cp after."""
    path = stage.path / "file"
    with opened(path, os.O_WRONLY | os.O_CREAT, 0o600) as fd:
        os.write(fd, b"content")
        if when == "open":
            os.utime(fd, ns=(STAMP, STAMP))
            os.fchown(fd, os.getuid(), os.getgid())
            os.fchmod(fd, 0o4755)
    if when == "flushed":
        stage.flush()
    if when != "open":
        os.chmod(path, 0o4755)
        os.utime(path, ns=(STAMP, STAMP))
    os.setxattr(path, "user.origin", b"here")
    with pytest.raises(OSError) as caught:
        os.setxattr(path, "system.posix_acl_access", b"\x02\0\0\0")
    assert caught.value.errno == errno.EOPNOTSUPP
    stage.settle()
    for place in (path, stage.backing / "file"):
        st = os.stat(place)
        assert (st.st_mtime_ns, oct(st.st_mode & 0o7777)) == (STAMP, "0o4755")
        assert os.getxattr(place, "user.origin") == b"here"


def test_many_looks_at_what_is_known_cost_the_share_little(stage: Stage) -> None:
    for n in range(50):
        (stage.path / f"run{n}").mkdir()
        (stage.path / f"run{n}" / "meta.yaml").write_bytes(b"status: 1")
    stage.flush()
    stage.begin()
    found: dict[int, tuple[int, int]] = {}
    for _ in range(5):
        for n in range(50):
            with pytest.raises(FileExistsError):
                (stage.path / f"run{n}").mkdir()
            st = os.stat(stage.path / f"run{n}" / "meta.yaml")
            assert found.setdefault(n, (st.st_ino, st.st_mtime_ns)) == (st.st_ino, st.st_mtime_ns)
        newest = max(stage.path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        assert newest.name == "run49"
    assert len(stage.ops("lookup", "getattr")) < 3000
    assert stage.read() == 0


def test_what_is_not_supported_says_so_in_the_usual_way(stage: Stage) -> None:
    with pytest.raises(OSError) as caught:
        os.open(stage.path, os.O_TMPFILE | os.O_RDWR)
    assert caught.value.errno in (errno.EOPNOTSUPP, errno.EISDIR)
    with opened(stage.path / "file", os.O_RDWR | os.O_CREAT) as fd:
        os.posix_fallocate(fd, 0, 10_000)
        assert os.fstat(fd).st_size == 10_000
        with opened(stage.path / "copy", os.O_RDWR | os.O_CREAT) as copy:
            while os.copy_file_range(fd, copy, 1 << 40):
                pass
            assert os.fstat(copy).st_size == 10_000
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        before = os.getcwd()
        os.chdir(stage.path)
        try:
            server.bind("agent.sock")
            server.listen()
            client.connect("agent.sock")
        finally:
            os.chdir(before)
    os.mkfifo(stage.path / "fifo")
    stage.flush()
    assert sorted(os.listdir(stage.backing)) == ["copy", "file"]
    (stage.path / "fifo").unlink()
    (stage.path / "agent.sock").unlink()
    stage.settle()


def test_an_unlinked_file_works_until_it_is_closed(stage: Stage) -> None:
    stage.put("old", blob("old", 100_000))
    stage.appears("old")
    with (
        opened(stage.path / "old", os.O_RDWR) as old,
        opened(stage.path / "new", os.O_RDWR | os.O_CREAT) as new,
    ):
        (stage.path / "old").unlink()
        (stage.path / "new").unlink()
        os.write(new, b"scratch" * 1000)
        os.ftruncate(new, 14)
        os.pwrite(old, b"patched", 50_000)
        stage.flush()
        assert os.listdir(stage.path) == os.listdir(stage.backing) == []
        assert os.pread(new, 100, 0) == b"scratchscratch"
        expected = bytearray(blob("old", 100_000))
        expected[50_000:50_007] = b"patched"
        assert os.pread(old, 100_000, 0) == expected
        assert os.fstat(old).st_nlink == os.fstat(new).st_nlink == 0
    stage.settle()


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_sqlite(stage: Stage, journal: str) -> None:
    with sqlite3.connect(stage.path / "optuna.db") as writer:
        writer.execute(f"PRAGMA journal_mode={journal}")
        writer.execute("CREATE TABLE trial (n INTEGER PRIMARY KEY, value REAL)")
        with sqlite3.connect(stage.path / "optuna.db") as reader:
            for n in range(30):
                writer.execute("INSERT INTO trial VALUES (?, ?)", (n, n / 3))
                writer.commit()
                assert reader.execute("SELECT count(*) FROM trial").fetchone() == (n + 1,)
        reader.close()
    writer.close()
    stage.settle()
    with sqlite3.connect(stage.backing / "optuna.db") as check:
        assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert check.execute("SELECT sum(n) FROM trial").fetchone() == (435,)
    check.close()


def test_git(stage: Stage) -> None:
    if not shutil.which("git"):
        pytest.skip("git is not installed")

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        done = subprocess.run(
            command, cwd=stage.path / "repo", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (stage.path / "repo").mkdir()
    git("init", "-q")
    for n in range(3):
        (stage.path / "repo" / f"file{n}").write_text("x" * n * 1000)
        git("add", "-A")
        git("commit", "-q", "-m", f"{n}")
    git("gc", "-q")
    git("fsck", "--strict")
    assert git("status", "--porcelain") == ""
    stage.settle()


def test_coreutils_and_tar(stage: Stage, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "d" / "a").write_bytes(blob("a", 300_000))
    os.chmod(tree / "d" / "a", 0o444)
    os.utime(tree / "d" / "a", ns=(STAMP, STAMP))
    os.symlink("a", tree / "d" / "link")
    os.link(tree / "d" / "a", tree / "d" / "hard")
    with tarfile.open(tmp_path / "tree.tar", "w") as archive:
        archive.add(tree, "tree")
    for command in (
        ["cp", "-a", str(tree), "copied"],
        ["cp", "--reflink=auto", "--sparse=always", "copied/d/a", "again"],
        ["tar", "-xpf", str(tmp_path / "tree.tar")],
        ["mv", "tree", "moved"],
        ["mv", "-n", "again", "copied/again"],
        ["install", "-m", "750", "moved/d/a", "installed"],
        ["sed", "-i", "s/x/y/", "copied/again"],
        ["truncate", "-s", "1M", "sparse"],
        ["dd", "if=/dev/zero", "of=sparse", "bs=4k", "count=3", "seek=10", "conv=notrunc,fsync"],
        ["rm", "-r", "moved/d/hard"],
    ):
        done = subprocess.run(command, cwd=stage.path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
        assert "xattr" not in done.stderr and "ACL" not in done.stderr
    stage.settle()
    for place in (stage.path, stage.backing):
        assert os.stat(place / "copied" / "d" / "a").st_mtime_ns == STAMP
        assert os.stat(place / "copied" / "d" / "a").st_nlink == 2
        assert os.stat(place / "moved" / "d" / "a").st_nlink == 1


def test_processes_that_make_and_replace_do_not_meet_errors(stage: Stage) -> None:
    """Eight compilers that share a cache directory."""

    def work(number: int) -> object:
        for turn in range(15):
            directory = stage.path / "cache" / f"{turn}"
            os.makedirs(directory, exist_ok=True)
            temporary = directory / f"tmp.pid_{number}"
            temporary.write_bytes(b"kernel" * 100)
            os.replace(temporary, directory / "kernel.so")
            assert (directory / "kernel.so").read_bytes() == b"kernel" * 100
            scratch = stage.path / f"scratch-{number}" / "deep"
            os.makedirs(scratch)
            os.removedirs(scratch)
        return "done"

    (stage.path / "keep").touch()
    results: list[object] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(in_child(lambda: work(n))))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["done"] * 8
    stage.settle()
    assert len(list((stage.backing / "cache").glob("*/kernel.so"))) == 15


def test_names_are_bytes(stage: Stage) -> None:
    names = [
        b"d\xe9j\xe0.txt",
        "模型".encode(),
        b'a:b*?"<>|\\',
        b"-rf",
        b" ",
        b"x" * 255,
        b"new\nline",
    ]
    top = bytes(stage.path)
    for name in names:
        with opened(Path(os.fsdecode(os.path.join(top, name))), os.O_CREAT | os.O_WRONLY) as fd:
            os.write(fd, name)
    assert sorted(os.listdir(top)) == sorted(names)
    with pytest.raises(OSError) as caught:
        os.mkdir(os.path.join(top, b"y" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG
    stage.settle()
    assert sorted(os.listdir(bytes(stage.backing))) == sorted(names)
