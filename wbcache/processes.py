"""Other processes, as /proc shows them."""

from __future__ import annotations

import os
import resource
import signal
import sys


def hold_standard_streams() -> None:
    """Open /dev/null in place of those of standard input, output and error that are closed.

    The next files to be opened would take their numbers, and get what is printed.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name, fd in ("stdout", 1), ("stderr", 2):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w", closefd=False))  # noqa: SIM115


def speak_utf8(module: str) -> None:
    """Start this program, a module, anew if the locale would decode file names otherwise: the paths
    that processes tell each other must mean the same to all of them."""
    if sys.getfilesystemencoding() != "utf-8":
        arguments = [sys.executable, "-X", "utf8", "-m", module, *sys.argv[1:]]
        os.execv(sys.executable, arguments)


def raise_file_limit() -> int:
    """Allow this process as many open files as it may have; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


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
