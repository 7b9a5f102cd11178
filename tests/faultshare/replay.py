"""The states a share went through, rebuilt in a plain directory from its log.

The log is complete in what changes a file system, and in the order in which it changed, so carrying
out its first k mutations on a copy of what the share held at the beginning gives what it held at
that moment. Owners are only restored by root; times only where they were set explicitly.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from tests.faultshare.backing import clear_set_id, renameat2
from tests.faultshare.oplog import Op


class Replica:
    """A directory that repeats what happened to a share.

    into: where to build it; must not exist yet. base: what the share held at first. data: the file
    of written bytes. A context manager.
    """

    def __init__(self, into: Path, base: str, data: str) -> None:
        subprocess.run(["cp", "-a", "--", base, str(into)], check=True)
        self._root = os.fsencode(into)
        self._data = os.open(data, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._data)

    def apply(self, op: Op) -> None:
        """Repeat one operation, if it has changed anything that has a name.

        Raises OSError if that is not possible: then something else changed the backing directory.
        """
        if not op.mutation or not op.effect or op.unlinked:
            return
        path = self._path(op.path)
        if op.op in ("create", "mknod", "mkdir", "symlink"):
            self._make(op, path)
        elif op.op == "open":
            self._truncate(path, 0)
        elif op.op == "write":
            self._write(op, path)
        elif op.op == "link":
            os.link(path, self._new_path(op), follow_symlinks=False)
        elif op.op == "unlink":
            os.unlink(path)
        elif op.op == "rmdir":
            os.rmdir(path)
        elif op.op == "rename":
            renameat2(-1, path, -1, self._new_path(op), op.flags)
        elif op.op == "setxattr":
            os.setxattr(path, *_xattr(op), follow_symlinks=False)
        elif op.op == "removexattr":
            os.removexattr(path, _xattr(op)[0], follow_symlinks=False)
        else:
            self._change(op, path)

    def _path(self, relative: str) -> bytes:
        return self._root + b"/" + os.fsencode(relative) if relative else self._root

    def _new_path(self, op: Op) -> bytes:
        assert op.path2 is not None
        return self._path(op.path2)

    def _make(self, op: Op, path: bytes) -> None:
        mode = op.details.get("mode", 0)
        if op.op == "create":
            if not op.details["created"]:
                if op.flags & os.O_TRUNC:
                    self._truncate(path, 0)
                return
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        elif op.op == "mknod":
            os.mknod(path, op.details["type"] | mode, op.details["rdev"])
        elif op.op == "mkdir":
            os.mkdir(path)
        else:
            os.symlink(os.fsencode(op.details["target"]), path)
        if os.geteuid() == 0:
            os.chown(path, op.details["uid"], op.details["gid"], follow_symlinks=False)
        if op.op != "symlink":
            os.chmod(path, stat.S_IMODE(mode))

    def _change(self, op: Op, path: bytes) -> None:
        details = op.details
        if "size" in details:
            self._truncate(path, details["size"])
        if ("uid" in details or "gid" in details) and os.geteuid() == 0:
            uid, gid = details.get("uid", -1), details.get("gid", -1)
            os.chown(path, uid, gid, follow_symlinks=False)
        if "mode" in details:
            os.chmod(path, stat.S_IMODE(details["mode"]))
        if "atime_ns" in details or "mtime_ns" in details:
            st = os.lstat(path)
            times = (
                details.get("atime_ns", st.st_atime_ns),
                details.get("mtime_ns", st.st_mtime_ns),
            )
            os.utime(path, ns=times, follow_symlinks=False)

    def _write(self, op: Op, path: bytes) -> None:
        if op.data is None:
            raise ValueError(f"operation {op.n} has no data in the log")
        data = os.pread(self._data, op.size, op.data)
        if len(data) != op.size:
            raise ValueError(f"the data of operation {op.n} is cut short")
        fd = _open_for_writing(path)
        try:
            os.pwrite(fd, data, op.offset)
        finally:
            os.close(fd)
        clear_set_id(path, os.lstat(path))

    def _truncate(self, path: bytes, size: int) -> None:
        fd = _open_for_writing(path)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)
        clear_set_id(path, os.lstat(path))


def states(replica: Replica, into: Path, ops: list[Op]) -> Iterator[tuple[Op | None, Path]]:
    """Yield *into* as it was at first (with None) and after each operation that changed it."""
    with replica:
        yield None, into
        for op in ops:
            if op.mutation and op.effect:
                replica.apply(op)
                yield op, into


def _open_for_writing(path: bytes) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except PermissionError:
        # It was opened before its mode forbade it, or by somebody who may.
        mode = os.lstat(path).st_mode
        os.chmod(path, mode | stat.S_IWUSR)
        try:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        finally:
            os.chmod(path, mode)


def _xattr(op: Op) -> tuple[bytes, bytes]:
    return os.fsencode(op.details["name"]), os.fsencode(op.details.get("value", ""))
