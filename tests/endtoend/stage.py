"""A test's own directory on a mounted fault share, and what the share was asked about it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faultshare.client import FaultShare
from tests.faultshare.oplog import Op
from tests.mounting import Mounted, contents
from tests.waiting import wait_until

TEMPORARY = ".wbcache-"
CONFLICT = ".conflict-"


class Stage:
    """One directory, in three places: in the mount, on the share, and behind the share."""

    def __init__(self, share: FaultShare, mount: Mounted, name: str) -> None:
        self.share = share
        self.mount = mount
        self.name = name
        self.path = mount.path / name
        """In the mount."""
        self.backing = share.backing / name
        """Behind the share: what it really holds, read without delay."""
        self._since = 0
        self._log_from = len(mount.log())

    def open(self) -> None:
        """Make the directory and start with an empty log."""
        self.path.mkdir()
        self.flush("")
        self.begin()

    def put(self, name: str, data: bytes) -> None:
        """A file that is on the share already, and was never seen through the mount."""
        (self.backing / name).parent.mkdir(exist_ok=True, parents=True)
        (self.backing / name).write_bytes(data)

    def put_hole(self, name: str, size: int) -> None:
        """A file of zeros on the share that takes no room."""
        (self.backing / name).parent.mkdir(exist_ok=True, parents=True)
        with open(self.backing / name, "wb") as file:
            file.truncate(size)

    def begin(self) -> None:
        """Forget what the share was asked so far; nothing may be under way."""
        self._since = self.share.clear_log()

    def flush(self, *names: str, timeout: float = 30.0) -> None:
        """Bring names (none: the whole directory) to the share."""
        paths = [f"{self.name}/{name}" for name in names or ("",)]
        self.mount.flush(*paths, timeout=timeout)

    @contextmanager
    def stuck(self) -> Iterator[None]:
        """The share takes no changes in this directory; what was tried is carried out at the end.

        Whatever is changed meanwhile is due already when the next change is made.
        """
        rule = self.share.hang(["mutations"], f"{self.name}/*")
        try:
            yield
        finally:
            self.share.release(rule)

    def appears(self, name: str, data: bytes | None = None, deadline: float = 20.0) -> None:
        """Wait until the mount shows what was put on the share."""
        path = self.path / name
        wait_until(
            lambda: path.exists() and (data is None or path.read_bytes() == data),
            f"the mount shows {name}",
            deadline,
        )

    def arrives(self, name: str, data: bytes | None = None, deadline: float = 20.0) -> None:
        """Wait until the share holds something of its own accord."""
        path = self.backing / name
        wait_until(
            lambda: path.exists() and (data is None or path.read_bytes() == data),
            f"the share has {name}",
            deadline,
        )

    # -- what the share was asked ----------------------------------------------------------------

    def ops(self, *kinds: str, match: str = "") -> list[Op]:
        """The calls in this directory that took effect, in order, paths relative to it."""
        prefix = f"{self.name}/"
        found = []
        for op in self.share.log(self._since):
            inside = op.path.startswith(prefix) or (op.path2 or "").startswith(prefix)
            if inside and op.effect and (not kinds or op.op in kinds):
                op.path = op.path.removeprefix(prefix)
                op.path2 = op.path2.removeprefix(prefix) if op.path2 is not None else None
                if match in op.path or match in (op.path2 or ""):
                    found.append(op)
        return found

    def names_seen(self) -> set[str]:
        """Every name that was ever made on the share since `begin`."""
        seen = set()
        for op in self.ops("create", "mkdir", "symlink", "link", "rename", "mknod"):
            seen.add(op.path2 if op.op in ("link", "rename") and op.path2 is not None else op.path)
        return seen

    def written(self) -> int:
        """Bytes that moved to the share."""
        return sum(op.size for op in self.ops("write"))

    def read(self) -> int:
        """Bytes that moved from the share."""
        return sum(op.size for op in self.ops("read"))

    def states(self, into: Path) -> Iterator[Path]:
        """The directory as it would be found after each call, had the machine vanished then."""
        for _, top in self.share.states(into):
            yield top / self.name

    # -- the end ---------------------------------------------------------------------------------

    def shown(self) -> dict[str, tuple[int, bytes]]:
        """What the mount holds."""
        return contents(self.path)

    def held(self) -> dict[str, tuple[int, bytes]]:
        """What the share holds."""
        return contents(self.backing)

    def settle(self, timeout: float = 30.0) -> None:
        """Flush everything; the share then holds what the mount shows and nothing else."""
        shown = self.shown()
        self.flush(timeout=timeout)
        # A removal of one may have failed, which a flush does not wait for.
        wait_until(lambda: not self.leftovers(), "the temporaries are removed", 10)
        held = self.held()
        assert compact(held) == compact(shown)
        assert not [name for name in held if CONFLICT in name]

    def leftovers(self) -> list[str]:
        """Names of wbcache's own that lie about on the share."""
        return [name for name in self.held() if TEMPORARY in name]

    def told(self) -> list[str]:
        """The daemon's log since the beginning of the test."""
        return self.mount.log()[self._log_from :].splitlines()

    def close(self) -> None:
        """Remove everything; nothing may come back."""
        self.share.clear()
        shutil.rmtree(self.path)
        remaining = self.mount.client.flush([b""], 30.0)
        assert not os.path.lexists(self.backing), remaining
        log = self.told()
        assert not any("Traceback" in line for line in log), log


def compact(tree: dict[str, tuple[int, bytes]]) -> dict[str, tuple[str, int, bytes | int]]:
    """For readable differences: long contents by their hash."""
    return {
        name: (oct(mode), len(data), data if len(data) < 200 else hash(data))
        for name, (mode, data) in tree.items()
    }
