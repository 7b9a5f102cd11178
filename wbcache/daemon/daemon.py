"""One mount's life: serve, unmount, drain, end.

The file system is mounted before anything is flushed, and unmounted before the drain, so that the
kernel has handed over everything that programs wrote through mappings.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pyfuse3
import trio

from wbcache import mounts
from wbcache.control.server import ControlServer, Progress, Rows
from wbcache.daemon import mounting, pump, report
from wbcache.daemon.attachment import Attachment
from wbcache.daemon.eviction import Evictor
from wbcache.daemon.recovery import settle_intents
from wbcache.daemon.syncing import Syncer
from wbcache.errors import FuseError, WbcacheError
from wbcache.escaping import to_bytes
from wbcache.filesystem import FileSystem
from wbcache.flush.flusher import Flusher
from wbcache.fuse import Operations
from wbcache.loading import Loaded
from wbcache.node import Directory, Node
from wbcache.share.health import WAITING_SECONDS
from wbcache.tree import Item
from wbcache.volume import Volume

log = logging.getLogger(__name__)

MAX_TASKS = 1024
"""Requests served at a time. One that waits for the share takes a task, so there must be many."""

CHECKPOINT_INTERVAL = 5.0
WATCH_INTERVAL = 1.0
NAMESPACE_GRACE = 5.0
"""Seconds after an unmount for which a copy of the mount in another mount namespace, a container's
say, may keep it alive."""

PROGRESS_INTERVAL = 0.2
MAX_LOGGED = 100
"""What remains at the end is written to the log up to so many rows; commands list all of it."""

LOOK_INTERVAL = 0.02
"""Seconds between two looks at whether a flush has ended."""

COUNTING = 20
"""What is left is counted no more often than after this many times the time that it takes."""

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

FREEZE_LIMIT = 0.2
"""Seconds for which a client killed in mid-request can stop the whole daemon, see `unfreeze`."""


def unfreeze() -> None:
    """Interrupt a read of the FUSE device that has nothing to read.

    pyfuse3 reads the device after epoll said it was readable. When the client whose request that
    was is killed in between, the read blocks with the interpreter locked until the next request.
    A periodic signal makes it return. It needs the event loop on the main thread.
    """
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, FREEZE_LIMIT, FREEZE_LIMIT)


class Daemon:
    """Serves one mount until it is unmounted and drained."""

    def __init__(
        self,
        volume: Volume,
        loaded: Loaded,
        attachment: Attachment,
        *,
        source: str,
        mountpoint: str,
        cache_dir: str,
        kernel_options: Sequence[str],
    ) -> None:
        self._volume = volume
        self._loaded = loaded
        self._attachment = attachment
        self._source = source
        self._mountpoint = mountpoint
        self._cache_dir = cache_dir
        self._kernel_options = kernel_options
        self._mounted = False
        self._unmounted = trio.Event()
        self._announced = trio.Event()
        """The mount has answered, and whoever asked for it knows."""
        self._drained = trio.Event()
        self._detached = False
        """Taken out of the tree while programs use it."""
        self._patience = volume.config.drain.timeout or math.inf
        """Seconds that the final flush may take."""
        self._give_up_at: float | None = None
        """When it ends, by trio's clock; None before it has begun."""
        self._drains: set[trio.CancelScope] = set()
        self._remaining: list[Item] = []
        self._filesystem: FileSystem
        self._flusher: Flusher

    async def run(self, ready: Callable[[], None], patience: float) -> bool:
        """Mount and serve; returns whether the share has everything at the end.

        The mount comes up when the share is verified or ``patience`` seconds have gone by. Raises
        WbcacheError when it can't.
        """
        try:
            failure = await self._run(ready, patience)
            if failure is not None:
                raise failure
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if self._mounted:  # a fault of ours: leave no dead mount behind
                mounts.unmount(self._mountpoint, lazy=True)
        return not self._remaining

    async def _run(self, ready: Callable[[], None], patience: float) -> WbcacheError | None:
        async with trio.open_nursery() as services:
            filesystem = self._filesystem = FileSystem(self._volume, services)
            self._flusher = Flusher(self._volume, filesystem.listings.gone)
            services.start_soon(self._guard, self._attach)
            failure = await self._attachment.begin(patience)
            if failure is not None:
                services.cancel_scope.cancel()
                return failure
            operations = Operations(filesystem)
            server = ControlServer(self._cache_dir, self)
            try:
                self._mount(operations)
            except OSError as error:
                server.close()
                operations.close()
                services.cancel_scope.cancel()
                return FuseError(self._mountpoint, f"cannot be mounted ({error.strerror})")
            unfreeze()
            pump.install()
            services.start_soon(self._guard, self._settle_and_flush)
            services.start_soon(self._guard, self._checkpoint)
            services.start_soon(self._guard, Evictor(self._volume, self._flusher).run)
            services.start_soon(self._guard, self._probe)
            services.start_soon(self._guard, self._watch)
            services.start_soon(self._guard, self._volume.make_spares)
            services.start_soon(self._guard, Syncer(self._volume).run)
            services.start_soon(self._guard, self._volume.remembered.run)
            services.start_soon(self._guard, filesystem.forgetter.run)
            services.start_soon(self._signals)
            services.start_soon(server.serve)
            services.start_soon(self._announce, ready)
            try:
                await pyfuse3.main(min_tasks=4, max_tasks=MAX_TASKS)
            finally:
                log.info("unmounted")
                self._mounted = False
                self._unmounted.set()
                operations.close()
                pyfuse3.close(unmount=False)
            await self._drain()
            self._volume.remembered.store()
            await server.finish()
            services.cancel_scope.cancel()
        return None

    def _mount(self, operations: Operations) -> None:
        options = (*self._kernel_options, "default_permissions", "nosuid", "nodev")
        where, names = self._mountpoint, {"subtype=wbcache"}
        names.add(_Option(f"fsname={_escape(self._source)}"))
        try:
            if os.geteuid() == 0:
                where = f"/dev/fd/{mounting.mount(self._source, where, options)}"
            else:
                names |= set(options)
            pyfuse3.init(operations, where, names)
        except RuntimeError as error:
            raise OSError(errno.EIO, f"the mount failed ({error})") from error
        self._mounted = True

    def _tune(self) -> None:
        """Raise the kernel's limits for this mount, where we may.

        Only once it answers: the first exchange with the kernel sets them anew.
        """
        entry = mounts.mount_at(self._mountpoint, mounts.read_mounts())
        if entry is None:
            return
        minor = entry.device.partition(":")[2]
        for path, value in (
            (f"/sys/class/bdi/{entry.device}/read_ahead_kb", "1024"),
            (f"/sys/fs/fuse/connections/{minor}/max_background", str(MAX_TASKS)),
            (f"/sys/fs/fuse/connections/{minor}/congestion_threshold", str(MAX_TASKS * 3 // 4)),
        ):
            try:
                with open(path, "w") as file:
                    file.write(value)
            except OSError as error:
                log.debug("%s stays as it is: %s", path, error)

    async def _announce(self, ready: Callable[[], None]) -> None:
        # A process of its own looks whether the mount answers: a thread of ours that waits for our
        # own answer could not be killed.
        await trio.run_process(["/bin/sh", "-c", 'test -d "$0"', self._mountpoint])
        self._tune()
        ready()
        self._announced.set()

    # -- services ------------------------------------------------------------------------------

    async def _guard(self, service: Callable[[], Awaitable[None]]) -> None:
        """Keep a service going: a fault in it must not end the mount."""
        while True:
            try:
                await service()
                return
            except Exception:
                log.exception("%s failed and is started again", service.__qualname__)
                await trio.sleep(1.0)

    async def _attach(self) -> None:
        await self._attachment.run(self._flusher)

    async def _settle_and_flush(self) -> None:
        await self._announced.wait()  # very many dirty files must not delay it
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tidy)  # the share may be long in coming
            await settle_intents(self._volume, self._loaded, self._flusher.failures.inherit)
            nursery.cancel_scope.cancel()
        await self._flusher.run()

    async def _tidy(self) -> None:
        while True:
            await trio.sleep(CHECKPOINT_INTERVAL)
            await self._volume.retired.empty_trash()

    async def _checkpoint(self) -> None:
        while True:
            await trio.sleep(CHECKPOINT_INTERVAL)
            journal = self._volume.journal
            if journal.is_long:
                await trio.to_thread.run_sync(journal.checkpoint, limiter=self._volume.local_lane)
                journal.restart_log()

    async def _probe(self) -> None:
        health = self._volume.share.health
        silent = trio.Event()
        health.on_silent = lambda: silent.set()
        while True:
            if health.answering:
                await silent.wait()
            silent = trio.Event()
            await self._volume.share.probe_until_answer()
            self._flusher.wake()

    async def _watch(self) -> None:
        """See whether a share that answers nothing would answer anything."""
        share = self._volume.share
        while True:
            await trio.sleep(WATCH_INTERVAL)
            share.observe()
            self._flusher.let_pass()
            patience = WATCH_INTERVAL if share.given_up else WAITING_SECONDS
            if share.is_open and share.health.answering and share.health.waiting > patience:
                with trio.move_on_after(share.lookup_deadline):
                    try:
                        await share.probe()
                    except OSError as error:
                        log.debug("the share answers: %s", error)

    async def _signals(self) -> None:
        ending = False
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(*_ENDING) as received:
                async for number in received:
                    name = signal.Signals(number).name
                    if ending:
                        log.info("%s again: what is not flushed by now stays here", name)
                        self._limit(0.0)
                    else:
                        log.info("%s: unmounting and draining", name)
                        nursery.start_soon(self._detach)
                    ending = True

    async def _detach(self) -> None:
        """Take the mount out of the tree though programs use it, flush, then end."""
        if not self._mounted:
            return
        self._detached = True
        try:
            await trio.to_thread.run_sync(lambda: mounts.unmount(self._mountpoint, lazy=True))
        except Exception as error:
            log.warning("unmount: %s", error)
        if not self._unmounted.is_set():
            # Programs still hold files open; they are served until all they wrote is flushed.
            await self._flush_all()
        if not self._unmounted.is_set():
            pyfuse3.terminate()

    # -- draining ------------------------------------------------------------------------------

    async def _drain(self) -> None:
        await self._flush_all()
        self._remaining = self._flusher.unfinished()
        for row in report.rows(self._filesystem, self._remaining)[:MAX_LOGGED]:
            log.warning("not on the share yet: %r %s", row["path"], row["reason"])
        if len(self._remaining) > MAX_LOGGED:
            log.warning("not on the share yet: %d more", len(self._remaining) - MAX_LOGGED)
        self._drained.set()

    async def _flush_all(self) -> None:
        """Flush until the share has everything, or the time for it is up."""
        if self._give_up_at is None:
            self._give_up_at = trio.current_time() + self._patience
        if self._give_up_at <= trio.current_time():
            return
        self._flusher.drain()
        with trio.CancelScope(deadline=self._give_up_at) as scope:
            self._drains.add(scope)
            await self._wait_for(self._flusher.unfinished, lambda *_: None)
        self._drains.discard(scope)

    def _limit(self, seconds: float) -> None:
        """From now on the final flush may take so long."""
        self._give_up_at = trio.current_time() + seconds
        for scope in self._drains:
            scope.deadline = self._give_up_at

    async def _wait_for(
        self, remaining: Callable[[], list[Item]], progress: Progress, *, all_else: bool = True
    ) -> list[Item]:
        """Wait until nothing remains but what the share refuses for good, and, with ``all_else``,
        nothing else is under way either."""
        sent = self._flusher.files.bytes_sent
        while True:
            began = time.perf_counter()
            left = remaining()
            size = sum(n.dirty_bytes for n in left if isinstance(n, Node))
            progress(len(left), size, self._flusher.files.bytes_sent - sent, self._hindrance())
            flusher = self._flusher
            if self._attachment.is_refused or (flusher.is_stalled and not flusher.suspended):
                return left
            settled = not flusher.running and not flusher.is_tidying
            if (settled or not all_else) and all(flusher.is_hopeless(item) for item in left):
                return left
            # With very many files counting takes long; the flush itself must have the time.
            await trio.sleep(max(LOOK_INTERVAL, COUNTING * (time.perf_counter() - began)))

    def _hindrance(self) -> str:
        if not self._volume.share.health.answering:
            return "the share does not answer"
        return "the share is full" if self._volume.starved else ""

    # -- control -------------------------------------------------------------------------------

    async def status(self) -> Mapping[str, Any]:
        """The state of the mount."""
        return {
            "mountpoint": self._mountpoint,
            "source": self._source,
            "cache_dir": self._cache_dir,
            "pid": os.getpid(),
            "mounted": self._mounted,
            **report.status(self._filesystem, self._flusher, self._attachment.problem),
        }

    async def pending(self) -> Rows:
        """Everything that is not on the share yet."""
        return report.rows(self._filesystem, self._flusher.unfinished())

    async def conflicts(self) -> Rows:
        """The conflicts with other writers that nobody has dealt with."""
        return report.conflicts(self._filesystem)

    async def forget_conflicts(self, ids: Sequence[int]) -> None:
        """Somebody has dealt with these."""
        self._volume.conflicts.forget(ids)

    async def flush(
        self, paths: Sequence[bytes], timeout: float | None, progress: Progress
    ) -> Rows:
        """Flush paths (b"" is everything) as they are now."""
        tree, arriving = self._volume.tree, self._flusher.arriving
        upto = tree.seq
        roots = [await self._resolve(path) for path in paths]
        # What was removed while it was on its way to the share will have to be removed there.
        begun = {at: step for at, step in arriving.items() if self._inside_any(at, roots)}

        def remaining() -> list[Item]:
            items = [
                item
                for item in self._items(roots)
                if self._since(item) <= upto or (not isinstance(item, Node) and item in begun)
            ]
            for item in items:
                # A flush that was under way did not cover what was written since it began.
                if not self._is_pulled(item):
                    self._flusher.pull(item)
            for at, step in begun.items():
                if arriving.get(at) == step and tree.wanted(*at) is None:
                    items.append(at)
            return items

        for item in remaining():
            self._flusher.pull(item)
        left: list[Item] = []
        with trio.move_on_after(timeout if timeout is not None else float("inf")) as scope:
            left = await self._wait_for(remaining, progress, all_else=False)
        if scope.cancelled_caught:
            left = remaining()
        return report.rows(self._filesystem, left)

    async def _resolve(self, path: bytes) -> Node:
        node: Node = self._volume.tree.root
        for name in path.split(b"/"):
            if not name or name == b".":
                continue
            found = None
            if isinstance(node, Directory):
                found = await self._filesystem.names.lookup(node, name)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = found
        return node

    def _items(self, roots: list[Node]) -> list[Item]:
        return [item for item in self._flusher.unfinished() if self._inside_any(item, roots)]

    def _inside_any(self, item: Item, roots: list[Node]) -> bool:
        return self._volume.tree.root in roots or any(self._inside(item, root) for root in roots)

    def _inside(self, item: Item, root: Node) -> bool:
        tree = self._volume.tree
        if item is root:
            return True
        if not isinstance(root, Directory):
            return False
        if isinstance(item, Node):
            return any(tree.is_below(directory, root) for directory, _ in item.links)
        return tree.is_below(item[0], root)

    def _is_pulled(self, item: Item) -> bool:
        if isinstance(item, Node):
            return item.pulled
        change = self._volume.tree.changes.get(item)
        return change is None or change.pulled

    def _since(self, item: Item) -> int:
        if isinstance(item, Node):
            return item.dirty.since if item.dirty is not None else 0
        change = self._volume.tree.changes.get(item)
        return change.seq if change is not None else 0

    async def umount(self, timeout: float | None, drain: bool, progress: Progress) -> Rows:
        """Unmount, then flush everything; the daemon ends afterwards."""
        limit = timeout if drain else 0.0
        if self._detached or not self._mounted:
            if limit is not None:
                self._limit(limit)
        else:
            before, self._patience = self._patience, self._patience if limit is None else limit
            try:
                await trio.to_thread.run_sync(
                    mounts.unmount_everywhere, self._mountpoint, abandon_on_cancel=True
                )
            except WbcacheError:
                # Still in use: whatever ends the mount later drains as configured.
                self._patience = before
                raise
        if not self._detached:
            with trio.move_on_after(NAMESPACE_GRACE):
                await self._unmounted.wait()
        if not self._detached and not self._unmounted.is_set():
            log.warning("another mount namespace still shows the mount; it ends there, too")
            pyfuse3.terminate()
            await self._unmounted.wait()
        sent = self._flusher.files.bytes_sent
        while not self._drained.is_set():
            began = time.perf_counter()
            left = self._flusher.unfinished()
            size = sum(n.dirty_bytes for n in left if isinstance(n, Node))
            progress(len(left), size, self._flusher.files.bytes_sent - sent, self._hindrance())
            pause = max(PROGRESS_INTERVAL, COUNTING * (time.perf_counter() - began))
            with trio.move_on_after(pause):
                await self._drained.wait()
        return report.rows(self._filesystem, self._remaining)


class _Option(str):
    """A mount option that holds a path, any bytes: pyfuse3 encodes options as ASCII."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "surrogateescape") -> bytes:
        return to_bytes(str(self))


def _escape(text: str) -> str:
    """A mount option's value: commas and backslashes would end or change it."""
    return text.replace("\\", "\\\\").replace(",", "\\,")
