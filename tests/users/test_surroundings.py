"""Mounts begun in poor surroundings: by services, before a logout, where things are missing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, contents, wbcache
from tests.plain_user import PLAIN_GID, PLAIN_UID, as_plain_user, plain_command
from tests.users.elsewhere import bind, mount, privately
from tests.waiting import wait_until
from wbcache.errors import DaemonStartError

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("fuse")]

ROOT = Path(__file__).parents[2]
BARE = ["/usr/bin/env", "-i", f"PYTHONPATH={ROOT}"]
"""The environment of a service that names none, but for what finds this checkout."""


def bare(mark: str = "WBCACHE_TEST_SESSION") -> list[str]:
    """The same, with what the tests know their processes by."""
    return [*BARE, f"{mark}={os.environ[mark]}"]


def closed(*which: int) -> list[str]:
    """Standard streams closed."""
    script = "".join(f"exec {fd}<&-; " for fd in which) + 'exec "$@"'
    return ["/bin/sh", "-c", script, "sh"]


@pytest.mark.parametrize("which", [(0, 1, 2), (0,)], ids=str)
def test_without_environment_terminal_and_standard_streams(
    tmp_path: Path, which: Sequence[int]
) -> None:
    with Mounted(
        tmp_path / "share", config=NEVER_BY_ITSELF, prefix=[*bare(), *closed(*which)]
    ) as running:
        for number in range(20):
            (running.path / f"{number}").write_bytes(b"%d" % number * 1000)
        # Nothing that the daemon has open for itself is one of its standard streams.
        for fd in range(3):
            target = os.readlink(f"/proc/{running.pid}/fd/{fd}")
            assert target == os.devnull or target.startswith("/memfd:"), target
        running.flush()
        assert contents(running.source) == contents(running.path)
        done = running.umount()
        assert done.returncode == 0, done.stderr
        running.remount()
        assert len(os.listdir(running.path)) == 20


def test_in_a_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    script = f'mkdir -p {gone} && cd {gone} && rmdir {gone} && exec "$@"'
    prefix = ["sh", "-c", script, "sh", "env", f"PYTHONPATH={ROOT}"]
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF, prefix=prefix) as running:
        (running.path / "file").write_text("text")
        for arguments in (["status", running.path], ["status"], ["flush", running.path / "file"]):
            done = wbcache(*arguments, prefix=prefix)
            assert done.returncode == 0, done.stderr
        assert (running.source / "file").read_text() == "text"
        done = wbcache("flush", "relative", prefix=prefix)
        (line,) = done.stderr.splitlines()
        assert done.returncode != 0 and "unexpected" not in line
        done = running.umount()
        assert done.returncode == 0, done.stderr


def test_few_files_may_be_open(tmp_path: Path) -> None:
    share = tmp_path / "share"
    for number in range(160):
        (share / f"{number}").mkdir(parents=True)
        (share / f"{number}" / "file").write_text("text")
    config = {"flush": {"idle_delay": "50ms", "max_age": "200ms"}}
    with Mounted(share, config=config, prefix=["prlimit", "--nofile=64:1024"]) as running:
        files = []
        try:
            for number in range(160):
                directory = running.path / f"{number}"
                assert sorted(os.listdir(directory)) == ["file"]
                file = open(directory / "file", "r+")  # noqa: SIM115
                files.append(file)
                assert file.read() == "text"
                file.write(" and more")
                (directory / "new").write_text("new")
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            running.flush(timeout=90)
            wait_until(lambda: not running.status()["errors"], "all has arrived")
            for number in range(160):
                assert (share / f"{number}" / "file").read_text() == "text and more"
                assert (share / f"{number}" / "new").read_text() == "new"
        finally:
            for file in files:
                file.close()
        assert running.umount().returncode == 0

    (tmp_path / "mnt").mkdir()
    arguments = ("mount", "--cache-dir", tmp_path / "cache", share, tmp_path / "mnt")
    done = wbcache(*arguments, prefix=["prlimit", "--nofile=512:512"])
    assert done.returncode == DaemonStartError.exit_code
    (line,) = done.stderr.splitlines()
    assert "the limit of open files: is 512, and a mount needs 1024; raise it" in line


def test_more_files_are_ready_or_open_than_may_be(tmp_path: Path) -> None:
    """Those that wait for their turn on the share need no descriptor, nor do idle ones."""
    count = 1100
    (tmp_path / "backing").mkdir()
    config = {"flush": {"idle_delay": "0s", "max_age": "1s"}, "share": {"deadline": "300s"}}
    prefix = ["prlimit", "--nofile=64:1024"]
    with (
        FaultShare(tmp_path / "backing") as share,
        Mounted(share.mountpoint, config=config, prefix=prefix) as running,
        contextlib.ExitStack() as stack,
    ):
        rule = share.fail(["rename"], errno.EIO, match="0")
        for number in range(count):
            (running.path / f"{number}").write_bytes(b"%d" % number)
        backing = share.backing
        wait_until(lambda: len(os.listdir(backing)) > count, "all are ready", 90)
        open_ones = [
            stack.enter_context(open(running.path / f"{n}", "r+b", buffering=0)) for n in range(700)
        ]
        assert [file.read() for file in open_ones] == [b"%d" % n for n in range(700)]
        for file in open_ones:
            file.write(b"!")
        share.clear(rule)
        running.flush(timeout=90)
        for number in range(count):
            text = b"%d!" % number if number < 700 else b"%d" % number
            assert (backing / f"{number}").read_bytes() == text
        assert "Too many open files" not in running.log()


def _without_temporary_directory(kept: Path) -> None:
    """Only what the test itself uses stays writable; for a mount namespace of its own."""
    held = os.open(kept, os.O_PATH)
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        if os.path.isdir(place):
            bind(Path(place), Path(place))
            mount("none", place, flags=(1 << 5) | (1 << 12) | 1)  # remount, bind, read-only
    bind(Path(f"/proc/self/fd/{held}"), kept)
    assert not os.access("/tmp", os.W_OK) and os.access(kept, os.W_OK)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mount namespaces here")
@pytest.mark.parametrize("uid", [0, PLAIN_UID], ids=["root", "user"])
def test_without_a_place_for_temporary_files(plain_user_dir: Path, uid: int) -> None:
    top = plain_user_dir
    for name in ("share", "mnt"):
        (top / name).mkdir()
        os.chown(top / name, uid, uid)
    (top / "share" / "data").touch()  # an empty one costs a warning

    def check() -> None:
        _without_temporary_directory(top)
        prefix = plain_command(str(top)) if uid else ["env", f"HOME={top}"]
        tempfile.tempdir = os.environ["TMPDIR"] = str(top)  # of the test itself
        with Mounted(
            top / "share",
            cache=top / "cache",
            mountpoint=top / "mnt",
            config=NEVER_BY_ITSELF,
            prefix=[*prefix, "env", "-u", "TMPDIR"],
        ) as running:
            assert running.said == ""
            write = (running.path / "file").write_text
            as_plain_user(lambda: write("text")) if uid else write("text")
            assert str(running.path) in wbcache("status", prefix=prefix).stdout
            done = running.umount()
            assert done.returncode == 0, done.stderr

    privately(check, plain_user_dir)
    assert (top / "share" / "file").read_text() == "text"
    if uid:
        assert os.lstat(top / "share" / "file").st_gid == PLAIN_GID


LOCALES: Mapping[str, list[str]] = {
    "ASCII": ["LC_ALL=C", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0"],
    "Latin-1": ["LC_ALL=en_US.ISO-8859-1", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0"],
}
NAMES = ["plain", "数据", "d\xe9j\xe0", os.fsdecode(b"d\xe9j\xe0 in Latin-1"), "new\nline"]


@pytest.mark.parametrize("locale", LOCALES)
def test_in_another_locale(tmp_path: Path, locale: str) -> None:
    prefix = ["env", "-u", "LANG", *LOCALES[locale]]
    top = tmp_path / "数据 d\xe9j\xe0"
    for name in ("share", "mnt"):
        (top / name).mkdir(parents=True)
    with Mounted(
        top / "share",
        config=NEVER_BY_ITSELF,
        cache=top / "cache",
        mountpoint=top / "mnt",
        prefix=prefix,
    ) as running:
        for name in NAMES:
            (running.path / name).mkdir()
            (running.path / name / name).write_text(name, errors="surrogateescape")
        # Commands in the daemon's locale and in ours, about the same paths.
        for number, name in enumerate(NAMES):
            ours = prefix if number % 2 else []
            done = wbcache("flush", running.path / name, prefix=ours)
            assert done.returncode == 0, done.stderr
            assert (running.source / name / name).read_bytes() == os.fsencode(name)
        for ours in (prefix, []):
            done = wbcache("status", "--json", running.path, prefix=ours)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["mountpoint"] == str(running.path)
        assert contents(running.source) == contents(running.path)
        done = running.umount()
        assert done.returncode == 0, done.stderr
        running.remount()
        assert sorted(os.listdir(running.path)) == sorted(NAMES)


def test_a_mount_outlives_the_login_that_made_it(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "mnt").mkdir()
    command = [sys.executable, "-m", "wbcache.cli", "mount", "--cache-dir", tmp_path / "cache"]
    words = [str(word) for word in [*command, tmp_path / "share", tmp_path / "mnt"]]
    pid, terminal = pty.fork()
    if not pid:
        try:
            subprocess.run(words, check=True, cwd=ROOT)
            os.execvp("sleep", ["sleep", "600"])
        finally:
            os._exit(1)
    try:
        os.set_blocking(terminal, False)
        wait_until(lambda: os.path.ismount(tmp_path / "mnt"), "it is mounted", 60)
        wait_until(lambda: _runs(pid, "sleep"), "the login goes on", 60)
    finally:
        os.close(terminal)  # the line is dropped: everything of that login gets SIGHUP
        assert os.waitpid(pid, 0)[1] != 0
    try:
        (tmp_path / "mnt" / "file").write_text("after the logout")
        assert (tmp_path / "mnt" / "file").read_text() == "after the logout"
    finally:
        done = wbcache("umount", tmp_path / "mnt")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "share" / "file").read_text() == "after the logout"


def _runs(pid: int, name: str) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == name
