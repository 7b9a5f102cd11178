"""A cache belongs to one share: an id file there says so.

Without this an empty local directory, left where a network mount should be, would look like a share
from which everything was deleted. The id file lies in `SOURCE/.wbcache/` and is made only while the
cache holds nothing dirty.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from wbcache.errors import BindingError, SourceError
from wbcache.journal import Journal
from wbcache.share import calls
from wbcache.share.capabilities import SHORTEST_NAMES, Capabilities, probe
from wbcache.share.descriptor import Descriptor
from wbcache.share.names import OWN_DIRECTORY

log = logging.getLogger(__name__)

T = TypeVar("T")

_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Ask(Protocol):
    """Makes a blocking call on the share and waits for it."""

    def __call__(self, call: Callable[..., T], *args: Any) -> Awaitable[T]: ...


@dataclass
class Binding:
    """The outcome: who we are on this share and what it can hold."""

    uuid: str
    capabilities: Capabilities
    read_only: bool
    warnings: list[str]
    is_new: bool
    """The share did not have our id: what was seen before was perhaps another share's."""
    foreign_temporaries: bool = False
    """The cache was copied from another machine: the recorded temporaries are not ours."""


class Binder:
    """Checks that a directory is the share that the cache belongs to, and makes it that."""

    def __init__(
        self, journal: Journal, *, source: str, fstype: str, mount_source: str, rebind: bool
    ) -> None:
        self._journal = journal
        self._source = source
        self._fstype = fstype
        self._mount_source = mount_source
        self._rebind = rebind
        self.uuid = str(journal.get_meta("uuid") or "") or secrets.token_hex(16)
        self.epoch = int(journal.get_meta("epoch") or 0) + 1
        """Counts the mounts of this cache; part of every temporary's name."""
        journal.set_meta("epoch", self.epoch)
        journal.sync()  # no power loss may have the next mount use it again
        text = journal.get_meta("capabilities")
        self.capabilities = Capabilities.from_json(str(text)) if text else None
        """As found out before; None when they are not known."""

    @property
    def is_bound(self) -> bool:
        """Whether the cache belongs to a share."""
        return bool(self._journal.get_meta("bound"))

    @property
    def was_read_only(self) -> bool:
        """Whether the share could not be written to when it was last bound."""
        return bool(self._journal.get_meta("read_only"))

    async def bind(
        self,
        ask: Ask,
        root: Descriptor,
        *,
        dirty: Callable[[], bool],
        strict: bool,
        read_only: bool,
    ) -> Binding:
        """Check or make the id file.

        ``dirty`` tells whether the cache holds what the share does not have. Unless ``strict``, a
        cache without any accepts a share that has no id. Raises BindingError when this is not the
        cache's share or can't be used as it is, SourceError when it never can, and OSError when the
        share does not answer as it should.
        """
        journal, uuid = self._journal, self.uuid
        nonce = str(journal.get_meta("nonce") or "")
        nonces = (nonce, journal.get_meta("next_nonce"), None)
        warnings: list[str] = []
        foreign = False
        found = await ask(_read_id, root, uuid)
        if found is None and self.is_bound and (dirty() or strict) and not self._rebind:
            raise BindingError(
                f"SOURCE {self._source}",
                "the share that this cache belongs to is not there (no id file of ours in "
                ".wbcache/), and the cache holds data of it",
                "mount the share again, or accept this directory with 'wbcache mount --rebind'",
            )
        if found is not None and nonce and found.get("nonce") not in nonces:
            # Another machine has used a copy of this cache since: what it left is its own.
            log.warning("this cache was copied; it gets an id of its own")
            uuid, foreign, found = secrets.token_hex(16), True, None
        if found is None and not dirty() and await ask(_looks_unmounted, self._source, root):
            warnings.append(
                f"{self._source} is an empty directory on a local disk; is the share mounted there?"
            )
        capabilities = self.capabilities
        if not read_only:
            try:
                own = await self._renew_id(ask, root, uuid)
                if capabilities is None or found is None:
                    capabilities = await ask(probe, own, uuid[:8].encode())
                    journal.set_meta("capabilities", capabilities.to_json())
            except OSError as error:
                if error.errno in _REFUSED and not dirty():
                    warnings.append(f"{self._source} can't be written to: mounted read-only")
                    read_only = True
                elif error.errno in _REFUSED:
                    raise BindingError(
                        f"SOURCE {self._source}",
                        "the share refuses writes, and the cache holds data that has not been "
                        "flushed",
                        "make the share writable again",
                    ) from error
                elif error.errno in _FULL and (found is None or capabilities is None):
                    raise BindingError(
                        f"SOURCE {self._source}",
                        f"wbcache can't write there ({os.strerror(error.errno or 0)})",
                        "make room on the share, or mount with -o ro",
                    ) from error
                elif error.errno not in _FULL:
                    raise
        if capabilities is None:
            disk = await ask(os.fstatvfs, root.fd)
            capabilities = Capabilities(name_max=disk.f_namemax or 255)
        if capabilities.name_max < SHORTEST_NAMES and not read_only:
            raise SourceError(
                self._source,
                f"names there have {capabilities.name_max} bytes at most, wbcache's own need"
                f" {SHORTEST_NAMES}",
                "mount it with -o ro",
            )
        if not capabilities.case_sensitive:
            warnings.append(
                f"{self._source} takes names that differ only in case for one: they are refused"
            )
        journal.set_meta("read_only", int(read_only))
        self.uuid, self.capabilities, self._rebind = uuid, capabilities, False
        return Binding(uuid, capabilities, read_only, warnings, found is None, foreign)

    async def _renew_id(self, ask: Ask, root: Descriptor, uuid: str) -> Descriptor:
        """Write the id file with a new nonce; returns the directory that it is in."""
        journal = self._journal
        fresh = journal.get_meta("next_nonce")
        if fresh in (None, journal.get_meta("nonce")):
            # Otherwise the one before may have arrived, and may yet arrive.
            fresh = secrets.token_hex(16)
        record = {
            "uuid": uuid,
            "nonce": fresh,
            "host": socket.gethostname(),
            "fstype": self._fstype,
            "mount_source": self._mount_source,
            "time": int(time.time()),
        }
        # The journal first: if the id file alone were new, we would take it for a copy's.
        journal.set_meta("uuid", uuid)
        journal.set_meta("next_nonce", str(fresh))
        own = await ask(_write_id, root, uuid, record)
        journal.set_meta("nonce", str(fresh))
        journal.set_meta("bound", 1)
        return own


