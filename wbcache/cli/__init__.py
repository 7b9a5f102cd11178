"""The `wbcache` command. It reaches daemons only through `control.client`.

Every error is one line on standard error, and its exit code is the error's.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence

import click

from wbcache import __version__
from wbcache.cli import output
from wbcache.cli.conflicts import conflicts
from wbcache.cli.flush import flush
from wbcache.cli.mount import mount
from wbcache.cli.recover import recover
from wbcache.cli.status import pending, status
from wbcache.cli.umount import umount
from wbcache.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError, WbcacheError
from wbcache.processes import hold_standard_streams, speak_utf8

__all__ = ["command", "main", "run"]


@click.group(
    "wbcache",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=False,
)
@click.version_option(__version__, prog_name="wbcache")
def command() -> None:
    """A write-back cache for slow network shares: writes are acknowledged by the local disk."""


for _subcommand in (mount, umount, status, flush, pending, conflicts, recover):
    command.add_command(_subcommand)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `wbcache` program. Always raises SystemExit."""
    speak_utf8("wbcache.cli")
    sys.exit(run(lambda: command.main(arguments, "wbcache", standalone_mode=False)))


def run(work: Callable[[], object]) -> int:
    """Do a command's work; its exit code, with the error printed if there was one."""
    hold_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not end the listing it is in.
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    try:
        result = work()
        # In this mode click returns the code of --help and --version instead of raising it.
        return result if isinstance(result, int) else EXIT_OK
    except WbcacheError as error:
        output.note(str(error))
        return error.exit
    except click.ClickException as error:
        output.note(f"{error.format_message().rstrip('.')}; see 'wbcache --help'")
        return UsageError.exit_code
    except (KeyboardInterrupt, click.Abort):
        output.note("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("WBCACHE_DEBUG"):
            traceback.print_exc()
        output.note(
            f"unexpected error: {type(error).__name__}: {error}; "
            "set WBCACHE_DEBUG=1 to see where it comes from"
        )
        return WbcacheError.exit_code
