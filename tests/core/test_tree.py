"""The order lists of the tree, kept up step by step, against the same worked out from scratch."""

from __future__ import annotations

import random
import stat
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from wbcache.node import META_MODE, ROOT_INO, Content, Directory, Node
from wbcache.tree import Tree

FILE = stat.S_IFREG | 0o644
DIRECTORY = stat.S_IFDIR | 0o755
NAMES = [b"a", b"b", b"c", b"d"]


class Walk:
    """Random operations on a tree, of the kinds that the file system and the flusher make."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tree = Tree(Directory(ROOT_INO, DIRECTORY))
        self.now = 0.0
        self.nodes: list[Node] = []
        """Every node there ever was, so that removed ones are operated on too."""

    def directories(self) -> list[Directory]:
        found = [self.tree.root]
        for node in self.nodes:
            if isinstance(node, Directory) and node.links:
                found.append(node)
        return found

    def step(self) -> None:
        self.now += 1.0
        choices: list[tuple[int, Callable[[], None]]] = [
            (6, self.make),
            (4, self.write),
            (4, self.rename),
            (2, self.link),
            (4, self.remove),
            (4, self.begin_flush),
            (6, self.end_flush),
            (3, self.hold),
            (1, self.quarantine),
            (1, self.exclude),
            (3, self.share_takes),
            (1, self.share_loses),
        ]
        weights = [weight for weight, _ in choices]
        self.random.choices([action for _, action in choices], weights)[0]()

    def name(self) -> tuple[Directory, bytes]:
        return self.random.choice(self.directories()), self.random.choice(NAMES)

    def some(self, *, named: bool = True) -> Node | None:
        nodes = [n for n in self.nodes if n.links or not named]
        return self.random.choice(nodes) if nodes else None

    def make(self) -> None:
        directory, name = self.name()
        if name in directory.local:
            return
        tree, ino = self.tree, self.tree.allocate()
        if self.random.random() < 0.4:
            node: Node = Directory(ino, DIRECTORY)
        else:
            node = Node(ino, FILE)
            node.content = Content(ino, whole=True, base_limit=0, seq=tree.next_seq())
        self.nodes.append(node)
        tree.add(node)
        tree.touch(node, self.now)
        tree.set_local(directory, name, node, self.now)

    def write(self) -> None:
        node = self.some()
        if node is None:
            return
        self.tree.touch(node, self.now)
        if node.is_dir:
            node.meta |= META_MODE
        else:
            node.content = Content(node.ino, whole=True, base_limit=0, seq=self.tree.seq)
            self.tree.account(node)

    def rename(self) -> None:
        node = self.some()
        if node is None:
            return
        old, (directory, name) = self.random.choice(node.links), self.name()
        target = directory.local.get(name)
        if target is node or (directory, name) == old:
            return
        if isinstance(node, Directory) and self.tree.is_below(directory, node):
            return
        if isinstance(target, Directory) and (target.local or self.tree.is_below(old[0], target)):
            return
        self.tree.touch(node, self.now)
        exchange = target is not None and self.random.random() < 0.3
        if target is not None and exchange:
            self.tree.touch(target, self.now)
        self.tree.set_local(*old, None, self.now)
        self.tree.set_local(directory, name, None, self.now)
        self.tree.set_local(directory, name, node, self.now)
        if exchange:
            self.tree.set_local(*old, target, self.now)

    def link(self) -> None:
        node, (directory, name) = self.some(), self.name()
        if node is None or node.is_dir or name in directory.local:
            return
        self.tree.touch(node, self.now)
        self.tree.set_local(directory, name, node, self.now)

    def remove(self) -> None:
        node = self.some()
        if node is None or (isinstance(node, Directory) and node.local):
            return
        self.tree.next_seq()
        self.tree.set_local(*self.random.choice(node.links), None, self.now)

    def begin_flush(self) -> None:
        node = self.some(named=False)
        if node is not None:
            self.tree.snapshot(node)

    def end_flush(self) -> None:
        node = self.some(named=False)
        if node is None:
            return
        if self.random.random() < 0.7:
            node.content, node.meta = None, 0
        if self.random.random() < 0.7:
            for directory, name in list(node.links):
                self.tree.set_share(directory, name, node, self.now)
        self.tree.settle(node, self.now)

    def hold(self) -> None:
        node = self.some(named=False)
        if node is None or node.is_dir:
            return
        node.writers = self.random.choice([0, 0, 1])
        node.released = self.random.random() < 0.2
        node.fsynced = self.random.random() < 0.2
        node.closed = self.random.random() < 0.3
        self.tree.account(node)

    def quarantine(self) -> None:
        node = self.some(named=False)
        if node is not None:
            node.trouble = None if node.trouble else "refused"
            self.tree.account(node)

    def exclude(self) -> None:
        node = self.some(named=False)
        if node is not None and not node.is_dir:
            self.tree.set_never(node, not node.never, self.now)

    def share_takes(self) -> None:
        node, (directory, name) = self.some(named=False), self.name()
        if node is None:
            return
        if node.is_dir and (node.slinks or self.below_itself(node, directory)):
            return
        self.tree.set_share(directory, name, node, self.now)

    def below_itself(self, node: Node, directory: Directory) -> bool:
        at = directory
        while at is not node and at.slinks:
            at = at.slinks[0][0]
        return at is node

    def share_loses(self) -> None:
        directory = self.random.choice(self.directories())
        if directory.share:
            name = self.random.choice(sorted(directory.share))
            self.tree.set_share(directory, name, None, self.now)


def entries(order: Iterable[Any] | None) -> list[tuple[int, int]]:
    """(number, inode) pairs of an order list."""
    return sorted((n, i.ino if isinstance(i, Node) else i) for n, i in (order or ()))


def counts(tree: Tree, node: Node) -> bool:
    """Whether others wait for the node, by the rules of the design."""
    held = (
        node.content is not None
        and node.content.whole
        and node.writers > 0
        and not (node.released or node.fsynced or node.closed)
    )
    kept_back = held or node.trouble is not None or node.never or only_attributes(node)
    return node.dirty is not None and bool(node.links) and not kept_back


def only_attributes(node: Node) -> bool:
    """Whether it is a directory that the share has in its place: nobody waits for its times."""
    return node.is_dir and bool(node.slinks) and node.slinks == node.links


def check(walk: Walk) -> None:
    tree, nodes = walk.tree, walk.nodes
    counted = [n for n in nodes if counts(tree, n)]
    since = {n: n.dirty.since for n in counted if n.dirty is not None}
    assert entries(tree.order) == sorted((since[n], n.ino) for n in counted)
    assert tree.dirty == {n for n in nodes if n.dirty is not None and n.links}
    kept_back = {n for n in tree.dirty if n not in since}
    holding = {n for n in kept_back if not n.never and not only_attributes(n)}
    assert set(tree.holding) == {parent for n in holding for parent, _ in n.links}
    for directory in walk.directories():
        guards = {n for n in holding for parent, _ in n.links if parent is directory}
        assert tree.holding.get(directory, set()) == guards
        inside = [n for n in counted for parent, _ in n.links if parent is directory]
        assert set(entries(directory.pending)) == {(since[n], n.ino) for n in inside}
        below = [n for n in counted for parent, _ in n.links if tree.is_below(parent, directory)]
        assert directory.below == len(below)
        busy = {n for n in directory.local.values() if isinstance(n, Directory) and n.below}
        assert (directory.busy_dirs or set()) == busy
        differing = 0
        for name in {*directory.local, *directory.share}:
            differs = tree.wanted(directory, name) is not directory.share.get(name)
            assert ((directory, name) in tree.changes) == differs
            differing += differs
        assert directory.unsynced == differing
        check_questions(walk, directory, since, set(below))


def check_questions(
    walk: Walk, directory: Directory, since: dict[Node, int], below: set[Node]
) -> None:
    tree, exclude = walk.tree, walk.some(named=False)
    seq = walk.random.randint(0, tree.seq + 1)
    older = [n for n in since if since[n] < seq and n is not exclude]
    found = tree.latest_before(seq, exclude)
    assert found is max(older, key=lambda n: (since[n], n.ino), default=None)
    found = tree.latest_below(directory, seq, exclude)
    assert (found is not None) == bool(below & set(older))
    assert found is None or found in below & set(older)


@pytest.mark.parametrize("seed", range(150))
def test_order_lists_agree_with_a_recomputation(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(120):
        walk.step()
        check(walk)


def test_a_settled_node_is_as_old_as_the_first_operation_after_its_snapshot() -> None:
    tree = Tree(Directory(ROOT_INO, DIRECTORY))
    node = Node(tree.allocate(), FILE)
    tree.add(node)
    first = tree.touch(node, 1.0)
    tree.set_local(tree.root, b"log", node, 1.0)
    tree.snapshot(node)
    node.content = Content(1, whole=True, base_limit=0, seq=first)
    second = tree.touch(node, 2.0)
    tree.touch(node, 3.0)
    tree.set_share(tree.root, b"log", node, 4.0)
    tree.settle(node, 4.0)
    assert node.dirty is not None
    assert (node.dirty.since, node.dirty.first) == (second, 2.0)


def test_a_node_with_a_missing_name_stays_as_old_as_it_was() -> None:
    tree = Tree(Directory(ROOT_INO, DIRECTORY))
    node = Node(tree.allocate(), FILE)
    tree.add(node)
    first = tree.touch(node, 1.0)
    tree.set_local(tree.root, b"file", node, 1.0)
    tree.snapshot(node)
    tree.touch(node, 2.0)
    tree.settle(node, 3.0)
    assert node.dirty is not None and node.dirty.since == first
    tree.snapshot(node)
    tree.set_share(tree.root, b"file", node, 4.0)
    tree.settle(node, 4.0)
    assert node.dirty is None and node not in tree.dirty
