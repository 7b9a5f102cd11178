"""`python -m wbcache.daemon`: started by `wbcache mount`, one process a mount.

The command line keeps SOURCE and MOUNTPOINT, so that `ps` shows what it is.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import sys
import threading
import time
from functools import partial

import trio

from wbcache import __version__, config, mounts
from wbcache.control import registry
from wbcache.control.registry import MountRecord
from wbcache.daemon import preflight
from wbcache.daemon.attachment import Attachment
from wbcache.daemon.binding import Binder
from wbcache.daemon.daemon import Daemon
from wbcache.daemon.lock import lock_cache
from wbcache.daemon.log import log_into
from wbcache.daemon.preflight import MountPlan
from wbcache.errors import DaemonStartError, RemainsError, WbcacheError
from wbcache.escaping import printable
from wbcache.journal import Journal
from wbcache.loading import load
from wbcache.options import parse_options
from wbcache.processes import hold_standard_streams, raise_file_limit
from wbcache.share.capabilities import Capabilities
from wbcache.share.names import TemporaryNames
from wbcache.share.share import Share
from wbcache.store import Store
from wbcache.volume import Volume

log = logging.getLogger("wbcache")

PATIENCE = 5.0
"""Seconds for which a mount waits for the share to be verified; then it serves what the cache
knows, and goes on in the background."""

FIRST_PATIENCE = 60.0
"""Seconds for which the first mount of a cache does, which knows nothing yet."""

MIN_FILES = 1024
"""Files that the daemon must be able to have open."""


def main() -> int:
    """Run a mount to its end; returns the exit code."""
    hold_standard_streams()
    arguments = _parse()
    logging.getLogger().addHandler(logging.NullHandler())  # until there is a log to write to
    ready = _Ready(arguments.ready_fd)
    try:
        return _run(arguments, ready)
    except WbcacheError as error:
        log.error("%s", error)
        ready.fail(str(error), error.exit)
        return error.exit
    except Exception as error:
        log.exception("the daemon ends")
        ready.fail(f"the daemon failed: {error}; see daemon.log in the cache directory", 1)
        return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m wbcache.daemon")
    parser.add_argument("--cache-dir")
    parser.add_argument("--config")
    parser.add_argument("--mount-options", default="")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("source")
    parser.add_argument("mountpoint")
    return parser.parse_args()


class _Ready:
    """Tells whoever started us how it went, once."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)

    def succeed(self, plan: MountPlan, warnings: list[str]) -> None:
        if self._fd is None:
            print(
                f"{printable(plan.source)} is mounted on {printable(plan.mountpoint)}", flush=True
            )
        self._send({"ready": True, "cache_dir": plan.cache_dir, "warnings": warnings})

    def fail(self, text: str, code: int) -> None:
        if self._fd is None:
            print(f"wbcache: {text}", file=sys.stderr)
        self._send({"error": text, "exit": code})

    def _send(self, message: dict[str, object]) -> None:
        if self._fd is not None:
            try:
                os.write(self._fd, json.dumps(message).encode() + b"\n")
            except OSError:
                pass
            os.close(self._fd)
            self._fd = None


