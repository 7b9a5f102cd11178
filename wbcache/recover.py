"""Lay out what a cache holds that the share does not have, with no share and no daemon.

The cache is only read: its journal is copied to the target directory and opened there, so that a
cache on a disk that is mounted read-only can be recovered, and can be mounted again afterwards.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time

from wbcache.daemon.lock import CacheLock, lock_cache
from wbcache.errors import CacheDirError, CacheFormatError, CacheInUseError, RecoverError
from wbcache.escaping import printable
from wbcache.journal import Journal
from wbcache.laying import Layout, Progress, is_fatal
from wbcache.loading import Loaded, load
from wbcache.node import META_XATTR, Directory, Node
from wbcache.recovered import PendingChange, RecoverReport
from wbcache.share.names import is_hidden
from wbcache.store import CacheFiles
from wbcache.tree import Name, Tree

JOURNAL = "journal.db"


def recover(
    cache_dir: str, to: str, progress: Progress = lambda done, total: None
) -> RecoverReport:
    """Write the files of a cache that are not on the share to an empty or new directory.

    ``progress`` is called with bytes done and bytes in all. Raises RecoverError, CacheInUseError or
    CacheFormatError.
    """
    if not os.path.isfile(os.path.join(cache_dir, JOURNAL)):
        raise RecoverError(
            cache_dir, f"is not a cache ({JOURNAL} is missing)", "name a mount's cache directory"
        )
    lock = _lock(cache_dir)
    try:
        target, made = _open_target(to)
        try:
            loaded, power_lost = _load(cache_dir, to)
            files = CacheFiles(os.path.join(cache_dir, "data"))
            return _Recovery(loaded.tree, files, power_lost=power_lost).run(target, to, progress)
        except BaseException:
            if made and not os.listdir(target):
                os.rmdir(to)
            raise
        finally:
            os.close(target)
    finally:
        if lock is not None:
            lock.release()


def _lock(cache_dir: str) -> CacheLock | None:
    try:
        return lock_cache(cache_dir)
    except CacheInUseError as error:
        raise CacheInUseError(
            error.what, error.why, "unmount it first, what is flushed needs no recovery"
        ) from None
    except OSError as error:
        if error.errno == errno.EROFS:
            return None  # nobody can be using it
        raise RecoverError(cache_dir, f"cannot be locked ({error.strerror})") from None


def _open_target(to: str) -> tuple[int, bool]:
    """A descriptor of the directory to write to, and whether it was made."""
    made = False
    try:
        try:
            os.makedirs(to, mode=0o700)
            made = True
        except FileExistsError:
            pass
        target = os.open(to, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        empty = not os.listdir(target)
    except OSError as error:
        raise RecoverError(to, f"cannot be used ({error.strerror})") from None
    if not empty:
        os.close(target)
        raise RecoverError(to, "is not empty", "name an empty or a new directory")
    return target, made


def _load(cache_dir: str, to: str) -> tuple[Loaded, bool]:
    """What the cache holds, and whether the machine has gone down since it was last served."""
    source = os.path.join(cache_dir, JOURNAL)
    try:
        with tempfile.TemporaryDirectory(prefix=".wbcache-recover-", dir=to) as directory:
            copy = os.path.join(directory, JOURNAL)
            shutil.copyfile(source, copy)
            if os.path.exists(source + "-wal"):
                shutil.copyfile(source + "-wal", copy + "-wal")
            journal = Journal(copy)
            try:
                boot = journal.get_meta("boot_id")
                files = CacheFiles(os.path.join(cache_dir, "data"))
                return load(journal, files, time.monotonic), boot not in (None, _boot_id())
            finally:
                journal.close()
    except CacheFormatError as error:
        raise CacheFormatError(f"cache {cache_dir}", error.why, error.hint) from None
    except CacheDirError as error:
        raise RecoverError(cache_dir, error.why, "the bytes are in its data/") from None
    except OSError as error:
        at = to if is_fatal(error) else cache_dir
        raise RecoverError(at, f"the journal cannot be copied ({error.strerror})") from None


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


class _Recovery:
    """Sorts what is dirty into files to be written and changes to be listed."""

    def __init__(self, tree: Tree, files: CacheFiles, *, power_lost: bool) -> None:
        self._tree = tree
        self._files = files
        self._power_lost = power_lost
        self._report = RecoverReport()

    def run(self, target: int, to: str, progress: Progress) -> RecoverReport:
        """Write and list everything."""
        wanted = []
        for node in sorted(self._tree.dirty, key=self._tree.path):
            if self._is_ours(node):
                wanted.append(node)
            else:
                self._list(node)
        for directory, name in self._tree.changes:
            if self._tree.wanted(directory, name) is None:
                self._list_removal(directory, name)
        self._report.pending.sort(key=lambda change: change.path)
        layout = Layout(
            self._tree, self._files, wanted, self._report, progress, power_lost=self._power_lost
        )
        try:
            layout.write(target)
        except OSError as error:
            raise RecoverError(
                to,
                f"cannot be written ({error.strerror}); not everything is there",
                "name a directory on a disk with more room",
            ) from None
        return self._report

    def _is_ours(self, node: Node) -> bool:
        """Whether there is something of a node that the share does not have."""
        content = node.content
        if content is None:
            # Something new of another kind, or what has a new place or other attributes.
            return not node.slinks and not node.is_file
        return content.whole or content.dirty.first < node.size

    def _list(self, node: Node) -> None:
        changes = []
        if node.is_file and node.content_dirty:
            changes.append(f"cut to {node.size} bytes")
        if node.meta:
            changes.append("extended attributes" if node.meta == META_XATTR else "attributes")
        self._add(self._tree.path(node), changes)
        old = [
            self._share_path(*link)
            for link in node.slinks
            if link[0].local.get(link[1]) is not node
        ]
        for directory, name in node.links:
            if directory.share.get(name) is node:
                continue
            path = self._tree.name_path(directory, name)
            if old:
                self._add(path, [f"renamed from {printable(old.pop())}"])
            elif node.slinks:
                self._add(path, [f"a hard link to {printable(self._share_path(*node.slinks[0]))}"])

    def _list_removal(self, directory: Directory, name: bytes) -> None:
        node = directory.share.get(name)
        if node is None or is_hidden(name, at_root=directory is self._tree.root):
            return
        if not node.links:
            self._add(self._share_path(directory, name), ["removed"])

    def _add(self, path: bytes, changes: list[str]) -> None:
        self._report.pending += [PendingChange(path, change) for change in changes]

    def _share_path(self, directory: Directory, name: bytes) -> bytes:
        """Where a name is on the share."""
        parts = [name]
        at: Name | None = (directory, name)
        while at is not None and at[0].slinks:
            at = at[0].slinks[0]
            parts.append(at[1])
        return b"/".join(reversed(parts))
