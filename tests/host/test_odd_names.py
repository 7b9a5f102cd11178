"""Names that would break a line, paint a terminal or are no text: in every command and the log."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, wbcache
from tests.waiting import wait_until
from wbcache.escaping import printable

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("fuse")]

ODD = "\x1b]0;owned\x07\x1b[2J\n2026-01-01 00:00:00 INFO all is well\r\udcff\u202egnp\\n"
"""A title for the terminal, a cleared screen, a line of a log that is none, a byte that is no text,
and a name that reads backwards."""

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [a-z_.]+: ")


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[tuple[FaultShare, Mounted]]:
    """A mount whose every path is odd."""
    top = tmp_path / ("top" + ODD)
    for name in ("backing", "share", "mnt"):
        (top / (name + ODD)).mkdir(parents=True)
    with FaultShare(top / ("backing" + ODD), mountpoint=top / ("share" + ODD)) as share:
        mount = Mounted(
            share.mountpoint,
            config=NEVER_BY_ITSELF,
            cache=top / ("cache" + ODD),
            mountpoint=top / ("mnt" + ODD),
        )
        with mount:
            yield share, mount


def check(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Every line of a command's output is one line of clean text; returns all of it."""
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    for stream in (done.stdout, done.stderr):
        stream.encode("utf-8")
        for line in stream.split("\n"):
            assert line.isprintable(), repr(line)
            assert not line.startswith("2026-01-01"), line
    for line in done.stderr.splitlines():
        assert line.startswith("wbcache: "), line
    return done.stdout + done.stderr


def check_json(done: subprocess.CompletedProcess[str], code: int) -> str:
    done.stdout.encode("ascii")
    for line in done.stdout.splitlines():
        json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8")
    return check(done, code)


def test_every_command_says_odd_names_in_one_clean_line(
    odd: tuple[FaultShare, Mounted], tmp_path: Path
) -> None:
    share, mount = odd
    name, shown = "file" + ODD, printable("file" + ODD)
    conflicting = mount.path / ("both" + ODD)
    conflicting.write_bytes(b"first")
    mount.flush()
    (share.mountpoint / ("both" + ODD)).write_bytes(b"theirs, and longer")
    conflicting.write_bytes(b"ours")
    for path in (mount.path / name, mount.path / ("refused" + ODD)):
        path.write_bytes(b"x")
    (mount.path / ("dir" + ODD)).mkdir()
    (mount.path / ("dir" + ODD) / name).symlink_to(ODD)
    share.fail(["create", "link", "rename", "symlink"], errno.EACCES, match="*refused*")

    assert printable(os.fspath(mount.path)) in check(wbcache("status"), 0)
    check(wbcache("status", mount.path), 0)
    check_json(wbcache("status", "--json"), 0)
    assert shown in check(wbcache("pending", mount.path), 0)
    listed = check_json(wbcache("pending", "--json", mount.path), 0)
    raw = {bytes.fromhex(row["path_bytes_hex"]) for row in json.loads(listed)}
    assert os.fsencode(name) in raw
    assert printable("refused" + ODD) in check(wbcache("flush", mount.path), 3)
    check_json(wbcache("flush", "--json", mount.path), 3)
    assert printable("both" + ODD) in check(wbcache("conflicts", mount.path), 0)
    check_json(wbcache("conflicts", "--json", mount.path), 0)
    check(wbcache("conflicts", "resolve", mount.path / ("none" + ODD), "--keep", "both"), 16)
    assert "quarantined" in check(wbcache("status", mount.path), 0)
    check_json(wbcache("status", "--json", mount.path), 0)

    # What goes wrong is said the same way.
    assert "does not exist" in check(wbcache("flush", mount.path / ("none" + name)), 2)
    check(wbcache("flush", tmp_path), 9)
    check(wbcache("umount", tmp_path / ODD), 9)
    check(wbcache("status", tmp_path / ODD), 9)
    check(wbcache("mount", tmp_path / ("none" + ODD), tmp_path), 4)
    check(wbcache("mount", "--cache-dir", mount.cache_dir, share.mountpoint, mount.path), 5)
    check(wbcache("mount", "--config", tmp_path / ODD, share.mountpoint, tmp_path), 7)
    config = tmp_path / "config.yaml"
    config.write_bytes(b'"bad\\nkey\\e[2J": 1\n')
    check(wbcache("mount", "--config", config, share.mountpoint, tmp_path), 7)
    check(wbcache("mount", "-o", "bad" + ODD.replace(",", ""), share.mountpoint, tmp_path), 2)
    check(wbcache(ODD), 2)
    check(wbcache("recover", mount.cache_dir, "--to", tmp_path / ("to" + ODD)), 11)
    with open(mount.path / name, "rb"):
        check(wbcache("umount", mount.path), 14)

    (mount.path / ("late" + ODD)).write_bytes(b"x")
    done = wbcache("umount", "--no-drain", mount.path)
    assert printable("late" + ODD) in check(done, 3)
    wait_until(lambda: "ends; " in mount.log(), "the daemon ends")
    check(wbcache("umount", mount.path), 9)
    check_json(wbcache("recover", "--json", mount.cache_dir, "--to", tmp_path / ("json" + ODD)), 0)
    check(wbcache("recover", mount.cache_dir, "--to", tmp_path / ("to" + ODD)), 0)
    assert sorted(os.listdir(os.fsencode(tmp_path / ("to" + ODD)))) == sorted(
        os.fsencode(name + ODD) for name in ("late", "refused")
    )
    check_log(mount.cache_dir / "daemon.log")


def check_log(path: Path) -> None:
    lines = path.read_bytes().decode("utf-8").split("\n")
    assert lines.pop() == ""
    for line in lines:
        assert line.isprintable() and LINE.match(line), repr(line)
    assert len(lines) >= 4


def test_a_daemon_in_the_foreground_says_them_so_too(tmp_path: Path) -> None:
    (tmp_path / ("share" + ODD)).mkdir()
    (tmp_path / ("mnt" + ODD)).mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "wbcache.cli", "mount", "--foreground", "--cache-dir"),
            os.fspath(tmp_path / ("cache" + ODD)),
            *(os.fspath(tmp_path / (name + ODD)) for name in ("share", "mnt")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.decode().strip().isprintable()
        assert printable(os.fspath(tmp_path / ("mnt" + ODD))) in first.decode(), (
            process.communicate()
        )
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert all(line.isprintable() for line in (out + err).decode().split("\n"))
    check_log(tmp_path / ("cache" + ODD) / "daemon.log")
