"""Start a file system's process, wait for its mount, and take both down again."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

_MOUNT_DEADLINE = 30.0
_END_DEADLINE = 20.0


class BenchError(Exception):
    """A column cannot be measured here; the text says why."""


def is_mounted(mountpoint: str) -> bool:
    """Whether the kernel lists a mount at `mountpoint`, dead ones included."""
    wanted = os.path.realpath(mountpoint)
    with open("/proc/self/mountinfo", "rb") as table:
        return any(_mountpoint(line) == wanted for line in table)


def _mountpoint(line: bytes) -> str:
    field = line.split()[4]
    return os.fsdecode(field.decode("unicode_escape").encode("latin-1"))


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll `condition` until it holds (True) or `seconds` have passed (False)."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def unmount(mountpoint: str) -> None:
    """Unmount `mountpoint`, lazily when it stays busy."""
    plain = ["umount", mountpoint] if os.getuid() == 0 else ["fusermount3", "-u", mountpoint]
    lazy = [plain[0], "-l" if plain[0] == "umount" else "-uz", mountpoint]

    def gone() -> bool:
        if is_mounted(mountpoint):
            subprocess.run(plain, check=False, capture_output=True)
        return not is_mounted(mountpoint)

    if not wait_until(gone, 5.0):
        subprocess.run(lazy, check=False, capture_output=True)


def end(process: subprocess.Popen[bytes], seconds: float = _END_DEADLINE) -> None:
    """Wait for `process`; after `seconds` ask it to end, after as long again kill it."""
    for act in (process.terminate, process.kill):
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            act()
    process.wait(seconds)


@contextmanager
def served(
    command: Sequence[str], mountpoint: str, log: str, *, patience: float = _END_DEADLINE
) -> Iterator[None]:
    """Run `command`, which serves `mountpoint` in the foreground, for the length of the block.

    Its output goes to the file `log`.  After the unmount it gets `patience` seconds to end by
    itself.  Raises BenchError, with the end of the log, when the mount does not appear.
    """
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        ready = wait_until(
            lambda: is_mounted(mountpoint) or process.poll() is not None, _MOUNT_DEADLINE
        )
        if not ready or process.poll() is not None:
            raise BenchError(f"{os.path.basename(command[0])} did not mount: {tail(log)}")
        yield
    finally:
        unmount(mountpoint)
        end(process, patience)


def tail(path: str, size: int = 400) -> str:
    """The last `size` characters of a text file, on one line."""
    with open(path, encoding="utf-8", errors="replace") as text:
        return " ".join(text.read().split())[-size:]
