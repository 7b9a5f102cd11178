"""The calls that checkpoint writers, loggers and caches make, one for one, on a share of 20 ms.

Flushes run by themselves all the while. Every state that the share went through is looked at.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import uuid
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.endtoend.checkpoints import blob, read, whole
from tests.endtoend.stage import Stage

pytestmark = pytest.mark.timeout(120)

CONFIG = {"flush": {"idle_delay": "100ms", "max_age": "300ms"}}

NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
REWRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@pytest.fixture(autouse=True)
def slowly(stage: Stage) -> None:
    stage.share.set(latency_ms=20)


def let_it_flush(stage: Stage) -> None:
    """Until the flusher has had time for all that it would do by itself by now."""
    for number in range(2):
        name = f"witness-{uuid.uuid4().hex[:8]}"
        (stage.path / name).write_bytes(b"%d" % number)
        stage.arrives(name)
        (stage.path / name).unlink()


def test_safetensors(stage: Stage, tmp_path: Path) -> None:
    """Full length first, then the bytes, renamed while open. The zeros are never published."""
    parts = [blob(f"{n}", 200_000) for n in range(4)]
    data = b"".join(parts)
    for save in range(2):
        with opened(stage.path / f".tmpX{save}", NEW, 0o600) as fd:
            os.ftruncate(fd, len(data))
            let_it_flush(stage)
            for part in parts[:2]:
                os.write(fd, part)
            os.rename(stage.path / f".tmpX{save}", stage.path / "model.safetensors")
            let_it_flush(stage)
            for part in parts[2:]:
                os.write(fd, part)
    stage.settle()
    assert oct((stage.backing / "model.safetensors").stat().st_mode) == "0o100600"
    for top in stage.states(tmp_path / "replay"):
        assert read(top / "model.safetensors") in (None, data)
    assert not any(".tmpX" in name for name in stage.names_seen())


def test_torch_distributed_checkpoint(stage: Stage, tmp_path: Path) -> None:
    """The metadata is synced before it is written, and renamed when all else is there."""
    files = {f"__{n}_0.distcp": blob(f"{n}", 300_000) for n in range(3)}
    with opened(stage.path, os.O_RDONLY) as directory:
        for name, data in files.items():
            with opened(stage.path / name, REWRITE) as fd:
                os.writev(fd, [data[:768], data[768:]])
                os.fsync(fd)
        with opened(stage.path / ".metadata.tmp", REWRITE) as fd:
            os.fsync(fd)
            let_it_flush(stage)
            os.write(fd, b"metadata")
        os.rename(stage.path / ".metadata.tmp", stage.path / ".metadata")
        os.fsync(directory)
    stage.settle()
    seen = 0
    for top in stage.states(tmp_path / "replay"):
        if (top / ".metadata").exists():
            seen += 1
            assert whole(top, {**files, ".metadata": b"metadata"})
        assert read(top / ".metadata.tmp") in (None, b"metadata")
    assert seen


def test_orbax(stage: Stage, tmp_path: Path) -> None:
    """A directory is renamed with a file in it that is open twice and locked."""
    files = {"d/array0": blob("0", 300_000), "d/array1": blob("1", 300_000), "_METADATA": b"{}"}
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    temporary = stage.path / "7.orbax-checkpoint-tmp"
    (temporary / "d").mkdir(parents=True)
    with (
        opened(temporary / "lock", os.O_RDWR | os.O_CREAT) as first,
        opened(temporary / "lock", os.O_RDWR | os.O_CREAT) as second,
    ):
        fcntl.fcntl(first, fcntl.F_OFD_SETLKW, lock)
        with pytest.raises(BlockingIOError):
            fcntl.fcntl(second, fcntl.F_OFD_SETLK, lock)
        for name, data in files.items():
            (temporary / name).write_bytes(data)
            with opened(temporary, os.O_RDONLY | os.O_DIRECTORY) as directory:
                os.fsync(directory)
        let_it_flush(stage)
        os.rename(temporary, stage.path / "7")
        with pytest.raises(BlockingIOError):
            fcntl.fcntl(second, fcntl.F_OFD_SETLK, lock)
        os.write(first, b"committed")
        with opened(stage.path, os.O_RDONLY | os.O_DIRECTORY) as directory:
            os.fsync(directory)
        assert (stage.path / "7" / "lock").read_bytes() == b"committed"
        let_it_flush(stage)
    stage.settle()
    assert whole(stage.backing / "7", {**files, "lock": b"committed"})
    for top in stage.states(tmp_path / "replay"):
        if (top / "7").exists():
            assert whole(top / "7", files)


def test_a_file_that_is_still_empty_waits_for_its_bytes(stage: Stage, tmp_path: Path) -> None:
    """A checkpoint is opened long before it is written. Nobody is shown a name with nothing in it;
    a log arrives soon after its first line, and what is closed empty is there as it is."""
    with (
        opened(stage.path / "model.pt", REWRITE) as model,
        opened(stage.path / "log", REWRITE) as log,
    ):
        (stage.path / "marker").touch()
        let_it_flush(stage)
        assert not {"model.pt", "log"} & set(os.listdir(stage.backing))
        assert (stage.backing / "marker").exists()
        os.write(log, b"the first line")
        stage.arrives("log", b"the first line")
        os.write(model, blob("model", 100_000))
    stage.settle()
    for top in stage.states(tmp_path / "replay"):
        assert read(top / "model.pt") != b""
        assert read(top / "log") != b""


def test_a_hub_cache(stage: Stage) -> None:
    """A probe for O_TMPFILE, a lock file, a blob under a temporary name, links to it."""
    hub = stage.path / "models--a--b"
    for name in ("blobs", "snapshots/rev", "refs", ".locks"):
        (hub / name).mkdir(parents=True)
    with pytest.raises(OSError) as caught:
        os.open(hub, os.O_TMPFILE | os.O_RDWR)
    assert caught.value.errno == errno.EOPNOTSUPP
    for number in range(3):
        with opened(hub / ".locks" / f"{number}.lock", NEW, 0o644) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            blob_path = hub / "blobs" / f"{number}"
            (hub / "blobs" / f"{number}.incomplete").write_bytes(blob(f"{number}", 100_000))
            os.replace(hub / "blobs" / f"{number}.incomplete", blob_path)
            os.symlink(f"../../blobs/{number}", hub / "snapshots" / "rev" / f"f{number}")
            assert (hub / "snapshots" / "rev" / f"f{number}").resolve() == blob_path.resolve()
            with pytest.raises(FileExistsError):
                os.symlink("elsewhere", hub / "snapshots" / "rev" / f"f{number}")
            os.unlink(hub / ".locks" / f"{number}.lock")
    stage.settle()
    there = stage.backing / "models--a--b"
    for number in range(3):
        link = there / "snapshots" / "rev" / f"f{number}"
        assert os.readlink(link) == f"../../blobs/{number}"
        assert link.read_bytes() == blob(f"{number}", 100_000)
    assert not any("incomplete" in name for name in stage.names_seen())


def test_links_are_replaced_and_what_they_point_to_is_not(stage: Stage, tmp_path: Path) -> None:
    """wandb's latest-run and the like: targets of any bytes, out of the mount as well."""
    targets = [
        b"run-1",
        b"/outside/of/the mount/\xff\xfe",
        b"../" * 20 + b"x",
        b"run-2",
        b"a" * 200,
    ]
    outside = tmp_path / "outside"
    outside.write_bytes(b"not ours to change")
    targets.append(os.fsencode(outside))
    (stage.path / "run-1").mkdir()
    (stage.path / "run-1" / "output.log").write_bytes(b"log")
    latest = os.fsencode(stage.path / "latest-run")
    for number, target in enumerate(targets):
        os.symlink(target, latest + b".tmp")
        os.rename(latest + b".tmp", latest)
        assert os.readlink(latest) == target
        if number % 2:
            let_it_flush(stage)
            assert os.readlink(os.fsencode(stage.backing / "latest-run")) == target
    os.symlink("run-1/output.log", stage.path / "log")
    with open(stage.path / "log", "ab") as file:  # through the link
        file.write(b" more")
    stage.settle()
    assert outside.read_bytes() == b"not ours to change"
    assert (stage.backing / "run-1" / "output.log").read_bytes() == b"log more"
    assert os.readlink(os.fsencode(stage.backing / "latest-run")) == targets[-1]


