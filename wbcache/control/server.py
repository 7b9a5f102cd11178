"""The daemon's end of the control socket.

It runs in the daemon's event loop beside the file system, so a client must not be able to stop or
end that loop. Whatever a client sends or fails to read concerns its own connection only: errors are
contained there, requests are limited in size and time, and long lists are encoded in slices.

A client that goes away cancels what it asked for, except `umount`: once begun, the final flush
goes on whoever watches it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import trio

from wbcache.control import protocol
from wbcache.errors import NoSuchMountError, UsageError, WbcacheError
from wbcache.escaping import to_bytes

log = logging.getLogger(__name__)

REQUEST_DEADLINE = 30.0
REPLY_DEADLINE = 60.0
FOREIGN_DEADLINE = 1.0
"""Seconds that another user's connection is given to hear that it is not welcome."""
MAX_CONNECTIONS = 64
PROGRESS_INTERVAL = 0.2
ROWS_PER_SLICE = 256

Rows = Sequence[Mapping[str, Any]]


class Progress(Protocol):
    """Told how far a command is; cheap, never waits, may be called often."""

    def __call__(
        self, files_left: int, bytes_left: int, bytes_done: int, hindrance: str = ""
    ) -> None:
        """``hindrance`` is why it does not go on, or not as it should; empty when it does."""


class Handlers(Protocol):
    """What the daemon does for its clients. Values may hold names as bytes."""

    async def status(self) -> Mapping[str, Any]:
        """The state of the mount."""

    async def pending(self) -> Rows:
        """Everything that is not on the share yet."""

    async def conflicts(self) -> Rows:
        """The conflicts with other writers that nobody has dealt with."""

    async def forget_conflicts(self, ids: Sequence[int]) -> None:
        """Somebody has dealt with these; unknown ones are fine."""

    async def flush(
        self, paths: Sequence[bytes], timeout: float | None, progress: Progress
    ) -> Rows:
        """Flush these paths (relative to the mount, b"" is all of it); what remains of them."""

    async def umount(self, timeout: float | None, drain: bool, progress: Progress) -> Rows:
        """Unmount, then flush everything; what remains. A second call joins the first."""


