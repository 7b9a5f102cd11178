"""Mappings between processes: one view of a file, whatever the flush and other programs do."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.endtoend.checkpoints import blob
from tests.endtoend.stage import Stage
from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted
from tests.posix.parity import Case, Parity, State
from tests.processes.peers import Peer, elsewhere
from tests.waiting import wait_until

PAGE = mmap.PAGESIZE
DATA = blob("mapped", 8 * PAGE)

pytestmark = pytest.mark.timeout(120)


def build(top: Path) -> None:
    """A file of eight pages."""
    (top / "file").write_bytes(DATA)


@contextlib.contextmanager
def mapped(
    path: Path, size: int = 0, flags: int = mmap.MAP_SHARED, writable: bool = True
) -> Iterator[mmap.mmap]:
    """A mapping for the length of a block; its descriptor is closed at once."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    fd = os.open(path, os.O_RDWR if writable and flags == mmap.MAP_SHARED else os.O_RDONLY)
    try:
        mapping = mmap.mmap(fd, size, flags, protection)
    finally:
        os.close(fd)
    try:
        yield mapping
    finally:
        mapping.close()


def how_it_ends(work: Callable[[], object]) -> object:
    """What something gives in a process of its own, or the signal that ends it."""

    def child(line: Connection) -> object:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        return work()

    with Peer(child) as peer:
        status = peer.end()
        return signal.Signals(-status).name if status < 0 else peer.hear()


def touch(shared: mmap.mmap, page: int, store: bool = False) -> object:
    """Read, or store, in one page of a mapping."""
    if store:
        shared[page * PAGE] = 0x21
    return shared[page * PAGE]


def test_one_view(parity: Parity, state: State) -> None:
    """Stores, writes and truncations of several processes, which all map the file."""

    def between_processes(top: Path) -> object:
        def peer(line: Connection) -> None:
            with mapped(top / "file") as shared, open(top / "file", "r+b", buffering=0) as file:
                while (order := line.recv()) is not None:
                    how, at, data = order
                    if how == "store":
                        shared[at : at + len(data)] = data
                    elif how == "write":
                        os.pwrite(file.fileno(), data, at)
                    line.send((shared[at : at + 10], os.pread(file.fileno(), 10, at)))

        seen: list[object] = []
        with Peer(peer) as other, mapped(top / "file") as shared:
            for number, how in enumerate(["store", "write"] * 6):
                at = number * 2500
                other.tell((how, at, b"%04d" % number))
                seen += [other.hear(), shared[at : at + 10]]
                shared[at + 1] = 0x58
                other.tell(("look", at, b""))
                seen += [other.hear()]
                if number % 4 == 1:
                    parity.flush()
            other.tell(None)
        return [*seen, (top / "file").read_bytes()]

    def beyond_the_end(top: Path) -> object:
        """A page behind the last one is SIGBUS; the rest of the last one is zeros."""
        path = top / "file"
        seen: list[object] = []
        with mapped(path) as shared:
            os.truncate(path, 3 * PAGE + 100)
            seen.append(shared[3 * PAGE + 90 : 3 * PAGE + 110])
            for page in (2, 3, 4, 7):
                for store in (False, True):
                    seen.append(how_it_ends(functools.partial(touch, shared, page, store)))
            shared[3 * PAGE + 200] = 0x77  # behind the end: belongs to nobody
            os.truncate(path, 5 * PAGE)
            seen.append(how_it_ends(functools.partial(touch, shared, 4, True)))
            parity.flush()
            seen.append(how_it_ends(functools.partial(touch, shared, 5, False)))
            os.truncate(path, 0)
            seen.append(how_it_ends(functools.partial(touch, shared, 0, False)))
            with open(path, "wb") as file:
                file.write(b"new" * PAGE)
            seen.append(shared[: 3 * PAGE].count(b"new"))
        return [str(each) for each in seen]

    def of_a_truncation_elsewhere(top: Path) -> object:
        """A process that maps more than there is any more, by another's doing."""

        def peer(line: Connection) -> None:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            with mapped(top / "file") as shared:
                line.send(shared[5 * PAGE : 5 * PAGE + 10])
                line.recv()
                line.send(shared[:10])
                line.send(shared[5 * PAGE : 5 * PAGE + 10])

        with Peer(peer) as other:
            seen = [other.hear()]
            os.truncate(top / "file", PAGE)
            other.tell()
            return [*seen, other.hear(), signal.Signals(-other.end()).name]

    def private(top: Path) -> object:
        """Its own stores are nobody else's; what it has not touched is the file's."""
        path = top / "file"
        with mapped(path, flags=mmap.MAP_PRIVATE) as mine:
            mine[:4] = b"mine"
            with open(path, "r+b", buffering=0) as file:
                file.write(b"theirs")
            parity.flush()
            seen = [mine[:10], path.read_bytes()[:10]]
            os.unlink(path)
            seen += [mine[:10], mine[7 * PAGE :]]
        return [*seen, path.exists()]

    def replaced_and_removed(top: Path) -> object:
        """The mapping stays with its file, in another process too."""

        def peer(line: Connection) -> None:
            with mapped(top / "file") as shared:
                line.send("mapped")
                while (word := line.recv()) is not None:
                    shared[PAGE : PAGE + len(word)] = word
                    line.send(shared[PAGE - 3 : PAGE + 10])

        path, seen = top / "file", []
        with Peer(peer) as other:
            seen = [other.hear()]
            for number in range(4):
                other.tell(b"turn %d" % number)
                seen += [other.hear()]
                if number == 0:
                    os.rename(path, top / "moved")
                    path.write_bytes(b"another")
                elif number == 1:
                    parity.flush()
                elif number == 2:
                    os.replace(path, top / "moved")
                    seen += [(top / "moved").read_bytes()]
            other.tell(None)
            other.hear()
        return seen

    works = [between_processes, beyond_the_end, of_a_truncation_elsewhere]
    works += [private, replaced_and_removed]
    parity.check([Case(work.__name__, build, work) for work in works], state)


