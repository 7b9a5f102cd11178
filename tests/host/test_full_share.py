"""The share is full: nothing is lost, what can arrive does, in order, and the old goes last."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import volumes
from tests.endtoend.checkpoints import blob, read
from tests.endtoend.stage import Stage
from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, contents, merge
from tests.waiting import wait_until, wait_until_async
from wbcache.errors import CacheDiskError
from wbcache.node import Directory

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("fuse")]

CONFIG: dict[str, Any] = merge(
    NEVER_BY_ITSELF,
    {"cache": {"size": "4GiB"}, "flush": {"retry": {"first": "50ms", "max": "200ms"}}},
)
SIZE = 2_000_000
"""Bytes of a checkpoint; more than one call of the share takes."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A directory on a share that has a quota of its own, see `limit`."""
    (tmp_path / "backing").mkdir()
    with FaultShare(tmp_path / "backing", log_data=True) as share:
        with Mounted(share.mountpoint, config=CONFIG) as mount:
            stage = Stage(share, mount, "run")
            stage.open()
            yield stage
            assert share.errors() == ""


def limit(stage: Stage, checkpoints: float) -> None:
    """What the share holds at most, besides what wbcache itself has there."""
    own = sum(p.stat().st_size for p in (stage.share.backing / ".wbcache").iterdir())
    stage.share.quota(int(checkpoints * SIZE) + own)


def events(stage: Stage, text: str) -> int:
    return sum(text in event["text"] for event in stage.mount.status()["events"])


def test_rotation_gets_through_with_room_for_one_and_a_half(stage: Stage, tmp_path: Path) -> None:
    limit(stage, 1.5)
    saved = [blob(f"ckpt{number}", SIZE) for number in range(4)]
    (stage.path / "log").write_bytes(b"0\n")
    for number, data in enumerate(saved):
        (stage.path / f"ckpt{number}").write_bytes(data)
        if number:
            (stage.path / f"ckpt{number - 1}").unlink()
        with open(stage.path / "log", "ab") as log:
            log.write(b"saved\n")
        stage.flush(timeout=60)
        assert read(stage.backing / f"ckpt{number}") == data
        assert not (stage.backing / f"ckpt{number - 1}").exists()
    stage.settle()
    # Each went only after its successor had been tried in vain.
    since = 0
    for op in stage.share.log():
        if op.op == "unlink" and op.effect and "/ckpt" in op.path:
            before = [o for o in stage.share.log(since) if o.n < op.n]
            assert any(o.op == "write" and o.errno for o in before), op
            since = op.n
    assert stage.written() < 3 * SIZE * len(saved)
    assert 1 <= events(stage, "order suspended") <= 3
    assert events(stage, "has room again") == events(stage, "the share is full")
    share = stage.mount.status()["share"]
    assert (share["full"], share["order_suspended"]) == (False, False)
    assert stage.mount.umount().returncode == 0


def test_the_last_complete_checkpoint_stays_while_something_else_can_go(
    stage: Stage, tmp_path: Path
) -> None:
    """Two are kept, and two more were saved while the share did not answer."""
    saved = {f"ckpt{number}": blob(f"ckpt{number}", SIZE) for number in range(4)}
    for name in ("ckpt0", "ckpt1"):
        (stage.path / name).write_bytes(saved[name])
    stage.flush()
    limit(stage, 2.5)
    since = stage.share.mark()
    with stage.stuck():
        for new, old in (("ckpt2", "ckpt0"), ("ckpt3", "ckpt1")):
            (stage.path / new).write_bytes(saved[new])
            (stage.path / old).unlink()
    stage.flush(timeout=60)
    assert sorted(stage.held()) == ["ckpt2", "ckpt3"]
    least = 4
    for op, top in stage.share.states(tmp_path / "states"):
        if op is not None and op.n > since:
            whole = [n for n, data in saved.items() if read(top / "run" / n) == data]
            least = min(least, len(whole))
    assert least >= 1
    assert events(stage, "order suspended") == 1
    stage.settle()


