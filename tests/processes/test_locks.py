"""Locks between processes: the same answers as on a local disk, whatever becomes of the file."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import signal
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.endtoend.stage import Stage
from tests.posix.parity import Case, Parity, State, attempt
from tests.processes.peers import Peer, elsewhere
from tests.waiting import wait_until

NOWAIT = fcntl.LOCK_NB
EX, SH, UN = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN
READ, WRITE, NONE = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK

_FLOCK = "hhqqi4x"
_libc = ctypes.CDLL(None, use_errno=True)


def build(top: Path) -> None:
    """A file to lock."""
    (top / "file").write_bytes(bytes(1000))


def record(fd: int, command: int, kind: int, start: int = 0, length: int = 0) -> tuple[int, ...]:
    """fcntl with a struct flock: (type, whence, start, length, pid) as it comes back."""
    packed = struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)
    return struct.unpack(_FLOCK, fcntl.fcntl(fd, command, packed))


def tries(path: Path) -> object:
    """Whether another process could flock a file, to share it and alone."""

    def work() -> object:
        seen = []
        for how in (SH, EX):
            with opened(path) as fd:
                seen.append(attempt(fcntl.flock, fd, how | NOWAIT))
        return seen

    return elsewhere(work)


def tries_ranges(path: Path, *starts: int, length: int = 1) -> object:
    """What F_GETLK tells another process of ranges, and whether it could lock them, to share them
    and alone. Whose a lock is, is told in words, unless it is no process's."""

    def work() -> object:
        seen: list[object] = []
        for start in starts:
            with opened(path) as fd:
                *where, pid = record(fd, fcntl.F_GETLK, WRITE, start, length)
                whose = "ours" if pid == os.getppid() else "another's"
                seen.append([*where, whose if pid > 0 else pid])
            for kind in (READ, WRITE):
                with opened(path) as fd:
                    got = attempt(record, fd, fcntl.F_SETLK, kind, start, length)
                    seen.append(got if isinstance(got, str) else "locked")
        return seen

    return elsewhere(work)


def test_whole_files(parity: Parity, state: State) -> None:
    """flock: on the open, so that whoever has it, or had it, can let it go for all."""

    def conversions(top: Path) -> object:
        seen: list[object] = []
        with opened(top / "file") as first, opened(top / "file") as second:
            for a, b in ((EX, SH), (SH, EX), (SH, SH), (EX, EX)):
                seen += [attempt(fcntl.flock, first, a | NOWAIT)]
                seen += [attempt(fcntl.flock, second, b | NOWAIT)]
                seen += [tries(top / "file")]
                # From one kind to the other and back, while the second may have one.
                for how in (EX, SH, EX):
                    seen += [attempt(fcntl.flock, first, how | NOWAIT)]
                    seen += [tries(top / "file")]
                fcntl.flock(first, UN)
                fcntl.flock(second, UN)
        return seen

    def any_open_mode(top: Path) -> object:
        seen: list[object] = []
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_APPEND):
            with opened(top / "file", flags) as fd:
                for how in (EX, SH):
                    seen += [attempt(fcntl.flock, fd, how | NOWAIT), tries(top / "file")]
        with opened(top, os.O_RDONLY | os.O_DIRECTORY) as fd:
            seen += [attempt(fcntl.flock, fd, EX | NOWAIT)]
            with opened(top, os.O_RDONLY | os.O_DIRECTORY) as other:
                seen += [attempt(fcntl.flock, other, SH | NOWAIT)]
        with opened(top / "file", os.O_PATH) as fd:
            seen += [attempt(fcntl.flock, fd, EX | NOWAIT)]
        return seen

    def copies(top: Path) -> object:
        """A lock goes with the last copy of the descriptor, in whatever process."""
        seen: list[object] = []

        def hold(fd: int, line: Connection) -> None:
            while (word := line.recv()) != "end":
                line.send(attempt(fcntl.flock, fd, UN if word == "unlock" else EX | NOWAIT))

        fd = os.open(top / "file", os.O_RDWR)
        fcntl.flock(fd, EX)
        copy = os.dup(fd)
        os.close(fd)
        seen += [tries(top / "file")]
        with Peer(functools.partial(hold, copy), keep=[copy]) as heir:
            os.close(copy)
            seen += [tries(top / "file")]
            for word in ("lock", "unlock", "lock"):
                heir.tell(word)
                seen += [heir.hear(), tries(top / "file")]
            heir.signal(signal.SIGKILL)
            heir.end()
            seen += [tries(top / "file")]
        with opened(top / "file") as fd:
            fcntl.flock(fd, EX)
            with Peer(functools.partial(hold, fd), keep=[fd]) as heir:
                heir.tell("unlock")  # the child lets go what the parent took
                seen += [heir.hear(), tries(top / "file")]
        return seen

    def closed_elsewhere(top: Path) -> object:
        """Another open of the file in the same process does not matter."""
        with opened(top / "file") as fd:
            fcntl.flock(fd, EX)
            (top / "file").read_bytes()
            with open(top / "file", "ab") as file:
                file.write(b"more")
            return tries(top / "file")

    works = [conversions, any_open_mode, copies, closed_elsewhere]
    parity.check([Case(work.__name__, build, work) for work in works], state)


