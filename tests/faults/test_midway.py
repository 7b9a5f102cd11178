"""What happens to a share while it is in use: it turns read-only, takes permissions away, loses a
directory to another writer, or has one where a file was."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.world import blob
from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, contents
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fuse")


class Place(NamedTuple):
    """A directory in the mount and on the share."""

    share: FaultShare
    mount: Mounted
    name: str

    @property
    def top(self) -> Path:
        return self.mount.path / self.name

    @property
    def backing(self) -> Path:
        return self.share.backing / self.name

    def try_to_flush(self) -> dict[str, str]:
        """Flush what can be; the reasons of what remains, by path."""
        rows = self.mount.client.flush([os.fsencode(self.name)], 20.0)
        return {os.fsdecode(row["path"]).partition("/")[2]: row["reason"] for row in rows}

    def events(self) -> list[str]:
        return [event["text"] for event in self.mount.status()["events"]]

    def settle(self) -> None:
        """All arrives, and nothing is left over."""
        self.mount.flush()
        assert contents(self.backing) == contents(self.top)
        assert not list(self.backing.rglob(".wbcache-*"))
        assert self.mount.status()["errors"] == []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FaultShare, Mounted]]:
    with FaultShare(tmp_path_factory.mktemp("backing")) as share:
        with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
            yield share, mount


@pytest.fixture
def place(request: pytest.FixtureRequest, pair: tuple[FaultShare, Mounted]) -> Iterator[Place]:
    place = Place(*pair, request.node.name)
    (place.top / "dir").mkdir(parents=True)
    for name in ("old", "gone", "dir/file"):
        (place.top / name).write_bytes(blob(name))
    place.mount.flush()
    yield place
    place.share.clear()
    place.share.set(read_only=False)


def change(place: Place) -> None:
    (place.top / "new").write_bytes(blob("new"))
    (place.top / "old").write_bytes(blob("rewritten"))
    (place.top / "dir" / "file").chmod(0o600)
    (place.top / "gone").unlink()
    (place.top / "made").mkdir()
    (place.top / "made" / "in it").write_bytes(b"x")


def test_a_share_that_turns_read_only(place: Place) -> None:
    place.share.set(read_only=True)
    change(place)
    shown = contents(place.top)
    left = place.try_to_flush()
    assert set(left) == {"new", "old", "dir/file", "gone", "made", "made/in it"}
    assert left["new"] == left["made"] == "Read-only file system"
    assert left["made/in it"].endswith("/made', which is quarantined")
    state = os.getxattr(place.top / "new", "user.wbcache.state")
    assert state == b"quarantined: Read-only file system"
    errors = {os.fsdecode(error["path"]) for error in place.mount.status()["errors"]}
    assert f"{place.name}/new" in errors
    assert contents(place.top) == shown
    # The application goes on as before, also with what is quarantined.
    (place.top / "new").write_bytes(blob("newer"))
    place.share.set(read_only=False)
    place.settle()


def test_permissions_that_are_taken_away(place: Place) -> None:
    place.share.fail(["mutations", "open"], errno.EACCES, match=f"{place.name}/dir/*")
    (place.top / "dir" / "more").write_bytes(blob("more"))
    (place.top / "dir" / "file").unlink()
    change_elsewhere = place.top / "elsewhere"
    change_elsewhere.write_bytes(blob("elsewhere"))
    left = place.try_to_flush()
    assert left == {"dir/more": "Permission denied", "dir/file": left["dir/file"]}
    assert left["dir/file"]
    assert (place.backing / "elsewhere").read_bytes() == blob("elsewhere")
    assert (place.backing / "dir" / "file").read_bytes() == blob("dir/file")
    place.share.clear()
    place.settle()


def test_what_was_refused_is_tried_again_at_the_next_mount(place: Place) -> None:
    rule = place.share.fail(["create"], errno.EACCES, match=f"{place.name}/*")
    (place.top / "new").write_bytes(blob("new"))
    assert place.try_to_flush() == {"new": "Permission denied"}
    assert place.mount.umount().returncode == 3
    place.share.clear(rule)
    place.mount.remount()
    assert (place.top / "new").read_bytes() == blob("new")
    place.settle()


def test_a_directory_that_another_writer_removed(place: Place) -> None:
    (place.top / "dir" / "deep").mkdir()
    (place.top / "dir" / "deep" / "new").write_bytes(blob("new"))
    shutil.rmtree(place.backing / "dir")
    place.settle()
    assert (place.backing / "dir" / "deep" / "new").read_bytes() == blob("new")
    # What had no changes here went with it.
    assert not (place.top / "dir" / "file").exists()
    told = f"'{place.name}/dir' was removed on the share by another writer"
    assert any(told in text and "written again" in text for text in place.events())


@pytest.mark.parametrize("how", ["rewrite", "append", "chmod", "unlink"])
def test_a_name_that_became_a_directory(place: Place, how: str) -> None:
    if how == "rewrite":
        (place.top / "old").write_bytes(blob("mine"))
    elif how == "append":
        with open(place.top / "old", "ab") as file:
            file.write(b"mine")
    elif how == "chmod":
        (place.top / "old").chmod(0o600)
    else:
        (place.top / "old").unlink()
    (place.backing / "old").unlink()
    (place.backing / "old").mkdir()
    (place.backing / "old" / "theirs").write_bytes(b"theirs")
    place.try_to_flush()
    assert (place.backing / "old" / "theirs").read_bytes() == b"theirs"
    wait_until(lambda: (place.top / "old" / "theirs").exists(), "theirs has the name")
    ours = [path for path in place.top.iterdir() if ".conflict-" in path.name]
    mine = {"rewrite": [blob("mine")], "append": [blob("old") + b"mine"]}.get(how, [])
    assert [path.read_bytes() for path in ours] == mine
    place.settle()
