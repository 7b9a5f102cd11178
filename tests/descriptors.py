"""A descriptor for the length of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def opened(path: Path | str, flags: int = os.O_RDWR, mode: int = 0o666) -> Iterator[int]:
    """What `os.open` gives, closed at the end."""
    descriptor = os.open(path, flags, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
