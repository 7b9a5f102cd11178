"""The same calls in a native directory and in the mount."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from pprint import pformat
from typing import Any, Literal, NamedTuple

from tests.mounting import Mounted
from tests.plain_user import as_plain_user
from tests.waiting import wait_until

State = Literal["dirty", "flushed", "share"]
"""Of what a case builds: dirty here, on the share and in the cache, or only on the share and in a
directory that the mount never listed."""

STATES: tuple[State, ...] = ("dirty", "flushed", "share")

OLD = 1_000_000_000_000_000_000
"""A time, in nanoseconds, that only a call that sets times can have made older than."""

NAMES = ("mount", "native", "share")


class Case(NamedTuple):
    """Something to compare."""

    name: str
    build: Callable[[Path], object]
    """Makes what the calls need in an empty directory."""
    call: Callable[[Path], object]
    """Makes the calls; what it returns, or the errno it raises, must be the same."""


def attempt(call: Callable[..., object], *arguments: Any, **keywords: Any) -> object:
    """What a call returns, or the name of the errno it raises."""
    try:
        return call(*arguments, **keywords)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def tree(top: Path) -> dict[str, tuple[object, ...]]:
    """What is below a directory: type, mode, owner, number of links, size, bytes, old times."""
    found = {}
    for directory, names, files in os.walk(os.fsencode(top)):
        for name in names + files:
            path = os.path.join(directory, name)
            st = os.lstat(path)
            data: bytes | None = None
            if stat.S_ISREG(st.st_mode):
                with open(path, "rb") as file:
                    data = file.read()
            elif stat.S_ISLNK(st.st_mode):
                data = os.readlink(path)
            found[os.path.relpath(path, os.fsencode(top)).decode("latin-1")] = (
                oct(st.st_mode),
                (st.st_uid, st.st_gid),
                st.st_nlink if stat.S_ISREG(st.st_mode) else 0,
                len(data) if data is not None else 0,
                st.st_size if data is not None else 0,
                data if data is None or len(data) < 200 else hash(data),
                st.st_mtime_ns if st.st_mtime_ns < OLD else 0,
            )
    return dict(sorted(found.items()))


def _on_share(found: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """The part that a share gets: no fifos, sockets and devices."""
    kinds = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    return {k: v for k, v in found.items() if stat.S_IFMT(int(str(v[0]), 8)) in kinds}


class Parity:
    """A mount that flushes nothing by itself, and a native directory beside it."""

    def __init__(self, mount: Mounted, native: Path) -> None:
        self.mount = mount
        self.native = native
        self._numbers = itertools.count()

    def fresh(self) -> tuple[Path, Path]:
        """An empty directory in the mount and a native one, open to everybody."""
        name = f"t{next(self._numbers)}"
        for top in (self.mount.path, self.native):
            (top / name).mkdir()
            (top / name).chmod(0o777)
        return self.mount.path / name, self.native / name

    def build(self, cases: Sequence[Case], state: State) -> list[tuple[Path, Path, Path]]:
        """Build every case; (in the mount, native, on the share) for each."""
        name = f"t{next(self._numbers)}"
        tops = [top / name for top in (self.mount.path, self.native, self.mount.source)]
        built = [tops[2] if state == "share" else tops[0], tops[1]]
        for top in built:
            top.mkdir()
            for number, case in enumerate(cases):
                directory = top / str(number)
                directory.mkdir()
                directory.chmod(0o777)
                case.build(directory)
        if state == "flushed":
            self.mount.flush(name)
        elif state == "share":
            wait_until(tops[0].exists, "the mount shows what was put on the share")
        return [(tops[0] / str(n), tops[1] / str(n), tops[2] / str(n)) for n in range(len(cases))]

    def check(self, cases: Sequence[Case], state: State, *, user: bool = False) -> None:
        """Run cases; results, then what is left in the mount, then on the share must be equal.

        With ``user`` the calls are made without privileges.
        """
        assert len({case.name for case in cases}) == len(cases)
        places = self.build(cases, state)
        differing: dict[str, dict[str, object]] = {}
        left = []
        for case, place in zip(cases, places, strict=True):
            results = [_run(case.call, directory, user) for directory in place[:2]]
            if results[0] != results[1]:
                differing[case.name] = dict(zip(NAMES, results, strict=False))
            left.append(tree(place[1]))
            shown = tree(place[0])
            if shown != left[-1]:
                differing[f"{case.name}: what is left"] = _differences(shown, left[-1])
        self.mount.flush(os.path.relpath(places[0][0].parent, self.mount.path))
        for case, place, native in zip(cases, places, left, strict=True):
            shared = tree(place[2])
            if shared != _on_share(native):
                differing[f"{case.name}: on the share"] = _differences(shared, _on_share(native))
            if tree(place[0]) != native:
                differing[f"{case.name}: after the flush"] = _differences(tree(place[0]), native)
        some = dict(itertools.islice(differing.items(), 4))
        assert not differing, f"{list(differing)}\n{pformat(some, width=120)}"


def _run(call: Callable[[Path], object], directory: Path, user: bool) -> object:
    if user:
        return as_plain_user(lambda: attempt(call, directory))
    return attempt(call, directory)


def _differences(
    ours: dict[str, tuple[object, ...]], native: dict[str, tuple[object, ...]]
) -> dict[str, object]:
    return {
        name: (ours.get(name), native.get(name))
        for name in sorted({*ours, *native})
        if ours.get(name) != native.get(name)
    }
