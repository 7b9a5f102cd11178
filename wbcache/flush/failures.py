"""What a step leads to that failed: what has become of it, and when it is tried again."""

from __future__ import annotations

import errno
import logging
import os
import random
import stat
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack

import trio

from wbcache.flush import blocking
from wbcache.flush.conflict import settle_conflict
from wbcache.flush.errors import describe, refused
from wbcache.flush.files import FileFlusher
from wbcache.flush.plan import (
    InPlace,
    Link,
    MakeDirectory,
    Park,
    Publish,
    Remove,
    Rename,
    SetAttributes,
    Step,
    directories,
)
from wbcache.flush.settling import Settler
from wbcache.journal import Intent
from wbcache.node import META_MODE, OWNER_ALL, Directory, Node
from wbcache.share import calls
from wbcache.tree import Item, Name
from wbcache.volume import Volume

log = logging.getLogger(__name__)

_TRIES_TO_GET_IN = 3
"""Steps of one item that are denied before it is believed."""


class Failures:
    """Takes note of errors of the share, each by its kind."""

    def __init__(
        self, volume: Volume, files: FileFlusher, gone: Callable[[Directory, bytes], None]
    ) -> None:
        self._volume = volume
        self._tree = volume.tree
        self._files = files
        self._gone = gone
        self._doubted: set[int] = set()
        """Inode numbers of directories whose rename was refused and is tried once more."""
        self._let_in: set[Directory] = set()
        """Directories whose mode was changed on the share so that steps can be taken in them."""
        self.withheld: dict[Node, trio.Event] = {}
        """Nodes that may have been renamed, and the share refuses to tell where they are; set, it
        is asked again at once."""
        self.inherited: dict[Node, tuple[ExitStack, list[Name]]] = {}
        """The same of what the last daemon did; what ends with that, and the names it may have."""
        self.heirs: list[Node] = []
        """Those for which nobody has begun to wait yet."""
        self.wait: Callable[[float, trio.Event], Awaitable[None]] = _wait

    async def find_out(self, node: Node) -> None:
        """A call failed, and may have been made all the same: see what the share shows.

        Waits for as long as the share does not say. While it refuses to, what does not need to know
        goes on: a change is made again, and what may have been renamed is quarantined.
        """
        try:
            await self._find_out(node)
        finally:
            self.ask_again(node)

    def inherit(self, intents: Iterable[Intent]) -> None:
        """The share refuses to tell what the last daemon did, or that has to be known before more
        can be asked: until `settle_inherited` these count as steps that are under way."""
        nodes = self._tree.nodes
        for intent in intents:
            node, directory = nodes.get(intent.ino), nodes.get(intent.parent)
            if node is None or not isinstance(directory, Directory):
                continue
            if node not in self.inherited:
                self.inherited[node] = (ExitStack(), [])
                self.inherited[node][0].enter_context(self._volume.share.moving(node))
                self.heirs.append(node)
                node.busy = True
            self.inherited[node][1].append((directory, intent.name))
            directory.arriving[intent.name] = node

    async def settle_inherited(self, node: Node) -> None:
        """Wait until it is known what the last daemon did with a node."""
        await self.find_out(node)
        moving, names = self.inherited.pop(node)
        moving.close()
        for directory, name in names:
            directory.arriving.pop(name, None)
        node.busy = False
        self._tree.touch_item(node)
        self._volume.forget_if_gone(node)

    def ask_again(self, node: Node) -> None:
        """It is not quarantined any more because the share refused to tell where it is."""
        if node in self.withheld:
            self.withheld.pop(node).set()
            node.trouble = None
            self._tree.account(node)

    async def _find_out(self, node: Node) -> None:
        volume = self._volume
        settler = Settler(volume, self._files)
        retry = volume.config.flush.retry
        delay = retry.first
        for intent in volume.journal.intents_of(node.ino):
            while True:
                try:
                    await settler.settle(intent)
                    break
                except (FileNotFoundError, NotADirectoryError):
                    break  # the directory is not there, and so nothing in it
                except OSError as error:
                    if refused(error) and intent.kind != "rename":
                        break
                    if refused(error) and node not in self.withheld:
                        self._withhold(node, error)
                    log.info("what became of inode %d is not known: %s", node.ino, describe(error))
                    await self.wait(delay, self.withheld.get(node, trio.Event()))
                    delay = min(retry.max, 2 * delay)
            if intent.kind == "make" and volume.temporary_names.is_ours(intent.name):
                parent = self._tree.nodes.get(intent.parent)
                if isinstance(parent, Directory) and parent.share.get(intent.name) is node:
                    volume.journal.drop_temporary(intent.name)
                elif isinstance(parent, Directory) and intent.name not in parent.share:
                    volume.strays.append((parent, intent.name))
        settler.finish()
        volume.commit_outcome(extra=lambda: volume.journal.drop_moves_of(node.ino))

    def _withhold(self, node: Node, error: OSError) -> None:
        self.withheld[node] = trio.Event()
        node.trouble = f"the share does not tell where it is: {describe(error)}"
        path = os.fsdecode(self._tree.path(node))
        self._volume.report(f"quarantined: {path!r}: {node.trouble}")
        self._tree.account(node)
        self._tree.touch_item(node)

    async def conflict(self, step: Step) -> OSError | None:
        """The share has somebody else's under a name that a step was about to change."""
        at: Name
        ours: Node | None = step.node
        if isinstance(step, Publish | Rename | Link | MakeDirectory):
            at = step.to
        elif isinstance(step, Remove | Park):
            at, ours = step.at, None
        elif isinstance(step, InPlace | SetAttributes):
            at = step.at
        else:
            return None
        try:
            await settle_conflict(self._volume, ours, at)
        except OSError as error:
            return error
        return None

    async def source_gone(self, step: Rename | Park) -> OSError | None:
        """What we were to rename is not there: somebody else removed or moved it."""
        directory, name = step.old if isinstance(step, Rename) else step.at
        share = self._volume.share
        try:
            parent = await share.directory(directory, flush=True)
            if await share.stat(parent, name, flush=True) is not None:
                return OSError(errno.EAGAIN, "it is there after all")
        except OSError as error:
            return error
        self._gone(directory, name)
        return None

    def note(self, item: Item, step: Step, error: OSError, *, is_final: bool) -> None:
        """A step failed: its item is tried again, or quarantined when the share refuses it and the
        answer ``is_final``."""
        volume = self._volume
        target: Node | object = item if isinstance(item, Node) else self._tree.changes.get(item)
        path = self._tree.path(step.node)
        text = f"{type(step).__name__} of {os.fsdecode(path)!r}: {describe(error)}"
        if isinstance(target, Node) or target is not None:
            if refused(error) and is_final and not self._doubts(step, error):
                target.trouble = describe(error)  # type: ignore[attr-defined]
                volume.report(f"quarantined: {text}")
                if isinstance(target, Node):
                    if target.transfer:
                        self._files.abandon(target)
                    self._tree.account(target)
                return
            retry = volume.config.flush.retry
            retries = target.retries = target.retries + 1  # type: ignore[attr-defined]
            delay = min(retry.max, retry.first * 2.0 ** min(retries - 1, 30))
            delay *= random.uniform(0.75, 1.25)
            target.retry_at = volume.clock() + delay  # type: ignore[attr-defined]
            log.log(
                logging.WARNING if retries == 1 else logging.INFO,
                "%s; tried again in %.1f s",
                text,
                delay,
            )
        for directory in directories(step):
            volume.share.forget_directory(directory)

    def _doubts(self, step: Step, error: OSError) -> bool:
        """Whether a refusal is not believed at first: that a directory can't be moved into itself.

        Whoever lost the answer to an earlier rename, the client of a network share for one, may
        still see a directory where it was; it is looked for before the next try.
        """
        ino = step.node.ino
        into_itself = error.errno == errno.EINVAL and isinstance(step, Rename)
        if not into_itself or not isinstance(step.node, Directory) or ino in self._doubted:
            self._doubted.discard(ino)
            return False
        self._doubted.add(ino)
        return True

    async def look_for_places(self, step: Step) -> None:
        """See whether somebody else removed, or replaced, what a step needs: what it is about, or a
        directory."""
        share, node = self._volume.share, step.node
        needed = []
        for directory in directories(step):
            way = _way_to(directory)
            needed.append(way)
            top = way[0][0] if way else directory
            if not top.on_share and not top.links and not top.busy and top.share:
                self._volume.report(
                    "a removed directory is no longer where it was on the share: what was in it is"
                    f" not removed ({len(top.share)} names), and shows up again if it is elsewhere"
                )
                for name in list(top.share):
                    self._gone(top, name)
        if isinstance(step, SetAttributes) or not isinstance(node, Directory):
            needed += [[*_way_to(place[0]), place] for place in node.slinks]
        for way in needed:
            try:
                for parent, name in way:
                    known = parent.share.get(name)
                    if known is None or known.busy or name in parent.arriving:
                        break
                    descriptor = await share.directory(parent, flush=True)
                    st = await share.stat(descriptor, name, flush=True)
                    if parent.share.get(name) is not known or known.busy:
                        break
                    if st is None or stat.S_IFMT(st.st_mode) != stat.S_IFMT(known.mode):
                        self._gone(parent, name)
                        break
            except OSError as error:
                log.debug("looking for what a step needs: %s", error)

    async def make_way(self, item: Item, step: Step) -> bool:
        """The share denies a step: let the owner of the directories that it needs, if that is us,
        into them though their mode says otherwise. It is set again at the end. Returns whether it
        is worth another try.
        """
        volume = self._volume
        state = item if isinstance(item, Node) else self._tree.changes.get(item)
        if not volume.capabilities.chmod or state is None or state.retries >= _TRIES_TO_GET_IN:
            return False
        worth_it = False
        # What is to get its own mode has not got it yet.
        self._let_in = {d for d in self._let_in if d.meta & META_MODE and d.slinks}
        for parent, name in dict.fromkeys(at for d in directories(step) for at in _way_to(d)):
            directory = parent.share.get(name)
            if not isinstance(directory, Directory):
                continue
            try:
                descriptor = await volume.share.directory(parent, flush=True)
                st = await volume.share.work(calls.lstat, descriptor, name)
                if parent.share.get(name) is not directory:
                    continue
                if st.st_mode & OWNER_ALL == OWNER_ALL or directory.busy:
                    worth_it |= directory in self._let_in  # for another step, just now
                    continue
                if not directory.ours:
                    directory.mode = st.st_mode
                directory.meta |= META_MODE
                if directory.links:
                    self._tree.touch(directory, volume.clock())
                volume.commit(directory)
                self._let_in.add(directory)
                await volume.share.work(blocking.let_in, descriptor, name, OWNER_ALL)
            except OSError as error:
                log.debug("inode %d lets nobody in: %s", directory.ino, error)
                self._let_in.discard(directory)
            else:
                worth_it = True
        state.retries += worth_it
        return worth_it


async def _wait(seconds: float, wake: trio.Event) -> None:
    with trio.move_on_after(seconds):
        await wake.wait()


def _way_to(directory: Directory) -> list[Name]:
    """The names on the share that lead to a directory, outermost first."""
    way: list[Name] = []
    at = directory
    while at.slinks:
        way.append(at.slinks[0])
        at = at.slinks[0][0]
    return way[::-1]
