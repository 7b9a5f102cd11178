"""Signals: none interrupts a call on a file, cuts it short, or leaves something half done."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.endtoend.checkpoints import blob
from tests.endtoend.stage import Stage
from tests.processes.peers import Peer
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

RATE = 1000
"""Signals a second."""

# Python makes a call again that was interrupted; these are made once.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.argtypes = _libc.pwrite.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int64,
]
_libc.pread.restype = _libc.pwrite.restype = ctypes.c_ssize_t
_libc.ftruncate.argtypes = [ctypes.c_int, ctypes.c_int64]


@contextlib.contextmanager
def storm(restart: bool) -> Iterator[list[int]]:
    """A signal every millisecond of real time, with a handler; the list counts them."""
    count = [0]

    def handler(number: int, frame: object) -> None:
        count[0] += 1

    signal.signal(signal.SIGALRM, handler)
    signal.siginterrupt(signal.SIGALRM, not restart)
    signal.setitimer(signal.ITIMER_REAL, 1 / RATE, 1 / RATE)
    try:
        yield count
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


RESTART = pytest.mark.parametrize("restart", [True, False], ids=["restarting", "not restarting"])
"""Whether the handler is set with SA_RESTART."""


def in_the_storm(top: Path, rounds: int, restart: bool, line: Connection) -> object:
    """Everything that programs do with files; what each call gives is what it gives on any day."""
    wrong: list[str] = []

    def check(what: str, result: int, wanted: int = 0) -> None:
        if result != wanted:
            wrong.append(f"{what}: {result} (errno {ctypes.get_errno()}) instead of {wanted}")

    data = blob("storm", 300_000)
    buffer = ctypes.create_string_buffer(len(data))
    with storm(restart) as count:
        for number in range(rounds):
            path = os.fsencode(top / f"{number % 7}")
            other = os.fsencode(top / f"other{number % 3}")
            fd = _libc.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            check("open", min(fd, 0))
            for size in (len(data), 1, 180, 70_000):
                check("write", _libc.pwrite(fd, data, size, number % 5), size)
                check("read", _libc.pread(fd, buffer, size, number % 5), size)
                if buffer.raw[:size] != data[:size]:
                    wrong.append("other bytes were read than written")
            check("ftruncate", _libc.ftruncate(fd, 1000))
            check("fsync", _libc.fsync(fd))
            check("close", _libc.close(fd))
            check("rename", _libc.rename(path, other))
            check("mkdir", _libc.mkdir(path + b"d", 0o755))
            check("rmdir", _libc.rmdir(path + b"d"))
            check("link", _libc.link(other, path + b"l"))
            check("unlink", _libc.unlink(path + b"l"))
            check("symlink", _libc.symlink(b"x", path + b"s"))
            check("unlink", _libc.unlink(path + b"s"))
            check("chmod", _libc.chmod(other, 0o600))
            os.listdir(top)
    return wrong, count[0]


@RESTART
@pytest.mark.parametrize("rounds", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_a_storm_of_signals(stage: Stage, rounds: int, restart: bool) -> None:
    stage.share.set(latency_ms=2)
    with Peer(functools.partial(in_the_storm, stage.path, rounds, restart)) as peer:
        while not peer.has_spoken:
            stage.flush()
        wrong, signals = peer.hear()
    assert wrong == []
    assert signals > 20
    stage.settle()


@RESTART
def test_reading_what_only_the_share_has(stage: Stage, restart: bool) -> None:
    """As on a local disk, or NFS: a read that waits is not interrupted by what has a handler."""
    data = blob("cold", 3_000_000)
    stage.put("dir/cold", data)
    stage.put("dir/second", b"2")
    wait_until((stage.path / "dir").exists, "the mount shows it")
    stage.share.set(latency_ms=30)

    def read(line: Connection) -> object:
        buffer = ctypes.create_string_buffer(len(data))
        with storm(restart) as count:
            fd = _libc.open(os.fsencode(stage.path / "dir" / "cold"), os.O_RDONLY)
            got = _libc.pread(fd, buffer, len(data), 0)
            code = ctypes.get_errno()
            names = sorted(os.listdir(stage.path / "dir"))
            second = _libc.access(os.fsencode(stage.path / "dir" / "second"), os.R_OK)
            _libc.close(fd)
        return got, code if got < 0 else 0, buffer.raw == data, names, second, count[0] > 0

    with Peer(read) as peer:
        assert peer.hear() == (len(data), 0, True, ["cold", "second"], 0, True)


@pytest.mark.parametrize("where", ["new", "share"])
def test_a_writer_killed_in_the_middle_leaves_a_prefix(stage: Stage, where: str) -> None:
    """Of one huge write, or of a series of lines: what is there is how far it came."""
    chunk = blob("chunk", 1 << 20)
    huge = chunk * 8
    stage.put("old", b"old content")
    stage.appears("old")
    path = stage.path / ("old" if where == "share" else "new")

    def write(line: Connection) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        line.send("about to write")
        for _ in range(8):
            os.write(fd, huge)
        line.recv()

    before = path.read_bytes() if path.exists() else b""
    for _ in range(2):
        with Peer(write) as peer:
            assert peer.hear() == "about to write"
            wait_until(functools.partial(_is_longer, path, len(before)), "it writes")
            peer.signal(signal.SIGKILL)
            peer.end()
        found = path.read_bytes()
        new = found[len(before) :]
        assert found.startswith(before)
        assert new == (huge * (len(new) // len(huge) + 1))[: len(new)]
        before = found
    stage.settle()
    assert (stage.backing / path.name).read_bytes() == before


def _is_longer(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size > size


def test_a_stopped_process_holds_up_nobody(stage: Stage) -> None:
    """It has files open and is in the middle of writing: others go on, the flush too."""
    log, new = stage.path / "log", stage.path / "checkpoint"

    def work(line: Connection) -> None:
        with open(log, "ab", buffering=0) as out, open(new, "wb", buffering=0) as file:
            line.send("begun")
            while True:
                file.write(blob("part", 100_000))
                out.write(b"a line\n")

    with Peer(work) as peer:
        assert peer.hear() == "begun"
        wait_until(lambda: log.exists() and log.stat().st_size > 70, "it writes")
        peer.signal(signal.SIGSTOP)
        wait_until(lambda: _state(peer.pid) == "T", "it is stopped")
        lines, size = log.read_bytes(), new.stat().st_size
        for number in range(20):
            with open(log, "ab") as file:
                file.write(b"another's\n")
            (stage.path / f"other{number}").write_bytes(b"x")
        stage.flush("log")
        assert (stage.backing / "log").read_bytes() == lines + b"another's\n" * 20
        for number in range(20):
            stage.flush(f"other{number}")
        os.rename(new, stage.path / "renamed")
        assert (stage.path / "renamed").stat().st_size == size
        peer.signal(signal.SIGCONT)
        wait_until(lambda: log.stat().st_size > len(lines) + 500, "it goes on")
    stage.settle()
    whole = (stage.backing / "renamed").read_bytes()
    assert whole == (blob("part", 100_000) * (len(whole) // 100_000 + 1))[: len(whole)]


def _state(pid: int) -> str:
    """The letter that /proc has for what a process does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def answering_nothing(stage: Stage) -> Iterator[None]:
    """The share answers nothing for the length of a block."""
    rule = stage.share.hang()
    try:
        yield
    finally:
        stage.share.release(rule)
        stage.share.clear()
        wait_until(
            lambda: stage.mount.status()["share"]["state"] == "answering", "the share is back"
        )


