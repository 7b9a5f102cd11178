"""Asking a file system that may never answer.

A thread would not do: one that is stuck in the kernel keeps its whole process from ending, and with
it the shell that waits for the command. So the question is put by a child process, which is left
behind if it gets no answer.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class ProbeTimeoutError(Exception):
    """No answer came within the deadline."""


def within(deadline: float, ask: Callable[[], T]) -> T:
    """What `ask` returns or raises, in a child process; ProbeTimeoutError after `deadline` seconds.

    The answer must be picklable. The child has none of the caller's descriptors, so nobody waits
    for the end of a pipe that it inherited. Call it before starting threads.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(sending, ask)
    os.close(sending)
    try:
        answer = _read_all(receiving, time.monotonic() + deadline)
    except ProbeTimeoutError:
        os.kill(child, signal.SIGKILL)
        _reap(child, os.WNOHANG)
        raise
    finally:
        os.close(receiving)
    _reap(child, 0)
    if not answer:
        raise ProbeTimeoutError("the probing process ended without an answer")
    succeeded, value = pickle.loads(answer)
    if succeeded:
        return value  # type: ignore[no-any-return]
    raise value


def _answer(sending: int, ask: Callable[[], T]) -> None:
    """In the child: answer and end, without running anything the parent meant to run at its end."""
    try:
        os.dup2(sending, 3)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        try:
            answer = pickle.dumps((True, ask()))
        except Exception as error:
            answer = pickle.dumps((False, error))
        while answer:
            answer = answer[os.write(3, answer) :]
    finally:
        os._exit(0)


def _reap(child: int, options: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, options)


def _read_all(receiving: int, end: float) -> bytes:
    answer = b""
    while True:
        readable, _, _ = select.select([receiving], [], [], max(0.0, end - time.monotonic()))
        if not readable:
            raise ProbeTimeoutError("no answer in time")
        chunk = os.read(receiving, 65536)
        if not chunk:
            return answer
        answer += chunk
