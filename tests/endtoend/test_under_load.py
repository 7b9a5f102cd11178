"""Programs that go on while files are on their way: nothing errs, is missing, or comes back."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.endtoend.checkpoints import blob, read
from tests.endtoend.stage import Stage
from tests.processes.peers import Peer
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

CONFIG = {"flush": {"idle_delay": "50ms", "max_age": "100ms"}}

RECORDS = 10_000
RECORD = 42
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@pytest.fixture(autouse=True)
def slowly(stage: Stage) -> None:
    stage.share.set(latency_ms=10)


def test_ten_thousand_records_while_the_share_is_away(stage: Stage) -> None:
    """Opened, looked at, appended to and closed each time, as an event writer does: the share
    flushes, hangs, is disconnected, and comes back."""
    (stage.path / "runs" / "1").mkdir(parents=True)
    log = stage.path / "runs" / "1" / "events.out.tfevents.1"
    expected = bytearray()
    with contextlib.ExitStack() as stack:
        stack.callback(stage.share.reconnect)
        for number in range(RECORDS):
            if number == RECORDS // 5:
                stage.share.hang()
            elif number == RECORDS // 2:
                stage.share.clear()
                stage.share.disconnect()
            record = b"%06d" % number * 7
            with opened(log, APPEND) as fd:
                assert os.fstat(fd).st_size == len(expected) == os.lseek(fd, 0, os.SEEK_END)
                assert os.write(fd, record) == RECORD
            expected += record
            if number % 1000 == 0:
                # Another run begins: a new directory and its first file.
                other = stage.path / "runs" / f"at-{number}"
                other.mkdir()
                (other / "events").write_bytes(b"x" * 88)
    assert log.read_bytes() == expected
    stage.arrives("runs/1/events.out.tfevents.1", bytes(expected))
    stage.settle()


def test_rapid_rewrites(stage: Stage, tmp_path: Path) -> None:
    """A thousand versions in a row, each read back and listed at once; the share has whole ones."""
    path = stage.path / "meta.yaml"
    path.write_bytes(b"first")
    versions: set[bytes | None] = {None, b"first"}
    with opened(path, os.O_RDONLY) as held:
        for number in range(1000):
            data = b"%04d" % number * (1 + number % 50)
            path.write_bytes(data)
            versions.add(data)
            assert path.read_bytes() == os.pread(held, 1000, 0) == data
            assert os.listdir(stage.path) == ["meta.yaml"]
            if number % 100 == 50:
                with opened(path, os.O_RDWR | os.O_APPEND) as fd:
                    os.write(fd, b"end")
                versions.add(data + b"end")
                with opened(path) as fd:
                    os.pwrite(fd, b"XX", 1)
                data = data[:1] + b"XX" + data[3:] + b"end"
                versions.add(data)
                assert path.read_bytes() == data
    stage.settle()
    found = [read(top / "meta.yaml") for top in stage.states(tmp_path / "replay")]
    assert set(found) <= versions
    assert len(set(found)) > 3


def test_a_reader_of_what_is_rewritten_never_meets_an_error(stage: Stage) -> None:
    """O_TRUNC and rename-over by one process, while others open the file: it is always there."""
    path = stage.path / "meta.yaml"
    path.write_bytes(b"0" * 100)

    def read_on(line: Connection) -> object:
        wrong: set[bytes] = set()
        turns = 0
        while not line.poll(0):
            data = path.read_bytes()
            turns += 1
            if len(set(data)) > 1 or len(data) > 200:
                wrong.add(data)
        return wrong, turns > 10

    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(Peer(read_on)) for _ in range(3)]
        for number in range(200):
            data = b"%d" % (number % 10) * (100 + number % 100)
            if number % 2:
                path.write_bytes(data)
            else:
                (stage.path / "meta.yaml.tmp").write_bytes(data)
                os.replace(stage.path / "meta.yaml.tmp", path)
        for reader in readers:
            reader.tell()
        # A rewrite in place may be seen in part, a mixture of two may not.
        assert [reader.hear() for reader in readers] == [(set(), True)] * 3
    stage.settle()


def test_a_tree_that_is_removed_while_it_moves_stays_away(stage: Stage) -> None:
    """Checkpoint rotation on a share that takes its time."""
    for turn in range(3):
        top = stage.path / f"checkpoint-{turn}"
        with stage.stuck():
            (top / "shards").mkdir(parents=True)
            for number in range(6):
                (top / "shards" / f"{number}").write_bytes(blob(f"{number}", 100_000))
            (top / "optimizer").write_bytes(blob("optimizer", 500_000))
            stage.share.wait_hung(match=f"{stage.name}/*")
            shutil.rmtree(top)
            assert not os.path.lexists(top)
            if turn == 1:
                # The same name again, at once.
                top.mkdir()
                (top / "again").write_bytes(b"again")
    wait_until(lambda: os.listdir(stage.backing) == ["checkpoint-1"], "only one is left there")
    assert os.listdir(stage.path) == ["checkpoint-1"]
    stage.settle()
    assert os.listdir(stage.backing / "checkpoint-1") == ["again"]


@pytest.mark.parametrize("where", ["here", "share"])
def test_a_tree_is_removed_while_files_of_it_are_read(stage: Stage, where: str) -> None:
    """rmtree succeeds, the readers keep what they have open, and nothing takes its place."""
    data = {f"d/{n}": blob(f"{n}", 200_000) for n in range(4)}
    for name, content in data.items():
        if where == "share":
            stage.put(f"tree/{name}", content)
        else:
            (stage.path / "tree" / "d").mkdir(parents=True, exist_ok=True)
            (stage.path / "tree" / name).write_bytes(content)
    wait_until((stage.path / "tree" / "d" / "3").exists, "it is there")

    def keep_reading(name: str, line: Connection) -> object:
        with opened(stage.path / "tree" / name, os.O_RDONLY) as fd:
            line.send(os.read(fd, 10))
            line.recv()
            return os.pread(fd, 1 << 20, 0), os.fstat(fd).st_nlink

    with contextlib.ExitStack() as stack:
        readers = {
            name: stack.enter_context(Peer(functools.partial(keep_reading, name))) for name in data
        }
        for name, reader in readers.items():
            assert reader.hear() == data[name][:10]
        shutil.rmtree(stage.path / "tree")
        assert os.listdir(stage.path) == []
        wait_until(lambda: not os.listdir(stage.backing), "it goes on the share")
        assert os.listdir(stage.path) == []
        for name, reader in readers.items():
            reader.tell()
            assert reader.hear() == (data[name], 0)
    stage.settle()
    seen = stage.names_seen()
    assert not any(".fuse_hidden" in name or ".nfs" in name for name in seen)


def test_a_flush_ends_when_what_was_removed_is_gone(stage: Stage) -> None:
    """A directory was on its way when it was removed: what puts it there is not over yet."""
    rule = stage.share.hang(["mkdir"], f"{stage.name}/d")
    (stage.path / "d").mkdir()
    stage.share.wait_hung("mkdir", f"{stage.name}/d")
    (stage.path / "d").rmdir()
    left = stage.mount.client.flush([os.fsencode(stage.name)], 0.5)
    assert [row["path"] for row in left] == [f"{stage.name}/d"]
    stage.share.release(rule)
    stage.flush()
    assert os.listdir(stage.backing) == []
