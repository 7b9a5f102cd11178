"""How a mount ends, in order or not, and what the next one makes of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.mounting import MountedCache, leftovers
from tests.faultshare.client import FaultShare
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fuse")

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[MountedCache]:
    """A mount that flushes nothing by itself."""
    with MountedCache(tmp_path) as mount:
        mount.configure(idle_delay="1d", max_age="1d")
        yield mount


@contextlib.contextmanager
def on_fault_share(
    base: Path, *, latency_ms: float = 0
) -> Iterator[tuple[MountedCache, FaultShare]]:
    """The same over a fault share."""
    backing = base / "backing"
    backing.mkdir()
    with FaultShare(backing, latency_ms=latency_ms) as share:
        with MountedCache(base, share.mountpoint) as mount:
            mount.configure(idle_delay="1d", max_age="1d")
            yield mount, share


def fill(mount: MountedCache) -> dict[str, str]:
    """Write some files; returns what the share is to hold."""
    wanted = {f"dir/{number}": str(number) * 1000 for number in range(20)}
    (mount.mountpoint / "dir").mkdir()
    for path, text in wanted.items():
        (mount.mountpoint / path).write_text(text)
    return wanted


def on_share(mount: MountedCache) -> dict[str, str]:
    """What the share holds; there must be no temporaries."""
    assert not leftovers(mount.source)
    found = {}
    for path in mount.source.rglob("*"):
        relative = path.relative_to(mount.source)
        if path.is_file() and relative.parts[0] != ".wbcache":
            found[str(relative)] = path.read_text()
    return found


# -- endings that drain ------------------------------------------------------------------------


def _signal(number: signal.Signals) -> Callable[[MountedCache], None]:
    return lambda mount: os.kill(mount.pid, number)


def _command(*words: str) -> Callable[[MountedCache], None]:
    return lambda mount: void(subprocess.run([*words, str(mount.mountpoint)], check=True))


def _umount2(mount: MountedCache) -> None:
    assert _libc.umount2(os.fsencode(mount.mountpoint), 0) == 0


def void(_: object) -> None:
    """What a command returns is of no interest."""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(_signal(signal.SIGTERM), id="SIGTERM"),
        pytest.param(_signal(signal.SIGINT), id="SIGINT"),
        pytest.param(_command("fusermount3", "-u"), id="fusermount3"),
        pytest.param(_command("umount", "-i", "-l"), id="lazy"),
        pytest.param(_umount2, id="umount2"),
    ],
)
def test_the_daemon_drains_before_it_ends(
    mount: MountedCache, end: Callable[[MountedCache], None]
) -> None:
    mount.mounted()
    wanted = fill(mount)
    pid = mount.pid
    end(mount)
    mount.wait_for_end(pid)
    assert mount.entry() is None
    assert on_share(mount) == wanted
    # The next mount is on a clean cache.
    assert mount.mounted().status()["dirty_files"] == 0


def test_the_times_of_a_directory_hold_nothing_back(mount: MountedCache) -> None:
    """They are set when nothing changes them any more, so nothing may wait for them."""
    mount.mounted()
    wanted = fill(mount)
    assert mount.run("flush", mount.mountpoint).returncode == 0
    os.utime(mount.mountpoint / "dir", ns=(10**18, 10**18))
    (mount.mountpoint / "dir" / "3").unlink()
    os.utime(mount.mountpoint / "dir", ns=(2 * 10**18, 2 * 10**18))
    mount.drained()
    del wanted["dir/3"]
    assert on_share(mount) == wanted
    assert (mount.source / "dir").stat().st_mtime_ns == 2 * 10**18


def test_a_lazy_unmount_serves_open_files_until_they_are_closed(mount: MountedCache) -> None:
    mount.mounted()
    pid = mount.pid
    with open(mount.mountpoint / "log", "w") as log:
        log.write("before\n")
        log.flush()
        subprocess.run(["umount", "-i", "-l", str(mount.mountpoint)], check=True)
        log.write("after\n")
        log.flush()
    mount.wait_for_end(pid)
    assert on_share(mount) == {"log": "before\nafter\n"}


def test_umount_returns_when_the_share_has_everything(tmp_path: Path) -> None:
    with on_fault_share(tmp_path, latency_ms=2) as (mount, _):
        mount.mounted()
        wanted = fill(mount)
        pid = mount.pid
        done = mount.umount()
        assert (done.returncode, done.stdout) == (0, "")
        assert on_share(mount) == wanted
        assert mount.entry() is None
        mount.wait_for_end(pid, 0)


def test_without_drain_the_next_mount_carries_on(mount: MountedCache) -> None:
    mount.mounted()
    wanted = fill(mount)
    done = mount.umount("--no-drain")
    assert done.returncode == 3
    assert all(path in done.stdout for path in wanted)
    assert mount.entry() is None
    assert "dir/7" not in on_share(mount)
    mount.mounted()
    assert (mount.mountpoint / "dir" / "7").read_text() == wanted["dir/7"]
    mount.drained()
    assert on_share(mount) == wanted


def test_what_the_share_refuses_is_listed_and_kept(tmp_path: Path) -> None:
    with on_fault_share(tmp_path) as (mount, share):
        mount.mounted()
        wanted = fill(mount)
        # Neither the publish of one file nor a link or rename to its name.
        rule = share.fail(["link", "rename"], 13, match="**/7")
        done = mount.umount()
        assert done.returncode == 3
        rows = [line for line in done.stdout.splitlines() if "dir/" in line]
        assert len(rows) == 1 and "dir/7" in rows[0] and "Permission denied" in rows[0]
        del wanted["dir/7"]
        assert on_share(mount) == wanted
        share.clear(rule)
        mount.mounted().drained()
        assert on_share(mount)["dir/7"] == "7" * 1000


# -- one daemon a cache ------------------------------------------------------------------------


def test_a_second_daemon_on_a_cache_is_refused(mount: MountedCache) -> None:
    mount.mounted()
    fill(mount)
    other = mount.base / "other"
    other.mkdir()
    options = ("--cache-dir", mount.cache, "--config", mount.config)
    done = mount.run("mount", *options, mount.source, other)
    assert done.returncode == 11
    assert f"pid {mount.pid}" in done.stderr and len(done.stderr.splitlines()) == 1
    assert (mount.mountpoint / "dir" / "3").exists() and not list(other.iterdir())
    mount.drained()


def test_a_killed_daemon_that_still_waits_for_the_share_is_taken_over(tmp_path: Path) -> None:
    with on_fault_share(tmp_path) as (mount, share):
        mount.configure(idle_delay="0s")
        mount.mounted()
        top = mount.mountpoint
        for name in ("a", "b", "c"):  # a directory can be changed by one call at a time only
            (top / name).mkdir()
            (top / name / "old").write_text("first")
        assert mount.run("flush", top).returncode == 0
        # One thread is stuck in each kind of change: a removal, bytes, a publish.
        share.hang(["unlink"])
        (top / "c" / "old").unlink()
        share.wait_hung("unlink")
        share.hang(["write"], match="a/.wbcache-*")
        (top / "a" / "file").write_text("survives")
        share.wait_hung("write")
        share.hang(["rename", "link"])
        (top / "b" / "published").write_text("first")
        share.wait_hung("rename")
        share.hang()
        first = mount.pid
        mount.kill()
        mount.mounted()
        assert mount.pid != first
        assert os.path.exists(f"/proc/{first}"), "it could just end: nothing was tested"
        status = mount.status()["share"]
        assert not status["verified"]
        assert f"the killed daemon (pid {first})" in status["problem"]
        assert (top / "a" / "file").read_text() == "survives"
        (top / "a" / "old").write_text("second")
        (top / "a" / "file").write_text("rewritten")
        (top / "b" / "published").write_text("second")
        (top / "c" / "old").write_text("again")
        # The second one is killed, too, while the first still hangs.
        second = mount.pid
        mount.kill()
        mount.mounted()
        assert mount.pid != second
        assert f"pid {first}" in mount.status()["share"]["problem"]
        (top / "a" / "new").write_text("x")
        share.release()
        share.clear()
        mount.drained()
        assert on_share(mount) == {
            "a/old": "second",
            "a/file": "rewritten",
            "b/old": "first",
            "b/published": "second",
            "c/old": "again",
            "a/new": "x",
        }


def test_what_a_policy_keeps_from_the_share_stays_here_after_a_kill(mount: MountedCache) -> None:
    mount.configure(idle_delay="0s")
    with open(mount.config, "a") as config:
        config.write('policies: [{match: "**/*.tmp", flush: never}]\n')
    mount.mounted()
    (mount.mountpoint / "scratch.tmp").write_text("local")
    (mount.mountpoint / "result").write_text("wanted")
    for _ in range(2):
        mount.kill()
        mount.wait_for_end()
        mount.mounted()
        assert (mount.mountpoint / "scratch.tmp").read_text() == "local"
    mount.drained()
    assert on_share(mount) == {"result": "wanted"}


# -- the share of a cache ----------------------------------------------------------------------


def test_another_directory_is_not_taken_for_the_share(mount: MountedCache) -> None:
    (mount.source / "old").write_text("on the share")
    mount.mounted()
    wanted = fill(mount)
    assert (mount.mountpoint / "old").exists()
    mount.kill()
    mount.source.rename(mount.base / "away")
    mount.source.mkdir()

    done = mount.mount()
    assert done.returncode == 10
    assert "--rebind" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(mount.source.iterdir())
    assert mount.entry() is None

    # When the share is back, everything is as it was.
    mount.source.rmdir()
    (mount.base / "away").rename(mount.source)
    mount.mounted()
    assert (mount.mountpoint / "old").read_text() == "on the share"
    mount.drained()
    assert on_share(mount) == wanted | {"old": "on the share"}


def test_rebinding_takes_the_data_to_another_share(mount: MountedCache) -> None:
    mount.mounted()
    wanted = fill(mount)
    mount.kill()
    mount.source.rename(mount.base / "gone")
    mount.source.mkdir()
    assert mount.mount().returncode == 10
    mount.mounted("--rebind")
    mount.drained()
    assert on_share(mount) == wanted
    # From now on it belongs there.
    mount.mounted().drained()


def test_a_clean_cache_on_another_share_knows_nothing_of_it(mount: MountedCache) -> None:
    (mount.source / "dir").mkdir()
    (mount.source / "dir" / "old").touch()
    mount.mounted()
    assert os.listdir(mount.mountpoint / "dir") == ["old"]
    mount.drained()
    mount.source.rename(mount.base / "gone")
    (mount.source / "dir").mkdir(parents=True)
    (mount.source / "dir" / "new").touch()
    mount.mounted()
    assert (mount.mountpoint / "dir" / "new").exists()
    assert not (mount.mountpoint / "dir" / "old").exists()
    assert os.listdir(mount.mountpoint / "dir") == ["new"]
    mount.drained()


def test_a_kill_while_the_share_is_bound_does_not_make_the_cache_a_copy(
    mount: MountedCache,
) -> None:
    mount.mounted()
    (mount.mountpoint / "file").touch()
    mount.kill()
    mount.wait_for_end()
    # As if it had died between writing the id file and noting that in the journal.
    with sqlite3.connect(mount.cache / "journal.db") as journal:
        journal.execute("UPDATE meta SET value='older' WHERE key='nonce'")
    journal.close()
    mount.mounted()
    assert "copied" not in mount.log()
    assert len(list((mount.source / ".wbcache").glob("id-*"))) == 1


# -- caches that can't be used -----------------------------------------------------------------


def test_a_newer_cache_is_refused(mount: MountedCache) -> None:
    mount.mounted()
    wanted = fill(mount)
    mount.umount("--no-drain")
    with sqlite3.connect(mount.cache / "journal.db") as journal:
        (version,) = journal.execute("PRAGMA user_version").fetchone()
        journal.execute("PRAGMA user_version=1000")
    done = mount.mount()
    assert done.returncode == 12
    assert "newer" in done.stderr and len(done.stderr.splitlines()) == 1
    assert mount.entry() is None
    journal.execute(f"PRAGMA user_version={version}")
    journal.close()
    mount.mounted().drained()
    assert on_share(mount) == wanted


def test_a_damaged_journal_is_refused(mount: MountedCache) -> None:
    mount.mounted()
    fill(mount)
    mount.umount("--no-drain")
    journal = mount.cache / "journal.db"
    good = journal.read_bytes()
    for damaged in (os.urandom(len(good)), good[:4096] + os.urandom(len(good) - 4096)):
        journal.write_bytes(damaged)
        done = mount.mount()
        assert done.returncode == 6, done.stderr
        assert "its journal can't be read" in done.stderr and len(done.stderr.splitlines()) == 1
        assert mount.entry() is None
        assert journal.read_bytes() == damaged


def test_a_journal_whose_log_was_cut_off_keeps_what_came_before(mount: MountedCache) -> None:
    mount.mounted()
    names = [f"file{number}" for number in range(200)]
    for name in names:
        (mount.mountpoint / name).write_text(name)
    mount.kill()
    mount.wait_for_end()
    log = mount.cache / "journal.db-wal"
    assert log.stat().st_size > 10_000
    os.truncate(log, log.stat().st_size // 2 + 1)
    mount.mounted()
    found = sorted(path.name for path in mount.mountpoint.iterdir())
    assert 0 < len(found) < len(names)
    assert found == sorted(names[: len(found)])
    for name in found[:-1]:
        assert (mount.mountpoint / name).read_text() == name
    mount.drained()


def test_the_dead_mount_is_cleared_by_the_next_one(mount: MountedCache) -> None:
    mount.mounted()
    (mount.mountpoint / "file").write_text("kept")
    mount.kill()
    mount.wait_for_end()
    wait_until(lambda: not os.path.exists(mount.mountpoint / "file"), "the mount is dead")
    assert mount.entry() is not None
    mount.mounted()
    assert (mount.mountpoint / "file").read_text() == "kept"
    with open("/proc/self/mountinfo") as table:
        assert table.read().count(f" {mount.mountpoint} ") == 1