def test_who_waits_for_the_share_can_be_killed(stage: Stage) -> None:
    """SIGKILL ends a process in a call that the share does not answer, at once where data is
    waited for, and at the deadline of a look-up where a name is."""
    stage.put("cold", blob("cold", 2_000_000))
    stage.put("unknown/file", b"x")
    stage.appears("cold")

    def read(line: Connection) -> object:
        line.send("about to")
        return (stage.path / "cold").read_bytes()

    def look(line: Connection) -> object:
        line.send("about to")
        return (stage.path / "unknown" / "file").stat()

    with answering_nothing(stage):
        for work in (read, look):
            with Peer(work) as peer:
                assert peer.hear() == "about to"
                stage.share.wait_hung()
                peer.signal(signal.SIGKILL)
                assert peer.end(10) == -signal.SIGKILL
    assert (stage.path / "cold").read_bytes() == blob("cold", 2_000_000)


def test_clients_that_are_killed_all_the_time(stage: Stage) -> None:
    """Processes die in the middle of whatever they do; what others write is whole, and so is, up
    to where they came, what they wrote."""
    data = blob("scratch", 50_000)

    def work(line: Connection) -> None:
        line.send("begun")
        while True:
            for number in range(5):
                path = stage.path / f"scratch{number}"
                path.write_bytes(data)
                os.rename(path, stage.path / f"moved{number}")
                os.unlink(stage.path / f"moved{number}")

    lines = 0
    with open(stage.path / "log", "ab", buffering=0) as log:
        for number in range(12):
            with Peer(work) as peer:
                assert peer.hear() == "begun"
                for _ in range(20 * number):
                    log.write(b"line %06d\n" % lines)
                    lines += 1
    assert (stage.path / "log").read_bytes() == b"".join(b"line %06d\n" % n for n in range(lines))
    for path in stage.path.iterdir():
        if path.name != "log":
            assert data.startswith(path.read_bytes()), path.name
    stage.settle()
