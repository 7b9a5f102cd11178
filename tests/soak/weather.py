"""What happens to the share: a random succession of faults, from a seed, with a record of it."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable

from tests.faultshare.client import FaultShare

PASSING = [errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.ENOTCONN, errno.EBUSY]
"""Errors that may be gone at the next try. Of EAGAIN as the answer to a setxattr the kernel makes
EOPNOTSUPP, which may not."""

REFUSED = [errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG]
"""Errors for which something is set aside until it is flushed again."""

REFUSABLE = ["create", "open", "write", "rename", "link", "unlink", "mkdir", "rmdir", "symlink"]
"""Attributes that are refused stay here for good, so that the share would differ."""

CALLS = [
    *("create", "open", "write", "fsync", "flush", "read", "truncate", "utimens", "chmod"),
    *("lookup", "getattr", "opendir", "readdir", "rename", "link", "unlink", "mkdir", "rmdir"),
    *("symlink", "setxattr", "getxattr", "statfs"),
]

RECORD = 40
"""Changes of the weather that are shown when something is wrong."""


class Weather:
    """The condition of a share."""

    def __init__(self, share: FaultShare, random_: random.Random) -> None:
        self._share = share
        self._random = random_
        self._begun = time.monotonic()
        self._record: list[str] = []
        self.changes = 0
        self._kinds: dict[str, Callable[[], str]] = {
            "fair": self._fair,
            "slow": self._slow,
            "narrow": self._narrow,
            "hang": self._hang,
            "release": self._release,
            "errors": self._errors,
            "refusals": self._refusals,
            "lost_answers": self._lost_answers,
            "disconnect": self._disconnect,
            "full": self._full,
        }

    def change(self) -> None:
        """Something else happens; what was the matter before may go on."""
        kind = self._random.choice(list(self._kinds))
        self.note(self._kinds[kind]())
        self.changes += 1

    def clear(self) -> None:
        """The share is well again, and calls that hung are carried out."""
        self.note(self._fair())

    def note(self, text: str) -> None:
        """Add a line to the record."""
        self._record.append(f"{time.monotonic() - self._begun:8.2f} s  {text}")

    def record(self) -> str:
        """What happened lately."""
        return "\n".join(self._record[-RECORD:])

    # -- kinds ---------------------------------------------------------------------------------

    def _calls(self) -> list[str] | None:
        chosen: list[list[str] | None] = [None, ["mutations"], ["names"], ["write", "fsync"]]
        return self._random.choice([*chosen, self._random.sample(CALLS, 3)])

    def _fair(self) -> str:
        self._share.reconnect()
        self._share.clear()
        return "fair"

    def _slow(self) -> str:
        latency, jitter = self._random.choice([1, 5, 30, 80]), self._random.choice([0, 20])
        self._share.set(latency_ms=latency, jitter_ms=jitter)
        return f"slow: {latency} ms a call and up to {jitter} ms more"

    def _narrow(self) -> str:
        iops, bandwidth = self._random.choice([100, 500, 0]), self._random.choice([2, 20, 0])
        self._share.set(iops=iops, bandwidth_mb=bandwidth)
        return f"narrow: {iops} calls a second, {bandwidth} MB/s (0: any)"

    def _hang(self) -> str:
        calls, after = self._calls(), self._random.random() < 0.4
        times = self._random.choice([None, None, 1, 3])
        self._share.hang(calls, times=times, after=after)
        return f"hang: {calls or 'all calls'}, {times or 'any number'}, after the effect: {after}"

    def _release(self) -> str:
        late = self._random.random() < 0.7
        count = self._share.release(late=late)
        return f"release: {count} calls, carried out: {late}"

    def _errors(self) -> str:
        calls, code = self._calls(), self._random.choice(PASSING)
        probability = self._random.choice([0.05, 0.3, 1.0])
        seed = self._random.getrandbits(16)
        self._share.fail(calls, code, probability=probability, seed=seed)
        return f"errors: {errno.errorcode[code]} of {calls or 'all calls'}, {probability:g}"

    def _refusals(self) -> str:
        calls, code = self._random.sample(REFUSABLE, 3), self._random.choice(REFUSED)
        probability = self._random.choice([0.05, 0.3])
        seed = self._random.getrandbits(16)
        # Where the id file lies nothing is refused: there would be no mount.
        self._share.fail(calls, code, match="w*", probability=probability, seed=seed)
        return f"refusals: {errno.errorcode[code]} of {calls}, {probability:g}"

    def _lost_answers(self) -> str:
        calls, code = self._calls(), self._random.choice([errno.EIO, errno.ETIMEDOUT])
        probability = self._random.choice([0.05, 0.3])
        seed = self._random.getrandbits(16)
        self._share.fail(calls, code, probability=probability, after=True, seed=seed)
        return f"lost answers: {errno.errorcode[code]} of {calls or 'all calls'}, {probability:g}"

    def _disconnect(self) -> str:
        if self._random.random() < 0.5:
            stale = self._random.random() < 0.5
            count = self._share.reconnect(stale_handles=stale)
            return f"reconnect: {count} stale handles"
        self._share.disconnect()
        return "disconnect"

    def _full(self) -> str:
        code = self._random.choice([errno.ENOSPC, errno.EDQUOT])
        room = self._random.choice([0, 50_000, 2_000_000])
        self._share.quota(0)
        used, _ = self._share.usage()
        self._share.quota(used + room, errno=code)
        return f"full: {errno.errorcode[code]} with {room} more bytes"
