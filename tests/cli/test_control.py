"""The control socket: a daemon must answer, and nothing a client does may hurt it."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.waiting import wait_until_async
from wbcache.control import protocol, server
from wbcache.control.client import ControlClient
from wbcache.control.server import ControlServer, Progress, Rows
from wbcache.errors import CacheInUseError, ConnectionLostError, NoSuchMountError, ReportedError


class FakeDaemon:
    """Handlers whose answers a test decides."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.flushed: list[bytes] = []
        self.forgotten: list[int] = []
        self.error: Exception | None = None
        self.release = trio.Event()
        self.started = trio.Event()
        self.cancelled = False
        self.umount_finished = False

    async def status(self) -> Mapping[str, Any]:
        if self.error:
            raise self.error
        return {"mountpoint": b"/m\xff", "dirty_files": 3}

    async def pending(self) -> Rows:
        return self.rows

    async def conflicts(self) -> Rows:
        return self.rows

    async def forget_conflicts(self, ids: Sequence[int]) -> None:
        self.forgotten += ids

    async def flush(
        self, paths: Sequence[bytes], timeout: float | None, progress: Progress
    ) -> Rows:
        self.flushed.extend(paths)
        await self._work(progress)
        return self.rows

    async def umount(self, timeout: float | None, drain: bool, progress: Progress) -> Rows:
        await self._work(progress)
        self.umount_finished = True
        return self.rows

    async def _work(self, progress: Progress) -> None:
        progress(2, 200, 100, "the share is full")
        self.started.set()
        try:
            await self.release.wait()
        except trio.Cancelled:
            self.cancelled = True
            raise


@asynccontextmanager
async def serving(directory: str, daemon: FakeDaemon) -> AsyncIterator[ControlServer]:
    async with trio.open_nursery() as nursery:
        server = ControlServer(directory, daemon)
        nursery.start_soon(server.serve)
        yield server
        nursery.cancel_scope.cancel()


async def raw(directory: str, data: bytes) -> bytes:
    """What the server answers to these bytes."""
    with protocol.socket_address(directory) as address:
        stream = await trio.open_unix_socket(address)
    async with stream:
        await stream.send_all(data)
        answer = b""
        while chunk := await stream.receive_some(65536):
            answer += chunk
            if answer.endswith(b"\n"):
                break
    return answer


async def test_status_carries_names_that_are_not_utf8(tmp_path: os.PathLike[str]) -> None:
    async with serving(str(tmp_path), FakeDaemon()):
        status = await trio.to_thread.run_sync(ControlClient(str(tmp_path)).status)
    assert os.fsencode(status["mountpoint"]) == b"/m\xff"
    assert status["dirty_files"] == 3


async def test_long_lists_arrive_whole(tmp_path: os.PathLike[str]) -> None:
    daemon = FakeDaemon()
    daemon.rows = [{"path": f"run/{n}\n".encode(), "bytes": n} for n in range(3001)]
    async with serving(str(tmp_path), daemon):
        rows = await trio.to_thread.run_sync(ControlClient(str(tmp_path)).pending)
    assert [row["bytes"] for row in rows] == list(range(3001))
    assert rows[3000]["path"] == "run/3000\n"


async def test_a_path_longer_than_a_socket_address(tmp_path: os.PathLike[str]) -> None:
    directory = os.path.join(tmp_path, "d" * 120, "e" * 120)
    os.makedirs(directory)
    async with serving(directory, FakeDaemon()):
        info = os.stat(os.path.join(directory, protocol.SOCKET_NAME))
        assert stat.S_ISSOCK(info.st_mode)
        assert stat.S_IMODE(info.st_mode) == 0o600
        status = await trio.to_thread.run_sync(ControlClient(directory).status)
    assert status["dirty_files"] == 3
    assert os.listdir(directory) == []


async def test_a_socket_left_by_a_killed_daemon_is_replaced(tmp_path: os.PathLike[str]) -> None:
    protocol.listening_socket(str(tmp_path)).close()
    assert os.listdir(tmp_path) == [protocol.SOCKET_NAME]
    with pytest.raises(NoSuchMountError, match="is not running"):
        ControlClient(str(tmp_path)).status()
    async with serving(str(tmp_path), FakeDaemon()):
        status = await trio.to_thread.run_sync(ControlClient(str(tmp_path)).status)
    assert status["dirty_files"] == 3


async def test_flush_sends_exact_paths_and_progress(tmp_path: os.PathLike[str]) -> None:
    daemon = FakeDaemon()
    daemon.rows = [{"path": b"left", "reason": "EACCES"}]
    seen: list[tuple[int, int, int, str]] = []

    def progress(files_left: int, bytes_left: int, bytes_done: int, hindrance: str) -> None:
        seen.append((files_left, bytes_left, bytes_done, hindrance))
        trio.from_thread.run_sync(daemon.release.set)

    client = ControlClient(str(tmp_path))
    async with serving(str(tmp_path), daemon):
        remaining = await trio.to_thread.run_sync(
            client.flush, [b"a\n", b"\xff\xfe"], None, progress
        )
    assert daemon.flushed == [b"a\n", b"\xff\xfe"]
    assert seen[0] == (2, 200, 100, "the share is full")
    assert remaining == [{"path": "left", "reason": "EACCES"}]


