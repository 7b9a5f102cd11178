"""System calls of the flusher on the share that fail when a test says so.

The modules that make them see an `os` of their own, in which each call first asks the `Injector`.
Calls are named as people speak of them: what is done to a temporary apart from what is done to a
file under its own name.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tests.flush.stepwise import SteppedShare
from wbcache.flush import blocking, files
from wbcache.share import calls
from wbcache.share.names import is_hidden

P = ParamSpec("P")
T = TypeVar("T")

ON_DESCRIPTORS = {
    "pread": "read", "pwrite": "write", "fsync": "fsync", "ftruncate": "truncate", "close": "close",
    "fstat": "look up", "scandir": "list",
}  # fmt: skip
"""Calls that take a descriptor."""

ON_NAMES = {
    "stat": "look up", "readlink": "look up", "unlink": "unlink", "rmdir": "rmdir",
    "mkdir": "mkdir", "chmod": "chmod", "chown": "chown", "utime": "utimens",
    "setxattr": "setxattr", "removexattr": "setxattr", "getxattr": "getxattr",
    "listxattr": "getxattr",
}  # fmt: skip
"""Calls that take a name, in a directory of which they have a descriptor, or in /proc."""

OPERATIONS = (
    "create", "write", "fsync", "close", "publish", "open", "append", "sync in place",
    "truncate", "rename", "link", "symlink", "unlink", "mkdir", "rmdir", "chmod", "chown",
    "utimens", "setxattr", "look up", "list", "read", "getxattr", "sweep",
)  # fmt: skip
"""Everything that the flusher asks of the share."""


class Call(NamedTuple):
    """A call that is about to be made."""

    operation: str
    path: bytes
    """Relative to the share; of two names the new one."""


class Fault(NamedTuple):
    """An error, and whether the call is made all the same."""

    errno: int
    after: bool = False


class Injector:
    """Asked before each call of the flusher; the answer is the fault that befalls it."""

    def __init__(self, share: str) -> None:
        self._share = os.fsencode(share)
        self._inside = False
        self.decide: Callable[[Call], Fault | None] = lambda call: None
        self.calls: list[Call] = []
        """All that were made or failed."""
        self.failed: list[Call] = []

    def within(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a call of the flusher: in it faults happen."""
        self._inside = True
        try:
            return call(*args, **kwargs)
        finally:
            self._inside = False

    def ask(self, operation: str, path: bytes, call: Callable[[], T]) -> T:
        """Make one system call, unless it is to fail."""
        if not self._inside:
            return call()
        asked = Call(_named(operation, path), os.path.relpath(path, self._share))
        self.calls.append(asked)
        fault = self.decide(asked)
        if fault is None:
            return call()
        self.failed.append(asked)
        if fault.after:
            self._inside = False
            try:
                result = call()
            finally:
                self._inside = True
            if operation in ("open", "create", "look up", "list"):
                _discard(result)
        raise OSError(fault.errno, os.strerror(fault.errno))


def _discard(result: object) -> None:
    """Nobody will get what a call returned."""
    if isinstance(result, int):
        os.close(result)
    elif hasattr(result, "close"):
        result.close()


def _named(operation: str, path: bytes) -> str:
    """The call's name; publishing, and removing a temporary, are told from the rest."""
    temporary = is_hidden(os.path.basename(path), at_root=False)
    if temporary:
        return {"unlink": "sweep", "rmdir": "sweep"}.get(operation, operation)
    return {"write": "append", "fsync": "sync in place"}.get(operation, operation)


class _Os:
    """The module `os` with some calls that may fail."""

    def __init__(self, injector: Injector, without: tuple[str, ...] = ()) -> None:
        self._injector = injector
        self._without = without

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name in self._without:
            return real
        if name in ON_DESCRIPTORS:

            def on_descriptor(fd: int, *args: Any, **kwargs: Any) -> Any:
                operation = ON_DESCRIPTORS[name]
                return self._injector.ask(operation, _path(fd), lambda: real(fd, *args, **kwargs))

            return on_descriptor
        if name in ON_NAMES:

            def on_name(path: str | bytes, *args: Any, **kwargs: Any) -> Any:
                at = _join(kwargs.get("dir_fd"), path)
                return self._injector.ask(ON_NAMES[name], at, lambda: real(path, *args, **kwargs))

            return on_name
        return real

    def open(self, path: str | bytes, flags: int, *args: Any, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            operation = "create"
        elif flags & os.O_PATH:
            operation = "look up"
        else:
            operation = "list" if flags & os.O_DIRECTORY else "open"
        at = _join(dir_fd, path)
        return self._injector.ask(operation, at, lambda: os.open(path, flags, *args, dir_fd=dir_fd))

    def symlink(self, target: bytes, name: bytes, *, dir_fd: int) -> None:
        at = _join(dir_fd, name)
        self._injector.ask("symlink", at, lambda: os.symlink(target, name, dir_fd=dir_fd))

    def link(self, old: bytes, new: bytes, **kwargs: Any) -> None:
        at = _join(kwargs["dst_dir_fd"], new)
        self._injector.ask("link", at, lambda: os.link(old, new, **kwargs))

    def rename(self, old: bytes, new: bytes, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        def call() -> None:
            os.rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        self._injector.ask(_renaming(old), _join(dst_dir_fd, new), call)


class _Libc:
    """The C library with a renameat2 that may fail."""

    def __init__(self, injector: Injector, real: ctypes.CDLL) -> None:
        self._injector = injector
        self._real = real

    def renameat2(self, source: int, old: bytes, target: int, new: bytes, flags: int) -> int:
        def call() -> None:
            if self._real.renameat2(source, old, target, new, flags):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))

        try:
            self._injector.ask(_renaming(old), _join(target, new), call)
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1
        return 0


def _renaming(old: bytes) -> str:
    return "publish" if is_hidden(old, at_root=False) else "rename"


def _path(fd: int) -> bytes:
    return os.readlink(f"/proc/self/fd/{fd}".encode())


def _join(directory: int | None, path: str | bytes) -> bytes:
    if directory is None:  # /proc/self/fd/N
        return os.readlink(os.fsencode(path))
    return os.path.join(_path(directory), os.fsencode(path))


class FaultyShare(SteppedShare):
    """A share whose calls, made for the flusher, fail as an injector says."""

    injector: Injector

    async def work(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await super().work(lambda: self.injector.within(call, *args, **kwargs))


@contextmanager
def injected(injector: Injector) -> Iterator[None]:
    """The flusher's calls go through an injector."""
    libc = calls._libc
    faulty: Any = _Os(injector)
    # It reads cache files by itself.
    but_local: Any = _Os(injector, without=("pread",))
    calls.os, calls._libc = faulty, _Libc(injector, libc)  # type: ignore[attr-defined,assignment]
    blocking.os = but_local  # type: ignore[attr-defined]
    files.os = but_local  # type: ignore[attr-defined]
    try:
        yield
    finally:
        calls.os, calls._libc = os, libc  # type: ignore[attr-defined]
        blocking.os = os  # type: ignore[attr-defined]
        files.os = os  # type: ignore[attr-defined]


def with_chance(rng: random.Random, chance: float, errors: list[Fault]) -> Callable[..., Any]:
    """Faults at random."""

    def decide(call: Call) -> Fault | None:
        return rng.choice(errors) if rng.random() < chance else None

    return decide
