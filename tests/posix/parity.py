"""The same calls in a native directory and in the mount."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pprint import pformat
from typing import Any, Literal, NamedTuple

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted
from tests.plain_user import as_plain_user
from tests.waiting import wait_until

State = Literal["dirty", "flushed", "share", "flushing"]
"""Of what a case builds: dirty here, on the share and in the cache, or only on the share and in a
directory that the mount never listed; or on its way there: the flush begins before the calls and
ends after them."""

AT_REST: tuple[State, ...] = ("dirty", "flushed", "share")

PATIENCE = 60.0
"""Seconds that a flush may take on a machine that has other things to do."""

OLD = 1_000_000_000_000_000_000
"""A time, in nanoseconds, that only a call that sets times can have made older than."""


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


def _first_for_the_share(top: Path) -> bytes | None:
    """The name of something that the share gets, if there is anything."""
    with os.scandir(os.fsencode(top)) as entries:
        for entry in entries:
            if entry.is_symlink() or entry.is_file() or entry.is_dir():
                return entry.name
    return None


class Parity:
    """A mount that flushes nothing by itself, and a native directory beside it."""

    def __init__(self, mount: Mounted, native: Path) -> None:
        self.mount = mount
        self.native = native
        self.shared = mount.source
        """What the share holds."""
        self._numbers = itertools.count()

    def fresh(self) -> tuple[Path, Path]:
        """An empty directory in the mount and a native one, open to everybody."""
        name = f"t{next(self._numbers)}"
        for top in (self.mount.path, self.native):
            (top / name).mkdir()
            (top / name).chmod(0o777)
        return self.mount.path / name, self.native / name

    def portions(self, cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
        """The cases, as many at a time as can be built together."""
        yield cases

    def flush(self, *names: str, timeout: float = PATIENCE) -> None:
        """Bring names in the mount to the share (none: what other tests have left too).

        A flush does not wait for temporaries of what was removed on its way; this does.
        """
        self.mount.flush(*names, timeout=timeout)
        tops = [self.shared / name for name in names]
        wait_until(lambda: not any(map(self._temporaries, tops)), "temporaries go")

    def _temporaries(self, top: Path) -> list[Path]:
        """Names of wbcache's own on the share: a program may use such names as well."""
        found = top.rglob(".wbcache-*")
        return [p for p in found if not os.path.lexists(self.native / p.relative_to(self.shared))]

    def build(self, cases: Sequence[Case], state: State) -> list[tuple[Path, Path, Path]]:
        """Build every case; (in the mount, native, on the share) for each."""
        name = f"t{next(self._numbers)}"
        tops = [top / name for top in (self.mount.path, self.native, self.shared)]
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

    def check(
        self,
        cases: Sequence[Case],
        state: State,
        *,
        user: bool = False,
        groups: Sequence[int] = (),
    ) -> None:
        """Run cases; results, then what is left in the mount, then on the share must be equal.

        With ``user`` the calls are made without privileges, by a member of these ``groups``.
        """
        assert len({case.name for case in cases}) == len(cases)
        differing: dict[str, object] = {}
        for portion in self.portions(cases):
            differing |= self._check(portion, state, groups if user else None)
        some = dict(itertools.islice(differing.items(), 4))
        assert not differing, f"{list(differing)}\n{pformat(some, width=120)}"

    def _check(
        self, cases: Sequence[Case], state: State, groups: Sequence[int] | None
    ) -> dict[str, object]:
        differing: dict[str, object] = {}
        places = self.build(cases, state)
        left = []
        for case, place in zip(cases, places, strict=True):
            results = [_run(case.call, directory, groups) for directory in place[:2]]
            if results[0] != results[1]:
                differing[case.name] = _unequal(*results)
            left.append(tree(place[1]))
            shown = tree(place[0])
            if shown != left[-1]:
                differing[f"{case.name}: what is left"] = _differences(shown, left[-1])
        self.flush(places[0][0].parent.name)
        for case, place, native in zip(cases, places, left, strict=True):
            shared = tree(place[2])
            if shared != _on_share(native):
                differing[f"{case.name}: on the share"] = _differences(shared, _on_share(native))
            if tree(place[0]) != native:
                differing[f"{case.name}: after the flush"] = _differences(tree(place[0]), native)
        return differing


PORTION = 32
"""Cases that are flushed together; each keeps some of the daemon's threads."""

