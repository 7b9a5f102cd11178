"""Others fill the disk that holds the cache, or it refuses to write."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted
from tests.space.test_limit import assert_blocks, block, temporaries
from tests.volumes import mounted
from wbcache.daemon.eviction import Evictor

pytestmark = pytest.mark.usefixtures("fuse")

DISK = 160


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk, of which the cache is one user among others."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def share(tmp_path: Path) -> Iterator[FaultShare]:
    (tmp_path / "backing").mkdir()
    with FaultShare(tmp_path / "backing") as share:
        yield share


def on_small_disk(share: FaultShare, disk: Path) -> Mounted:
    return Mounted(
        share.mountpoint,
        cache=disk / "cache",
        config={
            "cache": {"size": "100%", "min_free": "1MiB"},
            "share": {"deadline": "1s", "lookup_deadline": "500ms"},
            "flush": {"idle_delay": "1d", "max_age": "1d"},
        },
        options="volatile_cache",
    )


def fill(disk: Path) -> Path:
    """Take everything that is free."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)) == 1 << 16:
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return filler


def test_others_fill_the_disk_while_the_share_answers(share: FaultShare, disk: Path) -> None:
    """Writing goes on at the share's speed, in the room that the cache has."""
    with on_small_disk(share, disk) as mount:
        with open(mount.path / "model", "wb", buffering=0) as file:
            for number in range(30):
                file.write(block(number))
            fill(disk)
            for number in range(30, 80):
                file.write(block(number))
        (mount.path / "after").write_bytes(b"after")
        assert mount.umount().returncode == 0
    assert_blocks(share.backing / "model", range(80))
    assert (share.backing / "after").read_bytes() == b"after"
    assert not temporaries(share.backing)


def test_others_fill_the_disk_while_the_share_hangs(share: FaultShare, disk: Path) -> None:
    """Writes get ENOSPC; what was acknowledged stays, and names can still be changed."""
    with on_small_disk(share, disk) as mount:
        for n in range(20):
            (mount.path / f"old-{n}").write_bytes(b"%d" % n)
        assert len(os.listdir(mount.path)) == 20
        rule = share.hang()
        file = os.open(mount.path / "model", os.O_CREAT | os.O_WRONLY)
        for number in range(10):
            os.write(file, block(number))
        filler = fill(disk)
        count = 10
        with pytest.raises(OSError) as refused:
            for _ in range(DISK):
                os.write(file, block(count))
                count += 1
        assert refused.value.errno == errno.ENOSPC
        for n in range(10):
            (mount.path / f"old-{n}").unlink()
            os.rename(mount.path / f"old-{n + 10}", mount.path / f"new-{n}")
        assert_blocks(mount.path / "model", range(count))
        share.release(rule)
        share.clear()
        mount.kill()
        with pytest.raises(OSError, match="not connected"):
            os.close(file)
        filler.unlink()
        mount.remount()
        assert_blocks(mount.path / "model", range(count))
        assert mount.umount().returncode == 0
    assert_blocks(share.backing / "model", range(count))
    for n in range(10):
        assert (share.backing / f"new-{n}").read_bytes() == b"%d" % (n + 10)
    assert sorted(os.listdir(share.backing))[1:] == ["model", *(f"new-{n}" for n in range(10))]


async def test_the_disk_errs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer gets the error, what was there before stays, and the next write succeeds."""
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        files, root = mount.filesystem.files, mount.volume.tree.root
        node = await mount.filesystem.names.create(root, b"file", 0o644, os.getuid(), os.getgid())
        handle = files.open(node, os.O_RDWR)
        await files.write(node, 0, b"acknowledged")
        with monkeypatch.context() as patch:

            def refuse(fd: int, data: bytes, offset: int) -> int:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(os, "pwrite", refuse)
            with pytest.raises(OSError) as refused:
                await files.write(node, 12, b", refused")
            assert refused.value.errno == errno.EIO
        assert await files.read(node, 0, 100) == b"acknowledged"
        await files.write(node, 12, b", then more")
        files.release(handle)
        await mount.drain()
    assert (tmp_path / "share" / "file").read_bytes() == b"acknowledged, then more"


async def test_the_disk_can_not_make_it_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync fails, and goes on failing until the bytes were written again."""
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        files, root = mount.filesystem.files, mount.volume.tree.root
        node = await mount.filesystem.names.create(root, b"file", 0o644, os.getuid(), os.getgid())
        handle = files.open(node, os.O_RDWR)
        await files.write(node, 0, b"bytes")
        with monkeypatch.context() as patch:

            def refuse(fd: int) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(os, "fdatasync", refuse)
            with pytest.raises(OSError):
                await files.fsync(node)
        with pytest.raises(OSError) as refused:
            await files.fsync(node)
        assert refused.value.errno == errno.EIO
        await files.write(node, 0, b"again")
        await files.fsync(node)
        files.release(handle)


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EOPNOTSUPP])
async def test_a_disk_that_refuses_the_ballast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """The cache goes on without one, and keeps nothing of a part of it."""
    (tmp_path / "share").mkdir()

    def refuse(fd: int, offset: int, length: int) -> None:
        os.pwrite(fd, b"part", 0)
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        # The evictor holds it at its start and at every look: an error would end the evictor.
        mount.nursery.start_soon(Evictor(mount.volume, mount.flusher).run)
        files, root = mount.filesystem.files, mount.volume.tree.root
        node = await mount.filesystem.names.create(root, b"file", 0o644, os.getuid(), os.getgid())
        handle = files.open(node, os.O_RDWR)
        await files.write(node, 0, b"bytes")
        files.release(handle)
        await mount.drain()
        assert not [name for name in os.listdir(tmp_path / "cache") if "ballast" in name]
    assert (tmp_path / "share" / "file").read_bytes() == b"bytes"
