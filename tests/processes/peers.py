"""Other processes, which a test tells what to do.

    with Peer(work) as peer:
        peer.tell("go on")
        assert peer.hear() == "done"

``work`` runs in a forked process with its end of the line: ``line.send`` and ``line.recv`` carry
anything that can be pickled. What it returns, or the name of the errno it raises, is sent last.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tests.posix.parity import attempt
from tests.waiting import wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

DEADLINE = 30.0

_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Peer:
    """A process that runs one function; at the end of the block it is killed.

    It has none of the test's descriptors but those in ``keep``, under the same numbers.
    """

    def __init__(self, work: Callable[[Connection], object], *, keep: Iterable[int] = ()) -> None:
        self._line, theirs = multiprocessing.Pipe()
        self.status: int | None = None
        """Its exit code, or minus the signal that ended it; None while it runs."""
        self.pid = os.fork()
        if not self.pid:
            _run(work, theirs, keep)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.status is None:
            self.signal(signal.SIGKILL)
            self.end()
        self._line.close()

    def tell(self, what: object = None) -> None:
        """Send it something."""
        self._line.send(what)

    def hear(self, deadline: float = DEADLINE) -> Any:
        """The next thing that it sends. Raises AssertionError when nothing comes."""
        assert self._line.poll(deadline), f"process {self.pid} says nothing for {deadline:g} s"
        try:
            return self._line.recv()
        except EOFError:
            raise AssertionError(f"process {self.pid} ended without an answer") from None

    @property
    def has_spoken(self) -> bool:
        """Whether something can be heard at once."""
        return self._line.poll(0)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def end(self, deadline: float = DEADLINE) -> int:
        """Wait until it has ended; its `status`."""
        wait_until(self._has_ended, f"process {self.pid} ends", deadline)
        assert self.status is not None
        return self.status

    def _has_ended(self) -> bool:
        if self.status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def waits_for_lock(self) -> None:
        """Wait until it is blocked in a call that waits for a lock."""
        wait_until(self._is_locked_out, f"process {self.pid} waits for a lock")

    def _is_locked_out(self) -> bool:
        where = Path(f"/proc/{self.pid}/wchan").read_text()
        return any(name in where for name in ("locks_lock", "setlk", "lock_file"))


def _run(work: Callable[[Connection], object], line: Connection, keep: Iterable[int]) -> None:
    """In the child: nothing of the test's own is run at its end."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        low = 3
        for kept in (*sorted({line.fileno(), *keep}), os.sysconf("SC_OPEN_MAX")):
            os.closerange(low, kept)
            low = kept + 1
        with contextlib.suppress(EOFError, BrokenPipeError):
            line.send(attempt(work, line))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def elsewhere(work: Callable[[], object], *, keep: Iterable[int] = ()) -> Any:
    """What something gives in another process, or the name of the errno that it raises there."""
    with Peer(lambda line: work(), keep=keep) as peer:
        return peer.hear()