UNDER_WAY: dict[str, Any] = {
    "flush": {"small_workers": 250},
    "share": {"attr_ttl": "1h", "dir_ttl": "1h"},
}
"""Settings under which all of a portion can be on its way, and nobody looks at the share meanwhile:
a call that it keeps holds the directory."""

_MUTATIONS = ("mutations",)
_PUBLISHING = ("rename", "link", "symlink", "mkdir")


class Stage(NamedTuple):
    """How far a flush has come when it is held up."""

    name: str
    calls: tuple[str, ...]
    """Of the share, that are kept; none: the flush goes on while the case makes its calls."""
    after: bool
    """They have taken effect, only the answer is kept."""


STAGES = (
    Stage("nothing is on the share", _MUTATIONS, False),
    Stage("all but the name is there", _PUBLISHING, False),
    Stage("it is there, and that is not known", _PUBLISHING, True),
    Stage("at any place", (), False),
)


class UnderWay(Parity):
    """A mount over a share that keeps the calls of a flush from before a case until after it.

    Only every so many-th case is tried where it says so (``step``).
    """

    def __init__(self, share: FaultShare, mount: Mounted, native: Path) -> None:
        super().__init__(mount, native)
        self.shared = share.backing
        self.step = 1
        self._share = share
        self._stages = itertools.cycle(STAGES)

    def portions(self, cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
        chosen = cases[:: self.step]
        for start in range(0, len(chosen), PORTION):
            yield chosen[start : start + PORTION]

    def release(self) -> None:
        """Let the share carry out and answer what it keeps."""
        self._share.release()

    def flush(self, *names: str, timeout: float = PATIENCE) -> None:
        self.release()
        super().flush(*names, timeout=timeout)

    def build(self, cases: Sequence[Case], state: State) -> list[tuple[Path, Path, Path]]:
        assert state == "flushing"
        number = next(self._numbers)
        name = f"t{number}"
        tops = [top / name for top in (self.mount.path, self.native, self.shared)]
        for top in tops[:2]:
            for at in range(len(cases)):
                (top / str(at)).mkdir(parents=True)
                (top / str(at)).chmod(0o777)
        super().flush(name)
        kept: dict[int, bytes] = {}
        for at, (case, stage) in enumerate(zip(cases, self._stages, strict=False)):
            if stage.calls:
                self._share.hang(stage.calls, f"{name}/{at}/*", after=stage.after)
            for top in tops[:2]:
                case.build(top / str(at))
            wanted = _first_for_the_share(tops[1] / str(at))
            if stage.calls and wanted is not None:
                kept[at] = wanted
        self.mount.hand_over()
        # One of each, then the rest: whatever else is in a directory has to wait for the one that
        # the share keeps, and takes a thread to do so.
        paths = [os.path.join(name.encode(), b"%d" % at, own) for at, own in kept.items()]
        self.mount.client.flush(paths, 0)
        wait_until(
            lambda: kept.keys() <= self._hanging(name),
            f"all of {kept} are held up in {name}",
            PATIENCE,
        )
        self.mount.client.flush([os.fsencode(name)], 0)
        return [(tops[0] / str(n), tops[1] / str(n), tops[2] / str(n)) for n in range(len(cases))]

    def _hanging(self, name: str) -> set[int]:
        """Which cases have a call that the share keeps."""
        paths = [call.path.split("/") for call in self._share.hung()]
        return {int(parts[1]) for parts in paths if parts[0] == name}


def _unequal(ours: object, native: object) -> object:
    """Where two results differ."""
    if isinstance(ours, list) and isinstance(native, list) and len(ours) == len(native):
        pairs = enumerate(zip(ours, native, strict=True))
        return {at: _unequal(a, b) for at, (a, b) in pairs if a != b}
    if isinstance(ours, dict) and isinstance(native, dict):
        names = sorted({*ours, *native})
        found = [(name, ours.get(name), native.get(name)) for name in names]
        return {name: _unequal(a, b) for name, a, b in found if a != b}
    return {"mount": ours, "native": native}


def _run(call: Callable[[Path], object], directory: Path, groups: Sequence[int] | None) -> object:
    if groups is None:
        return attempt(call, directory)
    return as_plain_user(lambda: attempt(call, directory), groups=groups)


def _differences(
    ours: dict[str, tuple[object, ...]], native: dict[str, tuple[object, ...]]
) -> dict[str, object]:
    return {
        name: (ours.get(name), native.get(name))
        for name in sorted({*ours, *native})
        if ours.get(name) != native.get(name)
    }
