"""One file, what it must hold, and everything that can happen to it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bytetest.places import length, place
from tests.diskusage import disk_usage
from tests.mounting import Mounted
from tests.waiting import wait_until

LONGEST = 400_000
"""Bytes of the file at most, nearly."""

DESCRIPTORS = 3
HISTORY = 60

PUNCH_HOLE, KEEP_SIZE, ZERO_RANGE = 2, 1, 16

_libc = ctypes.CDLL(None, use_errno=True)


class ByteTester:
    """The file under test. An operation that is not possible just now does nothing."""

    def __init__(
        self, mount: Mounted, backing: Path, name: str, rng: random.Random, longest: int = LONGEST
    ) -> None:
        """``backing`` is what the share really holds."""
        self._mount = mount
        self._backing = backing
        self._name = name
        self._rng = rng
        self._longest = longest
        self._model = bytearray()
        self._appending: list[int] = []
        self._descriptors = [os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)]
        self._mapping: mmap.mmap | None = None
        self._stored = False
        """Bytes were stored through a mapping since they were last sure to have arrived."""
        self._removed: list[tuple[int, bytearray]] = []
        """Files that have lost their name, and what they must hold."""
        self.history: list[str] = []

    @property
    def _path(self) -> Path:
        return self._mount.path / self._name

    @property
    def name(self) -> str:
        """Its present name."""
        return self._name

    def close(self) -> None:
        """Close everything."""
        self._unmap()
        for fd in [*self._descriptors, *self._appending, *(fd for fd, _ in self._removed)]:
            with contextlib.suppress(OSError):  # of a mount that was killed
                os.close(fd)
        self._descriptors.clear()
        self._appending.clear()
        self._removed.clear()

    def _note(self, text: str) -> None:
        self.history.append(text)
        del self.history[:-HISTORY]

    @property
    def _descriptor(self) -> int:
        return self._rng.choice(self._descriptors)

    # -- what changes it -----------------------------------------------------------------------

    def _data(self, longest: int) -> bytes:
        return self._rng.randbytes(length(self._rng, longest))

    def _put(self, offset: int, data: bytes, model: bytearray | None = None) -> None:
        model = self._model if model is None else model
        if offset > len(model):
            model.extend(bytes(offset - len(model)))
        model[offset : offset + len(data)] = data

    def write(self) -> None:
        """pwrite anywhere, also behind the end."""
        offset, data = place(self._rng, self._longest), self._data(140_000)
        self._note(f"write {len(data)} at {offset}")
        assert os.pwrite(self._descriptor, data, offset) == len(data)
        self._put(offset, data)

    def write_scattered(self) -> None:
        """pwritev of several pieces."""
        pieces = [self._data(20_000) for _ in range(self._rng.randint(2, 4))]
        offset, total = place(self._rng, self._longest), sum(map(len, pieces))
        self._note(f"writev {[len(piece) for piece in pieces]} at {offset}")
        assert os.pwritev(self._descriptor, pieces, offset) == total
        self._put(offset, b"".join(pieces))

    def append(self) -> None:
        """Append a little through a descriptor of its own, as a logger does."""
        if len(self._model) > self._longest:
            return
        data = self._data(200)
        self._note(f"append {len(data)}")
        with open(self._path, "ab") as file:
            file.write(data)
        self._put(len(self._model), data)

    def append_held(self) -> None:
        """Append through a descriptor that stays open."""
        if not self._appending:
            self._appending.append(os.open(self._path, os.O_WRONLY | os.O_APPEND))
        if len(self._model) > self._longest:
            return
        data = self._data(5000)
        self._note(f"append {len(data)}, held")
        assert os.write(self._appending[0], data) == len(data)
        self._put(len(self._model), data)

    def truncate(self) -> None:
        """Cut or extend, by a descriptor or by name."""
        size = self._rng.choice([0, place(self._rng, self._longest), len(self._model) // 2])
        self._note(f"truncate to {size}")
        if self._rng.random() < 0.5:
            os.ftruncate(self._descriptor, size)
        else:
            os.truncate(self._path, size)
        self._model[size:] = bytes(max(0, size - len(self._model)))

    def rewrite(self) -> None:
        """O_TRUNC and new bytes."""
        data = self._data(140_000)
        self._note(f"rewrite with {len(data)}")
        self._path.write_bytes(data)
        self._model[:] = data

    def copy(self) -> None:
        """copy_file_range within the file."""
        size, fd = len(self._model), self._descriptor
        if size < 2:
            return
        source = self._rng.randrange(size - 1)
        count = length(self._rng, size - source)
        target = place(self._rng, self._longest)
        if source < target + count and target < source + count:
            return
        done = os.copy_file_range(fd, fd, count, source, target)
        self._note(f"copy {done} from {source} to {target}")
        self._put(target, bytes(self._model[source : source + done]))

    def allocate(self) -> None:
        """posix_fallocate, which never takes anything away."""
        offset, count = place(self._rng, self._longest), length(self._rng, 50_000)
        self._note(f"posix_fallocate {count} at {offset}")
        os.posix_fallocate(self._descriptor, offset, count)
        self._model.extend(bytes(max(0, offset + count - len(self._model))))

    def punch(self) -> None:
        """Punch a hole or zero a range, where that is supported."""
        if not self._model:
            return
        offset = self._rng.randrange(len(self._model))
        count = length(self._rng, len(self._model) - offset)
        mode = self._rng.choice([PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE | KEEP_SIZE])
        where = ctypes.c_int64(offset), ctypes.c_int64(count)
        if _libc.fallocate(self._descriptor, mode, *where):
            assert ctypes.get_errno() == errno.EOPNOTSUPP
        else:
            self._note(f"fallocate {mode}: {count} at {offset}")
            self._model[offset : offset + count] = bytes(count)

    # -- mappings ------------------------------------------------------------------------------

    def _mapped(self) -> mmap.mmap | None:
        """A mapping of the file as long as it was when it was mapped."""
        if self._mapping is None and self._model:
            fd = self._descriptor
            self._mapping = mmap.mmap(fd, len(self._model))
            self._note(f"map {len(self._model)}")
        return self._mapping

    def _unmap(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def store(self) -> None:
        """Store through a shared mapping, which stays; the descriptor may be closed long since."""
        mapping = self._mapped()
        # Behind the file's end a mapping must not be touched.
        size = min(len(mapping), len(self._model)) if mapping is not None else 0
        if mapping is None or not size:
            return
        offset = min(place(self._rng, size), size - 1)
        data = self._data(40_000)[: size - offset]
        self._note(f"store {len(data)} at {offset}")
        mapping[offset : offset + len(data)] = data
        self._put(offset, data)
        self._stored = True
        if self._rng.random() < 0.3:
            self.msync()

    def msync(self) -> None:
        """What was stored is acknowledged."""
        if self._mapping is not None:
            self._note("msync")
            self._mapping.flush()
            self._stored = False

    def look_at_mapping(self) -> None:
        """The mapping shows what the file holds."""
        mapping = self._mapped()
        if mapping is not None:
            size = min(len(mapping), len(self._model))
            self._same(mapping[:size], bytes(self._model[:size]), 0, "the mapping")

    def unmap(self) -> None:
        """Unmap: what was stored arrives later."""
        if self._mapping is not None:
            self._note("unmap")
            self._unmap()

    # -- names and descriptors -----------------------------------------------------------------

    def rename(self) -> None:
        """The file gets another name while it is open."""
        name = f"{self._name.split('.')[0]}.{self._rng.randrange(4)}"
        self._note(f"rename to {name}")
        os.rename(self._path, self._mount.path / name)
        self._name = name

    def replace(self) -> None:
        """Rename a new file over it; old descriptors go on to work with what they have."""
        data = self._data(140_000)
        self._note(f"replace with {len(data)}")
        temporary = self._path.with_name(f"{self._name}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, self._path)
        self._lose_name()
        self._model = bytearray(data)
        self._descriptors = [os.open(self._path, os.O_RDWR)]

    def remove(self) -> None:
        """Remove it, and begin another."""
        self._note("remove")
        os.unlink(self._path)
        self._lose_name()
        self._model = bytearray()
        self._descriptors = [os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)]

    def _lose_name(self) -> None:
        self._unmap()
        for fd in [*self._descriptors[1:], *self._appending]:
            os.close(fd)
        self._appending.clear()
        self._removed.append((self._descriptors[0], self._model))
        while len(self._removed) > 2:
            os.close(self._removed.pop(0)[0])

    def write_removed(self) -> None:
        """Write to a file that has no name any more."""
        if self._removed:
            fd, model = self._rng.choice(self._removed)
            offset, data = place(self._rng, self._longest), self._data(40_000)
            self._note(f"write {len(data)} at {offset} of a removed file")
            assert os.pwrite(fd, data, offset) == len(data)
            self._put(offset, data, model)

    def check_removed(self) -> None:
        """It still holds what it should."""
        for fd, model in self._removed:
            self._same(os.pread(fd, len(model) + 1, 0), bytes(model), 0, "a removed file")

    def open_another(self) -> None:
        """A further descriptor, or one less."""
        if len(self._descriptors) < DESCRIPTORS:
            self._descriptors.append(os.open(self._path, os.O_RDWR))
        else:
            os.close(self._descriptors.pop(0))

    def reopen(self) -> None:
        """Close all and open; the kernel forgets its pages of it."""
        self._note("reopen")
        self.forget()
        for fd in [*self._descriptors, *self._appending]:
            os.close(fd)
        self._appending.clear()
        self._descriptors = [os.open(self._path, os.O_RDWR)]

    # -- what does not change it ---------------------------------------------------------------

    def sync(self) -> None:
        """fsync or fdatasync."""
        self._note("fsync")
        self._rng.choice([os.fsync, os.fdatasync])(self._descriptor)

    def forget(self) -> None:
        """The kernel forgets its pages; reads arrive at the daemon again."""
        os.fsync(self._descriptors[0])
        os.posix_fadvise(self._descriptors[0], 0, 0, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """Read a part, or all of it."""
        size, fd = len(self._model), self._descriptor
        offset = self._rng.choice([0, place(self._rng, self._longest)])
        count = length(self._rng, 2 * self._longest)
        assert os.fstat(fd).st_size == size, (os.fstat(fd).st_size, size)
        found = os.pread(fd, count, offset)
        self._same(found, bytes(self._model[offset : offset + count]), offset, "a read")

    def check_all(self) -> None:
        """Read everything, by name."""
        self._same(self._path.read_bytes(), bytes(self._model), 0, "the mount")

    def _same(self, found: bytes, wanted: bytes, offset: int, what: str) -> None:
        if found == wanted:
            return
        at = next(
            (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
            min(len(found), len(wanted)),
        )
        raise AssertionError(
            f"{what}: {len(found)} bytes from {offset} instead of {len(wanted)}; from byte"
            f" {offset + at} on {found[at : at + 16].hex()} instead of"
            f" {wanted[at : at + 16].hex()}"
        )

    # -- what the mount goes through -----------------------------------------------------------

    def flush(self) -> None:
        """Bring it to the share, which then holds the same."""
        self._note("flush")
        self._hand_over()
        self._mount.flush(self._name)
        on_share = (self._backing / self._name).read_bytes()
        self._same(on_share, bytes(self._model), 0, "the share")

    def leave_only_on_share(self) -> None:
        """Flush, and wait until the cache holds none of its bytes."""
        while self._removed:  # what was never flushed stays for as long as it is open
            os.close(self._removed.pop()[0])
        self.flush()
        self._note("evict")
        wait_until(
            lambda: disk_usage(self._mount.cache_dir / "data") < FILLING + EVICTED, "clean bytes go"
        )
        self.forget()

    def kill(self) -> None:
        """Kill the daemon and mount again: everything acknowledged is still there."""
        self._note("kill")
        self._hand_over()
        self._mount.strike()
        self._mount.wait_killed()
        self.close()
        self._mount.remount()
        self._descriptors = [os.open(self._path, os.O_RDWR)]
        self.check_all()

    def _hand_over(self) -> None:
        """What was stored through mappings has arrived; syncfs does not wait for that."""
        if self._stored:
            os.fsync(self._descriptors[0])
        self._stored = False


FILLING = 34 << 20
"""Bytes that leave so little room in the small cache that whatever is clean is evicted."""

EVICTED = 64 << 10
"""Bytes that may remain of the cache files when everything clean is gone."""

Operation = Callable[[ByteTester], None]

WEIGHTS: dict[Operation, int] = {
    ByteTester.write: 24,
    ByteTester.write_scattered: 4,
    ByteTester.append: 10,
    ByteTester.append_held: 6,
    ByteTester.truncate: 9,
    ByteTester.rewrite: 2,
    ByteTester.copy: 4,
    ByteTester.allocate: 2,
    ByteTester.punch: 1,
    ByteTester.store: 14,
    ByteTester.msync: 3,
    ByteTester.look_at_mapping: 6,
    ByteTester.unmap: 4,
    ByteTester.rename: 3,
    ByteTester.replace: 2,
    ByteTester.remove: 1,
    ByteTester.write_removed: 1,
    ByteTester.check_removed: 2,
    ByteTester.open_another: 4,
    ByteTester.reopen: 5,
    ByteTester.sync: 3,
    ByteTester.forget: 6,
    ByteTester.check: 24,
    ByteTester.check_all: 3,
}


@contextlib.contextmanager
def explained(tester: ByteTester, seed: int) -> Iterator[None]:
    """Say what led to a failure."""
    try:
        yield
    except BaseException:
        print(f"seed {seed}, the last operations:", *tester.history, sep="\n  ")
        raise
    finally:
        tester.close()


def play(
    mount: Mounted,
    backing: Path,
    seed: int,
    extra: dict[Operation, int],
    wanted: Callable[[int], bool],
) -> int:
    """Random operations for as long as they are ``wanted``, given how many there were; then a flush
    after which the share must hold the same. Returns how many there were."""
    rng = random.Random(seed)
    tester = ByteTester(mount, backing, f"file{seed}", rng)
    weights = {**WEIGHTS, **extra}
    done = 0
    with explained(tester, seed):
        while wanted(done):
            rng.choices([*weights], [*weights.values()])[0](tester)
            done += 1
        tester.forget()
        tester.check_all()
        tester.check_removed()
        tester.flush()
    return done
