"""A volume on two local directories, put together as the daemon does it but without a mount.

Opening the same cache directory again is what a start after a kill does: whatever was committed to
the journal and written to cache files is there, nothing else.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from wbcache.config import Config, FlushConfig, RetryConfig
from wbcache.daemon.recovery import settle_intents
from wbcache.filesystem import FileSystem
from wbcache.flush.flusher import Flusher
from wbcache.journal import Journal
from wbcache.loading import Loaded, load
from wbcache.node import Node
from wbcache.share.capabilities import Capabilities
from wbcache.share.names import TemporaryNames, is_hidden
from wbcache.share.share import Share
from wbcache.store import Store
from wbcache.tree import Item
from wbcache.volume import Volume

QUICK = Config(flush=FlushConfig(idle_delay=0.02, max_age=0.1, retry=RetryConfig(0.05, 0.2)))
"""Settings under which things happen while a test looks."""

Entry = tuple[str, bytes, int, int, int]
"""Kind, bytes or target, permissions, mtime (ns; 0 for directories), number of its link group."""


def open_volume(
    share: str,
    cache: str,
    *,
    config: Config = QUICK,
    capabilities: Capabilities | None = None,
    clock: Callable[[], float] = time.monotonic,
    share_type: type[Share] = Share,
    volume_type: type[Volume] = Volume,
    store: Store | None = None,
    power_lost: bool = False,
) -> tuple[Volume, Loaded]:
    """Open (or make) the cache of a share; `close_volume` gives its descriptors back."""
    os.makedirs(cache, exist_ok=True)
    journal = Journal(os.path.join(cache, "journal.db"))
    if store is None:
        store = Store(os.path.join(cache, "data"))
    loaded = load(journal, store, clock, power_lost=power_lost)
    epoch = int(journal.get_meta("epoch") or 0) + 1
    journal.set_meta("epoch", epoch)
    journal.sync()
    root_fd = os.open(share, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    reached = share_type(
        root_fd,
        lookup_deadline=config.share.lookup_deadline,
        deadline=config.share.deadline,
        workers=config.flush.workers + config.flush.small_workers + 4,
        clock=clock,
    )
    reached.stable_ino = True
    tree = loaded.tree
    reached.hold_root(tree.root)
    st = os.fstat(root_fd)
    tree.root.mode, tree.root.uid, tree.root.gid = st.st_mode, st.st_uid, st.st_gid
    journal.changes = tree.changes
    volume = volume_type(
        tree,
        journal,
        store,
        reached,
        config,
        temporary_names=TemporaryNames("0123abcd", epoch),
        clock=clock,
    )
    volume.next_gen = loaded.next_gen
    volume.capabilities = capabilities or Capabilities()
    return volume, loaded


def close_volume(volume: Volume) -> None:
    """Close journal and store; the object is of no use afterwards."""
    volume.journal.close()
    volume.store.close()
    volume.share.close()
    volume.tree.root.share_dirfd = None


def _state(item: Item) -> str:
    return f"{item} {item.trouble or ''}" if isinstance(item, Node) else str(item)


class WatchedShare(Share):
    """A share that can tell when its threads have ended."""

    @property
    def threads(self) -> int:
        """Threads that make calls of the flusher, abandoned ones included."""
        return self._flush.threads


class Mounted:
    """An open volume with its file system and flusher, running in a trio nursery."""

    def __init__(
        self, volume: Volume, filesystem: FileSystem, flusher: Flusher, nursery: trio.Nursery
    ) -> None:
        self.volume = volume
        self.nursery = nursery
        """Ends with the mount."""
        self.filesystem = filesystem
        self.flusher = flusher

    async def drain(self, deadline: float = 30.0) -> None:
        """Wait until the share has everything; an AssertionError says what does not move."""
        flusher = self.flusher
        flusher.drain()
        with trio.move_on_after(deadline) as scope:
            while flusher.unfinished() or flusher.running or self.volume.strays:
                stalled = flusher.is_stalled
                assert not stalled, f"nothing moves: {[*map(_state, flusher.unfinished())]}"
                await trio.sleep(0.005)
        assert not scope.cancelled_caught, f"not drained: {flusher.unfinished()}"


@asynccontextmanager
async def mounted(
    share: str,
    cache: str,
    *,
    config: Config = QUICK,
    capabilities: Capabilities | None = None,
    power_lost: bool = False,
    at_end: Callable[[], None] = lambda: None,
) -> AsyncIterator[Mounted]:
    """A volume that is served and flushed. Leaving the block ends it as a kill would: nothing more
    is flushed, and the outcome of calls under way is not stored. ``at_end`` is called when nothing
    runs any more and the cache directory is as the kill left it."""
    volume, loaded = open_volume(
        share,
        cache,
        config=config,
        capabilities=capabilities,
        share_type=WatchedShare,
        power_lost=power_lost,
    )
    reached = volume.share
    assert isinstance(reached, WatchedShare)
    try:
        async with trio.open_nursery() as nursery:
            filesystem = FileSystem(volume, nursery)
            flusher = Flusher(volume, filesystem.listings.gone)

            async def settle_and_flush() -> None:
                await settle_intents(volume, loaded, flusher.failures.inherit)
                await flusher.run()

            nursery.start_soon(settle_and_flush)
            yield Mounted(volume, filesystem, flusher, nursery)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            while reached.threads:  # a killed process has no threads that go on
                await trio.sleep(0.001)
        at_end()
        close_volume(volume)


def nothing_left(volume: Volume, flusher: Flusher) -> None:
    """After a drain nothing is left over in memory or in the journal."""
    tree = volume.tree
    assert not tree.changes and not tree.holding
    assert not [node for node in tree.dirty if not tree.excluded(node)]
    assert not len(tree.order)
    assert not volume.strays and not flusher.sweeper.later
    removed = {n.ino for n in tree.nodes.values() if n.handles and not n.links}
    intents = [row for row in volume.journal.rows("intent") if row[2] not in removed]
    xattrs = [row for row in volume.journal.rows("xattr") if tree.nodes[row[0]].links]
    rows = [*intents, *volume.journal.rows("temporary"), *xattrs]
    assert not rows, f"left in the journal: {rows}"
    for node in tree.nodes.values():
        assert node.transfer is None and not node.busy, node
        assert not node.sent or node.ino in removed, node


def snapshot(top: str) -> dict[str, Entry]:
    """Everything below a directory by its path, wbcache's own names included."""
    found: dict[str, Entry] = {}
    groups: dict[tuple[int, int], int] = {}

    def visit(directory: str, prefix: str) -> None:
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                st = entry.stat(follow_symlinks=False)
                permissions = stat.S_IMODE(st.st_mode)
                group = groups.setdefault((st.st_dev, st.st_ino), len(groups))
                path = prefix + entry.name
                if stat.S_ISDIR(st.st_mode):
                    found[path] = ("directory", b"", permissions, 0, group)
                    visit(entry.path, path + "/")
                elif stat.S_ISLNK(st.st_mode):
                    target = os.fsencode(os.readlink(entry.path))
                    found[path] = ("symlink", target, permissions, st.st_mtime_ns, group)
                else:
                    with open(entry.path, "rb") as file:
                        data = file.read()
                    found[path] = ("file", data, permissions, st.st_mtime_ns, group)

    visit(top, "")
    return found


def leftovers(found: dict[str, Entry]) -> list[str]:
    """The names in a snapshot that are wbcache's own."""
    return [p for p in found if is_hidden(os.fsencode(os.path.basename(p)), at_root="/" not in p)]
