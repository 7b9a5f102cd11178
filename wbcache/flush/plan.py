"""Which step brings the share nearer to the mount, for one item; nothing is done here.

A step is allowed when its *hard* edges hold (the parent exists on the share, the name is free, the
directory is empty) and its *order* edges do: the second are what lets the share be trusted at any
moment (docs/internals.md). When a step is not allowed the answer names the item it waits for.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from wbcache.flush.transfer import Transfer
from wbcache.node import Directory, Node
from wbcache.tree import Item, Name, Tree

REWRITE_LIMIT = 64 << 20
"""Patched files of up to so many bytes are published whole, when all their bytes are here."""


@dataclass(frozen=True)
class MakeDirectory:
    """Make a directory, under its name or under a temporary one beside it."""

    node: Directory
    to: Name
    temporary: bool


@dataclass(frozen=True)
class Copy:
    """Move a file's bytes to a temporary."""

    node: Node
    directory: Directory


@dataclass(frozen=True)
class Spill:
    """Move bytes of a file that is still being written to a temporary, where it grows on."""

    node: Node
    directory: Directory


@dataclass(frozen=True)
class Publish:
    """Let a name show what a temporary holds (or a new symbolic link)."""

    node: Node
    to: Name
    occupant: Node | None


@dataclass(frozen=True)
class InPlace:
    """Append to the share's file, patch it, or cut it."""

    node: Node
    at: Name


@dataclass(frozen=True)
class SetAttributes:
    node: Node
    at: Name


@dataclass(frozen=True)
class Rename:
    node: Node
    old: Name
    to: Name
    occupant: Node | None


@dataclass(frozen=True)
class Link:
    node: Node
    old: Name
    to: Name
    occupant: Node | None


@dataclass(frozen=True)
class Remove:
    node: Node
    at: Name


@dataclass(frozen=True)
class Park:
    """Move what occupies a name aside, to a temporary name in the same directory."""

    node: Node
    at: Name


Step = (
    MakeDirectory | Copy | Spill | Publish | InPlace | SetAttributes | Rename | Link | Remove | Park
)


def directories(step: Step) -> list[Directory]:
    """The directories in which a step does something."""
    places = [getattr(step, name, None) for name in ("old", "to", "at")]
    found = [place[0] for place in places if place is not None]
    return [*found, step.directory] if isinstance(step, Copy | Spill) else found


@dataclass(frozen=True)
class Wait:
    """Not now: another item comes first. None: until the item is touched again."""

    on: Item | None


def only_grows(node: Node) -> bool:
    """Whether all that the share lacks of a file's bytes lies behind the end of what it has."""
    content, base = node.content, node.base
    return (
        content is not None
        and not content.whole
        and base is not None
        and content.dirty.first >= base.size
        and node.size >= base.size
    )


