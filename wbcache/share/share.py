"""The way to the share: worker threads with limits and deadlines, and directory descriptors.

Foreground calls (`look`, `fetch`) may be given up at their deadline, since they only read. Calls of
the flusher (`work`) change the share and are never given up while the daemon lives: a late thread
that nobody waits for could undo newer data. Both wait while it is not certain that what is at
SOURCE is the share that the cache belongs to; `find_out` is for those who see to that.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

import trio

from wbcache.node import Directory, Node
from wbcache.processes import raise_file_limit
from wbcache.share import calls
from wbcache.share.descriptor import Descriptor
from wbcache.share.health import Health
from wbcache.share.lanes import GivenUp, Lane, Place, Subject
from wbcache.share.names import OWN_DIRECTORY

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_MAX_DIRECTORIES = 2048

MAX_CALLERS = 256
"""Foreground calls that may wait for the share at a time. The mount serves four times as many
requests, so that enough are left for what is known here."""

SILENCE = 1.0
"""Seconds without any answer after which more callers than that are turned away."""

LATE_LOOKUP, LATE_DATA, LATE_CHANGE = 0.5, 5.0, 10.0
"""Seconds after which a look-up, a call for data and one of the flusher are late, should the share
answer others meanwhile."""

_CUT_OFF = (errno.ENOTCONN, errno.ECONNABORTED, errno.ESHUTDOWN)
"""Errors of the way to the share: it has not said anything."""

LOST = (*_CUT_OFF, errno.ESTALE, errno.ENODEV)
"""Errors after which a mount of the share may be gone for good."""


class Share:
    """One mounted share, reached through the descriptor of its root."""

    def __init__(
        self,
        root_fd: int | None,
        *,
        lookup_deadline: float,
        deadline: float,
        workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a ``root_fd`` nothing can be asked before `replace_root`."""
        self.is_open = root_fd is not None
        if root_fd is None:
            root_fd = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
        self.root = Descriptor(root_fd)
        """Of the directory at SOURCE; always the same object."""
        self._verified = trio.Event()
        self._verified.set()
        self.doubted = trio.Event()
        """Set when a call says that the share's mount may be gone."""
        self.lookup_deadline = lookup_deadline
        self.deadline = deadline
        self.health = Health(clock)
        self.id_name: bytes | None = None
        """The file in our own directory that tells that this is the share; None: there is none."""
        self.is_missing = False
        """It was not there when it was last looked for."""
        self.stable_ino = False
        """Whether the share's inode numbers tell one file from another for good."""
        self._moves = 0
        """How many renames of directories on the share have ended."""
        self._moving: set[Node] = set()
        """Directories that are being renamed there."""
        self._moved = trio.Event()
        """Set, and replaced, when one ends."""
        self._callers = trio.CapacityLimiter(MAX_CALLERS)
        self._lookups = Lane(64, LATE_LOOKUP, self.health, clock)
        self._data = Lane(32, LATE_DATA, self.health, clock)
        self._flush = Lane(workers, min(LATE_CHANGE, deadline), self.health, clock)
        self._inquiries = Lane(64, math.inf, self.health, clock)
        self._given_up = GivenUp()
        self._is_torn = False
        """It has calls that it does not answer while it answers others."""
        self._directories: OrderedDict[Directory, None] = OrderedDict()
        self._max_directories = min(_MAX_DIRECTORIES, raise_file_limit() // 8)

    # -- calls ---------------------------------------------------------------------------------

    async def look(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Ask for names or attributes; ETIMEDOUT past the lookup deadline."""
        return await self._ask(
            self._lookups,
            self.lookup_deadline,
            lambda: call(*args, **kwargs),
            _subject(args),
            question=True,
        )

    async def fetch(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Ask for data; ETIMEDOUT past the data deadline."""
        return await self._ask(
            self._data, self.deadline, lambda: call(*args, **kwargs), _subject(args)
        )

    async def _ask(
        self,
        lane: Lane,
        deadline: float,
        call: Callable[[], T],
        subject: Subject | None,
        *,
        question: bool = False,
    ) -> T:
        if not self.health.answering:
            raise OSError(errno.ETIMEDOUT, "the share does not answer")
        if self._given_up.forbid(subject):
            raise OSError(errno.ETIMEDOUT, "the share has not answered an earlier call about it")
        with trio.move_on_after(deadline):
            if self._callers.available_tokens <= 0:
                await self._queue()
            async with self._callers:
                if not self._verified.is_set():
                    await self._verified.wait()
                ticket = self.health.begin(question=question)
                return await self._in_thread(lane, ticket, call, subject)
        raise OSError(errno.ETIMEDOUT, f"the share did not answer within {deadline:g} s")

    async def _queue(self) -> None:
        """Wait until there is room among the callers, for as long as the share answers.

        Each of them keeps one of the requests that the mount can serve at a time.
        """
        while self._callers.available_tokens <= 0:
            if self.health.waiting > SILENCE or not self.health.answering:
                raise OSError(errno.ETIMEDOUT, "the share does not answer, and many wait for it")
            await trio.sleep(SILENCE / 4)

    async def work(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Change the share: waits for as long as it takes."""
        if not self._verified.is_set():
            await self._verified.wait()
        # Abandoned only when the daemon ends; intents tell the next one what may have happened.
        ticket = self.health.begin()
        return await self._in_thread(self._flush, ticket, lambda: call(*args, **kwargs))

    def late(self) -> list[object]:
        """For whom calls of the flusher are made that hold up nobody else any more: they take very
        long while the share answers others (see `lanes.on_behalf_of`)."""
        return self._flush.late()

    @property
    def given_up(self) -> int:
        """Calls that are not over though nobody waits for them any more."""
        return len(self._given_up)

    async def _in_thread(
        self, lane: Lane, ticket: int, call: Callable[[], T], subject: Subject | None = None
    ) -> T:
        place = Place(lane, self._given_up.discard)
        try:
            result = await trio.to_thread.run_sync(
                partial(_attempt, call), limiter=place.limiter, abandon_on_cancel=True
            )
        except trio.Cancelled:
            # While something is known to hang alone, only a probe tells of the share.
            hangs_alone = subject is not None and self._given_up.since < self.health.last_answer
            self.health.abandoned(ticket, alone=hangs_alone)
            if place.is_taken and not place.is_over:
                lane.give_up(place)
                self._given_up.add(place, subject)
            raise
        except BaseException:
            self.health.end(ticket)
            raise
        if isinstance(result, _Failure):
            if result.errno in _CUT_OFF:
                self.health.unanswered(ticket)
            else:
                self.health.end(ticket)
            if result.errno in LOST:
                self.doubted.set()
            raise result.take()
        self.health.end(ticket)
        return result

    async def find_out(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a call though it is not certain that this is the right share."""
        ticket = self.health.begin()
        return await self._in_thread(self._inquiries, ticket, lambda: call(*args, **kwargs))

    def observe(self) -> None:
        """Call it now and then: changes of the share's state are logged here."""
        self.health.observe()
        is_torn = self._given_up.since < self.health.last_answer
        if is_torn != self._is_torn:
            self._is_torn = is_torn
            log.warning(
                "some calls are not answered, though others are"
                if is_torn
                else "all calls are answered again"
            )

    async def probe_until_answer(self, interval: float = 1.0) -> None:
        """Wait until the share answers again."""
        while not self.health.answering:
            try:
                if self.is_open:
                    await self.probe()
            except OSError:
                pass
            if not self.health.answering:
                await trio.sleep(interval)

    async def probe(self) -> None:
        """Have the share answer anything. Raises OSError as it does."""
        # No client of a network file system answers this from memory.
        await self.find_out(os.fstatvfs, self.root.fd)

    # -- which share ---------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether it is worth waiting for: it answers, and it is the right one."""
        return self.health.answering and self._verified.is_set()

    def suspend(self) -> None:
        """Until `resume` nothing is asked of the share and nothing done there."""
        if self._verified.is_set():
            self._verified = trio.Event()

    def resume(self) -> None:
        """It is the share that it should be."""
        self.is_missing = False
        self.doubted = trio.Event()
        self._verified.set()

    async def open_root(self, path: str) -> None:
        """Open the directory at SOURCE, anew if it was open. Descriptors from before are no good.

        The kernel may do that without the share, so it tells nothing of the share's health.
        """
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        self.replace_root(
            await trio.to_thread.run_sync(
                os.open,
                path,
                flags,
                limiter=Place(self._inquiries, self._given_up.discard).limiter,
                abandon_on_cancel=True,
            )
        )

    def replace_root(self, root_fd: int) -> None:
        """The same, with a descriptor, which it takes."""
        os.dup2(root_fd, self.root.fd, inheritable=False)
        os.close(root_fd)
        self.is_open = True
        for directory in self._directories:
            directory.share_dirfd = None
        self._directories.clear()
        self._given_up.forget_subjects()

    async def stat(
        self, parent: Descriptor, name: bytes, *, flush: bool = False
    ) -> os.stat_result | None:
        """Attributes of a name; None when it is certain that there is no such name."""
        ask = self.work if flush else self.look
        st = await ask(calls.lstat_or_none, parent, name)
        if st is None and self.id_name is not None:
            await self.confirm(flush=flush)
            st = await ask(calls.lstat_or_none, parent, name)
        return st

    async def remove(self, call: Callable[P, bool], *args: P.args, **kwargs: P.kwargs) -> None:
        """Make a call that removes something and returns whether it was there; that it was not is
        not believed at once."""
        if not await self.work(call, *args, **kwargs):
            await self.confirm(flush=True)
            await self.work(call, *args, **kwargs)

    async def confirm(self, *, flush: bool = False) -> None:
        """Something was not found: see that the share is there, before one asks again.

        A directory on which the network mount is missing has no names at all, and some servers
        answer so while they start. Raises OSError (ENOTCONN) when our id file isn't found either.
        """
        if self.id_name is None:
            return  # nothing would tell
        ask = self.work if flush else self.look
        try:
            await ask(calls.find, self.root, OWN_DIRECTORY, self.id_name)
        except (FileNotFoundError, NotADirectoryError):
            self.is_missing = True
            self.doubted.set()
            raise OSError(errno.ENOTCONN, "the share is not there") from None
        self.is_missing = False

    # -- directories ---------------------------------------------------------------------------

    async def directory(self, directory: Directory, *, flush: bool = False) -> Descriptor:
        """A descriptor of a directory on the share.

        It stays right when we rename the directory there. Raises FileNotFoundError when the
        directory is not on the share.
        """
        is_there = self.id_name is None
        for _ in range(8):
            found = directory.share_dirfd
            if found is not None:
                if directory in self._directories:  # the root's is held for good
                    self._directories.move_to_end(directory)
                return found
            chain: list[tuple[Directory, bytes]] = []
            at = directory
            base: Descriptor | None = None
            while base is None:
                if not at.slinks:
                    raise FileNotFoundError(errno.ENOENT, "not on the share")
                parent, name = at.slinks[0]
                chain.append((at, name))
                at = parent
                base = at.share_dirfd
            chain.reverse()
            names = tuple(name for _, name in chain)
            moves = self._moves
            ask = self.work if flush else self.look
            try:
                opened = await ask(calls.open_chain, base, names)
            except FileNotFoundError:
                if any(node in self._moving for node, _ in chain):
                    await self._after_move(math.inf if flush else self.lookup_deadline)
                elif moves == self._moves:
                    if is_there:
                        raise
                    await self.confirm(flush=flush)
                    is_there = True
                continue  # it was just being moved
            if moves != self._moves:
                continue  # a directory on the way may have been another one by now
            for (node, _), descriptor in zip(chain, opened, strict=True):
                if not node.slinks:
                    break  # just removed, with all below it
                node.share_dirfd = descriptor
                self._directories[node] = None
                self._directories.move_to_end(node)
            while len(self._directories) > self._max_directories:
                oldest, _ = self._directories.popitem(last=False)
                oldest.share_dirfd = None
            return opened[-1]
        raise OSError(errno.EAGAIN, "directories on the share keep moving")

    @contextmanager
    def moving(self, node: Node, moves: bool = True) -> Iterator[None]:
        """The node is being renamed on the share, if it ``moves``: paths through it can't be relied
        on until it is known where it is."""
        if not moves or not node.is_dir:
            yield
            return
        self._moving.add(node)
        try:
            yield
        finally:
            self._moving.discard(node)
            self._moves += 1
            moved, self._moved = self._moved, trio.Event()
            moved.set()

    async def _after_move(self, deadline: float) -> None:
        with trio.move_on_after(deadline):
            await self._moved.wait()
            return
        raise OSError(errno.ETIMEDOUT, "the share does not finish a rename")

    def hold_root(self, root: Directory) -> None:
        """The root's descriptor is ours for good."""
        root.share_dirfd = self.root
        self._directories.pop(root, None)

    def close(self) -> None:
        """Give the descriptors back, each as soon as no call uses it any more."""
        for directory in self._directories:
            directory.share_dirfd = None
        self._directories.clear()
        self.root = Descriptor(-1)

    def forget_directory(self, directory: Directory) -> None:
        """A directory's descriptor may be stale: find it by name next time, and all above it."""
        at: Directory | None = directory
        while at is not None and at.slinks:
            if at in self._directories:
                del self._directories[at]
                at.share_dirfd = None
            at = at.slinks[0][0]

    def drop_directory(self, directory: Directory) -> None:
        """A directory is gone from the share: its descriptor is of no use any more."""
        self._directories.pop(directory, None)
        directory.share_dirfd = None


class _Failure:
    """The error of a call in a thread.

    Raised there, its traceback would be part of circles with trio's frames, also when nobody waits
    for the call any more, and the descriptors of the call would stay open until the garbage
    collector, which runs rarely, finds them.
    """

    def __init__(self, error: OSError) -> None:
        self.errno = error.errno
        self._error: OSError | None = error.with_traceback(None)

    def take(self) -> OSError:
        """The error, which the caller raises at once."""
        error, self._error = self._error, None
        assert error is not None
        return error


def _subject(args: tuple[object, ...]) -> Subject | None:
    """What a call is about, from its arguments; None when that can't be told."""
    if not args or not isinstance(args[0], Descriptor):
        return None
    name = args[1] if len(args) > 1 else b""
    return args[0], name if isinstance(name, bytes | tuple) else b""


def _attempt(call: Callable[[], T]) -> T | _Failure:
    try:
        return call()
    except OSError as error:
        return _Failure(error)
