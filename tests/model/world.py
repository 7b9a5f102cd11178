"""A mount, the plain directory beside it, and what happens between operations."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pyfuse3
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.faults.injection import Call as ShareCall
from tests.faults.injection import Fault, Injector
from tests.model import invariants, trees
from tests.model.gate import Call, Gate
from tests.model.kernel import Kernel, Path
from tests.model.mount import Mount
from tests.volumes import nothing_left
from wbcache.config import CacheConfig, Config, FlushConfig, RetryConfig, ShareConfig, Size
from wbcache.node import Node
from wbcache.share.capabilities import Capabilities
from wbcache.share.share import SILENCE

T = TypeVar("T")

PATIENCE = 40.0
"""Seconds, of the mount's time, within which every operation has to end whatever the share does."""

QUESTIONS = ("look up", "list", "close")
"""What is refused never: then nobody can find out what became of the call before."""

TICK = 0.05
LIMIT = 300
"""Seconds, of the mount's time, within which a drain has to end."""

CONFIG = Config(
    flush=FlushConfig(workers=2, small_workers=4, retry=RetryConfig(1.0, 8.0)),
    share=ShareConfig(attr_ttl=1.0, dir_ttl=5.0),
)
LARGE = CacheConfig(size=Size(bytes=1 << 30), min_free=Size())
TIGHT = CacheConfig(size=Size(bytes=768 << 10), min_free=Size())


@dataclass(frozen=True)
class Setting:
    """What the mount is like."""

    tight: bool = False
    """The cache holds less than the programs write."""
    capabilities: Capabilities = field(default_factory=Capabilities)

    @property
    def config(self) -> Config:
        """Its configuration."""
        cache = TIGHT if self.tight else LARGE
        return Config(cache=cache, flush=CONFIG.flush, share=CONFIG.share)


@dataclass(eq=False)
class OpenFile:
    """One open file, in the mount and in the plain directory."""

    handle: int
    ino: int
    fd: int
    flags: int


@dataclass(eq=False)
class Stream:
    """An open directory that is being read."""

    handle: int
    path: Path
    offset: int
    names: list[bytes]
    """What was read so far."""
    before: dict[bytes, int]
    """The inode numbers of what was in it at the beginning."""


@dataclass(eq=False)
class LateRead:
    """A read whose bytes are on their way from the share."""

    fd: int
    offset: int
    size: int
    task: trio.lowlevel.Task | None
    outcome: list[bytes | OSError]
    versions: list[bytes]
    """What the range held since the read began."""