def test_ranges(parity: Parity, state: State) -> None:
    """POSIX locks: on the process, split and merged, gone with any close."""

    def splitting(top: Path) -> object:
        seen: list[object] = []
        with opened(top / "file") as fd:
            record(fd, fcntl.F_SETLK, WRITE, 0, 100)
            record(fd, fcntl.F_SETLK, NONE, 40, 20)
            record(fd, fcntl.F_SETLK, READ, 90, 20)
            record(fd, fcntl.F_SETLK, WRITE, 1 << 40, 0)
            places = (0, 39, 40, 59, 60, 89, 90, 109, 110, 1 << 40, 1 << 50)
            seen += [tries_ranges(top / "file", *places)]
            record(fd, fcntl.F_SETLK, WRITE, 0, 0)
            seen += [tries_ranges(top / "file", 1000)]
            seen += [record(fd, fcntl.F_GETLK, WRITE)[0]]  # one's own are in nobody's way
            record(fd, fcntl.F_SETLK, NONE)
            seen += [tries_ranges(top / "file", 0, length=0)]
        return seen

    def refusals(top: Path) -> object:
        seen: list[object] = []
        for flags, kind in (
            (os.O_RDONLY, WRITE),
            (os.O_RDONLY, READ),
            (os.O_WRONLY, READ),
            (os.O_WRONLY, WRITE),
        ):
            with opened(top / "file", flags) as fd:
                seen += [attempt(record, fd, fcntl.F_SETLK, kind)]
        with opened(top / "file") as fd:
            seen += [attempt(record, fd, fcntl.F_SETLK, WRITE, -1, 1)]
            seen += [attempt(record, fd, fcntl.F_SETLK, WRITE, 10, -20)]
            seen += [
                attempt(record, fd, fcntl.F_SETLK, WRITE, 10, -5),
                tries_ranges(top / "file", 7),
            ]
        return seen

    def not_inherited(top: Path) -> object:
        seen: list[object] = []
        with opened(top / "file") as fd:
            record(fd, fcntl.F_SETLK, WRITE, 0, 10)

            def child(line: Connection) -> None:
                line.send(attempt(record, fd, fcntl.F_SETLK, WRITE, 5, 1))
                line.send(record(fd, fcntl.F_GETLK, WRITE, 5, 1)[0])
                os.close(fd)  # takes the child's away, of which there are none

            with Peer(child, keep=[fd]) as peer:
                seen += [peer.hear(), peer.hear(), peer.hear()]
            seen += [tries_ranges(top / "file", 5)]
            os.close(os.dup(fd))  # but any close in this process does
            seen += [tries_ranges(top / "file", 5)]
        return seen

    def crosswise(top: Path) -> object:
        """Each waits for what the other has: the kernel refuses the second."""

        def first(line: Connection) -> None:
            with opened(top / "file") as fd:
                record(fd, fcntl.F_SETLK, WRITE, 0, 1)
                line.send("has 0")
                line.recv()
                line.send(attempt(record, fd, fcntl.F_SETLKW, WRITE, 1, 1))

        with opened(top / "file") as fd, Peer(first) as peer:
            seen = [peer.hear()]
            record(fd, fcntl.F_SETLK, WRITE, 1, 1)
            peer.tell()
            peer.waits_for_lock()
            seen += [attempt(record, fd, fcntl.F_SETLKW, WRITE, 0, 1)]
            record(fd, fcntl.F_SETLK, NONE, 1, 1)
            return [*seen, peer.hear()[0], peer.hear()]

    works = [splitting, refusals, not_inherited, crosswise]
    parity.check([Case(work.__name__, build, work) for work in works], state)


