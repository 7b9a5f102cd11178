"""The commands' end of the control socket: plain blocking calls, no event loop."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from wbcache.control import protocol
from wbcache.errors import ConnectionLostError, NoSuchMountError, NotRunningError
from wbcache.escaping import to_text
from wbcache.processes import is_being_killed

ANSWER_DEADLINE = 30.0
"""Seconds of silence after which a daemon counts as not answering."""

Progress = Callable[[int, int, int, str], None]
"""Called with files left, bytes left, bytes done, and what hinders it (empty when nothing does)."""
Row = dict[str, Any]


class ControlClient:
    """One daemon, found by its cache directory. Every call is a connection of its own.

    All calls raise NotRunningError when no daemon listens, NoSuchMountError when it is another
    user's or falls silent, ConnectionLostError when it ends in the middle of a command, and
    ReportedError with what it reports.
    """

    def __init__(self, cache_dir: str, *, answer_deadline: float = ANSWER_DEADLINE) -> None:
        self._cache_dir = cache_dir
        self._deadline = answer_deadline

    def is_running(self) -> bool:
        """Whether a daemon listens; it may be another user's."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(self._deadline)
            try:
                with protocol.socket_address(self._cache_dir) as address:
                    sock.connect(address)
                self._check_alive(sock)
            except NotRunningError:
                return False
            except OSError as error:
                return not isinstance(self._unreachable(error), NotRunningError)
        return True

    def status(self) -> dict[str, Any]:
        """The state of the mount."""
        status = self._call({"cmd": "status"})["status"]
        assert isinstance(status, dict)
        return status

    def pending(self) -> list[Row]:
        """Everything that is not on the share yet."""
        return list(self._call({"cmd": "pending"})["pending"])

    def conflicts(self) -> list[Row]:
        """The conflicts with other writers that nobody has dealt with."""
        return list(self._call({"cmd": "conflicts"})["conflicts"])

    def forget_conflicts(self, ids: Sequence[int]) -> None:
        """Somebody has dealt with these."""
        self._call({"cmd": "forget_conflicts", "ids": list(ids)})

    def flush(
        self, paths: Sequence[bytes], timeout: float | None, progress: Progress | None = None
    ) -> list[Row]:
        """Flush these paths (relative to the mount, b"" is all of it); returns what remains."""
        names = [to_text(path) for path in paths]
        request = {"cmd": "flush", "paths": names, "timeout": timeout}
        return list(self._call(request, progress)["remaining"])

    def umount(
        self, timeout: float | None, drain: bool, progress: Progress | None = None
    ) -> list[Row]:
        """Unmount and drain; returns what remains. An interrupted call leaves the drain going."""
        request = {"cmd": "umount", "timeout": timeout, "drain": drain}
        return list(self._call(request, progress)["remaining"])

    def _call(self, request: Row, progress: Progress | None = None) -> Row:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(self._deadline)
            try:
                with protocol.socket_address(self._cache_dir) as address:
                    sock.connect(address)
            except OSError as error:
                raise self._unreachable(error) from None
            self._check_alive(sock)
            try:
                sock.sendall(protocol.encode(request))
                with sock.makefile("rb") as replies:
                    return self._final_reply(replies, progress)
            except TimeoutError:
                raise NoSuchMountError(
                    f"the daemon with cache directory {self._cache_dir}",
                    f"did not answer for {self._deadline:g} s",
                    "look into daemon.log there",
                ) from None
            except ConnectionError:
                raise self._lost() from None

    def _final_reply(self, replies: BinaryIO, progress: Progress | None) -> Row:
        while True:
            line = replies.readline()
            if not line.endswith(b"\n"):
                raise self._lost()
            try:
                reply = protocol.decode(line)
            except ValueError:
                raise self._lost() from None
            moved = reply.get("progress")
            if moved is None:
                protocol.check_reply(reply)
                return reply
            if progress is not None:
                counts = (moved["files_left"], moved["bytes_left"], moved["bytes_done"])
                progress(*counts, moved.get("hindrance", ""))

    def _check_alive(self, sock: socket.socket) -> None:
        """A killed daemon that hangs in a call on the share still accepts connections."""
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        if is_being_killed(pid):
            raise NotRunningError(
                f"the daemon with cache directory {self._cache_dir}",
                f"was killed (pid {pid}), and still waits for a call on the share",
                "mount again with this cache directory to carry on",
            )

    def _unreachable(self, error: OSError) -> NoSuchMountError:
        what = f"the daemon with cache directory {self._cache_dir}"
        if isinstance(error, PermissionError):
            return NoSuchMountError(
                what, "belongs to another user", "run the command as that user or as root"
            )
        if isinstance(error, BlockingIOError | TimeoutError):
            return NoSuchMountError(what, "accepts no connection", "look into daemon.log there")
        return NotRunningError(
            what, "is not running", "mount again with this cache directory to carry on"
        )

    def _lost(self) -> ConnectionLostError:
        return ConnectionLostError(
            f"the daemon with cache directory {self._cache_dir}",
            "ended before it had answered",
            "see daemon.log there, and mount again with this cache directory to carry on",
        )
