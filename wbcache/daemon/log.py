"""The daemon's log: one line a message, in a bounded part of the cache's disk.

A share that fails fails for every file that waits for it, again and again, and the log lies where
the bytes of those files are: it must not be what fills the disk (contract 7).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler

from wbcache.escaping import one_line

NAME = "daemon.log"
OLDER_NAME = NAME + ".1"
MAX_BYTES = 8 << 20
"""Of the log; as much is kept of what came before."""
A_MINUTE = 200
"""Messages of one kind that are written in a minute; the rest are counted."""


class _OneLine(logging.Formatter):
    """A line for each message, whatever names it holds; tracebacks follow on lines of their own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        left_out = getattr(record, "left_out", 0)
        suffix = f" ({left_out} more like it came before and were left out)" if left_out else ""
        return one_line(super().formatMessage(record)) + suffix


class Sparing(logging.Filter):
    """Lets so many messages of one kind (one text before names are put in) through in a minute.

    How many were left out before it is with the next one that is let through (``left_out``).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._minutes: dict[tuple[str, str], tuple[int, int]] = {}
        """For each kind: the minute, and how many came in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is written."""
        kind, minute = (record.name, str(record.msg)), int(self._clock() // 60)
        last, count = self._minutes.get(kind, (minute, 0))
        record.left_out = 0
        if last != minute:
            record.left_out, count = max(0, count - A_MINUTE), 0
        self._minutes[kind] = (minute, count + 1)
        return count < A_MINUTE


class _Rotating(RotatingFileHandler):
    """A log of bounded size, where the stacks of threads go as well (SIGUSR1, and a crash)."""

    def __init__(self, path: str) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, errors="backslashreplace")
        self._hand_on()

    def doRollover(self) -> None:
        """Begin a new file."""
        super().doRollover()
        self._hand_on()

    def _hand_on(self) -> None:
        assert self.stream is not None, "it is opened at once"
        descriptor = self.stream.fileno()
        faulthandler.enable(descriptor)
        faulthandler.register(signal.SIGUSR1, descriptor)


def log_into(cache_dir: str, *, foreground: bool) -> None:
    """Have everything logged into a file of the cache directory; in the foreground, to the
    terminal as well."""
    handlers: list[logging.Handler] = [_Rotating(os.path.join(cache_dir, NAME))]
    if foreground:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.addFilter(Sparing())
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