def test_directories_rotate_too(stage: Stage) -> None:
    limit(stage, 1.5)
    for number in range(3):
        new = stage.path / f"ckpt{number}"
        (stage.path / "tmp").mkdir()
        for part in range(4):
            (stage.path / "tmp" / str(part)).write_bytes(blob(f"{number} {part}", SIZE // 4))
        os.rename(stage.path / "tmp", new)
        if number:
            shutil.rmtree(stage.path / f"ckpt{number - 1}")
        stage.flush(timeout=60)
    stage.settle()
    assert {name.partition("/")[0] for name in stage.held()} == {"ckpt2"}


def test_a_share_that_does_not_tell_its_room_is_not_filled_in_vain(stage: Stage) -> None:
    """Parts of an old checkpoint go until the new one fits, which is not sent after each."""
    parts = 12
    (stage.path / "old").mkdir()
    for part in range(parts):
        (stage.path / "old" / str(part)).write_bytes(blob(f"old{part}", SIZE // 4))
    stage.flush()
    stage.share.freeze_statfs()  # from here on it says that there is plenty
    limit(stage, parts / 4 + 0.1)
    stage.begin()
    (stage.path / "new").write_bytes(blob("new", 2 * SIZE))
    shutil.rmtree(stage.path / "old")
    stage.flush(timeout=60)
    assert events(stage, "order suspended") == 1
    assert stage.written() <= 3 * 2 * SIZE
    # No more went than had to before it was there.
    ops = stage.ops("unlink", "link", "rename")
    there = next(n for n, op in enumerate(ops) if op.path2 == "new")
    gone = [op for op in ops[:there] if op.op == "unlink" and op.path.startswith("old/")]
    assert len(gone) <= 9
    stage.settle()


def test_a_kill_on_a_full_share_loses_nothing(stage: Stage) -> None:
    limit(stage, 1.5)
    mount, saved = stage.mount, blob("ckpt0", SIZE)
    (stage.path / "ckpt0").write_bytes(saved)
    stage.flush()
    for number in range(1, 4):
        saved = blob(f"ckpt{number}", SIZE)
        (stage.path / f"ckpt{number}").write_bytes(saved)
        (stage.path / f"ckpt{number - 1}").unlink()
        rule = stage.share.hang(["write"], "run/.wbcache-*", times=1, after=number % 2 == 0)
        mount.client.flush([b""], 0.2)
        stage.share.wait_hung("write")
        mount.strike()
        stage.share.release(rule)
        mount.wait_killed()
        mount.remount()
        assert (stage.path / f"ckpt{number}").read_bytes() == saved
        stage.flush(timeout=60)
        assert stage.held().keys() - set(stage.leftovers()) == {f"ckpt{number}"}
    stage.settle()


def test_without_anything_to_remove_a_valid_prefix_waits_for_room(stage: Stage) -> None:
    limit(stage, 2.5)
    saved = {f"part{number}": blob(f"part{number}", SIZE) for number in range(6)}
    for name, data in saved.items():
        (stage.path / name).write_bytes(data)
    (stage.path / "DONE").write_bytes(b"")
    said = set()
    left = stage.mount.client.flush([b""], 3.0, lambda *how: said.add(how[-1]))
    assert "the share is full" in said
    late = {f"run/part{number}" for number in range(2, 6)} | {"run/DONE"}
    assert {row["path"] for row in left if row["kind"] == "file"} == late
    assert {r["path"]: r["reason"] for r in left}["run/part2"] == "the share is full"
    assert set(stage.held()) - set(stage.leftovers()) == {"part0", "part1"}
    assert stage.mount.status()["share"]["full"]

    # It goes on trying, but not by sending over and over what can't fit.
    since = stage.share.mark()
    for _ in range(3):
        since_try = stage.share.mark()
        stage.share.wait_for("statfs", since=since_try)
    assert not stage.share.written(since)
    wait_until(lambda: not stage.leftovers(), "no temporaries take the room that is left")

    # What fits goes on meanwhile: other files, and what grows.
    (stage.mount.path / "elsewhere").mkdir()
    (stage.mount.path / "elsewhere" / "small").write_bytes(b"fits")
    stage.mount.flush("elsewhere")

    stage.share.quota(None)
    stage.settle(timeout=60)
    assert stage.held().keys() == {*saved, "DONE"}
    wait_until(lambda: events(stage, "has room again") == 1, "it is said to be over")
    assert not events(stage, "order suspended")


def test_a_log_that_can_not_grow_has_old_data_removed(stage: Stage) -> None:
    (stage.path / "old").write_bytes(blob("old", SIZE))
    (stage.path / "log").write_bytes(b"begin\n")
    stage.flush()
    limit(stage, 1.0 + 6 / SIZE)
    with open(stage.path / "log", "ab") as log:
        log.write(b"more\n")
        (stage.path / "old").unlink()
        log.write(b"and more\n")
        log.flush()
        stage.flush(timeout=30)
    stage.settle()
    assert stage.held()["log"][1] == b"begin\nmore\nand more\n"


def test_inodes_can_run_out_as_well(stage: Stage) -> None:
    for number in range(3):
        (stage.path / f"old{number}").write_bytes(b"x")
    stage.flush()
    (stage.path / "new").mkdir()
    (stage.path / "new" / "file").write_bytes(b"y")
    for number in range(3):
        (stage.path / f"old{number}").unlink()
    stage.share.quota(inodes=inodes(stage))
    stage.flush(timeout=30)
    stage.settle()
    assert stage.held().keys() == {"new", "new/file"}


def inodes(stage: Stage) -> int:
    return sum(len(names) + len(files) for _, names, files in os.walk(stage.share.backing))


Operation = Callable[[Path, random.Random], None]


def save(top: Path, rng: random.Random) -> None:
    (top / f"file{rng.randrange(8)}").write_bytes(rng.randbytes(rng.randrange(1, SIZE // 4)))


def append(top: Path, rng: random.Random) -> None:
    with open(top / f"log{rng.randrange(2)}", "ab") as log:
        log.write(rng.randbytes(rng.randrange(1000)))


def remove(top: Path, rng: random.Random) -> None:
    names = sorted(os.listdir(top))
    if names:
        (top / rng.choice(names)).unlink()


def rename(top: Path, rng: random.Random) -> None:
    names = sorted(os.listdir(top))
    if names:
        os.rename(top / rng.choice(names), top / f"file{rng.randrange(8)}")


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_on_a_full_share_all_arrives_once_there_is_room(
    stage: Stage, seed: int
) -> None:
    rng = random.Random(seed)
    for round_ in range(4):
        limit(stage, rng.choice([0.3, 0.7, 1.0]))
        for _ in range(12):
            operation: Operation = rng.choices([save, append, remove, rename], [5, 3, 3, 1])[0]
            operation(stage.path, rng)
        stage.mount.client.flush([b""], 1.0)
        shown = contents(stage.path)
        for name, (_, data) in stage.held().items():
            # Whole, whatever its age: nothing is torn by the lack of room.
            if name.startswith("file") and name in shown and len(data) == len(shown[name][1]):
                assert data == shown[name][1], (round_, name)
    stage.share.quota(None)
    stage.settle(timeout=60)


async def test_a_full_cache_disk_is_not_a_full_share(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "old").write_bytes(b"old")
    async with volumes.mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        fs, flusher, journal = mount.filesystem, mount.flusher, mount.volume.journal
        root = mount.volume.tree.root
        add_temporary, refused = journal.add_temporary, 0

        def refuse(directory: Directory, name: bytes) -> None:
            nonlocal refused
            refused += 1
            raise CacheDiskError(errno.ENOSPC, "the cache disk is full")

        journal.add_temporary = refuse  # type: ignore[method-assign]
        node = await fs.names.create(root, b"new", 0o644, 0, 0)
        await fs.files.write(node, 0, b"new")
        await fs.names.unlink(root, b"old")
        flusher.drain()
        await wait_until_async(lambda: refused > 5, "it is tried again and again")
        assert not flusher.room.is_short
        assert (tmp_path / "share" / "old").exists()
        journal.add_temporary = add_temporary  # type: ignore[method-assign]
        await mount.drain()
    assert os.listdir(tmp_path / "share") == ["new"]
