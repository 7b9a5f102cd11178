"""What the share can't hold is refused at the call; what it need not hold is kept here."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from tests import volumes
from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, contents, wbcache
from wbcache.errors import SourceError
from wbcache.filesystem import Changes
from wbcache.flush.conflict import conflict_name
from wbcache.node import Directory
from wbcache.share import calls
from wbcache.share.capabilities import SHORTEST_NAMES, SIZE_MAX, Capabilities, probe
from wbcache.share.descriptor import Descriptor

LONGEST = 143


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FaultShare, Mounted]]:
    """A share that lacks nearly everything, mounted. It says that names may have 255 bytes."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")
    lack = ("symlink", "link", "chmod", "chown", "xattr", "rename_flags")
    with FaultShare(tmp_path_factory.mktemp("backing"), lack=lack) as share:
        names = ("create", "mkdir", "rename", "symlink", "link", "mknod")
        too_long = "?" * (len(".wbcache/") + LONGEST + 1) + "*"
        share.fail(names, errno.ENAMETOOLONG, match=too_long)
        share.fail(names, errno.EINVAL, match="*[:?*\n\x01\udcff]*")
        share.fail(names, errno.EINVAL, match="*.")
        with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
            yield share, mount


def refused(code: int, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(OSError) as caught:
        call(*arguments)
    assert caught.value.errno == code, caught.value


def test_what_a_share_can_not_hold_is_refused_at_the_call(
    poor: tuple[FaultShare, Mounted],
) -> None:
    share, mount = poor
    top = mount.path
    (top / "file").write_bytes(b"x")
    (top / "dir").mkdir()
    refused(errno.EPERM, os.symlink, "file", top / "symlink")
    refused(errno.EPERM, os.link, top / "file", top / "link")
    refused(errno.EOPNOTSUPP, os.setxattr, top / "file", "user.x", b"1")
    bad = {
        b"x" * (LONGEST + 1): errno.ENAMETOOLONG,
        "数".encode() * 48: errno.ENAMETOOLONG,
        b"a:b": errno.EINVAL,
        b"why?": errno.EINVAL,
        b"a\nb": errno.EINVAL,
        b"dot.": errno.EINVAL,
        b"not \xff utf-8": errno.EILSEQ,
    }
    for name, code in bad.items():
        path = os.fsencode(top) + b"/" + name
        refused(code, os.mkdir, path)
        refused(code, os.rename, os.fsencode(top / "file"), path)
        refused(code, os.rename, os.fsencode(top / "dir"), path)
        refused(code, os.mkfifo, path)
        refused(code, os.open, path, os.O_WRONLY | os.O_CREAT)
    longest = "x" * LONGEST
    (top / longest).write_bytes(b"fits")
    assert sorted(os.listdir(top)) == ["dir", "file", longest]
    mount.flush()
    assert sorted(contents(share.backing)) == ["dir", "file", longest]
    # Replaced, which needs a temporary beside it.
    (top / longest).write_bytes(b"fits again")
    mount.flush()
    assert (share.backing / longest).read_bytes() == b"fits again"
    assert os.statvfs(top).f_namemax == LONGEST
    assert not mount.status()["errors"]


def test_modes_and_owners_that_a_share_can_not_store_are_kept_here(
    poor: tuple[FaultShare, Mounted],
) -> None:
    share, mount = poor
    top = mount.path
    (top / "kept").mkdir()
    for number in range(3):
        path = top / "kept" / str(number)
        path.write_bytes(b"x")
        os.chmod(path, 0o600 + number)
        os.chown(path, 1234, 4321 + number)
    mount.flush()
    for number in range(3):
        on_share = (share.backing / "kept" / str(number)).stat()
        assert (on_share.st_uid, on_share.st_gid) == (0, 0)
    check_kept(top / "kept")  # also when the share has been asked again since
    check_kept(top / "kept")
    told = [event["text"] for event in mount.status()["events"]]
    assert [text for text in told if "can't store" in text] == [
        "the share can't store file modes; they are kept here only",
        "the share can't store file owners; they are kept here only",
    ]
    assert mount.umount().returncode == 0
    mount.remount()
    check_kept(top / "kept")


def check_kept(top: Path) -> None:
    for number in range(3):
        st = (top / str(number)).stat()
        shown = (stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid)
        assert shown == (0o600 + number, 1234, 4321 + number)


def test_special_files_stay_here_and_that_is_said_once(tmp_path: Path, fuse: None) -> None:
    with Mounted(tmp_path / "share") as mount:
        os.mkfifo(mount.path / "fifo")
        os.mknod(mount.path / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (mount.path / "file").write_text("x")
        mount.flush()
        told = [event["text"] for event in mount.status()["events"]]
        assert told == ["fifos, sockets and devices are kept here only"]
        assert mount.status()["dirty_files"] == 0
        assert mount.umount().returncode == 0
        assert list(contents(tmp_path / "share")) == ["file"]
        mount.remount()
        assert stat.S_ISFIFO(os.stat(mount.path / "fifo").st_mode)
        assert os.stat(mount.path / "null").st_rdev == os.makedev(1, 3)


def test_names_too_short_for_wbcache_s_own_are_said_at_the_mount(
    tmp_path: Path, fuse: None
) -> None:
    (tmp_path / "backing").mkdir()
    (tmp_path / "mnt").mkdir()
    with FaultShare(tmp_path / "backing", name_max=90) as share:
        done = wbcache(
            *("mount", "--cache-dir", tmp_path / "cache", share.mountpoint, tmp_path / "mnt")
        )
    assert done.returncode == SourceError.exit_code
    (line,) = done.stderr.splitlines()
    assert "names there have 90 bytes at most" in line and "-o ro" in line


def test_the_name_of_a_conflict_fits_and_is_no_half_character() -> None:
    for length in range(SHORTEST_NAMES, 256):
        name = conflict_name("数据".encode() * 42, length, set())
        assert length - 3 < len(name) <= length
        assert name.decode().startswith("数")


# -- what no share here lacks ----------------------------------------------------------------------


def test_a_local_disk_can_everything(tmp_path: Path) -> None:
    own = Descriptor(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    (tmp_path / "probe2-0123abcd").touch()  # left by a probe that was killed
    found = probe(own, b"0123abcd")
    assert found.xattr_max >= 1000
    assert found.size_max > 1 << 40
    expected = Capabilities(xattr_max=found.xattr_max, size_max=found.size_max)
    assert found == expected
    assert Capabilities.from_json(found.to_json()) == found
    assert Capabilities.from_json('{"symlink": true}') is None
    assert not os.listdir(tmp_path)


def test_a_share_that_does_not_tell_case_apart_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = calls.lstat_or_none
    monkeypatch.setattr(calls, "lstat_or_none", lambda at, name: real(at, name.lower()))
    own = Descriptor(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    assert not probe(own, b"0123abcd").case_sensitive


@pytest.mark.parametrize("size_max", [(1 << 32) - 1, SIZE_MAX])
def test_files_larger_than_the_share_can_hold_are_refused(tmp_path: Path, size_max: int) -> None:
    (tmp_path / "share").mkdir()

    async def run() -> None:
        async with volumes.mounted(
            str(tmp_path / "share"),
            str(tmp_path / "cache"),
            capabilities=Capabilities(size_max=size_max, xattr_max=100, case_sensitive=False),
        ) as mount:
            fs, root = mount.filesystem, mount.volume.tree.root
            node = await fs.names.create(root, b"Big", 0o644, 0, 0)
            assert await fs.files.write(node, (1 << 32) - 3, b"12") == 2
            if size_max < SIZE_MAX:
                with pytest.raises(OSError) as caught:
                    await fs.files.write(node, (1 << 32) - 1, b"3")
                assert caught.value.errno == errno.EFBIG
                with pytest.raises(OSError) as caught:
                    await fs.attributes.change(node, Changes(size=1 << 32))
                assert caught.value.errno == errno.EFBIG
                assert node.size == size_max
            with pytest.raises(OSError) as caught:
                await fs.attributes.set_xattr(node, b"user.x", b"x" * 101)
            assert caught.value.errno == errno.ERANGE
            await one_name(fs.names.create, root)
            with pytest.raises(OSError) as caught:
                await fs.names.rename(root, b"Big", root, b"BIG", 0)
            assert caught.value.errno == errno.EEXIST
            await fs.names.unlink(root, b"Big")

    async def one_name(create: Callable[..., object], root: Directory) -> None:
        with pytest.raises(OSError) as caught:
            await create(root, b"bIG", 0o644, 0, 0)  # type: ignore[misc]
        assert caught.value.errno == errno.EEXIST

    trio.run(run)
