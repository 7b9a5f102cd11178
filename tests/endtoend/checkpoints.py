"""How programs save checkpoints, and what makes one whole."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.endtoend.stage import Stage


def blob(tag: str, size: int = 3000) -> bytes:
    """Bytes that are like no others."""
    return random.Random(tag).randbytes(size)


def read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def whole(top: Path, files: dict[str, bytes]) -> bool:
    """Whether files are all there with all their bytes."""
    return all(read(top / name) == data for name, data in files.items())


Saver = Callable[[Path, bytes], None]


def save_plainly(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def save_in_pieces(path: Path, data: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        for at in range(0, len(data), 1000):
            file.write(data[at : at + 1000])


def save_by_rename(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def save_by_rename_while_open(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".part")
    with open(temporary, "wb", buffering=0) as file:
        file.truncate(len(data))
        file.write(data[:1000])
        os.replace(temporary, path)
        file.write(data[1000:])


SAVERS = [save_plainly, save_in_pieces, save_by_rename, save_by_rename_while_open]


def never_without(stage: Stage, into: Path, complete: Callable[[Path], bool]) -> None:
    """Once a state is complete, all later ones are, to the end."""
    states = [complete(top) for top in stage.states(into)]
    assert states[-1]
    first = states.index(True)
    assert all(states[first:]), f"not in state {states.index(False, first)} of {len(states)}"
