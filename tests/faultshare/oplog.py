"""The log of what the share was asked, in the order in which it took effect."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(slots=True)
class Op:
    """One call on the share.

    n: its number in the order of effect; numbers only grow, also across `OpLog.clear`.
    op: the name of the call, one of `tests.faultshare.faults.OPS`.
    path: the file it was about, relative to the root of the share, as it was named at that
        moment; undecodable bytes are surrogate escapes (`os.fsencode` gets them back).
    path2: the new name of a rename or link.
    node: identity of the file; hard links share it, a rename keeps it.
    offset, size: of reads and writes, in bytes; `size` of a read is what was returned, that of a
        readdir the number of entries.
    flags: of open, create and rename.
    errno: what the caller was told; 0 is success.
    effect: whether it was carried out. False with errno 0 is a write lost without a word, True
        with an errno a lost answer.
    unlinked: the file had no name any more; `path` is its last one.
    start, end: `time.monotonic` when it arrived and when it was answered; `end` is None while the
        answer is still under way.
    details: what else the call carried: mode, uid, gid, times, link target, xattr.
    data: where the written bytes lie in the data log, when there is one.
    mutation: it was meant to change what the share holds.
    """

    n: int
    op: str
    path: str
    path2: str | None = None
    node: int = 0
    offset: int = 0
    size: int = 0
    flags: int = 0
    errno: int = 0
    effect: bool = False
    unlinked: bool = False
    start: float = 0.0
    end: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
    data: int | None = None
    mutation: bool = False

    def as_row(self) -> list[Any]:
        """The fields as a JSON list; `from_row` reads it back."""
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def from_row(cls, row: list[Any]) -> Op:
        """The operation that `as_row` wrote."""
        return cls(*row)


class Counts(NamedTuple):
    """Totals since the start or the last clear: calls by name, bytes by direction."""

    calls: dict[str, int]
    bytes_read: int
    bytes_written: int


class OpLog:
    """Keeps the newest *limit* operations, and on request what is needed to replay them.

    With a *data_dir*, every written byte goes to a file there, beside a copy of the backing
    directory as it was when the log began, so that `tests.faultshare.replay` can rebuild every
    state in between.
    """

    def __init__(
        self, backing: bytes, *, data_dir: str | None = None, limit: int = 1_000_000
    ) -> None:
        self._backing = backing
        self._data_dir = data_dir
        self._ops: deque[Op] = deque(maxlen=limit)
        self._next = 1
        self._calls: Counter[str] = Counter()
        self._bytes_read = 0
        self._bytes_written = 0
        self._data_fd = -1
        self._data_size = 0
        self._generation = 0
        self.begin()

    @property
    def last(self) -> int:
        """The number of the newest operation, 0 before the first."""
        return self._next - 1

    @property
    def base(self) -> str | None:
        """The copy of the backing directory as it was when the log began."""
        return None if self._data_dir is None else f"{self._data_dir}/base-{self._generation}"

    @property
    def data(self) -> str | None:
        """The file that holds the written bytes."""
        return None if self._data_dir is None else f"{self._data_dir}/data-{self._generation}"

    def begin(self) -> None:
        """Forget everything logged so far; numbers go on."""
        self._ops.clear()
        self._calls.clear()
        self._bytes_read = self._bytes_written = 0
        if self._data_dir is None:
            return
        if self._data_fd >= 0:
            os.close(self._data_fd)
            shutil.rmtree(f"{self._data_dir}/base-{self._generation}")
            os.unlink(f"{self._data_dir}/data-{self._generation}")
        self._generation += 1
        os.makedirs(self._data_dir, exist_ok=True)
        base, data = self.base, self.data
        assert base is not None and data is not None
        # cp knows hard links, holes and xattrs; nothing may happen on the share meanwhile.
        subprocess.run(["cp", "-a", "--", os.fsdecode(self._backing), base], check=True)
        self._data_fd = os.open(data, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._data_size = 0

    def add(self, op: Op, written: bytes | None = None) -> Op:
        """Number *op* and append it; to be called in the same breath as its effect.

        written: the bytes of a write that took effect.
        """
        op.n = self._next
        self._next += 1
        self._calls[op.op] += 1
        if written is not None:
            self._bytes_written += len(written)
            if self._data_fd >= 0:
                op.data = self._data_size
                self._data_size += len(written)
                view = memoryview(written)
                while view:
                    view = view[os.write(self._data_fd, view) :]
        elif op.op == "read":
            self._bytes_read += op.size
        self._ops.append(op)
        return op

    def rows(self, since: int, limit: int) -> list[list[Any]]:
        """The rows of at most *limit* operations after number *since*, in order.

        Raises ValueError if some of them are no longer kept.
        """
        if not self._ops or since >= self.last:
            return []
        first = self._ops[0].n
        if since + 1 < first and len(self._ops) == self._ops.maxlen:
            raise ValueError(f"operations before {first} are gone from the log")
        start = max(0, since + 1 - first)
        return [op.as_row() for op in itertools.islice(self._ops, start, start + limit)]

    def counts(self) -> Counts:
        """Totals since the log began; complete even where old operations are gone."""
        return Counts(dict(self._calls), self._bytes_read, self._bytes_written)
