"""After a kill the share refuses to say what became of one change: everything else goes on."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted, contents
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fuse")


def test_one_directory_is_closed_to_us(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    (backing / "theirs").mkdir(parents=True)
    (backing / "theirs" / "data").write_text("theirs")
    with FaultShare(backing) as share, Mounted(share.mountpoint) as mount:
        for name in ("closed", "open"):
            (mount.path / name).mkdir()
            (mount.path / name / "seen").write_text("x")
        mount.flush()
        share.hang(["rename", "link"], "closed/*")
        (mount.path / "closed" / "new").write_text("hello")
        share.wait_hung()
        mount.strike()
        share.release(late=False)
        mount.wait_killed()
        share.clear()
        share.fail(["lookup", "getattr"], errno.EACCES, match="closed/*")
        mount.remount()
        (mount.path / "open" / "new").write_text("arrives")
        wait_until(lambda: (backing / "open" / "new").exists(), "the rest goes on", 30)
        assert (mount.path / "theirs" / "data").read_text() == "theirs"
        assert any("closed/new" in event["text"] for event in mount.status()["events"])
        assert (mount.path / "closed" / "new").read_text() == "hello"
        share.clear()
        mount.flush(timeout=60)
        assert (backing / "closed" / "new").read_text() == "hello"
        assert {path.name for path in (backing / "closed").iterdir()} == {"new", "seen"}


def test_where_a_rename_left_something(tmp_path: Path) -> None:
    """It is neither lost nor doubled in the mount, and the rest does not wait for it."""
    backing = tmp_path / "backing"
    (backing / "old" / "deep").mkdir(parents=True)
    (backing / "old" / "deep" / "file").write_text("bytes")
    with FaultShare(backing) as share, Mounted(share.mountpoint) as mount:
        seen = [path.name for path in sorted(mount.path.rglob("*"))]
        assert seen == ["old", "deep", "file"]
        assert mount.umount().returncode == 0  # what was seen is remembered
        mount.remount()
        share.hang(["rename"], after=True)
        (mount.path / "old").rename(mount.path / "new")
        share.wait_hung()
        (mount.path / "new" / "deep" / "more").write_text("more")
        mount.strike()
        share.release(late=False)
        mount.wait_killed()
        share.clear()
        for name in ("old", "new"):
            share.fail(["lookup", "getattr"], errno.EACCES, match=name)
        mount.remount()
        (mount.path / "other").write_text("arrives")
        wait_until((backing / "other").exists, "the rest goes on", 30)
        assert sorted(path.name for path in mount.path.iterdir()) == ["new", "other"]
        assert (mount.path / "new" / "deep" / "more").read_text() == "more"
        assert any(error["path"] == "new" for error in mount.status()["errors"])
        share.clear()
        mount.flush(timeout=60)
        assert contents(backing) == contents(mount.path)
        assert (backing / "new" / "deep" / "more").read_text() == "more"
        assert not any("conflict" in event["text"] for event in mount.status()["events"])