def test_chunks_of_an_array(stage: Stage, tmp_path: Path) -> None:
    """zarr: a partial file is renamed, or linked where it must not replace another."""
    chunks = {f"c/{n // 5}/{n % 5}": blob(f"{n}", 10_000) for n in range(15)}

    def partial(name: str, data: bytes) -> Path:
        path = stage.path / f"{name}.{uuid.uuid4().hex}.partial"
        path.parent.mkdir(parents=True, exist_ok=True)
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            os.write(fd, data)
        return path

    for turn in range(2):
        for name, data in chunks.items():
            os.rename(partial(name, data if turn else data[::-1]), stage.path / name)
    for turn in range(2):
        path = partial("zarr.json", b"{%d}" % turn)
        if turn:
            with pytest.raises(FileExistsError):
                os.link(path, stage.path / "zarr.json")
        else:
            os.link(path, stage.path / "zarr.json")
        os.unlink(path)
    stage.settle()
    assert (stage.backing / "zarr.json").read_bytes() == b"{0}"
    for top in stage.states(tmp_path / "replay"):
        for name, data in chunks.items():
            assert read(top / name) in (None, data, data[::-1])


def test_a_csv_logger(stage: Stage, tmp_path: Path) -> None:
    """Appends through a descriptor that was moved back to the start: they go to the end."""
    expected = b""
    for number in range(30):
        with opened(stage.path / "metrics.csv", APPEND) as fd:
            assert os.lseek(fd, 0, os.SEEK_END) == len(expected)
            os.lseek(fd, 0, os.SEEK_SET)
            os.write(fd, b"%d,0.5\n" % number)
        expected += b"%d,0.5\n" % number
        if number % 10 == 9:
            stage.arrives("metrics.csv", expected)
    stage.settle()
    assert (stage.backing / "metrics.csv").read_bytes() == expected
    for top in stage.states(tmp_path / "replay"):
        assert expected.startswith(read(top / "metrics.csv") or b"")


