"""Which operation comes next, and how it is carried out on a real directory.

Every operation is one system call that changes something (after an open that does not), so that a
kill leaves it either done or not. What is written through a mapping is acknowledged by msync.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Callable
from typing import TypeVar

from tests.churn.model import PAGE, Dir, File, Link, Model, Operation, content

MAX_FILES = 40
MAX_DIRS = 12
NAMES = ["a", "b", "log", "weights.bin", "x y", "ünï", "events.out.tfevents.1", "q'\"", "z" * 60]
AT_FDCWD = -100
RENAME_EXCHANGE = 2

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)


class Chooser:
    """Picks operations that a model's directory can carry out, from a seed."""

    def __init__(self, model: Model, random_: random.Random) -> None:
        self._model = model
        self._random = random_
        self._number = max(model.handles, default=0)
        self._kinds: dict[str, int] = {
            "create": 8,
            "append": 14,
            "write": 8,
            "map": 2,
            "rewrite": 5,
            "replace": 6,
            "truncate": 4,
            "rename": 7,
            "exchange": 1,
            "move_directory": 3,
            "unlink": 5,
            "mkdir": 4,
            "remove_tree": 1,
            "checkpoint": 2,
            "symlink": 2,
            "link": 2,
            "chmod": 3,
            "utime": 3,
            "setxattr": 2,
            "removexattr": 1,
            "fsync": 3,
            "fsyncdir": 1,
            "hold": 2,
            "held": 10,
            "drop": 1,
        }

    def next(self) -> list[Operation]:
        """The next operations, to be carried out in this order; never none."""
        kinds, weights = list(self._kinds), list(self._kinds.values())
        while True:
            kind = self._random.choices(kinds, weights)[0]
            method: Callable[[], list[Operation]] = getattr(self, "_" + kind)
            if operations := method():
                return operations

    # -- choices -------------------------------------------------------------------------------

    def _files(self) -> list[str]:
        return [path for path, entry in self._model.walk() if isinstance(entry, File)]

    def _dirs(self) -> list[str]:
        return ["", *(path for path, entry in self._model.walk() if isinstance(entry, Dir))]

    def _file(self) -> str | None:
        files = self._files()
        return self._random.choice(files) if files else None

    def _free(self, directory: str | None = None) -> str:
        """A path that names nothing."""
        if directory is None:
            directory = self._random.choice(self._dirs())
        taken = self._model.get(directory)
        assert isinstance(taken, Dir)
        while True:
            name = self._random.choice(NAMES)
            if self._random.random() < 0.7:
                name += f"-{self._random.randrange(30)}"
            if name not in taken.entries:
                return f"{directory}/{name}" if directory else name

    def _seed(self) -> int:
        return self._random.getrandbits(32)

    def _size(self) -> int:
        """In bytes: mostly small, sometimes enough for the daemon to take other ways."""
        return self._random.choice([1, 180, 180, 4096, 5000, 70_000, 300_000, 500_000])

    # -- operations ----------------------------------------------------------------------------

    def _create(self) -> list[Operation]:
        if len(self._files()) >= MAX_FILES:
            return self._unlink()
        path = self._free()
        operations: list[Operation] = [["create", path, self._random.choice([0o644, 0o600, 0o755])]]
        if self._random.random() < 0.7:
            operations.append(["append", path, self._seed(), self._size()])
        return operations

    def _append(self) -> list[Operation]:
        path = self._file()
        return [["append", path, self._seed(), self._size()]] if path else []

    def _write(self) -> list[Operation]:
        path = self._file()
        if path is None:
            return []
        size = len(self._model.file(path).data)
        offset = self._random.randrange(size + 1)
        if self._random.random() < 0.2:
            offset = size + self._random.randrange(10_000)
        return [["write", path, offset, self._seed(), self._size()]]

    def _map(self) -> list[Operation]:
        """Change bytes through a mapping, which cannot make a file longer."""
        path = self._file()
        size = len(self._model.file(path).data) if path else 0
        if path is None or not size:
            return []
        offset = self._random.randrange(size)
        return [["map", path, offset, self._seed(), min(size - offset, self._size())]]

    def _rewrite(self) -> list[Operation]:
        path = self._file()
        if path is None:
            return []
        return [["restart", path], ["append", path, self._seed(), self._size()]]

    def _replace(self) -> list[Operation]:
        """Write a temporary and rename it over a file, as careful programs do."""
        path = self._file()
        if path is None:
            return []
        temporary = self._free(os.path.dirname(path))
        operations: list[Operation] = [
            ["create", temporary, 0o644],
            ["append", temporary, self._seed(), self._size()],
        ]
        if self._random.random() < 0.5:
            operations.append(["fsync", temporary])
        return [*operations, ["rename", temporary, path]]

    def _truncate(self) -> list[Operation]:
        path = self._file()
        if path is None:
            return []
        size = len(self._model.file(path).data)
        return [["truncate", path, self._random.choice([0, size // 2, size, size + 5000])]]

    def _rename(self) -> list[Operation]:
        old = self._file()
        if old is None:
            return []
        if self._random.random() < 0.5:
            return [["rename", old, self._free()]]
        new = self._random.choice(self._files())
        if self._model.get(old) is self._model.get(new):
            return []  # two names of one file: rename does nothing then
        return [["rename", old, new]]

    def _exchange(self) -> list[Operation]:
        paths = [path for path, _ in self._model.walk()]
        if len(paths) < 2:
            return []
        old, new = self._random.sample(paths, 2)
        if old.startswith(new + "/") or new.startswith(old + "/"):
            return []
        if self._model.get(old) is self._model.get(new):
            return []
        return [["exchange", old, new]]

    def _move_directory(self) -> list[Operation]:
        dirs = self._dirs()[1:]
        if not dirs:
            return []
        old = self._random.choice(dirs)
        others = [d for d in self._dirs() if d != old and not d.startswith(old + "/")]
        new = self._free(self._random.choice(others))
        empty = [d for d in others[1:] if not self._entries(d) and not old.startswith(d + "/")]
        if empty and self._random.random() < 0.3:
            new = self._random.choice(empty)
        return [["rename", old, new]]

    def _entries(self, path: str) -> list[str]:
        directory = self._model.get(path)
        assert isinstance(directory, Dir)
        return list(directory.entries)

    def _unlink(self) -> list[Operation]:
        paths = [p for p, entry in self._model.walk() if not isinstance(entry, Dir)]
        return [["unlink", self._random.choice(paths)]] if paths else []

    def _mkdir(self) -> list[Operation]:
        if len(self._dirs()) > MAX_DIRS:
            return self._remove_tree()
        return [["mkdir", self._free(), self._random.choice([0o755, 0o700])]]

    def _remove_tree(self) -> list[Operation]:
        dirs = self._dirs()[1:]
        return self._removal(self._random.choice(dirs)) if dirs else []

    def _removal(self, path: str) -> list[Operation]:
        entry = self._model.get(path)
        if not isinstance(entry, Dir):
            return [["unlink", path]]
        operations: list[Operation] = []
        for name in entry.entries:
            operations += self._removal(f"{path}/{name}")
        return [*operations, ["rmdir", path]]

    def _checkpoint(self) -> list[Operation]:
        """A directory that is written under one name, renamed when complete; the old one goes."""
        if len(self._files()) >= MAX_FILES:
            return self._remove_tree()
        directory = self._free("")
        operations: list[Operation] = [["mkdir", directory, 0o755]]
        for number in range(self._random.randrange(1, 4)):
            path = f"{directory}/part{number}"
            operations.append(["create", path, 0o644])
            operations.append(["append", path, self._seed(), self._size()])
        if self._random.random() < 0.5:
            operations.append(["fsync", f"{directory}/part0"])
        final = "checkpoint"
        if final in self._model.root.entries:
            operations += self._removal(final)
        return [*operations, ["rename", directory, final]]

    def _symlink(self) -> list[Operation]:
        target = self._random.choice(["nowhere", "../up", "/absolute", "a", "ü" * 50])
        return [["symlink", target, self._free()]]

    def _link(self) -> list[Operation]:
        path = self._file()
        return [["link", path, self._free()]] if path else []

    def _some(self) -> str | None:
        paths = [p for p, entry in self._model.walk() if not isinstance(entry, Link)]
        return self._random.choice(paths) if paths else None

    def _chmod(self) -> list[Operation]:
        path = self._some()
        return [["chmod", path, self._random.choice([0o600, 0o640, 0o755, 0o700])]] if path else []

    def _utime(self) -> list[Operation]:
        path = self._some()
        mtime = self._random.randrange(10**9) * 10**9 + self._random.randrange(10**9)
        return [["utime", path, mtime]] if path else []

    def _setxattr(self) -> list[Operation]:
        path = self._file()
        name = f"user.test.{self._random.randrange(3)}"
        return [["setxattr", path, name, f"value {self._seed()}"]] if path else []

    def _removexattr(self) -> list[Operation]:
        files = [path for path in self._files() if self._model.file(path).xattrs]
        if not files:
            return []
        path = self._random.choice(files)
        return [["removexattr", path, next(iter(self._model.file(path).xattrs))]]

    def _fsync(self) -> list[Operation]:
        path = self._file()
        return [["fsync", path]] if path else []

    def _fsyncdir(self) -> list[Operation]:
        return [["fsyncdir", self._random.choice(self._dirs())]]

    def _hold(self) -> list[Operation]:
        path = self._file()
        if path is None or len(self._model.handles) >= 3:
            return []
        self._number += 1
        return [["hold", self._number, path]]

    def _held(self) -> list[Operation]:
        """Append to a file that stays open, as loggers do."""
        if not self._model.handles:
            return self._hold()
        number = self._random.choice(list(self._model.handles))
        operations: list[Operation] = [
            ["held_append", number, self._seed(), self._random.choice([1, 180, 5000])]
            for _ in range(self._random.randrange(1, 6))
        ]
        if self._random.random() < 0.3:
            operations.append(["held_fsync", number])
        return operations

    def _drop(self) -> list[Operation]:
        if not self._model.handles:
            return []
        return [["drop", self._random.choice(list(self._model.handles))]]


class UnreadableError(OSError):
    """What only the share knows cannot be had."""


class Executor:
    """Carries operations out in a real directory. Raises OSError."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._handles: dict[int, int] = {}

    def execute(self, operation: Operation) -> None:
        """Carry an operation out; returns when it is acknowledged."""
        getattr(self, "_" + operation[0])(*operation[1:])

    def read(self, path: str) -> bytes:
        """A file's content. Raises UnreadableError when the share would have to be asked for it and
        does not answer."""
        with open(self._path(path), "rb") as file:
            return self._from_share(file.read)

    def _from_share(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except OSError as error:
            os.stat(self._root)  # says so if its daemon was killed
            raise UnreadableError(error.errno, "cannot be read just now") from error

    def close(self) -> None:
        """Close what is held open."""
        while self._handles:
            _, fd = self._handles.popitem()
            try:
                os.close(fd)
            except OSError:
                pass  # its daemon was killed

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _with(self, path: str, flags: int, act: Callable[[int], object]) -> None:
        fd = os.open(self._path(path), flags | os.O_CLOEXEC)
        try:
            act(fd)
        finally:
            os.close(fd)

    def _create(self, path: str, mode: int) -> None:
        os.close(os.open(self._path(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))

    def _mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._path(path), mode)

    def _symlink(self, target: str, path: str) -> None:
        os.symlink(target, self._path(path))

    def _link(self, old: str, new: str) -> None:
        os.link(self._path(old), self._path(new))

    def _unlink(self, path: str) -> None:
        os.unlink(self._path(path))

    def _rmdir(self, path: str) -> None:
        os.rmdir(self._path(path))

    def _rename(self, old: str, new: str) -> None:
        os.rename(self._path(old), self._path(new))

    def _exchange(self, old: str, new: str) -> None:
        first, second = os.fsencode(self._path(old)), os.fsencode(self._path(new))
        if _libc.renameat2(AT_FDCWD, first, AT_FDCWD, second, RENAME_EXCHANGE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), old)

    def _write(self, path: str, offset: int, seed: int, size: int) -> None:
        data = content(seed, size)

        def write(fd: int) -> None:
            os.lseek(fd, offset, os.SEEK_SET)
            _write_all(fd, data)

        self._with(path, os.O_WRONLY, write)

    def _map(self, path: str, offset: int, seed: int, size: int) -> None:
        data = content(seed, size)

        def change(fd: int) -> None:
            # What a page fault cannot get kills the process.
            self._from_share(lambda: os.pread(fd, size + 2 * PAGE, max(0, offset - PAGE)))
            with mmap.mmap(fd, 0) as mapping:
                mapping[offset : offset + size] = data
                try:
                    mapping.flush()
                except OSError:
                    os.stat(self._root)  # says so if its daemon was killed
                    raise

        self._with(path, os.O_RDWR, change)

    def _append(self, path: str, seed: int, size: int) -> None:
        data = content(seed, size)
        self._with(path, os.O_WRONLY | os.O_APPEND, lambda fd: _write_all(fd, data))

    def _restart(self, path: str) -> None:
        self._with(path, os.O_WRONLY | os.O_TRUNC, lambda fd: None)

    def _truncate(self, path: str, size: int) -> None:
        os.truncate(self._path(path), size)

    def _chmod(self, path: str, mode: int) -> None:
        os.chmod(self._path(path), mode)

    def _utime(self, path: str, mtime: int) -> None:
        os.utime(self._path(path), ns=(mtime, mtime))

    def _setxattr(self, path: str, name: str, value: str) -> None:
        os.setxattr(self._path(path), name, value.encode())

    def _removexattr(self, path: str, name: str) -> None:
        # Whether there is one may have to be asked of the share.
        self._from_share(lambda: os.removexattr(self._path(path), name))

    def _fsync(self, path: str) -> None:
        self._with(path, os.O_RDONLY, os.fsync)

    def _fsyncdir(self, path: str) -> None:
        self._with(path, os.O_RDONLY | os.O_DIRECTORY, os.fsync)

    def _hold(self, number: int, path: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._handles[number] = os.open(self._path(path), flags)

    def _held_append(self, number: int, seed: int, size: int) -> None:
        _write_all(self._handles[number], content(seed, size))

    def _held_fsync(self, number: int) -> None:
        os.fsync(self._handles[number])

    def _drop(self, number: int) -> None:
        os.close(self._handles.pop(number))


def _write_all(fd: int, data: bytes) -> None:
    """A write of which a part was done before the daemon was killed fails with its rest."""
    done = os.write(fd, data)
    if done < len(data):
        os.write(fd, data[done:])
        raise OSError(errno.EIO, f"a write of {len(data)} bytes took only {done}")
