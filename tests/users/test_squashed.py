"""A share whose server takes everybody for nobody (root_squash, all_squash)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, contents
from tests.plain_user import PLAIN_GID, PLAIN_UID, as_plain_user
from tests.posix.parity import attempt
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("fuse"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root is squashed"),
]

ALICE = 61235


@pytest.fixture
def squashed(tmp_path: Path) -> Iterator[tuple[FaultShare, Mounted]]:
    """A squashed share that anybody may write to, mounted by root."""
    backing = tmp_path / "backing"
    backing.mkdir()
    backing.chmod(0o777)
    with (
        FaultShare(backing, squash=True) as share,
        Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount,
    ):
        yield share, mount
        assert share.errors() == ""


def owners(top: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for name, (mode, _) in contents(top).items():
        st = os.lstat(top / name)
        found[name] = (st.st_uid, st.st_gid)
        assert stat.S_IFMT(mode) == stat.S_IFMT(st.st_mode)
    return found


def told(mount: Mounted) -> list[str]:
    return [str(event["text"]) for event in mount.status()["events"]]


def test_everything_goes_through_and_owners_are_kept_here(
    squashed: tuple[FaultShare, Mounted],
) -> None:
    share, mount = squashed
    top = mount.path
    (top / "run" / "deep").mkdir(parents=True)
    (top / "run").chmod(0o777)
    for number in range(5):
        (top / "run" / f"{number}").write_bytes(b"x" * 1000 * number)
    os.symlink("0", top / "run" / "latest")
    os.link(top / "run" / "1", top / "run" / "hard")
    as_plain_user(lambda: (top / "run" / "alice").write_text("text"), uid=ALICE, gid=ALICE)
    os.chmod(top / "run" / "alice", 0o600)
    mount.flush()
    # Given away, appended to, patched, replaced, renamed, made read-only, removed.
    for number in range(5):
        os.chown(top / "run" / f"{number}", ALICE, ALICE)
    with open(top / "run" / "1", "ab") as file:
        file.write(b"more")
    with open(top / "run" / "2", "r+b") as file:
        file.write(b"patch")
    (top / "run" / "3").write_bytes(b"other")
    os.rename(top / "run" / "4", top / "run" / "deep" / "4")
    os.utime(top / "run" / "0", ns=(1, 10**18))
    (top / "run" / "read-only").mkdir()
    (top / "run" / "read-only" / "file").write_text("text")
    os.chmod(top / "run" / "read-only", 0o555)
    os.unlink(top / "run" / "hard")
    mount.flush()
    assert not mount.status()["errors"]
    assert contents(share.backing) == contents(top)
    assert set(owners(share.backing).values()) == {(PLAIN_UID, PLAIN_GID)}
    assert told(mount) == ["the share can't store file owners; they are kept here only"]
    kept = owners(top)
    assert kept["run/0"] == kept["run/alice"] == (ALICE, ALICE)
    assert kept["run"] == kept["run/read-only/file"] == (0, 0)
    # Nobody's now, but who made it may read it, and who did not may not.
    check = (top / "run" / "alice").read_text
    assert as_plain_user(lambda: attempt(check), uid=ALICE, gid=ALICE) == "text"
    assert as_plain_user(lambda: attempt(check)) == "EACCES"
    assert mount.umount().returncode == 0
    mount.remount()
    assert owners(top) == kept


def test_what_the_server_keeps_from_nobody_is_an_error_where_it_belongs(
    squashed: tuple[FaultShare, Mounted],
) -> None:
    share, mount = squashed
    behind, top = share.backing, mount.path
    (behind / "theirs").mkdir()
    for name, mode in ("secret", 0o600), ("readable", 0o644), ("writable", 0o666):
        (behind / "theirs" / name).write_text("text\n")
        os.chown(behind / "theirs" / name, ALICE, ALICE)
        os.chmod(behind / "theirs" / name, mode)
    (behind / "closed").mkdir(mode=0o700)
    (behind / "closed" / "file").write_text("text\n")
    os.chown(behind / "theirs", ALICE, ALICE)
    (behind / "theirs").chmod(0o755)
    wait_until(lambda: (top / "closed").exists(), "the mount shows what is on the share")
    assert attempt((top / "theirs" / "readable").read_text) == "text\n"
    assert attempt((top / "theirs" / "secret").read_text) == "EACCES"
    assert attempt(os.listdir, top / "closed") == "EACCES"
    assert attempt((top / "closed" / "file").read_text) == "EACCES"

    # What may be written arrives; of the rest only what must be refused is, and the mount says so.
    for name in ("writable", "readable"):
        with open(top / "theirs" / name, "a") as file:
            file.write("more\n")
    (top / "beside").write_text("text\n")
    os.utime(top / "theirs" / "writable", ns=(1, 10**18))
    os.chmod(top / "theirs" / "writable", 0o640)
    remaining = mount.client.flush([b""], 20.0)
    assert [row["path"] for row in remaining] == ["theirs/readable"], remaining
    assert os.strerror(errno.EACCES) in remaining[0]["reason"]
    assert (behind / "theirs" / "writable").read_text() == "text\nmore\n"
    assert (behind / "theirs" / "readable").read_text() == "text\n"
    assert (behind / "beside").read_text() == "text\n"
    # The attributes that only its owner can set are kept here.
    st = (top / "theirs" / "writable").stat()
    assert (st.st_mtime_ns, oct(stat.S_IMODE(st.st_mode))) == (10**18, "0o640")
    refusals = [text for text in told(mount) if "refuses the" in text]
    assert len(refusals) == len(set(refusals)) <= 2, refusals
    # Made writable on the server, it goes.
    (behind / "theirs" / "readable").chmod(0o666)
    mount.flush()
    assert (behind / "theirs" / "readable").read_text() == "text\nmore\n"
