"""Another user of the share puts links, fifos and devices where files and directories were.

Nothing outside of the share is read, changed or opened, whatever the daemon was about to do, though
it is root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.checkpoints import blob
from tests.mounting import NEVER_BY_ITSELF, Mounted, contents, merge
from wbcache.errors import BindingError
from wbcache.flush import blocking
from wbcache.flush.blocking import Attributes, ConflictError, LostTemporaryError, Ownership
from wbcache.share import calls
from wbcache.share.descriptor import Descriptor

pytestmark = pytest.mark.timeout(120)

_libc = ctypes.CDLL(None, use_errno=True)


class Victim:
    """What must stay as it is: a directory like /etc."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.file = top / "passwd"
        self.directory = top / "ssh"
        self.directory.mkdir(parents=True)
        self.file.write_bytes(b"root:x:0:0\n")
        (self.directory / "key").write_bytes(b"secret")
        os.setxattr(self.file, "user.mark", b"1")
        for path in (top, self.directory, self.file, self.directory / "key"):
            os.chmod(path, 0o700)
            os.utime(path, ns=(10**18, 10**18))
        self._before = self._state()

    def _state(self) -> list[tuple[Any, ...]]:
        found = []
        for at, names, files in os.walk(self.top):
            for path in [at, *(os.path.join(at, name) for name in files)]:
                st = os.lstat(path)
                data = Path(path).read_bytes() if stat.S_ISREG(st.st_mode) else b""
                owner = (st.st_mode, st.st_uid, st.st_gid, st.st_nlink)
                times = (st.st_mtime_ns, st.st_ctime_ns)
                found.append((path, owner, times, os.listxattr(path), data, sorted(names)))
        return sorted(found)

    def check(self) -> None:
        assert self._state() == self._before


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path / "victim")


def accept(st: os.stat_result) -> bool:
    return True


EVERYTHING = Attributes(0o666, (12345, 12345), (10**17, 10**17), {b"user.planted": b"1"})
OWNERSHIP = Ownership(12345, 12345, 0o777)


def _move(parent: Descriptor, old: bytes, new: bytes) -> None:
    blocking.move(
        *(parent, old, parent, new),
        is_ours=accept,
        may_replace=accept,
        noreplace=True,
        link=True,
    )


OPERATIONS: dict[str, Callable[[Descriptor, bytes], object]] = {
    "open to read": lambda at, name: calls.open_file(at, name, os.O_RDONLY),
    "open to write": lambda at, name: calls.open_file(at, name, os.O_RDWR),
    "open to update": lambda at, name: blocking.open_for_update(at, name, accept),
    "create": lambda at, name: calls.create(at, name, 0o666),
    "enter": lambda at, name: calls.open_chain(at, (name, b"ssh")),
    "list": lambda at, name: calls.scan(calls.open_directory(at, name)),
    "own": lambda at, name: calls.set_owner(at, name, 12345, 12345),
    "set times": lambda at, name: calls.set_times(at, name, 10**17, 10**17),
    "read attributes": lambda at, name: blocking.read_xattrs(at, name),
    "set attributes of a file": lambda at, name: blocking.set_attributes(
        at, name, EVERYTHING, blocking.Attempts(), stat.S_IFREG
    ),
    "set attributes of a directory": lambda at, name: blocking.set_attributes(
        at, name, EVERYTHING, blocking.Attempts(), stat.S_IFDIR
    ),
    "set attributes of a link": lambda at, name: blocking.set_attributes(
        at, name, EVERYTHING, blocking.Attempts(), stat.S_IFLNK
    ),
    "make a directory": lambda at, name: blocking.make_directory(
        at, name, 0o777, OWNERSHIP, blocking.Attempts(), chmod=True
    ),
    "make a link": lambda at, name: blocking.make_symlink(at, name, b"elsewhere"),
    "link": lambda at, name: blocking.make_link(at, name, at, b"new", accept),
    "link over": lambda at, name: blocking.make_link(at, b"own", at, name, accept),
    "publish": lambda at, name: _move(at, b"own", name),
    "publish what was swapped": lambda at, name: _move(at, name, b"new"),
    "remove a file": lambda at, name: blocking.remove_file(at, name, accept),
    "remove a directory": lambda at, name: blocking.remove_directory(at, name, lambda _: True),
    "remove a temporary": lambda at, name: blocking.remove_temporary(at, name),
}