class World:
    """Both directories, and everything that is open."""

    kernel: Kernel
    mount: Mount
    gate: Gate

    def __init__(self, place: str, setting: Setting, clock: MockClock) -> None:
        self.share, self.native = (os.path.join(place, name) for name in ("share", "native"))
        self._cache = os.path.join(place, "cache")
        for path in (self.share, self.native, self._cache):
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
        self.setting = setting
        self._clock = clock
        self.injector = Injector(self.share)
        self.faults: list[tuple[int, Fault]] = []
        """Calls of the flusher to let pass, and what befalls the next one."""
        self.injector.decide = self._decide
        self.hanging = False
        """The share answers nothing."""
        self.lag = 0
        """So many of the flusher's calls are made while an operation is under way."""
        self.open: list[OpenFile] = []
        self.streams: list[Stream] = []
        self.reads: list[LateRead] = []
        self.directory_times = True
        """Whether the mount can know when directories were changed last."""
        self.log: list[str] = []
        self._pins: dict[int, int] = {}
        """Descriptors that keep the plain directory's inode numbers from being used again."""
        self._known: dict[int, int] = {}
        """Inode numbers in the mount by those in the plain directory."""
        self._numbers = itertools.count(1)
        self.nursery: trio.Nursery

    # -- life ----------------------------------------------------------------------------------

    async def start(self, gate: Gate) -> None:
        """Mount: at first, and after a kill."""
        self.gate = gate
        self.mount = Mount(
            self.share,
            self._cache,
            gate,
            self.injector,
            self.setting.config,
            self.setting.capabilities,
        )
        await self.nursery.start(self.mount.serve)
        self._clock.jump(1000.0)
        self.kernel = Kernel(self.mount.operations)

    async def stop(self) -> None:
        """End everything where it is; what is open is closed."""
        await self.mount.kill()
        for file in self.open:
            os.close(file.fd)
        for read in self.reads:
            os.close(read.fd)
        self.open.clear()
        self.streams.clear()
        self.reads.clear()
        self.hanging = False

    async def restart(self, *, remember: bool, made: int) -> None:
        """Kill the mount, of whose calls under way some were ``made`` (bits), and start again.

        With ``remember`` everything that was seen of the share had been written down.
        """
        if remember:
            self.mount.volume.remembered.store()
        for index, call in enumerate(list(self.gate.calls)):
            if self.mount.share.is_flush(call) and not call.made and made >> index & 1:
                try:
                    call.call()
                except OSError:
                    pass
        await self.stop()
        if not remember:
            self._known.clear()
        self.gate.closed = False
        await self.start(self.gate)

    def close(self) -> None:
        """Give back what the plain directory needed."""
        for fd in self._pins.values():
            os.close(fd)
        self._pins.clear()

    # -- time ----------------------------------------------------------------------------------

    def _decide(self, call: ShareCall) -> Fault | None:
        if self.faults:
            count, fault = self.faults.pop(0)
            if not count:
                if fault.errno == errno.EACCES and call.operation in QUESTIONS:
                    self.faults.insert(0, (0, fault))
                    return None  # what was done just before can't be found out then
                self.log.append(f"   {fault} at {call}")
                return fault
            self.faults.insert(0, (count - 1, fault))
        return None

    async def idle(self) -> None:
        """Let everything run up to where it stops."""
        while True:
            await wait_all_tasks_blocked()
            if self.mount.failure is not None:
                raise self.mount.failure
            if not self._advance_some():
                return

    def _advance_some(self, besides: trio.lowlevel.Task | None = None) -> bool:
        """Let calls go on that are not the flusher's; False when there are none."""
        late = {read.task for read in self.reads}
        free = [
            call
            for call in self.gate.calls
            if call.task is not besides
            and (
                call.lane is self.mount.volume.local_lane
                or not (self.hanging or self.mount.share.is_flush(call) or call.task in late)
            )
        ]
        for call in free:
            call.advance()
        return bool(free)

    def flush_calls(self) -> list[Call]:
        """The flusher's calls under way."""
        return [call for call in self.gate.calls if self.mount.share.is_flush(call)]

    async def step(self, which: int) -> bool:
        """One of the flusher's calls goes on; False when there is none."""
        await self.idle()
        calls = self.flush_calls()
        if not calls or self.hanging:
            return False
        calls[which % len(calls)].advance()
        await self.idle()
        return True

    async def pass_time(self, seconds: float) -> None:
        """Time passes."""
        await self.idle()
        self._clock.jump(seconds)
        await self.idle()

    async def perform(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call of the mount; when it has to wait, everything else goes on."""
        outcome: list[T | BaseException] = []
        tasks: list[trio.lowlevel.Task] = []

        async def run() -> None:
            tasks.append(trio.lowlevel.current_task())
            try:
                outcome.append(await call())
            except (pyfuse3.FUSEError, OSError) as error:
                outcome.append(error)

        self.nursery.start_soon(run)
        began = trio.current_time()
        for number in range(self.lag):
            await wait_all_tasks_blocked()
            while not outcome and self._advance_some(tasks[0]):
                await wait_all_tasks_blocked()
            calls = self.flush_calls()
            if outcome or not calls or self.hanging:
                break
            calls[number % len(calls)].advance()
        while True:
            await self.idle()
            if outcome:
                break
            if not await self.step(0):
                waited = trio.current_time() - began
                assert waited < PATIENCE, f"it does not end: {self.gate.calls}"
                self._clock.jump(TICK)
        self._look_at_late_reads()
        (found,) = outcome
        if isinstance(found, pyfuse3.FUSEError):
            if found.__cause__ is not None and not isinstance(found.__cause__, OSError):
                raise found.__cause__
            raise OSError(found.errno, os.strerror(found.errno)) from found
        if isinstance(found, BaseException):
            raise found
        return found

    # -- comparing -----------------------------------------------------------------------------

    def condition(self) -> tuple[int, bool]:
        """How many foreground calls have failed, and whether those to come may be answered."""
        share = self.mount.share
        usable = self.mount.is_settled and share.health.answering and not self.hanging
        usable = usable and share.health.waiting < SILENCE
        return share.failed, usable

    def excused(self, code: int, before: tuple[int, bool]) -> bool:
        """Whether an error is due to what the share does, or did when the operation began."""
        failed, usable = self.condition()
        if failed > before[0] and code in (errno.EIO, errno.ETIMEDOUT):
            return True  # a read of which a part is here does not tell one from the other
        if code == errno.ETIMEDOUT:
            return not usable or not before[1]
        return code == errno.ENOSPC and self.setting.tight and self._is_filled()

    def _is_filled(self) -> bool:
        """Whether what fills the cache can't go to the share just now, or never will."""
        nodes = self.mount.volume.tree.nodes.values()
        return (
            self.hanging
            or bool(self.faults)
            or any(node.trouble or (node.handles and not node.links) for node in nodes)
        )

    async def both(
        self, here: Callable[[], Awaitable[T]], there: Callable[[], T | None]
    ) -> tuple[T, T | None] | None:
        """The same operation in the mount and in the plain directory; what they return.

        None when both failed alike, or the share did not let it happen at all.
        """
        before = self.condition()
        code, result = 0, None
        try:
            result = await self.perform(here)
        except OSError as error:
            code = error.errno or errno.EIO
            if self.excused(code, before):
                self.log.append(f"   {errno.errorcode[code]}, because of the share")
                return None
        native, expected = 0, None
        try:
            expected = there()
        except OSError as error:
            native = error.errno or errno.EIO
        names = [errno.errorcode.get(number, "0") for number in (code, native)]
        assert code == native, f"{names[0]} instead of {names[1]}"
        self._look_at_late_reads()
        return None if code else (result, expected)  # type: ignore[return-value]

    def _look_at_late_reads(self) -> None:
        for read in self.reads:
            now = os.pread(read.fd, read.size, read.offset)
            if now != read.versions[-1]:
                read.versions.append(now)

    def path(self, path: Path) -> bytes:
        """A path in the plain directory."""
        return os.path.join(os.fsencode(self.native), *path)

    def fresh(self, size: int) -> bytes:
        """Bytes that were never written before."""
        word = b"<%d>" % next(self._numbers)
        return (word * (size // len(word) + 1))[:size]

    async def check(self) -> None:
        """The mount shows what the plain directory holds, and its state is sound."""
        here: dict[Path, int] = {}
        there: dict[Path, int] = {}
        before = self.condition()
        with_xattrs = self.setting.capabilities.xattr
        try:
            found = await self.perform(
                lambda: trees.shown(self.kernel, here, with_xattrs=with_xattrs)
            )
        except OSError as error:
            if self.excused(error.errno or 0, before):
                return
            raise
        wanted = trees.held(self.native, there)
        if not self.directory_times:
            found, wanted = map(trees.without_directory_times, (found, wanted))
        wrong = trees.differences(found, wanted)
        assert not wrong, f"the mount differs:\n  {wrong}"
        for path, number in there.items():
            if number not in self._pins:
                flags = os.O_PATH | os.O_NOFOLLOW
                self._pins[number] = os.open(self.path(path), flags)
            known = self._known.setdefault(number, here[path])
            assert known == here[path], f"{path} had inode {known}, now {here[path]}"
        await self.idle()
        invariants.check(self.mount.volume)

    async def drain(self) -> None:
        """Flush everything; the share then holds what the plain directory does."""
        self.faults.clear()
        self.mount.share.failing = 0
        self.hanging = False
        flusher, volume = self.mount.flusher, self.mount.volume
        turns, waited = itertools.count(), 0
        while True:
            await self.idle()
            if self.flush_calls():
                await self.step(next(turns))
                continue
            ready = self.mount.is_settled and self.mount.share.health.answering
            swept = not (flusher.is_tidying or flusher.sweeper.later)
            if ready and swept and not (flusher.unfinished() or flusher.running):
                break
            if ready and waited % 60 == 0:
                flusher.drain()  # what was refused is tried again
            assert waited < LIMIT, f"it does not drain: {self._unfinished()}"
            waited += 1
            self._clock.jump(1.0)
        flusher.timing.all_due = False
        flusher.sweeper._insists = False
        await self.pass_time(0.1)
        self.check_share()
        nothing_left(volume, flusher)
        await self.check()

    def _unfinished(self) -> list[str]:
        return [
            f"{item} {item.trouble or ''}" if isinstance(item, Node) else str(item)
            for item in self.mount.flusher.unfinished()
        ]

    def check_share(self) -> None:
        """The share holds what the plain directory does, and nothing of ours besides."""
        found = trees.held(self.share)
        left = trees.own_names(found)
        assert not left, f"temporaries on the share: {left}"
        wanted = trees.without_directory_times(trees.held(self.native))
        wrong = trees.differences(trees.without_directory_times(found), wanted)
        assert not wrong, f"the share differs:\n  {wrong}"

    # -- finding things ------------------------------------------------------------------------

    def paths(self, *kinds: int) -> list[Path]:
        """The paths in the plain directory of things of these kinds, in order."""
        found: list[Path] = []

        def visit(directory: bytes, prefix: Path) -> None:
            for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
                mode = entry.stat(follow_symlinks=False).st_mode
                if not kinds or stat.S_IFMT(mode) in kinds:
                    found.append((*prefix, entry.name))
                if stat.S_ISDIR(mode):
                    visit(entry.path, (*prefix, entry.name))

        visit(os.fsencode(self.native), ())
        return found

    def directories(self) -> list[Path]:
        """The same for directories, with the root."""
        return [(), *self.paths(stat.S_IFDIR)]
