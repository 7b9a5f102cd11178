"""Modes, owners, times and extended attributes, as root and as a user without privileges."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from tests.plain_user import PLAIN_GID, PLAIN_UID
from tests.posix.kernel import (
    AT_STATX_DONT_SYNC,
    AT_STATX_FORCE_SYNC,
    AT_SYMLINK_NOFOLLOW,
    STATX_BASIC_STATS,
    Statx,
    statx,
)
from tests.posix.parity import Case, Parity, State, attempt

OTHER_UID = 12345
MOMENT = (981_173_106_123_456_789, 981_173_107_987_654_321)
"""Access and modification time, nanoseconds."""


def status(path: str | Path) -> list[object]:
    """What a case compares of a file."""
    st = os.lstat(path)
    size = st.st_size if stat.S_ISREG(st.st_mode) else 0
    return [oct(st.st_mode), st.st_uid, st.st_gid, size]


def one(mode: int, uid: int, gid: int, *, directory: bool = False) -> Callable[[Path], object]:
    """A builder of "x", with something in it."""

    def build(top: Path) -> None:
        if directory:
            (top / "x").mkdir()
            (top / "x/in").write_bytes(b"inside")
        else:
            (top / "x").write_bytes(b"some bytes")
        os.chown(top / "x", uid, gid)
        os.chmod(top / "x", mode)

    return build


def calls(top: Path) -> list[object]:
    """Whatever changes attributes, each call judged by itself and by what it leaves."""
    x = top / "x"
    seen: list[object] = []

    def then(call: Callable[..., object], *arguments: object, **keywords: object) -> None:
        seen.append([attempt(call, *arguments, **keywords), status(x)])

    then(os.chmod, x, 0o7777)
    then(os.chmod, x, 0o2750)
    then(os.chown, x, -1, -1)
    then(os.chmod, x, 0o6711)
    then(os.chown, x, PLAIN_UID, PLAIN_GID)
    then(os.chmod, x, 0o6711)
    then(os.chown, x, -1, 777)
    then(os.chown, x, OTHER_UID, -1)
    then(os.chmod, x, 0o604)
    then(os.utime, x, ns=MOMENT)
    seen.append(os.lstat(x).st_mtime_ns if seen[-1] == "ok" else None)
    then(os.utime, x)
    then(lambda: os.truncate(x, 3))
    then(os.access, x, os.R_OK)
    then(os.access, x, os.W_OK)
    then(os.access, x, os.X_OK)
    then(lambda: x.read_bytes())
    then(lambda: x.write_bytes(b"written anew"))
    then(lambda: sorted(os.listdir(x)))
    then(lambda: (x / "new").touch())
    then(lambda: os.path.getsize(x / "in"))
    return seen


def test_calls_on_things_of_all_modes(parity: Parity, state: State) -> None:
    for user in (False, True):
        cases = []
        modes = (0, 0o644, 0o400, 0o200, 0o755, 0o311, 0o522, 0o6777, 0o1777, 0o2070, 0o007)
        for mode, directory in itertools.product(modes, (False, True)):
            for uid, gid in ((0, 0), (PLAIN_UID, PLAIN_GID), (OTHER_UID, PLAIN_GID)):
                build = one(mode, uid, gid, directory=directory)
                kind = "directory" if directory else "file"
                cases.append(Case(f"{kind} {mode:o} {uid}:{gid}", build, calls))
        parity.check(cases if state == "dirty" else cases[user::2], state, user=user)


def test_set_id_bits_go_when_a_file_changes(parity: Parity, state: State) -> None:
    def each(work: Callable[[int], object]) -> Callable[[Path], object]:
        def call(top: Path) -> object:
            fd = os.open(top / "x", os.O_RDWR)
            try:
                return [attempt(work, fd), status(top / "x")]
            finally:
                os.close(fd)

        return call

    works: dict[str, Callable[[int], object]] = {
        "write": lambda fd: os.write(fd, b"x"),
        "truncate": lambda fd: os.ftruncate(fd, 2),
        "extend": lambda fd: os.ftruncate(fd, 200),
        "chown": lambda fd: os.fchown(fd, -1, os.getgid()),
        "read": lambda fd: os.read(fd, 2),
        "times": lambda fd: os.utime(fd),
    }
    cases = [
        Case(f"{name} {mode:o}", one(mode, PLAIN_UID, PLAIN_GID), each(work))
        for name, work in works.items()
        for mode in (0o6777, 0o4755, 0o2755, 0o2745)
    ]
    parity.check(cases, state)
    parity.check(cases, state, user=True)


def test_sticky_and_set_gid_directories(parity: Parity, state: State) -> None:
    def build(top: Path) -> None:
        for name, mode, uid in (
            ("sticky", 0o1777, 0),
            ("own-sticky", 0o1777, PLAIN_UID),
            ("set-gid", 0o2777, 0),
            ("closed", 0o755, 0),
        ):
            directory = top / name
            directory.mkdir()
            for owner in (0, PLAIN_UID):
                (directory / f"of{owner}").write_bytes(b"x")
                os.chown(directory / f"of{owner}", owner, 777)
                (directory / f"dir{owner}").mkdir()
                os.chown(directory / f"dir{owner}", owner, 777)
            os.chown(directory, uid, 777)
            os.chmod(directory, mode)

    def call(top: Path) -> object:
        seen: list[object] = []
        for name in ("sticky", "own-sticky", "set-gid", "closed"):
            directory = top / name
            seen += [attempt((directory / "made").write_bytes, b"y")]
            seen += [attempt((directory / "sub").mkdir, 0o755)]
            seen += [attempt((directory / "sub/deeper").mkdir, 0o700)]
            seen += [attempt(os.mkfifo, directory / "fifo")]
            seen += [attempt(os.symlink, "to", directory / "link")]
            for made in ("made", "sub", "sub/deeper", "fifo", "link"):
                seen += [attempt(status, directory / made)]
            for owner in (0, PLAIN_UID):
                file, below = directory / f"of{owner}", directory / f"dir{owner}"
                seen += [attempt(os.rename, file, directory / "moved")]
                seen += [attempt(os.rename, directory / "moved", file)]
                seen += [attempt(os.rename, directory / "made", file)]
                seen += [attempt(os.link, file, directory / f"linked{owner}")]
                seen += [attempt(os.rename, below, directory / "moved")]
                seen += [attempt(os.rename, directory / "moved", below)]
                seen += [attempt(os.unlink, file), attempt(os.rmdir, below)]
        return seen

    parity.check([Case("root", build, call)], state)
    parity.check([Case("user", build, call)], state, user=True)


def test_umask(parity: Parity, state: State) -> None:
    def build(top: Path) -> None:
        (top / "plain").mkdir()
        (top / "set-gid").mkdir()
        os.chown(top / "set-gid", -1, 777)
        os.chmod(top / "set-gid", 0o2775)

    def call(top: Path) -> object:
        seen: list[object] = []
        for mask, mode, name in itertools.product(
            (0, 0o022, 0o077, 0o777), (0o777, 0o666, 0o4755, 0o2755, 0), ("plain", "set-gid")
        ):
            base = top / name / f"{mask:o}-{mode:o}"
            before = os.umask(mask)
            try:
                os.close(os.open(f"{base}-file", os.O_CREAT | os.O_WRONLY, mode))
                os.mkdir(f"{base}-dir", mode)
                os.mkfifo(f"{base}-fifo", mode)
                os.mknod(f"{base}-node", mode)
            finally:
                os.umask(before)
            for kind in ("file", "dir", "fifo", "node"):
                seen += [status(f"{base}-{kind}")]
        return seen

    parity.check([Case("umask", build, call)], state)


def test_times(parity: Parity, state: State) -> None:
    def build(top: Path) -> None:
        (top / "file").write_bytes(b"x")
        (top / "dir").mkdir()
        (top / "link").symlink_to("file")
        for name in ("file", "dir", "link"):
            os.utime(top / name, ns=(MOMENT[0] - 10**9, MOMENT[1] - 10**9), follow_symlinks=False)

    def times(path: Path) -> list[int]:
        st = os.lstat(path)
        # A time before this test's own is a set one; later ones are only known to be later.
        return [at if at < 10**18 else -1 for at in (st.st_atime_ns, st.st_mtime_ns)]

    def call(top: Path) -> object:
        seen: list[object] = []
        for name in ("file", "dir", "link"):
            path = top / name
            # Listing or reading would set the access time, sooner or later.
            seen += [times(path)[1]]
            for ns in (MOMENT, (0, 0), (1, 999_999_999), (MOMENT[0], -5 * 10**9)):
                os.utime(path, ns=ns, follow_symlinks=False)
                seen += [times(path)]
        with open(top / "file", "r+b") as file:
            os.utime(file.fileno(), ns=MOMENT)
            seen += [times(top / "file")]
            file.write(b"later")
            file.flush()
            seen += [times(top / "file")[1]]
            os.utime(file.fileno(), ns=MOMENT)
        seen += [times(top / "file")]
        os.rename(top / "file", top / "moved")
        seen += [times(top / "moved")]
        os.utime(top / "dir", ns=MOMENT)
        (top / "dir/new").touch()
        seen += [times(top / "dir")[1]]
        os.utime(top / "dir", ns=MOMENT)
        os.unlink(top / "dir/new")
        seen += [times(top / "dir")[1]]
        os.utime(top / "dir", ns=MOMENT)
        return seen

    parity.check([Case("times", build, call)], state)


def test_user_attributes(parity: Parity, state: State) -> None:
    def build(top: Path) -> None:
        (top / "file").write_bytes(b"x")
        (top / "dir").mkdir()
        (top / "link").symlink_to("file")
        for name in ("file", "dir"):
            os.setxattr(top / name, "user.old", b"old value")
            os.setxattr(top / name, "user.gone", b"to go")

    def listed(path: Path) -> list[str]:
        return sorted(os.listxattr(path))

    def call(top: Path) -> object:
        seen: list[object] = []
        for name in ("file", "dir"):
            path = top / name
            seen += [listed(path), os.getxattr(path, "user.old")]
            seen += [attempt(os.setxattr, path, "user.new", b"\0bytes\xff")]
            seen += [attempt(os.setxattr, path, "user.new", b"2", os.XATTR_CREATE)]
            seen += [attempt(os.setxattr, path, "user.none", b"2", os.XATTR_REPLACE)]
            seen += [attempt(os.setxattr, path, "user.old", b"3", os.XATTR_REPLACE)]
            seen += [attempt(os.setxattr, path, "user.first", b"4", os.XATTR_CREATE)]
            seen += [attempt(os.setxattr, path, "user.empty", b"")]
            seen += [attempt(os.removexattr, path, "user.gone")]
            seen += [attempt(os.removexattr, path, "user.gone")]
            seen += [attempt(os.getxattr, path, f"user.{n}") for n in ("new", "old", "gone", "no")]
            seen += [attempt(os.getxattr, path, "user.empty"), listed(path)]
            seen += [attempt(os.setxattr, path, "no-namespace", b"x")]
            seen += [attempt(os.setxattr, path, "user." + "n" * 300, b"x")]
        os.rename(top / "file", top / "moved")
        seen += [listed(top / "moved")]
        shutil.copy2(top / "moved", top / "xattred")
        seen += [
            listed(top / "xattred"),
            os.getxattr(top / "xattred", "user.first"),
        ]
        seen += [attempt(os.setxattr, top / "link", "user.x", b"", 0, follow_symlinks=False)]
        return seen

    parity.check([Case("user attributes", build, call)], state)
    # Attributes are no part of what `check` compares on the share.
    place = next(path for path in sorted(parity.shared.glob("t*/0/xattred"), reverse=True))
    assert os.getxattr(place, "user.old") == b"3"
    assert "user.gone" not in os.listxattr(place)


def test_statx(parity: Parity, state: State) -> None:
    def build(top: Path) -> None:
        (top / "file").write_bytes(b"some bytes")
        (top / "dir").mkdir()
        (top / "link").symlink_to("file")
        for name in ("file", "dir"):
            os.utime(top / name, ns=MOMENT)

    def call(top: Path) -> object:
        seen: list[object] = []
        how = (0, AT_SYMLINK_NOFOLLOW, AT_STATX_FORCE_SYNC, AT_STATX_DONT_SYNC, 0x6000, 1 << 20)
        for name, flags in itertools.product(("file", "dir", "link", "none", "file/x"), how):
            found = attempt(statx, top / name, STATX_BASIC_STATS, flags)
            if isinstance(found, Statx):
                # A disk counts a directory's size and its subdirectories in its own way.
                found = found._replace(mask=found.mask & STATX_BASIC_STATS)
                if stat.S_ISDIR(found.mode):
                    found = found._replace(nlink=0, size=0)
                if found.mtime_ns not in MOMENT:
                    found = found._replace(mtime_ns=0)
            seen += [found]
        return seen

    parity.check([Case("statx", build, call)], state)
