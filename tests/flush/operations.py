"""Operations on a mount and its model at once: the actions of programs.

Each picks by chance what it acts on; when there is nothing of the kind it does nothing.
"""

from __future__ import annotations

import os

from tests.flush.posix import Entry, ModelDirectory, ModelFile, ModelLink, Path
from tests.flush.world import World
from wbcache.filesystem.attributes import Changes
from wbcache.filesystem.files import Handle
from wbcache.node import Node
from wbcache.share.calls import RENAME_EXCHANGE, RENAME_NOREPLACE

NAMES = [b"a", b"b", b"c", b"d"]
DEPTH = 3


class Operations(World):
    """A world in which things happen; the actions of a program are its methods."""

    # -- files ---------------------------------------------------------------------------------

    async def create(self) -> None:
        """open(O_CREAT | O_TRUNC), of a new file or an old one."""
        parent, name = self.pick_directory(), self.random.choice(NAMES)
        existing = self.model.directory(parent).entries.get(name)
        if existing is None:
            await self._new_file((*parent, name))
        elif isinstance(existing, ModelFile):
            await self._rewrite(await self.node((*parent, name)), existing)

    async def create_once(self) -> None:
        """A file under a name that nothing ever had, written once and closed."""
        path = (*self.pick_directory(), f"file{self.written}".encode())
        self.written += 1
        node, file = await self._make_file(path)
        handle = self._open(node, file, os.O_WRONLY)
        await self._write(handle, file, 0)
        self._close(handle, file)

    async def _make_file(self, path: Path) -> tuple[Node, ModelFile]:
        directory = await self.directory(path[:-1])
        node = await self.fs.names.create(directory, path[-1], 0o644, 0, 0)
        file = self.new_file()
        file.ino = node.ino
        self.model.directory(path[:-1]).give(path[-1], file, self.tree.seq)
        return node, file

    async def _new_file(self, path: Path) -> None:
        await self._rewrite(*await self._make_file(path))

    async def _rewrite(self, node: Node, file: ModelFile) -> None:
        handle = self._open(node, file, os.O_WRONLY | os.O_TRUNC)
        file.become(b"")
        for _ in range(self.random.choice([0, 1, 1, 2])):
            await self._write(handle, file, len(file.data))
        self._maybe_close(handle, file)

    def _open(self, node: Node, file: ModelFile, flags: int) -> Handle:
        handle = self.fs.files.open(node, flags)
        file.writers += handle.writable
        self.handles.append((handle, file))
        return handle

    def _close(self, handle: Handle, file: ModelFile) -> None:
        self.handles.remove((handle, file))
        self.fs.files.release(handle)
        file.writers -= handle.writable
        if handle.writable and not file.writers:
            file.safe(self.tree.seq)

    def _maybe_close(self, handle: Handle, file: ModelFile) -> None:
        if self.random.random() < 0.8:
            self._close(handle, file)

    async def _write(self, handle: Handle, file: ModelFile, offset: int) -> None:
        data = self.fresh()
        await self.fs.files.write(handle.node, offset, data)
        old = file.data.ljust(offset, b"\0")
        file.become(old[:offset] + data + old[offset + len(data) :])

    async def _open_some(self, flags: int) -> tuple[Handle, ModelFile] | None:
        path = self.pick(ModelFile)
        if path is None:
            return None
        file = self.model.file(path)
        return self._open(await self.node(path), file, flags), file

    async def append(self) -> None:
        """Add to the end of a file."""
        opened = await self._open_some(os.O_WRONLY)
        if opened:
            handle, file = opened
            await self._write(handle, file, len(file.data))
            self._maybe_close(handle, file)

    async def patch(self) -> None:
        """Overwrite a part of a file."""
        opened = await self._open_some(os.O_RDWR)
        if opened:
            handle, file = opened
            await self._write(handle, file, self.random.randint(0, len(file.data) + 4))
            self._maybe_close(handle, file)

    async def restart(self) -> None:
        """open(O_TRUNC)."""
        path = self.pick(ModelFile)
        if path is not None:
            await self._rewrite(await self.node(path), self.model.file(path))

    async def truncate(self) -> None:
        """Set a file's length, to any."""
        path = self.pick(ModelFile)
        if path is None:
            return
        file, node = self.model.file(path), await self.node(path)
        size = self.random.choice([0, self.random.randint(0, len(file.data) + 5)])
        await self.fs.attributes.change(node, Changes(size=size))
        file.become(file.data[:size].ljust(size, b"\0"))
        if not file.writers:
            file.safe(self.tree.seq)

    async def open_only(self) -> None:
        """Open a file and leave it so."""
        await self._open_some(self.random.choice([os.O_RDONLY, os.O_WRONLY]))

    async def more(self) -> None:
        """Write to an open file."""
        writable = [(h, f) for h, f in self.handles if h.writable]
        if writable:
            handle, file = self.random.choice(writable)
            await self._write(handle, file, len(file.data))

    async def close(self) -> None:
        """Close an open file."""
        if self.handles:
            self._close(*self.random.choice(self.handles))

    async def fsync(self) -> None:
        """Sync an open file."""
        if self.handles:
            handle, file = self.random.choice(self.handles)
            await self.fs.files.fsync(handle.node)
            if file.data:
                file.safe(self.tree.seq)

    async def read(self) -> None:
        """An open file reads as it should, whatever became of its name."""
        if self.handles:
            handle, file = self.random.choice(self.handles)
            data = await self.fs.files.read(handle.node, 0, 1 << 20)
            assert data == file.data, f"{handle.node}: {data!r} instead of {file.data!r}"

    # -- names ---------------------------------------------------------------------------------

    async def mkdir(self) -> None:
        """Make a directory."""
        parent, name = self.pick_directory(), self.random.choice(NAMES)
        directory = self.model.directory(parent)
        if len(parent) < DEPTH and name not in directory.entries:
            node = await self.fs.names.mkdir(await self.directory(parent), name, 0o755, 0, 0)
            made = ModelDirectory()
            self.directories[node.ino] = made
            directory.give(name, made, self.tree.seq)

    async def symlink(self) -> None:
        """Make a symbolic link."""
        parent, name = self.pick_directory(), self.random.choice(NAMES)
        directory = self.model.directory(parent)
        self.written += 1
        target = f"../to {self.written}".encode()
        if name not in directory.entries:
            await self.fs.names.symlink(await self.directory(parent), name, target, 0, 0)
            directory.give(name, ModelLink(target), self.tree.seq)

    async def link(self) -> None:
        """Give a file a further name."""
        path = self.pick(ModelFile, ModelLink)
        parent, name = self.pick_directory(), self.random.choice(NAMES)
        directory = self.model.directory(parent)
        if path is not None and name not in directory.entries:
            node = await self.node(path)
            await self.fs.names.link(node, await self.directory(parent), name)
            directory.give(name, self.model.find(path), self.tree.seq)

    async def unlink(self) -> None:
        """Remove a file."""
        path = self.pick(ModelFile, ModelLink)
        if path is not None:
            await self._remove(path)

    async def unlink_old(self) -> None:
        """Remove a file that the share has as it is."""
        path = self.pick(ModelFile, ModelLink)
        if path is not None and (await self.node(path)).dirty is None:
            await self._remove(path)

    async def replace_old(self) -> None:
        """Write a new file and rename it over one that the share has as it is."""
        path = self.pick(ModelFile)
        if path is not None and (await self.node(path)).dirty is None:
            beside = (*path[:-1], f"file{self.written}".encode())
            await self._new_file(beside)
            await self._rename(beside, path)

    async def rmdir(self) -> None:
        """Remove a directory, if it is empty."""
        path = self.pick(ModelDirectory)
        if path is not None and not self.model.directory(path).entries:
            await self._remove(path)

    async def remove_tree(self) -> None:
        """Remove a directory and all that is in it."""
        path = self.pick(ModelDirectory)
        if path is not None:
            below = [p for p, _ in self.model.walk() if p[: len(path)] == path]
            for inner in sorted(below, key=len, reverse=True):
                await self._remove(inner)

    async def _remove(self, path: Path) -> None:
        await self.node(path)
        parent = await self.directory(path[:-1])
        if isinstance(self.model.find(path), ModelDirectory):
            await self.list(await self.directory(path))
            await self.fs.names.rmdir(parent, path[-1])
        else:
            await self.fs.names.unlink(parent, path[-1])
        self.model.directory(path[:-1]).give(path[-1], None, self.tree.seq)

    async def rename(self) -> None:
        """rename(2), also over something."""
        await self._rename_some(0)

    async def rename_new(self) -> None:
        """The same, only to a free name."""
        await self._rename_some(RENAME_NOREPLACE)

    async def exchange(self) -> None:
        """Let two names change places."""
        await self._rename_some(RENAME_EXCHANGE)

    async def _rename_some(self, flags: int) -> None:
        old, parent = self.pick(ModelFile, ModelLink, ModelDirectory), self.pick_directory()
        if old is None:
            return
        new: Path | None = (*parent, self.random.choice(NAMES))
        if flags == RENAME_EXCHANGE:
            new = self.pick(ModelFile, ModelLink, ModelDirectory)
        assert new is not None
        if self._may_rename(old, new, flags):
            await self._rename(old, new, flags)

    def _may_rename(self, old: Path, new: Path, flags: int) -> bool:
        entry = self.model.find(old)
        target = self.model.directory(new[:-1]).entries.get(new[-1])
        if isinstance(entry, ModelDirectory):
            deepest = max(len(p) for p in self.model.directories() if p[: len(old)] == old)
            if new[: len(old)] == old or len(new) + deepest - len(old) > DEPTH:
                return False
        if flags == RENAME_NOREPLACE:
            return target is None
        if flags == RENAME_EXCHANGE:
            return not (isinstance(target, ModelDirectory) and old[: len(new)] == new)
        if target is None or target is entry:
            return True
        if isinstance(target, ModelDirectory):
            return isinstance(entry, ModelDirectory) and not target.entries
        return not isinstance(entry, ModelDirectory)

    async def _rename(self, old: Path, new: Path, flags: int = 0) -> None:
        source, target = self.model.directory(old[:-1]), self.model.directory(new[:-1])
        entry, other = source.entries[old[-1]], target.entries.get(new[-1])
        # The kernel looks both names up before it asks for the rename.
        await self.node(old)
        if other is not None:
            await self.node(new)
        at, to = await self.directory(old[:-1]), await self.directory(new[:-1])
        if isinstance(other, ModelDirectory):
            await self.list(await self.directory(new))
        await self.fs.names.rename(at, old[-1], to, new[-1], flags)
        if entry is other:
            return
        self._swap(source, old[-1], target, new[-1], other if flags & RENAME_EXCHANGE else None)

    def _swap(
        self,
        source: ModelDirectory,
        old: bytes,
        target: ModelDirectory,
        new: bytes,
        back: Entry | None,
    ) -> None:
        entry = source.entries[old]
        source.give(old, back, self.tree.seq)
        target.give(new, entry, self.tree.seq)

    async def replace(self) -> None:
        """Write a new file beside another one and rename it over that."""
        path = self.pick(ModelFile)
        if path is not None and b"new" not in self.model.directory(path[:-1]).entries:
            beside = (*path[:-1], b"new")
            await self._new_file(beside)
            await self._rename(beside, path)

    async def rotate(self) -> None:
        """b -> c, a -> b: what log rotation does."""
        parent = self.pick_directory()
        entries = self.model.directory(parent).entries
        logs = [isinstance(entries.get(name), ModelFile) for name in (b"a", b"b")]
        if all(logs) and not isinstance(entries.get(b"c"), ModelDirectory):
            await self._rename((*parent, b"b"), (*parent, b"c"))
            await self._rename((*parent, b"a"), (*parent, b"b"))

    async def shuffle(self) -> None:
        """Give everything another place: each thing goes to the root, under a name of its own, and
        from there to some directory."""
        if self.model.root.entries.keys() - set(NAMES):
            return
        paths = sorted((p for p, _ in self.model.walk()), key=len, reverse=True)
        homeless = [f"x{number}".encode() for number in range(len(paths))]
        for name, path in zip(homeless, paths, strict=True):
            await self._rename(path, (name,))
        self.random.shuffle(homeless)
        for name in homeless:
            free = [
                (*parent, new)
                for parent in self.model.directories()
                for new in NAMES
                if len(parent) < DEPTH and not (parent and parent[0] in homeless)
                if new not in self.model.directory(parent).entries
            ]
            if free:
                await self._rename((name,), self.random.choice(sorted(free)))

    # -- attributes ----------------------------------------------------------------------------

    async def chmod(self) -> None:
        """Change permissions."""
        path = self.pick(ModelFile, ModelDirectory)
        if path is not None:
            entry = self.model.find(path)
            assert not isinstance(entry, ModelLink)
            entry.mode = self.random.choice([0o600, 0o755, 0o700])
            await self.fs.attributes.change(await self.node(path), Changes(mode=entry.mode))

    async def utimens(self) -> None:
        """Change times."""
        path = self.pick(ModelFile, ModelDirectory)
        if path is not None:
            stamp = self.random.randint(1, 10**18)
            await self.fs.attributes.change(await self.node(path), Changes(mtime=stamp))

    # -- the rest ------------------------------------------------------------------------------

    async def look(self) -> None:
        """Look a path up, without changing anything."""
        path = self.pick(ModelFile, ModelLink, ModelDirectory)
        if path is not None:
            await self.node(path)

    async def read_directory(self) -> None:
        """List a directory."""
        await self.list(await self.directory(self.pick_directory()))
