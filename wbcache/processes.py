"""Other processes, as /proc shows them."""

from __future__ import annotations

import signal


def is_being_killed(pid: int) -> bool:
    """Whether a process has ended but for threads that wait for a system call to return."""
    state, pending = _status(pid)
    return state == "Z" or bool(pending >> (signal.SIGKILL - 1) & 1)


def is_zombie(pid: int) -> bool:
    """Whether a process's first thread has ended, while it is still there."""
    return _status(pid)[0] == "Z"


def _status(pid: int) -> tuple[str, int]:
    """The state of a process's first thread, and the signals that wait for the process."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return "", 0
    pending = int(fields.get("SigPnd", "0"), 16) | int(fields.get("ShdPnd", "0"), 16)
    return fields.get("State", "").strip()[:1], pending
