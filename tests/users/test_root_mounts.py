"""A root's mount that others use: every file belongs to whoever made it, here and on the share."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounting import NEVER_BY_ITSELF, Mounted
from tests.plain_user import PLAIN_GID, PLAIN_UID, as_plain_user
from tests.posix.parity import attempt
from tests.users.acl import ACCESS, DEFAULT, acl

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("fuse"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else"),
]

TEAM = 61999
OTHER = 61235


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounted]:
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF) as mounted:
        yield mounted


def owners(top: Path) -> dict[str, tuple[int, int, str]]:
    """Owner, group and mode of everything below a directory."""
    found = {}
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if name != ".wbcache"]
        for name in names + files:
            path = Path(directory, name)
            st = path.lstat()
            found[str(path.relative_to(top))] = (
                st.st_uid,
                st.st_gid,
                oct(stat.S_IMODE(st.st_mode)),
            )
    return found


def _make(top: Path) -> list[object]:
    """What anybody may try in a directory open to everybody."""
    (top / "file").write_text("text")
    (top / "dir").mkdir()
    os.symlink("file", top / "link")
    os.mkfifo(top / "fifo", 0o620)
    os.chmod(top / "file", 0o4750)
    seen = [attempt(os.chown, top / "file", OTHER, -1), attempt(os.chown, top / "file", -1, TEAM)]
    seen += [oct(os.stat(top / "file").st_mode)]
    before = os.umask(0o077)
    (top / "masked").write_text("text")
    os.mkdir(top / "masked-dir", 0o2777)
    os.umask(before)
    seen += [attempt((top.parent / "team" / "file").write_text, "x")]
    seen += [attempt((top.parent / "team" / "dir").mkdir)]
    seen += [attempt((top.parent / "private" / "file").read_text)]
    seen += [attempt(os.listdir, top.parent / "private")]
    seen += [attempt(os.unlink, top.parent / "sticky" / "of-root")]
    seen += [attempt(os.rename, top.parent / "sticky" / "of-root", top / "stolen")]
    seen += [attempt(os.utime, top.parent / "sticky" / "of-root", (1, 1))]
    seen += [attempt(os.utime, top.parent / "sticky" / "of-root")]
    seen += [attempt(os.chmod, top.parent / "sticky" / "of-root", 0o777)]
    return seen


def _prepare(top: Path) -> None:
    for name, mode in ("root", 0o755), ("user", 0o777), ("member", 0o777):
        (top / name).mkdir()
        (top / name).chmod(mode)
    for name, mode, gid in ("team", 0o2770, TEAM), ("private", 0o700, 0), ("sticky", 0o1777, 0):
        (top / name).mkdir()
        os.chown(top / name, 0, gid)
        (top / name).chmod(mode)
    (top / "private" / "file").write_text("secret")
    (top / "sticky" / "of-root").write_text("text")
    os.chmod(top / "sticky" / "of-root", 0o646)


def test_files_belong_to_whoever_makes_them(mount: Mounted, plain_user_dir: Path) -> None:
    plain_user_dir.chmod(0o755)
    native = plain_user_dir / "native"
    native.mkdir()
    seen: dict[Path, list[object]] = {}
    for top in (mount.path, native):
        _prepare(top)
        works = [functools.partial(_make, top / name) for name in ("user", "member", "root")]
        seen[top] = [
            as_plain_user(works[0]),
            as_plain_user(works[1], uid=OTHER, gid=OTHER, groups=[TEAM]),
            works[2](),
        ]
    assert seen[mount.path] == seen[native]
    expected = owners(native)
    assert owners(mount.path) == expected
    assert expected["user/file"][:2] == (PLAIN_UID, PLAIN_GID)
    assert expected["team/dir"] == (OTHER, TEAM, "0o2755")
    mount.flush()
    shared = owners(mount.source)
    assert shared == {k: v for k, v in expected.items() if not k.endswith("fifo")}
    assert owners(mount.path) == expected
    mount.kill()
    mount.remount()
    assert owners(mount.path) == expected


def test_a_rewritten_file_keeps_the_list_of_who_may_read_it(mount: Mounted) -> None:
    """The mount shows no POSIX ACLs, and takes none, but what the share has stays there."""
    (mount.path / "dir").mkdir()
    (mount.path / "file").write_text("text")
    mount.flush()
    wanted = acl(OTHER)
    try:
        os.setxattr(mount.source / "file", ACCESS, wanted)
        os.setxattr(mount.source / "dir", DEFAULT, wanted)
    except OSError:
        pytest.skip("the disk has no ACLs")
    assert attempt(os.setxattr, mount.path / "file", ACCESS, wanted) == "ENOTSUP"
    mount.flush()
    for number in range(2):
        (mount.path / "file").write_text(f"text {number}")
        mount.flush()
        assert (mount.source / "file").read_text() == f"text {number}"
        assert os.getxattr(mount.source / "file", ACCESS) == wanted
    (mount.path / "dir" / "new").write_text("text")
    mount.flush()
    assert OTHER.to_bytes(4, "little") in os.getxattr(mount.source / "dir" / "new", ACCESS)
