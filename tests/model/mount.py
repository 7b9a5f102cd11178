"""A mount without a kernel: everything that the daemon runs, in time that the test lets pass."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import trio

from tests.faults.injection import Injector
from tests.model.gate import Call, Gate
from tests.volumes import close_volume, open_volume
from wbcache.config import Config
from wbcache.daemon.eviction import Evictor
from wbcache.daemon.recovery import settle_intents
from wbcache.daemon.syncing import Syncer
from wbcache.filesystem import FileSystem
from wbcache.flush.flusher import Flusher
from wbcache.fuse import Operations
from wbcache.loading import Loaded
from wbcache.share.capabilities import Capabilities
from wbcache.share.lanes import Lane, Place, Subject
from wbcache.share.share import Share
from wbcache.volume import Volume

P = ParamSpec("P")
T = TypeVar("T")

PROBE_INTERVAL = 1.0


class ModelShare(Share):
    """A share whose calls fail when the test says so."""

    injector: Injector
    failing: int = 0
    """How many of the next foreground calls fail."""
    failed: int = 0
    """How many did."""

    async def _ask(
        self,
        lane: Lane,
        deadline: float,
        call: Callable[[], T],
        subject: Subject | None,
        *,
        question: bool = False,
    ) -> T:
        def attempt() -> T:
            if self.failing:
                self.failing -= 1
                self.failed += 1
                raise OSError(errno.EIO, "injected")
            return call()

        return await super()._ask(lane, deadline, attempt, subject, question=question)

    async def work(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await super().work(lambda: self.injector.within(call, *args, **kwargs))

    def is_flush(self, call: Call) -> bool:
        """Whether a call is one that the flusher makes."""
        return isinstance(call.lane, Place) and call.lane.lane is self._flush


class Mount:
    """One life of a mount, from its start to a kill."""

    volume: Volume
    filesystem: FileSystem
    operations: Operations
    flusher: Flusher
    evictor: Evictor
    share: ModelShare

    def __init__(
        self,
        share: str,
        cache: str,
        gate: Gate,
        injector: Injector,
        config: Config,
        capabilities: Capabilities,
    ) -> None:
        self._place = (share, cache)
        self.gate = gate
        self._injector = injector
        self._config = config
        self._capabilities = capabilities
        self.nursery: trio.Nursery
        """Ends with the mount."""
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self.failure: BaseException | None = None
        """Why it ended before it was told to."""

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until `kill`."""
        volume, loaded = open_volume(
            *self._place,
            config=self._config,
            capabilities=self._capabilities,
            clock=trio.current_time,
            share_type=ModelShare,
        )
        self.volume = volume
        self.share = cast(ModelShare, volume.share)
        self.share.injector = self._injector
        volume.space._other = lambda: 0
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._put_together(volume, loaded, nursery)
                    task_status.started()
        except BaseException as error:
            if not self.gate.closed:
                self.failure = error
                close_volume(volume)
        finally:
            self._ended.set()

    def _put_together(self, volume: Volume, loaded: Loaded, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.filesystem = FileSystem(volume, nursery)
        self.flusher = Flusher(volume, self.filesystem.listings.gone)
        self.evictor = Evictor(volume, self.flusher)
        self.operations = Operations(self.filesystem)
        nursery.start_soon(self._settle_and_flush, loaded)
        nursery.start_soon(self.evictor.run)
        nursery.start_soon(Syncer(volume).run)
        nursery.start_soon(self._probe)

    async def _settle_and_flush(self, loaded: Loaded) -> None:
        await settle_intents(self.volume, loaded, self.flusher.failures.inherit)
        await self.flusher.run()

    async def _probe(self) -> None:
        while True:
            await trio.sleep(PROBE_INTERVAL)
            self.share.health.observe()
            await self.share.probe_until_answer(PROBE_INTERVAL)

    async def kill(self) -> None:
        """End at once: what was committed is there, no answer comes any more."""
        self.gate.close()
        close_volume(self.volume)
        # What a task does while it is ended can't reach the journal any more.
        self._scope.cancel()
        await self._ended.wait()

    @property
    def is_settled(self) -> bool:
        """Whether it is known what the last life had done on the share."""
        return self.volume.settled.is_set()
