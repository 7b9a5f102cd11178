"""Two mounts over one share, used at the same time, and a judge of what became of all content.

Every content is unique, and so is its length, by which it is known in the shares' logs. Each mount
reaches the share through a fault share of its own, so that one log tells what one mount has asked.

A content may go only by an operation that knew it: one of a mount whose user had just read it where
the operation took it away, or of a mount that had looked at that name, on the share, while it was
there. The one exception is the window that no client of a network file system can close: a content
may arrive between the look at a name and the rename or removal of that name which follows.
"""

from __future__ import annotations

import bisect
import errno
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.faultshare.oplog import Op
from tests.mounting import Mounted

NAMES = ["a", "b", "c", "d", "sub/a", "sub/b", "sub/c"]
TEMPORARY = ".wbcache-"
PAUSE = 0.12
"""Seconds between two operations of one mount, at most."""

MAX_READS = 50

FIRST_LENGTH = 40


def content(key: int) -> bytes:
    """The content whose length is ``key``."""
    text = b"content %d of the mount %d," % (key, key % 2)
    return (text * (key // len(text) + 1))[:key]


def key_of(data: bytes) -> int:
    """Which content these bytes are; an AssertionError when they are none."""
    assert data == content(len(data)), (
        f"{len(data)} bytes are no whole content: {data[:60]!r} … {data[-60:]!r}"
    )
    return len(data)


@dataclass
class Action:
    """An operation that a mount has acknowledged."""

    mount: int
    kind: str
    began: float
    acknowledged: float
    wrote: int | None
    """The content that it stored."""
    name: str
    """Where it took away what was there."""
    took: int | None
    """What was read there just before."""


class Worker:
    """One mount's user: whole files are written, renamed and removed, one after the other."""

    def __init__(self, mount: int, top: Path, seed: int) -> None:
        self.mount, self.top = mount, top
        self.random = random.Random(f"{seed} {mount}")
        self.actions: list[Action] = []
        self.error: BaseException | None = None
        self._next = FIRST_LENGTH + mount

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.wait(self.random.uniform(0, PAUSE)):
                kind = self.random.choice(["save", "save", "save", "rewrite", "create", "rename"])
                kind = self.random.choice([kind, kind, kind, "remove"])
                self._act(kind, *self.random.sample(NAMES, 2))
        except BaseException as error:
            self.error = error

    def _act(self, kind: str, name: str, other: str) -> None:
        """Carry out an operation that takes away what has a name (and, if it is a rename, gives
        the name to what is called ``other``)."""
        took, began, wrote = self._read(name), time.monotonic(), None
        try:
            if kind == "remove":
                os.unlink(self.top / name)
            elif kind == "rename":
                os.rename(self.top / other, self.top / name)
            else:
                wrote = self._next
                self._next += 2
                self._write(kind, name, wrote)
        except (FileNotFoundError, FileExistsError):
            return
        now = time.monotonic()
        self.actions.append(Action(self.mount, kind, began, now, wrote, name, took))

    def _write(self, kind: str, name: str, key: int) -> None:
        beside = f"{name}.new" if kind == "save" else name
        with open(self.top / beside, "xb" if kind == "create" else "wb") as file:
            file.write(content(key))
        if kind == "save":
            os.rename(self.top / beside, self.top / name)

    def _read(self, name: str) -> int | None:
        """What a name shows.

        A file that the other removes or replaces while it is read has to be read again: there may
        be nothing behind it any more, or its old length with bytes of the new one.
        """
        for _ in range(MAX_READS):
            try:
                with open(self.top / name, "rb") as file:
                    data = file.read()
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno not in (errno.EIO, errno.ESTALE):
                    raise
            else:
                if data == content(len(data)):
                    return len(data) or None
            time.sleep(PAUSE)
        raise AssertionError(f"{name} can't be read as one content")


class Stay(NamedTuple):
    """A content was under a name on the share, from the earliest to the latest that can be."""

    name: str
    arrived: tuple[float, float]
    left: float


class Taking(NamedTuple):
    """A rename or removal on the share that took a content away."""

    mount: int
    name: str
    key: int
    began: float
    ended: float
    looked: float
    """When the look at the name began that the flusher believed."""


@dataclass
class History:
    """What happened on the share, from the logs of both mounts."""

    stays: dict[int, list[Stay]] = field(default_factory=lambda: defaultdict(list))
    takings: list[Taking] = field(default_factory=list)
    looks: dict[tuple[int, str], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    asked: dict[tuple[int, str], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Those looks that ask for attributes, whatever the client remembers."""
    widths: list[float] = field(default_factory=list)
    """Seconds from a look at a name to the end of the rename or removal that relied on it."""

    def looked(self, mount: int, stay: Stay, before: float) -> bool:
        """Whether a mount looked at a name of the share while a content was there."""
        return any(
            ended >= stay.arrived[0] and began <= before
            for began, ended in self.looks[mount, stay.name]
        )


def history(logs: Iterable[list[Op]]) -> History:
    """Put the two logs together; times are of one clock."""
    found = History()
    events: list[tuple[float, int, Op, int | None]] = []
    for mount, ops in enumerate(logs):
        events += _events(mount, ops, found)
    events.sort(key=lambda event: event[0])
    shown: dict[str, tuple[int, tuple[float, float]]] = {}

    def leave(name: str, op: Op, mount: int, *, taken: bool) -> tuple[int, tuple[float, float]]:
        key, arrived = shown.pop(name)
        end = _end(op)
        found.stays[key].append(Stay(name, arrived, end))
        if taken:
            found.takings.append(
                Taking(mount, name, key, op.start, end, _look(found, mount, op, name))
            )
        return key, arrived

    for _, mount, op, brought in events:
        target = op.path2 or op.path
        key = brought
        if op.op == "rename" and op.path in shown:
            key, _ = leave(op.path, op, mount, taken=False)
        elif op.op == "link" and op.path in shown:
            key = shown[op.path][0]
        if target in shown:
            leave(target, op, mount, taken=True)
        if op.op != "unlink" and key is not None and TEMPORARY not in target:
            shown[target] = key, (op.start, _end(op))
    for name, (key, arrived) in shown.items():
        found.stays[key].append(Stay(name, arrived, float("inf")))
    found.widths = [taking.ended - taking.looked for taking in found.takings]
    return found


def _events(
    mount: int, ops: list[Op], found: History
) -> Iterator[tuple[float, int, Op, int | None]]:
    """What changed names on the share, with the length of what a temporary brought."""
    lengths: dict[str, int] = {}
    for op in ops:
        if op.op in ("lookup", "getattr", "open"):
            found.looks[mount, op.path].append((op.start, _end(op)))
        if op.op == "getattr":
            found.asked[mount, op.path].append((op.start, _end(op)))
        if not op.effect:
            continue
        if op.op == "create":
            lengths[op.path] = 0
        elif op.op == "write":
            lengths[op.path] = max(lengths.get(op.path, 0), op.offset + op.size)
        elif op.op == "truncate":
            lengths[op.path] = op.size
        elif op.op in ("rename", "link", "unlink"):
            brought = lengths.get(op.path) if TEMPORARY in op.path else None
            yield (op.start + _end(op)) / 2, mount, op, brought


def _look(found: History, mount: int, op: Op, name: str) -> float:
    """When the look began by which a rename or removal was decided.

    It asks what the name means, and then the server for attributes, whatever the client remembers.
    The call itself only asks what its names mean, twice if that has changed.
    """
    asked = max((a for a, b in found.asked[mount, name] if b <= op.start), default=op.start)
    return max((a for a, b in found.looks[mount, name] if b <= asked), default=asked)


def _end(op: Op) -> float:
    return op.end if op.end is not None else op.start


@dataclass
class Verdict:
    """What became of the contents."""

    kept: int = 0
    conflicts: int = 0
    """So many of them under the name of a conflict."""
    known: int = 0
    """Taken away by an operation that knew them."""
    window: int = 0
    """Overwritten in the window."""
    lost: list[str] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        widths = sorted(self.widths) or [0.0]
        at = [widths[int((len(widths) - 1) * part)] * 1000 for part in (0.5, 0.99, 1.0)]
        return (
            f"{self.kept} contents kept, {self.conflicts} of them beside their names;"
            f" {self.known} taken away knowingly, {self.window} in the window;"
            f" the window of {len(self.widths)} replacements and removals was"
            f" {at[0]:.1f} ms (median), {at[1]:.1f} ms (99 %), {at[2]:.1f} ms (longest)"
        )


def judge(workers: list[Worker], found: History, held: dict[str, bytes]) -> Verdict:
    """Account for every acknowledged content; ``held`` is what the share holds at the end."""
    verdict = Verdict(widths=found.widths)
    places: dict[int, list[str]] = defaultdict(list)
    for name, data in held.items():
        places[key_of(data)].append(name)
    actions = [action for worker in workers for action in worker.actions]
    by_name: dict[str, list[Action]] = defaultdict(list)
    for action in sorted(actions, key=lambda action: action.acknowledged):
        by_name[action.name].append(action)
    read = {action.took for action in actions}
    for key in sorted(action.wrote for action in actions if action.wrote is not None):
        if key in places:
            verdict.kept += 1
            verdict.conflicts += all(".conflict-" in name for name in places[key])
        elif key in read or _was_seen(key, by_name, found):
            verdict.known += 1
        elif _came_in_between(key, found):
            verdict.window += 1
        else:
            verdict.lost.append(_story(key, by_name, found))
    return verdict


def _story(key: int, by_name: dict[str, list[Action]], found: History) -> str:
    """What happened around the names under which a content was."""
    lines = [f"content {key}:"]
    told: list[tuple[float, str]] = []
    for stay in found.stays.get(key, ()):
        low, high = stay.arrived[0] - 2, stay.left + 2
        told.append((stay.arrived[0], f"on the share as {stay.name} until {stay.left:.3f}"))
        told += [(a.began, str(a)) for a in by_name[stay.name] if low < a.began < high]
        told += [
            (t.began, str(t)) for t in found.takings if t.name == stay.name and low < t.began < high
        ]
        for mount in range(2):
            looks = found.looks[mount, stay.name]
            told += [(a, f"mount {mount} looks until {b:.3f}") for a, b in looks if low < a < high]
    lines += [f"{at:.3f} {text}" for at, text in sorted(told)]
    return "\n".join(lines)


def _was_seen(key: int, by_name: dict[str, list[Action]], found: History) -> bool:
    """Whether a mount looked at it on the share before it took that name's meaning away."""
    for stay in found.stays.get(key, ()):
        actions = by_name[stay.name]
        first = bisect.bisect_left(actions, stay.arrived[0], key=lambda a: a.acknowledged)
        for action in actions[first:]:
            if action.acknowledged > stay.left:
                break
            if found.looked(action.mount, stay, action.acknowledged):
                return True
    return False


def _came_in_between(key: int, found: History) -> bool:
    return any(
        taking.key == key and stay.name == taking.name and stay.arrived[1] >= taking.looked
        for taking in found.takings
        for stay in found.stays.get(key, ())
    )


def work(mounts: list[Mounted], seed: int, seconds: float) -> list[Worker]:
    """Have both mounts used for a while."""
    (mounts[0].path / "sub").mkdir()
    for mount in mounts:
        mount.flush()
    workers = [Worker(number, mount.path, seed) for number, mount in enumerate(mounts)]
    stop = threading.Event()
    threads = [threading.Thread(target=worker.run, args=(stop,)) for worker in workers]
    for thread in threads:
        thread.start()
    threads[0].join(seconds)  # it ends earlier only with an error
    stop.set()
    for thread in threads:
        thread.join()
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    return workers
