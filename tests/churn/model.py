"""What a directory should hold after a sequence of operations, and how it differs from that.

An operation is a list that JSON can hold: its name, then paths relative to the modelled directory
and numbers. `Model.apply` carries it out in memory, `operations.execute` on a real directory.
"""

from __future__ import annotations

import copy
import os
import random
import stat
from collections.abc import Iterator
from typing import Any

Operation = list[Any]

PAGE = 4096


class File:
    """A regular file; hard links share one."""

    def __init__(self, mode: int) -> None:
        self.data = bytearray()
        self.mode = mode
        self.mtime: int | None = None
        """Nanoseconds, where an operation has set it; None where the file system chose it."""
        self.xattrs: dict[str, bytes] = {}


class Link:
    """A symbolic link."""

    def __init__(self, target: str) -> None:
        self.target = target


class Dir:
    """A directory."""

    def __init__(self, mode: int) -> None:
        self.mode = mode
        self.mtime: int | None = None
        self.entries: dict[str, Entry] = {}


Entry = File | Link | Dir


def content(seed: int, size: int) -> bytes:
    """The bytes that an operation writes: a function of what its log says, and never zeros."""
    return random.Random(seed).randbytes(size).replace(b"\0", b"\1")


class Model:
    """A directory tree in memory."""

    def __init__(self) -> None:
        self.root = Dir(0o755)
        self.handles: dict[int, File] = {}
        """Files that are open for appending."""

    # -- looking -------------------------------------------------------------------------------

    def parent(self, path: str) -> tuple[Dir, str]:
        """The directory that holds a path's last name, and that name."""
        head, _, name = path.rpartition("/")
        directory = self.root
        for part in head.split("/") if head else ():
            entry = directory.entries[part]
            assert isinstance(entry, Dir)
            directory = entry
        return directory, name

    def get(self, path: str) -> Entry:
        """What a path names."""
        if not path:
            return self.root
        directory, name = self.parent(path)
        return directory.entries[name]

    def file(self, path: str) -> File:
        """The file that a path names."""
        entry = self.get(path)
        assert isinstance(entry, File)
        return entry

    def directories(self) -> int:
        """How many directories there are, the top included."""
        return 1 + sum(isinstance(entry, Dir) for _, entry in self.walk())

    def walk(self) -> Iterator[tuple[str, Entry]]:
        """Every path and what it names, parents first."""
        stack: list[tuple[str, Dir]] = [("", self.root)]
        while stack:
            prefix, directory = stack.pop()
            for name, entry in directory.entries.items():
                path = f"{prefix}/{name}" if prefix else name
                yield path, entry
                if isinstance(entry, Dir):
                    stack.append((path, entry))

    # -- changing ------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> None:
        """Carry out an operation that can be carried out."""
        getattr(self, "_" + operation[0])(*operation[1:])

    def parts(self, operation: Operation) -> list[Operation]:
        """What a write may have left when its daemon was killed in the middle: the disk's file
        system takes a page at a time."""
        kind, *arguments = operation
        if kind not in ("write", "map", "append", "held_append"):
            return []
        *place, seed, size = arguments
        start = place[1] if len(place) == 2 else len(self._target(place[0]).data)
        return [[kind, *place, seed, at - start, size] for at in _pages(start, start + size)]

    def _target(self, place: str | int) -> File:
        return self.handles[place] if isinstance(place, int) else self.file(place)

    def _put(self, path: str, entry: Entry) -> None:
        directory, name = self.parent(path)
        directory.entries[name] = entry
        directory.mtime = None

    def _take(self, path: str) -> Entry:
        directory, name = self.parent(path)
        directory.mtime = None
        return directory.entries.pop(name)

    def _create(self, path: str, mode: int) -> None:
        self._put(path, File(mode))

    def _mkdir(self, path: str, mode: int) -> None:
        self._put(path, Dir(mode))

    def _symlink(self, target: str, path: str) -> None:
        self._put(path, Link(target))

    def _link(self, old: str, new: str) -> None:
        self._put(new, self.get(old))

    def _unlink(self, path: str) -> None:
        self._take(path)

    def _rmdir(self, path: str) -> None:
        self._take(path)

    def _rename(self, old: str, new: str) -> None:
        self._put(new, self._take(old))

    def _exchange(self, old: str, new: str) -> None:
        first, second = self._take(old), self._take(new)
        self._put(new, first)
        self._put(old, second)

    def _write(self, path: str, offset: int, seed: int, size: int, of: int = 0) -> None:
        _store(self.file(path), offset, content(seed, of or size)[:size])

    def _map(self, path: str, offset: int, seed: int, size: int, of: int = 0) -> None:
        self._write(path, offset, seed, size, of)

    def _append(self, path: str, seed: int, size: int, of: int = 0) -> None:
        file = self.file(path)
        _store(file, len(file.data), content(seed, of or size)[:size])

    def _restart(self, path: str) -> None:
        file = self.file(path)
        file.data = bytearray()
        file.mtime = None

    def _truncate(self, path: str, size: int) -> None:
        file = self.file(path)
        del file.data[size:]
        file.data += bytes(size - len(file.data))
        file.mtime = None

    def _chmod(self, path: str, mode: int) -> None:
        entry = self.get(path)
        assert not isinstance(entry, Link)
        entry.mode = mode

    def _utime(self, path: str, mtime: int) -> None:
        entry = self.get(path)
        assert not isinstance(entry, Link)
        entry.mtime = mtime

    def _setxattr(self, path: str, name: str, value: str) -> None:
        self.file(path).xattrs[name] = value.encode()

    def _removexattr(self, path: str, name: str) -> None:
        del self.file(path).xattrs[name]

    def _fsync(self, path: str) -> None:
        pass

    def _fsyncdir(self, path: str) -> None:
        pass

    def _hold(self, number: int, path: str) -> None:
        self.handles[number] = self.file(path)

    def _held_append(self, number: int, seed: int, size: int, of: int = 0) -> None:
        file = self.handles[number]
        _store(file, len(file.data), content(seed, of or size)[:size])

    def _held_fsync(self, number: int) -> None:
        pass

    def _drop(self, number: int) -> None:
        del self.handles[number]


