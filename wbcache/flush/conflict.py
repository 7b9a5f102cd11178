"""Another writer changed on the share what we were about to change: both sides are kept.

A conflict is handled as a local rename: our file moves to ``NAME.conflict-HOST-TIME`` and the
share's takes the name. Open descriptors and mappings follow the file. Directories merge; a removal
of something that has changed is dropped.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from dataclasses import dataclass, field

from wbcache.journal import ConflictRow
from wbcache.node import Directory, Node
from wbcache.tree import Name
from wbcache.volume import Volume


def conflict_name(name: bytes, name_max: int, taken: set[bytes]) -> bytes:
    """A free name for our side, that tells host and time (UTC)."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40] or "host"
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for n in range(1 << 20):
        suffix = f".conflict-{host}-{stamp}{f'-{n}' if n else ''}".encode()
        candidate = _beginning(name, name_max - len(suffix)) + suffix
        if candidate not in taken:
            return candidate
    raise AssertionError("no free conflict name")


def _beginning(name: bytes, length: int) -> bytes:
    """At most so many bytes of a name, without half a character at the end: some shares take
    nothing but UTF-8."""
    while 0 < length < len(name) and name[length] & 0xC0 == 0x80:
        length -= 1
    return name[:length]


@dataclass
class _Outcome:
    """What the journal is to store of a conflict that was settled."""

    items: list[Node | Name] = field(default_factory=list)
    rows: list[ConflictRow] = field(default_factory=list)

    def store(self, volume: Volume) -> None:
        """In one transaction."""
        volume.commit_outcome(*self.items, extra=lambda: volume.journal.put_conflicts(self.rows))


async def settle_conflict(volume: Volume, node: Node | None, at: Name) -> None:
    """The share has somebody else's file under a name: keep it, and ours beside it.

    ``node`` is ours; None when we were about to remove the name.
    """
    tree, (directory, name) = volume.tree, at
    parent = await volume.share.directory(directory, flush=True)
    st = await volume.share.stat(parent, name, flush=True)
    now = volume.clock()
    tree.next_seq()
    old = directory.share.get(name)
    theirs: Node | None = None
    if st is not None:
        kind = Directory if stat.S_ISDIR(st.st_mode) else Node
        if isinstance(old, Directory) and stat.S_ISDIR(st.st_mode):
            theirs = old
        else:
            theirs = kind(tree.allocate(), st.st_mode)
            tree.add(theirs)
            volume.adopt(theirs, st)
    outcome = _Outcome([at])
    if theirs is not old:
        tree.set_share(directory, name, theirs, now)
        if old is not None and old.links:
            _detach(volume, old)
            outcome.items.append(old)
    elif isinstance(theirs, Directory):
        theirs.listed_at = None  # somebody put new files into a directory that we removed
    if theirs is not None:
        removed = directory.local.get(name) is None
        shown = _show(volume, theirs, at, outcome)
        if removed:
            path = os.fsdecode(tree.name_path(*shown))
            volume.report(
                f"conflict: {path!r} was removed here and changed on the share by another writer;"
                " it is kept"
            )
            outcome.rows.append(volume.conflicts.add(shown, theirs=theirs))
    outcome.store(volume)
    if old is not None:
        volume.forget_if_gone(old)


def _show(volume: Volume, theirs: Node, at: Name, outcome: _Outcome) -> Name:
    """Give theirs its name in the mount, and return it; what has the name here moves aside.

    A directory that was removed here comes back if theirs is in it.
    """
    tree, now, (directory, name) = volume.tree, volume.clock(), at
    if not directory.links and directory.slinks:
        directory.listed_at = None
        _show(volume, directory, directory.slinks[0], outcome)
    if volume.temporary_names.is_ours(name):
        # It was parked, and to be removed: it gets a name that everybody sees.
        lost = theirs.dropped[1] if theirs.dropped else b"recovered"
        taken = {*directory.local, *directory.share}
        name = conflict_name(lost, volume.capabilities.name_max, taken)
        at = directory, name
        tree.touch(theirs, now)
    ours = directory.local.get(name)
    if ours is theirs:
        return at
    if ours is not None:
        other = conflict_name(name, volume.capabilities.name_max, set(directory.local))
        shown = os.fsdecode(tree.name_path(directory, name))
        volume.report(
            f"conflict: {shown!r} was changed on the share by another writer;"
            f" ours is kept as {os.fsdecode(other)!r}"
        )
        tree.touch(ours, now)
        tree.set_local(directory, name, None, now)
        tree.set_local(directory, other, ours, now)
        _detach(volume, ours)
        outcome.items += [(directory, other), ours]
        outcome.rows.append(volume.conflicts.add(at, ours=ours, theirs=theirs, copy=other))
        volume.invalidate_entry(directory.ino, other)
    tree.set_local(directory, name, theirs, now)
    outcome.items += [at, theirs]
    volume.invalidate_entry(directory.ino, name)
    return at


def _detach(volume: Volume, node: Node) -> None:
    """Our side, if the share does not have it elsewhere, is a new file from now on."""
    if node.is_symlink or node.is_dir or node.slinks:
        return
    node.sent = ()
    content = node.content
    if content is not None and content.local(0, node.size, node.size):
        node.base = None
        content.make_whole()
    elif content is None or not content.whole:
        volume.cut_off(node, "replaced")
