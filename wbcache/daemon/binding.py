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
from dataclasses import dataclass

from wbcache.errors import BindingError, SourceError
from wbcache.journal import Journal
from wbcache.share import calls
from wbcache.share.capabilities import SHORTEST_NAMES, Capabilities, probe
from wbcache.share.descriptor import Descriptor
from wbcache.share.names import OWN_DIRECTORY

log = logging.getLogger(__name__)


@dataclass
class Binding:
    """The outcome: who we are on this share and what it can hold."""

    uuid: str
    epoch: int
    """Counts the mounts of this cache; part of every temporary's name."""
    capabilities: Capabilities
    read_only: bool
    warnings: list[str]
    foreign_temporaries: bool = False
    """The cache was copied from another machine: the recorded temporaries are not ours."""


def bind(
    root_fd: int,
    journal: Journal,
    *,
    source: str,
    fstype: str,
    mount_source: str,
    dirty: bool,
    rebind: bool,
    read_only: bool,
) -> Binding:
    """Check or make the id file. Blocks on the share; call it where that may be waited for.

    Raises BindingError when the cache holds dirty data of a share that is not there.
    """
    root = Descriptor(os.dup(root_fd))
    uuid = str(journal.get_meta("uuid") or "") or secrets.token_hex(16)
    epoch = int(journal.get_meta("epoch") or 0) + 1
    bound = bool(journal.get_meta("bound"))
    nonce = str(journal.get_meta("nonce") or "")
    nonces = (nonce, journal.get_meta("next_nonce"), None)
    warnings: list[str] = []
    foreign = False
    found = _read_id(root, uuid)
    if found is None and bound and dirty and not rebind:
        raise BindingError(
            f"SOURCE {source}",
            "the share that this cache belongs to is not there (no id file of ours in .wbcache/), "
            "and the cache holds data that has not been flushed",
            "mount the share again, or accept this directory with 'wbcache mount --rebind'",
        )
    if found is not None and nonce and found.get("nonce") not in nonces:
        # Another machine has used a copy of this cache since: what it left is its own.
        log.warning("this cache was copied; it gets an id of its own")
        uuid, foreign, found = secrets.token_hex(16), True, None
    if found is None and not bound and not dirty and _looks_unmounted(source, root):
        warnings.append(
            f"{source} is an empty directory on a local disk; is the share mounted there?"
        )
    fresh = secrets.token_hex(16)
    record = {
        "uuid": uuid,
        "nonce": fresh,
        "host": socket.gethostname(),
        "fstype": fstype,
        "mount_source": mount_source,
        "time": int(time.time()),
    }
    text = journal.get_meta("capabilities")
    capabilities = Capabilities.from_json(str(text)) if text else None
    if not read_only:
        try:
            # The journal first: if the id file alone were new, we would take it for a copy's.
            journal.set_meta("uuid", uuid)
            journal.set_meta("next_nonce", fresh)
            own = _write_id(root, uuid, record)
            journal.set_meta("nonce", fresh)
            journal.set_meta("epoch", epoch)
            journal.set_meta("bound", 1)
            if capabilities is None or found is None:
                capabilities = probe(own, uuid[:8].encode())
                journal.set_meta("capabilities", capabilities.to_json())
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise BindingError(
                    f"SOURCE {source}",
                    f"wbcache can't write there ({os.strerror(error.errno or 0)})",
                    "make room on the share, or mount with -o ro",
                ) from error
            if dirty:
                raise BindingError(
                    f"SOURCE {source}",
                    "the share refuses writes, and the cache holds data that has not been flushed",
                    "make the share writable again",
                ) from error
            warnings.append(f"{source} can't be written to: mounted read-only")
            read_only = True
    if capabilities is None:
        capabilities = Capabilities(name_max=os.fstatvfs(root.fd).f_namemax or 255)
    if capabilities.name_max < SHORTEST_NAMES and not read_only:
        raise SourceError(
            source,
            f"names there have {capabilities.name_max} bytes at most, wbcache's own need"
            f" {SHORTEST_NAMES}",
            "mount it with -o ro",
        )
    if not capabilities.case_sensitive:
        warnings.append(f"{source} takes names that differ only in case for one: they are refused")
    return Binding(uuid, epoch, capabilities, read_only, warnings, foreign)


def _id_name(uuid: str) -> bytes:
    return f"id-{uuid}.json".encode()


def _read_id(root: Descriptor, uuid: str) -> dict[str, object] | None:
    try:
        own = calls.open_directory(root, OWN_DIRECTORY)
        file = calls.open_file(own, _id_name(uuid), os.O_RDONLY)
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
    calls.rename(own, temporary, own, _id_name(uuid))
    return own


def _looks_unmounted(source: str, root: Descriptor) -> bool:
    """An empty directory on its parent's device: a mount point without its mount, perhaps."""
    try:
        parent = os.stat(os.path.dirname(source))
        return os.fstat(root.fd).st_dev == parent.st_dev and not calls.scan(root)
    except OSError:
        return False
