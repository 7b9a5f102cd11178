"""What a killed daemon left in its cache is laid out without the share, and the cache stays as it
was."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.mounting import MountedCache

pytestmark = pytest.mark.usefixtures("fuse")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[MountedCache]:
    """A mount that flushes nothing by itself."""
    with MountedCache(tmp_path) as mount:
        mount.configure(idle_delay="1d", max_age="1d")
        yield mount


def kill(mount: MountedCache) -> None:
    """Kill the daemon and take the share away."""
    mount.kill()
    mount.wait_for_end()
    mount.source.rename(mount.base / "gone")


def recover(mount: MountedCache, *options: str) -> tuple[int, dict[str, Any]]:
    """Recover to `out`; returns the exit code and what was reported."""
    done = mount.run("recover", mount.cache, "--to", mount.base / "out", "--json", *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def paths(rows: list[dict[str, str]]) -> list[str]:
    return sorted(row["path"] for row in rows)


def describe(top: Path) -> dict[bytes, tuple[Any, ...]]:
    """Everything below a directory with all that is to be kept of it."""
    found: dict[bytes, tuple[Any, ...]] = {}
    names: dict[int, list[bytes]] = {}
    for directory, subdirectories, files in os.walk(os.fsencode(top)):
        for name in (*subdirectories, *files):
            path = os.path.join(directory, name)
            st = os.lstat(path)
            data: object = None
            if stat.S_ISREG(st.st_mode):
                data = Path(os.fsdecode(path)).read_bytes()
            elif stat.S_ISLNK(st.st_mode):
                data = os.readlink(path)
            xattrs = {
                x: os.getxattr(path, x)
                for x in os.listxattr(path, follow_symlinks=False)
                if x.startswith("user.") and x != "user.wbcache.state"
            }
            relative = os.path.relpath(path, os.fsencode(top))
            names.setdefault(st.st_ino, []).append(relative)
            found[relative] = (st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns, data, xattrs)
    return {path: (*known, sorted(_group(names, path))) for path, known in found.items()}


def _group(names: dict[int, list[bytes]], path: bytes) -> list[bytes]:
    return next(group for group in names.values() if path in group)


def fingerprint(cache: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file of a cache, but for the lock, which says who has it."""
    found = {}
    for path in sorted(cache.rglob("*")):
        if path.is_file() and path.name not in ("lock", "journal.db-shm"):
            st = path.stat()
            found[str(path.relative_to(cache))] = (st.st_mode, st.st_mtime_ns, path.read_bytes())
    return found


def test_all_kinds_of_new_things(mount: MountedCache) -> None:
    mount.mounted()
    top = mount.mountpoint
    (top / "deep" / "er").mkdir(parents=True)
    (top / "empty").touch()
    (top / "script").write_text("#!/bin/sh\n")
    (top / "script").chmod(0o755)
    big = os.urandom(3_000_000)
    (top / "deep" / "er" / "big").write_bytes(big)
    os.link(top / "deep" / "er" / "big", top / "also big")
    (top / "deep" / "dangling").symlink_to("/no/where")
    odd = os.path.join(os.fsencode(top), b"not \xff utf-8\n")
    with open(odd, "wb") as file:
        file.write(b"odd")
    with open(top / "sparse", "wb") as file:
        file.truncate(1 << 26)
        file.seek(1 << 25)
        file.write(b"in the middle")
    os.setxattr(top / "script", "user.note", b"kept")
    if os.geteuid() == 0:
        os.chown(top / "empty", 1234, 5678)
    for number, path in enumerate(os.walk(os.fsencode(top), topdown=False)):
        for name in (*path[2], b"."):
            mtime = 10**18 + number
            os.utime(os.path.join(path[0], name), ns=(mtime, mtime), follow_symlinks=False)
    before = {path: known for path, known in describe(top).items() if path != b"sparse"}
    kill(mount)
    cache = fingerprint(mount.cache)

    code, report = recover(mount)

    assert code == 0
    after = describe(mount.base / "out")
    sparse = after.pop(b"sparse")
    data = sparse[4]
    assert len(data) == 1 << 26
    assert data.strip(b"\0") == b"in the middle" and data[1 << 25] == ord("i")
    assert (mount.base / "out" / "sparse").stat().st_blocks * 512 < 1 << 20
    assert after == before
    # Directories may be on the share already.
    files = [path for path, known in after.items() if not stat.S_ISDIR(known[0])]
    assert len(files) < len(report["written"]) + 1 <= len(after) + 2
    assert not report["incomplete"] and not report["torn"] and not report["pending"]
    assert fingerprint(mount.cache) == cache


def test_the_cache_can_be_mounted_afterwards(mount: MountedCache) -> None:
    mount.mounted()
    (mount.mountpoint / "file").write_text("kept")
    kill(mount)
    assert recover(mount)[0] == 0
    (mount.base / "gone").rename(mount.source)
    mount.mounted().drained()
    assert (mount.source / "file").read_text() == "kept"