def _plant_link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _plant_fifo(path: Path, target: Path) -> None:
    os.mkfifo(path)


def _plant_device(path: Path, target: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        pytest.skip("no devices can be made, or opened, here")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("plant", "aim"),
    [
        (_plant_link, "file"),
        (_plant_link, "directory"),
        (_plant_link, "top"),
        (_plant_fifo, "file"),
        (_plant_device, "file"),
    ],
)
def test_no_operation_leaves_the_share(
    tmp_path: Path,
    victim: Victim,
    operation: str,
    plant: Callable[[Path, Path], None],
    aim: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    top = tmp_path / "share"
    top.mkdir()
    (top / "own").write_bytes(b"ours")
    plant(top / "swapped", getattr(victim, aim))
    parent = Descriptor(os.open(top, os.O_PATH | os.O_DIRECTORY))
    opened: list[str] = []
    real = os.open

    def watch(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        descriptor = real(path, flags, *args, **kwargs)
        kind = os.fstat(descriptor).st_mode
        if not flags & os.O_PATH and not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            opened.append(str(path))
        return descriptor

    monkeypatch.setattr(os, "open", watch)
    try:
        # An error is an answer; a hang or a change outside is not.
        with contextlib.suppress(OSError, ConflictError, LostTemporaryError):
            OPERATIONS[operation](parent, b"swapped")
    finally:
        monkeypatch.undo()
    victim.check()
    assert not opened


def test_the_directory_of_wbcache_s_own_can_be_a_link(
    tmp_path: Path, victim: Victim, fuse: None
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    (share / ".wbcache").symlink_to(victim.directory)
    with pytest.raises(AssertionError, match=r"mount: wbcache: .*: the share can't be used"):
        with Mounted(share):
            pass
    victim.check()
    assert BindingError.exit_code == 10


CONFIG = merge(NEVER_BY_ITSELF, {"flush": {"retry": {"first": "20ms", "max": "100ms"}}})

OLD = {f"old{number}": blob(f"old{number}") for number in range(6)}


def change_everything(top: Path) -> dict[str, bytes]:
    """One of each kind of change, in a directory that holds `OLD`; returns what was written."""
    (top / "new").write_bytes(blob("new"))
    with open(top / "old0", "ab") as file:
        file.write(b"grown")
    with open(top / "old1", "r+b") as file:
        file.write(b"patched")
    (top / "old2").write_bytes(blob("replaced"))
    os.chmod(top / "old3", 0o600)
    os.chown(top / "old3", 1234, 1234)
    os.utime(top / "old3", ns=(10**17, 10**17))
    os.setxattr(top / "old3", "user.x", b"1")
    os.rename(top / "old4", top / "renamed")
    os.link(top / "renamed", top / "linked")
    (top / "old5").unlink()
    (top / "deep").mkdir()
    (top / "deep" / "passwd").write_bytes(blob("deep"))
    os.symlink("new", top / "symlink")
    os.chmod(top, 0o711)
    return {name: blob(name) for name in ("new", "deep", "replaced")}


def exchange(a: Path, b: Path) -> None:
    """Swap two names at once."""
    at = -100
    if _libc.renameat2(at, os.fsencode(a), at, os.fsencode(b), calls.RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@pytest.fixture
def hostile(tmp_path: Path, victim: Victim, fuse: None) -> Iterator[tuple[Mounted, Path]]:
    """A mount by root of a share that others write to; beside its directory lies a link."""
    share = tmp_path / "share"
    (share / "dir").mkdir(parents=True)
    for name, data in OLD.items():
        (share / "dir" / name).write_bytes(data)
    (share / "trap").symlink_to(victim.top)
    with Mounted(share, config=CONFIG) as mount:
        assert sorted(os.listdir(mount.path / "dir")) == sorted(OLD)
        yield mount, share
    victim.check()


def settled(mount: Mounted) -> None:
    """Flush until nothing is left but what can't be: bytes that only the share had."""
    left = mount.client.flush([b""], 30.0)
    assert not [row for row in left if not row["reason"]], left


@pytest.mark.parametrize("remount", [False, True], ids=["running", "remounted"])
def test_a_directory_that_became_a_link_leads_nowhere(
    hostile: tuple[Mounted, Path], victim: Victim, remount: bool
) -> None:
    mount, share = hostile
    written = change_everything(mount.path / "dir")
    if remount:
        mount.kill()
    exchange(share / "dir", share / "trap")
    if remount:
        mount.remount()
    settled(mount)
    victim.check()
    # Nothing that was written is lost.
    held = [data for _, data in contents(share).values()]
    assert all(data in held for data in written.values())


def test_attributes_of_a_directory_that_became_a_link(
    hostile: tuple[Mounted, Path], victim: Victim
) -> None:
    mount, share = hostile
    os.chmod(mount.path / "dir", 0o711)
    exchange(share / "dir", share / "trap")
    settled(mount)
    assert (share / "dir").is_symlink()


@contextlib.contextmanager
def swapped_all_the_time(a: Path, b: Path) -> Iterator[None]:
    """Two names are exchanged again and again while the block runs."""
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            exchange(a, b)
            exchange(a, b)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        yield
    finally:
        over.set()
        swapper.join()


def test_a_directory_that_is_swapped_all_the_time(
    hostile: tuple[Mounted, Path], victim: Victim
) -> None:
    mount, share = hostile
    written = []
    for number in range(4):
        top = mount.path / "dir" / str(number)
        top.mkdir()
        for name, data in OLD.items():
            (top / name).write_bytes(data)
        mount.flush(f"dir/{number}")
        change_everything(top)
        (top / "deep" / "own").write_bytes(blob(str(number)))
        written.append(blob(str(number)))
        trap = share / "dir" / f"trap{number}"
        trap.symlink_to(victim.top)
        with swapped_all_the_time(share / "dir" / str(number), trap):
            mount.client.flush([b""], 1.0)
        victim.check()
    settled(mount)
    held = [data for _, data in contents(share).values()]
    assert all(data in held for data in written)


def test_files_that_became_links_fifos_and_directories(
    hostile: tuple[Mounted, Path], victim: Victim
) -> None:
    mount, share = hostile
    for name in OLD:
        (mount.path / "dir" / name).stat()
    written = change_everything(mount.path / "dir")
    for number, name in enumerate(OLD):
        path = share / "dir" / name
        path.unlink()
        if number % 3 == 0:
            path.symlink_to(victim.file)
        elif number % 3 == 1:
            os.mkfifo(path)
        else:
            path.mkdir()
    settled(mount)
    held = [data for _, data in contents(share).values()]
    assert all(data in held for data in written.values())
    assert stat.S_ISFIFO(os.lstat(share / "dir" / "old1").st_mode)


def test_what_is_planted_under_the_names_of_temporaries_is_not_written_to(
    hostile: tuple[Mounted, Path], victim: Victim
) -> None:
    mount, share = hostile
    (own,) = (share / ".wbcache").glob("id-*.json")
    uuid8 = own.name[3:11]
    for number in range(6):
        planted = share / f".wbcache-{uuid8}-1z{number:x}"
        if number % 3 == 0:
            planted.symlink_to(victim.file)
        elif number % 3 == 1:
            os.mkfifo(planted)
        else:
            planted.mkdir()
    (mount.path / "file").write_bytes(blob("file"))
    mount.flush()
    assert (share / "file").read_bytes() == blob("file")


def test_bytes_are_not_read_through_what_was_swapped(
    hostile: tuple[Mounted, Path], victim: Victim
) -> None:
    mount, share = hostile
    for name in OLD:
        (mount.path / "dir" / name).stat()
    for name in ("old0", "old1"):
        (share / "dir" / name).unlink()
    (share / "dir" / "old0").symlink_to(victim.file)
    os.mkfifo(share / "dir" / "old1")
    for name in ("old0", "old1"):
        try:
            # O_NONBLOCK: by now the mount may show the fifo as one.
            descriptor = os.open(mount.path / "dir" / name, os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            assert b"root" not in os.read(descriptor, 100)
        except OSError:
            pass
        finally:
            os.close(descriptor)
