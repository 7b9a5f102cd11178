"""The control socket: one JSON request a line, one JSON answer a line.

``{"cmd": NAME, ...arguments}`` is answered by ``{"ok": true, "result": ...}`` or
``{"ok": false, "error": TEXT}``. Nothing here waits for the share, so the socket answers while
every call hangs.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from typing import Any

import trio

from tests.faultshare.faults import IOPS_BURST, Pacer
from tests.faultshare.passthrough import Share

log = logging.getLogger(__name__)

_LOG_PAGE = 5000


class Control:
    """Carries out the commands of the control socket on one share."""

    def __init__(self, share: Share, backing: str) -> None:
        self._share = share
        self._backing = backing
        self._commands: dict[str, Callable[..., Any]] = {
            "pid": os.getpid,
            "set": self.set,
            "hang": self.hang,
            "release": self.release,
            "hung": self.hung,
            "fail": self.fail,
            "lose": self.lose,
            "clear": self.clear,
            "quota": self.quota,
            "usage": self.usage,
            "lack": self.lack,
            "disconnect": self.disconnect,
            "reconnect": self.reconnect,
            "freeze_statfs": lambda frozen: share.freeze_statfs(frozen),
            "log": self.log,
            "mark": lambda: share.oplog.last,
            "clear_log": self.clear_log,
            "counts": lambda: share.oplog.counts()._asdict(),
        }

    def answer(self, line: bytes) -> dict[str, Any]:
        """The answer to one request line; never raises."""
        try:
            request = json.loads(line)
            command = self._commands[request.pop("cmd")]
            return {"ok": True, "result": command(**request)}
        except KeyError as error:
            return {"ok": False, "error": f"no such command: {error}"}
        except (TypeError, ValueError, OSError) as error:
            return {"ok": False, "error": str(error)}
        except Exception as error:
            log.exception("control request failed: %r", line)
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def set(self, **settings: Any) -> None:
        """Change rates and limits; see `client.ShareClient.set`."""
        faults = self._share.faults
        for name, value in settings.items():
            if name == "latency_ms":
                faults.latency = value / 1000
            elif name == "jitter_ms":
                faults.jitter = value / 1000
            elif name == "latency_by_op":
                faults.latency_by_op = {op: ms / 1000 for op, ms in value.items()}
            elif name == "iops":
                faults.iops = Pacer(value, IOPS_BURST)
            elif name == "bandwidth_mb":
                faults.bandwidth = Pacer(value * 1e6)
            elif name == "name_max":
                faults.name_max = value
            elif name == "mtime_resolution":
                faults.mtime_resolution_ns = max(1, int(value * 1e9))
            elif name == "read_only":
                faults.read_only = bool(value)
            else:
                raise ValueError(f"unknown setting {name!r}")

    def hang(self, ops: list[str] | None, match: str | None, times: int | None, after: bool) -> int:
        """Keep calls from now on; returns the number of the rule."""
        return self._share.faults.add("hang", ops, match=match, times=times, after=after).id

    def release(self, rule: int | None, error: int) -> int:
        """End hangs and let their calls go; returns how many were waiting."""
        rules = None if rule is None else {rule}
        self._share.faults.remove(rules, kind="hang")
        return self._share.gate.release(rules, error)

    def hung(self) -> list[list[Any]]:
        """The calls that are being kept, oldest first."""
        return [[c.op, c.path, c.since, c.late, c.rule] for c in self._share.gate.hung]

    def fail(
        self,
        ops: list[str] | None,
        error: int,
        match: str | None,
        times: int | None,
        probability: float,
        after: bool,
        seed: int,
    ) -> int:
        """Fail calls from now on; returns the number of the rule."""
        rule = self._share.faults.add(
            "fail",
            ops,
            match=match,
            times=times,
            probability=probability,
            error=error,
            after=after,
            seed=seed,
        )
        return rule.id

    def lose(self, match: str | None, times: int | None) -> int:
        """Lose writes from now on; returns the number of the rule."""
        return self._share.faults.add("lose", ["write"], match=match, times=times).id

    def clear(self, rule: int | None) -> None:
        """Remove one rule, or everything that makes the share worse than its backing."""
        if rule is not None:
            self._share.faults.remove({rule})
            self._share.gate.release({rule}, 0)
            return
        faults = self._share.faults
        faults.remove()
        faults.lacking.clear()
        faults.disconnected = 0
        self.set(latency_ms=0, jitter_ms=0, latency_by_op={}, iops=0, bandwidth_mb=0)
        self.set(name_max=255, mtime_resolution=0, read_only=False)
        self.quota(None, None, errno.EDQUOT)
        self._share.freeze_statfs(False)
        self._share.gate.release(None, 0)

    def quota(self, bytes: int | None, inodes: int | None, error: int) -> None:
        """Limit what the share may hold, counting what it holds now."""
        self._share.backing.usage.limit(self._backing, bytes, inodes, error)

    def usage(self) -> list[int]:
        """Bytes and inodes counted by the quota."""
        usage = self._share.backing.usage
        return [usage.bytes, usage.inodes]

    def lack(self, capabilities: list[str], error: int | None) -> None:
        """Take capabilities away."""
        for capability in capabilities:
            self._share.faults.lack(capability, error)

    def disconnect(self, error: int) -> None:
        """Answer every call with *error*, at once."""
        self._share.faults.disconnected = error

    def reconnect(self, stale_handles: bool) -> int:
        """End a disconnect; returns how many handles became stale."""
        self._share.faults.disconnected = 0
        return self._share.stale_handles() if stale_handles else 0

    def log(self, since: int) -> dict[str, Any]:
        """One page of the log."""
        rows = self._share.oplog.rows(since, _LOG_PAGE)
        return {
            "rows": rows,
            "more": bool(rows) and rows[-1][0] < self._share.oplog.last,
            "base": self._share.oplog.base,
            "data": self._share.oplog.data,
        }

    def clear_log(self) -> int:
        """Begin the log anew; returns the number of the last operation forgotten."""
        self._share.oplog.begin()
        return self._share.oplog.last


async def serve(listener: trio.SocketListener, control: Control) -> None:
    """Answer control connections for ever."""

    async def connection(stream: trio.SocketStream) -> None:
        pending = bytearray()
        try:
            async for chunk in stream:
                pending += chunk
                while (end := pending.find(b"\n")) >= 0:
                    line = bytes(pending[:end])
                    del pending[: end + 1]
                    await stream.send_all(json.dumps(control.answer(line)).encode() + b"\n")
        except trio.BrokenResourceError:
            pass  # the client has gone
        finally:
            await stream.aclose()

    await trio.serve_listeners(connection, [listener])
