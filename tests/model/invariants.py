"""What docs/internals.md says of the state at any time, computed from scratch."""

from __future__ import annotations

import os

from wbcache.extents import END
from wbcache.node import Directory, Node
from wbcache.tree import Tree
from wbcache.volume import Volume


def check(volume: Volume) -> None:
    """Raise AssertionError for what does not hold between two operations."""
    tree = volume.tree
    names(tree)
    order(tree)
    for node in tree.nodes.values():
        bytes_of(volume, node)


def names(tree: Tree) -> None:
    """Names and nodes know each other, and what differs is listed."""
    differing = set()
    links: dict[Node, set[object]] = {}
    share_links: dict[Node, set[object]] = {}
    for directory in [n for n in tree.nodes.values() if isinstance(n, Directory)]:
        for name, node in directory.local.items():
            links.setdefault(node, set()).add((directory, name))
        for name, node in directory.share.items():
            share_links.setdefault(node, set()).add((directory, name))
        unsynced = 0
        for name in {*directory.local, *directory.share}:
            if tree.wanted(directory, name) is not directory.share.get(name):
                differing.add((directory, name))
                unsynced += 1
        assert directory.unsynced == unsynced, f"{directory}: {directory.unsynced} {unsynced}"
        inside = sum(node.is_dir for node in directory.local.values())
        assert directory.subdirectories == inside, directory
    for node in tree.nodes.values():
        assert set(node.links) == links.pop(node, set()), node
        assert set(node.slinks) == share_links.pop(node, set()), node
    assert not links and not share_links, f"unknown nodes have names: {links} {share_links}"
    assert set(tree.changes) == differing, set(tree.changes) ^ differing


def order(tree: Tree) -> None:
    """Who waits for whom."""
    below: dict[Directory, int] = {}
    ordered = {node: since for since, node in tree.order}
    for node in tree.nodes.values():
        holds = node.dirty is not None and tree.holds_others(node)
        assert (node in ordered) == holds, f"{node} is {'not ' * holds}in the order"
        if node.dirty is None:
            continue
        if node.links:
            assert node in tree.dirty, node
        if holds:
            assert ordered[node] == node.counted == node.dirty.since, node
            for parent, _ in node.links:
                assert parent.pending is not None and node in parent.pending, node
                at: Directory | None = parent
                while at is not None:
                    below[at] = below.get(at, 0) + 1
                    at = at.parent
        elif not tree.excluded(node) and not tree._only_attributes(node):
            for parent, _ in node.links:
                assert node in tree.holding.get(parent, ()), f"{node} holds nothing back"
    for directory in [n for n in tree.nodes.values() if isinstance(n, Directory)]:
        assert directory.below == below.get(directory, 0), f"{directory}: {directory.below}"


def bytes_of(volume: Volume, node: Node) -> None:
    """The ranges of a file, and the length of its cache file."""
    content = node.content
    if content is None:
        return
    assert not content.retired, node
    for start, stop in content.clean:
        assert not content.dirty.overlap(start, stop), f"{node}: clean and dirty at once"
        assert stop <= content.base_limit, f"{node}: clean behind what the share has"
    assert content.pins >= node.handles, node
    if not content.exists:
        assert not content.dirty.overlap(0, node.size), f"{node}: its bytes are nowhere"
        return
    open_ended = content.dirty.covers(END - 1, END)
    length = os.fstat(volume.store.fd(content)).st_size
    if open_ended:
        assert length == node.size, f"{node}: {length} bytes are here, of {node.size}"
    assert length <= node.size or not node.links, f"{node}: {length} bytes are here"