def test_ranges_of_opens(parity: Parity, state: State) -> None:
    """OFD locks: on the open, like flock, but with ranges."""

    def between_opens(top: Path) -> object:
        seen: list[object] = []
        with opened(top / "file") as first, opened(top / "file") as second:
            record(first, fcntl.F_OFD_SETLK, WRITE, 10, 10)
            seen += [attempt(record, second, fcntl.F_OFD_SETLK, WRITE, 0, 10)]
            seen += [attempt(record, second, fcntl.F_OFD_SETLK, WRITE, 19, 10)]
            seen += [record(second, fcntl.F_OFD_GETLK, WRITE, 0, 0)]  # the pid is -1
            # The two kinds are in each other's way, also within a process.
            seen += [attempt(record, first, fcntl.F_SETLK, WRITE, 12, 1)]
            seen += [tries_ranges(top / "file", 12)]
            os.close(os.dup(first))
            os.close(os.open(top / "file", os.O_RDONLY))
            seen += [tries_ranges(top / "file", 12)]
            seen += [attempt(record, second, fcntl.F_OFD_GETLK, NONE)]
        return [*seen, tries_ranges(top / "file", 0, length=0)]

    def inherited(top: Path) -> object:
        fd = os.open(top / "file", os.O_RDWR)
        record(fd, fcntl.F_OFD_SETLK, WRITE)

        def heir(line: Connection) -> None:
            line.send(attempt(record, fd, fcntl.F_OFD_SETLK, WRITE, 0, 10))
            line.recv()

        with Peer(heir, keep=[fd]) as peer:
            os.close(fd)
            seen = [peer.hear(), tries_ranges(top / "file", 0, length=0)]
            peer.signal(signal.SIGKILL)
            peer.end()
            return [*seen, tries_ranges(top / "file", 0, length=0)]

    works = [between_opens, inherited]
    parity.check([Case(work.__name__, build, work) for work in works], state)


Take = Callable[[int], object]

KINDS: dict[str, tuple[Take, Take]] = {
    "flock": (lambda fd: fcntl.flock(fd, EX), lambda fd: fcntl.flock(fd, UN)),
    "range": (
        lambda fd: record(fd, fcntl.F_SETLKW, WRITE),
        lambda fd: record(fd, fcntl.F_SETLK, NONE),
    ),
    "ofd": (
        lambda fd: record(fd, fcntl.F_OFD_SETLKW, WRITE),
        lambda fd: record(fd, fcntl.F_OFD_SETLK, NONE),
    ),
}
"""How each kind is taken, with waiting, and let go."""


@pytest.mark.parametrize("kind", KINDS)
def test_they_stay_on_the_file(parity: Parity, state: State, kind: str) -> None:
    """A lock is neither lost nor left behind when the file is written, flushed, moved, replaced."""
    take, let_go = KINDS[kind]

    def hold(top: Path, line: Connection) -> None:
        with opened(top / "file") as fd:
            take(fd)
            line.send("has it")
            line.recv()
            let_go(fd)
            line.send("let it go")
            line.recv()

    def flush() -> None:
        parity.flush()

    def through_everything(top: Path) -> object:
        seen: list[object] = []

        def look(name: str = "file") -> None:
            seen.append((tries(top / name), tries_ranges(top / name, 0, length=0)))

        with Peer(functools.partial(hold, top)) as holder:
            seen += [holder.hear()]
            look()
            flush()
            look()
            with open(top / "file", "ab") as file:
                file.write(b"dirty again")
            look()
            flush()
            os.truncate(top / "file", 0)
            look()
            os.rename(top / "file", top / "moved")
            look("moved")
            (top / "file").write_bytes(b"another file")
            look()
            flush()
            look()
            look("moved")
            os.link(top / "moved", top / "second")
            look("second")
            os.replace(top / "file", top / "moved")
            flush()
            look("moved")
            look("second")
            with opened(top / "second") as fd:
                os.unlink(top / "second")
                flush()
                seen.append(attempt(fcntl.flock, fd, SH | NOWAIT))
                seen.append(attempt(record, fd, fcntl.F_SETLK, READ))
                holder.tell()
                holder.hear()
                seen.append(attempt(fcntl.flock, fd, SH | NOWAIT))
                seen.append(attempt(record, fd, fcntl.F_SETLK, READ))
        return seen

    parity.check([Case("through everything", build, through_everything)], state)


