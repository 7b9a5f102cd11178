"""Looking a mount up in the kernel's table, which answers even when the mount does not."""

from __future__ import annotations

import os
from typing import NamedTuple


class Mount(NamedTuple):
    """One line of the mount table: MAJOR:MINOR of the device, and the type."""

    device: str
    type: str


def mounts_at(mountpoint: str | os.PathLike[str]) -> list[Mount]:
    """What is mounted at *mountpoint*, the visible one last; touches only its parent directory."""
    path = os.path.abspath(mountpoint)
    wanted = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    found = []
    # Names of others may hold a carriage return, which ends no line here.
    with open(
        "/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n"
    ) as table:
        for line in table:
            fields = line.split(" ")
            # The table may change while it is read.
            if len(fields) > 4 and _unescape(fields[4]) == wanted:
                found.append(Mount(fields[2], fields[fields.index("-") + 1]))
    return found


def _unescape(field: str) -> str:
    for code, char in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        field = field.replace(code, char)
    return field
