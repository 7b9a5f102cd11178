"""Descriptors that are shared, passed on and appended through; programs and libraries."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.endtoend.checkpoints import blob
from tests.endtoend.stage import Stage
from tests.posix.parity import Case, Parity, State, attempt
from tests.processes.peers import Peer, elsewhere
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)


def build(top: Path) -> None:
    """A file of 200 bytes."""
    (top / "file").write_bytes(b"0123456789" * 20)


def test_one_offset_for_all_copies(parity: Parity, state: State) -> None:
    """A descriptor that was duplicated, inherited or sent goes on where the others are."""

    def inherited(top: Path) -> object:
        fd = os.open(top / "file", os.O_RDWR)
        try:
            os.lseek(fd, 100, os.SEEK_SET)
            seen = [elsewhere(lambda: os.write(fd, b"child"), keep=[fd])]
            seen += [os.lseek(fd, 0, os.SEEK_CUR), os.write(fd, b"parent")]
            seen += [elsewhere(lambda: os.read(fd, 5), keep=[fd]), os.read(fd, 5)]
            copy = os.dup(fd)
            seen += [os.read(copy, 3), os.read(fd, 3)]
            os.close(copy)
            other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            seen += [os.read(other, 5), os.lseek(fd, 0, os.SEEK_CUR)]
            os.close(other)
            return [*seen, os.pread(fd, 20, 95)]
        finally:
            os.close(fd)

    def one_flag_for_all(top: Path) -> object:
        """O_APPEND set in a child holds for the parent."""
        fd = os.open(top / "file", os.O_RDWR)
        try:
            elsewhere(lambda: fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND), keep=[fd])
            os.write(fd, b"at the end")
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def sent(top: Path) -> object:
        """Over a socket on the mount, and the sender has closed its own."""

        def sender(line: Connection) -> None:
            os.chdir(top)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect("socket")
                fd = os.open("file", os.O_RDWR)
                os.lseek(fd, 50, os.SEEK_SET)
                socket.send_fds(client, [b"x"], [fd])
                os.close(fd)
                os.unlink("file")
                client.recv(1)

        before = os.getcwd()
        os.chdir(top)
        try:
            with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as stack:
                server.bind("socket")
                server.listen()
                stack.enter_context(Peer(sender))
                connection, _ = server.accept()
                with connection:
                    _, fds, _, _ = socket.recv_fds(connection, 10, 1)
                    wait_until(lambda: not os.path.exists("file"), "it is unlinked")
                    seen = [os.read(fds[0], 5), os.write(fds[0], b"received")]
                    seen += [os.pread(fds[0], 20, 48), os.fstat(fds[0]).st_nlink]
                    os.close(fds[0])
            os.unlink("socket")
        finally:
            os.chdir(before)
        return seen

    def closed_on_exec(top: Path) -> object:
        kept = os.open(top / "file", os.O_RDONLY)
        dropped = os.open(top / "file", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.set_inheritable(kept, True)
            code = f"import os; print(os.read({kept}, 3)); os.fstat({dropped})"
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, close_fds=False, check=False
            )
            return [done.stdout, b"Bad file descriptor" in done.stderr, os.read(kept, 3)]
        finally:
            os.close(kept)
            os.close(dropped)

    works = [inherited, one_flag_for_all, sent, closed_on_exec]
    parity.check([Case(work.__name__, build, work) for work in works], state)


def test_permission_is_asked_for_at_the_open_only(parity: Parity, state: State) -> None:
    """A descriptor goes on working when the file, or the way to it, is closed to its user."""

    def nothing(top: Path) -> None:
        pass

    def closed_off(top: Path) -> object:
        directory = top / "mine"
        directory.mkdir(0o700)
        path = directory / "log"
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with opened(path, append, 0o600) as fd, opened(path, os.O_RDONLY) as reading:
            os.write(fd, b"one ")
            os.chmod(path, 0)
            os.chmod(directory, 0)
            os.write(fd, b"two ")
            os.fsync(fd)
            seen: list[object] = [os.pread(reading, 100, 0), os.fstat(fd).st_size]
            seen += [attempt(os.open, path, append), attempt(os.open, path, os.O_RDONLY)]
            os.ftruncate(fd, 6)
            os.fchmod(fd, 0o400)
            seen += [os.write(fd, b"three")]
        os.chmod(directory, 0o700)
        return [*seen, path.read_bytes()]

    parity.check([Case("closed off", nothing, closed_off)], state, user=True)


LINES = 120


def lines_of(number: int, count: int) -> list[bytes]:
    """Lines of many lengths that say whose they are, the longest several pages."""
    return [
        b"%d %06d %s\n" % (number, n, b"x" * (n * 37 % 300 if n % 40 else 9000))
        for n in range(count)
    ]


@pytest.mark.parametrize("how", ["held", "reopened", "inherited"])
@pytest.mark.parametrize("count", [LINES, pytest.param(4000, marks=pytest.mark.slow)])
def test_appends_of_many_processes(stage: Stage, how: str, count: int) -> None:
    """Eight processes append lines to one file while it is flushed: none is lost, torn, or out of
    its writer's order, and the share is at every moment a prefix."""
    processes = 8
    path, flags = stage.path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    inherited = os.open(path, flags, 0o644)
    stage.share.set(latency_ms=1)

    def write(number: int, line: Connection) -> object:
        line.recv()
        fd = inherited if how == "inherited" else os.open(path, flags)
        for text in lines_of(number, count):
            if how == "reopened":
                os.close(fd)
                fd = os.open(path, flags)
            if os.write(fd, text) != len(text):
                return "a short write"
        return "done"

    prefixes: list[bytes] = []
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, inherited)
        peers = [
            stack.enter_context(Peer(functools.partial(write, number), keep=[inherited]))
            for number in range(processes)
        ]
        for peer in peers:
            peer.tell()
        while not all(peer.has_spoken for peer in peers):
            stage.flush("log", timeout=60)
            prefixes.append((stage.backing / "log").read_bytes())
        assert [peer.hear() for peer in peers] == ["done"] * processes
    whole = path.read_bytes()
    found: dict[int, list[bytes]] = {number: [] for number in range(processes)}
    for text in whole.splitlines(keepends=True):
        found[int(text.split(b" ", 1)[0])].append(text)
    for number in range(processes):
        assert found[number] == lines_of(number, count), number
    for prefix in prefixes:
        assert whole.startswith(prefix)
    stage.settle(timeout=60)
    assert (stage.backing / "log").read_bytes() == whole


