"""filelock: processes that take turns, with each kind of lock."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from tests.libraries.programs.frame import main, meet

TURNS = 20


def count(top: Path) -> None:
    """One of several that count in the same files."""
    meet("ready")
    for kind, name in ((FileLock, "locked"), (SoftFileLock, "soft")):
        for _ in range(TURNS):
            with kind(top / f"{name}.lock", timeout=60, poll_interval=0.005):
                path = top / name
                number = int(path.read_text()) if path.exists() else 0
                path.write_text(str(number + 1))


def counted(top: Path) -> None:
    """Whether two of `count` have counted."""
    for name in ("locked", "soft"):
        assert int((top / name).read_text()) == 2 * TURNS


def die_with_it(top: Path) -> None:
    """Take the lock and be killed."""
    held, second = FileLock(top / "held.lock"), FileLock(top / "held.lock")
    held.acquire(timeout=10)
    with contextlib.suppress(Timeout):
        second.acquire(timeout=0)
        raise AssertionError("taken twice")
    os.kill(os.getpid(), signal.SIGKILL)


def take(top: Path) -> None:
    """Take what another was killed with."""
    with FileLock(top / "held.lock", timeout=10):
        (top / "held").write_text("mine")


if __name__ == "__main__":
    main(count, counted, die_with_it, take)
