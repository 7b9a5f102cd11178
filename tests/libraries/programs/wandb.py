"""wandb: a run without a network, whose records are read back from its own file."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import wandb
from wandb.proto import wandb_internal_pb2

from tests.libraries.programs.frame import main, meet

STEPS = 100

HEADER = 7
BLOCK = 32 << 10
PIECE = struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def write(top: Path) -> None:
    with wandb.init(
        mode="offline", project="training", dir=top, config={"lr": 0.1, "layers": [1, 2]}
    ) as run:
        for step in range(STEPS):
            run.log({"loss": 1 / (step + 1)}, step=step)
            if step == STEPS // 2:
                meet("half of it")
        (top / "model.bin").write_bytes(b"weights" * 1000)
        run.save(top / "model.bin", base_path=top, policy="now")
        run.summary["best"] = 0.5


def _records(log: bytes) -> Iterator[bytes]:
    """The records of a run's file: pieces in blocks, each piece with checksum, length and kind."""
    at, begun = HEADER, b""
    while at < len(log):
        left = BLOCK - at % BLOCK
        if left < PIECE.size:
            at += left
            continue
        checksum, length, kind = PIECE.unpack_from(log, at)
        piece = log[at + PIECE.size : at + PIECE.size + length]
        assert zlib.crc32(bytes([kind]) + piece) == checksum
        at += PIECE.size + length
        begun += piece
        if kind in (WHOLE, LAST):
            yield begun
            begun = b""
    assert not begun


def check(top: Path) -> None:
    assert (top / "wandb" / "latest-run").is_symlink()
    (log,) = (top / "wandb").glob("offline-run-*/*.wandb")
    losses, ended = {}, False
    for data in _records(log.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        ended = ended or record.HasField("exit")
        values = {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        if "loss" in values:
            losses[values["_step"]] = values["loss"]
    assert losses == {step: 1 / (step + 1) for step in range(STEPS)}
    assert ended


if __name__ == "__main__":
    main(write, check)
