"""inotify and poll: what programs are told of changes, and that a flush tells them nothing."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from tests.endtoend.stage import Stage
from tests.posix.parity import Case, Parity, State, attempt
from tests.processes.inotify import watching
from tests.processes.peers import elsewhere

QUIET = 0xFFF & ~(0x1 | 0x10 | 0x20)
"""Everything but opens, reads and closes without a write."""


def build(top: Path) -> None:
    """A file, a directory with one in it, a link."""
    (top / "file").write_bytes(b"0123456789")
    (top / "dir").mkdir()
    (top / "dir" / "inside").write_bytes(b"x")
    (top / "link").symlink_to("file")


def change_everything(top: Path) -> None:
    """One call of each kind, as programs make them."""
    (top / "new").write_bytes(b"new")
    with open(top / "file", "ab") as file:
        file.write(b"more")
        os.ftruncate(file.fileno(), 3)
        os.fchmod(file.fileno(), 0o600)
    os.truncate(top / "file", 100)
    os.utime(top / "file", (1, 1))
    os.chmod(top / "dir", 0o700)
    os.mkdir(top / "made")
    os.symlink("nowhere", top / "pointer")
    os.link(top / "new", top / "second")
    os.mkfifo(top / "fifo")
    os.rename(top / "new", top / "renamed")
    os.replace(top / "renamed", top / "file")
    os.rename(top / "made", top / "dir" / "moved")
    os.rename(top / "dir" / "inside", top / "inside")
    with open(top / "file", "wb"):
        pass
    with open(top / "file", "r+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096) as shared:
            shared[:4] = b"page"
    (top / "file").read_bytes()
    os.unlink(top / "second")
    os.unlink(top / "link")
    os.rmdir(top / "dir" / "moved")
    os.rmdir(top / "dir")


def test_the_same_events(parity: Parity, state: State) -> None:
    """Of a directory, of a file, of one's own changes and another process's."""

    def of_the_directory(change: Callable[[Path], None]) -> Callable[[Path], object]:
        def call(top: Path) -> object:
            with watching(top) as watch:
                change(top)
                found = watch.events()
            moved = {e.cookie for e in found if "MOVED" in e.what}
            pairs = [
                (e.what, e.name, [other.name for other in found if other.cookie == e.cookie])
                for e in found
                if e.cookie
            ]
            return [[(e.what, e.name) for e in found], len(moved), pairs]

        return call

    def in_another(top: Path) -> None:
        elsewhere(lambda: change_everything(top))

    def of_the_file(top: Path) -> object:
        with watching(top / "file") as watch:
            with open(top / "file", "r+b", buffering=0) as file:
                file.write(b"x")
                file.read(3)
                os.fsync(file.fileno())
            os.rename(top / "file", top / "moved")
            os.link(top / "moved", top / "again")
            os.unlink(top / "moved")
            seen = [watch.plain()]
            os.unlink(top / "again")
            return [*seen, watch.plain()]

    def while_open(top: Path) -> object:
        with open(top / "file", "r+b", buffering=0) as file, watching(top / "file") as watch:
            os.unlink(top / "file")
            file.write(b"x")
            seen = [watch.plain()]
            file.close()
            return [*seen, watch.plain()]

    def of_a_copy(top: Path) -> object:
        with watching(top) as watch:
            with open(top / "file", "rb") as source, open(top / "copy", "wb") as copy:
                os.sendfile(copy.fileno(), source.fileno(), 0, 100)
                os.copy_file_range(source.fileno(), copy.fileno(), 5, 0, 20)
            return sorted(set(watch.plain()))

    cases = [
        Case("of the directory", build, of_the_directory(change_everything)),
        Case("of another process", build, of_the_directory(in_another)),
        Case("of the file", build, of_the_file),
        Case("while open", build, while_open),
        Case("of a copy", build, of_a_copy),
    ]
    parity.check(cases, state)


def test_a_flush_is_no_event(stage: Stage) -> None:
    """Nothing of what brings files to the share, or looks at it, is seen by who watches them."""
    stage.share.set(latency_ms=3)
    (stage.path / "d").mkdir()
    for name in ("log", "d/old", "rewritten", "gone"):
        (stage.path / name).write_bytes(b"first")
    stage.flush()
    stage.put("cold", b"cold")
    stage.appears("cold")
    with open(stage.path / "log", "ab") as file:
        file.write(b"appended")
    (stage.path / "rewritten").write_bytes(b"second")
    (stage.path / "d" / "new").write_bytes(b"new")
    os.rename(stage.path / "d" / "new", stage.path / "d" / "renamed")
    os.replace(stage.path / "d" / "renamed", stage.path / "d" / "old")
    (stage.path / "made").mkdir()
    (stage.path / "made" / "deep").write_bytes(b"deep")
    os.chmod(stage.path / "cold", 0o600)
    os.utime(stage.path / "d", (5, 5))
    os.symlink("log", stage.path / "link")
    os.link(stage.path / "log", stage.path / "second")
    os.unlink(stage.path / "gone")
    held = open(stage.path / "held", "wb", buffering=0)  # noqa: SIM115
    held.write(b"held open")
    places = [".", "d", "made", "log", "d/old", "rewritten", "made/deep", "cold", "held"]
    with contextlib.ExitStack() as stack:
        stack.callback(held.close)
        watches = {
            place: stack.enter_context(watching(stage.path / place, QUIET)) for place in places
        }
        stage.flush()
        # And past the time for which attributes and names are believed.
        mark = stage.share.mark()
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            for place in places:
                os.stat(stage.path / place)
                if (stage.path / place).is_dir():
                    os.listdir(stage.path / place)
                else:
                    (stage.path / place).read_bytes()
        stage.share.wait_for("getattr", f"{stage.name}/*", since=mark)
        told = {place: watch.plain() for place, watch in watches.items()}
        assert told == {place: [] for place in places}
        # They are still told of what does happen.
        for place in places:
            os.chmod(stage.path / place, 0o750)
        held.write(b"more")
        told = {place: watch.plain() for place, watch in watches.items()}
        assert all(events for events in told.values()), told
        assert ("MODIFY", "") in told["held"]
    stage.settle()


def test_what_is_replaced_here_ends_its_watch_once(stage: Stage) -> None:
    """IN_DELETE_SELF comes with the removal here, not again or instead with that on the share."""
    (stage.path / "file").write_bytes(b"first")
    stage.flush()
    with watching(stage.path / "file", QUIET) as watch:
        (stage.path / "new").write_bytes(b"second")
        os.replace(stage.path / "new", stage.path / "file")
        told = [what for what, _ in watch.plain()]
        assert told == ["ATTRIB", "DELETE_SELF", "IGNORED"]
    with watching(stage.path / "file", QUIET) as watch:
        stage.flush()
        assert watch.plain() == []
    stage.settle()


def test_poll(parity: Parity, state: State) -> None:
    """A file is always ready. epoll takes it as well, as on any FUSE mount; a local disk's not."""

    def ready(top: Path) -> object:
        with open(top / "file", "r+b", buffering=0) as file:
            poll = select.poll()
            poll.register(file, select.POLLIN | select.POLLOUT | select.POLLPRI)
            seen = [[event for _, event in poll.poll(0)]]
            seen += [list(map(len, select.select([file], [file], [file], 0)))]
            os.lseek(file.fileno(), 0, os.SEEK_END)
            seen += [[event for _, event in poll.poll(0)]]
        return seen

    parity.check([Case("ready", build, ready)], state)
    place, native = parity.fresh()
    answers = []
    for top in (place, native):
        with open(top / "file", "wb") as file, select.epoll() as epoll:
            answers.append(attempt(epoll.register, file.fileno(), select.EPOLLIN))
            if answers[-1] is None:
                assert [event for _, event in epoll.poll(5)] == [select.EPOLLIN]
    assert answers == [None, "EPERM"]
