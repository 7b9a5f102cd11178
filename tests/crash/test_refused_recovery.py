"""After a kill the share refuses to say what became of one change: everything else goes on."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted
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