def test_what_only_the_share_has_is_listed(mount: MountedCache) -> None:
    for name in ("patched", "renamed", "removed", "chmodded", "cut", "linked", "replaced"):
        (mount.source / name).write_bytes(name.encode() * 10_000)
    (mount.source / "full").mkdir()
    (mount.source / "full" / "inside").write_text("stays there")
    mount.mounted()
    top = mount.mountpoint
    with open(top / "patched", "r+b") as file:
        file.seek(5000)
        file.write(b"X" * 100)
        file.seek(0, os.SEEK_END)
        file.write(b"at the end")
    (top / "renamed").rename(top / "new name")
    (top / "removed").unlink()
    (top / "chmodded").chmod(0o600)
    os.truncate(top / "cut", 1000)
    os.link(top / "linked", top / "second name")
    (top / "replaced").write_text("new content")
    (top / "full").rename(top / "moved")
    kill(mount)

    code, report = recover(mount)

    out = mount.base / "out"
    assert code == 3
    assert paths(report["written"]) == ["replaced"]
    assert (out / "replaced").read_text() == "new content"
    assert paths(report["incomplete"]) == ["patched"]
    assert "69900 of 70010 bytes are only on the share" in report["incomplete"][0]["reason"]
    patched = (out / "patched").read_bytes()
    assert len(patched) == 70_010
    assert patched[5000:5100] == b"X" * 100 and patched.endswith(b"at the end")
    ranges = (out / "patched.wbcache-ranges").read_text().splitlines()
    assert ranges[1:] == ["5000 100", "70000 10"]
    assert {(row["path"], row["change"]) for row in report["pending"]} == {
        ("new name", "renamed from renamed"),
        ("removed", "removed"),
        ("chmodded", "attributes"),
        ("cut", "cut to 1000 bytes"),
        ("second name", "a hard link to linked"),
        ("moved", "renamed from full"),
    }
    assert sorted(os.listdir(out)) == ["patched", "patched.wbcache-ranges", "replaced"]


def test_a_file_whose_other_bytes_are_still_cached_is_whole(mount: MountedCache) -> None:
    mount.mounted()
    (mount.mountpoint / "log").write_text("first line\n")
    assert mount.run("flush", mount.mountpoint).returncode == 0
    assert (mount.source / "log").read_text() == "first line\n"
    with open(mount.mountpoint / "log", "a") as file:
        file.write("second line\n")
    kill(mount)
    code, report = recover(mount)
    assert code == 0 and paths(report["written"]) == ["log"]
    assert (mount.base / "out" / "log").read_text() == "first line\nsecond line\n"


def test_after_a_power_loss_what_was_not_synced_is_in_doubt(mount: MountedCache) -> None:
    mount.mounted()
    (mount.mountpoint / "loose").write_text("never synced")
    with open(mount.mountpoint / "firm", "w") as file:
        file.write("synced")
        file.flush()
        os.fsync(file.fileno())
    # Held open, so that no background sync covers it.
    loose = os.open(mount.mountpoint / "loose", os.O_WRONLY)
    try:
        os.write(loose, b"NEVER")
        kill(mount)
    finally:
        with contextlib.suppress(OSError):
            os.close(loose)
    with sqlite3.connect(mount.cache / "journal.db") as journal:
        journal.execute("UPDATE meta SET value='another' WHERE key='boot_id'")
    journal.close()
    code, report = recover(mount)
    assert code == 3
    assert paths(report["written"]) == ["firm"]
    assert paths(report["torn"]) == ["loose"]
    assert (mount.base / "out" / "loose").read_text() == "NEVER synced"


def refused(mount: MountedCache, cache: Path, to: Path, code: int, why: str) -> None:
    before = sorted(to.iterdir()) if to.is_dir() else None
    done = mount.run("recover", cache, "--to", to)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1 and why in done.stderr, done.stderr
    assert (sorted(to.iterdir()) if to.is_dir() else None) == before


def test_bad_caches_are_refused(mount: MountedCache) -> None:
    out = mount.base / "out"
    refused(mount, mount.base / "nothing", out, 15, "is not a directory")
    refused(mount, mount.source, out, 15, "journal.db is missing")
    assert not list(mount.source.iterdir())
    mount.mounted()
    refused(mount, mount.cache, out, 11, f"pid {mount.pid}")
    (mount.mountpoint / "file").touch()
    kill(mount)
    newer = mount.base / "newer"
    shutil.copytree(mount.cache, newer, ignore=shutil.ignore_patterns("*.sock"))
    with sqlite3.connect(newer / "journal.db") as journal:
        journal.execute("PRAGMA user_version=1000")
    journal.close()
    refused(mount, newer, out, 12, "made by a newer wbcache (format 1000")
    broken = mount.base / "broken"
    broken.mkdir()
    (broken / "journal.db").write_bytes(os.urandom(100_000))
    refused(mount, broken, out, 15, "its journal can't be read")


def test_bad_targets_are_refused(mount: MountedCache) -> None:
    mount.mounted()
    (mount.mountpoint / "file").write_bytes(os.urandom(3 << 20))
    kill(mount)
    taken = mount.base / "taken"
    taken.mkdir()
    (taken / "thesis").touch()
    refused(mount, mount.cache, taken, 15, "is not empty")
    refused(mount, mount.cache, taken / "thesis", 15, "Not a directory")
    refused(mount, mount.cache, taken / "thesis" / "below", 15, "Not a directory")


def test_a_full_target_says_so(mount: MountedCache) -> None:
    mount.mounted()
    (mount.mountpoint / "file").write_bytes(os.urandom(5 << 20))
    kill(mount)
    small = mount.base / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=True)
    try:
        done = mount.run("recover", mount.cache, "--to", small / "out")
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert done.returncode == 15
    assert "No space left on device" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_cache_on_a_read_only_disk(mount: MountedCache) -> None:
    mount.mounted()
    (mount.mountpoint / "file").write_text("there")
    kill(mount)
    subprocess.run(["mount", "--bind", str(mount.cache), str(mount.cache)], check=True)
    try:
        remount = ["mount", "-o", "remount,bind,ro", str(mount.cache)]
        subprocess.run(remount, check=True)
        code, report = recover(mount)
    finally:
        subprocess.run(["umount", str(mount.cache)], check=True)
    assert code == 0 and paths(report["written"]) == ["file"]
    assert (mount.base / "out" / "file").read_text() == "there"