def id_name(uuid: str) -> bytes:
    """The name of a cache's id file in our own directory on the share."""
    return f"id-{uuid}.json".encode()


def _read_id(root: Descriptor, uuid: str) -> dict[str, object] | None:
    try:
        own = calls.open_directory(root, OWN_DIRECTORY)
        file = calls.open_file(own, id_name(uuid), os.O_RDONLY)
        found = json.loads(calls.pread(file, 1 << 16, 0))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, UnicodeDecodeError):
        return {}  # cut off while it was written: ours all the same, its name says so
    return found if isinstance(found, dict) else {}


def _write_id(root: Descriptor, uuid: str, record: dict[str, object]) -> Descriptor:
    try:
        calls.mkdir(root, OWN_DIRECTORY, 0o755)
    except FileExistsError:
        pass
    own = calls.open_directory(root, OWN_DIRECTORY)
    temporary = f"new-{uuid}".encode()
    try:
        calls.unlink(own, temporary)
    except FileNotFoundError:
        pass
    file = calls.create(own, temporary, 0o644)
    calls.pwrite_all(file, memoryview(json.dumps(record).encode()), 0)
    os.fsync(file.fd)
    calls.rename(own, temporary, own, id_name(uuid))
    return own


def _looks_unmounted(source: str, root: Descriptor) -> bool:
    """An empty directory on its parent's device: a mount point without its mount, perhaps."""
    try:
        parent = os.stat(os.path.dirname(source))
        return os.fstat(root.fd).st_dev == parent.st_dev and not calls.scan(root)
    except OSError:
        return False