def test_forks_while_a_flush_is_under_way(stage: Stage) -> None:
    """The children write through what they inherited, and in turn; the parent is long gone."""
    path = stage.path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)

    def generations(depth: int) -> None:
        os.write(fd, b"generation %d\n" % depth)
        if depth < 5:
            if not os.fork():
                generations(depth + 1)
            os._exit(0)  # without waiting: the child goes on by itself
        os.write(fd, b"the last\n")

    try:
        with stage.stuck():
            (stage.path / "other").write_bytes(blob("other", 300_000))
            with Peer(lambda line: generations(0), keep=[fd]) as peer:
                peer.end()
            wait_until(lambda: path.read_bytes().endswith(b"the last\n"), "the last one is done")
    finally:
        os.close(fd)
    expected = b"".join(b"generation %d\n" % n for n in range(6)) + b"the last\n"
    assert path.read_bytes() == expected
    stage.settle()


def _program(top: Path) -> None:
    shutil.copy2(shutil.which("sleep") or "/bin/sleep", top / "program")
    (top / "script").write_text("#!/bin/sh\necho script $1; exit 3\n")
    (top / "script").chmod(0o755)
    (top / "plain").write_text("#!/bin/sh\necho never\n")
    (top / "plain").chmod(0o644)
    (top / "nonsense").write_bytes(b"\x7fELFnot really")
    (top / "nonsense").chmod(0o755)
    (top / "indirect").write_text("#!./script\n")
    (top / "indirect").chmod(0o755)


