"""`wbcache recover`: lay out what a cache directory holds, with no share and no daemon."""

from __future__ import annotations

import os

import click

from wbcache.cli import output
from wbcache.errors import RecoverError, RemainsError
from wbcache.escaping import one_line, printable
from wbcache.mounts import canonical, is_below
from wbcache.recovered import PendingChange, RecoveredFile, RecoverReport


@click.command("recover")
@click.argument("cache_dir")
@click.option("--to", "target", metavar="DIR", required=True, help="An empty or new directory.")
@click.option("--json", "as_json", is_flag=True, help="Print the files as JSON.")
def recover(cache_dir: str, target: str, as_json: bool) -> None:
    """Write the files in CACHE_DIR that are not on the share to DIR, under their own names.

    Exits with 3 when some of them are incomplete or in doubt; they are listed.
    """
    cache_dir, target = canonical(cache_dir), canonical(target)
    _check_target(cache_dir, target)
    from wbcache.recover import recover as recover_files

    with output.WorkProgress("recovering") as progress:
        report = recover_files(
            cache_dir, target, lambda done, total: progress.update(0, total - done, done)
        )
    if as_json:
        found = {kind: [_row(file) for file in files] for kind, files in _kinds(report)}
        output.say_json(found | {"pending": [_change(change) for change in report.pending]})
    else:
        _say(report, target)
    if report.incomplete or report.torn:
        raise RemainsError(
            cache_dir,
            f"{len(report.incomplete)} files are incomplete and {len(report.torn)} in doubt",
            "compare them with the share before you use them",
        )


def _check_target(cache_dir: str, target: str) -> None:
    if not os.path.isdir(cache_dir):
        raise RecoverError(cache_dir, "is not a directory", "name the cache directory of a mount")
    if is_below(target, cache_dir):
        raise RecoverError(target, "is inside the cache directory", "name a directory elsewhere")
    try:
        if os.listdir(target):
            raise RecoverError(target, "is not empty", "name an empty or a new directory")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RecoverError(target, f"cannot be used ({error.strerror})") from None


def _say(report: RecoverReport, target: str) -> None:
    for kind, files in _kinds(report)[1:]:
        for file in files:
            reason = f"  ({one_line(file.reason)})" if file.reason else ""
            output.say(f"{kind}  {printable(file.path)}{reason}")
    for change in report.pending:
        output.say(f"to be done on the share  {printable(change.path)}  ({change.change})")
    total = sum(file.bytes for file in report.written)
    output.say(
        f"{len(report.written)} files, {output.format_bytes(total)}, written to {printable(target)}"
    )


def _kinds(report: RecoverReport) -> list[tuple[str, list[RecoveredFile]]]:
    return [
        ("written", report.written),
        ("incomplete", report.incomplete),
        ("torn", report.torn),
    ]


def _change(change: PendingChange) -> dict[str, object]:
    return {"path": change.path.decode("utf-8", "surrogateescape"), "change": change.change}


def _row(file: RecoveredFile) -> dict[str, object]:
    return {"path": file.path.decode("utf-8", "surrogateescape"), "bytes": file.bytes} | (
        {"reason": file.reason} if file.reason else {}
    )
