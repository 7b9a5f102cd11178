"""The share without faults behaves as the directory behind it."""

from __future__ import annotations

import mmap
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.faultshare.tree import describe
from tests.faultshare.walk import EXCHANGE, NOREPLACE, WHITEOUT, Walk, outcome, rename_with, start


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_give_what_a_directory_gives(
    share: FaultShare, tmp_path: Path, seed: int
) -> None:
    plain = tmp_path / "plain"
    start(plain)
    start(share.mountpoint)
    walk = Walk(seed)
    done = []
    for _ in range(2500):
        name, step = walk.step()
        native, served = outcome(step, plain), outcome(step, share.mountpoint)
        done.append(f"{name}: {native!r:.60}")
        assert served == native, done[-5:]
    assert describe(share.mountpoint) == describe(plain)
    assert describe(share.backing) == describe(plain)
    assert len(describe(plain)) > 5, "the walk has built something"


def test_mount_table(share: FaultShare) -> None:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    line = next(line for line in lines if str(share.mountpoint) in line)
    assert line.split()[:3] == ["faultshare", str(share.mountpoint), "fuse.faultshare"]
    assert "default_permissions" in line


def test_inode_numbers_are_those_of_the_backing(share: FaultShare) -> None:
    (share.mountpoint / "d").mkdir()
    (share.mountpoint / "d/f").touch()
    for name in ("", "d", "d/f"):
        assert (share.mountpoint / name).stat().st_ino == (share.backing / name).stat().st_ino
    with os.scandir(share.mountpoint / "d") as entries:
        assert [e.inode() for e in entries] == [(share.backing / "d/f").stat().st_ino]


def test_hard_links_are_one_file(share: FaultShare) -> None:
    a, b = share.mountpoint / "a", share.mountpoint / "b"
    a.write_text("one")
    os.link(a, b)
    with a.open("r+") as file:
        a.unlink()
        file.write("two")
    assert b.read_text() == "two"
    assert b.stat().st_nlink == 1
    assert [(op.path, op.unlinked) for op in share.log() if op.op == "write"] == [
        ("a", False),
        ("b", False),
    ]


def test_a_link_whose_name_was_never_looked_up_is_still_found(backing: Path) -> None:
    (backing / "a").write_text("one")
    (backing / "d").mkdir()
    os.link(backing / "a", backing / "d/other")
    with FaultShare(backing) as share, (share.mountpoint / "a").open("r+") as file:
        (share.mountpoint / "a").unlink()
        file.write("two")
        file.flush()
        op = share.wait_for("write")
        assert (op.path, op.unlinked) == ("d/other", False)


def test_an_unlinked_file_goes_on_working(share: FaultShare) -> None:
    path = share.mountpoint / "f"
    with path.open("w+b", buffering=0) as file:
        file.write(b"before")
        path.unlink()
        file.write(b" after")
        os.ftruncate(file.fileno(), 9)
        os.fsync(file.fileno())
        assert os.pread(file.fileno(), 100, 0) == b"before af"
        assert os.fstat(file.fileno()).st_nlink == 0
        assert not path.exists()
    truncated = share.wait_for("truncate")
    assert (truncated.path, truncated.unlinked, truncated.size) == ("f", True, 9)


def test_an_open_file_follows_renames(share: FaultShare) -> None:
    (share.mountpoint / "d/e").mkdir(parents=True)
    with (share.mountpoint / "d/e/f").open("wb", buffering=0) as file:
        (share.mountpoint / "d").rename(share.mountpoint / "D")
        file.write(b"x")
    assert share.wait_for("write").path == "D/e/f"


def test_rename_flags(share: FaultShare) -> None:
    a, b = share.mountpoint / "a", share.mountpoint / "b"
    a.write_text("a")
    b.write_text("b")
    with pytest.raises(FileExistsError):
        rename_with(NOREPLACE, a, b)
    rename_with(EXCHANGE, a, b)
    assert (a.read_text(), b.read_text()) == ("b", "a")
    with pytest.raises(OSError, match="Invalid argument"):
        rename_with(WHITEOUT, a, b)
    with b.open("ab", buffering=0) as file:
        file.write(b"!")
    assert share.wait_for("write", "b", since=share.mark() - 5).path == "b"


def test_shared_mappings(share: FaultShare) -> None:
    path = share.mountpoint / "m"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as mapped:
        file.close()
        mapped[5000:5005] = b"later"
        mapped.flush()
    assert (share.backing / "m").read_bytes()[5000:5005] == b"later"


