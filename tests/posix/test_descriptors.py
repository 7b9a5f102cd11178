"""Descriptors: of paths only, of directories that are moved, removed or replaced, of programs."""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.descriptors import opened
from tests.posix.kernel import (
    AT_EMPTY_PATH,
    AT_SYMLINK_FOLLOW,
    AT_SYMLINK_NOFOLLOW,
    UTIME_NOW,
    linkat,
    utimensat,
)
from tests.posix.parity import Case, Parity, State, attempt
from wbcache.probe import within

DATA = b"0123456789" * 20


def build(top: Path) -> None:
    (top / "file").write_bytes(DATA)
    (top / "directory/sub").mkdir(parents=True)
    (top / "directory/inside").write_bytes(b"inside")
    (top / "link").symlink_to("file")
    (top / "hollow").mkdir()


def cases(*calls: Callable[[Path], object]) -> list[Case]:
    return [Case(call.__name__, build, call) for call in calls]


def listed(path: Path | str | int) -> object:
    """The names in a directory, or why there are none."""
    return attempt(lambda: sorted(os.listdir(path)))


def _duplicate(fd: int) -> str:
    os.close(os.dup(fd))
    return "duplicated"


def proc(fd: int) -> str:
    """A path that leads to a descriptor."""
    return f"/proc/self/fd/{fd}"


def test_descriptors_of_paths(parity: Parity, state: State) -> None:
    def by_themselves(top: Path) -> object:
        seen: list[object] = []
        for name in ("file", "directory", "link"):
            with opened(top / name, os.O_PATH | os.O_NOFOLLOW) as fd:
                seen += [oct(os.fstat(fd).st_mode), attempt(os.read, fd, 5)]
                seen += [attempt(os.write, fd, b"x"), attempt(os.fchmod, fd, 0o600)]
                seen += [attempt(os.fchown, fd, 1, 1), attempt(os.ftruncate, fd, 3)]
                seen += [attempt(os.fsync, fd), attempt(os.lseek, fd, 0, os.SEEK_SET)]
                seen += [listed(fd), attempt(os.utime, fd)]
                seen += [attempt(fcntl.fcntl, fd, fcntl.F_GETFL)]
                seen += [attempt(fcntl.flock, fd, fcntl.LOCK_EX), attempt(_duplicate, fd)]
                seen += [attempt(os.readlink, "", dir_fd=fd)]
                seen += [attempt(lambda fd=fd: os.fstatvfs(fd).f_namemax)]
                seen += [attempt(lambda fd=fd: oct(os.stat("sub", dir_fd=fd).st_mode))]
                seen += [attempt(os.setxattr, fd, "user.x", b"1")]
                seen += [attempt(within, 30, lambda fd=fd: os.fchdir(fd))]
        return seen

    def through_proc(top: Path) -> object:
        seen: list[object] = []
        for name in ("file", "directory", "link"):
            with opened(top / name, os.O_PATH | os.O_NOFOLLOW) as fd:
                path = proc(fd)
                seen += [os.readlink(path) == str(top / name), oct(os.stat(path).st_mode)]
                seen += [attempt(os.chmod, path, 0o700), attempt(os.chown, path, 3, 4)]
                seen += [attempt(os.truncate, path, 150), listed(path)]
                seen += [attempt(os.setxattr, path, "user.x", b"1")]
                seen += [attempt(os.access, path, os.W_OK), attempt(os.utime, path)]
                for flags in (os.O_RDONLY, os.O_RDWR, os.O_CREAT | os.O_WRONLY, os.O_NOFOLLOW):
                    try:
                        again = os.open(path, flags)
                    except OSError as error:
                        seen += [error.errno]
                    else:
                        seen += [attempt(os.read, again, 5)]
                        os.close(again)
                os.rename(top / name, top / "moved")
                seen += [os.readlink(path) == str(top / "moved"), listed(path)]
                os.rename(top / "moved", top / name)
        return seen

    def linked(top: Path) -> object:
        seen: list[object] = []
        for number, name in enumerate(("file", "directory", "link")):
            for flags in (os.O_PATH, os.O_PATH | os.O_NOFOLLOW, os.O_RDONLY):
                with opened(top / name, flags) as fd:
                    new = f"{top}/new{number}-{flags:o}"
                    seen += [attempt(linkat, fd, "", f"{new}-a", AT_EMPTY_PATH)]
                    seen += [attempt(linkat, fd, proc(fd), f"{new}-b", AT_SYMLINK_FOLLOW)]
                    seen += [attempt(linkat, fd, proc(fd), f"{new}-c", 0)]
                    seen += [attempt(linkat, fd, "", f"{new}-d", 0)]
                    seen += [attempt(linkat, fd, "", f"{new}-a", AT_EMPTY_PATH)]
        seen += [attempt(linkat, -100, top / "link", top / "followed", AT_SYMLINK_FOLLOW)]
        seen += [attempt(linkat, -100, top / "link", top / "not-followed", 0)]
        seen += [attempt(linkat, -100, top / "none", top / "x", AT_SYMLINK_FOLLOW)]
        with opened(top / "file", os.O_RDWR) as fd:
            for name in os.listdir(top):
                if os.path.isfile(top / name):
                    os.unlink(top / name)
            seen += [os.fstat(fd).st_nlink, attempt(linkat, fd, "", top / "back", AT_EMPTY_PATH)]
            seen += [attempt(linkat, fd, proc(fd), top / "back", AT_SYMLINK_FOLLOW)]
        return seen

    parity.check(cases(by_themselves, through_proc, linked), state)


