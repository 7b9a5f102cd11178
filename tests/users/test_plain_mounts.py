"""Mounts of users without privileges: whom they let in, and what becomes of modes and groups."""

from __future__ import annotations

import errno
import functools
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.mounting import NEVER_BY_ITSELF, Mounted, wbcache
from tests.plain_user import PLAIN_GID, PLAIN_UID, as_plain_user, plain_command
from tests.posix.parity import attempt
from tests.users.elsewhere import privately
from wbcache.errors import UsageError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("fuse"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else"),
]

_OTHER = pwd.getpwnam("daemon")
OTHER_UID, OTHER_GID = _OTHER.pw_uid, _OTHER.pw_gid
"""A second user; one without a name can't mount."""

TEAM = 61999
"""A group that the users are in besides their own."""


def mounted(
    top: Path,
    *,
    options: str = "",
    uid: int = PLAIN_UID,
    gid: int = PLAIN_GID,
    groups: Sequence[int] = (),
) -> Mounted:
    """A mount of a user, with everything in a directory of theirs."""
    for name in ("share", "mnt"):
        (top / name).mkdir(exist_ok=True)
        os.chown(top / name, uid, gid)
    return Mounted(
        top / "share",
        cache=top / "cache",
        mountpoint=top / "mnt",
        config=NEVER_BY_ITSELF,
        options=options,
        prefix=plain_command(str(top), uid=uid, gid=gid, groups=groups),
    )


def put(path: Path, text: str = "text") -> None:
    path.write_text(text)


def owner(path: Path) -> tuple[int, int, str]:
    st = os.lstat(path)
    return st.st_uid, st.st_gid, oct(stat.S_IMODE(st.st_mode))


# -- who gets in -----------------------------------------------------------------------------------


@pytest.mark.parametrize("conf", ["", "user_allow_other\n"])
def test_others_get_in_only_where_the_administrator_allows_it(
    plain_user_dir: Path, conf: str
) -> None:
    top = plain_user_dir
    top.chmod(0o755)
    modes = {"open": 0o644, "own": 0o600}
    (top / "share").mkdir()
    (top / "share" / "data").touch()  # an empty one costs a warning

    def look() -> object:
        return attempt((top / "mnt" / "open").read_text), attempt((top / "mnt" / "own").read_text)

    def check() -> tuple[str, object, object]:
        with mounted(top, options="allow_other") as mount:
            for name, mode in modes.items():
                as_plain_user(lambda at=mount.path / name: put(at))  # type: ignore[misc]
                as_plain_user(lambda at=mount.path / name, mode=mode: os.chmod(at, mode))  # type: ignore[misc]
            other = as_plain_user(look, uid=OTHER_UID, gid=OTHER_GID)
            mount.flush()
            return mount.said, other, look()

    said, other, root = privately(check, plain_user_dir, fuse_conf=conf)
    if conf:
        assert said == ""
        # The kernel applies the modes, to all but root.
        assert (other, root) == (("text", "EACCES"), ("text", "text"))
    else:
        (line,) = said.splitlines()
        assert "warning: allow_other is left out" in line and "user_allow_other" in line
        assert other == root == ("EACCES", "EACCES")
    for name, mode in modes.items():
        assert owner(top / "share" / name) == (PLAIN_UID, PLAIN_GID, oct(mode))


@pytest.mark.parametrize("option", ["allow_root", "user_id=0", "suid"])
def test_what_is_no_option_costs_no_mount(tmp_path: Path, option: str) -> None:
    for name in ("share", "mnt"):
        (tmp_path / name).mkdir()
    done = wbcache(
        *("mount", "-o", option, "--cache-dir", tmp_path / "cache"),
        *(tmp_path / "share", tmp_path / "mnt"),
    )
    assert done.returncode == UsageError.exit_code
    (line,) = done.stderr.splitlines()
    assert f"-o {option}: is not a known option" in line and "allow_other" in line
    assert not (tmp_path / "cache").exists()


