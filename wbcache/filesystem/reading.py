"""Reading bytes that only the share has, ahead of a sequential reader.

The kernel reads ahead by a megabyte at most, in one or two requests. Over a share whose every call
takes tens of milliseconds that leaves the line idle most of the time, so a sequential reader has
`WINDOW` bytes on their way at any time. Nothing is kept: the kernel's page cache serves what is
read again.
"""

from __future__ import annotations

import errno
import logging
import os

import trio

from wbcache.filesystem.names import error
from wbcache.node import Node, Signature
from wbcache.share import calls
from wbcache.share.descriptor import Descriptor
from wbcache.volume import Volume

log = logging.getLogger(__name__)

PIECE = 1 << 20
"""Bytes read ahead in one call."""

WINDOW = 4
"""Pieces on their way for one file."""

MAX_PIECES = 64
"""Pieces held for all files together."""


class _Piece:
    """A part of a file that is being read, or has been."""

    __slots__ = ("data", "done")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.data: bytes | None = None
        """None when it could not be read: whoever wants it asks for itself."""


class _Stream:
    """A file that is read from front to back."""

    __slots__ = ("base", "high", "pieces")

    def __init__(self, base: Signature | None) -> None:
        self.base = base
        self.high = 0
        """Where the reader is, at least."""
        self.pieces: dict[int, _Piece] = {}


class ShareReader:
    """Reads of open files from the share."""

    def __init__(self, volume: Volume, nursery: trio.Nursery) -> None:
        self._volume = volume
        self._share = volume.share
        self._nursery = nursery
        self._streams: dict[Node, _Stream] = {}
        self._held = 0

    def close(self, node: Node) -> None:
        """Nobody has the file open any more."""
        stream = self._streams.pop(node, None)
        if stream is not None:
            self._held -= len(stream.pieces)

    async def read(self, node: Node, start: int, stop: int) -> bytes:
        """Bytes of the share's file; fewer when it is shorter.

        Raises ETIMEDOUT past the data deadline.
        """
        stream = self._follow(node, start, stop)
        if stream is None or not stream.pieces:
            return await self._read(node, start, stop)
        parts = []
        at = start
        while at < stop:
            first = at - at % PIECE
            end = min(stop, first + PIECE)
            piece = stream.pieces.get(first)
            data = None
            if piece is not None:
                await piece.done.wait()
                data = piece.data
            part = (
                await self._read(node, at, end) if data is None else data[at - first : end - first]
            )
            parts.append(part)
            if len(part) < end - at:
                break
            at = end
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read_soon(self, node: Node, start: int, stop: int) -> bytes:
        """The same for bytes that the kernel asks for together with others, which are here and
        must not be held back.

        Raises ETIMEDOUT after the time that a look-up may take. The kernel then asks for the page
        that is wanted alone.
        """
        share, piece = self._share, _Piece()
        self._nursery.start_soon(self._fetch, node, start, stop, piece)
        with trio.move_on_after(max(0.0, share.lookup_deadline - share.health.waiting)):
            await piece.done.wait()
        if piece.data is None:
            raise error(errno.ETIMEDOUT)
        return piece.data

    def _follow(self, node: Node, start: int, stop: int) -> _Stream | None:
        """Note a read; when it goes on from the ones before, have the next pieces read."""
        if not node.handles:
            return None
        stream = self._streams.get(node)
        if stream is None or stream.base != node.base:
            self.close(node)
            if start:
                return None
            stream = self._streams[node] = _Stream(node.base)
        # The kernel asks for parts of its own window in any order.
        if not stream.high - 2 * PIECE <= start <= stream.high + PIECE:
            self.close(node)
            return None
        going_on = start >= stream.high > 0 or bool(stream.pieces)
        stream.high = max(stream.high, stop)
        for first in [f for f in stream.pieces if f + 3 * PIECE < stream.high]:
            del stream.pieces[first]
            self._held -= 1
        if going_on and self._share.health.prompt:
            following = stream.high - stream.high % PIECE + PIECE
            for first in range(following, following + WINDOW * PIECE, PIECE):
                if first >= node.size or self._held >= MAX_PIECES:
                    break
                if first not in stream.pieces:
                    stream.pieces[first] = piece = _Piece()
                    self._held += 1
                    self._nursery.start_soon(self._fetch, node, first, first + PIECE, piece)
        return stream

    async def _fetch(self, node: Node, start: int, stop: int, piece: _Piece) -> None:
        try:
            piece.data = await self._read(node, start, min(stop, node.size))
        except OSError as caught:
            log.debug("reading ahead: %s", caught)
        except Exception:
            log.exception("reading ahead failed")
        finally:
            piece.done.set()

    async def _read(self, node: Node, start: int, stop: int) -> bytes:
        share = self._share
        for last in (False, True):
            file = node.share_fd or await self._open(node)
            try:
                return await share.fetch(calls.pread, file, stop - start, start)
            except OSError as caught:
                if caught.errno != errno.ESTALE or last:
                    raise
                node.share_fd = None
                if node.slinks:
                    share.forget_directory(node.slinks[0][0])
        raise AssertionError("unreachable")

    async def _open(self, node: Node) -> Descriptor:
        share = self._share
        while True:
            base = node.base
            try:
                file = await self._volume.at_place(node, share.fetch, calls.open_file, os.O_RDONLY)
            except FileNotFoundError:
                if node.share_fd is not None:
                    return node.share_fd  # it was opened just before it was removed
                if node.slinks:
                    raise
                raise error(errno.EIO) from None
            if node.share_fd is not None:
                return node.share_fd
            if node.base is base:
                if node.handles:
                    node.share_fd = file
                return file
            # Published meanwhile: we may have opened what was replaced.