def _pages(start: int, stop: int) -> range:
    return range((start // PAGE + 1) * PAGE, stop, PAGE)


def _store(file: File, offset: int, data: bytes) -> None:
    if offset > len(file.data):
        file.data += bytes(offset - len(file.data))
    file.data[offset : offset + len(data)] = data
    file.mtime = None


# -- comparing ---------------------------------------------------------------------------------


def differences(
    directory: str, model: Model, *, hidden: tuple[str, ...] = (), on_share: bool = False
) -> list[str]:
    """How a real directory differs from a model; nothing when it does not.

    ``hidden`` names of the top directory are not looked at. ``on_share``: the times of directories
    are not compared, since there a file's new content may be a new file.
    """
    comparison = _Comparison(on_share)
    comparison.directory(directory, model.root, hidden)
    return comparison.found


def after_kill(directory: str, model: Model, under_way: Operation | None) -> Model:
    """The model that a directory agrees with after a kill: the operation that was under way has
    happened, or has not. Raises AssertionError with the differences when it agrees with neither.
    """
    wrong = differences(directory, model)
    if not wrong:
        return model
    for possible in [under_way, *model.parts(under_way)] if under_way else []:
        done = copy.deepcopy(model)
        done.apply(possible)
        wrong_when_done = differences(directory, done)
        if not wrong_when_done:
            return done
        if possible is under_way:
            wrong = [*wrong, f"or, with {under_way}:", *wrong_when_done]
    raise AssertionError("after a kill:\n" + "\n".join(wrong[:20]))


class _Comparison:
    def __init__(self, on_share: bool) -> None:
        self.found: list[str] = []
        self._on_share = on_share
        self._files: dict[int, File] = {}
        self._inodes: dict[File, int] = {}

    def directory(self, path: str, wanted: Dir, hidden: tuple[str, ...] = ()) -> None:
        """Compare what is in a directory."""
        names = set(os.listdir(path)) - set(hidden)
        for name in sorted(names - wanted.entries.keys()):
            self.found.append(f"{path}/{name}: should not be there")
        for name, entry in wanted.entries.items():
            if name in names:
                self._entry(f"{path}/{name}", entry)
            else:
                self.found.append(f"{path}/{name}: missing")

    def _entry(self, path: str, entry: Entry) -> None:
        try:
            st = os.lstat(path)
        except OSError as error:
            self.found.append(f"{path}: listed, but {error.strerror}")
            return
        kinds = {File: stat.S_IFREG, Dir: stat.S_IFDIR, Link: stat.S_IFLNK}
        if stat.S_IFMT(st.st_mode) != kinds[type(entry)]:
            self.found.append(f"{path}: is of another type ({st.st_mode:o})")
            return
        if isinstance(entry, Link):
            target = os.readlink(path)
            if target != entry.target:
                self.found.append(f"{path}: points to {target!r}, not {entry.target!r}")
            return
        if stat.S_IMODE(st.st_mode) != entry.mode:
            self.found.append(f"{path}: has mode {stat.S_IMODE(st.st_mode):o}, not {entry.mode:o}")
        timed = isinstance(entry, File) or not self._on_share
        if timed and entry.mtime is not None and st.st_mtime_ns != entry.mtime:
            self.found.append(f"{path}: has mtime {st.st_mtime_ns}, not {entry.mtime}")
        if isinstance(entry, Dir):
            self.directory(path, entry)
        else:
            self._file(path, st, entry)

    def _file(self, path: str, st: os.stat_result, entry: File) -> None:
        if self._files.setdefault(st.st_ino, entry) is not entry:
            self.found.append(f"{path}: shares its inode with another file")
        if self._inodes.setdefault(entry, st.st_ino) != st.st_ino:
            self.found.append(f"{path}: is another file than its other names")
        if st.st_size != len(entry.data):
            self.found.append(f"{path}: has {st.st_size} bytes, not {len(entry.data)}")
        with open(path, "rb") as file:
            data = file.read()
        if data != entry.data:
            at = next(
                (i for i, (a, b) in enumerate(zip(data, entry.data, strict=False)) if a != b),
                min(len(data), len(entry.data)),
            )
            self.found.append(
                f"{path}: differs from byte {at} on ({data[at : at + 8].hex()} instead of"
                f" {entry.data[at : at + 8].hex()}, {len(data)} bytes)"
            )
        names = [name for name in os.listxattr(path) if name.startswith("user.test.")]
        xattrs = {name: os.getxattr(path, name) for name in names}
        if xattrs != entry.xattrs:
            self.found.append(f"{path}: has attributes {xattrs}, not {entry.xattrs}")
