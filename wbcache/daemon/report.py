"""What `status`, `pending` and `conflicts` say."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from typing import Any

from wbcache.filesystem import FileSystem
from wbcache.flush.flusher import Flusher
from wbcache.node import Directory, Node
from wbcache.tree import Item

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
}


def rows(filesystem: FileSystem, items: Iterable[Item]) -> list[dict[str, Any]]:
    """A row for each item that the share does not have as it should be, oldest first."""
    found = [_row(filesystem, item) for item in items]
    return sorted(found, key=lambda row: -float(row["age_seconds"]))


def _row(filesystem: FileSystem, item: Item) -> dict[str, Any]:
    tree, now = filesystem.tree, filesystem.volume.clock()
    if isinstance(item, Node):
        first = item.dirty.first if item.dirty is not None else now
        return {
            "path": tree.path(item),
            "kind": _KINDS.get(stat.S_IFMT(item.mode), "special"),
            "state": filesystem.attributes.state(item).partition(":")[0],
            "bytes": item.dirty_bytes,
            "age_seconds": round(now - first, 1),
            "reason": item.trouble or item.in_vain or _short_of_room(filesystem, item),
        }
    directory, name = item
    change = tree.changes.get(item)
    old = directory.share.get(name)
    return {
        "path": tree.name_path(directory, name),
        "kind": "directory" if isinstance(old, Directory) else "file",
        "state": "to be removed",
        "bytes": 0,
        "age_seconds": round(now - change.first, 1) if change else 0.0,
        "reason": (change.trouble or change.in_vain or "") if change else "",
    }


def _short_of_room(filesystem: FileSystem, item: Item) -> str:
    return "the share is full" if item in filesystem.volume.starved else ""


def conflicts(filesystem: FileSystem) -> list[dict[str, Any]]:
    """A row for each conflict with another writer that nobody has dealt with, oldest first."""
    tree, found = filesystem.tree, []
    for conflict in filesystem.volume.conflicts.standing():
        ours, theirs = conflict.ours, conflict.theirs if conflict.shows_theirs else None
        path = tree.name_path(conflict.directory, conflict.name)
        found.append(
            {
                "id": conflict.id,
                "kind": conflict.kind,
                "path": path,
                "ours": ours and tree.name_path(conflict.directory, conflict.copy or conflict.name),
                "ours_bytes": _size(ours),
                "ours_incomplete": ours is not None and _is_incomplete(ours),
                "theirs": theirs and path,
                "theirs_bytes": _size(theirs),
                "time": conflict.time,
            }
        )
    return found


def _size(node: Node | None) -> int | None:
    return None if node is None or node.is_dir else node.size


def _is_incomplete(node: Node) -> bool:
    """Whether bytes of it are neither here nor on the share any more."""
    content = node.content
    return not node.slinks and content is not None and not content.local(0, node.size, node.size)


def status(filesystem: FileSystem, flusher: Flusher, problem: str | None = None) -> dict[str, Any]:
    """The state of the mount, without its paths; ``problem`` is why the share is not used."""
    volume, tree = filesystem.volume, filesystem.tree
    unfinished = flusher.unfinished()
    oldest = 0.0
    errors = []
    for item in unfinished:
        if isinstance(item, Node):
            first = item.dirty.first if item.dirty is not None else volume.clock()
            trouble, path = item.trouble, tree.path(item) if item.trouble else b""
        else:
            change = tree.changes[item]
            first, trouble = change.first, change.trouble
            path = tree.name_path(*item) if trouble else b""
        oldest = max(oldest, volume.clock() - first)
        if trouble:
            errors.append({"path": path, "reason": trouble})
    health = volume.share.health
    silent = health.silent_since
    return {
        "dirty_files": len(unfinished),
        "dirty_bytes": sum(n.dirty_bytes for n in unfinished if isinstance(n, Node)),
        "oldest_dirty_seconds": round(oldest, 1),
        "flushing": flusher.running,
        "flushed_bytes": flusher.files.bytes_sent,
        "read_only": volume.read_only,
        "nodes": len(tree.nodes),
        "share": {
            "state": health.state,
            "verified": problem is None,
            "problem": problem or "",
            "latency_ms": round(health.latency * 1000, 1),
            "silent_seconds": round(volume.clock() - silent, 1) if silent is not None else 0.0,
            "calls_under_way": health.stuck,
            "calls_given_up": volume.share.given_up,
            "full": flusher.room.is_short,
            "order_suspended": flusher.room.order_suspended,
        },
        "conflicts": len(volume.conflicts.standing()),
        "errors": errors,
        "events": [{"time": at, "text": text} for at, text in volume.events],
    }
