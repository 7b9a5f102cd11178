"""Start a file system's process, wait for its mount, and take both down again."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.waiting import wait_until
from wbcache.errors import WbcacheError
from wbcache.mounts import canonical, mount_at, read_mounts, unmount

_MOUNT_DEADLINE = 30.0
_UNMOUNT_DEADLINE = 5.0
_END_DEADLINE = 20.0


class BenchError(Exception):
    """A column cannot be measured here; the text says why."""


def is_mounted(mountpoint: str) -> bool:
    """Whether the kernel lists a mount at `mountpoint`, dead ones included."""
    mounts = read_mounts()
    return mount_at(canonical(mountpoint, mounts), mounts) is not None


def take_down(mountpoint: str) -> None:
    """Unmount `mountpoint`, if something is mounted there; lazily when it stays busy."""
    deadline = time.monotonic() + _UNMOUNT_DEADLINE
    while is_mounted(mountpoint):
        try:
            unmount(canonical(mountpoint), lazy=time.monotonic() > deadline)
        except WbcacheError as error:
            if time.monotonic() > deadline + _UNMOUNT_DEADLINE:
                raise BenchError(str(error)) from None
            time.sleep(0.05)


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
        try:
            wait_until(
                lambda: is_mounted(mountpoint) or process.poll() is not None,
                "a mount",
                _MOUNT_DEADLINE,
            )
        except AssertionError as error:
            raise BenchError(f"{os.path.basename(command[0])}: {error}: {tail(log)}") from None
        if process.poll() is not None:
            raise BenchError(f"{os.path.basename(command[0])} did not mount: {tail(log)}")
        yield
    finally:
        take_down(mountpoint)
        _end(process, patience)


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait for `process`; after `patience` ask it to end, after as long again kill it."""
    for act in (process.terminate, process.kill):
        try:
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            act()
    process.wait()


def tail(path: str, size: int = 400) -> str:
    """The last `size` characters of a text file, on one line."""
    with open(path, encoding="utf-8", errors="replace") as text:
        return " ".join(text.read().split())[-size:]