def test_two_users_at_once_each_with_a_mount(plain_user_dir: Path) -> None:
    plain_user_dir.chmod(0o755)

    def check() -> None:
        users = [(PLAIN_UID, PLAIN_GID), (OTHER_UID, OTHER_GID)]
        tops = [plain_user_dir / str(uid) for uid, _ in users]
        for top, (uid, gid) in zip(tops, users, strict=True):
            top.mkdir(mode=0o755)
            os.chown(top, uid, gid)
        with (
            mounted(tops[0]) as first,
            mounted(tops[1], uid=OTHER_UID, gid=OTHER_GID) as second,
        ):
            mounts = [first, second]
            for mount, (uid, gid) in zip(mounts, users, strict=True):
                as_plain_user(lambda at=mount.path: put(at / "file"), uid=uid, gid=gid)  # type: ignore[misc]
            for mount, (uid, gid) in zip(mounts, reversed(users), strict=True):
                seen = as_plain_user(
                    lambda at=mount.path: attempt(os.listdir, at),  # type: ignore[misc]
                    uid=uid,
                    gid=gid,
                )
                assert seen == "EACCES"
                # Nor may they end it.
                prefix = plain_command(str(mount.path.parent), uid=uid, gid=gid)
                assert wbcache("umount", mount.path, prefix=prefix).returncode != 0
            # Killed and mounted again, with the other one beside it.
            first.kill()
            first.remount()
            assert as_plain_user((first.path / "file").read_text) == "text"
            for mount, (uid, gid) in zip(mounts, users, strict=True):
                done = mount.umount()
                assert done.returncode == 0, done.stderr
                assert owner(mount.source / "file")[:2] == (uid, gid)

    privately(check, plain_user_dir)


# -- modes that deny their own owner ---------------------------------------------------------------
#
# Root may write where no mode allows it, so a daemon of root never meets this.


def _read_only_tree(top: Path) -> None:
    """As `cp -a` of one, or `chmod -R a-w` behind an unpacked archive, leaves it."""
    (top / "data" / "deep").mkdir(parents=True)
    for directory in (top / "data", top / "data" / "deep"):
        put(directory / "file")
        os.symlink("file", directory / "link")
        os.chmod(directory / "file", 0o444)
    for directory in (top / "data" / "deep", top / "data"):
        os.utime(directory, ns=(1, 10**18))
        os.chmod(directory, 0o555)


def _written_while_read_only(top: Path) -> None:
    """A descriptor that is open for writing goes on to be, whatever becomes of the mode."""
    fd = os.open(top / "object", os.O_CREAT | os.O_WRONLY, 0o444)
    os.write(fd, b"first")
    os.close(fd)
    with open(top / "log", "w") as file:
        file.write("one\n")
        file.flush()
        os.chmod(top / "log", 0o444)
        os.fsync(file.fileno())


def _restricted(top: Path) -> None:
    for mode in (0o000, 0o300, 0o100, 0o070):
        directory = top / f"{mode:o}"
        directory.mkdir()
        put(directory / "file")
        os.chmod(directory, mode)


def _changed_in_between(top: Path) -> None:
    """What is read-only on the share already is changed, with write permission for a moment."""
    data = top / "data"
    os.chmod(data, 0o755)
    put(data / "new")
    os.chmod(data / "file", 0o644)
    put(data / "file", "other text")
    os.chmod(data / "file", 0o444)
    os.rename(data / "link", data / "moved")
    os.chmod(data, 0o555)


def _removed(top: Path) -> None:
    """`chmod -R u+w` and `rm -r`."""
    for directory in (top / "data", top / "data" / "deep"):
        os.chmod(directory, 0o755)
    shutil.rmtree(top / "data")


def _facts(top: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for directory, names, files in os.walk(top):
        for name in names + files:
            if name == ".wbcache" or "/.wbcache" in directory:
                continue
            path = Path(directory, name)
            st = path.lstat()
            data = path.read_text() if path.is_file() and not path.is_symlink() else ""
            times = st.st_mtime_ns if st.st_mtime_ns == 10**18 else 0
            found[str(path.relative_to(top))] = (*owner(path), data, times)
    return found


STORIES: dict[str, list[Callable[[Path], None]]] = {
    "unpacked": [_read_only_tree],
    "written": [_written_while_read_only],
    "restricted": [_restricted],
    "changed": [_read_only_tree, _changed_in_between],
    "removed": [_read_only_tree, _removed],
}
"""What is done in directories of these names, step by step."""


@pytest.mark.parametrize("flushed", [False, True], ids=["at-once", "step-by-step"])
def test_what_a_user_makes_read_only_arrives_all_the_same(
    plain_user_dir: Path, flushed: bool
) -> None:
    native = plain_user_dir / "native"
    native.mkdir()
    os.chown(native, PLAIN_UID, PLAIN_GID)

    def take(top: Path, step: int) -> None:
        for name, steps in STORIES.items():
            (top / name).mkdir(exist_ok=True)
            for work in steps[step : step + 1]:
                work(top / name)

    def check() -> None:
        with mounted(plain_user_dir) as mount:
            for step in range(2):
                for top in (native, mount.path):
                    as_plain_user(functools.partial(take, top, step))
                if flushed:
                    mount.flush()
            mount.flush()
            assert not mount.status()["errors"]
            done = mount.umount()
            assert done.returncode == 0, done.stderr

    privately(check, plain_user_dir)
    assert _facts(plain_user_dir / "share") == _facts(native)


def test_a_read_only_file_grows_on_after_it_has_arrived(plain_user_dir: Path) -> None:
    def write(path: Path, flush: Callable[[], None]) -> None:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o400)
        for number in range(3):
            os.write(fd, b"line %d\n" % number)
            flush()
        os.close(fd)

    def check() -> None:
        with mounted(plain_user_dir) as mount:
            as_plain_user(lambda: write(mount.path / "log", mount.flush))
            assert not mount.status()["errors"]

    privately(check, plain_user_dir)
    log = plain_user_dir / "share" / "log"
    assert log.read_text() == "line 0\nline 1\nline 2\n"
    assert owner(log) == (PLAIN_UID, PLAIN_GID, "0o400")