def test_an_unlinked_file_reopened(parity: Parity, state: State) -> None:
    """While anybody has it open it can be opened anew through /proc."""

    def call(top: Path) -> object:
        with opened(top / "file", os.O_RDONLY) as reading:
            os.unlink(top / "file")
            (top / "file").write_bytes(b"another")
            with opened(proc(reading), os.O_RDWR) as writing:
                seen = [os.pread(writing, 10, 5), os.write(writing, b"new bytes")]
                seen += [os.pread(reading, 20, 0), os.fstat(writing).st_nlink]
            with opened(proc(reading), os.O_WRONLY | os.O_TRUNC) as cut:
                seen += [os.fstat(reading).st_size, os.write(cut, b"again")]
            seen += [os.pread(reading, 20, 0)]
        return [*seen, (top / "file").read_bytes()]

    parity.check([Case("reopened", build, call)], state)


def test_descriptors_of_directories(parity: Parity, state: State) -> None:
    def wrong_calls(top: Path) -> object:
        with opened(top / "directory", os.O_RDONLY) as fd:
            seen = [attempt(os.read, fd, 5), attempt(os.write, fd, b"x")]
            seen += [attempt(os.pread, fd, 5, 0), attempt(os.ftruncate, fd, 0)]
            seen += [attempt(os.lseek, fd, 0, os.SEEK_SET), attempt(os.lseek, fd, -1, os.SEEK_SET)]
            seen += [attempt(os.fsync, fd), attempt(os.fdatasync, fd)]
            seen += [attempt(os.fchmod, fd, 0o700), attempt(os.fchown, fd, 1, 1)]
            seen += [attempt(fcntl.flock, fd, fcntl.LOCK_EX), attempt(fcntl.lockf, fd, 1)]
            seen += [attempt(os.posix_fadvise, fd, 0, 0, 0)]
            return [*seen, attempt(os.utime, fd, ns=(10**17, 10**17))]

    def relative(top: Path) -> object:
        with opened(top / "directory", os.O_RDONLY) as fd:
            seen: list[object] = []
            for name in ("inside", "sub", "new", "", ".", "..", "../file", "/", "inside/x"):
                seen += [attempt(lambda n=name: oct(os.stat(n, dir_fd=fd).st_mode)[:3])]
                for flags in (os.O_RDONLY, os.O_CREAT | os.O_WRONLY, os.O_CREAT | os.O_EXCL):
                    try:
                        os.close(os.open(name, flags, 0o644, dir_fd=fd))
                    except OSError as error:
                        seen += [error.errno]
                    else:
                        seen += ["opened"]
                seen += [attempt(os.mkdir, name, dir_fd=fd), attempt(os.rmdir, name, dir_fd=fd)]
                if name != "/":
                    seen += [attempt(os.symlink, "to", name, dir_fd=fd)]
            return seen

    parity.check(cases(wrong_calls, relative), state)


