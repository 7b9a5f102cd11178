"""What commands print: lines for people, strict JSON for programs, progress on long work."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from wbcache.escaping import json_name, one_line, printable

PLAIN_INTERVAL = 5.0
"""Seconds between progress lines where no bar can be drawn."""
MAX_ROWS_ON_TERMINAL = 50


def say(line: str) -> None:
    """A line of a command's result."""
    click.echo(line)


def note(line: str) -> None:
    """A line about the command's work, beside its result."""
    click.echo(f"wbcache: {one_line(line)}", err=True)


def say_json(value: Any) -> None:
    """A value as one line of JSON, with names as `escaping.json_name` writes them."""
    click.echo(json.dumps(_strict(value)))


def format_bytes(count: float) -> str:
    """A size for people: "17 B", "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def format_count(count: int, thing: str) -> str:
    """A number of things: "1 file", "3 files"."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def format_seconds(seconds: float) -> str:
    """A time span for people: "0.4 s", "12 s", "3 min", "2 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def say_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """What is not on the share yet, a line each. On a terminal a long list is cut short."""
    shown = rows[:MAX_ROWS_ON_TERMINAL] if sys.stdout.isatty() else rows
    cells = [_cells(row) for row in shown]
    widths = [max((len(line[column]) for line in cells), default=0) for column in range(4)]
    for line in cells:
        fixed = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False))
        say(f"{fixed}  {line[4]}".rstrip())
    if len(shown) < len(rows):
        say(f"… and {len(rows) - len(shown)} more")


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """How much a list of rows is: "3 items, 1.5 MiB"."""
    listed = list(rows)
    total = sum(int(row.get("bytes") or 0) for row in listed)
    return f"{format_count(len(listed), 'item')}, {format_bytes(total)}"


class WorkProgress:
    """Shows how far long work is: a bar on a terminal, now and then a line elsewhere.

    Use as a context manager and call `update`. Everything goes to standard error.
    """

    def __init__(self, verb: str) -> None:
        """`verb` says what is being done ("flushing")."""
        self._verb = verb
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[amount]}", markup=False),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(verb, total=None, amount="")

    def __enter__(self) -> WorkProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(
        self, files_left: int, bytes_left: int, bytes_done: int, hindrance: str = ""
    ) -> None:
        """What is left and what is done by now, and why it does not go on if it does not."""
        amount = f"{format_count(files_left, 'file')}, {format_bytes(bytes_left)} left"
        if hindrance:
            amount += f" ({one_line(hindrance)})"
        if self._bar is not None:
            self._bar.update(
                self._task, completed=bytes_done, total=bytes_done + bytes_left, amount=amount
            )
            return
        now = time.monotonic()
        if now - self._last_line >= PLAIN_INTERVAL:
            self._last_line = now
            note(f"{self._verb}: {amount}, {format_bytes(bytes_done)} done")


def _cells(row: Mapping[str, Any]) -> list[str]:
    name = printable(str(row.get("path", "")))
    reason = one_line(str(row.get("reason") or ""))
    return [
        str(row.get("state", "")),
        str(row.get("kind", "")),
        format_bytes(int(row.get("bytes") or 0)),
        format_seconds(float(row.get("age_seconds") or 0)),
        f"{name}  ({reason})" if reason else name,
    ]


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        members: dict[str, Any] = {}
        for key, member in value.items():
            if isinstance(member, str):
                members.update(json_name(str(key), member))
            else:
                members[str(key)] = _strict(member)
        return members
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, str):
        return json_name("", value)[""]
    return value