def _run(arguments: argparse.Namespace, ready: _Ready) -> int:
    _check_file_limit()
    settings = config.load(arguments.config)
    plan = preflight.check(
        preflight.MountRequest(
            source=arguments.source,
            mountpoint=arguments.mountpoint,
            config=settings,
            options=parse_options(arguments.mount_options),
            cache_dir=arguments.cache_dir,
            config_path=arguments.config,
        )
    )
    threading.Thread(target=_close, args=plan.detached, daemon=True).start()
    os.umask(0o077)  # what is made here is nobody else's business
    os.makedirs(plan.cache_dir, exist_ok=True)
    lock = lock_cache(plan.cache_dir)
    log_into(plan.cache_dir, foreground=arguments.ready_fd is None)
    log.info("wbcache %s: %s on %s", __version__, plan.source, plan.mountpoint)
    journal = Journal(os.path.join(plan.cache_dir, "journal.db"))
    store = Store(os.path.join(plan.cache_dir, "data"))
    boot = _boot_id()
    # Looking for garbage among hundreds of thousands of new objects takes as long as making them.
    gc.disable()
    power_lost = journal.get_meta("boot_id") not in (None, boot)
    loaded = load(journal, store, time.monotonic, power_lost=power_lost)
    journal.set_meta("boot_id", boot)
    _note_mount(plan)
    os.umask(0)  # modes on the share are those of the mount
    entry = mounts.mount_of(plan.source, mounts.read_mounts())
    binder = Binder(
        journal,
        source=plan.source,
        fstype=entry.fstype if entry else "",
        mount_source=entry.source if entry else "",
        rebind=plan.rebind,
    )
    if plan.unreachable is not None and not binder.is_bound:
        raise plan.unreachable
    warnings = list(plan.warnings)
    if loaded.torn:
        warnings.append(
            f"the machine went down before {len(loaded.torn)} file(s) were synced; they are kept"
            " here and not flushed, see 'wbcache pending'"
        )
    if loaded.cut:
        warnings.append(
            f"the cache files of {len(loaded.cut)} file(s) were removed or cut by somebody; what is"
            " left is kept here and not flushed, see 'wbcache pending'"
        )
    for warning in warnings:
        log.warning("%s", warning)
    flush = settings.flush
    share = Share(
        None,
        lookup_deadline=settings.share.lookup_deadline,
        deadline=settings.share.deadline,
        workers=flush.workers + flush.small_workers + 4,
    )
    if plan.over_source:
        # Once it is covered there is no other way to it.
        share.replace_root(os.open(plan.source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    # Network and local file systems keep inode numbers; those in user space often make them up.
    share.stable_ino = entry is not None and not entry.fstype.startswith("fuse")
    tree = loaded.tree
    share.hold_root(tree.root)
    journal.changes = tree.changes
    volume = Volume(
        tree,
        journal,
        store,
        share,
        settings,
        temporary_names=TemporaryNames(binder.uuid[:8], binder.epoch),
    )
    volume.next_gen = loaded.next_gen
    volume.capabilities = binder.capabilities or Capabilities()
    volume.read_only = plan.read_only or binder.was_read_only
    attachment = Attachment(
        volume,
        loaded,
        binder,
        lock,
        source=plan.source,
        over_source=plan.over_source,
        read_only=plan.read_only,
    )
    if plan.unreachable is not None:
        share.health.fall_silent()
        patience = 0.0
    else:
        patience = PATIENCE if binder.is_bound and binder.capabilities else FIRST_PATIENCE
    daemon = Daemon(
        volume,
        loaded,
        attachment,
        source=plan.source,
        mountpoint=plan.mountpoint,
        cache_dir=plan.cache_dir,
        kernel_options=plan.kernel_options,
    )
    record = _record(plan)

    def announce() -> None:
        try:
            registry.register(record)
        except (WbcacheError, OSError) as error:
            warnings.append(f"commands won't find this mount: {error}")
            log.warning("%s", warnings[-1])
        ready.succeed(plan, [*warnings, *attachment.notes()])

    _keep_memory()
    # A collection over hundreds of thousands of nodes takes long and finds nothing.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()
    clean = trio.run(partial(daemon.run, announce, patience))
    registry.unregister(record)
    journal.close()
    store.close()
    lock.release()
    log.info("ends; %s", "the share has everything" if clean else "something remains to be flushed")
    if not clean:
        return RemainsError.exit_code
    return 0


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        os.close(fd)


def _check_file_limit() -> None:
    limit = raise_file_limit()
    if limit < MIN_FILES:
        raise DaemonStartError(
            "the limit of open files",
            f"is {limit}, and a mount needs {MIN_FILES}",
            "raise it (ulimit -Hn, or LimitNOFILE= of a service) and mount again",
        )


def _keep_memory() -> None:
    """Have the C library keep what it frees: each read and write takes and gives back a buffer,
    and a trip to the kernel for it costs more than filling it."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # not glibc
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    mallopt(trim_threshold, 64 << 20)
    mallopt(top_pad, 8 << 20)
    mallopt(mmap_threshold, 8 << 20)


def _boot_id() -> str:
    """What changes with every start of the machine: then nothing unsynced can be trusted."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _record(plan: MountPlan) -> MountRecord:
    return MountRecord(
        mountpoint=plan.mountpoint, source=plan.source, cache_dir=plan.cache_dir, pid=os.getpid()
    )


def _note_mount(plan: MountPlan) -> None:
    """For people and for `recover`: which mount this cache belongs to."""
    note = {**_record(plan).__dict__, "started": time.time(), "version": __version__}
    path = os.path.join(plan.cache_dir, "mount.json")
    with open(path + ".new", "w") as file:
        json.dump(note, file)
    os.replace(path + ".new", path)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Threads may be stuck in calls on a hung share: nothing is left to be waited for.
    os._exit(code)
