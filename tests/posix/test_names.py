"""Renames, links, removals and what a name may be."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.posix.kernel import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from tests.posix.parity import Case, Parity, State, attempt


def _full(path: Path) -> None:
    (path / "deep").mkdir(parents=True)
    (path / "inside").touch()


def _full2(path: Path) -> None:
    path.mkdir()
    (path / "x").symlink_to("nowhere")


KINDS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"the file"),
    "other": lambda path: path.write_bytes(b"another file"),
    "empty": os.mkdir,
    "empty2": os.mkdir,
    "full": _full,
    "full2": _full2,
    "link": lambda path: os.symlink("file", path),
    "dangling": lambda path: os.symlink("missing/target", path),
    "fifo": os.mkfifo,
    "hardlink": lambda path: os.link(path.parent / "file", path),
}
"""What a name can be. Names that are not here are missing."""


def builder(*names: str) -> Callable[[Path], object]:
    """Makes what the first parts of some names say."""
    wanted = {name.split("/")[0] for name in names} & KINDS.keys()
    if "hardlink" in wanted:
        wanted.add("file")

    def build(directory: Path) -> None:
        for name in sorted(wanted):
            KINDS[name](directory / name)

    return build


SOURCES = ["file", "empty", "full", "link", "dangling", "fifo", "missing", "full/inside"]
TARGETS = [
    *("new", "file", "other", "empty2", "full2", "link", "dangling", "fifo", "hardlink"),
    *("full/deep", "full/new", "full2/x", "full", "file/below", "missing/below", "full/deep/new"),
    *(".", "full/.", "full/..", "new/"),
]


def at(top: Path, name: str) -> str:
    """A name's path; `Path` would take a trailing "." or "/" away."""
    return f"{top}/{name}"


def with_target(source: str, target: str, what: str, call: Callable[[str, str], object]) -> Case:
    return Case(
        f"{what} {source} {target}",
        builder(source, target),
        lambda top: call(at(top, source), at(top, target)),
    )


def alone(name: str, what: str, call: Callable[[str], object]) -> Case:
    return Case(f"{what} {name}", builder(name), lambda top: call(at(top, name)))


def usable(state: State, *names: str) -> bool:
    """Whether names are what they are on a disk when only the share has them: a special file there
    is shown but serves nobody, and a file's second name is a file of its own."""
    return state != "share" or not {"fifo", "hardlink"} & set(names)


@pytest.mark.parametrize("flags", [0, RENAME_NOREPLACE, RENAME_EXCHANGE])
def test_rename(parity: Parity, state: State, flags: int) -> None:
    pairs = itertools.product(SOURCES, TARGETS)
    parity.check(
        [
            with_target(source, target, "rename", lambda old, new: renameat2(old, new, flags))
            for source, target in pairs
            if usable(state, source, target)
        ],
        state,
    )


def test_link_symlink_and_remove(parity: Parity, state: State) -> None:
    names = [name for name in dict.fromkeys([*SOURCES, *TARGETS]) if usable(state, name)]
    calls: list[tuple[str, Callable[[str], object]]] = [
        ("unlink", os.unlink),
        ("rmdir", os.rmdir),
        ("mkdir", os.mkdir),
        ("mkfifo", os.mkfifo),
        ("symlink", lambda path: os.symlink("to", path)),
        ("readlink", os.readlink),
    ]
    cases = [alone(name, what, call) for name in names for what, call in calls]
    cases += [
        with_target(source, target, "link", lambda a, b: os.link(a, b, follow_symlinks=False))
        for source in SOURCES
        for target in names
        if usable(state, source)
    ]
    parity.check(cases, state)


def test_names_of_all_shapes(parity: Parity, state: State) -> None:
    """Any bytes but "/" and NUL, up to the limit of the share."""
    shapes = [
        *(b"d\xe9j\xe0.txt", b"new\nline", b"co:lon", b"back\\slash", b"tab\t", b" ", b"~", b"-rf"),
        *(b"trailing ", b".hidden", b"...", b"*?[a]", b"%s%n", b"\x01\x7f\xff", b"a,b=c"),
        *("\N{HUGGING FACE}".encode(), b"\xcc\x81", "é".encode(), "e\u0301".encode()),
        *(b".wbcache-no-temporary", b".wbcacheX", b"x.conflict-host"),
        *(b"n" * 255, "é".encode() * 127, b"n" * 256, b"n" * 300),
    ]

    def build(top: Path) -> None:
        for shape in shapes:
            if len(shape) <= 255:
                (top / os.fsdecode(shape)).write_bytes(shape)

    def call(top: Path) -> list[object]:
        seen: list[object] = [sorted(os.listdir(os.fsencode(top)))]
        for shape in shapes:
            path = os.path.join(os.fsencode(top), shape)
            seen += [attempt(lambda path=path: os.stat(path).st_size)]
            seen += [attempt(os.rename, path, path + b"2"), attempt(os.rename, path + b"2", path)]
            seen += [attempt(os.mkdir, path + b"3"), attempt(os.symlink, shape, path + b"4")]
        return seen

    parity.check([Case("shapes", build, call)], state)


