"""Only what is new moves to the share, and nothing that it already has is read."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.endtoend.checkpoints import blob
from tests.endtoend.stage import Stage

pytestmark = pytest.mark.timeout(120)

BIG = 200_000_000


def append(path: Path, data: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(data)


@pytest.mark.parametrize("held", [False, True], ids=["reopened", "held-open"])
def test_appends_move_once(stage: Stage, held: bool) -> None:
    """K appends of b bytes move about K*b bytes, however often they are flushed."""
    size, appends, flushes = 180, 400, 20
    log = stage.path / "events"
    holder = open(log, "ab", buffering=0) if held else None  # noqa: SIM115
    for n in range(flushes):
        for _ in range(appends // flushes):
            if holder is not None:
                holder.write(bytes([n]) * size)
            else:
                append(log, bytes([n]) * size)
        stage.flush()
    if holder is not None:
        holder.close()
    stage.settle()
    assert stage.written() == size * appends
    assert stage.read() == 0
    assert len(stage.ops("rename")) == 1
    assert stage.ops("truncate") == []


def test_an_append_to_a_large_file_moves_only_what_is_new(stage: Stage) -> None:
    stage.put_hole("big", BIG)
    stage.appears("big")
    inode = (stage.backing / "big").stat().st_ino
    stage.begin()
    append(stage.path / "big", b"tail" * 1000)
    stage.flush()
    assert (stage.backing / "big").stat().st_size == BIG + 4000
    assert (stage.backing / "big").stat().st_ino == inode
    assert stage.written() == 4000
    assert stage.read() == 0
    with open(stage.path / "big", "rb") as file:
        file.seek(BIG - 4)
        assert file.read() == b"\0\0\0\0" + b"tail" * 1000


def test_a_patch_in_a_large_file_moves_only_what_is_new(stage: Stage) -> None:
    stage.put_hole("big", BIG)
    stage.appears("big")
    stage.begin()
    patches = {100: b"head", BIG // 2 + 17: b"middle" * 500, BIG - 3: b"end"}
    with open(stage.path / "big", "r+b", buffering=0) as file:
        for at, data in patches.items():
            file.seek(at)
            file.write(data)
    stage.flush()
    assert stage.written() <= sum(map(len, patches.values())) + 4096 * 2 * len(patches)
    assert stage.read() <= 4096 * 2 * len(patches)
    with open(stage.backing / "big", "rb") as file:
        for at, data in patches.items():
            file.seek(at)
            assert file.read(len(data)) == data
        assert os.fstat(file.fileno()).st_size == BIG
    assert stage.leftovers() == []


def test_cutting_a_large_file_moves_nothing(stage: Stage) -> None:
    stage.put_hole("big", BIG)
    stage.appears("big")
    stage.begin()
    os.truncate(stage.path / "big", BIG // 2)
    stage.flush()
    assert (stage.backing / "big").stat().st_size == BIG // 2
    assert (stage.written(), stage.read()) == (0, 0)
    os.truncate(stage.path / "big", BIG)
    stage.flush()
    assert (stage.backing / "big").stat().st_size == BIG
    assert stage.written() + stage.read() < 1 << 20


def test_holes_do_not_move(stage: Stage) -> None:
    """A memory-mapped array or a database that is mostly empty."""
    data = {0: b"header", 30_000_000: blob("middle", 10_000), 90_000_000: b"end"}
    with open(stage.path / "sparse", "wb", buffering=0) as file:
        file.truncate(BIG)
        for at, part in data.items():
            file.seek(at)
            file.write(part)
    stage.flush()
    assert stage.written() < 1 << 20

    with open(stage.path / "sparse", "r+b", buffering=0) as file:
        # Bytes that the share has, cut off and covered by a hole: it must show zeros there.
        file.truncate(30_005_000)
        file.seek(60_000_000)
        file.write(b"again")
        file.truncate(BIG + 5)
    stage.flush()
    assert stage.written() < 2 << 20
    expected = bytearray(BIG + 5)
    expected[0:6] = b"header"
    expected[30_000_000:30_005_000] = blob("middle", 10_000)[:5000]
    expected[60_000_000:60_000_005] = b"again"
    assert (stage.backing / "sparse").read_bytes() == expected


def test_renaming_and_removing_what_only_the_share_has_moves_nothing(stage: Stage) -> None:
    stage.put_hole("d/big", BIG)
    stage.put("d/e/small", b"1")
    stage.appears("d/big")
    stage.begin()
    os.rename(stage.path / "d", stage.path / "moved")
    os.chmod(stage.path / "moved" / "big", 0o600)
    os.rename(stage.path / "moved" / "e", stage.path / "moved" / "f")
    stage.settle()
    assert (stage.backing / "moved" / "f" / "small").read_bytes() == b"1"
    assert stage.written() == 0
    shutil.rmtree(stage.path / "moved")
    stage.settle()
    assert (stage.written(), stage.read()) == (0, 1 + BIG)  # what `settle` itself looked at


def test_what_is_removed_before_its_time_never_moves(stage: Stage) -> None:
    top = stage.path / "scratch"
    (top / "deep").mkdir(parents=True)
    for n in range(20):
        (top / "deep" / f"{n}").write_bytes(b"x" * 10_000)
    (stage.path / "lock").write_bytes(b"1")
    os.symlink("nowhere", stage.path / "link")
    shutil.rmtree(top)
    (stage.path / "lock").unlink()
    (stage.path / "link").unlink()
    stage.settle()
    assert [op for op in stage.ops() if op.mutation] == []


def test_temporary_names_never_reach_the_share(stage: Stage) -> None:
    """Written, renamed, rewritten and renamed again before the delay: one file moves, once."""
    for n in range(50):
        (stage.path / f"state.json.tmp{n}").write_bytes(blob(f"{n}", 20_000))
        os.replace(stage.path / f"state.json.tmp{n}", stage.path / "state.json")
    with open(stage.path / ".tmp123", "wb") as file:
        file.truncate(50_000)
        file.write(b"x")
        os.rename(stage.path / ".tmp123", stage.path / "model.safetensors")
        file.seek(0)
        file.write(blob("model", 50_000))
    (stage.path / "a").mkdir()
    (stage.path / "b").mkdir()
    (stage.path / "a" / "file").write_bytes(b"moved between directories")
    os.rename(stage.path / "a" / "file", stage.path / "b" / "file")
    stage.settle()
    assert stage.written() == 70_000 + len(b"moved between directories")
    names = {name for name in stage.names_seen() if ".wbcache-" not in name}
    assert names == {"state.json", "model.safetensors", "a", "b", "b/file"}


def test_rewriting_the_same_file_moves_its_last_version(stage: Stage) -> None:
    path = stage.path / "metrics.csv"
    for n in range(200):
        path.write_bytes(b"%d," % n * 1000)
    stage.settle()
    assert stage.written() == len(b"199," * 1000)


def test_reads_of_what_was_just_written_do_not_ask_the_share(stage: Stage) -> None:
    data = blob("data", 3_000_000)
    (stage.path / "file").write_bytes(data)
    assert (stage.path / "file").read_bytes() == data
    stage.flush()
    stage.begin()
    assert (stage.path / "file").read_bytes() == data
    with open(stage.path / "file", "r+b") as file:
        file.seek(1_000_000)
        file.write(b"patched")
        file.seek(999_999)
        assert file.read(9) == data[999_999:1_000_000] + b"patched" + data[1_000_007:1_000_008]
    stage.flush()
    assert stage.read() == 0
    assert (stage.backing / "file").read_bytes()[1_000_000:1_000_007] == b"patched"


def test_a_random_mix_moves_little_more_than_was_written(stage: Stage) -> None:
    rng = random.Random(1)
    written = 0
    for turn in range(6):
        for _ in range(40):
            name = stage.path / f"f{rng.randrange(8)}"
            data = rng.randbytes(rng.randrange(1, 5000))
            written += len(data)
            append(name, data)
        if turn % 2:
            stage.flush()
    stage.settle()
    assert stage.written() == written


def test_a_read_of_a_cold_file_asks_for_each_byte_once(stage: Stage) -> None:
    data = blob("cold", 20_000_000)
    stage.put("cold", data)
    stage.appears("cold")
    stage.begin()
    assert (stage.path / "cold").read_bytes() == data
    assert stage.read() <= len(data) * 1.05 + (4 << 20)