def test_sockets_and_undecodable_names(share: FaultShare) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(share.mountpoint / "sock"))
    assert (share.mountpoint / "sock").is_socket()
    name = b"d\xe9j\xe0.txt"
    with open(os.fsencode(share.mountpoint) + b"/" + name, "wb") as file:
        file.write(b"1")
    assert os.fsencode(share.wait_for("write").path) == name
    assert os.listdir(os.fsencode(share.backing)) == os.listdir(os.fsencode(share.mountpoint))


def test_changes_behind_the_share_are_seen_at_once(share: FaultShare) -> None:
    path = share.mountpoint / "f"
    path.write_text("ours")
    (share.backing / "new").write_text("theirs, longer")
    os.replace(share.backing / "new", share.backing / "f")
    assert path.read_text() == "theirs, longer"
    (share.backing / "f").unlink()
    assert not path.exists()
    assert os.listdir(share.mountpoint) == []


def test_a_large_directory_is_listed_once_and_completely(share: FaultShare) -> None:
    wanted = {f"file-with-a-longer-name-{i:05}" for i in range(3000)}
    for name in wanted:
        (share.backing / name).touch()
    listed = os.listdir(share.mountpoint)
    assert len(listed) == len(wanted)
    assert set(listed) == wanted


def test_more_files_than_descriptors(backing: Path) -> None:
    # The limit is inherited: 40 nodes for 300 files, most of them reopened when needed.
    code = (
        "import resource, runpy, sys;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128));"
        "runpy.run_module('tests.faultshare', run_name='__main__')"
    )
    mountpoint = backing.parent / "mnt"
    mountpoint.mkdir()
    repository = Path(__file__).parents[2]
    options = ["--background", "--entry-timeout=60", "--attr-timeout=60"]
    subprocess.run(
        [sys.executable, "-c", code, str(backing), str(mountpoint), *options],
        check=True,
        cwd=repository,
    )
    try:
        for i in range(300):
            (mountpoint / f"f{i}").write_text(str(i))
        assert [int((mountpoint / f"f{i}").read_text()) for i in range(300)] == list(range(300))
        os.rename(mountpoint / "f3", mountpoint / "g3")
        (mountpoint / "f4").unlink()
        assert (mountpoint / "g3").read_text() == "3"
    finally:
        subprocess.run(["fusermount3", "-uz", str(mountpoint)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
class TestOtherUsers:
    """What only root's share does: files belong to who made them, permissions hold."""

    NOBODY = 65534

    def as_nobody(self, share: FaultShare, script: str) -> str:
        for path in (share.mountpoint, *share.mountpoint.parents[:1]):
            os.chmod(path, 0o777)
        return subprocess.run(
            ["sh", "-c", script],
            cwd=share.mountpoint,
            user=self.NOBODY,
            group=self.NOBODY,
            extra_groups=[],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def test_files_belong_to_their_maker(self, share: FaultShare) -> None:
        self.as_nobody(share, "touch f && mkdir d && ln -s x l && mkfifo p")
        for name in "fdlp":
            st = (share.backing / name).lstat()
            assert (st.st_uid, st.st_gid) == (self.NOBODY, self.NOBODY), name

    def test_a_setgid_directory_hands_its_group_down(self, share: FaultShare) -> None:
        (share.mountpoint / "team").mkdir()
        os.chown(share.mountpoint / "team", -1, 12)
        os.chmod(share.mountpoint / "team", 0o2777)
        self.as_nobody(share, "touch team/f && mkdir team/d")
        assert (share.backing / "team/f").stat().st_gid == 12
        st = (share.backing / "team/d").stat()
        assert (st.st_uid, st.st_gid, bool(st.st_mode & stat.S_ISGID)) == (self.NOBODY, 12, True)

    def test_permissions_hold(self, share: FaultShare) -> None:
        (share.mountpoint / "secret").write_text("x")
        os.chmod(share.mountpoint / "secret", 0o600)
        assert self.as_nobody(share, "cat secret 2>/dev/null || echo refused") == "refused\n"

    def test_writing_clears_set_id_bits(self, share: FaultShare) -> None:
        path = share.mountpoint / "f"
        path.write_text("x")
        os.chmod(path, 0o6777)
        self.as_nobody(share, "echo y >> f")
        assert stat.S_IMODE(path.stat().st_mode) == 0o777
