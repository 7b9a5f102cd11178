"""What a directory held after every operation on it, and whether a share that lags behind can be
trusted.

A program makes changes one after the other, each complete when the next begins. `History` knows
what the directory looked like after each. The share shows some of it, later and not in step, and
`Judge` looks at what it shows at one moment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

Value = bytes | tuple[str, str]
"""A file's bytes, ("link", target), or ("directory", "")."""

DIRECTORY: Value = ("directory", "")


class Span(NamedTuple):
    """That a path had a value (None: nothing) from one operation until before another."""

    start: int
    stop: int
    value: Value | None


class History:
    """What every path held, operation by operation, beginning with an empty directory at 0."""

    def __init__(self, logs: Iterable[str] = ()) -> None:
        self.now = 0
        self.logs = frozenset(logs)
        """Files that only grow: the share may have any prefix, and one from the future."""
        self._spans: dict[str, list[Span]] = {}
        self._current: dict[str, Value] = {}
        self._moved: dict[tuple[str, int], str] = {}

    def record(self, tree: dict[str, Value], moved: tuple[str, str] | None = None) -> None:
        """One operation has ended and the directory now holds this; ``moved`` tells of a rename
        that replaced nothing."""
        self.now += 1
        if moved is not None:
            old, new = moved
            for path in self._current:
                if path == old or path.startswith(old + "/"):
                    self._moved[path, self.now] = new + path[len(old) :]
        for path in {*tree, *self._current}:
            before, after = self._current.get(path), tree.get(path)
            if before != after:
                spans = self._spans.setdefault(path, [Span(0, END, None)])
                spans[-1] = spans[-1]._replace(stop=self.now)
                spans.append(Span(self.now, END, after))
        self._current = dict(tree)

    @property
    def paths(self) -> list[str]:
        """Every path that ever was."""
        return list(self._spans)

    def spans(self, path: str) -> list[Span]:
        """What a path held, oldest first."""
        return self._spans.get(path, [Span(0, END, None)])

    def moved(self, path: str, span: Span) -> tuple[str, Span] | None:
        """Where a file went when its path lost it, when it did not go for good."""
        new = self._moved.get((path, span.stop))
        if new is None:
            return None
        return new, next(s for s in self.spans(new) if s.start == span.stop)

    def at(self, path: str, when: int) -> Value | None:
        """What a path held after an operation."""
        return next(s.value for s in self.spans(path) if s.start <= when < s.stop)


END = 1 << 60


class Judge:
    """Follows a share's states and raises AssertionError at the first that can't be trusted."""

    def __init__(self, history: History, *, unordered: Iterable[str] = ()) -> None:
        """``unordered`` are paths that may be older than a new name beside them: those that are
        rewritten again and again, so that no order is right for all of their versions."""
        self._history = history
        self._unordered = frozenset(unordered)
        self._seen: dict[str, Value] = {}
        self._destroyed = 0
        self._cut = 0
        self._why: list[str] = []

    def look(self, shown: dict[str, Value]) -> None:
        """The share shows this now."""
        for path, value in shown.items():
            self._is_known(path, value)
        self._nothing_is_lost(shown)
        for path, value in shown.items():
            if self._seen.get(path) is None and value != DIRECTORY:
                self._comes_last(path, value, shown)
        self._seen = shown

    def _is_known(self, path: str, value: Value) -> None:
        """Contract 3: whole, and as it once was in the mount."""
        known = [span.value for span in self._history.spans(path)]
        if path in self._history.logs:
            last = known[-1] if known[-1] is not None else known[-2]
            assert isinstance(value, bytes) and isinstance(last, bytes)
            assert last.startswith(value), f"{path} is not a prefix"
            assert value, f"{path} is empty"
        else:
            assert value in known, f"{path} never held {value[:40]!r}"

    def _nothing_is_lost(self, shown: dict[str, Value]) -> None:
        """Contract 4: once anything was taken away, the share holds all that the mount held at one
        moment not before."""
        for path, value in self._seen.items():
            if path in self._history.logs or shown.get(path) == value:
                continue
            ends = [s for s in self._history.spans(path) if s.value == value]
            if any(self._history.moved(path, span) for span in ends):
                continue
            gone = min(span.stop for span in ends)
            assert gone < END, f"{path} is gone and should not be"
            if gone > self._destroyed:
                self._destroyed = gone
                self._why = [f"{path} taken away"]
        if not self._destroyed:
            return
        cut = max(self._cut, self._destroyed)
        del self._why[1:]
        while cut <= self._history.now:
            missing = self._missing(cut, shown)
            if missing is None:
                self._cut = cut
                return
            cut = missing
        raise AssertionError(f"nothing since operation {self._destroyed} is whole: {self._why}")

    def _missing(self, cut: int, shown: dict[str, Value]) -> int | None:
        """The next moment worth a look, when something that was there at one is not shown."""
        for path in self._history.paths:
            span = next(s for s in self._history.spans(path) if s.start <= cut < s.stop)
            if span.value is None or self._holds(path, span, shown):
                continue
            self._why.append(f"{cut}: {path} as of {span.start}")
            return span.stop
        return None

    def _holds(self, path: str, span: Span, shown: dict[str, Value]) -> bool:
        value = shown.get(path)
        if value == span.value:
            return True
        if path in self._history.logs:
            assert isinstance(span.value, bytes)
            return isinstance(value, bytes) and value.startswith(span.value)
        moved = self._history.moved(path, span)
        return moved is not None and self._holds(*moved, shown)

    def _comes_last(self, path: str, value: Value, shown: dict[str, Value]) -> None:
        """Contract 4: a new name comes after what was there before in its directory and below."""
        began = min(s.start for s in self._history.spans(path) if s.value == value)
        if path in self._history.logs:
            began = self._history.spans(path)[1].start
        top = os.path.dirname(path)
        for other in self._history.paths:
            before = self._history.at(other, began - 1)
            if before in (None, DIRECTORY) or other == path or other in self._unordered:
                continue
            if top and not other.startswith(top + "/"):
                continue
            if other in self._history.logs:
                have = shown.get(other, b"")
                assert isinstance(have, bytes) and isinstance(before, bytes)
                assert have.startswith(before), f"{path} is there before {other}"
                continue
            spans = [s for s in self._history.spans(other) if s.value == shown.get(other)]
            assert any(s.stop > began for s in spans), f"{path} is there before {other}"


class Reader:
    """Reads a directory again and again, each version of a file once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int], bytes] = {}

    def read(self, top: Path) -> dict[str, Value]:
        """Everything below a directory; wbcache's own names left out."""
        found: dict[str, Value] = {}
        if not top.exists():
            return found
        for directory, subdirectories, files in os.walk(top):
            subdirectories[:] = [n for n in subdirectories if not n.startswith(".wbcache-")]
            for name in [*subdirectories, *files]:
                path = os.path.join(directory, name)
                relative = os.path.relpath(path, top)
                if name.startswith(".wbcache-"):
                    continue
                if os.path.islink(path):
                    found[relative] = ("link", os.readlink(path))
                elif os.path.isdir(path):
                    found[relative] = DIRECTORY
                else:
                    found[relative] = self._bytes(path)
        return found

    def _bytes(self, path: str) -> bytes:
        st = os.stat(path)
        key = (path, st.st_ino, st.st_size, st.st_mtime_ns)
        if key not in self._known:
            self._known[key] = Path(path).read_bytes()
        return self._known[key]