def test_stores_after_everything_was_closed_arrive(stage: Stage) -> None:
    """By a process that ends without munmap or msync, or is killed."""
    for name in ("ends", "killed"):
        (stage.path / name).write_bytes(DATA)
    stage.flush()

    def store(path: Path, line: Connection) -> None:
        with mapped(path) as shared:
            shared[5 * PAGE : 5 * PAGE + 6] = b"stored"
            line.send("stored")
            line.recv()
            os._exit(0)

    for name in ("ends", "killed"):
        with Peer(functools.partial(store, stage.path / name)) as peer:
            assert peer.hear() == "stored"
            if name == "ends":
                peer.tell()
            else:
                peer.signal(signal.SIGKILL)
            peer.end()
    expected = DATA[: 5 * PAGE] + b"stored" + DATA[5 * PAGE + 6 :]
    stage.settle()
    for name in ("ends", "killed"):
        assert (stage.backing / name).read_bytes() == expected


def test_times_follow_when_a_page_is_handed_over(parity: Parity) -> None:
    """Unlike on a local disk, where a store counts when it is made: what is set in between goes."""

    def set_after_a_store(top: Path) -> int:
        build(top)
        with mapped(top / "file") as shared:
            shared[0] = 0x21
            os.utime(top / "file", (1000, 1000))
            shared.flush()
            return int(os.stat(top / "file").st_mtime)

    place, native = parity.fresh()
    assert set_after_a_store(native) == 1000
    assert set_after_a_store(place) > 1000
    # After the pages were handed over times stay as they are set.
    os.utime(place / "file", (2000, 2000))
    parity.flush()
    assert os.stat(place / "file").st_mtime == 2000


def test_what_was_msynced_survives_a_kill(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "old").write_bytes(DATA)
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF) as mount:
        (mount.path / "new").write_bytes(DATA)

        def store(line: Connection) -> None:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            with contextlib.ExitStack() as stack:
                both = [stack.enter_context(mapped(mount.path / n)) for n in ("new", "old")]
                for number in range(8):
                    for shared in both:
                        at = number * PAGE + 11 * number
                        shared[at : at + 6] = b"synced"
                        shared.flush(number * PAGE, PAGE)
                line.send("synced")
                line.recv()

        with Peer(store) as peer:
            assert peer.hear() == "synced"
            mount.kill()
        mount.remount()
        expected = bytearray(DATA)
        for number in range(8):
            at = number * PAGE + 11 * number
            expected[at : at + 6] = b"synced"
        assert (mount.path / "new").read_bytes() == expected
        assert (mount.path / "old").read_bytes() == expected
        assert mount.umount().returncode == 0
    for name in ("new", "old"):
        assert (tmp_path / "share" / name).read_bytes() == expected


def test_a_mapping_of_what_is_here_needs_no_share(stage: Stage) -> None:
    """With the share hung pages of the cache are had at once, stores too, and never SIGBUS. What
    only the share has is waited for, and comes when it answers again."""
    known, cold = blob("known", 300 * PAGE), blob("cold", 2000 * PAGE)
    (stage.path / "known").write_bytes(known)
    stage.flush()
    stage.put("cold", cold)
    stage.appears("cold")
    fd = os.open(stage.path / "known", os.O_RDWR)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the daemon has to be asked for them
    os.close(fd)

    def use() -> object:
        with mapped(stage.path / "known") as shared:
            for page in (0, 299, 17, 150):
                shared[page * PAGE : page * PAGE + 5] = b"local"
            found = bytes(shared)
            shared.flush()
            return found

    def read_cold(line: Connection) -> object:
        with mapped(stage.path / "cold", writable=False) as shared:
            shared.madvise(mmap.MADV_RANDOM)
            line.send(shared[:PAGE] == cold[:PAGE])
            line.recv()
            return shared[1500 * PAGE : 1501 * PAGE] == cold[1500 * PAGE : 1501 * PAGE]

    with Peer(read_cold) as reader:
        assert reader.hear() is True
        rule = stage.share.hang()
        try:
            reader.tell()
            stage.share.wait_hung(match="*cold")
            found = elsewhere(use)
            assert not reader.has_spoken
            stage.share.release(rule)
            assert reader.hear(60) is True
        finally:
            stage.share.clear()
    expected = bytearray(known)
    for page in (0, 299, 17, 150):
        expected[page * PAGE : page * PAGE + 5] = b"local"
    assert found == expected
    stage.settle()
    assert (stage.backing / "known").read_bytes() == expected


