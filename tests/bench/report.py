"""Medians, ratios and the verdict on each target, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.runner import Results, workload_names

_MEASURED = "wbcache"
_CEILING = "ceiling"
_PEERS = ("rclone", "juicefs")
_QUIET = 0.5

_LABELS = {
    "write_1m": "write, 1 MiB calls (MiB/s)",
    "write_64k": "write, 64 KiB calls (MiB/s)",
    "append_180": "append 180 B, held open (/s)",
    "append_fsync": "append 180 B + fsync (/s)",
    "reopen": "open, append 180 B, close (/s)",
    "create": "create + 4 KiB + close (/s)",
    "stat": "stat, hot (/s)",
    "listdir": "list 1,000 files (/s)",
    "rename": "rename (/s)",
    "unlink": "unlink (/s)",
    "read_cold": "read, cold (MiB/s)",
    "read_warm": "read, again (MiB/s)",
}


@dataclass(frozen=True)
class Target:
    """`column` must reach `least` times the best of `others` on `workload`."""

    workload: str
    others: tuple[str, ...]
    least: float
    column: str = _MEASURED

    def text(self) -> str:
        """One line, as a sentence would say it."""
        against = "the ceiling" if self.others == (_CEILING,) else " and ".join(self.others)
        best = "the better of " if len(self.others) > 1 else ""
        return f"{self.workload}: {self.column} at least {self.least:g} of {best}{against}"


TARGETS = (
    *(Target(name, (_CEILING,), 0.7) for name in ("reopen", "create", "rename", "unlink")),
    *(Target(name, (_CEILING,), 0.85) for name in ("write_1m", "write_64k", "append_180")),
    Target("reopen", _PEERS, 2.0),
    *(
        Target(name, _PEERS, 1.0)
        for name in ("create", "rename", "unlink", "write_1m", "write_64k")
    ),
    Target("append_180", ("juicefs",), 0.8, column="wbcache-noxattr"),
)


def median(results: Results, column: str, workload: str) -> float | None:
    """The median rate, or None where it was not measured."""
    rates = results.rates.get(column, {}).get(workload)
    return statistics.median(rates) if rates else None


def ratio(results: Results, workload: str, column: str, others: Iterable[str]) -> float | None:
    """Median of `column` over the best median of `others`; None where one is missing."""
    own = median(results, column, workload)
    against = [rate for other in others if (rate := median(results, other, workload))]
    return own / max(against) if own is not None and against else None


def print_report(results: Results, console: Console) -> None:
    """The table, what was left out, and the targets."""
    table = Table(title="median (least - most) of each column; more is better")
    table.add_column("", no_wrap=True)
    for title in results.titles.values():
        table.add_column(title, justify="right")
    table.add_column("wbcache / ceiling", justify="right")
    table.add_column("wbcache / best peer", justify="right")
    for workload in workload_names():
        cells = [_cell(results, column, workload) for column in results.titles]
        if any(cells):
            table.add_row(
                _LABELS[workload],
                *cells,
                _ratio_text(ratio(results, workload, _MEASURED, (_CEILING,))),
                _ratio_text(ratio(results, workload, _MEASURED, _PEERS)),
            )
    console.print(table)
    if not results.awake:
        console.print("The processors were free to sleep: expect small operations to vary by 2x.")
    if results.load_before > _QUIET:
        console.print(
            f"The machine was busy (load average {results.load_before:.1f} before the run): "
            "medians may be far off."
        )
    for problem in results.problems:
        console.print(f"left out: {problem}", markup=False)
    for target in TARGETS:
        found = ratio(results, target.workload, target.column, target.others)
        console.print(f"{_verdict(found, target.least):>12}  {target.text()}", markup=False)


def as_json(results: Results, **about: Any) -> dict[str, Any]:
    """Everything measured, the medians and the targets, for a program to read."""
    return {
        **about,
        "awake": results.awake,
        "load_before": results.load_before,
        "rates": results.rates,
        "medians": {
            column: {workload: median(results, column, workload) for workload in measured}
            for column, measured in results.rates.items()
        },
        "targets": [
            {
                "text": target.text(),
                "ratio": (found := ratio(results, target.workload, target.column, target.others)),
                "least": target.least,
                "met": None if found is None else found >= target.least,
            }
            for target in TARGETS
        ],
        "problems": results.problems,
    }


def _cell(results: Results, column: str, workload: str) -> str:
    rates = results.rates[column].get(workload)
    if not rates:
        return ""
    middle = statistics.median(rates)
    return (
        f"[bold]{_number(middle)}[/bold]\n[dim]{_number(min(rates))} - {_number(max(rates))}[/dim]"
    )


def _number(value: float) -> str:
    if value >= 100_000:
        return f"{value / 1000:,.0f} k"
    if value >= 10_000:
        return f"{value / 1000:.1f} k"
    return f"{value:,.0f}"


def _ratio_text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _verdict(found: float | None, least: float) -> str:
    if found is None:
        return "not measured"
    return f"{found:.2f} {'pass' if found >= least else 'FAIL'}"
