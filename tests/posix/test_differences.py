"""Where the mount is not as a local disk, exactly as docs/compatibility.md says."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted
from tests.posix.kernel import (
    RENAME_WHITEOUT,
    STATX_BTIME,
    fallocate,
    filesystem_type,
    invoke,
    name_to_handle,
    open_by_handle,
    renameat2,
    setxattr,
    statx,
)
from tests.posix.parity import Case, Parity, State
from wbcache.probe import within

DATA = b"0123456789" * 1000
FICLONE, FICLONERANGE, FIEMAP = 0x40049409, 0x4020940D, 0xC020660B
GETFLAGS, SETFLAGS, GETXFLAGS = 0x80086601, 0x40086602, 0x801C581F
NOWAIT = 8
FUSE_MAGIC = 0x65735546
PAGES = os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def refused(code: int) -> Iterator[None]:
    """What is in the block fails with this errno."""
    with pytest.raises(OSError) as caught:
        yield
    assert caught.value.errno == code, caught.value


def build(top: Path) -> None:
    (top / "file").write_bytes(DATA)
    (top / "directory/below").mkdir(parents=True)


@pytest.fixture
def place(parity: Parity, state: State) -> Path:
    """A directory in the mount with "file" and "directory" in it, in each state."""
    ((found, _, _),) = parity.build([Case("x", build, lambda top: None)], state)
    return found


@pytest.fixture
def here(parity: Parity) -> Path:
    """An empty directory in the mount."""
    return parity.fresh()[0]


# -- calls that are not there ----------------------------------------------------------------------


def test_files_without_a_name(place: Path) -> None:
    for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_EXCL):
        with refused(errno.EOPNOTSUPP):
            os.open(place, os.O_TMPFILE | flags)
    assert sorted(os.listdir(place)) == ["directory", "file"]


def test_allocating(place: Path) -> None:
    keep_size, punch, collapse, zero, insert, unshare = 1, 2, 8, 16, 32, 64
    modes = (0, keep_size, keep_size | punch, collapse, zero, zero | keep_size, insert, unshare)
    with opened(place / "file") as fd:
        for mode in modes:
            with refused(errno.EOPNOTSUPP):
                fallocate(fd, mode, 0, 4096)
        assert os.pread(fd, len(DATA) + 1, 0) == DATA
        # The C library's way out, which reserves nothing in the cache.
        os.posix_fallocate(fd, 0, 100_000)
        assert os.fstat(fd).st_size == 100_000
        assert os.pread(fd, 100_000, 0) == DATA.ljust(100_000, b"\0")


def test_holes_are_not_told(place: Path) -> None:
    with opened(place / "file") as fd:
        os.ftruncate(fd, 1 << 20)
        os.pwrite(fd, b"far", 1 << 30)
        size = (1 << 30) + 3
        assert os.lseek(fd, 1 << 19, os.SEEK_DATA) == 1 << 19
        assert os.lseek(fd, 0, os.SEEK_HOLE) == size
        assert os.fstat(fd).st_blocks == -(-size // 512)
        os.ftruncate(fd, 10)
        assert os.fstat(fd).st_blocks == 1


def test_sharing_blocks(place: Path) -> None:
    with opened(place / "file") as fd, opened(place / "copy", os.O_RDWR | os.O_CREAT) as copy:
        with refused(errno.EOPNOTSUPP):
            fcntl.ioctl(copy, FICLONE, fd)
        with refused(errno.EOPNOTSUPP):
            fcntl.ioctl(copy, FICLONERANGE, array.array("q", [fd, 0, 0, 0]).tobytes())
        assert os.copy_file_range(fd, copy, 1 << 30, 0, 0) == len(DATA)
        assert os.pread(copy, 1 << 20, 0) == DATA
        with refused(errno.EOPNOTSUPP):
            fcntl.ioctl(fd, FIEMAP, bytearray(32))


def test_flags_of_files(place: Path) -> None:
    for name in ("file", "directory"):
        with opened(place / name, os.O_RDONLY) as fd:
            for request in (GETFLAGS, SETFLAGS, GETXFLAGS):
                with refused(errno.ENOTTY):
                    fcntl.ioctl(fd, request, bytearray(64))


def test_whiteouts(place: Path) -> None:
    with refused(errno.EINVAL):
        renameat2(place / "file", place / "new", RENAME_WHITEOUT)
    assert sorted(os.listdir(place)) == ["directory", "file"]


def test_reading_only_what_is_in_memory(place: Path) -> None:
    with opened(place / "file") as fd:
        with refused(errno.EOPNOTSUPP):
            os.preadv(fd, [bytearray(5)], 0, NOWAIT)
        with refused(errno.EOPNOTSUPP):
            os.pwritev(fd, [b"x"], 0, NOWAIT)


def test_direct_access_of_any_shape(place: Path) -> None:
    with opened(place / "file", os.O_RDWR | os.O_DIRECT) as fd:
        assert os.pread(fd, 7, 3) == DATA[3:10]
        assert os.pwrite(fd, b"direct", 11) == 6
        assert (place / "file").read_bytes() == DATA[:11] + b"direct" + DATA[17:]
        os.ftruncate(fd, 12)
        assert os.pread(fd, 4096, 4) == DATA[4:11] + b"d"


def test_swap_files(place: Path) -> None:
    with opened(place / "file") as fd:
        os.ftruncate(fd, 40 * PAGES)
        os.pwrite(fd, b"SWAPSPACE2", PAGES - 10)
        os.pwrite(fd, (1).to_bytes(4, "little") + (39).to_bytes(4, "little"), 1024)
    path = os.fsencode(place / "file")
    try:
        with pytest.raises(OSError) as caught:
            invoke("swapon", path, 0)
    finally:
        with contextlib.suppress(OSError):
            invoke("swapoff", path)
    if caught.value.errno == errno.EPERM:
        pytest.skip("no privilege to add swap space")
    assert caught.value.errno == errno.EINVAL


def test_quotas(parity: Parity, here: Path) -> None:
    get_quota, quotactl_fd = 0x80000700, 443
    with opened(here, os.O_RDONLY) as fd, refused(errno.ENOSYS):
        invoke("syscall", quotactl_fd, fd, get_quota, 0, bytes(100))


# -- attributes ------------------------------------------------------------------------------------


def test_reading_does_not_set_the_access_time(place: Path) -> None:
    long_ago = 10**17
    os.utime(place / "file", ns=(long_ago, 2 * long_ago))
    os.utime(place / "directory", ns=(long_ago, 2 * long_ago))
    assert (place / "file").read_bytes() == DATA
    assert os.listdir(place / "directory") == ["below"]
    for name in ("file", "directory"):
        assert os.stat(place / name).st_atime_ns == long_ago


def test_access_control_lists(place: Path) -> None:
    acl = b"\x02\0\0\0" + b"\x01\0\x06\0\xff\xff\xff\xff\x04\0\x04\0\xff\xff\xff\xff"
    acl += b"\x20\0\x04\0\xff\xff\xff\xff"
    for of, name in (("file", "access"), ("directory", "access"), ("directory", "default")):
        with refused(errno.EOPNOTSUPP):
            os.setxattr(place / of, f"system.posix_acl_{name}", acl)
        with pytest.raises(OSError) as caught:
            os.getxattr(place / of, f"system.posix_acl_{name}")
        assert caught.value.errno in (errno.EOPNOTSUPP, errno.ENODATA)
    assert os.listxattr(place / "file") == []


def test_attributes_of_other_name_spaces(place: Path) -> None:
    for name in ("security.selinux", "security.capability", "trusted.x"):
        value = b"\x01\0\0\x02" + bytes(16) if name.endswith("capability") else b"value"
        with refused(errno.EOPNOTSUPP):
            os.setxattr(place / "file", name, value)
        with refused(errno.ENODATA):
            os.getxattr(place / "file", name)
    assert os.listxattr(place / "file") == []


def test_attributes_that_are_to_be_new_and_old(place: Path) -> None:
    both = os.XATTR_CREATE | os.XATTR_REPLACE
    with refused(errno.EEXIST):
        for _ in range(2):
            setxattr(place / "file", "user.x", b"value", both)
    assert os.getxattr(place / "file", "user.x") == b"value"


def test_a_running_program_that_is_opened_to_truncate_and_to_read(here: Path) -> None:
    (here / "program").write_bytes(Path("/bin/cat").read_bytes())
    (here / "program").chmod(0o755)
    pipe = subprocess.PIPE
    with subprocess.Popen([here / "program"], stdin=pipe, stdout=pipe, bufsize=0) as program:
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write(b"x")
        assert program.stdout.read(1) == b"x", "it has begun, and waits"
        for flags in (os.O_WRONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC):
            with refused(errno.ETXTBSY):
                os.open(here / "program", flags)
        assert os.path.getsize(here / "program")
        with refused(errno.ETXTBSY):
            os.open(here / "program", os.O_RDONLY | os.O_TRUNC)
        program.kill()
    assert os.path.getsize(here / "program") == 0


def test_the_attribute_that_tells_where_a_file_stands(place: Path, state: State) -> None:
    name = "user.wbcache.state"
    told = os.getxattr(place / "file", name)
    # One whose flush goes on meanwhile may have arrived by now.
    allowed = {"dirty": {b"dirty"}, "flushing": {b"dirty", b"flushing", b"clean"}}
    assert told in allowed.get(state, {b"clean"})
    assert name not in os.listxattr(place / "file")
    with refused(errno.EOPNOTSUPP):
        os.setxattr(place / "file", name, b"clean")
    with refused(errno.EOPNOTSUPP):
        os.removexattr(place / "file", name)


def test_no_time_of_birth(place: Path) -> None:
    for name in ("file", "directory"):
        assert statx(place / name, STATX_BTIME).mask & STATX_BTIME == 0


def test_sizes_and_counts_of_directories(parity: Parity, here: Path) -> None:
    for number in range(300):
        (here / f"{number}{'n' * 200}").touch()
    assert os.stat(here).st_size == 4096
    ((place, _, _),) = parity.build([Case("x", build, lambda top: None)], "share")
    assert os.stat(place / "directory").st_nlink == 1, "what was never listed is not counted"
    os.listdir(place / "directory")
    assert os.stat(place / "directory").st_nlink == 3


def test_times_that_are_out_of_reach(parity: Parity, state: State) -> None:
    """Those before 1677 and after 2262 become these; files that have one can be used as others."""
    first, last = -(1 << 63) + 1, (1 << 63) - 1
    after_2262 = 10_000_000_000
    """Seconds; the disk under the share knows it too."""

    def build_old(top: Path) -> None:
        build(top)
        if state == "share":
            os.utime(top / "file", (after_2262, after_2262))

    ((place, _, shared),) = parity.build([Case("x", build_old, lambda top: None)], state)
    if state == "share":
        assert os.stat(place / "file").st_mtime_ns == last
    os.chmod(place / "file", 0o640)
    for seconds, shown in ((after_2262, last), (1 << 35, last), (-(1 << 35), first)):
        os.utime(place / "file", (seconds, seconds))
        assert os.stat(place / "file").st_mtime_ns == shown
    os.utime(place / "directory", (after_2262, after_2262))
    with opened(place / "file", os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"goes on")
    os.utime(place / "file", (after_2262, after_2262))
    parity.flush(place.parent.name)
    assert (shared / "file").read_bytes() == DATA + b"goes on"
    assert (shared / "file").stat().st_mtime_ns // 10**9 == last // 10**9
    assert os.stat(place / "file").st_mtime_ns // 10**9 == last // 10**9


def test_times_that_a_share_keeps_coarsely(tmp_path: Path, fuse: None) -> None:
    """The mount shows what was set, and once it has forgotten the file what the share has."""
    (tmp_path / "backing").mkdir()
    exact = 1_000_000_001_123_456_789
    with FaultShare(tmp_path / "backing", mtime_resolution=2) as share:
        with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
            (mount.path / "file").write_bytes(DATA)
            os.utime(mount.path / "file", ns=(exact, exact))
            mount.flush()
            assert os.stat(mount.path / "file").st_mtime_ns == exact
        with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
            assert os.stat(mount.path / "file").st_mtime_ns == 1_000_000_000 * 10**9


# -- names and numbers -----------------------------------------------------------------------------


def test_names_of_our_own(parity: Parity, here: Path) -> None:
    own = here / ".wbcache-0123abcd-1z1"
    for hidden in (own, parity.mount.path / ".wbcache"):
        with refused(errno.ENOENT):
            os.stat(hidden)
        for make in (os.mkdir, os.mkfifo, lambda path: os.symlink("to", path), Path.touch):
            with refused(errno.EPERM):
                make(hidden)
        (here / "file").touch()
        for take in (os.rename, os.link):
            with refused(errno.EPERM):
                take(here / "file", hidden)
    assert ".wbcache" not in os.listdir(parity.mount.path)
    assert ".wbcache" in os.listdir(parity.shared)
    for others in (".wbcache-mine", ".wbcache2", "x.wbcache-0123abcd-1z1", ".wbcache"):
        (here / others).write_bytes(b"fine")
    assert len(os.listdir(here)) == 5


def test_hard_links_that_the_share_has_already(parity: Parity) -> None:
    def linked(top: Path) -> None:
        (top / "one").write_bytes(DATA)
        os.link(top / "one", top / "two")

    ((place, _, shared),) = parity.build([Case("x", linked, lambda top: None)], "share")
    found = [os.stat(place / name) for name in ("one", "two")]
    assert found[0].st_ino != found[1].st_ino
    assert [st.st_nlink for st in found] == [1, 1]
    ((place, _, shared),) = parity.build([Case("x", linked, lambda top: None)], "dirty")
    parity.flush(place.parent.name)
    assert os.path.samefile(shared / "one", shared / "two")
    assert os.path.samefile(place / "one", place / "two")


def test_special_files_that_the_share_has_already(parity: Parity) -> None:
    """They are shown, and lead to nobody: those of this host meet those of this host."""

    def special(top: Path) -> None:
        os.mkfifo(top / "fifo")

    ((place, _, shared),) = parity.build([Case("x", special, lambda top: None)], "share")
    assert stat.S_ISFIFO(os.stat(place / "fifo").st_mode)
    with opened(shared / "fifo", os.O_RDONLY | os.O_NONBLOCK), refused(errno.ENXIO):
        os.open(place / "fifo", os.O_WRONLY | os.O_NONBLOCK)


def test_set_id_programs_and_devices(parity: Parity, here: Path) -> None:
    os.mknod(here / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with refused(errno.EACCES):
        os.open(here / "null", os.O_RDWR)
    assert os.statvfs(here).f_flag & os.ST_NOSUID
    assert os.statvfs(here).f_flag & os.ST_NODEV
    (here / "id").write_bytes(Path("/usr/bin/id").read_bytes())
    (here / "id").chmod(0o4755)
    assert stat.S_IMODE(os.stat(here / "id").st_mode) == 0o4755

    def work() -> str:
        os.setresuid(65534, 65534, 65534)
        with os.popen(f"{here}/id -u") as output:
            return output.read().strip()

    assert within(30, work) == "65534"


def test_a_file_system_of_its_own(parity: Parity, place: Path) -> None:
    """Not the share's: nothing is renamed or linked from one to the other."""
    assert os.stat(place / "file").st_dev == os.stat(parity.mount.path).st_dev
    assert os.stat(place / "file").st_dev != os.stat(parity.shared).st_dev
    for call in (os.rename, os.link):
        with refused(errno.EXDEV):
            call(place / "file", parity.shared / "moved")
    assert filesystem_type(place) == FUSE_MAGIC