@pytest.mark.parametrize("kind", KINDS)
def test_waiting(parity: Parity, state: State, kind: str) -> None:
    """Who waits gets it when it is let go, or its holder dies; a signal ends the wait."""
    take, let_go = KINDS[kind]

    def wait(top: Path, line: Connection) -> object:
        with opened(top / "file") as fd:
            line.send("about to wait")
            take(fd)
            line.send("has it")
            line.recv()
        return "ends"

    def let_go_or_killed(top: Path) -> object:
        seen: list[object] = []
        with opened(top / "file") as fd, contextlib.ExitStack() as stack:
            take(fd)
            peers = [stack.enter_context(Peer(functools.partial(wait, top))) for _ in range(3)]
            for peer in peers:
                peer.hear()
                peer.waits_for_lock()
            let_go(fd)
            while peers:
                # Which of them is not said anywhere; one at a time has it.
                (has,) = [peer for peer in peers if _is_next(peer, peers)]
                peers.remove(has)
                seen.append(has.hear())
                seen.append(sum(peer.has_spoken for peer in peers))
                has.signal(signal.SIGKILL)
                seen.append(has.end())
        return [*seen, tries(top / "file"), tries_ranges(top / "file", 0, length=0)]

    def interrupted(top: Path) -> object:
        """Without SA_RESTART the call gives EINTR, with it it goes on waiting."""

        def waiter(restart: bool, line: Connection) -> object:
            signal.signal(signal.SIGUSR1, lambda *_: None)
            signal.siginterrupt(signal.SIGUSR1, not restart)
            with opened(top / "file") as fd:
                line.send("about to wait")
                return _take_once(kind, fd)

        seen: list[object] = []
        for restart in (False, True):
            with contextlib.ExitStack() as stack:
                fd = stack.enter_context(opened(top / "file"))
                take(fd)
                peer = stack.enter_context(Peer(functools.partial(waiter, restart)))
                peer.hear()
                peer.waits_for_lock()
                peer.signal(signal.SIGUSR1)
                if restart:
                    peer.waits_for_lock()
                    let_go(fd)
                seen.append(peer.hear())
        return seen

    works = [let_go_or_killed, interrupted]
    parity.check([Case(work.__name__, build, work) for work in works], state)


def _is_next(peer: Peer, peers: list[Peer]) -> bool:
    wait_until(lambda: any(each.has_spoken for each in peers), "somebody gets the lock")
    return peer.has_spoken


def _take_once(kind: str, fd: int) -> str:
    """One call that waits, without Python's own second try after a signal."""
    if kind == "flock":
        result = _libc.flock(fd, EX)
    else:
        packed = ctypes.create_string_buffer(struct.pack(_FLOCK, WRITE, os.SEEK_SET, 0, 0, 0))
        command = fcntl.F_SETLKW if kind == "range" else fcntl.F_OFD_SETLKW
        result = _libc.fcntl(fd, command, packed)
    return "taken" if not result else errno.errorcode[ctypes.get_errno()]


WAITERS = 24


def test_waiting_holds_up_nobody(stage: Stage) -> None:
    """Many wait for locks of every kind; all else goes on, with the share down as well."""
    for kind in KINDS:
        (stage.path / kind).write_bytes(b"x")
    stage.put("cold", b"cold")
    stage.appears("cold")

    def wait(path: Path, take: Take, line: Connection) -> object:
        with opened(path) as fd:
            take(fd)
        return "had it"

    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(opened(stage.path / kind)) for kind in KINDS]
        for fd, (take, _) in zip(held, KINDS.values(), strict=True):
            take(fd)
        peers = []
        for number in range(WAITERS):
            kind = list(KINDS)[number % len(KINDS)]
            work = functools.partial(wait, stage.path / kind, KINDS[kind][0])
            peers.append(stack.enter_context(Peer(work)))
        for peer in peers:
            peer.waits_for_lock()
        with stage.stuck():
            stage.share.disconnect()
            for number in range(100):
                with open(stage.path / "log", "ab") as file:
                    file.write(b"log line")
                (stage.path / f"new{number}").write_bytes(b"x")
                os.rename(stage.path / f"new{number}", stage.path / "renamed")
            assert os.stat(stage.path / "cold").st_size == 4
            assert stage.mount.status()["mounted"]
            stage.share.reconnect()
        assert not any(peer.has_spoken for peer in peers)
        for fd, (_, let_go) in zip(held, KINDS.values(), strict=True):
            let_go(fd)
        assert {peer.hear() for peer in peers} == {"had it"}
    stage.settle()


def test_exclusion_is_real(stage: Stage) -> None:
    """A counter in a file, read and written under a lock by several processes while it is flushed:
    no increment is lost."""
    turns, path = 40, stage.path / "counter"
    path.write_text("0")
    stage.share.set(latency_ms=2)

    def count(take: Take, let_go: Take, line: Connection) -> object:
        for _ in range(turns):
            with opened(path) as fd:
                take(fd)
                number = int(os.pread(fd, 20, 0))
                os.pwrite(fd, b"%d" % (number + 1), 0)
                let_go(fd)
        return "done"

    for number, (take, let_go) in enumerate(KINDS.values(), 1):
        work = functools.partial(count, take, let_go)
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(Peer(work)) for _ in range(4)]
            while not all(peer.has_spoken for peer in peers):
                stage.flush("counter")
            assert [peer.hear() for peer in peers] == ["done"] * 4
        assert path.read_text() == str(4 * turns * number)
    stage.settle()
