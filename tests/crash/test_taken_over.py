"""The cache of a daemon that was killed and can't end: everything it had locked is taken over."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.waiting import wait_until
from wbcache.daemon import lock
from wbcache.errors import CacheInUseError
from wbcache.journal import Journal
from wbcache.processes import is_being_killed

pytestmark = pytest.mark.usefixtures("fuse")

HOLDER = """
import os, signal, sys, threading
from wbcache.daemon.lock import lock_cache
from wbcache.journal import Journal
cache, share = sys.argv[1:]
held = lock_cache(cache)
journal = Journal(cache + "/journal.db")
journal.set_meta("committed", 1)
journal._db.execute("BEGIN IMMEDIATE")
journal._db.execute("INSERT INTO meta VALUES('begun', 1)")
threading.Thread(target=os.stat, args=(share,)).start()
print("ready", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Holds the lock, and is in the middle of a transaction and of a call on the share."""


@pytest.fixture
def share(tmp_path: Path) -> Iterator[FaultShare]:
    (tmp_path / "backing").mkdir()
    (tmp_path / "cache").mkdir()
    with FaultShare(tmp_path / "backing") as share:
        yield share


@pytest.fixture
def holder(share: FaultShare, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    share.hang(["getattr", "lookup"])
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "cache", share.mountpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        share.wait_hung()
        yield child
    finally:
        share.release()
        share.clear()
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()


def kill(holder: subprocess.Popen[bytes]) -> None:
    """Have it killed; it does not end."""
    assert holder.stdin is not None
    holder.stdin.close()
    wait_until(lambda: is_being_killed(holder.pid), "it is killed")


def test_its_locks_on_the_journal_are_left_behind(
    share: FaultShare, holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    cache = str(tmp_path / "cache")
    with pytest.raises(CacheInUseError, match=f"pid {holder.pid}"):
        lock.lock_cache(cache)
    kill(holder)
    held = lock.lock_cache(cache)
    try:
        assert holder.poll() is None, "it could just end: nothing was tested"
        assert held.lingering() == [str(holder.pid)]
        journal = Journal(os.path.join(cache, "journal.db"))
        assert journal.get_meta("committed") == 1
        assert journal.get_meta("begun") is None
        journal.set_meta("ours", 1)
        journal.close()
        with pytest.raises(CacheInUseError, match=f"pid {os.getpid()}"):
            lock.lock_cache(cache)
        share.release()
        share.clear()
        wait_until(lambda: not held.lingering(), "the killed one is gone")
        assert not list((tmp_path / "cache").glob("lock.held-*"))
        journal = Journal(os.path.join(cache, "journal.db"))
        assert (journal.get_meta("committed"), journal.get_meta("ours")) == (1, 1)
        journal.close()
    finally:
        held.release()
    lock.lock_cache(cache).release()


def test_the_next_but_one_waits_for_both(
    share: FaultShare, holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Whoever takes over and ends leaves word of the one that still hangs."""
    cache = str(tmp_path / "cache")
    kill(holder)
    lock.lock_cache(cache).release()
    held = lock.lock_cache(cache)
    try:
        assert held.lingering() == [str(holder.pid)]
    finally:
        held.release()
