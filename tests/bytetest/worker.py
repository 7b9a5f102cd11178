"""One of several processes that share a file, each with ranges of its own.

    python -m tests.bytetest.worker DIRECTORY NUMBER OF RANGE SECONDS SEED RESULT

Every OF-th range of RANGE bytes of ``DIRECTORY/shared`` is this process's: it writes there with
pwrite and through a mapping, and what it reads there is what it wrote. To ``DIRECTORY/lines`` all
append, under a lock or in one write. At the end what the ranges must hold is stored in RESULT, and
the number of lines is printed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import sys
import time
from pathlib import Path

from tests.bytetest.places import length

RANGES = 6
"""Of each process."""


class Worker:
    """One process's part in the shared file."""

    def __init__(self, directory: Path, number: int, of: int, size: int, seed: int) -> None:
        self._number = number
        self._rng = random.Random(seed)
        self._lines = directory / "lines"
        self._size = size
        self._fd = os.open(directory / "shared", os.O_RDWR)
        self._mapping = mmap.mmap(self._fd, of * size * RANGES)
        self._starts = [(turn * of + number) * size for turn in range(RANGES)]
        self.model = {
            start: bytearray(self._mapping[start : start + size]) for start in self._starts
        }
        self.lines = 0

    def work(self) -> None:
        """One operation."""
        kinds = [self._write, self._store, self._check, self._check_mapping, self._add, self._sync]
        self._rng.choices(kinds, [6, 6, 4, 4, 4, 1])[0]()

    def _piece(self) -> tuple[int, int, bytes]:
        start = self._rng.choice(self._starts)
        data = self._rng.randbytes(length(self._rng, self._size))
        return start, self._rng.randint(0, self._size - len(data)), data

    def _write(self) -> None:
        start, at, data = self._piece()
        assert os.pwrite(self._fd, data, start + at) == len(data)
        self.model[start][at : at + len(data)] = data

    def _store(self) -> None:
        start, at, data = self._piece()
        self._mapping[start + at : start + at + len(data)] = data
        self.model[start][at : at + len(data)] = data

    def _check(self) -> None:
        start = self._rng.choice(self._starts)
        if self._rng.random() < 0.2:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._same(os.pread(self._fd, self._size, start), start)

    def _check_mapping(self) -> None:
        start = self._rng.choice(self._starts)
        self._same(self._mapping[start : start + self._size], start)

    def _same(self, found: bytes, start: int) -> None:
        wanted = bytes(self.model[start])
        if found != wanted:
            at = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
            raise AssertionError(f"process {self._number}: byte {start + at} is wrong")

    def _add(self) -> None:
        text = f"{self._number} {self.lines} {'x' * self._rng.randrange(300)}\n".encode()
        fd = os.open(self._lines, os.O_WRONLY | os.O_APPEND)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if self._rng.random() < 0.3:  # a line in two writes needs the lock
                half = len(text) // 2
                os.write(fd, text[:half])
                os.write(fd, text[half:])
            else:
                os.write(fd, text)
        finally:
            os.close(fd)
        self.lines += 1

    def _sync(self) -> None:
        self._rng.choice([lambda: os.fsync(self._fd), self._mapping.flush])()

    def close(self) -> None:
        """Unmap and close; what was stored arrives."""
        self._mapping.close()
        os.close(self._fd)


def main() -> None:
    """Work for the given time."""
    directory, number, of, size, seconds, seed, result = sys.argv[1:]
    worker = Worker(Path(directory), int(number), int(of), int(size), int(seed))
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        worker.work()
    worker.close()
    Path(result).write_bytes(b"".join(worker.model[start] for start in sorted(worker.model)))
    print(worker.lines)


if __name__ == "__main__":
    main()