# -- groups ----------------------------------------------------------------------------------------


def test_a_user_gives_files_to_a_group_that_they_are_in(plain_user_dir: Path) -> None:
    top = plain_user_dir

    def work(at: Path) -> None:
        put(at / "file")
        (at / "dir").mkdir()
        os.symlink("file", at / "link")
        for name in ("file", "dir", "link"):
            os.chown(at / name, -1, TEAM, follow_symlinks=False)
        os.chmod(at / "dir", 0o2775)
        put(at / "dir" / "inherits")
        (at / "dir" / "below").mkdir()
        assert attempt(os.chown, at / "file", -1, OTHER_GID) == "EPERM"
        assert attempt(os.chown, at / "file", OTHER_UID, -1) == "EPERM"
        os.umask(0o027)
        put(at / "masked")
        (at / "masked-dir").mkdir()

    def check() -> tuple[list[str], dict[str, object]]:
        with mounted(top, groups=[TEAM]) as mount:
            as_plain_user(lambda: work(mount.path), groups=[TEAM])
            mount.flush()
            told = [event["text"] for event in mount.status()["events"]]
            shown = as_plain_user(lambda: _owners(mount.path), groups=[TEAM])
            mount.kill()
            mount.remount()
            assert as_plain_user(lambda: _owners(mount.path), groups=[TEAM]) == shown
            return told, shown

    told, shown = privately(check, plain_user_dir)
    expected = {
        "file": (PLAIN_UID, TEAM, "0o644"),
        "dir": (PLAIN_UID, TEAM, "0o2775"),
        "link": (PLAIN_UID, TEAM, "0o777"),
        "dir/inherits": (PLAIN_UID, TEAM, "0o644"),
        "dir/below": (PLAIN_UID, TEAM, "0o2755"),
        "masked": (PLAIN_UID, PLAIN_GID, "0o640"),
        "masked-dir": (PLAIN_UID, PLAIN_GID, "0o750"),
    }
    assert shown == expected
    assert _owners(top / "share") == expected
    assert told == []


def _owners(top: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if name != ".wbcache"]
        for name in names + files:
            path = Path(directory, name)
            found[str(path.relative_to(top))] = owner(path)
    return found


def test_a_plain_user_is_told_in_one_line_what_is_missing(plain_user_dir: Path) -> None:
    top = plain_user_dir
    for name in ("share", "mnt"):
        (top / name).mkdir()
        os.chown(top / name, PLAIN_UID, PLAIN_GID)

    def refused(*arguments: object, uid: int = PLAIN_UID) -> str:
        prefix = plain_command(str(top), uid=uid)
        done = wbcache("mount", *map(str, arguments), prefix=prefix)
        assert done.returncode != 0
        (line,) = done.stderr.splitlines()
        return line

    def check() -> list[str]:
        root = top / "of-root"
        root.mkdir(mode=0o755)
        cache = top / "cache"
        lines = [
            refused("--cache-dir", root / "cache", top / "share", top / "mnt"),
            refused("--cache-dir", cache, top / "share", root),
            refused("--cache-dir", cache, top / "share", top / "mnt", uid=61235),
        ]
        os.chmod("/dev/fuse", 0o600)
        lines.append(refused("--cache-dir", cache, top / "share", top / "mnt"))
        assert subprocess.run(["mountpoint", "-q", top / "mnt"], check=False).returncode != 0
        return lines

    lines = privately(check, plain_user_dir)
    assert "of-root is not writable" in lines[0] and "--cache-dir" in lines[0]
    assert "is not writable" in lines[1] and "directory of your own" in lines[1]
    assert "mounts only for users with a name, and uid 61235 has none" in lines[2]
    assert f"cannot be opened ({os.strerror(errno.EACCES)})" in lines[3]
