"""`python -m tests.bench`: measure and print the table (about six minutes on two cores)."""

from __future__ import annotations

import json
import os
import platform
import tempfile

import click
from rich.console import Console

from tests.bench.columns import Ceiling, Column, Native, WbCache
from tests.bench.mounting import BenchError
from tests.bench.peers import JuiceFS, Rclone, default_directory, ensure_peers
from tests.bench.report import as_json, print_report
from tests.bench.runner import Plan, run, workload_names

_DEFAULT = "native,ceiling,wbcache,wbcache-noxattr,rclone,juicefs"
_PEERS = {"rclone": Rclone, "juicefs": JuiceFS}


def _columns(names: list[str], peers_dir: str, console: Console) -> list[Column]:
    known: dict[str, Column] = {
        column.name: column
        for column in (
            Native(),
            Ceiling(),
            Ceiling(xattr=False),
            WbCache(),
            WbCache(xattr=False),
        )
    }
    if _PEERS.keys() & set(names):
        try:
            programs = ensure_peers(peers_dir)
        except BenchError as error:
            console.print(f"left out: rclone, juicefs: {error}", markup=False)
            names = [name for name in names if name not in _PEERS]
        else:
            known.update({name: make(programs) for name, make in _PEERS.items()})
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"no column {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in names]


@click.command()
@click.option("--rounds", default=5, show_default=True, help="how often each column is measured")
@click.option("--only", default="", help=f"workloads: {','.join(workload_names())}")
@click.option("--columns", default=_DEFAULT, show_default=True, help="also: ceiling-noxattr")
@click.option("--scale", default=1.0, show_default=True, help="multiplies every amount")
@click.option(
    "--write-back",
    default=3600,
    show_default=True,
    help="seconds every column holds back what it would send to its share",
)
@click.option(
    "--awake/--let-sleep",
    default=True,
    show_default=True,
    help="keep the processors from sleeping (as root)",
)
@click.option("--work-dir", default=tempfile.gettempdir, help="a directory on the disk to measure")
@click.option("--peers-dir", default=default_directory, help="where rclone and JuiceFS are kept")
@click.option("--json", "json_file", default="", help="write the results here, too")
def main(
    rounds: int,
    only: str,
    columns: str,
    scale: float,
    write_back: int,
    awake: bool,
    work_dir: str,
    peers_dir: str,
    json_file: str,
) -> None:
    """Measure the mount beside its ceiling, its peers and the bare disk."""
    console = Console(width=max(190, Console().width))
    wanted = frozenset(filter(None, only.split(",")))
    if strange := wanted - set(workload_names()):
        raise click.BadParameter(f"no workload {', '.join(sorted(strange))}", param_hint="--only")
    plan = Plan(rounds, scale, write_back, wanted, awake)
    chosen = _columns(columns.split(","), peers_dir, console)
    try:
        with console.status("starting") as status:
            results = run(chosen, plan, work_dir, status.update)
    except BenchError as error:
        raise click.ClickException(str(error)) from None
    print_report(results, console)
    if json_file:
        about = {
            "rounds": rounds,
            "scale": scale,
            "write_back": write_back,
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        }
        with open(json_file, "w", encoding="utf-8") as text:
            json.dump(as_json(results, **about), text, indent=2)


if __name__ == "__main__":
    main()
