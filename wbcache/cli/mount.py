"""`wbcache mount`: start a daemon and wait until its mount answers."""

from __future__ import annotations

import os
import sys

import click

from wbcache import config
from wbcache.cli import output
from wbcache.cli.launch import start_daemon
from wbcache.escaping import printable
from wbcache.mounts import current_directory
from wbcache.options import parse_options


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
    arguments = [sys.executable, "-X", "utf8", "-m", "wbcache.daemon"]
    if cache_dir is not None:
        arguments += ["--cache-dir", _absolute(cache_dir)]
    if config_path is not None:
        arguments += ["--config", _absolute(config_path)]
    if joined:
        arguments += ["--mount-options", joined]
    paths = ["--", _absolute(source), _absolute(mountpoint)]
    if foreground:
        os.chdir("/")
        os.execv(sys.executable, arguments + paths)
    ready = start_daemon(arguments, paths)
    for warning in ready.get("warnings", []):
        output.note(f"warning: {warning}")
    cache = ready.get("cache_dir")
    where = f", cache in {printable(cache)}" if cache else ""
    output.say(f"{printable(paths[1])} is mounted on {printable(paths[2])}{where}")


def _absolute(path: str) -> str:
    """The path from the root. Where `..` follows a link, only the kernel knows what it means."""
    path = path if path.startswith("/") else os.path.join(current_directory(), path)
    return path if ".." in path.split("/") else os.path.normpath(path)
