"""`wbcache conflicts`: what another writer of the share and we both changed, and what to keep."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import click

from wbcache.cli import output
from wbcache.cli.locate import mount_containing, only_mount
from wbcache.control.client import ControlClient, Row
from wbcache.control.registry import MountRecord
from wbcache.errors import NoSuchMountError, ResolveError
from wbcache.escaping import printable, to_bytes, to_text
from wbcache.mounts import canonical, mount_at, read_mounts


class _ListByDefault(click.Group):
    """A group in which anything but a command's name is for the command `list`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(
    "conflicts",
    cls=_ListByDefault,
    subcommand_metavar="[MOUNTPOINT] [--json] | resolve PATH… --keep ours|theirs|both",
)
def conflicts() -> None:
    """List what another writer of the share and we both changed, or say which side to keep.

    Both sides are kept until somebody decides. Renaming or removing the kept files by hand does as
    well: the conflict is not listed any more then.
    """


@conflicts.command("list")
@click.argument("mountpoint", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def list_conflicts(mountpoint: str | None, as_json: bool) -> None:
    """List the conflicts that nobody has dealt with (also without the word `list`)."""
    record = only_mount() if mountpoint is None else mount_containing(mountpoint)
    rows = _rows(record)
    if as_json:
        output.say_json(rows)
        return
    for row in rows:
        output.say(_line(row))
    if not rows:
        output.note("no conflicts")


@conflicts.command("resolve")
@click.argument("paths", metavar="PATH…", nargs=-1, required=True)
@click.option(
    "--keep",
    required=True,
    type=click.Choice(["ours", "theirs", "both"]),
    help="ours: our side gets the name; theirs: our side goes; both: they stay as they are.",
)
def resolve(paths: Sequence[str], keep: str) -> None:
    """Resolve the conflicts about PATHs (the names in dispute, or those of our kept copies).

    What is renamed or removed is so in the mount, and reaches the share like any other change.
    """
    for path in paths:
        directory, name = os.path.split(path.rstrip("/"))
        place = os.path.join(canonical(directory or "."), name)
        record = mount_containing(place)
        if mount_at(record.mountpoint, read_mounts()) is None:
            raise NoSuchMountError(
                path, "its mount is gone", "mount again with the same cache directory"
            )
        mentioned = os.fsencode(place)
        about = [
            row
            for row in _rows(record)
            if mentioned in [to_bytes(row[key]) for key in ("path", "ours") if row[key]]
        ]
        if not about:
            raise ResolveError(
                path, "no conflict is recorded for it", "'wbcache conflicts' lists them"
            )
        if keep == "ours" and len(about) > 1:
            raise ResolveError(
                path,
                f"{len(about)} versions of ours are kept",
                "name the one that is to have the name ('wbcache conflicts' lists them)",
            )
        for row in about:
            try:
                _settle(row, keep)
            except OSError as error:
                raise ResolveError(
                    path, f"cannot be done ({error.strerror})", "rename or remove it by hand"
                ) from None
        ControlClient(record.cache_dir).forget_conflicts([row["id"] for row in about])


def _rows(record: MountRecord) -> list[Row]:
    """The conflicts of a mount, with whole paths."""
    rows = ControlClient(record.cache_dir).conflicts()
    for row in rows:
        for key in ("path", "ours", "theirs"):
            if row[key] is not None:
                row[key] = to_text(os.path.join(os.fsencode(record.mountpoint), to_bytes(row[key])))
    return rows


def _settle(row: Row, keep: str) -> None:
    """Give the name to the side that is to keep it, through the mount."""
    path, ours = to_bytes(row["path"]), row["ours"] and to_bytes(row["ours"])
    if keep == "both":
        return
    if keep == "theirs":
        if row["theirs"] is None and row["kind"] != "removed there":
            raise _replaced_since(path)
        if ours is not None:
            _remove(ours)
    elif ours is None:
        _remove(path)
    elif ours != path:
        if row["ours_incomplete"]:
            raise ResolveError(
                printable(ours),
                "bytes of it were only on the share, and are gone",
                "'wbcache recover' lays out what is left",
            )
        if row["theirs"] is None and os.path.lexists(path):
            raise _replaced_since(path)
        os.rename(ours, path)


def _replaced_since(path: bytes) -> ResolveError:
    return ResolveError(
        printable(path),
        "theirs was replaced or removed there since",
        "rename or remove the kept copy by hand, or --keep both",
    )


def _remove(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        os.rmdir(path)
    else:
        os.unlink(path)


def _line(row: Row) -> str:
    """One line for a person: when, which name, and where either side is."""
    found = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(row["time"])))
    text = f"{found}  {printable(row['path'])}  "
    ours, theirs = _size(row["ours_bytes"]), _size(row["theirs_bytes"])
    if row["kind"] == "removed here":
        return text + f"removed here, changed on the share: theirs is kept{theirs}"
    if row["kind"] == "removed there":
        text += f"removed on the share, changed here: ours is kept{ours}"
    else:
        whose = f"theirs has the name{theirs}" if row["theirs"] else "theirs was replaced since"
        text += f"changed on both sides: {whose}, ours is {printable(row['ours'])}{ours}"
    return f"{text}, incomplete" if row["ours_incomplete"] else text


def _size(count: int | None) -> str:
    return "" if count is None else f" ({output.format_bytes(count)})"
