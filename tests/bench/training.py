"""The load of the hang benchmark: a training loop that times each of its system calls.

    python -I training.py DIRECTORY REPORT [--checkpoint BYTES] [--every S]

works in DIRECTORY until it gets SIGTERM, then writes one JSON object to REPORT: the calls, as
[kind, start (time.monotonic), seconds, errno or 0], and what the directory has to hold, as
{name: SHA-256}. Only the standard library. A call that fails is given up for this step, as by a
program that logs the error and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

MIB = 1 << 20
STEP = 0.05
"""Seconds of a step, of which each adds to the logs."""

T = TypeVar("T")


class Loop:
    """One run and its directory."""

    def __init__(self, directory: str, checkpoint: int, every: float) -> None:
        self._directory = directory
        self._size, self._every = checkpoint, every
        self._block = os.urandom(MIB)
        self._held: dict[str, object] = {}
        self._digests: dict[str, hashlib._Hash] = {}
        self._kept: list[str] = []
        self.calls: list[tuple[str, float, float, int]] = []

    def digests(self) -> dict[str, str]:
        """What the directory has to hold by now."""
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def _call(self, kind: str, call: Callable[[], T]) -> T:
        start, code = time.monotonic(), 0
        try:
            return call()
        except OSError as error:
            code = error.errno or -1
            raise
        finally:
            self.calls.append((kind, start, time.monotonic() - start, code))

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        path = self._path(name)
        kind = "create" if flags & os.O_TRUNC else "open"
        fd = self._call(kind, lambda: os.open(path, flags | os.O_CREAT | os.O_WRONLY, 0o644))
        try:
            yield fd
        finally:
            self._call("close", lambda: os.close(fd))

    def _add(self, fd: int, name: str, data: bytes, kind: str) -> None:
        done = self._call(kind, lambda: os.write(fd, data))
        self._digests.setdefault(name, hashlib.sha256()).update(data[:done])

    def run(self, stopped: Callable[[], bool]) -> None:
        """Work until `stopped`."""
        os.mkdir(self._directory)
        log = os.open(self._path("train.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        step, checkpoint_at = 0, time.monotonic()
        while not stopped():
            step += 1
            began = time.monotonic()
            with contextlib.suppress(OSError):
                self._add(log, "train.log", f"step {step} loss {1 / step:.6f}\n".encode(), "append")
            with contextlib.suppress(OSError):
                self._event(step)
            with contextlib.suppress(OSError):
                self._look(step)
            if step % 20 == 0:
                with contextlib.suppress(OSError):
                    self._table(step)
            if began >= checkpoint_at:
                checkpoint_at = began + self._every
                with contextlib.suppress(OSError):
                    self._checkpoint(step)
            time.sleep(max(0.0, began + STEP - time.monotonic()))
        os.close(log)

    def _event(self, step: int) -> None:
        """As tensorboard's writer does on some file systems: open, append, close."""
        with self._opened("events.out.tfevents.1", os.O_APPEND) as fd:
            record = f"event {step:08d} ".encode().ljust(180, b".")
            self._add(fd, "events.out.tfevents.1", record, "append")

    def _look(self, step: int) -> None:
        self._call("stat", lambda: os.stat(self._path("events.out.tfevents.1")))
        if step % 5 == 0:
            self._call("listdir", lambda: os.listdir(self._directory))

    def _table(self, step: int) -> None:
        """Rewritten whole under another name, then renamed over the last one."""
        data = b"".join(b"%d,%f\n" % (row, 1 / (row + 1)) for row in range(step // 20))
        with self._opened("metrics.csv.tmp", os.O_TRUNC) as fd:
            self._call("write", lambda: os.write(fd, data))
        self._rename("metrics.csv.tmp", "metrics.csv", hashlib.sha256(data))

    def _checkpoint(self, step: int) -> None:
        """A large file beside the last two; the oldest goes when the new one is complete."""
        name, digest = f"step-{step}.ckpt", hashlib.sha256()
        with self._opened(f"{name}.tmp", os.O_TRUNC) as fd:
            for number in range(self._size // MIB):
                block = number.to_bytes(8, "little") + step.to_bytes(8, "little") + self._block[16:]
                self._call("write", lambda block=block: os.write(fd, block))  # type: ignore[misc]
                digest.update(block)
        self._rename(f"{name}.tmp", name, digest)
        self._kept.append(name)
        while len(self._kept) > 2:
            self._remove(self._kept[0])
            del self._kept[0]

    def _remove(self, name: str) -> None:
        self._call("unlink", lambda: os.unlink(self._path(name)))
        del self._digests[name]

    def _rename(self, old: str, new: str, digest: hashlib._Hash) -> None:
        self._call("rename", lambda: os.rename(self._path(old), self._path(new)))
        self._digests[new] = digest


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("report")
    parser.add_argument("--checkpoint", type=int, default=200 * MIB, help="bytes")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between checkpoints")
    options = parser.parse_args()
    stopped: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    loop = Loop(options.directory, options.checkpoint, options.every)
    loop.run(lambda: bool(stopped))
    with open(options.report, "w", encoding="utf-8") as report:
        json.dump({"calls": loop.calls, "digests": loop.digests()}, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