def test_removed_and_replaced_directories(parity: Parity, state: State) -> None:
    def uses(fd: int) -> list[object]:
        """What can be done in a directory by its descriptor."""
        seen: list[object] = [os.fstat(fd).st_nlink, listed(fd)]
        flags = os.O_CREAT | os.O_WRONLY
        seen += [attempt(os.open, "file", flags, dir_fd=fd)]
        seen += [attempt(os.mkdir, "sub", dir_fd=fd), attempt(os.mkfifo, "fifo", dir_fd=fd)]
        seen += [attempt(os.symlink, "to", "link", dir_fd=fd)]
        seen += [attempt(os.unlink, "file", dir_fd=fd), attempt(os.stat, "x", dir_fd=fd)]
        seen += [attempt(os.rename, "x", "y", src_dir_fd=fd, dst_dir_fd=fd)]
        seen += [attempt(os.link, "../file", "z", src_dir_fd=fd, dst_dir_fd=fd)]
        seen += [attempt(os.rename, "../file", "z", src_dir_fd=fd, dst_dir_fd=fd)]
        seen += [attempt(os.fsync, fd), attempt(os.fchmod, fd, 0o711), attempt(os.utime, fd)]
        seen += [oct(os.fstat(fd).st_mode), attempt(os.getxattr, fd, "user.x")]
        seen += [attempt(lambda: oct(os.stat(".", dir_fd=fd).st_mode))]
        seen += [attempt(lambda: os.path.samestat(os.stat("..", dir_fd=fd), os.stat("/"))) is True]

        def from_there() -> list[object]:
            os.fchdir(fd)
            found = [attempt(os.getcwd), attempt(os.listdir, "."), attempt(os.mkdir, "new")]
            return [*found, attempt(lambda: oct(os.stat("..").st_mode)), attempt(os.chdir, "..")]

        return [*seen, within(30, from_there)]

    def removed(top: Path) -> object:
        with opened(top / "hollow", os.O_RDONLY) as fd:
            os.rmdir(top / "hollow")
            seen = uses(fd)
            os.mkdir(top / "hollow")
            return [*seen, uses(fd)]

    def replaced(top: Path) -> object:
        with (
            opened(top / "hollow", os.O_RDONLY) as old,
            opened(top / "directory", os.O_RDONLY) as new,
        ):
            os.rename(top / "directory", top / "hollow")
            os.mkdir("here", dir_fd=new)
            return [uses(old), sorted(os.listdir(new)), sorted(os.listdir(top / "hollow"))]

    def with_what_is_above(top: Path) -> object:
        os.mkdir(top / "hollow/deep")
        with (
            opened(top / "hollow/deep", os.O_RDONLY) as deep,
            opened(top / "hollow", os.O_RDONLY) as above,
        ):
            os.rmdir(top / "hollow/deep")
            os.rmdir(top / "hollow")
            return [uses(deep), uses(above)]

    def moved(top: Path) -> object:
        with opened(top / "directory/sub", os.O_RDONLY) as fd:
            os.rename(top / "directory", top / "hollow")
            os.rename(top / "hollow/sub", top / "sub")
            os.mkdir("new", dir_fd=fd)
            same = os.path.samestat(os.stat("..", dir_fd=fd), os.stat(top))

            def where() -> str:
                os.fchdir(fd)
                return os.path.relpath(os.getcwd(), top)

            there = within(30, where)
            return [same, there, sorted(os.listdir(top / "sub")), sorted(os.listdir(top))]

    parity.check(cases(removed, replaced, with_what_is_above, moved), state)


def test_programs(parity: Parity, state: State) -> None:
    """What is executed from the mount."""

    def build_all(top: Path) -> None:
        (top / "script").write_text("#!/bin/sh\necho out\n")
        (top / "script").chmod(0o755)
        (top / "no-script").write_text("#!/bin/sh\nexit 7\n")
        (top / "odd").write_text("#!/none/such\n")
        (top / "odd").chmod(0o755)
        (top / "program").write_bytes(Path("/bin/cat").read_bytes())
        (top / "program").chmod(0o755)

    def scripts(top: Path) -> object:
        seen: list[object] = []
        for name in ("script", "no-script", "odd", "none", "script/x"):
            seen += [attempt(subprocess.check_output, [top / name])]
        return seen

    def running(top: Path) -> object:
        """Nobody writes to a program that runs; its name may go."""
        program = subprocess.Popen([top / "program"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            seen = [attempt(os.open, top / "program", os.O_WRONLY)]
            seen += [attempt(os.truncate, top / "program", 5)]
            os.rename(top / "program", top / "renamed")
            os.unlink(top / "renamed")
            (top / "program").write_bytes(b"another")
            out, _ = program.communicate(b"through it", 20)
        finally:
            program.kill()
            program.wait()
        return [*seen, out, program.returncode]

    parity.check([Case(call.__name__, build_all, call) for call in (scripts, running)], state)


def test_links_themselves(parity: Parity, state: State) -> None:
    """Calls that do not follow a symbolic link."""

    def call(top: Path) -> object:
        link = top / "link"
        seen: list[object] = [attempt(os.chown, link, 5, 6, follow_symlinks=False)]
        seen += [attempt(utimensat, link, (5, 0), (6, 7), AT_SYMLINK_NOFOLLOW)]
        seen += [attempt(utimensat, link, (0, UTIME_NOW), (9, 8), AT_SYMLINK_NOFOLLOW)]
        st, target = os.lstat(link), os.stat(link)
        seen += [(oct(st.st_mode), st.st_uid, st.st_gid, st.st_size, st.st_mtime_ns)]
        seen += [(oct(target.st_mode), target.st_uid, target.st_gid)]
        for name, follow in itertools.product(("user.x", "trusted.x"), (True, False)):
            seen += [attempt(os.getxattr, link, name, follow_symlinks=follow)]
        seen += [attempt(os.listxattr, link, follow_symlinks=False)]
        os.link(link, top / "second", follow_symlinks=False)
        seen += [os.lstat(top / "second").st_nlink, os.readlink(top / "second")]
        os.unlink(link)
        return [*seen, os.lstat(top / "second").st_nlink, (top / "second").read_bytes()]

    parity.check([Case("links", build, call)], state)