class ControlServer:
    """Serves one daemon's clients until `finish` or until cancelled."""

    def __init__(self, directory: str | int, handlers: Handlers) -> None:
        """Listen in the cache directory (a path or a descriptor). The caller holds its lock."""
        self._handlers = handlers
        self._directory = (
            os.open(directory, os.O_PATH) if isinstance(directory, str) else (os.dup(directory))
        )
        self._socket = protocol.listening_socket(self._directory)
        self._connections = 0
        self._answering = 0
        self._idle = trio.Event()
        self._accepting = trio.CancelScope()

    async def serve(self) -> None:
        """Accept and answer. Returns after `finish`; raises only when cancelled."""
        try:
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._socket))
            async with trio.open_nursery() as nursery:
                with self._accepting:
                    await trio.serve_listeners(
                        self._connection, [listener], handler_nursery=nursery
                    )
                nursery.cancel_scope.cancel()
        finally:
            self.close()

    async def finish(self, grace: float = 5.0) -> None:
        """Give replies that are being worked on or sent `grace` seconds, then stop serving."""
        with trio.move_on_after(grace):
            while self._answering:
                self._idle = trio.Event()
                await self._idle.wait()
        self._accepting.cancel()

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        if self._directory < 0:
            return
        self._socket.close()
        try:
            os.unlink(protocol.SOCKET_NAME, dir_fd=self._directory)
        except OSError as error:
            log.debug("control socket not removed: %s", error)
        os.close(self._directory)
        self._directory = -1

    async def _connection(self, stream: trio.SocketStream) -> None:
        if not _allowed(stream.socket):
            await _turn_away(stream)
            return
        if self._connections >= MAX_CONNECTIONS:
            return
        self._connections += 1
        try:
            line = await _read_line(stream)
            if line is not None:
                await self._answer(stream, line)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # The client went away.
        except Exception:
            log.exception("a control connection failed")
        finally:
            self._connections -= 1

    async def _answer(self, stream: trio.SocketStream, line: bytes) -> None:
        self._answering += 1
        try:
            reply = await self._reply(stream, line)
            with trio.move_on_after(REPLY_DEADLINE):
                for piece in _pieces(reply):
                    await stream.send_all(piece)
        finally:
            self._answering -= 1
            if not self._answering:
                self._idle.set()

    async def _reply(self, stream: trio.SocketStream, line: bytes) -> Mapping[str, Any]:
        try:
            return await self._dispatch(stream, protocol.decode(line))
        except WbcacheError as error:
            return protocol.error_reply(str(error), error.exit)
        except ValueError as error:
            return protocol.error_reply(f"request not understood: {error}", UsageError.exit_code)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise
        except Exception as error:
            log.exception("a control request failed")
            return protocol.error_reply(
                f"the daemon failed to answer: {type(error).__name__}: {error}; see its log", 1
            )

    async def _dispatch(
        self, stream: trio.SocketStream, request: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        command = request.get("cmd")
        if command == "status":
            return {"ok": True, "status": await self._handlers.status()}
        if command == "pending":
            return {"ok": True, "pending": await self._handlers.pending()}
        if command == "conflicts":
            return {"ok": True, "conflicts": await self._handlers.conflicts()}
        if command == "forget_conflicts":
            await self._handlers.forget_conflicts(_numbers(request))
            return {"ok": True}
        timeout = _timeout(request)
        if command == "flush":
            paths = _paths(request)
            rows = await _with_progress(
                stream, lambda progress: self._handlers.flush(paths, timeout, progress)
            )
            return {"ok": True, "remaining": rows}
        if command == "umount":
            drain = request.get("drain", True) is not False
            rows = await _with_progress(
                stream,
                lambda progress: self._handlers.umount(timeout, drain, progress),
                outlives_client=True,
            )
            return {"ok": True, "remaining": rows}
        raise UsageError(
            "control request", f"unknown command {command!r}", "use one version of wbcache"
        )


_FOREIGN = protocol.error_reply(
    "the daemon belongs to another user; run the command as that user or as root",
    NoSuchMountError.exit_code,
)


def _allowed(sock: trio.socket.SocketType) -> bool:
    """Whether the peer is root or the user the daemon runs as."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return uid in (0, os.geteuid())


async def _turn_away(stream: trio.SocketStream) -> None:
    """Tell another user so. Closed with a request unread, the connection would just be reset."""
    with trio.move_on_after(FOREIGN_DEADLINE):
        try:
            await _read_line(stream)
            await stream.send_all(protocol.encode(_FOREIGN))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


async def _read_line(stream: trio.SocketStream) -> bytes | None:
    """The request line, or None when none of acceptable length comes in time."""
    received = bytearray()
    with trio.move_on_after(REQUEST_DEADLINE):
        while len(received) <= protocol.MAX_REQUEST:
            data = await stream.receive_some(65536)
            if not data:
                break
            received += data
            if b"\n" in data:
                return bytes(received[: received.index(b"\n")])
    return None


async def _with_progress(
    stream: trio.SocketStream,
    run: Callable[[Progress], Awaitable[Rows]],
    *,
    outlives_client: bool = False,
) -> Rows:
    """The result of `run`, with its progress sent to the client while it runs."""
    latest = (0, 0, 0, "")
    changed, gone, over, sent = trio.Event(), trio.Event(), trio.Event(), trio.Event()

    def progress(files_left: int, bytes_left: int, bytes_done: int, hindrance: str = "") -> None:
        nonlocal latest
        latest = (files_left, bytes_left, bytes_done, hindrance)
        changed.set()

    def leave() -> None:
        gone.set()
        over.set()
        changed.set()

    async def send() -> None:
        # Ends between two lines, never within one, so that the reply after it can be read.
        nonlocal changed
        while not over.is_set():
            with trio.move_on_after(protocol.HEARTBEAT):
                await changed.wait()
            changed = trio.Event()
            try:
                with trio.fail_after(REPLY_DEADLINE):
                    await stream.send_all(_progress_line(*latest))
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                leave()
            with trio.move_on_after(PROGRESS_INTERVAL):
                await over.wait()
        sent.set()

    async def watch() -> None:
        """A client that closes its end is gone, though nothing was sent to find that out."""
        try:
            while await stream.receive_some(4096):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        leave()

    async def cancel_when_gone() -> None:
        await gone.wait()
        if not outlives_client:
            nursery.cancel_scope.cancel()

    rows: Rows | None = None
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        nursery.start_soon(watch)
        nursery.start_soon(cancel_when_gone)
        try:
            rows = await run(progress)
        except Exception as error:
            # Raised below: from inside the nursery it would arrive wrapped in a group.
            failure = error
        over.set()
        changed.set()
        await sent.wait()
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if rows is None:
        raise trio.BrokenResourceError("the client went away")
    return rows


def _progress_line(files_left: int, bytes_left: int, bytes_done: int, hindrance: str) -> bytes:
    counts = {"files_left": files_left, "bytes_left": bytes_left, "bytes_done": bytes_done}
    return protocol.encode({"progress": {**counts, "hindrance": hindrance}})


def _timeout(request: Mapping[str, Any]) -> float | None:
    """Seconds, or None for no limit of the client's own."""
    timeout = request.get("timeout")
    if timeout is None:
        return None
    numeric = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not numeric or not math.isfinite(timeout) or timeout < 0:
        raise ValueError("timeout is not a number of seconds")
    return float(timeout)


def _numbers(request: Mapping[str, Any]) -> list[int]:
    ids = request.get("ids")
    if not isinstance(ids, list) or not all(isinstance(number, int) for number in ids):
        raise ValueError("ids is not a list of numbers")
    return ids


def _paths(request: Mapping[str, Any]) -> list[bytes]:
    paths = request.get("paths", [""])
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError("paths is not a list of names")
    return [to_bytes(path) for path in paths]


def _pieces(reply: Mapping[str, Any]) -> Iterable[bytes]:
    """The encoded reply in pieces small enough not to hold up the event loop."""
    opening = "{"
    for key, value in reply.items():
        yield (opening + json.dumps(key) + ":").encode()
        opening = ","
        if isinstance(value, list | tuple):
            yield b"["
            for start in range(0, len(value), ROWS_PER_SLICE):
                rows = protocol.encode({"": value[start : start + ROWS_PER_SLICE]})
                yield (b"," if start else b"") + rows[len('{"":[') : -len("]}\n")]
            yield b"]"
        else:
            yield protocol.encode({"": value})[len('{"":') : -len("}\n")]
    yield b"}\n"
