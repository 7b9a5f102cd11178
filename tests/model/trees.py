"""What a directory holds, be it the plain one, the share, or what the mount shows."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tests.model.kernel import Kernel, Path, Shown
from wbcache.share.names import is_hidden

OLD = 1_000_000_000_000_000_000
"""A time, in nanoseconds, that only a call that sets times can have made older than."""


@dataclass(frozen=True)
class Entry:
    """One name. What has no meaning for its kind is empty."""

    mode: int
    data: bytes
    """Of a file its bytes, of a link its target."""
    size: int
    nlink: int
    mtime: int
    """0 for any that nobody has set."""
    xattrs: tuple[tuple[bytes, bytes], ...]
    group: int
    """The same for all names of one file."""

    def __repr__(self) -> str:
        data = self.data if len(self.data) < 60 else f"<{hash(self.data):x}>"
        return (
            f"({self.mode:o} {self.size} {data!r} nlink {self.nlink} mtime {self.mtime}"
            f" {dict(self.xattrs)} #{self.group})"
        )


Tree = dict[Path, Entry]


def _entry(
    shown: Shown, data: bytes, xattrs: Mapping[bytes, bytes], groups: dict[int, int]
) -> Entry:
    is_file, is_link = stat.S_ISREG(shown.mode), stat.S_ISLNK(shown.mode)
    return Entry(
        mode=stat.S_IFMT(shown.mode) if is_link else shown.mode,
        data=data,
        size=0 if stat.S_ISDIR(shown.mode) else shown.size,
        nlink=shown.nlink if is_file else 0,
        mtime=0 if is_link or shown.mtime >= OLD else shown.mtime,
        xattrs=tuple(sorted(xattrs.items())),
        group=groups.setdefault(shown.ino, len(groups)),
    )


def held(top: str, inodes: dict[Path, int] | None = None) -> Tree:
    """A directory on the disk; the inode numbers go to ``inodes``."""
    found: Tree = {}
    groups: dict[int, int] = {}

    def visit(directory: bytes, prefix: Path) -> None:
        for name in sorted(os.listdir(directory)):
            at, path = os.path.join(directory, name), (*prefix, name)
            st = os.lstat(at)
            data = b""
            if stat.S_ISREG(st.st_mode):
                with open(at, "rb") as file:
                    data = file.read()
            elif stat.S_ISLNK(st.st_mode):
                data = os.readlink(at)
            xattrs = {
                os.fsencode(n): os.getxattr(at, n, follow_symlinks=False)
                for n in os.listxattr(at, follow_symlinks=False)
                if n.startswith("user.")
            }
            shown = Shown(st.st_ino, st.st_mode, st.st_nlink, st.st_size, st.st_mtime_ns)
            found[path] = _entry(shown, data, xattrs, groups)
            if inodes is not None:
                inodes[path] = st.st_ino
            if stat.S_ISDIR(st.st_mode):
                visit(at, path)

    visit(os.fsencode(top), ())
    return found


async def shown(kernel: Kernel, inodes: dict[Path, int], *, with_xattrs: bool) -> Tree:
    """What the mount shows; its inode numbers go to ``inodes``."""
    found: Tree = {}
    groups: dict[int, int] = {}

    async def visit(prefix: Path) -> None:
        names = await kernel.listdir(prefix)
        assert len(names) == len(set(names)), f"{prefix} is listed as {names}"
        for name in sorted(names):
            path = (*prefix, name)
            stats = await kernel.stat(path)
            data = b""
            if stat.S_ISREG(stats.mode):
                handle, ino = await kernel.open(path, os.O_RDONLY)
                try:
                    data = await kernel.read(handle, 0, 1 << 24)
                finally:
                    await kernel.close(handle, ino)
            elif stat.S_ISLNK(stats.mode):
                data = await kernel.readlink(path)
            plain = not stat.S_ISLNK(stats.mode)
            xattrs = await kernel.xattrs(path) if with_xattrs and plain else {}
            found[path] = _entry(stats, data, xattrs, groups)
            inodes[path] = stats.ino
            if stat.S_ISDIR(stats.mode):
                await visit(path)

    await visit(())
    return found


def without_directory_times(tree: Tree) -> Tree:
    """The share makes files anew where a plain directory only changes them."""
    return {
        path: replace(entry, mtime=0) if stat.S_ISDIR(entry.mode) else entry
        for path, entry in tree.items()
    }


def own_names(tree: Tree) -> list[Path]:
    """The names in a tree that are wbcache's own."""
    return [path for path in tree if is_hidden(path[-1], at_root=len(path) == 1)]


def differences(found: Tree, wanted: Tree) -> str:
    """How a tree differs from what it should be; nothing when it does not."""
    lines = [
        f"{b'/'.join(path)!r}: {found.get(path)} instead of {wanted.get(path)}"
        for path in sorted({*found, *wanted})
        if found.get(path) != wanted.get(path)
    ]
    return "\n  ".join(lines[:8])
