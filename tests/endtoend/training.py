"""What training programs do to their output directory, the same to the last byte each time.

    python -m tests.endtoend.training DIRECTORY

is a program of its own, so that it can be run as a user whose mount nobody else may enter.
"""

from __future__ import annotations

import csv
import json
import mmap
import os
import random
import shutil
import sqlite3
import sys
from pathlib import Path

STAMP = 1_600_000_000_123_456_789
STEPS = 120


def train(top: Path) -> None:
    """One run: configuration, logs, metrics, checkpoints with rotation, and the final clean-up."""
    rng = random.Random(7)
    _configure(top)
    kept: list[str] = []
    with open(top / "train.log", "w", buffering=1) as log:  # held open for the whole run
        for step in range(STEPS):
            _event(top / "events.out.tfevents.0", step)
            log.write(f"step {step} loss {rng.random():.6f}\n")
            if step % 10 == 9:
                _metrics(top / "metrics.csv", step, rng)
                _status(top / "status.json", step)
            if step % 20 == 19:
                _file_checkpoint(top, step, rng)
                _directory_checkpoint(top, step, rng)
                kept.append(f"checkpoint-{step}")
                while len(kept) > 2:
                    shutil.rmtree(top / kept.pop(0))
            if step % 30 == 29:
                _cache(top / "cache", step, rng)
    _database(top / "runs.db")
    _array(top / "embeddings.npy", rng)
    _patch(top / "patched.bin", rng)
    _attributes(top)
    shutil.rmtree(top / "cache")


def _configure(top: Path) -> None:
    (top / ".hydra").mkdir()
    for name in ("config", "overrides", "hydra"):
        (top / ".hydra" / f"{name}.yaml").write_text(f"{name}: [1, 2, 3]\n")
    (top / "empty").mkdir()
    (top / "empty.txt").touch()
    os.symlink("/nowhere/at/all", top / "dangling")
    os.symlink(".hydra/config.yaml", top / "config")


def _event(path: Path, step: int) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(step.to_bytes(8, "little") * 5 + b"\n")


def _metrics(path: Path, step: int, rng: random.Random) -> None:
    """Read, extend and rewrite in place, as pandas users do."""
    rows = [["step", "loss"]]
    if path.exists():
        with open(path, newline="") as file:
            rows = list(csv.reader(file))
    rows.append([str(step), f"{rng.random():.4f}"])
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def _status(path: Path, step: int) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        json.dump({"step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _file_checkpoint(top: Path, step: int, rng: random.Random) -> None:
    """Lightning: a new file, a link to it, the last but one goes."""
    name = f"epoch={step}.ckpt"
    (top / name).write_bytes(rng.randbytes(200_000))
    os.symlink(name, top / "last.tmp")
    os.replace(top / "last.tmp", top / "last.ckpt")
    (top / f"epoch={step - 40}.ckpt").unlink(missing_ok=True)
    (top / "best.pt").write_bytes(rng.randbytes(100_000 + step))


def _directory_checkpoint(top: Path, step: int, rng: random.Random) -> None:
    """A directory that gets its name when everything is in it."""
    made = top / f"tmp-checkpoint-{step}"
    (made / "optimizer").mkdir(parents=True)
    for shard in range(3):
        with open(made / f"model-{shard}.tmp", "wb", buffering=0) as file:
            size = 50_000 + shard
            file.truncate(size)
            os.rename(made / f"model-{shard}.tmp", made / f"model-{shard}.safetensors")
            file.write(rng.randbytes(size))
        (made / "optimizer" / f"{shard}.bin").write_bytes(rng.randbytes(30_000))
    (made / "trainer_state.json").write_text(json.dumps({"step": step}))
    os.rename(made, top / f"checkpoint-{step}")
    descriptor = os.open(top, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _cache(directory: Path, step: int, rng: random.Random) -> None:
    """Objects under their hashes, and names that are links to them."""
    (directory / "blobs").mkdir(parents=True, exist_ok=True)
    digest = f"{rng.getrandbits(64):016x}"
    (directory / "blobs" / digest).write_bytes(rng.randbytes(10_000))
    os.symlink(f"blobs/{digest}", directory / f"file-{step}")


def _database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE run (step INTEGER, loss REAL)")
        for step in range(20):
            connection.execute("INSERT INTO run VALUES (?, ?)", (step, step / 7))
            connection.commit()
    connection.close()


def _array(path: Path, rng: random.Random) -> None:
    """Mapped, its descriptor closed, written later."""
    with open(path, "w+b") as file:
        file.truncate(300_000)
        mapping = mmap.mmap(file.fileno(), 300_000)
    mapping[100_000:150_000] = rng.randbytes(50_000)
    mapping.close()


def _patch(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(250_000))
    with open(path, "r+b") as file:
        for _ in range(10):
            file.seek(rng.randrange(250_000))
            file.write(rng.randbytes(100))
    os.truncate(path, 240_000)


def _attributes(top: Path) -> None:
    (top / "run.sh").write_text("#!/bin/sh\nexit 0\n")
    os.chmod(top / "run.sh", 0o750)
    os.utime(top / "run.sh", ns=(STAMP, STAMP))
    (top / "secret").write_bytes(b"key")
    os.chmod(top / "secret", 0o400)
    os.link(top / "run.sh", top / "linked.sh")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
