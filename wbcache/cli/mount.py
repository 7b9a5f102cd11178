"""`wbcache mount`: start a daemon and wait until its mount answers."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

import click

from wbcache import config
from wbcache.cli import output
from wbcache.errors import DaemonStartError, ReportedError
from wbcache.escaping import printable
from wbcache.options import parse_options

START_DEADLINE = 90.0
"""Seconds until the daemon must have said something; its own checks give up long before."""


@click.command("mount")
@click.argument("source")
@click.argument("mountpoint")
@click.option("--cache-dir", metavar="DIR", help="Where unflushed data is kept, on a local disk.")
@click.option("--config", "config_path", metavar="FILE", help="Settings in YAML.")
@click.option("--foreground", is_flag=True, help="Stay in the foreground until unmounted.")
@click.option("--rebind", is_flag=True, help="Use the cache though it belongs to another share.")
@click.option(
    "-o", "options", metavar="OPTION,…", multiple=True, help="Mount options, such as ro or noexec."
)
def mount(
    source: str,
    mountpoint: str,
    cache_dir: str | None,
    config_path: str | None,
    foreground: bool,
    rebind: bool,
    options: tuple[str, ...],
) -> None:
    """Mount the network directory SOURCE at MOUNTPOINT, with every write kept locally first.

    MOUNTPOINT is an empty directory, or SOURCE itself, which then keeps its path. Returns when the
    mount answers; the daemon goes on in the background.
    """
    joined = ",".join((*options, *(["rebind"] if rebind else [])))
    # Found wrong here, a mistake costs no daemon.
    parse_options(joined)
    config.load(config_path)
    arguments = [sys.executable, "-m", "wbcache.daemon"]
    if cache_dir is not None:
        arguments += ["--cache-dir", os.path.abspath(cache_dir)]
    if config_path is not None:
        arguments += ["--config", os.path.abspath(config_path)]
    if joined:
        arguments += ["--mount-options", joined]
    paths = ["--", os.path.abspath(source), os.path.abspath(mountpoint)]
    if foreground:
        os.chdir("/")
        os.execv(sys.executable, arguments + paths)
    ready = _start(arguments, paths)
    for warning in ready.get("warnings", []):
        output.note(f"warning: {warning}")
    cache = ready.get("cache_dir")
    where = f", cache in {printable(cache)}" if cache else ""
    output.say(f"{printable(paths[1])} is mounted on {printable(paths[2])}{where}")


def _start(arguments: list[str], paths: list[str]) -> dict[str, Any]:
    """Start the daemon; its first message. Raises what it reports, or DaemonStartError."""
    receiving, sending = os.pipe()
    # Whatever it prints before its own log is open would otherwise be lost.
    with tempfile.TemporaryFile() as printed, os.fdopen(receiving, "rb") as ready:
        try:
            daemon = subprocess.Popen(
                [*arguments, "--ready-fd", str(sending), *paths],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=[sending],
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(sending)
        try:
            line = _first_line(ready, time.monotonic() + START_DEADLINE)
        except BaseException:
            daemon.terminate()
            raise
        if not line:
            status = daemon.wait()
            raise DaemonStartError("the daemon", f"ended with status {status}", _last_line(printed))
    # It outlives this command, which is not its keeper.
    daemon.returncode = 0
    message: dict[str, Any] = json.loads(line)
    if message.get("ready") is not True:
        raise ReportedError(str(message.get("error")), int(message.get("exit", 1)))
    return message


def _first_line(ready: IO[bytes], end: float) -> bytes:
    """The daemon's line, or nothing if it ended without one."""
    received = b""
    while not received.endswith(b"\n"):
        readable, _, _ = select.select([ready], [], [], max(0.0, end - time.monotonic()))
        if not readable:
            raise DaemonStartError(
                "the daemon",
                f"was not ready after {START_DEADLINE:g} s",
                "look into daemon.log in the cache directory",
            )
        chunk = os.read(ready.fileno(), 65536)
        if not chunk:
            return b""
        received += chunk
    return received


def _last_line(printed: IO[bytes]) -> str:
    printed.seek(0)
    lines = printed.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "look into daemon.log in the cache directory"
