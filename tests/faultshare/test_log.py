"""The log: what it says, in which order, and the states rebuilt from it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare, ShareError
from tests.faultshare.tree import describe
from tests.faultshare.walk import Walk, outcome, start


def test_operations_in_the_order_of_their_effects(share: FaultShare) -> None:
    m = share.mountpoint
    (m / "tmp").write_bytes(b"12345")
    os.rename(m / "tmp", m / "f")
    with pytest.raises(FileExistsError):
        os.mkdir(m / "f")
    os.truncate(m / "f", 3)
    os.symlink("f", m / "l")
    changes = [(op.op, op.path, op.path2, op.size) for op in share.log() if op.mutation]
    assert changes == [
        ("create", "tmp", None, 0),
        ("write", "tmp", None, 5),
        ("rename", "tmp", "f", 0),
        ("truncate", "f", None, 3),
        ("symlink", "l", None, 0),
    ]
    ops = share.log()
    assert [op.n for op in ops] == list(range(ops[0].n, ops[0].n + len(ops)))
    assert all(op.end is not None and op.end >= op.start for op in ops if op.op != "release")
    assert share.wait_for("symlink").details["target"] == "f"
    assert len({op.node for op in ops if op.path in ("tmp", "f") and op.effect}) == 1


def test_offsets_sizes_and_reads(share: FaultShare) -> None:
    path = share.mountpoint / "f"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, b"abc", 10)
        assert os.pread(fd, 100, 5) == bytes(5) + b"abc"
    finally:
        os.close(fd)
    write = share.wait_for("write")
    read = share.wait_for("read")
    assert (write.offset, write.size, read.offset, read.size) == (10, 3, 0, 13)
    assert share.counts().bytes_written == 3
    assert share.counts().bytes_read == 13
    assert share.written() == {"f": 3}


def test_the_effect_of_a_late_call_is_logged_late(share: FaultShare) -> None:
    (share.mountpoint / "d").mkdir()
    share.hang(["mkdir"], match="late")
    late = threading.Thread(target=os.mkdir, args=(share.mountpoint / "late",))
    late.start()
    share.wait_hung()
    (share.backing / "d/seen").touch()
    os.stat(share.mountpoint / "d/seen")
    share.release()
    late.join()
    ops = [op for op in share.log() if op.op == "mkdir" or op.path == "d/seen"]
    assert [op.path for op in ops][-1] == "late"
    assert ops[-1].start < ops[-2].start, "it had arrived before"


def test_marks_and_clearing(share: FaultShare) -> None:
    (share.mountpoint / "a").touch()
    mark = share.mark()
    (share.mountpoint / "b").touch()
    assert [op.path for op in share.log(mark) if op.op == "create"] == ["b"]
    share.wait_for("release", "b")  # the kernel sends it in its own time
    cleared = share.clear_log()
    assert cleared > mark
    assert share.log() == []
    assert share.counts().calls == {}
    (share.mountpoint / "c").touch()
    assert share.log()[0].n == cleared + 1


def test_a_long_log_comes_in_pages(share: FaultShare) -> None:
    for _ in range(3000):
        os.access(share.mountpoint / "f", os.F_OK)
    ops = share.log()
    assert len(ops) > 5000
    assert [op.n for op in ops] == list(range(ops[0].n, ops[0].n + len(ops)))


def test_a_full_log_says_that_it_forgot(backing: Path) -> None:
    with FaultShare(backing, log_limit=10) as share:
        for _ in range(20):
            os.stat(share.mountpoint)
        assert len(share.log(share.mark() - 10)) == 10
        with pytest.raises(ShareError, match="gone from the log"):
            share.log()
        assert share.counts().calls["getattr"] >= 20


def test_replaying_gives_the_real_state(share: FaultShare, tmp_path: Path) -> None:
    start(share.mountpoint)
    walk = Walk(11)
    for _ in range(1200):
        outcome(walk.step()[1], share.mountpoint)
    assert describe(share.replay(tmp_path / "replica")) == describe(share.backing)


def test_states_of_concurrent_writers(share: FaultShare, tmp_path: Path) -> None:
    """Whatever the interleaving, replaying has the same result, byte for byte."""

    def work(seed: int) -> None:
        root = share.mountpoint / f"w{seed % 2}"
        walk = Walk(seed)
        for _ in range(100):
            outcome(walk.step()[1], root)

    for name in ("w0", "w1"):
        (share.mountpoint / name).mkdir()
        start(share.mountpoint / name)
    share.set(latency_ms=1, jitter_ms=3)
    share.fail(["write", "rename"], errno.EIO, probability=0.1, seed=1, after=True)
    share.fail(["write", "rename"], errno.EIO, probability=0.1, seed=2)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert describe(share.replay(tmp_path / "replica")) == describe(share.backing)


def test_every_state_in_between(backing: Path, tmp_path: Path) -> None:
    (backing / "last").write_text("step 0")
    with FaultShare(backing, log_data=True) as share:
        for step in range(1, 4):
            (share.mountpoint / "tmp").write_text(f"step {step}")
            os.rename(share.mountpoint / "tmp", share.mountpoint / "last")
        seen = [
            (op.op if op else None, (state / "last").read_text(), sorted(os.listdir(state)))
            for op, state in share.states(tmp_path / "states")
        ]
        assert seen[:5] == [
            (None, "step 0", ["last"]),
            ("create", "step 0", ["last", "tmp"]),
            ("write", "step 0", ["last", "tmp"]),
            ("rename", "step 1", ["last"]),
            ("create", "step 1", ["last", "tmp"]),
        ]
        assert len(seen) == 10
        renames = [op.n for op in share.log() if op.op == "rename"]
        middle = share.replay(tmp_path / "middle", upto=renames[1])
        assert (middle / "last").read_text() == "step 2"


def test_a_log_begun_anew_starts_from_what_was_there(share: FaultShare, tmp_path: Path) -> None:
    (share.mountpoint / "f").write_text("one")
    os.link(share.mountpoint / "f", share.mountpoint / "g")
    share.clear_log()
    with (share.mountpoint / "f").open("a") as file:
        file.write("two")
    assert describe(share.replay(tmp_path / "replica")) == describe(share.backing)
    assert (tmp_path / "replica/g").read_text() == "onetwo"


def test_no_data_no_states(backing: Path, tmp_path: Path) -> None:
    with FaultShare(backing) as share, pytest.raises(ShareError, match="log_data"):
        share.replay(tmp_path / "replica")