def test_programs_on_the_mount(parity: Parity, state: State) -> None:
    """A binary, scripts, what is none; a program that runs can't be written, but be replaced."""

    def run(top: Path, *words: str) -> object:
        try:
            done = subprocess.run(
                [f"./{words[0]}", *words[1:]], cwd=top, capture_output=True, check=False, timeout=20
            )
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        return done.returncode, done.stdout, bool(done.stderr)

    def runs(top: Path) -> object:
        seen = [run(top, "program", "0"), run(top, "script", "word")]
        seen += [run(top, name) for name in ("plain", "nonsense", "indirect", "missing")]
        os.chmod(top / "program", 0o600)
        seen += [run(top, "program", "0")]
        os.chmod(top / "program", 0o700)
        return [*seen, run(top, "program", "0")]

    def busy(top: Path) -> object:
        seen: list[object] = []
        with subprocess.Popen([top / "program", "1000"]) as running:
            try:
                wait_until(
                    lambda: os.readlink(f"/proc/{running.pid}/exe") == str(top / "program"),
                    "it runs",
                )
                for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC, os.O_RDONLY):
                    seen += [attempt(lambda f=flags: os.close(os.open(top / "program", f)))]
                seen += [attempt(os.truncate, top / "program", 5)]
                parity.flush()
                seen += [attempt(lambda: os.close(os.open(top / "program", os.O_WRONLY)))]
                os.chmod(top / "program", 0o711)
                shutil.copy2(top / "script", top / "new")
                os.replace(top / "new", top / "program")
                parity.flush()
                seen += [run(top, "program", "now"), running.poll()]
            finally:
                running.kill()
        # And the other way: what is open for writing can't be run.
        with open(top / "script", "ab"):
            seen += [run(top, "script")]
        return [*seen, run(top, "script", "again")]

    cases = [Case(work.__name__, _program, work) for work in (runs, busy)]
    parity.check(cases, state)


def test_libraries_on_the_mount(parity: Parity, state: State) -> None:
    """dlopen, also of one that was replaced and flushed while it is in use."""

    def build_library(top: Path) -> None:
        import _ctypes

        shutil.copy(_ctypes.__file__, top / "library.so")

    def load(top: Path) -> object:
        def child(line: Connection) -> object:
            library = ctypes.CDLL(os.fspath(top / "library.so"))
            seen = [bool(library.PyInit__ctypes)]
            (top / "new.so").write_bytes(b"no library")
            os.replace(top / "new.so", top / "library.so")
            line.send("replaced")
            line.recv()
            seen += [bool(library._init) if hasattr(library, "_init") else True]
            try:
                ctypes.CDLL(os.fspath(top / "library.so"))
            except OSError as error:
                seen += ["file too short" in str(error) or "invalid ELF" in str(error)]
            maps = Path("/proc/self/maps").read_text()
            return [*seen, f"{top}/library.so (deleted)" in maps]

        with Peer(child) as peer:
            assert peer.hear() == "replaced"
            parity.flush()
            peer.tell()
            return peer.hear()

    parity.check([Case("load", build_library, load)], state)


def test_fifos_and_sockets_between_processes(parity: Parity) -> None:
    """They work across processes and a flush, also under names that were renamed."""

    def nothing(top: Path) -> None:
        pass

    def fifo(top: Path) -> object:
        os.mkfifo(top / "fifo")

        def writer(line: Connection) -> object:
            fd = os.open(top / "fifo", os.O_WRONLY)
            line.send("open")
            for number in range(100):
                os.write(fd, b"%03d" % number)
            line.recv()
            return attempt(os.write, fd, b"nobody reads any more")

        seen = [attempt(os.open, top / "fifo", os.O_WRONLY | os.O_NONBLOCK)]
        with Peer(writer) as peer:
            with open(top / "fifo", "rb", buffering=0) as file:
                seen += [peer.hear()]
                parity.flush()
                os.rename(top / "fifo", top / "renamed")
                got = b""
                while len(got) < 300:
                    got += file.read(1000) or b""
                seen += [got]
                flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
                fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_NONBLOCK)
                seen += [attempt(os.read, file.fileno(), 10)]
                waiting = array.array("i", [0])
                seen += [fcntl.ioctl(file.fileno(), 0x541B, waiting), waiting[0]]  # FIONREAD
            peer.tell()
            seen += [peer.hear()]
        return seen

    def datagrams(top: Path) -> object:
        def client(line: Connection) -> object:
            os.chdir(top)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
                sending.bind("client")
                sending.sendto(b"question", "server")
                return sending.recvfrom(100)

        before = os.getcwd()
        os.chdir(top)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
                server.bind("first")
                os.rename("first", "server")
                parity.flush()
                with Peer(client) as peer:
                    question, address = server.recvfrom(100)
                    server.sendto(b"answer", address)
                    seen = [question, address, peer.hear()]
                seen += [stat.S_ISSOCK(os.stat("server").st_mode)]
                os.chmod("server", 0)
                seen += [oct(os.stat("server").st_mode)]
        finally:
            os.chdir(before)
        return seen

    works: list[Callable[[Path], object]] = [fifo, datagrams]
    parity.check([Case(work.__name__, nothing, work) for work in works], "dirty")
