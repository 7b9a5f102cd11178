"""Steer and question a running fault share through its control socket, from synchronous code.

Calls are named as in `tests.faultshare.faults.OPS`, or by group: ``mutations``, ``setattr``
(truncate, chmod, chown, utimens), ``xattr``, ``names`` (lookup, getattr, opendir, readdir). *match*
is a glob over paths relative to the root of the share, see `tests.faultshare.faults.path_matches`.
"""

from __future__ import annotations

import errno as errno_
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tests.faultshare.faults import path_matches
from tests.faultshare.oplog import Counts, Op
from tests.faultshare.replay import Replica
from tests.faultshare.replay import states as replay_states

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class ShareError(Exception):
    """The share could not be started, or refused a command."""


class HungCall(NamedTuple):
    """A call that the share keeps.

    late: it has taken effect, only its answer is missing.
    rule: the number that `ShareClient.hang` returned.
    """

    op: str
    path: str
    since: float
    late: bool
    rule: int


class ShareClient:
    """Steers a running share through its control socket."""

    def __init__(self, control: str | os.PathLike[str]) -> None:
        self._control = os.fspath(control)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pending = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the share goes on."""
        with self._lock:
            self._hang_up()

    @property
    def pid(self) -> int:
        """The process that serves the share."""
        return int(self._ask("pid"))

    def _ask(self, cmd: str, **arguments: Any) -> Any:
        with self._lock:
            try:
                if self._socket is None:
                    self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    self._socket.settimeout(20)
                    self._socket.connect(self._control)
                self._socket.sendall(json.dumps({"cmd": cmd, **arguments}).encode() + b"\n")
                while b"\n" not in self._pending:
                    chunk = self._socket.recv(1 << 20)
                    if not chunk:
                        raise ConnectionResetError("it has ended")
                    self._pending += chunk
            except OSError as error:
                self._hang_up()
                raise ShareError(f"no answer from the share: {error}") from error
            line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if not answer["ok"]:
            raise ShareError(answer["error"])
        return answer["result"]

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._pending = b""

    # Speed and limits

    def set(
        self,
        *,
        latency_ms: float | None = None,
        jitter_ms: float | None = None,
        latency_by_op: dict[str, float] | None = None,
        iops: float | None = None,
        bandwidth_mb: float | None = None,
        name_max: int | None = None,
        mtime_resolution: float | None = None,
        read_only: bool | None = None,
    ) -> None:
        """Change some settings; the others stay.

        latency_ms: round trip of every call; half of it passes before the effect.
        jitter_ms: evenly distributed extra of at most this much.
        latency_by_op: calls with a round trip of their own, in ms; replaces the former table.
        iops: calls a second, 0 for any number.
        bandwidth_mb: 10^6 bytes a second, read and written together, 0 for any number.
        name_max: longer names are ENAMETOOLONG.
        mtime_resolution: seconds that time stamps are rounded down to.
        read_only: changes are EROFS.
        """
        settings = {name: value for name, value in locals().items() if name != "self"}
        self._ask("set", **{k: v for k, v in settings.items() if v is not None})

    def quota(
        self,
        bytes: int | None = None,
        inodes: int | None = None,
        *,
        errno: int = errno_.EDQUOT,
    ) -> None:
        """Limit what the share may hold; None is no limit. What is there now counts.

        Bytes are file sizes and link targets, hard links counted once; statfs answers accordingly.
        Changes made to the backing directory itself count from the next call of this method.
        """
        self._ask("quota", bytes=bytes, inodes=inodes, error=errno)

    def usage(self) -> tuple[int, int]:
        """Bytes and inodes that count against the quota; zeros without one."""
        used = self._ask("usage")
        return used[0], used[1]

    def lack(self, *capabilities: str, errno: int | None = None) -> None:
        """Take capabilities away until `clear`.

        symlink, link, mknod, chmod, chown, utimens (EPERM), xattr (EOPNOTSUPP), rename_flags
        (EINVAL), open_unlink (EBUSY: no removing or replacing of open files). *errno* is answered
        instead, if given. Beware of ENOSYS: the kernel remembers it until the share is unmounted.
        """
        self._ask("lack", capabilities=list(capabilities), error=errno)

    def freeze_statfs(self, frozen: bool = True) -> None:
        """Let statfs repeat the figures of this moment, or stop it."""
        self._ask("freeze_statfs", frozen=frozen)

    # Faults

    def hang(
        self,
        ops: Iterable[str] | None = None,
        match: str | None = None,
        *,
        times: int | None = None,
        after: bool = False,
    ) -> int:
        """Keep matching calls, all of them or the next *times*; returns the rule's number.

        From the moment this returns no matching call takes effect. With *after*, calls take effect
        and only their answers are kept. See `release`, `hung`, `wait_hung`.
        """
        names = None if ops is None else list(ops)
        return int(self._ask("hang", ops=names, match=match, times=times, after=after))

    def release(
        self, rule: int | None = None, *, late: bool = True, errno: int = errno_.EIO
    ) -> int:
        """End one hang or all; returns how many calls were waiting.

        late: those calls are carried out now and answered. Otherwise they are answered *errno*,
        and those that were kept before their effect never have one.
        """
        return int(self._ask("release", rule=rule, error=0 if late else errno))

    def hung(self) -> list[HungCall]:
        """The calls that are being kept, oldest first."""
        return [HungCall(*row) for row in self._ask("hung")]

    def wait_hung(
        self,
        op: str | None = None,
        match: str | None = None,
        *,
        count: int = 1,
        timeout: float = 10.0,
    ) -> list[HungCall]:
        """Wait until *count* such calls are being kept. Raises ShareError after *timeout* s."""

        def enough() -> list[HungCall] | None:
            calls = [c for c in self.hung() if _is(c.op, (c.path,), op, match)]
            return calls if len(calls) >= count else None

        return _wait(enough, timeout, f"{count} hung {op or 'call'}(s)")

    def fail(
        self,
        ops: Iterable[str] | None = None,
        errno: int = errno_.EIO,
        *,
        times: int | None = None,
        probability: float = 1.0,
        match: str | None = None,
        after: bool = False,
        seed: int = 0,
    ) -> int:
        """Fail matching calls with *errno*; returns the rule's number, for `clear`.

        times: only the next so many. probability: each with this chance, drawn from *seed*.
        after: a call takes effect all the same, only its answer is lost.
        """
        return int(
            self._ask(
                "fail",
                ops=None if ops is None else list(ops),
                error=errno,
                match=match,
                times=times,
                probability=probability,
                after=after,
                seed=seed,
            )
        )

    def lose(self, match: str | None = None, *, times: int | None = None) -> int:
        """Report success for writes that never happen; returns the rule's number."""
        return int(self._ask("lose", match=match, times=times))

    def disconnect(self, errno: int = errno_.ENOTCONN) -> None:
        """Answer every call with *errno*, at once. Calls that hang go on hanging."""
        self._ask("disconnect", error=errno)

    def reconnect(self, *, stale_handles: bool = False) -> int:
        """End a disconnect. With *stale_handles*, files open by now answer ESTALE.

        Returns how many handles that were.
        """
        return int(self._ask("reconnect", stale_handles=stale_handles))

    def clear(self, rule: int | None = None) -> None:
        """Remove one rule; or all faults, limits and delays, letting hung calls proceed."""
        self._ask("clear", rule=rule)

    # What happened

    def log(self, since: int = 0) -> list[Op]:
        """The operations after number *since*, in the order of their effects."""
        return self._log(since)[0]

    def _log(self, since: int) -> tuple[list[Op], str | None, str | None]:
        ops: list[Op] = []
        while True:
            page = self._ask("log", since=since)
            ops += map(Op.from_row, page["rows"])
            if not page["more"]:
                return ops, page["base"], page["data"]
            since = ops[-1].n

    def mark(self) -> int:
        """The number of the newest operation, to be given to `log` later."""
        return int(self._ask("mark"))

    def clear_log(self) -> int:
        """Forget all operations; numbers go on. Returns the number of the last one forgotten."""
        return int(self._ask("clear_log"))

    def wait_for(
        self,
        op: str | None = None,
        match: str | None = None,
        *,
        since: int = 0,
        errno: int | None = 0,
        timeout: float = 10.0,
    ) -> Op:
        """Wait until such an operation is in the log and answered *errno* (None: anything).

        Raises ShareError after *timeout* seconds.
        """

        def found() -> Op | None:
            for o in self.log(since):
                paths = (o.path,) if o.path2 is None else (o.path, o.path2)
                if errno in (None, o.errno) and _is(o.op, paths, op, match):
                    return o
            return None

        return _wait(found, timeout, f"{op or 'any call'} on {match or 'anything'}")

    def counts(self) -> Counts:
        """Calls by name and bytes by direction since the log began."""
        return Counts(**self._ask("counts"))

    def written(self, since: int = 0) -> Counter[str]:
        """Bytes written by path (as it was at the time of each write)."""
        total: Counter[str] = Counter()
        for op in self.log(since):
            if op.op == "write" and op.effect:
                total[op.path] += op.size
        return total

    def states(self, into: str | os.PathLike[str]) -> Iterator[tuple[Op | None, Path]]:
        """Rebuild in *into* (must not exist) what the share held, step by step.

        Yields the directory as it was when the log began, with None, and again after every
        operation that changed it, with that operation. The same directory is reused: look at it
        before going on. The share must log data, and nothing but calls on the share may have
        changed the backing directory.
        """
        ops, replica = self._replica(Path(into))
        return replay_states(replica, Path(into), ops)

    def replay(self, into: str | os.PathLike[str], upto: int | None = None) -> Path:
        """Rebuild in *into* what the share held after operation *upto*, by default the last."""
        ops, replica = self._replica(Path(into))
        with replica:
            for op in ops:
                if upto is None or op.n <= upto:
                    replica.apply(op)
        return Path(into)

    def _replica(self, into: Path) -> tuple[list[Op], Replica]:
        ops, base, data = self._log(0)
        if base is None or data is None:
            raise ShareError("this share keeps no data: start it with log_data")
        return ops, Replica(into, base, data)


def _is(op: str, paths: tuple[str, ...], wanted: str | None, match: str | None) -> bool:
    if wanted is not None and op != wanted:
        return False
    return match is None or any(path_matches(match, os.fsencode(path)) for path in paths)


def _wait(condition: Callable[[], T | None], timeout: float, what: str) -> T:
    """Ask again and again until *condition* is met."""
    deadline = time.monotonic() + timeout
    while True:
        met = condition()
        if met is not None:
            return met
        if time.monotonic() > deadline:
            raise ShareError(f"waited {timeout:g} s in vain for {what}")
        time.sleep(0.005)
