"""What a program is made of. Each action has three numbers, by which it picks what it acts on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import pyfuse3
import trio

from tests.faults.injection import Fault
from tests.model import trees
from tests.model.kernel import Path
from tests.model.world import LateRead, OpenFile, Stream, World
from wbcache.share.calls import RENAME_EXCHANGE, RENAME_NOREPLACE

T = TypeVar("T")

NAMES = [b"a", b"b", b"c", b"log", b"\xffn"]
DEPTH = 3
LONGEST = 300_000
SIZES = [
    1, 100, 4095, 4096, 4097, 10_000, 16_384, 65_535, 65_536, 65_537, 131_071, 131_072, 131_073,
    200_000,
]  # fmt: skip
FLAGS = [
    os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    os.O_RDWR | os.O_CREAT,
    os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    os.O_RDONLY,
    os.O_RDWR,
    os.O_WRONLY | os.O_APPEND,
    os.O_RDWR | os.O_TRUNC,
    os.O_RDONLY | os.O_TRUNC,
    os.O_RDONLY | os.O_CREAT,
]
FAULTS = [
    Fault(errno.EIO),
    Fault(errno.EIO, after=True),
    Fault(errno.ETIMEDOUT, after=True),
    Fault(errno.ENOSPC),
    Fault(errno.EACCES),
    Fault(errno.ESTALE),
    Fault(errno.ENOTCONN),
]

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100


def pick(choices: Sequence[T], number: int) -> T:
    """One of several, by a number that becomes 0 when a program is made simpler."""
    return choices[number % len(choices)]


class Actions(World):
    """The methods without an underscore that `programs` names are actions."""

    # -- choices -------------------------------------------------------------------------------

    def _new_path(self, number: int) -> Path:
        directories = [path for path in self.directories() if len(path) < DEPTH]
        return (*pick(directories, number // len(NAMES)), pick(NAMES, number))

    def _any_path(self, number: int, *kinds: int) -> Path:
        """Mostly one that exists."""
        found = self.paths(*kinds)
        if not found or number % 8 == 7:
            return self._new_path(number // 8)
        return pick(found, number)

    def _file(self, number: int) -> Path | None:
        found = self.paths(stat.S_IFREG)
        return pick(found, number) if found else None

    def _offset(self, size: int, number: int) -> int:
        places = [size, 0, size - 1, size // 2, size + 1, size + 5000, 4096, 65_536, size - 4096]
        return min(max(0, pick(places, number)), LONGEST)

    # -- open files ----------------------------------------------------------------------------

    async def _open(self, path: Path, flags: int) -> OpenFile | None:
        fds: list[int] = []
        native = flags | os.O_NOFOLLOW | os.O_CLOEXEC
        both = await self.both(
            lambda: self.kernel.open(path, flags),
            lambda: fds.append(os.open(self.path(path), native, 0o644)),
        )
        if both is None:
            return None
        (handle, ino), _ = both
        file = OpenFile(handle, ino, fds[0], flags)
        self.open.append(file)
        return file

    async def open_file(self, a: int, b: int, c: int) -> None:
        """open(2), with every kind of flags."""
        flags = pick(FLAGS, b)
        path = self._any_path(a, stat.S_IFREG, stat.S_IFDIR) if c % 3 else self._new_path(a)
        if flags == os.O_RDONLY and stat.S_ISDIR(self._mode(path)):
            return  # opendir is for those
        file = await self._open(path, flags)
        if file is not None and c % 2:
            await self._put(file, c, c // 2)
            if c % 8 != 7:
                await self._close(file)

    def _mode(self, path: Path) -> int:
        try:
            return os.lstat(self.path(path)).st_mode
        except OSError:
            return 0

    async def _put(self, file: OpenFile, a: int, b: int) -> None:
        """A write at some place."""
        if file.flags & os.O_ACCMODE == os.O_RDONLY:
            return
        size, data = os.fstat(file.fd).st_size, self.fresh(pick(SIZES, b))
        offset = size if file.flags & os.O_APPEND else self._offset(size, a)
        if offset + len(data) > LONGEST:
            return
        # The kernel turns O_APPEND into an offset.
        await self.both(
            lambda: self.kernel.write(file.handle, offset, data),
            lambda: os.pwrite(file.fd, data, offset),
        )

    async def _close(self, file: OpenFile) -> None:
        self.open.remove(file)
        await self.perform(lambda: self.kernel.close(file.handle, file.ino))
        os.close(file.fd)

    async def write(self, a: int, b: int, c: int) -> None:
        """Write to an open file."""
        if self.open:
            await self._put(pick(self.open, a), b, c)

    async def read(self, a: int, b: int, c: int) -> None:
        """Read from an open file, whatever became of its name."""
        readable = [f for f in self.open if f.flags & os.O_ACCMODE != os.O_WRONLY]
        if readable:
            await self._read(pick(readable, a), b, c)

    async def _read(self, file: OpenFile, b: int, c: int) -> None:
        offset, size = self._offset(os.fstat(file.fd).st_size, b), pick(SIZES, c)
        both = await self.both(
            lambda: self.kernel.read(file.handle, offset, size),
            lambda: os.pread(file.fd, size, offset),
        )
        if both is not None:
            ours, native = both
            assert native is not None
            self._same(ours, native, f"read of {size} at {offset}")

    def _same(self, found: bytes, wanted: bytes, what: str) -> None:
        if found != wanted:
            at = next(
                (i for i, pair in enumerate(zip(found, wanted, strict=False)) if len({*pair}) > 1),
                min(len(found), len(wanted)),
            )
            raise AssertionError(
                f"{what}: {len(found)} bytes instead of {len(wanted)}, different from {at} on:"
                f" {found[at : at + 40]!r} instead of {wanted[at : at + 40]!r}"
            )

    async def read_file(self, a: int, b: int, c: int) -> None:
        """Open, read, close."""
        path = self._file(a)
        if path is not None:
            file = await self._open(path, os.O_RDONLY)
            if file is not None:
                await self._read(file, b, c)
                await self._close(file)

    async def close_file(self, a: int, b: int, c: int) -> None:
        """Close an open file."""
        if self.open:
            await self._close(pick(self.open, a))

    async def fsync(self, a: int, b: int, c: int) -> None:
        """fsync of an open file."""
        if self.open:
            file = pick(self.open, a)
            await self.both(lambda: self.kernel.fsync(file.handle), lambda: os.fsync(file.fd))

    async def truncate(self, a: int, b: int, c: int) -> None:
        """truncate(2) or ftruncate(2)."""
        writable = [f for f in self.open if f.flags & os.O_ACCMODE != os.O_RDONLY]
        if c % 2 and writable:
            file = pick(writable, a)
            size = self._length(os.fstat(file.fd).st_size, b)
            await self.both(
                lambda: self.kernel.change(file.ino, size=size),
                lambda: os.ftruncate(file.fd, size),
            )
            return
        path = self._file(a)
        if path is not None:
            size = self._length(os.stat(self.path(path)).st_size, b)
            await self._change(path, lambda at: os.truncate(at, size), size=size)

    def _length(self, size: int, number: int) -> int:
        return pick([0, *(self._offset(size, n) for n in range(9)), *SIZES], number)

    async def _change(self, path: Path, native: Callable[[bytes], None], **values: int) -> None:
        async def change() -> None:
            await self.kernel.change((await self.kernel.stat(path)).ino, **values)

        await self.both(change, lambda: native(self.path(path)))

    async def replace(self, a: int, b: int, c: int) -> None:
        """Write a file beside another and rename it over that."""
        path = self._file(a)
        if path is None:
            return
        beside = (*path[:-1], b"new")
        file = await self._open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if file is None:
            return
        await self._put(file, 0, b)
        if c % 2:
            await self._close(file)
        await self._rename(beside, path, 0)

    async def late_read(self, a: int, b: int, c: int) -> None:
        """Begin to read an open file; the answer of the share is on its way until `arrive`."""
        readable = [f for f in self.open if f.flags & os.O_ACCMODE != os.O_WRONLY]
        if not readable or self.hanging or len(self.reads) >= 2:
            return
        file = pick(readable, a)
        offset, size = self._offset(os.fstat(file.fd).st_size, b), pick(SIZES, c)
        native = os.dup(file.fd)
        read = LateRead(native, offset, size, None, [], [os.pread(native, size, offset)])

        async def run() -> None:
            read.task = trio.lowlevel.current_task()
            try:
                read.outcome.append(await self._contained(file.handle, offset, size))
            except OSError as error:
                read.outcome.append(error)

        self.reads.append(read)
        self.mount.nursery.start_soon(run)
        await self.idle()

    async def _contained(self, handle: int, offset: int, size: int) -> bytes:
        try:
            return await self.kernel.read(handle, offset, size)
        except pyfuse3.FUSEError as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise OSError(error.errno, os.strerror(error.errno)) from error

    async def arrive(self, a: int, b: int, c: int) -> None:
        """A read gets its bytes: each as the file had it at some time since the read began."""
        if not self.reads:
            return
        read = self.reads.pop(a % len(self.reads))
        before = self.condition()

        async def wait() -> None:
            while not read.outcome:
                await trio.sleep(0.01)

        await self.perform(wait)
        os.close(read.fd)
        (found,) = read.outcome
        if isinstance(found, OSError):
            late = found.errno == errno.ETIMEDOUT
            assert late or self.excused(found.errno or 0, before), found
            return
        lengths = [len(version) for version in read.versions]
        assert min(lengths) <= len(found) <= max(lengths), (len(found), lengths)
        for at, byte in enumerate(found):
            allowed = {version[at] for version in read.versions if at < len(version)}
            assert byte in allowed, f"byte {at} of a read at {read.offset} is {byte}: {allowed}"

    # -- names ---------------------------------------------------------------------------------

    async def mkdir(self, a: int, b: int, c: int) -> None:
        """mkdir(2)."""
        path = self._new_path(a) if b % 4 else self._any_path(a)
        await self.both(
            lambda: self.kernel.mkdir(path, 0o755), lambda: os.mkdir(self.path(path), 0o755)
        )

    async def symlink(self, a: int, b: int, c: int) -> None:
        """symlink(2)."""
        path, target = self._new_path(a), b"../to-%d" % (b % 100)
        await self.both(
            lambda: self.kernel.symlink(target, path), lambda: os.symlink(target, self.path(path))
        )

    async def link(self, a: int, b: int, c: int) -> None:
        """link(2)."""
        if not self.setting.capabilities.link:
            return
        old, new = self._any_path(a), self._new_path(b)
        await self.both(
            lambda: self.kernel.link(old, new),
            lambda: os.link(self.path(old), self.path(new), follow_symlinks=False),
        )

    async def unlink(self, a: int, b: int, c: int) -> None:
        """unlink(2)."""
        path = self._any_path(a) if b % 4 == 3 else self._any_path(a, stat.S_IFREG, stat.S_IFLNK)
        await self.both(lambda: self.kernel.unlink(path), lambda: os.unlink(self.path(path)))

    async def rmdir(self, a: int, b: int, c: int) -> None:
        """rmdir(2)."""
        path = self._any_path(a) if b % 4 == 3 else self._any_path(a, stat.S_IFDIR)
        await self.both(lambda: self.kernel.rmdir(path), lambda: os.rmdir(self.path(path)))

    async def remove_tree(self, a: int, b: int, c: int) -> None:
        """rm -r."""
        directories = self.paths(stat.S_IFDIR)
        if not directories:
            return
        top = pick(directories, a)
        for path in sorted(self.paths(), key=len, reverse=True):
            if path[: len(top)] == top:
                if stat.S_ISDIR(self._mode(path)):
                    await self.both(
                        lambda path=path: self.kernel.rmdir(path),  # type: ignore[misc]
                        lambda path=path: os.rmdir(self.path(path)),  # type: ignore[misc]
                    )
                else:
                    await self.both(
                        lambda path=path: self.kernel.unlink(path),  # type: ignore[misc]
                        lambda path=path: os.unlink(self.path(path)),  # type: ignore[misc]
                    )

    async def rename(self, a: int, b: int, c: int) -> None:
        """renameat2(2)."""
        old = self._any_path(a)
        new = self._any_path(b) if b % 2 else self._new_path(b // 2)
        await self._rename(old, new, pick([0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE], c))

    async def _rename(self, old: Path, new: Path, flags: int) -> None:
        if len(new) + self._height(old) > DEPTH + 1 or (
            flags & RENAME_EXCHANGE and len(old) + self._height(new) > DEPTH + 1
        ):
            return

        def native() -> None:
            source, target = self.path(old), self.path(new)
            if _libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, flags):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))

        await self.both(lambda: self.kernel.rename(old, new, flags), native)

    def _height(self, path: Path) -> int:
        """How deep a tree is."""
        below = [len(p) - len(path) for p in self.paths() if p[: len(path)] == path]
        return 1 + max(below, default=0)

    # -- attributes ----------------------------------------------------------------------------

    async def chmod(self, a: int, b: int, c: int) -> None:
        """chmod(2)."""
        path, mode = self._plain(a), pick([0o600, 0o755, 0o444, 0o700, 0o1777, 0o640], b)
        if path is not None:
            await self._change(path, lambda at: os.chmod(at, mode), mode=mode)

    async def chown(self, a: int, b: int, c: int) -> None:
        """chown(2)."""
        path, owner = self._plain(a), pick([0, 1234], b)
        if path is not None:
            await self._change(path, lambda at: os.chown(at, owner, owner), uid=owner, gid=owner)

    async def utimens(self, a: int, b: int, c: int) -> None:
        """utimensat(2)."""
        path, stamp = self._plain(a), trees.OLD // 2 + b * 1_000_000_007
        if path is not None:
            await self._change(
                path,
                lambda at: os.utime(at, ns=(stamp, stamp)),
                atime_ns=stamp,
                mtime_ns=stamp,
            )

    def _plain(self, number: int) -> Path | None:
        found = self.paths(stat.S_IFREG, stat.S_IFDIR)
        return pick(found, number) if found else None

    async def set_xattr(self, a: int, b: int, c: int) -> None:
        """setxattr(2) and removexattr(2)."""
        path = self._plain(a)
        if path is None or not self.setting.capabilities.xattr:
            return
        name = pick([b"user.one", b"user.two"], b)
        flags = pick([0, 0, os.XATTR_CREATE, os.XATTR_REPLACE], c)
        value = self.fresh(20) if b % 3 else None
        at = self.path(path)
        await self.both(
            lambda: self.kernel.set_xattr(path, name, value, flags if value is not None else 0),
            lambda: (
                os.setxattr(at, name, value, flags)
                if value is not None
                else os.removexattr(at, name)
            ),
        )

    # -- directories ---------------------------------------------------------------------------

    async def opendir(self, a: int, b: int, c: int) -> None:
        """Begin to read a directory."""
        path = pick(self.directories(), a)
        before = {
            name: os.lstat(os.path.join(self.path(path), name)).st_ino
            for name in os.listdir(self.path(path))
        }
        both = await self.both(lambda: self.kernel.opendir(path), lambda: None)
        if both is not None:
            stream = Stream(both[0], path, 0, [], before)
            self.streams.append(stream)
            await self._read_on(stream)

    async def readdir(self, a: int, b: int, c: int) -> None:
        """Read some more of a directory, or begin again."""
        if self.streams:
            stream = pick(self.streams, a)
            if b % 8 == 7:
                self.streams.remove(stream)
                await self.perform(lambda: self.kernel.closedir(stream.handle))
                return
            await self._read_on(stream)

    async def _read_on(self, stream: Stream) -> None:
        async def read() -> bool:
            names, stream.offset = await self.kernel.readdir(stream.handle, stream.offset)
            stream.names += names
            return stream.offset != 0

        both = await self.both(read, lambda: None)
        if both is None or not both[0]:
            self.streams.remove(stream)
            await self.perform(lambda: self.kernel.closedir(stream.handle))
        if both is None or both[0]:
            return
        assert len(stream.names) == len(set(stream.names)), f"twice: {stream.names}"
        try:
            now = os.listdir(self.path(stream.path))
        except OSError:
            return  # it was moved away
        stayed = {
            name
            for name in now
            if os.lstat(os.path.join(self.path(stream.path), name)).st_ino
            == stream.before.get(name)
        }
        missing = stayed - set(stream.names)
        assert not missing, f"{missing} were there all the time"

    async def list(self, a: int, b: int, c: int) -> None:
        """List a directory."""
        path = pick(self.directories(), a)
        both = await self.both(
            lambda: self.kernel.listdir(path), lambda: os.listdir(self.path(path))
        )
        if both is not None:
            ours, native = both
            assert native is not None and sorted(ours) == sorted(native), f"{ours} for {native}"

    async def forget(self, a: int, b: int, c: int) -> None:
        """The kernel forgets what nobody has open."""
        await self.perform(self.kernel.forget)

    async def nothing(self, a: int, b: int, c: int) -> None:
        """Takes the place of an action that does not matter, when a program is made shorter."""

    # -- between -------------------------------------------------------------------------------

    async def steps(self, a: int, b: int, c: int) -> None:
        """Some of the flusher's calls are made."""
        for number in range(1 + a % 8):
            await self.step(b + c * number)

    async def run(self, a: int, b: int, c: int) -> None:
        """All of the flusher's calls are made, up to where it waits for time."""
        for number in range(200):
            if not await self.step(b + number):
                break

    async def wait(self, a: int, b: int, c: int) -> None:
        """Time passes."""
        await self.pass_time(pick([6.0, 0.3, 40.0, 700.0], a))

    async def flush_all(self, a: int, b: int, c: int) -> None:
        """Flush everything."""
        await self.drain()

    async def look(self, a: int, b: int, c: int) -> None:
        """Compare everything."""
        await self.check()

    async def evict(self, a: int, b: int, c: int) -> None:
        """Everything that is clean goes from the cache."""
        await self.perform(lambda: self.mount.evictor.evict(1 << 40))

    async def fail(self, a: int, b: int, c: int) -> None:
        """One of the flusher's next calls fails."""
        self.faults.append((a % 12, pick(FAULTS, b)))

    async def fail_reading(self, a: int, b: int, c: int) -> None:
        """The next calls that an application waits for fail."""
        self.mount.share.failing = 1 + a % 2

    async def hang(self, a: int, b: int, c: int) -> None:
        """The share answers no more, or again."""
        self.hanging = not self.hanging

    async def slow_disk(self, a: int, b: int, c: int) -> None:
        """For some time large writes go through threads."""
        self.mount.filesystem.files._threaded_until = trio.current_time() + 30.0

    async def kill(self, a: int, b: int, c: int) -> None:
        """Kill and start again."""
        await self.restart(remember=a % 2 == 1, made=b)
        if c % 2:
            await self.check()

    # -- other writers -------------------------------------------------------------------------

    async def outside(self, a: int, b: int, c: int) -> None:
        """When everything is flushed another machine changes something on the share."""
        while self.reads:
            await self.arrive(0, 0, 0)
        while self.open:
            await self._close(self.open[0])
        await self.drain()
        self.directory_times = False
        for top in (self.share, self.native):
            self._change_outside(top, a, b, c)
        for _ in range(2):
            await self.pass_time(400.0)  # a listing that took long is not soon repeated
            await self.perform(lambda: self._glance(()))
        await self.check()

    def _change_outside(self, top: str, a: int, b: int, c: int) -> None:
        kind = c % 5
        path = self._file(a) if kind else self._new_path(a)
        if path is None:
            return
        at = os.path.join(os.fsencode(top), *path)
        data = b"outside %d " % b * (1 + b % 2000)
        stamp = trees.OLD // 3 + b
        if kind in (0, 1):  # a new file, perhaps in place of another
            if kind == 0 and os.path.lexists(at):
                return
            with open(at + b".tmp", "wb") as file:
                file.write(data)
            os.utime(at + b".tmp", ns=(stamp, stamp))
            os.chmod(at + b".tmp", 0o644)
            os.rename(at + b".tmp", at)
        elif kind == 2:
            os.unlink(at)
        elif kind == 3:
            with open(at, "ab") as file:
                file.write(data)
            os.utime(at, ns=(stamp, stamp))
        else:
            with open(at, "r+b") as file:
                file.truncate(len(data) // 2)
            os.utime(at, ns=(stamp, stamp))

    async def _glance(self, path: Path) -> None:
        """Look at everything once; it may still be as it was before, or just vanish."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in await self.kernel.listdir(path):
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISDIR((await self.kernel.stat((*path, name))).mode):
                        await self._glance((*path, name))


Action = Callable[[Actions, int, int, int], Awaitable[None]]
