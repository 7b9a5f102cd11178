"""The files of the backing directory that the kernel knows, and what they are called.

A node is one inode of the backing file system, found by device and inode number, so hard links
share it. It is reached through an O_PATH descriptor: that works whatever the file is called by
now, and while it is held the backing cannot reuse the inode number. Descriptors are bounded: the
least recently used are closed and opened again by name.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections import OrderedDict

ROOT_ID = 1
_FIRST_FREE_ID = 1 << 62

Key = tuple[int, int]


def fail(code: int) -> OSError:
    """An OSError for *code*, to be raised."""
    return OSError(code, os.strerror(code))


class Node:
    """One file, directory or link.

    id: the inode number shown to the kernel: the backing's own, unless that one is taken.
    lookups: references the kernel holds.
    opens: open handles.
    names: where it is known to be, newest last; empty once its last known name was removed.
    doomed: it had no name left while it was open; its space is freed with its last handle.
    """

    __slots__ = ("doomed", "fd", "generation", "id", "key", "last", "lookups", "names", "opens")

    def __init__(self, id: int, key: Key, generation: int, fd: int) -> None:
        self.id = id
        self.key = key
        self.generation = generation
        self.fd = fd
        self.lookups = 0
        self.opens = 0
        self.doomed = False
        self.names: dict[tuple[Node, bytes], None] = {}
        self.last: tuple[Node, bytes] | None = None


class NodeTable:
    """All nodes the kernel holds a reference to, below one root directory."""

    def __init__(self, root: str | bytes) -> None:
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        st = os.fstat(fd)
        self._dev = st.st_dev
        self._generation = 0
        self._free_id = _FIRST_FREE_ID
        self.root = Node(ROOT_ID, (st.st_dev, st.st_ino), 0, fd)
        self.root.lookups = 1
        self._by_id = {ROOT_ID: self.root}
        self._by_key = {self.root.key: self.root}
        self._by_name: dict[tuple[Node, bytes], Node] = {}
        self._open: OrderedDict[Node, None] = OrderedDict()
        # Half for nodes, half for open files.
        self._max_open = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def get(self, id: int) -> Node:
        """The node with this inode number. Raises ESTALE when there is none."""
        try:
            return self._by_id[id]
        except KeyError:
            raise fail(errno.ESTALE) from None

    def at(self, parent: Node, name: bytes) -> Node | None:
        """The node known under this name, if any."""
        return self._by_name.get((parent, name))

    def fd(self, node: Node) -> int:
        """An O_PATH descriptor of *node*; valid until the next call.

        Raises ESTALE if it was closed meanwhile and the name now leads elsewhere.
        """
        if node is self.root:
            return node.fd
        if node.fd >= 0:
            self._open.move_to_end(node)
            return node.fd
        for parent, name in reversed(list(node.names)):
            try:
                fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd(parent))
            except OSError:
                continue
            st = os.fstat(fd)
            if (st.st_dev, st.st_ino) == node.key:
                self._keep(node, fd)
                return fd
            os.close(fd)
        raise fail(errno.ESTALE)

    def adopt(self, parent: Node, name: bytes) -> tuple[Node, os.stat_result]:
        """Look *name* up on the backing and count one reference to what is there.

        Raises OSError as the backing does, ENOENT above all.
        """
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd(parent))
        except FileNotFoundError:
            self.removed(parent, name)
            raise
        st = os.fstat(fd)
        key = (st.st_dev, st.st_ino)
        node = self._by_key.get(key)
        if node is None:
            self._generation += 1
            node = Node(self._choose_id(st), key, self._generation, -1)
            self._by_id[node.id] = node
            self._by_key[key] = node
        if node.fd < 0:
            self._keep(node, fd)
        else:
            os.close(fd)
        node.lookups += 1
        self._placed(node, parent, name, sole=st.st_nlink == 1 or stat.S_ISDIR(st.st_mode))
        return node, st

    def forget(self, id: int, count: int) -> None:
        """Give back *count* references; without any left the node is dropped."""
        node = self._by_id.get(id)
        if node is None or node is self.root:
            return
        node.lookups -= count
        if node.lookups > 0:
            return
        del self._by_id[node.id]
        if self._by_key.get(node.key) is node:
            del self._by_key[node.key]
        for place in node.names:
            if self._by_name.get(place) is node:
                del self._by_name[place]
        if node.fd >= 0:
            os.close(node.fd)
            node.fd = -1
            self._open.pop(node, None)

    def removed(self, parent: Node, name: bytes) -> None:
        """Note that *name* is gone."""
        node = self._by_name.pop((parent, name), None)
        if node is not None:
            node.names.pop((parent, name), None)
            node.last = (parent, name)

    def moved(self, parent: Node, name: bytes, parent2: Node, name2: bytes) -> None:
        """Note that *name* is now *name2*, and what was there has lost that name."""
        node = self._by_name.get((parent, name))
        self.removed(parent2, name2)
        self.removed(parent, name)
        if node is not None:
            self._placed(node, parent2, name2, sole=False)

    def exchanged(self, parent: Node, name: bytes, parent2: Node, name2: bytes) -> None:
        """Note that two names have changed places."""
        one, two = self.at(parent, name), self.at(parent2, name2)
        self.removed(parent, name)
        self.removed(parent2, name2)
        if one is not None:
            self._placed(one, parent2, name2, sole=False)
        if two is not None:
            self._placed(two, parent, name, sole=False)

    def path(self, node: Node) -> tuple[bytes, bool]:
        """The path of *node* relative to the root, and whether it still has one.

        Without any name left it is the last one it had.
        """
        named = True
        parts: list[bytes] = []
        while node is not self.root:
            if node.names:
                place = next(reversed(node.names))
            else:
                found = self._find(node) if named else None
                named = found is not None
                if found is not None:
                    parts.append(found)
                    break
                if node.last is None:
                    break
                place = node.last
            parts.append(place[1])
            node = place[0]
        return b"/".join(reversed(parts)), named

    def path_in(self, parent: Node, name: bytes) -> bytes:
        """The path of *name* in the directory *parent*."""
        if parent is self.root:
            return name
        return self.path(parent)[0] + b"/" + name

    def close(self) -> None:
        """Close every descriptor."""
        for node in self._by_id.values():
            if node.fd >= 0:
                os.close(node.fd)
                node.fd = -1

    def _find(self, node: Node) -> bytes | None:
        """Search the backing for another link to a file whose known names are all gone."""
        if node.fd < 0 or os.fstat(node.fd).st_nlink == 0:
            return None
        top = f"/proc/self/fd/{self.root.fd}".encode()
        for directory, _, files in os.walk(top):
            for name in files:
                path = directory + b"/" + name
                try:
                    st = os.lstat(path)
                except FileNotFoundError:
                    continue
                if (st.st_dev, st.st_ino) == node.key:
                    return path[len(top) + 1 :]
        return None

    def _placed(self, node: Node, parent: Node, name: bytes, *, sole: bool) -> None:
        place = (parent, name)
        known = self._by_name.get(place)
        if known is node and (not sole or len(node.names) == 1):
            return
        if known is not None and known is not node:
            self.removed(parent, name)
        if sole:
            for other in node.names:
                if self._by_name.get(other) is node:
                    del self._by_name[other]
            node.names.clear()
        node.names[place] = None
        self._by_name[place] = node

    def _choose_id(self, st: os.stat_result) -> int:
        # A number still in the kernel's hands must not come to mean another file.
        if st.st_dev == self._dev and st.st_ino > ROOT_ID and st.st_ino not in self._by_id:
            return st.st_ino
        self._free_id += 1
        return self._free_id

    def _keep(self, node: Node, fd: int) -> None:
        node.fd = fd
        self._open[node] = None
        if len(self._open) <= self._max_open:
            return
        for old in self._open:
            if old is not node and old.names and not old.opens:
                os.close(old.fd)
                old.fd = -1
                del self._open[old]
                return