async def test_the_answer_does_not_wait_for_the_next_progress(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PROGRESS_INTERVAL", 60.0)
    daemon = FakeDaemon()
    client = ControlClient(str(tmp_path))
    async with serving(str(tmp_path), daemon):
        with trio.fail_after(10):
            await trio.to_thread.run_sync(
                client.flush,
                [b""],
                None,
                lambda *_: trio.from_thread.run_sync(daemon.release.set),
                abandon_on_cancel=True,
            )


@pytest.mark.parametrize("command", ["flush", "umount"])
async def test_a_client_that_leaves_stops_its_flush_but_never_an_unmount(
    tmp_path: os.PathLike[str], command: str
) -> None:
    daemon = FakeDaemon()
    async with serving(str(tmp_path), daemon):
        with protocol.socket_address(str(tmp_path)) as address:
            stream = await trio.open_unix_socket(address)
        await stream.send_all(protocol.encode({"cmd": command}))
        await daemon.started.wait()
        await stream.aclose()
        if command == "flush":
            await wait_until_async(lambda: daemon.cancelled, "the flush is cancelled")
        else:
            with trio.fail_after(5):
                status = await trio.to_thread.run_sync(ControlClient(str(tmp_path)).status)
            assert status["dirty_files"] == 3
            daemon.release.set()
            await wait_until_async(lambda: daemon.umount_finished, "the drain ends")
            assert not daemon.cancelled


async def test_errors_keep_their_exit_code_and_bugs_do_not_end_the_server(
    tmp_path: os.PathLike[str],
) -> None:
    daemon = FakeDaemon()
    client = ControlClient(str(tmp_path))
    async with serving(str(tmp_path), daemon):
        daemon.error = CacheInUseError("cache", "in use", "stop it")
        with pytest.raises(ReportedError, match="cache: in use; stop it") as reported:
            await trio.to_thread.run_sync(client.status)
        assert reported.value.exit == CacheInUseError.exit_code
        daemon.error = KeyError("bug")
        with pytest.raises(ReportedError, match="KeyError") as reported:
            await trio.to_thread.run_sync(client.status)
        assert reported.value.exit == 1
        daemon.error = None
        assert (await trio.to_thread.run_sync(client.status))["dirty_files"] == 3


@pytest.mark.parametrize(
    "request_line",
    [
        b"\n",
        b"nonsense\n",
        b"[]\n",
        b"{}\n",
        b'{"cmd": "format-the-disk"}\n',
        b'{"cmd": ["status"]}\n',
        b'{"cmd": "flush", "paths": "a"}\n',
        b'{"cmd": "flush", "paths": [1]}\n',
        b'{"cmd": "flush", "timeout": "soon"}\n',
        b'{"cmd": "flush", "timeout": true}\n',
        b'{"cmd": "flush", "timeout": -1}\n',
        b'{"cmd": "umount", "timeout": NaN}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
    ],
)
async def test_bad_requests_are_refused(tmp_path: os.PathLike[str], request_line: bytes) -> None:
    daemon = FakeDaemon()
    async with serving(str(tmp_path), daemon):
        with trio.fail_after(5):
            reply = json.loads(await raw(str(tmp_path), request_line))
        assert reply["ok"] is False
        assert reply["exit"] == 2
        assert not daemon.started.is_set()
        assert json.loads(await raw(str(tmp_path), b'{"cmd":"status"}\n'))["ok"] is True


async def test_an_endless_line_is_cut_off(tmp_path: os.PathLike[str]) -> None:
    async with serving(str(tmp_path), FakeDaemon()):
        with protocol.socket_address(str(tmp_path)) as address:
            stream = await trio.open_unix_socket(address)
        async with stream:
            with trio.fail_after(10), pytest.raises(trio.BrokenResourceError):
                while True:
                    await stream.send_all(b"x" * 65536)
        assert json.loads(await raw(str(tmp_path), b'{"cmd":"status"}\n'))["ok"] is True


async def test_a_client_that_never_reads_holds_up_nobody(tmp_path: os.PathLike[str]) -> None:
    daemon = FakeDaemon()
    daemon.rows = [{"path": "p" * 4000, "bytes": n} for n in range(2000)]
    async with serving(str(tmp_path), daemon):
        with protocol.socket_address(str(tmp_path)) as address:
            deaf = await trio.open_unix_socket(address)
        async with deaf:
            await deaf.send_all(b'{"cmd":"pending"}\n')
            with trio.fail_after(5):
                assert json.loads(await raw(str(tmp_path), b'{"cmd":"status"}\n'))["ok"] is True


async def test_finish_lets_the_reply_out_before_the_daemon_ends(
    tmp_path: os.PathLike[str],
) -> None:
    daemon = FakeDaemon()
    daemon.rows = [{"path": "left"}]
    remaining: list[dict[str, Any]] = []
    server = ControlServer(str(tmp_path), daemon)

    async def unmount() -> None:
        client = ControlClient(str(tmp_path))
        remaining.extend(await trio.to_thread.run_sync(client.umount, None, True))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve)
        nursery.start_soon(unmount)
        await daemon.started.wait()
        daemon.release.set()
        with trio.fail_after(5):
            await server.finish()
    assert remaining == [{"path": "left"}]
    assert os.listdir(tmp_path) == []


def test_a_daemon_that_falls_silent_is_reported(tmp_path: os.PathLike[str]) -> None:
    with protocol.listening_socket(str(tmp_path)):
        client = ControlClient(str(tmp_path), answer_deadline=0.2)
        with pytest.raises(NoSuchMountError, match=r"did not answer for 0\.2 s"):
            client.status()


def test_a_daemon_killed_in_the_middle_is_reported(tmp_path: os.PathLike[str]) -> None:
    import threading

    def answer_half(listener: socket.socket) -> None:
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b'{"progress":{"files_left":1,"bytes_left":1,"bytes_done":0}}\n{"o')

    with protocol.listening_socket(str(tmp_path)) as listener:
        thread = threading.Thread(target=answer_half, args=(listener,))
        thread.start()
        with pytest.raises(ConnectionLostError, match="ended before it had answered"):
            ControlClient(str(tmp_path)).umount(None, True)
        thread.join()