def test_a_cold_file_is_mapped_in_large_pieces(stage: Stage) -> None:
    """Page by page from front to back: far fewer calls on the share than pages, each byte once."""
    data = blob("cold", 20_000_000)
    stage.put("cold", data)
    stage.appears("cold")
    stage.share.set(latency_ms=5)
    stage.begin()
    with mapped(stage.path / "cold", writable=False) as shared:
        pages = [shared[at : at + PAGE] for at in range(0, len(data), PAGE)]
    assert b"".join(pages) == data
    assert len(stage.ops("read")) < len(pages) / 20
    assert stage.read() <= len(data) * 1.05 + (4 << 20)


def test_the_process_that_waits_for_a_page_can_be_killed(stage: Stage) -> None:
    stage.put("cold", blob("cold", 100 * PAGE))
    stage.appears("cold")

    def read_cold(line: Connection) -> object:
        with mapped(stage.path / "cold", writable=False) as shared:
            line.send("mapped")
            return shared[50 * PAGE]

    rule = stage.share.hang(["read"])
    try:
        with Peer(read_cold) as reader:
            assert reader.hear() == "mapped"
            stage.share.wait_hung("read")
            reader.signal(signal.SIGKILL)
            assert reader.end(10) == -signal.SIGKILL
    finally:
        stage.share.release(rule)
    assert (stage.path / "cold").read_bytes() == blob("cold", 100 * PAGE)


def test_a_page_that_can_not_be_had_is_one_signal(tmp_path: Path) -> None:
    """The share is away for longer than the deadline: SIGBUS; then all is as it should be."""
    (tmp_path / "backing").mkdir()
    cold = blob("cold", 100 * PAGE)
    (tmp_path / "backing" / "cold").write_bytes(cold)
    config = {**NEVER_BY_ITSELF, "share": {"deadline": "1s", "lookup_deadline": "1s"}}
    with (
        FaultShare(tmp_path / "backing") as share,
        Mounted(share.mountpoint, config=config) as mount,
    ):
        assert (mount.path / "cold").stat().st_size == len(cold)
        with mapped(mount.path / "cold", writable=False) as shared:
            share.hang()
            assert how_it_ends(functools.partial(touch, shared, 5)) == "SIGBUS"
            share.release()
            share.clear()
            wait_until(
                lambda: how_it_ends(functools.partial(touch, shared, 5)) == cold[5 * PAGE],
                "the page is there",
            )
        assert (mount.path / "cold").read_bytes() == cold


@pytest.mark.parametrize("size", [48 << 20, pytest.param(512 << 20, marks=pytest.mark.slow)])
def test_large_mappings(stage: Stage, size: int) -> None:
    """Filled in any order by several processes, while it is flushed."""
    parts, path = 4, stage.path / "array"
    with open(path, "wb") as file:
        file.truncate(size)
    step = size // parts

    def fill(part: int, line: Connection) -> object:
        with mapped(path) as shared:
            order = list(range(part * step, (part + 1) * step, 1 << 20))
            for at in order[::2] + order[1::2][::-1]:
                shared[at : at + (1 << 20)] = bytes([1 + (at >> 20) % 251]) * (1 << 20)
        return "filled"

    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(functools.partial(fill, part))) for part in range(parts)]
        while not all(peer.has_spoken for peer in peers):
            stage.flush("array", timeout=100)
        assert [peer.hear() for peer in peers] == ["filled"] * parts
    stage.flush(timeout=100)
    for place in (stage.path, stage.backing):
        with open(place / "array", "rb") as found:
            for at in range(0, size, 1 << 20):
                assert found.read(1 << 20) == bytes([1 + (at >> 20) % 251]) * (1 << 20), at


def test_a_database_that_is_mostly_empty(stage: Stage) -> None:
    """lmdb with a writable map: a hole of 64 MiB, stores through the map, msync of single pages."""
    size, path = 64 << 20, stage.path / "data.mdb"
    with open(path, "w+b") as file:
        file.truncate(size)
        shared = mmap.mmap(file.fileno(), size)
    for number in range(30):
        at = number * 37 * PAGE
        shared[at : at + 9] = b"page %04d" % number
        shared.flush(at, PAGE)
        if number % 10 == 9:
            stage.flush("data.mdb")
    shared.close()
    stage.settle()
    assert stage.written() < 16 << 20
    with open(stage.backing / "data.mdb", "rb") as found:
        for number in range(30):
            found.seek(number * 37 * PAGE)
            assert found.read(9) == b"page %04d" % number
        assert os.fstat(found.fileno()).st_size == size