class Planner:
    """Computes steps from the tree alone."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.besides: Container[object] = ()
        """Items to which order edges don't count just now."""
        self.bytes_wait = False
        """The share has little room: bytes move only when what they bring could be published."""
        self.pressed = False
        """The cache is full: what makes room waits for no writer, who may wait for that room."""

    def plan(self, item: Item, *, besides: Container[object] = ()) -> Step | Wait | None:
        """The next step for an item; None when the share has it as it should be.

        Order edges to items in ``besides`` don't count: the way out of a circle.
        """
        self.besides = besides
        step = self._node(item) if isinstance(item, Node) else self._name(*item)
        if isinstance(step, Rename | Link | InPlace | SetAttributes):
            # What has the name by the time of the call may be what is just being put there.
            directory, name = step.at if isinstance(step, InPlace | SetAttributes) else step.old
            arriving = directory.arriving.get(name)
            if arriving is not None and arriving is not step.node:
                return Wait(arriving)
        return step

    def park(self, item: Item) -> Park | None:
        """The step that frees the name an item waits for, when nothing else can."""
        node = item if isinstance(item, Node) else item[0].local.get(item[1])
        if node is None:
            return None
        for directory, name in node.links:
            occupant = directory.share.get(name)
            if occupant is None or occupant is node or occupant.busy:
                continue
            if name not in directory.arriving:  # or else it is replaced at any moment
                return Park(occupant, (directory, name))
        return None

    def is_moving(self, directory: Directory) -> bool:
        """Whether a directory, or one above it, is not yet where it belongs."""
        at: Directory | None = directory
        while at is not None and at is not self._tree.root:
            if at.links != at.slinks:
                return True
            at = at.parent
        return False

    # -- files and links -----------------------------------------------------------------------

    def _node(self, node: Node) -> Step | Wait | None:
        if node.busy:
            return Wait(node)
        if node.trouble:
            return None
        if not node.links:
            return self._replaced(node)
        if node.dirty is None or self._tree.excluded(node):
            return None
        if isinstance(node, Directory):
            return self._directory(node)
        present = [link for link in node.links if link[0].share.get(link[1]) is node]
        missing = [link for link in node.links if link[0].share.get(link[1]) is not node]
        content = node.content
        if not node.slinks or (content is not None and content.whole):
            transfer = node.transfer
            complete = isinstance(transfer, Transfer) and transfer.current
            if self._tree.held(node) and not complete:
                return self._spill(node) if node.spill else None
            return self._publish(node, present[0] if present else missing[0])
        if node.spilled:
            if node.content_dirty:
                return InPlace(node, node.slinks[0])
            if self._tree.held(node):
                return None
        elif node.content_dirty:
            if self._rewrite(node):
                return self._publish(node, present[0] if present else missing[0])
            return self._in_place_step(node, present[0] if present else node.slinks[0])
        if node.meta:
            return SetAttributes(node, present[0] if present else node.slinks[0])
        if missing:
            return self._move(node, missing[0])
        return None

    def _spill(self, node: Node) -> Step | Wait | None:
        directory = node.links[0][0]
        if not node.size:
            return None
        return Spill(node, directory) if directory.on_share else Wait(directory)

    def _replaced(self, node: Node) -> Step | Wait | None:
        """A finished transfer of a file that was replaced meanwhile still goes out.

        Otherwise a file that is replaced faster than it moves would never arrive.
        """
        transfer = node.transfer
        if not isinstance(transfer, Transfer) or node.dropped is None:
            return None
        directory, name, dropped = node.dropped
        if not transfer.wanted(node) or not directory.on_share or not transfer.current:
            return None
        if self._blocked(node, (directory, name)) is not None:
            return None  # the replacement will find its own way
        occupant = directory.share.get(name)
        if occupant is not None and (
            occupant.links or (occupant.dropped is not None and occupant.dropped[2] > dropped)
        ):
            return None  # something newer has been published there meanwhile
        removed = self._tree.skipped.removed_at(node)
        if removed is not None and self._tree.skipped.effective(transfer.seq, node) > removed:
            return None  # at no moment of its life was all there that the share can still show
        waits = self._order(
            directory, transfer.seq, node, replaces=occupant is not None, takes=True, frees=True
        )
        return waits or Publish(node, (directory, name), occupant)

    def _publish(self, node: Node, to: Name) -> Step | Wait | None:
        directory, name = to
        if not directory.on_share:
            return Wait(directory)
        transfer = node.transfer
        complete = node.is_symlink or (isinstance(transfer, Transfer) and transfer.current)
        if not complete and not self.bytes_wait:
            return Copy(node, directory)
        blocked = self._blocked(node, to)
        if blocked is not None and (complete or isinstance(blocked, Wait)):
            return blocked
        occupant = directory.share.get(name)
        seq = self._position(node, to)
        if self._is_older(node) and isinstance(transfer, Transfer):
            # Rewritten since: what was copied is good for as long as it was in the mount.
            dirty = node.dirty
            until = dirty.next if dirty is not None and dirty.next else transfer.seq
            seq = max(self._named(to), transfer.seq)
            if self._tree.skipped.effective(seq, node) > until:
                return None if self._tree.held(node) else Copy(node, directory)
        waits = self._order(directory, seq, node, replaces=occupant is not None, frees=True)
        return waits or (Publish(node, to, occupant) if complete else Copy(node, directory))

    def _is_older(self, node: Node) -> bool:
        return isinstance(node.transfer, Transfer) and node.transfer.is_older_than(node)

    def _named(self, to: Name) -> int:
        change = self._tree.changes.get(to)
        return change.seq if change is not None else 0

    def _position(self, node: Node, to: Name) -> int:
        """The number of the operation that gave a name its present meaning.

        A file that was rewritten before the share had it may tell of what is newer than its name.
        """
        seq, content = self._named(to), node.content
        if content is not None:
            seq = max(seq, content.seq)
            if not content.whole and node.dirty is not None:
                seq = max(seq, node.dirty.since)  # a patch, published whole
        return seq or self._tree.seq

    def _in_place_step(self, node: Node, at: Name) -> Step | Wait:
        if not only_grows(node) and node.dirty is not None:
            blocked = self._order(at[0], node.dirty.since, node, replaces=True, frees=True)
            if blocked is not None:
                return blocked
        return InPlace(node, at)

    def _rewrite(self, node: Node) -> bool:
        """Whether a patched file is better published whole."""
        content = node.content
        return (
            content is not None
            and not only_grows(node)
            and node.size <= REWRITE_LIMIT
            and len(node.links) == 1
            and len(node.slinks) <= 1
            and content.local(0, node.size, node.size)
        )

    def _move(self, node: Node, to: Name) -> Step | Wait:
        directory, name = to
        if not directory.on_share:
            return Wait(directory)
        blocked = self._blocked(node, to)
        if blocked is not None:
            return blocked
        occupant = directory.share.get(name)
        seq = self._position(node, to) if node.spilled else self._named(to)
        waits = self._order(directory, seq, node, replaces=occupant is not None)
        if waits is not None:
            return waits
        for old in node.slinks:
            if old[0].local.get(old[1]) is not node:
                return Rename(node, old, to, occupant)
        return Link(node, node.slinks[0], to, occupant)

    # -- directories ---------------------------------------------------------------------------

    def _directory(self, node: Directory) -> Step | Wait | None:
        to = node.links[0]
        parent = to[0]
        if not parent.on_share:
            return Wait(parent)
        if node.slinks == node.links:
            if not node.meta:
                return None
            if not node.meta & ~node.late_meta:
                return Wait(None)
            return SetAttributes(node, to)
        if not node.slinks and node.renamed:
            return MakeDirectory(node, to, temporary=True)
        if node.slinks:
            inside = self._moved_inside(parent, node)
            if inside is not None:
                return Wait(inside)
        blocked = self._blocked(node, to)
        if blocked is not None:
            return blocked
        if not node.slinks:
            return MakeDirectory(node, to, temporary=False)
        waits = self._order(parent, self._tree.changes[to].seq, node, replaces=False)
        return waits or Rename(node, node.slinks[0], to, None)

    def _moved_inside(self, parent: Directory, node: Directory) -> Directory | None:
        """When ``parent`` is inside ``node`` on the share: the directory that must leave first."""
        at, leaves = parent, None
        while at is not self._tree.root:
            if at is node:
                return leaves
            if leaves is None and at.links != at.slinks:
                leaves = at
            if not at.slinks:
                return None
            at = at.slinks[0][0]
        return None

    # -- removals ------------------------------------------------------------------------------

    def _name(self, directory: Directory, name: bytes) -> Step | Wait | None:
        change = self._tree.changes.get((directory, name))
        if change is None or change.trouble:
            return None
        wanted = self._tree.wanted(directory, name)
        if wanted is not None:
            return Wait(wanted) if wanted.dirty is not None else None
        node = directory.share[name]
        return self._remove(node, (directory, name))

    def _remove(self, node: Node, at: Name, heir: Node | None = None) -> Step | Wait:
        change = self._tree.changes.get(at)
        if change is not None and change.busy:
            return Wait(at)
        arriving = at[0].arriving.get(at[1])
        if arriving is not None:
            return Wait(arriving)
        if node.busy:
            return Wait(node)
        if node.links and (node.is_dir or node.dirty is not None):
            return Wait(node)  # it moves from here, or is published elsewhere first
        if isinstance(node, Directory):
            if node.share:
                return Wait((node, next(iter(node.share))))
            if node.arriving:
                return Wait(next(iter(node.arriving.values())))
        seq = change.seq if change is not None else self._tree.seq
        return self._order(at[0], seq, heir, replaces=True, takes=True) or Remove(node, at)

    # -- edges ---------------------------------------------------------------------------------

    def _blocked(self, node: Node, to: Name) -> Step | Wait | None:
        """What has to happen before ``node`` may take a name on the share."""
        directory, name = to
        other = directory.arriving.get(name)
        if other is not None:
            return Wait(other)
        occupant = directory.share.get(name)
        if occupant is None or occupant is node:
            return None
        return self._occupied(occupant, node, to)

    def _occupied(self, occupant: Node, node: Node, at: Name) -> Step | Wait | None:
        if occupant.busy:
            return Wait(occupant)
        if occupant.links:
            if occupant.is_dir:
                return Wait(occupant)
            moves = any(d.share.get(n) is not occupant for d, n in occupant.links)
            if moves and occupant.dirty is not None:
                return Wait(occupant)
        if not occupant.is_dir and not node.is_dir:
            return None  # replaced in one step
        return self._remove(occupant, at, node)

    def _order(
        self,
        directory: Directory,
        seq: int,
        node: Node | None,
        *,
        replaces: bool,
        takes: bool = False,
        frees: bool = False,
    ) -> Wait | None:
        """What an operation has to wait for. With ``takes`` nobody waits for it in turn: it is a
        removal, or only tells of what was there before. With ``frees`` it makes room in the cache,
        for which what it would wait for may be waiting."""
        tree = self._tree
        besides = self.besides if takes else _Besides(self, directory, seq, replaces)
        if not replaces:
            blocker = tree.latest_below(directory, seq, node, besides)
            return Wait(blocker) if blocker is not None else None
        seq = tree.skipped.effective(seq, node)
        blocker = tree.latest_before(seq, node, besides)
        if blocker is not None:
            return Wait(blocker)
        if frees and self.pressed:
            return None
        for own, others in tree.holding.items():
            near = directory is own or directory is own.parent
            if not near and not self._is_beside(directory, own):
                continue
            for other in others:
                if (
                    other is not node
                    and other not in self.besides
                    and other.dirty is not None
                    and other.dirty.since < seq
                    and (near or not (other.trouble or other.in_vain))
                ):
                    return Wait(other)
        return None

    def follows(self, other: Node, directory: Directory, seq: int, *, replaces: bool) -> bool:
        """Whether a node that is older than a publish or rename ``seq`` waits for it all the same.

        It does when its own place on the share was given to it later. Both would wait for each
        other, and the earlier operation goes first: a hundred files that are written first and
        renamed then would otherwise make one large circle. What takes something away never goes
        before what does not.
        """
        links = other.links
        if not links or other.dirty is None:
            return False
        to = links[0]
        if isinstance(other, Directory):
            if other.slinks == links or not (other.slinks or other.renamed):
                return False
            position = self._named(to)
        else:
            content = other.content
            if other.slinks:
                if content is None or not content.whole:
                    return False  # it can be brought up to date where it is
                to = next((at for at in links if at[0].share.get(at[1]) is other), to)
            change = self._tree.changes.get(to)
            position = change.seq if change is not None else 0
            if position <= seq:
                position = self._position(other, to)
        if position <= seq:
            return False
        if to[0].share.get(to[1]) is not None:
            return True  # it waits for everything that is older than its place
        return not replaces and self._tree.is_below(directory, to[0])

    def _is_beside(self, directory: Directory, own: Directory) -> bool:
        """Whether a directory is in one beside ``own``, or deeper.

        A file still being written guards those too, for as long as that lasts: the predecessors of
        a checkpoint that is a directory are there. What is in the root guards the root's own names
        only, and what may never arrive only its own directory and the one that holds it.
        """
        above: Directory | None = directory
        while above is not None:
            if above is own.parent:
                return True
            # A directory that was removed here still has its place on the share.
            above = above.parent or (above.slinks[0][0] if above.slinks else None)
        return False


class _Besides:
    """The nodes that one operation does not wait for, though they are older."""

    def __init__(self, planner: Planner, directory: Directory, seq: int, replaces: bool) -> None:
        self._planner = planner
        self._directory = directory
        self._seq = seq
        self._replaces = replaces

    def __contains__(self, other: object) -> bool:
        planner = self._planner
        return other in planner.besides or (
            isinstance(other, Node)
            and planner.follows(other, self._directory, self._seq, replaces=self._replaces)
        )
