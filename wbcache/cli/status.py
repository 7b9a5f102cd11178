"""`wbcache status` and `wbcache pending`: what is mounted, and what is not on the share yet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.live import Live
from rich.text import Text

from wbcache.cli import output
from wbcache.cli.locate import mount_containing, only_mount
from wbcache.control import registry
from wbcache.control.client import ControlClient
from wbcache.control.registry import MountRecord
from wbcache.errors import NoSuchMountError
from wbcache.escaping import one_line, printable
from wbcache.mounts import read_mounts

WATCH_INTERVAL = 1.0
STATUS_DEADLINE = 5.0
MAX_EVENTS = 5


@click.command("status")
@click.argument("mountpoint", required=False)
@click.option("--json", "as_json", is_flag=True, help="An object, or without MOUNTPOINT a list.")
@click.option("--watch", is_flag=True, help="Show it again every second until interrupted.")
def status(mountpoint: str | None, as_json: bool, watch: bool) -> None:
    """Show what is mounted and how much is not on the share yet."""
    if not watch:
        _show(_collect(mountpoint), mountpoint, as_json)
        return
    if as_json or not sys.stdout.isatty():
        while True:
            _show(_collect(mountpoint), mountpoint, as_json)
            time.sleep(WATCH_INTERVAL)
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            text = "\n".join(_lines(_collect(mountpoint)))
            live.update(Text(text), refresh=True)
            time.sleep(WATCH_INTERVAL)


@click.command("pending")
@click.argument("mountpoint", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def pending(mountpoint: str | None, as_json: bool) -> None:
    """List what is not on the share yet, and why."""
    record = only_mount() if mountpoint is None else mount_containing(mountpoint)
    rows = ControlClient(record.cache_dir).pending()
    if as_json:
        output.say_json(rows)
    elif rows:
        output.say_rows(rows)
    else:
        output.note("everything is on the share")


def _collect(mountpoint: str | None) -> list[Mapping[str, Any]]:
    """The state of one mount, which must be running, or of all that are known."""
    if mountpoint is not None:
        return [_ask(mount_containing(mountpoint))]
    states = []
    known = registry.records()
    for record in known:
        try:
            states.append(_ask(record))
        except NoSuchMountError as error:
            states.append({**record.__dict__, "errors": [str(error)]})
    recorded = {record.mountpoint for record in known}
    for entry in read_mounts():
        if entry.is_wbcache and entry.mountpoint not in recorded:
            text = "no daemon is registered for this mount"
            states.append(
                {"mountpoint": entry.mountpoint, "source": entry.source, "errors": [text]}
            )
    return states


def _ask(record: MountRecord) -> Mapping[str, Any]:
    return ControlClient(record.cache_dir, answer_deadline=STATUS_DEADLINE).status()


def _show(states: list[Mapping[str, Any]], mountpoint: str | None, as_json: bool) -> None:
    if as_json:
        output.say_json(states if mountpoint is None else states[0])
        return
    for line in _lines(states):
        output.say(line)


def _lines(states: list[Mapping[str, Any]]) -> Iterator[str]:
    if not states:
        yield "nothing is mounted"
    for index, state in enumerate(states):
        if index:
            yield ""
        yield printable(str(state["mountpoint"]))
        for title, text in _facts(state):
            yield f"  {title:<12} {text}"


def _facts(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines about one mount; what this version does not know of is left to `--json`."""
    for key, title in (("source", "share"), ("cache_dir", "cache")):
        if key in state:
            yield title, printable(str(state[key]))
    if "pid" in state:
        yield "daemon", f"pid {state['pid']}"
    if state.get("mounted") is False:
        yield "unmounted", "yes; the daemon ends when everything is flushed"
    if state.get("read_only"):
        yield "read-only", "yes"
    share = state.get("share")
    if isinstance(share, Mapping):
        yield "share is", _share_text(share)
    if "dirty_files" in state:
        yield "unflushed", _unflushed_text(state)
    if state.get("flushed_bytes"):
        yield "flushed", f"{output.format_bytes(state['flushed_bytes'])} since it was mounted"
    if state.get("conflicts"):
        yield "conflicts", f"{state['conflicts']}; 'wbcache conflicts' lists them"
    for error in state.get("errors", []):
        yield "error", _error_text(error)
    for event in list(state.get("events", []))[-MAX_EVENTS:]:
        yield "event", _error_text(event)


def _share_text(share: Mapping[str, Any]) -> str:
    text = printable(str(share.get("state", "unknown")))
    if share.get("latency_ms"):
        text += f", {share['latency_ms']} ms a call"
    if share.get("problem"):
        text += f", not used: {printable(str(share['problem']))}"
    if share.get("silent_seconds"):
        text += f", silent for {output.format_seconds(float(share['silent_seconds']))}"
    if share.get("calls_given_up"):
        text += f", {output.format_count(share['calls_given_up'], 'call')} without an answer"
    if share.get("full"):
        text += ", full"
    if share.get("order_suspended"):
        text += ", order suspended"
    return text


def _unflushed_text(state: Mapping[str, Any]) -> str:
    files, size = int(state["dirty_files"]), int(state.get("dirty_bytes") or 0)
    if not files and not size:
        return "nothing"
    oldest = output.format_seconds(float(state.get("oldest_dirty_seconds") or 0))
    text = f"{output.format_count(files, 'file')}, {output.format_bytes(size)}, oldest {oldest}"
    return f"{text}, {state['flushing']} on their way" if state.get("flushing") else text


def _error_text(error: object) -> str:
    """One line of an error or event, given as text or as members."""
    if not isinstance(error, Mapping):
        return one_line(str(error))
    parts = []
    for key, part in error.items():
        if key == "path":
            parts.append(printable(str(part)))
        elif key == "time":
            parts.append(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(part))))
        elif part not in (None, ""):
            parts.append(one_line(str(part)))
    return ": ".join(parts)
