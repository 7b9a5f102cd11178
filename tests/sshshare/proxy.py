"""A TCP proxy that delays what it forwards, and can stop forwarding altogether.

    python -m tests.sshshare.proxy TARGET_PORT SERVER_PID

listens on a free port of 127.0.0.1 and prints that port.  Commands come as JSON lines on
standard input, each answered by a line `{"ok": true}` once it is in force:

    {"delay_ms": 25.0}   hold every chunk back that long, in each direction
    {"hang": true}       forward nothing, accept and keep everything
    {"hang": false}      go on where it stopped

The delay is latency, not bandwidth: chunks overlap in flight and keep their order.  It ends when
its standard input does, and asks SERVER_PID to end, too: neither can outlive the test that
started them, whatever happened to it.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import sys

_CHUNK = 1 << 16
_QUEUED_CHUNKS = 1024  # a sender is held up when this many are in flight, as by a full pipe


class Weather:
    """What every chunk meets on its way: a delay in seconds, and whether anything passes."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.passing = asyncio.Event()
        self.passing.set()


class _Pipe:
    """One direction of one connection."""

    def __init__(
        self, weather: Weather, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._weather = weather
        self._reader = reader
        self._writer = writer
        self._flight: collections.deque[tuple[float, bytes]] = collections.deque()
        self._changed = asyncio.Condition()
        self._ended = False

    async def run(self) -> None:
        """Forward until the sender closes, then close the other side."""
        await asyncio.gather(self._take(), self._deliver())

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while chunk := await self._reader.read(_CHUNK):
                async with self._changed:
                    await self._changed.wait_for(lambda: len(self._flight) < _QUEUED_CHUNKS)
                    self._flight.append((loop.time(), chunk))
                    self._changed.notify_all()
        except ConnectionError:
            pass  # a reset ends the direction as a close does
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: bool(self._flight) or self._ended)
                    if not self._flight:
                        break
                    sent, chunk = self._flight.popleft()
                    self._changed.notify_all()
                await asyncio.sleep(max(0.0, sent + self._weather.delay - loop.time()))
                await self._weather.passing.wait()
                self._writer.write(chunk)
                await self._writer.drain()
            await self._weather.passing.wait()
            self._writer.write_eof()
        except (ConnectionError, OSError):
            pass  # the receiver has gone; its own direction says so to the sender


async def _connection(
    weather: Weather, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    far_writer = None
    try:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            _Pipe(weather, reader, far_writer).run(), _Pipe(weather, far_reader, writer).run()
        )
    except ConnectionError:
        pass  # nobody listens behind us: the near side is closed below, as refused
    finally:
        writer.close()
        if far_writer is not None:
            far_writer.close()


def _obey(weather: Weather, command: dict[str, object]) -> None:
    if "delay_ms" in command:
        weather.delay = float(str(command["delay_ms"])) / 1000
    if command.get("hang") is True:
        weather.passing.clear()
    if command.get("hang") is False:
        weather.passing.set()


async def _main(port: int) -> None:
    weather = Weather()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _connection(weather, port, reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    while line := await commands.readline():
        _obey(weather, json.loads(line))
        print('{"ok": true}', flush=True)


if __name__ == "__main__":
    try:
        # Open connections are dropped with the process: nobody is left to wait for them.
        asyncio.run(_main(int(sys.argv[1])))
    finally:
        os.kill(int(sys.argv[2]), signal.SIGTERM)
