"""What must hold at every step, checked from the model's history and not from the tree."""

from __future__ import annotations

import os
import stat

from tests.flush.posix import ModelFile
from tests.flush.stepworld import SteppedWorld
from tests.flush.world import Setting
from wbcache.flush.plan import InPlace, Link, Publish, Remove, Rename, Step
from wbcache.flush.transfer import Transfer
from wbcache.node import Directory, Node
from wbcache.share.names import is_hidden
from wbcache.tree import Item


class Watched(SteppedWorld):
    """A world in which each step and each state of the share is judged."""

    def __init__(self, place: str, setting: Setting) -> None:
        super().__init__(place, setting)
        self.patched: set[int] = set()
        """Inode numbers in the mount of files that were changed in place on the share."""
        self.patched_on_share: set[int] = set()
        """The same, as the share numbers them."""

    def step_begins(self, item: Item, step: Step, forced: bool) -> None:
        self.log.append(f"{'forced ' if forced else ''}{step}")
        if isinstance(step, InPlace):
            self.patched.add(step.node.ino)
            if step.node.base is not None:
                self.patched_on_share.add(step.node.base.ino)
        assert not forced or self.setting.circles, f"an order edge was dropped: {step}"
        self.check_order(step, forced)

    # -- order ---------------------------------------------------------------------------------

    def check_order(self, step: Step, forced: bool) -> None:
        """What was closed before an operation is on the share before the step that shows it there.

        For a removal or a replacement that means everything, for a new name what is beside it and
        below. When items wait for each other, only those may be passed over that wait too, and what
        got its place on the share by a later operation.
        """
        if not isinstance(step, Publish | Rename | Link | Remove):
            return
        directory, name = step.at if isinstance(step, Remove) else step.to
        parent = self.directories.get(directory.ino)
        if parent is None:
            return
        seq = parent.changed.get(name)
        transfer = step.node.transfer
        stays = not step.node.links or directory.share.get(name) is step.node
        if isinstance(step, Publish) and isinstance(transfer, Transfer) and stays:
            # It was replaced, but had begun to move before; or it has the name already.
            seq = transfer.seq
        if seq is None:
            return
        replaces = isinstance(step, Remove) or step.occupant is not None
        waited_for = not isinstance(step, Remove) and bool(step.node.links)
        files = self.model.files_below(self.model.root if replaces else parent)
        for file in files:
            if file.ino in (step.node.ino, 0) or file.writers or parent.entries.get(name) is file:
                continue  # the step is its own, or makes room for it
            node = self.tree.nodes.get(file.ino)
            if node is not None and (node.never or (forced and node in self.flusher.waiting)):
                continue
            if waited_for and node is not None and self._follows(node, directory, seq, replaces):
                continue  # it got its own place later, and waits for this one
            missing = self._missing(file, node, seq)
            assert missing is None, f"{step} of operation {seq} begins too early: {missing}"

    def _follows(self, node: Node, directory: Directory, seq: int, replaces: bool) -> bool:
        return self.flusher.planner.follows(node, directory, seq, replaces=replaces)

    def _missing(self, file: ModelFile, node: Node | None, seq: int) -> str | None:
        """What the share lacks of what a file was before an operation."""
        last = file.since(seq)
        if last is None:
            return None
        closed, wanted = last
        if node is not None and self._is_moving(node):
            return None  # it is on the share, but under neither name for sure
        flushed = node is not None and (node.dirty is None or node.dirty.since > closed)
        if flushed and file.ino in self.patched:
            return None  # what is changed in place may show any part of what came later
        shown = self._shown(node)
        if shown in wanted:
            return None
        return f"inode {file.ino} was {wanted} from operation {closed} on, the share has {shown!r}"

    def _is_moving(self, node: Node) -> bool:
        at = node
        while at.slinks:
            if at.busy:
                return True
            at = at.slinks[0][0]
        return False

    def _shown(self, node: Node | None) -> bytes | None:
        """What the share holds of a file."""
        parts: list[bytes] = []
        at = node
        while at is not self.tree.root:
            if at is None or not at.slinks:
                return None
            at, name = at.slinks[0]
            parts.insert(0, name)
        try:
            with open(os.path.join(os.fsencode(self.share), *parts), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    # -- whole files ---------------------------------------------------------------------------

    def share_changes(self) -> None:
        """Every file on the share is one that the mount showed at some instant."""
        known = {version for file in self.files for version in file.versions}
        stack = [self.share]
        while stack:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    st = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(st.st_mode):
                        stack.append(entry.path)
                    elif stat.S_ISREG(st.st_mode) and st.st_ino not in self.patched_on_share:
                        if is_hidden(os.fsencode(entry.name), at_root=False):
                            continue
                        with open(entry.path, "rb") as file:
                            data = file.read()
                        assert data in known, f"{entry.path} shows {data!r}, which never was"
