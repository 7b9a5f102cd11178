"""How much of its disk a directory takes, as the disk counts it."""

from __future__ import annotations

import os
from pathlib import Path


def disk_usage(directory: Path) -> int:
    """Bytes that all files in a directory and below take; files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                pass
    return total
