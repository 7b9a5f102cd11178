r"""The lines on a control socket, and how to reach a socket whose path is too long.

One request a connection; every message is one line of JSON. The client sends
`{"cmd": NAME, ...arguments}`. The daemon answers with any number of `{"progress": {...}}` lines and
then one line `{"ok": true, ...}` or `{"ok": false, "error": TEXT, "exit": CODE}`.

Names are text made by `escaping.to_text`; JSON carries their undecodable bytes as lone surrogates
(`\udc80` to `\udcff`), which only the two ends of this socket ever see.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from wbcache.errors import ReportedError
from wbcache.escaping import to_text

SOCKET_NAME = "control.sock"
MAX_REQUEST = 4 << 20
"""Bytes of one request; it may name many thousand paths."""
HEARTBEAT = 1.0
"""Seconds between progress lines while a command runs, whether or not anything moved."""


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as a line. Values may be bytes, which are taken as names."""
    return json.dumps(message, default=_encode_value, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message in a line. Raises ValueError when it is not a JSON object."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004  (a wrong message, not a wrong type)
    return message


def error_reply(error: str, exit_code: int) -> dict[str, Any]:
    """The reply to a request that failed."""
    return {"ok": False, "error": error, "exit": exit_code}


def check_reply(reply: Mapping[str, Any]) -> None:
    """Raise the error that a reply carries, if it carries one."""
    if reply.get("ok") is not True:
        raise ReportedError(str(reply.get("error", "no reason given")), int(reply.get("exit", 1)))


@contextlib.contextmanager
def socket_address(directory: str | int) -> Iterator[str]:
    """An address of the control socket in a directory (a path or an open descriptor).

    The kernel takes 108 bytes at most for the path of a socket, and a cache directory may well be
    deeper. The way through /proc is short whatever the directory is called.
    """
    if isinstance(directory, int):
        yield f"/proc/self/fd/{directory}/{SOCKET_NAME}"
        return
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)


def listening_socket(directory: str | int) -> socket.socket:
    """A listening control socket in `directory`, mode 0600, in place of one left over there.

    The caller holds the lock of the cache directory, so an existing socket belongs to nobody.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The mode of an unbound socket becomes the mode of its file: there is no moment at which
        # the file exists with another one, whatever the umask is.
        os.fchmod(sock.fileno(), 0o600)
        with socket_address(directory) as address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            sock.bind(address)
        sock.listen(64)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _encode_value(value: object) -> str:
    if isinstance(value, bytes):
        return to_text(value)
    raise TypeError(f"{type(value).__name__} cannot be sent over the control socket")
