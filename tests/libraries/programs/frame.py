"""What the programs have in common: their command line, and meeting each other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

Part = Callable[[Path], None]


def main(*parts: Part) -> None:
    """Run the part that the command line names on the directory that it names."""
    names = {part.__name__: part for part in parts}
    names[sys.argv[1]](Path(sys.argv[2]))


def meet(message: str) -> None:
    """Say how far this process is, and go on when it is told to. Nobody may be there to tell it:
    then it goes on at once."""
    print(message, flush=True)
    sys.stdin.readline()