def test_a_finished_file_takes_the_place_of_one_that_waits(stage: Stage) -> None:
    """The target was emptied and closed just before: what moves is the new content, once."""
    (stage.path / "state").write_bytes(blob("old", 50_000))
    stage.flush()
    stage.begin()
    (stage.path / "state.tmp").write_bytes(blob("new", 60_000))
    with opened(stage.path / "state", REWRITE):
        pass
    os.rename(stage.path / "state.tmp", stage.path / "state")
    stage.settle()
    assert stage.written() == 60_000
    assert (stage.backing / "state").read_bytes() == blob("new", 60_000)


@pytest.mark.parametrize("flushed", [False, True], ids=["new", "flushed"])
def test_directories_above_an_open_file_are_renamed(stage: Stage, flushed: bool) -> None:
    """Also the file itself: the bytes are under the new path, and nothing under the old ones."""
    (stage.path / "a" / "b").mkdir(parents=True)
    with opened(stage.path / "a" / "b" / "file", NEW) as fd:
        if flushed:
            os.write(fd, b"before ")
            stage.flush()
        os.rename(stage.path / "a", stage.path / "A")
        os.write(fd, b"one ")
        os.rename(stage.path / "A" / "b", stage.path / "B")
        os.rename(stage.path / "B" / "file", stage.path / "B" / "moved")
        os.write(fd, b"two")
        let_it_flush(stage)
        os.rename(stage.path / "B", stage.path / "A" / "again")
        os.write(fd, b" three")
    stage.settle()
    found = {name for name, (mode, _) in stage.held().items()}
    assert found == {"A", "A/again", "A/again/moved"}
    expected = (b"before " if flushed else b"") + b"one two three"
    assert (stage.backing / "A" / "again" / "moved").read_bytes() == expected


def test_what_is_renamed_and_removed_before_its_time_leaves_no_trace(stage: Stage) -> None:
    (stage.path / "checkpoint-1" / "deep").mkdir(parents=True)
    (stage.path / "checkpoint-1" / "deep" / "model").write_bytes(blob("model", 100_000))
    os.rename(stage.path / "checkpoint-1", stage.path / "old")
    for directory, names, files in os.walk(stage.path / "old", topdown=False):
        for name in files:
            os.unlink(os.path.join(directory, name))
        for name in names:
            os.rmdir(os.path.join(directory, name))
    os.rmdir(stage.path / "old")
    let_it_flush(stage)
    let_it_flush(stage)
    made = {name for name in stage.names_seen() if "witness" not in name}
    assert not any("model" in name or "old" in name or "checkpoint" in name for name in made)
    stage.settle()
    assert os.listdir(stage.backing) == os.listdir(stage.path) == []
