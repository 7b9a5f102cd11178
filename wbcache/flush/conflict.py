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

from wbcache.node import Directory, Node
from wbcache.share import calls
from wbcache.tree import Name
from wbcache.volume import Volume


def conflict_name(name: bytes, name_max: int, taken: set[bytes]) -> bytes:
    """A free name for our side, that tells host and time (UTC)."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40] or "host"
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for n in range(1 << 20):
        suffix = f".conflict-{host}-{stamp}{f'-{n}' if n else ''}".encode()
        candidate = name[: name_max - len(suffix)] + suffix
        if candidate not in taken:
            return candidate
    raise AssertionError("no free conflict name")


async def settle_conflict(volume: Volume, node: Node | None, at: Name) -> None:
    """The share has somebody else's file under a name: keep it, and ours beside it.

    ``node`` is ours; None when we were about to remove the name.
    """
    tree, (directory, name) = volume.tree, at
    parent = await volume.share.directory(directory, flush=True)
    st = await volume.share.work(calls.lstat_or_none, parent, name)
    now = volume.clock()
    shown = os.fsdecode(tree.name_path(directory, name))
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
    items: list[Node | Name] = [at]
    if theirs is not old:
        tree.set_share(directory, name, theirs, now)
    elif isinstance(theirs, Directory):
        # Somebody put new files into a directory that we removed: it is shown again, with them.
        theirs.listed_at = None
    ours = directory.local.get(name)
    if ours is not None and ours is not theirs and (node is None or ours is node):
        other = conflict_name(name, volume.capabilities.name_max, set(directory.local))
        tree.touch(ours, now)
        tree.set_local(directory, name, None, now)
        tree.set_local(directory, other, ours, now)
        items += [(directory, other), ours]
        _detach(volume, ours)
        volume.invalidate_entry(directory.ino, other)
        volume.report(
            f"conflict: {shown!r} was changed on the share by another writer;"
            f" ours is kept as {os.fsdecode(other)!r}"
        )
    elif ours is None and theirs is not None:
        volume.report(
            f"conflict: {shown!r} was removed here and changed on the share by another writer;"
            " it is kept"
        )
    if theirs is not None and directory.local.get(name) is None:
        tree.set_local(directory, name, theirs, now)
    volume.invalidate_entry(directory.ino, name)
    volume.commit_outcome(*items)
    if old is not None:
        volume.forget_if_gone(old)


def _detach(volume: Volume, node: Node) -> None:
    """Our side is a new file from now on: it is published whole, under its new name."""
    node.sent.clear()
    content = node.content
    if node.is_symlink or node.is_dir or node.slinks:
        return
    if content is not None and content.local(0, node.size, node.size):
        node.base = None
        content.make_whole()
    elif content is None or not content.whole:
        node.trouble = "the share's copy, which held the rest of its bytes, was replaced"
        volume.report(f"{os.fsdecode(volume.tree.path(node))!r} is incomplete: {node.trouble}")
        volume.tree.account(node)
