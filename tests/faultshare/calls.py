"""The way of every call through the share: wait, take effect or fail, be logged, be answered."""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from pyfuse3 import FUSEError

from tests.faultshare.backing import Backing
from tests.faultshare.faults import MUTATIONS, Request
from tests.faultshare.gate import Gate
from tests.faultshare.nodes import Node
from tests.faultshare.oplog import Op, OpLog
from tests.faultshare.squash import Squash

log = logging.getLogger(__name__)

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC


def contained(
    handler: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Let nothing but FUSEError out of a handler: anything else would end the mount."""

    @functools.wraps(handler)
    async def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(self, *args, **kwargs)
        except FUSEError:
            raise
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        except Exception:
            log.exception("%s failed", handler.__name__)
            raise FUSEError(errno.EIO) from None

    return guarded


@dataclass
class Call:
    """One call on its way through the share.

    node, parent, name and the second pair say what it is about; the paths are worked out when
    they are needed, since a rename may overtake the call.
    undo: takes back what a result promised the kernel, if the answer is lost.
    """

    op: str
    node: Node | None = None
    parent: Node | None = None
    name: bytes | None = None
    parent2: Node | None = None
    name2: bytes | None = None
    offset: int = 0
    size: int = 0
    flags: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    data: bytes | None = None
    mutates: bool = False
    undo: Callable[[Any], None] | None = None


class Calls:
    """Takes calls through the gate to the backing directory and into the log."""

    def __init__(
        self, backing: Backing, gate: Gate, oplog: OpLog, squash: Squash | None = None
    ) -> None:
        self._backing = backing
        self._squash = squash
        self._nodes = backing.nodes
        self._gate = gate
        self._oplog = oplog

    async def run(self, call: Call, effect: Callable[[], T]) -> T:
        """Carry out *effect* when the gate lets it, unless a fault says otherwise.

        Raises FUSEError with what the caller is told. What happens between the waits, effect and
        log entry included, is atomic.
        """
        started = time.monotonic()
        request = functools.partial(self._request, call)
        incoming = 0 if call.data is None else len(call.data)
        verdict = await self._gate.admit(call.op, request, started, incoming)
        now = request()
        record = self._record(call, now, started)
        result: Any = incoming  # what a write that is lost without a word returns
        code = verdict.error
        if verdict.effect:
            try:
                if self._squash is not None:
                    self._squash.check(call, self._backing)
                result = effect()
            except OSError as error:
                code = error.errno or errno.EIO
            else:
                record.effect = True
                record.node = record.node or self._node_id(call)
                if call.op == "read":
                    record.size = len(result)
                elif call.op == "readdir":
                    record.size = result
        record.errno = code
        self._oplog.add(record, call.data if record.effect else None)
        outgoing = record.size if call.op == "read" and record.effect else 0
        code = await self._gate.answer(now, verdict, started, outgoing) or code
        record.errno = code
        record.end = time.monotonic()
        if code:
            if record.effect and call.undo is not None:
                call.undo(result)
            raise FUSEError(code)
        return result  # type: ignore[no-any-return]

    def _request(self, call: Call) -> Request:
        path, path2, _ = self._paths(call)
        victim = False
        if call.op in ("unlink", "rename") and "open_unlink" in self._gate.faults.lacking:
            parent, name = (call.parent2, call.name2) if call.name2 else (call.parent, call.name)
            assert parent is not None and name is not None
            victim = self._backing.is_open(parent, name)
        return Request(
            op=call.op,
            paths=(path,) if path2 is None else (path, path2),
            new_name=call.name2 if call.name2 is not None else call.name,
            mutates=call.mutates or call.op in MUTATIONS,
            opens_for_writing=call.op in ("open", "create") and bool(call.flags & _WRITE_FLAGS),
            rename_flags=call.flags if call.op == "rename" else 0,
            victim_is_open=victim,
        )

    def _paths(self, call: Call) -> tuple[bytes, bytes | None, bool]:
        named = True
        if call.parent is not None and call.name is not None:
            path = self._nodes.path_in(call.parent, call.name)
        elif call.node is not None:
            path, named = self._nodes.path(call.node)
        else:
            path = b""
        if call.parent2 is None or call.name2 is None:
            return path, None, named
        return path, self._nodes.path_in(call.parent2, call.name2), named

    def _record(self, call: Call, now: Request, started: float) -> Op:
        return Op(
            n=0,
            op=call.op,
            path=os.fsdecode(now.paths[0]),
            path2=os.fsdecode(now.paths[1]) if len(now.paths) > 1 else None,
            node=self._node_id(call),
            offset=call.offset,
            size=call.size if call.data is None else len(call.data),
            flags=call.flags,
            unlinked=call.node is not None and not self._paths(call)[2],
            start=started,
            details=call.details,
            mutation=now.mutates,
        )

    def _node_id(self, call: Call) -> int:
        node = call.node
        if node is None and call.parent is not None and call.name is not None:
            node = self._nodes.at(call.parent, call.name)
        return 0 if node is None else node.id
