"""One slow call that serves everybody who asked for it before it began."""

from __future__ import annotations

import errno
from collections.abc import Callable

import trio


class _Run:
    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: BaseException | None = None


class SharedCall:
    """A blocking call, made in a thread and never twice at a time."""

    def __init__(self, call: Callable[[], None], lane: trio.CapacityLimiter) -> None:
        self._call = call
        self._lane = lane
        self._running: _Run | None = None

    async def run(self) -> None:
        """Return when a call that began after this was asked for has ended. Raises OSError."""
        running = self._running
        if running is not None:
            # It may have begun too early for us, so only the next one counts.
            await running.done.wait()
            later = self._running
            if later is not None:
                await later.done.wait()
                if later.error is not None:
                    raise OSError(errno.EIO, "a shared call failed") from later.error
                return
        self._running = mine = _Run()
        try:
            await trio.to_thread.run_sync(self._call, limiter=self._lane)
        except BaseException as error:
            mine.error = error
            raise
        finally:
            self._running = None
            mine.done.set()
