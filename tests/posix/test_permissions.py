"""Who may do what: by supplementary groups, with other effective ids, to times and attributes."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path

from tests.plain_user import PLAIN_GID, PLAIN_UID
from tests.posix.kernel import (
    AT_SYMLINK_NOFOLLOW,
    UTIME_NOW,
    UTIME_OMIT,
    getxattr,
    listxattr,
    setxattr,
    utimensat,
)
from tests.posix.parity import OLD, Case, Parity, State, attempt
from tests.posix.test_attributes import OTHER_UID, calls, one, status
from wbcache.probe import within

OTHER_GROUP = 777

CLASSES: dict[str, tuple[int, int]] = {
    "owner": (PLAIN_UID, 0),
    "group": (0, PLAIN_GID),
    "supplementary group": (0, OTHER_GROUP),
    "other": (0, 0),
}
"""What a user without privileges, in `OTHER_GROUP` too, is to a file of that owner and group."""


def test_each_class_of_users(parity: Parity, state: State) -> None:
    """A user gets the bits of the first class they are in, and of no other."""
    masks = (0o700, 0o070, 0o007)
    cases = []
    for (who, (uid, gid)), mask, bits in itertools.product(CLASSES.items(), masks, range(1, 8)):
        for mode in {mask & bits * 0o111, 0o777 ^ (mask & bits * 0o111)}:
            for directory in (False, True):
                name = f"{who} {mode:o} {'directory' if directory else 'file'}"
                build = one(mode, uid, gid, directory=directory)
                cases.append(Case(name, build, calls))
    unique = list({case.name: case for case in cases}.values())
    parity.check(unique[:: 5 if state == "dirty" else 11], state, user=True, groups=[OTHER_GROUP])


def test_effective_ids(parity: Parity, state: State) -> None:
    """access(2) asks for the real user, AT_EACCESS and everything else for the effective one."""

    def asked(real: int, effective: int) -> Callable[[Path], object]:
        def ask(top: Path) -> object:
            def work() -> object:
                os.setgroups([])
                os.setresgid(*((PLAIN_GID,) * 3))
                os.setresuid(real, effective, 0)
                seen: list[object] = []
                for name in ("x", "x/in", "none"):
                    for mode in (os.F_OK, os.R_OK, os.W_OK, os.X_OK, os.R_OK | os.W_OK):
                        seen += [attempt(os.access, top / name, mode)]
                        seen += [attempt(os.access, top / name, mode, effective_ids=True)]
                return [*seen, attempt(os.listdir, top / "x"), attempt((top / "x").read_bytes)]

            return within(30, work)

        return ask

    cases = [
        Case(f"{mode:o} {directory} {ids}", one(mode, uid, 0, directory=directory), asked(*ids))
        for mode in (0o700, 0o070, 0o604, 0o311, 0)
        for directory in (False, True)
        for uid in (0, PLAIN_UID)
        if uid == PLAIN_UID or mode & 0o77
        for ids in ((PLAIN_UID, 0), (0, PLAIN_UID), (PLAIN_UID, PLAIN_UID))
    ]
    unique = list({case.name: case for case in cases}.values())
    parity.check(unique, state)


def times(path: str) -> list[object]:
    """Access and modification time; later ones than a test can set are only known to be later."""
    st = os.lstat(path)
    # Following a link sets a disk's access time of it.
    both = (0 if stat.S_ISLNK(st.st_mode) else st.st_atime_ns, st.st_mtime_ns)
    return [ns if ns < OLD else "now" for ns in both]


def test_setting_times(parity: Parity, state: State) -> None:
    """utimensat: now, as it is, explicit; on files and links; and who may do which."""
    now, omit = (0, UTIME_NOW), (0, UTIME_OMIT)
    explicit = (981_173_106, 123_456_789)
    choices = (now, omit, explicit, (0, 0), (-5, 999_999_999), (0, 10**9), (7, -1))
    owners = {"mine": (PLAIN_UID, 0o644), "writable": (0, 0o666), "closed": (OTHER_UID, 0o644)}

    def build(top: Path) -> None:
        for name, (uid, mode) in owners.items():
            (top / name).write_bytes(b"x")
            (top / name).chmod(mode)
            (top / f"{name}-dir").mkdir()
            (top / f"{name}-dir").chmod(mode | mode >> 2 & 0o111)
            (top / f"{name}-link").symlink_to(name)
            for of in (name, f"{name}-dir", f"{name}-link"):
                os.chown(top / of, uid, 0, follow_symlinks=False)
                os.utime(top / of, ns=(10**17, 2 * 10**17), follow_symlinks=False)

    def call(top: Path) -> object:
        seen: list[object] = []
        for name, kind in itertools.product(owners, ("", "-dir", "-link")):
            path = f"{top}/{name}{kind}"
            for access, change in itertools.product(choices, choices):
                for flags in (0, AT_SYMLINK_NOFOLLOW):
                    seen += [attempt(utimensat, path, access, change, flags)]
                    seen += [times(path), times(f"{top}/{name}")]
        seen += [attempt(utimensat, f"{top}/{n}", omit, now) for n in ("none", "mine/x", "")]
        return [*seen, attempt(utimensat, f"{top}/mine", now, now, 0x8000)]

    parity.check([Case("times", build, call)], state)
    parity.check([Case("times", build, call)], state, user=True)


def test_owners_and_groups(parity: Parity, state: State) -> None:
    """chown: who may give what to whom, and what becomes of the set-id bits."""

    def build(top: Path) -> None:
        for who, (uid, gid) in CLASSES.items():
            (top / who).write_bytes(b"x")
            (top / f"{who} dir").mkdir()
            (top / f"{who} link").symlink_to(who)
            for of in ("", " dir", " link"):
                os.chown(top / f"{who}{of}", uid, gid, follow_symlinks=False)
            (top / who).chmod(0o6775)
            (top / f"{who} dir").chmod(0o6775)

    def call(top: Path) -> object:
        seen: list[object] = []
        ids = (-1, 0, PLAIN_UID, OTHER_UID)
        groups = (-1, PLAIN_GID, OTHER_GROUP, 0)
        for who, kind in itertools.product(CLASSES, ("", " dir", " link")):
            path = top / f"{who}{kind}"
            for uid, gid in itertools.product(ids, groups):
                for follow in (True, False):
                    seen += [attempt(os.chown, path, uid, gid, follow_symlinks=follow)]
                    seen += [status(path), status(top / who)]
                seen += [attempt(os.chmod, path, 0o6775), status(path)]
        return seen

    parity.check([Case("owners", build, call)], state)
    parity.check([Case("owners", build, call)], state, user=True)
    parity.check([Case("owners", build, call)], state, user=True, groups=[OTHER_GROUP])


def test_user_attributes_of_others(parity: Parity, state: State) -> None:
    def build(top: Path) -> None:
        for mode, uid in itertools.product((0o644, 0o600, 0o666, 0o1777), (0, PLAIN_UID)):
            for kind in ("file", "dir"):
                path = top / f"{kind}{mode:o}-{uid}"
                path.touch() if kind == "file" else path.mkdir()
                os.setxattr(path, "user.old", b"old value")
                os.chown(path, uid, uid)
                path.chmod(mode)

    def call(top: Path) -> object:
        seen: list[object] = []
        for path in sorted(top.iterdir()):
            seen += [attempt(os.getxattr, path, "user.old"), attempt(os.listxattr, path)]
            seen += [attempt(os.setxattr, path, "user.new", b"1")]
            seen += [attempt(os.removexattr, path, "user.old")]
        return seen

    parity.check([Case("attributes", build, call)], state)
    parity.check([Case("attributes", build, call)], state, user=True)


def test_attributes_asked_for_in_all_ways(parity: Parity, state: State) -> None:
    """Room that is too small, flags that exclude each other, values and names too long."""

    def build(top: Path) -> None:
        for name in ("file", "dir"):
            path = top / name
            path.touch() if name == "file" else path.mkdir()
            os.setxattr(path, "user.one", b"12345")
            os.setxattr(path, "user.empty", b"")
        os.mkfifo(top / "fifo")
        (top / "link").symlink_to("file")

    def call(top: Path) -> object:
        seen: list[object] = []
        for name in ("file", "dir", "link", "fifo", "none", "file/x"):
            if name == "fifo" and state == "share":
                continue
            path = top / name
            for room in (0, 1, 4, 5, 6, 100):
                seen += [attempt(getxattr, path, "user.one", room)]
                seen += [attempt(getxattr, path, "user.empty", room)]
            seen += [attempt(listxattr, path, room) for room in (0, 1, 18, 19, 20, 100)]
            for flags in (os.XATTR_CREATE, os.XATTR_REPLACE, 4, 8):
                for attribute in ("user.one", f"user.new{flags}"):
                    seen += [attempt(setxattr, path, attribute, b"value", flags)]
            for attribute in ("", "user", "user.", ".x", "user." + "n" * 250, "user." + "n" * 251):
                seen += [attempt(setxattr, path, attribute, b"v")]
                seen += [attempt(getxattr, path, attribute, 10)]
            seen += [attempt(setxattr, path, "user.long", bytes(1 << 16 | 1))]
            seen += [attempt(lambda at=path: sorted(os.listxattr(at)))]
        return seen

    parity.check([Case("attributes", build, call)], state)


def test_kinds_that_mknod_makes(parity: Parity, state: State) -> None:
    kinds = (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK)
    wrong = (stat.S_IFDIR, stat.S_IFLNK, 0o070000)

    def build(top: Path) -> None:
        (top / "taken").touch()

    def call(top: Path) -> object:
        seen: list[object] = []
        for kind, mode in itertools.product((*kinds, *wrong), (0o644, 0o7777)):
            path = top / f"{kind:o}-{mode:o}"
            seen += [attempt(os.mknod, path, kind | mode, os.makedev(1, 3))]
            seen += [attempt(status, path)]
            seen += [attempt(lambda at=path: os.stat(at).st_rdev)]
            seen += [attempt(os.mknod, top / "taken", kind | mode)]
            seen += [attempt(os.mknod, top / "none/x", kind | mode)]
            # Only what the share can have stays for the comparison of what is left there.
            if kind not in (0, stat.S_IFREG):
                attempt(os.unlink, path)
        return seen

    parity.check([Case("kinds", build, call)], state)
    parity.check([Case("kinds", build, call)], state, user=True)
