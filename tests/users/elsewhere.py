"""Processes in other mount namespaces, as those of containers are."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import signal
import stat
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from wbcache.probe import within

P = ParamSpec("P")
T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_NAMESPACE = 0x00020000
_BIND, _RECURSIVE, _PRIVATE, _SLAVE = 1 << 12, 1 << 14, 1 << 18, 1 << 19
_DETACH = 2


def _checked(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """mount(2)."""
    arguments = (source.encode(), os.fsencode(target), kind.encode() or None)
    _checked(_libc.mount(*arguments, ctypes.c_ulong(flags), None), f"mount {target}")


def bind(source: Path, target: Path) -> None:
    """Let ``target`` show ``source`` too."""
    mount(str(source), str(target), flags=_BIND)


def leave(*, follow: bool = False) -> None:
    """Put this process into a mount namespace of its own, which sees what is mounted later in the
    old one only if it shall ``follow`` that."""
    _checked(_libc.unshare(_NEW_NAMESPACE), "unshare")
    mount("none", "/", flags=_RECURSIVE | (_SLAVE if follow else _PRIVATE))


class Elsewhere:
    """A process in a mount namespace of its own that does what it is told."""

    def __init__(
        self, *, follow: bool = False, root: Path | None = None, binds: Mapping[str, Path] = {}
    ) -> None:
        """With a ``root`` (an empty directory) it sees nothing but ``binds`` there, as a container
        does: paths in it, and what they show."""
        self._connection, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            _serve(theirs, follow, root, binds)
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function of a module returns or raises there."""
        self._connection.send((function, args, kwargs))
        result: T = self._answer()
        return result

    def _answer(self) -> Any:
        assert self._connection.poll(30), "no answer from the other namespace"
        good, value = self._connection.recv()
        if not good:
            raise value
        return value

    def close(self) -> None:
        """End it."""
        self._connection.close()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def _serve(
    connection: Connection, follow: bool, root: Path | None, binds: Mapping[str, Path]
) -> None:
    try:
        try:
            leave(follow=follow)
            if root is not None:
                _contain(root, binds)
            connection.send((True, None))
        except OSError as error:
            connection.send((False, error))
        while True:
            function, args, kwargs = connection.recv()
            try:
                answer = (True, function(*args, **kwargs))
                pickle.dumps(answer)
            except Exception as error:
                answer = (False, error)
            connection.send(answer)
    finally:
        os._exit(0)


def _contain(root: Path, binds: Mapping[str, Path]) -> None:
    mount("none", str(root), "tmpfs")
    for path, source in binds.items():
        target = root / path.lstrip("/")
        target.mkdir(parents=True)
        bind(source, target)
    os.chdir(root)
    pivot_root = 155 if os.uname().machine == "x86_64" else 41
    _checked(_libc.syscall(pivot_root, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")


def privately(
    work: Callable[[], T], place: Path, *, fuse_conf: str = "", deadline: float = 90.0
) -> T:
    """What ``work`` returns or raises in a child process with a mount namespace of its own, in
    which every user may use FUSE and /etc/fuse.conf holds what it is told. The two lie in
    ``place``."""
    device, conf = place / ".fuse", place / ".fuse.conf"
    os.mknod(device, stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
    os.chmod(device, 0o666)
    conf.write_text(fuse_conf)
    os.chmod(conf, 0o644)

    def in_namespace() -> T:
        leave()
        bind(device, Path("/dev/fuse"))
        bind(conf, Path("/etc/fuse.conf"))
        # The standard error of a test is a file that such a child process has closed.
        with contextlib.redirect_stderr(io.StringIO()):
            return work()

    return within(deadline, in_namespace)
