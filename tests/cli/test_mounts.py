"""The mount table, and looking at mounts that do not answer."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from wbcache import disks
from wbcache.errors import CacheDirError, MountpointError
from wbcache.mounts import (
    MountEntry,
    canonical,
    is_below,
    mount_at,
    mount_of,
    parse_mountinfo,
    read_mounts,
    unmount,
)
from wbcache.probe import ProbeTimeoutError, within

TABLE = rb"""21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:20 / /mnt/with\040space rw,nosuid - nfs4 server:/a\011b rw,vers=4.2
23 21 0:21 / /mnt/\377name\134\012end rw - fuse.wbcache /mnt/share rw,user_id=0
24 21 0:22 /sub /mnt/share rw shared:7 master:3 - fuse.sshfs host:/data rw
25 24 0:23 / /mnt/share rw - fuse.wbcache /mnt/share rw
26 21 0:24 / /dev/shm rw - tmpfs tmpfs rw
27 21 8:17 / /data rw - xfs /dev/sdb1 rw

nonsense
28 21 0:25 / /broken
"""


def table(*lines: str) -> list[MountEntry]:
    return parse_mountinfo("\n".join(lines).encode())


def test_fields_and_escapes() -> None:
    mounts = parse_mountinfo(TABLE)
    assert [entry.mount_id for entry in mounts] == [21, 22, 23, 24, 25, 26, 27]
    space, name, share = mounts[1:4]
    assert space.mountpoint == "/mnt/with space"
    assert space.source == "server:/a\tb"
    assert space.options == ("rw", "nosuid")
    assert os.fsencode(name.mountpoint) == b"/mnt/\xffname\\\nend"
    assert (share.parent_id, share.device, share.root) == (21, "0:22", "/sub")
    assert share.fstype == "fuse.sshfs"


def test_kinds_of_file_systems() -> None:
    root, nfs, wbcache, sshfs, _, memory, xfs = parse_mountinfo(TABLE)
    assert wbcache.is_wbcache and not sshfs.is_wbcache
    assert [e.is_network for e in (root, nfs, wbcache, sshfs, memory, xfs)] == [
        False, True, True, True, False, False,
    ]  # fmt: skip
    assert memory.is_memory and not root.is_memory
    assert root.is_local_disk and xfs.is_local_disk and not sshfs.is_local_disk


def test_which_mount_a_path_is_in() -> None:
    mounts = parse_mountinfo(TABLE)
    assert mount_of("/data/x", mounts) == mounts[6]
    assert mount_of("/database", mounts) == mounts[0]
    # The later of two mounts at one place covers the earlier.
    assert mount_of("/mnt/share/a", mounts) == mounts[4]
    assert mount_at("/mnt/share", mounts) == mounts[4]
    assert mount_at("/mnt/share/a", mounts) is None
    assert is_below("/a/b", "/a") and is_below("/a", "/a") and is_below("/a", "/")
    assert not is_below("/ab", "/a")


def test_the_own_table_has_a_root() -> None:
    mounts = read_mounts()
    assert mount_of("/proc/self", mounts) == mount_at("/proc", mounts)
    assert any(entry.mountpoint == "/" for entry in mounts)


def test_canonical_resolves_links_like_the_kernel(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "inner").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(real)
    (tmp_path / "relative").symlink_to("real/inner")
    (tmp_path / "chain").symlink_to("absolute")
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    (tmp_path / "loop").symlink_to("loop")
    for path in (
        "real/./inner//",
        "absolute/inner",
        "relative",
        "relative/../inner",
        "chain/inner",
    ):
        assert canonical(str(tmp_path / path)) == os.path.realpath(real / "inner")
    assert canonical(str(tmp_path / "dangling")) == os.path.realpath(tmp_path / "dangling")
    assert canonical("/../..") == "/"
    with pytest.raises(OSError) as caught:
        canonical(str(tmp_path / "loop"))
    assert caught.value.errno == errno.ELOOP


def test_canonical_does_not_look_at_mount_points(tmp_path: Path) -> None:
    link = tmp_path / "looks-like-a-link"
    link.symlink_to("/elsewhere")
    mounts = table(f"21 1 8:1 / {link} rw - fuse.wbcache share rw")
    assert canonical(str(link), mounts) == str(link)


def test_unmounting_what_is_not_mounted(tmp_path: Path) -> None:
    with pytest.raises(MountpointError, match="cannot be unmounted"):
        unmount(str(tmp_path))


def test_a_probe_returns_and_raises_what_the_check_does() -> None:
    assert within(10, lambda: ("answer", os.getppid())) == ("answer", os.getpid())
    with pytest.raises(FileNotFoundError):
        within(10, lambda: os.stat("/nowhere/at/all"))


def test_a_probe_without_an_answer_is_left_behind(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    start = time.monotonic()
    with pytest.raises(ProbeTimeoutError):
        # Nobody ever writes: the open waits as a call on a hung share does.
        within(0.2, lambda: open(fifo).close())
    assert time.monotonic() - start < 5


def test_a_probe_inherits_no_descriptors() -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    open_in_child = within(10, lambda: sorted(map(int, os.listdir("/proc/self/fd"))))
    os.close(reading)
    os.close(writing)
    # The three standard ones, the answer's, and the listing's own.
    assert open_in_child == [0, 1, 2, 3, 4]


def test_the_default_cache_is_on_the_largest_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("own", "small", "large", "share", "memory", "system"):
        (tmp_path / name).mkdir()
    sizes = {"own": 10, "small": 5, "large": 20, "share": 90, "memory": 80, "system": 70}
    mounts = table(
        "1 0 8:1 / / rw - ext4 root rw",
        f"2 1 8:2 / {tmp_path}/small rw - ext4 a rw",
        f"3 1 8:3 / {tmp_path}/large rw - xfs b rw",
        f"4 1 0:4 / {tmp_path}/share rw - nfs c rw",
        f"5 1 0:5 / {tmp_path}/memory rw - tmpfs d rw",
        f"6 1 8:6 / {tmp_path}/system rw - ext4 e rw",
    )

    class Disk:
        f_flag = 0
        f_frsize = 1 << 30

        def __init__(self, path: str) -> None:
            self.f_blocks = sizes[Path(path).relative_to(tmp_path).parts[0]]

    monkeypatch.setattr("os.statvfs", Disk)
    monkeypatch.setattr(disks, "_own_place", lambda: f"{tmp_path}/own/wbcache")
    monkeypatch.setattr(disks, "PLATFORM_DISKS", (f"{tmp_path}/small",))
    monkeypatch.setattr(disks, "SYSTEM_DIRECTORIES", (f"{tmp_path}/system",))

    def chosen(source: str = "/mnt/a b", mountpoint: str = "/mnt/m") -> str:
        return disks.default_cache_dir(source, mountpoint, mounts)

    name = disks.cache_name("/mnt/a b")
    assert name.startswith("a_b-")
    assert name != disks.cache_name("/other/a b")
    # A known platform's data disk comes before larger ones.
    assert chosen() == f"{tmp_path}/small/.wbcache/{name}"
    monkeypatch.setattr(disks, "PLATFORM_DISKS", ())
    assert chosen() == f"{tmp_path}/large/.wbcache/{name}"
    # Never below what is mounted.
    assert chosen(mountpoint=f"{tmp_path}/large") == f"{tmp_path}/own/wbcache/{name}"
    source = f"{tmp_path}/large"
    assert chosen(source) == f"{tmp_path}/own/wbcache/{disks.cache_name(source)}"
    # What an earlier mount left must be found again, whatever disks came since.
    os.makedirs(f"{tmp_path}/own/wbcache/{name}")
    assert chosen() == f"{tmp_path}/own/wbcache/{name}"
    with pytest.raises(CacheDirError, match="no writable local disk"):
        disks.default_cache_dir(str(tmp_path), "/mnt/m", mounts)
