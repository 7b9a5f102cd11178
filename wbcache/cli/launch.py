"""Starting a daemon in the background and hearing how it went."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from typing import IO, Any

from wbcache.errors import DaemonStartError, ReportedError

START_DEADLINE = 90.0
"""Seconds until the daemon must have said something; its own checks give up long before."""
STOP_DEADLINE = 5.0
"""Seconds that a daemon gets to end when nobody waits for its word any more."""


def start_daemon(arguments: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
    """Start a daemon in a session of its own; its first message.

    It is told to write that message to the descriptor after `--ready-fd`, which is put between the
    arguments and the paths. Raises ReportedError with what it reports, or DaemonStartError.
    """
    receiving, sending = os.pipe()
    # Whatever it prints before its own log is open would otherwise be lost.
    with open(os.memfd_create("printed"), "w+b") as printed, os.fdopen(receiving, "rb") as ready:
        try:
            daemon = subprocess.Popen(
                [*arguments, "--ready-fd", str(sending), *paths],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=[sending],
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(sending)
        try:
            line = _first_line(ready, time.monotonic() + START_DEADLINE)
            status = None if line else daemon.wait(STOP_DEADLINE)
        except BaseException:
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(STOP_DEADLINE)
            raise
        finally:
            if daemon.poll() is None:
                # It outlives this command, which is not its keeper and must not complain.
                daemon.returncode = 0
        if status is not None:
            raise DaemonStartError("the daemon", f"ended with status {status}", _last_line(printed))
    message: dict[str, Any] = json.loads(line)
    if message.get("ready") is not True:
        raise ReportedError(str(message.get("error")), int(message.get("exit", 1)))
    return message


def _first_line(ready: IO[bytes], end: float) -> bytes:
    """The daemon's line, or nothing if it ended without one."""
    received = b""
    while not received.endswith(b"\n"):
        readable, _, _ = select.select([ready], [], [], max(0.0, end - time.monotonic()))
        if not readable:
            raise DaemonStartError(
                "the daemon",
                f"was not ready after {START_DEADLINE:g} s",
                "look into daemon.log in the cache directory",
            )
        chunk = os.read(ready.fileno(), 65536)
        if not chunk:
            return b""
        received += chunk
    return received


def _last_line(printed: IO[bytes]) -> str:
    printed.seek(0)
    lines = printed.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "look into daemon.log in the cache directory"