def test_path_and_link_limits(parity: Parity, state: State) -> None:
    deep = "/".join(["d" * 200] * 18)

    def build(top: Path) -> None:
        (top / deep).mkdir(parents=True)
        (top / "loop1").symlink_to("loop2")
        (top / "loop2").symlink_to("loop1")
        (top / "self").symlink_to("self/x")
        (top / "chain0").write_bytes(b"end")
        for number in range(1, 42):
            (top / f"chain{number}").symlink_to(f"chain{number - 1}")
        (top / "long").symlink_to("t" * 4095)

    def call(top: Path) -> list[object]:
        os.chdir(top)
        room = 4095 - len(deep) - 1
        fitting = f"{deep}/{'./' * (room // 2)}"[:4094].rstrip("/")
        return [
            *(attempt(os.stat, name) for name in ("loop1", "loop2", "self")),
            *(attempt(lambda n=n: os.stat(f"chain{n}").st_size) for n in (39, 40, 41)),
            attempt(lambda: stat.S_ISDIR(os.stat(fitting).st_mode)),
            attempt(os.stat, fitting + "/" + "x" * 60),
            attempt(lambda: len(os.readlink("long"))),
            attempt(os.symlink, "t" * 4095, "long2"),
            attempt(os.symlink, "t" * 4096, "too-long"),
            attempt(os.symlink, "", "empty"),
            attempt(os.open, "loop1", os.O_RDONLY),
            attempt(os.open, "loop1", os.O_CREAT | os.O_WRONLY),
            attempt(os.unlink, "loop1"),
        ]

    with _working_directory():
        parity.check([Case("limits", build, call)], state)


@contextlib.contextmanager
def _working_directory() -> Iterator[None]:
    before = os.getcwd()
    try:
        yield
    finally:
        os.chdir(before)


ENDINGS = ("/", "/.", "/x/")
CALLS_BY_NAME: dict[str, Callable[[str], object]] = {
    "stat": lambda path: oct(os.stat(path).st_mode),
    "lstat": lambda path: oct(os.lstat(path).st_mode),
    "read": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "write": lambda path: os.close(os.open(path, os.O_WRONLY)),
    "create": lambda path: os.close(os.open(path, os.O_WRONLY | os.O_CREAT)),
    "create new": lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL)),
    "mkdir": os.mkdir,
    "mkfifo": os.mkfifo,
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "symlink": lambda path: os.symlink("to", path),
    "readlink": os.readlink,
    "truncate": lambda path: os.truncate(path, 3),
    "list": lambda path: sorted(os.listdir(path)),
    "chmod": lambda path: os.chmod(path, 0o750),
    "access": lambda path: os.access(path, os.R_OK),
}
AT_ENDINGS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"the file"),
    "directory": os.mkdir,
    "full": _full,
    "link": lambda path: path.symlink_to("some-file"),
    "link to a directory": lambda path: path.symlink_to("some-directory"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "missing": lambda path: None,
}


def test_what_follows_a_name(parity: Parity, state: State) -> None:
    """Slashes, dots and nothing at the end of a path, for every call that takes one."""

    def build(kind: str, top: Path) -> None:
        (top / "some-file").write_bytes(b"some")
        (top / "some-directory").mkdir()
        for number in range(len(CALLS_BY_NAME) + 6):
            AT_ENDINGS[kind](top / f"x{number}")
        for number in range(3):
            (top / f"file{number}").write_bytes(b"beside")
            (top / f"directory{number}").mkdir()

    def call(ending: str, top: Path) -> object:
        seen: dict[str, object] = {}
        for number, (name, made) in enumerate(CALLS_BY_NAME.items()):
            seen[name] = attempt(made, f"{top}/x{number}{ending}")
        left = iter(range(len(CALLS_BY_NAME), len(CALLS_BY_NAME) + 6))
        for what in ("file", "directory"):
            path = f"{top}/x{next(left)}{ending}"
            seen[f"rename {what} to"] = attempt(os.rename, top / f"{what}0", path)
            path = f"{top}/x{next(left)}{ending}"
            seen[f"rename to {what}"] = attempt(os.rename, path, top / f"{what}1")
        path = f"{top}/x{next(left)}{ending}"
        seen["link to"] = attempt(os.link, top / "file2", path)
        path = f"{top}/x{next(left)}{ending}"
        seen["link from"] = attempt(os.link, path, top / "linked", follow_symlinks=False)
        return seen

    parity.check(
        [
            Case(
                f"{kind} {ending}",
                functools.partial(build, kind),
                functools.partial(call, ending),
            )
            for kind in AT_ENDINGS
            for ending in ENDINGS
        ],
        state,
    )


def test_no_name_at_all(parity: Parity, state: State) -> None:
    def call(top: Path) -> object:
        os.chdir(top)
        seen: list[object] = [attempt(made, "") for made in CALLS_BY_NAME.values()]
        seen += [attempt(os.rename, "", "new"), attempt(os.rename, "file", "")]
        return [*seen, attempt(os.link, "", "new"), attempt(os.link, "file", "")]

    with _working_directory():
        parity.check([Case("empty", builder("file"), call)], state)