def test_handles_of_files(tmp_path: Path, fuse: None) -> None:
    """They are good for as long as the kernel knows the file, and not after a remount."""
    with Mounted(tmp_path / "share") as mount:
        (mount.path / "file").write_bytes(DATA)
        handle = name_to_handle(mount.path / "file")
        with opened(mount.path / "file") as held, opened(mount.path, os.O_RDONLY) as at:
            fd = open_by_handle(at, handle, os.O_RDONLY)
            try:
                assert os.pread(fd, 10, 0) == DATA[:10]
                assert os.path.sameopenfile(fd, held)
            finally:
                os.close(fd)
        assert mount.umount().returncode == 0
        mount.remount()
        with opened(mount.path, os.O_RDONLY) as at, refused(errno.ESTALE):
            open_by_handle(at, handle, os.O_RDONLY)


def test_a_removed_file_of_which_only_the_path_is_open(place: Path) -> None:
    with opened(place / "file", os.O_PATH) as fd:
        os.unlink(place / "file")
        assert os.fstat(fd).st_nlink == 0
        with refused(errno.ESTALE):
            os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)


# -- the table -------------------------------------------------------------------------------------

_ROW = re.compile(r"`([a-z/_]+\.py)(?:::(\w+))?`")


def test_every_line_of_the_table_has_a_test() -> None:
    """And every test of this module is in the table."""
    root = Path(__file__).parents[2]
    text = (root / "docs/compatibility.md").read_text()
    section = text.split("## What differs from a local disk")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(lines) > 20
    named = set()
    for line in lines:
        found = _ROW.findall(line.rsplit("|", 2)[1])
        assert found, f"no test: {line}"
        for file, function in found:
            source = (root / "tests" / file).read_text()
            assert not function or f"def {function}(" in source, f"{file}::{function}"
            named.add((file, function))
    own = {name for name in globals() if name.startswith("test_")}
    own -= {test_every_line_of_the_table_has_a_test.__name__}
    assert {f for file, f in named if file == "posix/test_differences.py"} == own
