"""The daemon's hold on the share: opened, verified to be the cache's own, and got back when lost.

A mount serves from what the cache knows, whether the share answers or not. Nothing is flushed to
the share and nothing believed of it before its id file was read, and before every daemon that was
killed on this cache has made the last call that it was stuck in. The same holds again when the
share's mount is gone (its server or its program was restarted, say): SOURCE is opened anew by its
path, unless our own mount covers it, and verified like the first time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from wbcache import mounts
from wbcache.daemon.binding import Binder, Binding, id_name
from wbcache.daemon.lock import CacheLock
from wbcache.errors import SourceError, WbcacheError
from wbcache.flush.flusher import Flusher
from wbcache.loading import Loaded
from wbcache.share.share import LOST
from wbcache.volume import Volume

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY = 2.0
"""Seconds between two tries to get at the share."""

LOOK = 0.25
"""Seconds between two looks at something that has no other way of telling."""

MOUNTS_LOOK = 1.0
"""The same for the table of mounts, which may be long."""


class _MountedAnewError(Exception):
    """While a call was waited for, something else was mounted at SOURCE."""


class Attachment:
    """Lets the share be used while it is certain that it is the right one."""

    def __init__(
        self,
        volume: Volume,
        loaded: Loaded,
        binder: Binder,
        lock: CacheLock,
        *,
        source: str,
        over_source: bool,
        read_only: bool,
    ) -> None:
        """``over_source``: our own mount covers SOURCE, which can't be opened again then."""
        self._volume = volume
        self._loaded = loaded
        self._binder = binder
        self._lock = lock
        self._source = source
        self._over_source = over_source
        self._read_only = read_only
        self.decided = trio.Event()
        """Set after the first try."""
        self.failure: Exception | None = None
        """Why the last try failed."""
        self.problem: str | None = "it has not answered yet"
        """Why the share is not used; None while it is."""
        self.warnings: list[str] = []
        self._opened: mounts.MountEntry | None = None
        """The mount at SOURCE when it was opened."""
        self._serving = False
        """From then on a share without our id is never accepted by itself."""
        volume.share.suspend()

    @property
    def is_refused(self) -> bool:
        """Whether the share will not be used before somebody does something about it."""
        return self.problem is not None and isinstance(self.failure, WbcacheError)

    def notes(self) -> list[str]:
        """What whoever mounts should know."""
        if self.problem is None:
            return self.warnings
        return [
            *self.warnings,
            f"the share is not used yet: {self.problem}; what the cache knows is served, writes are"
            " kept here, and everything goes on by itself when it is verified",
        ]

    async def begin(self, patience: float) -> WbcacheError | None:
        """Wait for the first try, ``patience`` seconds at most, while `run` runs.

        Returns the error for which there can be no mount. A share that only does not answer is
        none, if the cache belongs to it.
        """
        with trio.move_on_after(patience):
            await self.decided.wait()
        if isinstance(self.failure, WbcacheError):
            return self.failure
        if self.problem is not None and not self._binder.is_bound:
            hint = "this cache was never mounted before; try again when the share answers"
            return SourceError(self._source, f"the share can't be used: {self.problem}", hint)
        self._serving = True
        if self.problem is not None:
            if not self.decided.is_set():
                self._volume.share.health.fall_silent()
            self._volume.report(f"the share is not used: {self.problem}")
        return None

    async def run(self, flusher: Flusher) -> None:
        """Attach, and again whenever the share's mount is lost, for ever."""
        share = self._volume.share
        flusher.suspended = True
        await self._outlive_the_killed()
        while True:
            try:
                await self._attach()
            except _MountedAnewError:
                continue
            except WbcacheError as error:
                self._fail(error, f"{error}")
            except OSError as error:
                self._fail(error, f"it can't be verified ({os.strerror(error.errno or 0)})")
            else:
                self.failure = self.problem = None
                share.resume()
                flusher.suspended = False
                flusher.hurry()
                self.decided.set()
                await self._until_lost()
                flusher.suspended = True
                share.suspend()
                self._fail(None, self._lost_text())
            self.decided.set()
            await trio.sleep(RETRY)

    async def _outlive_the_killed(self) -> None:
        """Wait until killed daemons have made the calls in which they are stuck."""
        waited = False
        while lingering := self._lock.lingering():
            self._say(
                f"the killed daemon (pid {', '.join(lingering)}) still waits for a call on it"
            )
            if not waited:
                waited = True
                self._volume.share.health.fall_silent()
            self.decided.set()
            await trio.sleep(LOOK)
        if waited:
            log.info("nothing is left of the killed daemon")

    async def _attach(self) -> None:
        """Open and verify the share. Raises OSError, or WbcacheError when it is not ours."""
        volume, share = self._volume, self._volume.share
        if not share.is_open or (self.problem is not None and not self._over_source):
            await self._reopen()
        tree = volume.tree
        binding = await self._binder.bind(
            self._ask,
            share.root,
            dirty=lambda: bool(tree.dirty or tree.changes),
            strict=self._serving,
            read_only=self._read_only,
        )
        st = await self._ask(os.fstat, share.root.fd)
        root = tree.root
        if root.meta == 0 and not root.ours:
            root.mode, root.uid, root.gid = st.st_mode, st.st_uid, st.st_gid
            root.take_times(st)
            volume.commit_outcome(root)
        self._take(binding)

    def _take(self, binding: Binding) -> None:
        volume = self._volume
        if binding.is_new:
            volume.remembered.forget()
        if binding.foreign_temporaries:
            self._loaded.temporaries.clear()
        volume.temporary_names.belong_to(binding.uuid[:8])
        volume.share.id_name = None if binding.read_only else id_name(binding.uuid)
        volume.capabilities = binding.capabilities
        volume.read_only = binding.read_only
        self.warnings = binding.warnings
        for warning in binding.warnings:
            log.warning("%s", warning)

    async def _reopen(self) -> None:
        volume = self._volume
        await self._as_mounted(lambda: volume.share.open_root(self._source))
        for node in volume.tree.nodes.values():
            node.share_fd = None
        self._opened = entry = self._entry()
        # Network and local file systems keep inode numbers; those in user space often don't.
        volume.share.stable_ino = entry is not None and not entry.fstype.startswith("fuse")

    def _entry(self) -> mounts.MountEntry | None:
        return mounts.mount_of(self._source, mounts.read_mounts())

    async def _until_lost(self) -> None:
        """Wait until the root of the share can't be used any more: it says so, it has lost our id
        file, or it says nothing and something else is mounted at SOURCE by now."""
        share = self._volume.share
        while True:
            with trio.move_on_after(MOUNTS_LOOK):
                await share.doubted.wait()
            if share.doubted.is_set():
                share.doubted = trio.Event()
                if share.is_missing:
                    return
                try:
                    with trio.move_on_after(share.lookup_deadline):
                        await share.probe()
                except OSError as error:
                    if error.errno in LOST:
                        return
                await trio.sleep(LOOK)
            if self._over_source or share.health.answering:
                continue
            entry = self._entry()
            if entry != self._opened and entry is not None and not entry.is_local_disk:
                return

    async def _ask(self, call: Callable[..., T], *args: Any) -> T:
        find_out: Callable[..., Awaitable[T]] = self._volume.share.find_out
        return await self._as_mounted(lambda: find_out(call, *args))

    async def _as_mounted(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call on the share, for as long as what is mounted at SOURCE stays the same."""
        if self._over_source:
            return await call()
        before = self._entry()
        result: list[T] = []
        failure: list[OSError] = []
        async with trio.open_nursery() as nursery:

            async def make() -> None:
                try:
                    result.append(await call())
                except OSError as error:
                    failure.append(error)
                nursery.cancel_scope.cancel()

            nursery.start_soon(make)
            while self._entry() == before:
                await trio.sleep(MOUNTS_LOOK)
            nursery.cancel_scope.cancel()
        if failure:
            raise failure[0]
        if not result:
            raise _MountedAnewError
        return result[0]

    def _lost_text(self) -> str:
        if self._volume.share.is_missing:
            return "our id file is not in its .wbcache/ any more"
        text = "its mount is gone"
        if self._over_source:
            text += (
                "; if it does not come back by itself: 'wbcache umount --no-drain', mount the "
                "share, and 'wbcache mount' again"
            )
        return text

    def _fail(self, error: Exception | None, text: str) -> None:
        self.failure = error
        self._say(text)

    def _say(self, text: str) -> None:
        """Tell the operator, once a change."""
        if text != self.problem:
            self.problem = text
            if self._serving:
                self._volume.report(f"the share is not used: {text}")
