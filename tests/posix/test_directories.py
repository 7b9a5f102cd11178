"""Reading directories while they change, and what is read of them."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tests.posix.parity import Case, Parity, State, attempt

if TYPE_CHECKING:
    from typing_extensions import Self

_libc = ctypes.CDLL(None, use_errno=True)
MANY = 600


class _Entry(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("length", ctypes.c_ushort),
        ("kind", ctypes.c_ubyte),
        ("name", ctypes.c_char * 256),
    )


_libc.opendir.restype = ctypes.c_void_p
_libc.opendir.argtypes = (ctypes.c_char_p,)
_libc.readdir.restype = ctypes.POINTER(_Entry)
_libc.telldir.restype = ctypes.c_long
for _call in (_libc.readdir, _libc.rewinddir, _libc.telldir, _libc.closedir):
    _call.argtypes = (ctypes.c_void_p,)
_libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)


class Stream:
    """A directory stream of the C library: unlike `os.scandir` it can go back."""

    def __init__(self, path: Path) -> None:
        self._stream = _libc.opendir(os.fsencode(path))
        assert self._stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _libc.closedir(self._stream)

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """The rest of it: (name, inode number, type)."""
        while entry := _libc.readdir(self._stream):
            found = entry.contents
            yield os.fsdecode(found.name), found.ino, found.kind << 12

    def next(self) -> str:
        """One more name."""
        return next(iter(self))[0]

    def rest(self) -> list[str]:
        """The remaining names, in order."""
        return [name for name, _, _ in self]

    def rewind(self) -> None:
        """Begin again, with what is there now."""
        _libc.rewinddir(self._stream)

    def tell(self) -> int:
        """A place to return to."""
        return int(_libc.telldir(self._stream))

    def seek(self, place: int) -> None:
        """Return to a place."""
        _libc.seekdir(self._stream, place)


def build_many(top: Path) -> None:
    """More than one answer of the kernel can hold."""
    for number in range(MANY):
        (top / f"{number:05}-{'n' * 40}").touch()


def test_a_stream_while_the_directory_changes(parity: Parity, state: State) -> None:
    """What is there all the time is read exactly once, whatever else comes and goes."""
    ((place, _, _),) = parity.build([Case("many", build_many, lambda top: None)], state)
    names = sorted(os.listdir(place))
    assert len(names) == MANY
    with Stream(place) as stream:
        seen = [stream.next() for _ in range(MANY // 3)]
        gone = set(names[::2])
        for name in gone:
            os.unlink(place / name)
        moved = names[1::40]
        for name in moved:
            os.rename(place / name, place / f"moved-{name}")
        for number in range(100):
            (place / f"new-{number}").touch()
        seen += stream.rest()
        kept = set(names) - gone - set(moved)
        assert sorted(name for name in seen if name in kept) == sorted(kept)
        assert len(seen) == len(set(seen))
        stream.rewind()
        now = {".", "..", *os.listdir(place)}
        assert sorted(stream.rest()) == sorted(now)
        assert len(now) == 2 + len(kept) + len(moved) + 100
    parity.flush(place.parent.name)
    with Stream(place) as stream:
        assert set(stream.rest()) == now


def test_replacing_what_a_stream_will_show(parity: Parity, state: State) -> None:
    """A name that is there all the time is read, whatever is renamed over it meanwhile."""
    ((place, _, _),) = parity.build([Case("many", build_many, lambda top: None)], state)
    names = sorted(os.listdir(place))
    with Stream(place) as stream:
        seen = [stream.next() for _ in range(10)]
        for name in names:
            (place / "temporary").write_bytes(b"new")
            os.replace(place / "temporary", place / name)
        seen += stream.rest()
    assert sorted(seen) == sorted([".", "..", *names])
    with os.scandir(place) as entries:
        assert all(entry.inode() == os.stat(entry.path).st_ino for entry in entries)


def test_two_streams_and_places_kept_in_one(parity: Parity, state: State) -> None:
    """Each has its own position; one that is returned to is good though names came and went."""
    ((place, _, _),) = parity.build([Case("many", build_many, lambda top: None)], state)
    with Stream(place) as stream, Stream(place) as other:
        first = [stream.next() for _ in range(MANY // 3)]
        here = stream.tell()
        rest = stream.rest()
        assert sorted(other.rest()) == sorted(first + rest)
        gone = set(first[50:100] + rest[50:100])
        for name in gone:
            os.unlink(place / name)
        for number in range(100):
            (place / f"new-{number}").touch()
        kept = [name for name in rest if name not in gone]
        for _ in range(2):
            stream.seek(here)
            again = stream.rest()
            assert [name for name in again if not name.startswith("new-")] == kept
            assert len(again) == len(set(again))
        other.rewind()
        assert sorted(other.rest()) == sorted([".", "..", *os.listdir(place)])


def test_a_stream_of_a_directory_that_is_being_filled(parity: Parity, state: State) -> None:
    """Whoever makes a name for each that they read comes to an end."""
    ((place, _, _),) = parity.build([Case("many", build_many, lambda top: None)], state)
    names = sorted(os.listdir(place))
    seen = []
    with Stream(place) as stream:
        for name, _, _ in stream:
            seen.append(name)
            (place / f"copy-{name.strip('.')}-{len(seen)}").touch()
            assert len(seen) <= 2 * (MANY + 2)
    assert len(seen) == len(set(seen))
    assert set(names) <= set(seen)


def test_seeking_in_a_stream(parity: Parity, state: State) -> None:
    ((place, _, _),) = parity.build([Case("many", build_many, lambda top: None)], state)
    with Stream(place) as stream:
        first = [stream.next() for _ in range(MANY // 2)]
        here = stream.tell()
        rest = stream.rest()
        assert len(first) + len(rest) == MANY + 2
        for _ in range(2):
            stream.seek(here)
            assert stream.rest() == rest
        stream.rewind()
        assert stream.rest() == first + rest


def test_removing_everything_that_a_stream_shows(parity: Parity, state: State) -> None:
    """The loop of rm -r: one pass must do."""
    ((place, _, shared),) = parity.build([Case("many", build_many, lambda top: None)], state)
    with Stream(place) as stream:
        for name in stream:
            if name[0] not in (".", ".."):
                os.unlink(place / name[0])
    os.rmdir(place)
    parity.flush(place.parent.name)
    assert not shared.exists()


def test_entries_say_what_they_are(parity: Parity, state: State) -> None:
    def build(top: Path) -> None:
        (top / "file").touch()
        (top / "dir").mkdir()
        (top / "link").symlink_to("dir")
        (top / "b\udcffytes").touch()

    def call(top: Path) -> object:
        with Stream(top) as stream:
            found = sorted(stream)
        own = {name: os.lstat(top / name) for name, _, _ in found}
        assert all(own[name].st_ino == ino for name, ino, _ in found)
        assert own["."].st_ino == os.stat(top).st_ino
        assert own[".."].st_ino == os.stat(top.parent).st_ino
        kinds = [(name, kind == stat.S_IFMT(own[name].st_mode)) for name, _, kind in found]
        return [kinds, os.stat(top / "dir/..").st_ino == os.stat(top).st_ino]

    parity.check([Case("entries", build, call)], state)


def test_a_directory_that_is_gone(parity: Parity, state: State) -> None:
    def build(top: Path) -> None:
        (top / "dir").mkdir()

    def call(top: Path) -> object:
        fd = os.open(top / "dir", os.O_RDONLY)
        try:
            os.rmdir(top / "dir")
            seen: list[object] = [os.fstat(fd).st_nlink, sorted(os.listdir(fd))]
            seen += [attempt(os.open, "file", os.O_CREAT | os.O_WRONLY, dir_fd=fd)]
            seen += [attempt(os.mkdir, "sub", dir_fd=fd), attempt(os.stat, "x", dir_fd=fd)]
            seen += [attempt(os.symlink, "to", "link", dir_fd=fd), attempt(os.fsync, fd)]
            seen += [attempt(os.rename, top / "dir", top / "else")]
            (top / "dir").mkdir()
            return [*seen, sorted(os.listdir(fd)), attempt(os.stat, "..", dir_fd=fd) != "ENOENT"]
        finally:
            os.close(fd)

    parity.check([Case("gone", build, call)], state)


def test_descriptors_follow_a_renamed_directory(parity: Parity, state: State) -> None:
    def build(top: Path) -> None:
        (top / "a/b").mkdir(parents=True)
        (top / "a/b/file").write_bytes(b"x")
        (top / "other").mkdir()

    def call(top: Path) -> object:
        fd = os.open(top / "a/b", os.O_RDONLY)
        file = os.open(top / "a/b/file", os.O_RDWR)
        try:
            os.rename(top / "a", top / "other/moved")
            os.write(file, b"written")
            os.mkdir("new", dir_fd=fd)
            os.fsync(fd)
            os.fsync(file)
            os.rename("file", top / "up", src_dir_fd=fd)
            os.write(file, b" again")
            seen: list[object] = [os.listdir(fd), (top / "up").read_bytes()]
            return [*seen, attempt(os.listdir, top / "a"), os.listdir(top / "other/moved/b")]
        finally:
            os.close(fd)
            os.close(file)

    parity.check([Case("renamed", build, call)], state)


def test_counts_of_subdirectories(parity: Parity, state: State) -> None:
    """Once a directory was listed its link count is that of a disk."""

    def build(top: Path) -> None:
        for name in ("a/x", "a/y", "b", "c"):
            (top / name).mkdir(parents=True)
        (top / "a/file").touch()
        (top / "a/link").symlink_to("x")

    def call(top: Path) -> object:
        seen: list[object] = []

        def count() -> None:
            for name in (".", "a", "b", "c"):
                if os.path.exists(top / name):
                    os.listdir(top / name)
                    seen.append([name, os.stat(top / name).st_nlink])

        count()
        os.rename(top / "a/x", top / "b/x")
        count()
        os.rmdir(top / "c")
        os.mkdir(top / "b/z")
        count()
        os.rename(top / "a/y", top / "b/z")
        os.rename(top / "b/z", top / "a/file2")
        count()
        return seen

    parity.check([Case("counts", build, call)], state)


def test_many_files_that_are_all_renamed_after_the_last_was_written(parity: Parity) -> None:
    """Each then waits for the others, by the letter: the earlier rename goes first."""
    place, _ = parity.fresh()
    for number in range(300):
        (place / f"{number}.incomplete").write_bytes(b"%d" % number)
    (place / "old").mkdir()
    for number in range(300):
        os.rename(place / f"{number}.incomplete", place / f"{number}")
    parity.flush(place.name)
    shared = parity.shared / place.name
    assert sorted(os.listdir(shared)) == sorted(os.listdir(place))
    assert (shared / "299").read_bytes() == b"299"
