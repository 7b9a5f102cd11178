"""What a process takes of the memory."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def resident(pid: int) -> int:
    """Bytes in memory now."""
    return _field(pid, "VmRSS")


def peak(pid: int) -> int:
    """The most that it ever was, bytes."""
    return _field(pid, "VmHWM")


def _field(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


def drop_caches() -> None:
    """Have the kernel forget names and inodes that nobody uses."""
    Path("/proc/sys/vm/drop_caches").write_text("2")
