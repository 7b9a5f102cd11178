"""Mounts that begin while the share does not answer, or after a daemon that can't die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, merge, wbcache
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fuse")

SOON = 20.0
"""Seconds for a mount that waits for nothing for long, on a busy machine."""

CONFIG = merge(NEVER_BY_ITSELF, {"share": {"lookup_deadline": "1s", "deadline": "2s"}})


@pytest.fixture
def share(tmp_path: Path) -> Iterator[FaultShare]:
    """A share with files of somebody else's."""
    backing = tmp_path / "backing"
    (backing / "data" / "deep").mkdir(parents=True)
    for name in ("one", "two", "three"):
        (backing / "data" / name).write_text(name)
    with FaultShare(backing) as share:
        yield share


def prepare(mounted: Mounted) -> dict[str, os.stat_result]:
    """Leave a cache that knows of the share, and holds something that is not there yet."""
    known = {}
    assert sorted(os.listdir(mounted.path)) == ["data"]
    assert sorted(os.listdir(mounted.path / "data")) == ["deep", "one", "three", "two"]
    (mounted.path / "data" / "mine").write_text("flushed")
    mounted.flush()
    for name in ("data", *(f"data/{n}" for n in ("one", "two", "three", "mine", "deep"))):
        known[name] = (mounted.path / name).stat()
    (mounted.path / "data" / "dirty").write_text("before")
    (mounted.path / "data" / "two").unlink()
    done = mounted.umount("--no-drain")
    assert done.returncode == 3, done.stderr
    return known


def check_served(mounted: Mounted, known: dict[str, os.stat_result]) -> None:
    """What was known is served, what is new is taken, and the share alone knows the rest."""
    data = mounted.path / "data"
    names = ["deep", "dirty", "mine", "one", "three"]
    began = time.monotonic()
    assert sorted(os.listdir(data)) == names
    for name, before in known.items():
        if name != "data/two":
            st = (mounted.path / name).stat()
            assert (st.st_ino, st.st_mode, st.st_size) == (
                before.st_ino,
                before.st_mode,
                before.st_size,
            )
    assert (data / "mine").read_text() == "flushed"
    assert (data / "dirty").read_text() == "before"
    assert not (data / "two").exists()
    assert not (data / "unheard of").exists()
    (data / "new").write_text("while it is dead")
    (data / "mine").write_text("changed")
    (data / "three").unlink()
    os.rename(data / "dirty", data / "renamed")
    assert time.monotonic() - began < 5
    with pytest.raises(TimeoutError):
        os.listdir(data / "deep")
    with pytest.raises(TimeoutError):
        (data / "one").read_text()


def check_arrived(share: FaultShare, mounted: Mounted) -> None:
    """Once the share answers everything goes on by itself."""
    wait_until(lambda: mounted.status()["share"]["verified"], "the share is verified")
    assert mounted.status()["share"]["state"] == "answering"
    assert os.listdir(mounted.path / "data" / "deep") == []
    assert (mounted.path / "data" / "one").read_text() == "one"
    mounted.flush()
    data = share.backing / "data"
    assert {path.name: path.read_text() for path in data.iterdir() if path.is_file()} == {
        "one": "one",
        "mine": "changed",
        "new": "while it is dead",
        "renamed": "before",
    }


def unused(share: FaultShare) -> bool:
    """Whether nothing has been flushed to the share since `prepare`."""
    names = sorted(os.listdir(share.backing / "data"))
    return names == ["deep", "mine", "one", "three", "two"]


@pytest.mark.parametrize("over", [False, True], ids=["beside", "over"])
def test_a_mount_of_a_share_that_hangs(share: FaultShare, over: bool) -> None:
    mountpoint = share.mountpoint if over else None
    with Mounted(share.mountpoint, config=CONFIG, mountpoint=mountpoint) as mounted:
        known = prepare(mounted)
        share.hang()
        began = time.monotonic()
        mounted.remount()
        assert time.monotonic() - began < SOON
        status = mounted.status()["share"]
        assert (status["state"], status["verified"]) == ("not answering", False)
        check_served(mounted, known)
        assert wbcache("flush", "--timeout", "1", mounted.path).returncode == 3
        text = wbcache("status", mounted.path).stdout
        assert "not answering, not used: it has not answered yet" in text
        assert unused(share)
        share.release()
        share.clear()
        check_arrived(share, mounted)
        assert mounted.umount().returncode == 0


def test_a_mount_of_a_directory_on_a_share_that_hangs(share: FaultShare) -> None:
    with Mounted(share.mountpoint / "data", config=CONFIG) as mounted:
        os.listdir(mounted.path)
        (mounted.path / "dirty").write_text("before")
        assert mounted.umount("--no-drain").returncode == 3
        share.hang()
        began = time.monotonic()
        mounted.remount()
        assert time.monotonic() - began < SOON
        assert sorted(os.listdir(mounted.path)) == ["deep", "dirty", "one", "three", "two"]
        (mounted.path / "new").write_text("while it is dead")
        share.release()
        share.clear()
        assert mounted.umount().returncode == 0
    assert (share.backing / "data" / "dirty").read_text() == "before"
    assert (share.backing / "data" / "new").read_text() == "while it is dead"


def test_what_hangs_below_the_mount_of_the_share_can_t_be_covered(share: FaultShare) -> None:
    data = share.mountpoint / "data"
    with Mounted(data, config=CONFIG, mountpoint=data) as mounted:
        (mounted.path / "dirty").write_text("before")
        assert mounted.umount("--no-drain").returncode == 3
        share.hang()
        done = wbcache("mount", "--cache-dir", mounted.cache_dir, data, data)
        assert done.returncode == 4
        assert "did not answer" in done.stderr and len(done.stderr.splitlines()) == 1
        share.release()
        share.clear()
        mounted.remount()
        assert mounted.umount().returncode == 0


def test_a_mount_of_a_share_that_is_disconnected(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=CONFIG) as mounted:
        known = prepare(mounted)
        share.disconnect()
        mounted.remount()
        check_served(mounted, known)
        status = mounted.status()["share"]
        assert not status["verified"]
        assert "not connected" in status["problem"]
        assert unused(share)
        share.reconnect()
        check_arrived(share, mounted)
        assert mounted.umount().returncode == 0


def test_it_ends_while_the_share_hangs(share: FaultShare) -> None:
    config = merge(CONFIG, {"drain": {"timeout": "1s"}})
    with Mounted(share.mountpoint, config=config) as mounted:
        prepare(mounted)
        share.hang()
        mounted.remount()
        (mounted.path / "data" / "new").write_text("x")
        os.kill(mounted.pid, signal.SIGTERM)
        wait_until(lambda: not mounted.is_mounted, "SIGTERM ends it")
        # Its process still waits for the share; that is no reason to wait with it.
        mounted.remount()
        assert (mounted.path / "data" / "new").read_text() == "x"
        began = time.monotonic()
        done = wbcache("umount", "--timeout", "1", mounted.path)
        assert time.monotonic() - began < SOON
        assert done.returncode == 3
        assert "data/new" in done.stdout
        share.release()
        share.clear()
        mounted.remount()
        assert mounted.umount().returncode == 0
    assert (share.backing / "data" / "new").read_text() == "x"


def test_another_directory_that_answers_instead_is_not_believed(
    share: FaultShare, tmp_path: Path
) -> None:
    """The network mount is taken away, and what is under it answers: an empty directory."""
    place = tmp_path / "place"
    place.mkdir()
    (tmp_path / "m").mkdir()
    share.close()
    share = FaultShare(tmp_path / "backing", place)
    with share, Mounted(place, config=CONFIG, mountpoint=tmp_path / "m") as mounted:
        known = prepare(mounted)
        share.hang()
        mounted.remount()
        share.close()
        wait_until(lambda: "id file" in mounted.status()["share"]["problem"], "it is looked at")
        status = mounted.status()
        assert "--rebind" in status["share"]["problem"]
        assert not status["share"]["verified"]
        assert any("--rebind" in event["text"] for event in status["events"])
        check_served(mounted, known)
        done = wbcache("flush", mounted.path / "data" / "new")
        assert done.returncode == 3
        assert os.listdir(place) == []
        # The real one is mounted again: nothing has to be done here.
        with FaultShare(tmp_path / "backing", place) as again:
            check_arrived(again, mounted)
            assert mounted.umount().returncode == 0


def test_umount_does_not_wait_for_the_right_share(share: FaultShare, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    share.close()
    share = FaultShare(tmp_path / "backing", place)
    with share, Mounted(place, config=CONFIG) as mounted:
        prepare(mounted)
        share.hang()
        mounted.remount()
        share.close()
        wait_until(lambda: "id file" in mounted.status()["share"]["problem"], "it is looked at")
        done = mounted.umount("--json")
        assert done.returncode == 3
        assert {row["path"] for row in json.loads(done.stdout)["remaining"]} >= {"data/dirty"}


def test_a_share_that_is_mounted_anew_is_found_again(share: FaultShare, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    share.close()
    with FaultShare(tmp_path / "backing", place) as share:
        with Mounted(place, config=CONFIG) as mounted:
            with open(mounted.path / "log", "w") as file:
                file.write("first\n")
                file.flush()
                mounted.flush("log")
                share.close()
                file.write("second\n")
            assert (mounted.path / "log").read_text() == "first\nsecond\n"
            done = wbcache("flush", "--timeout", "1", mounted.path / "log")
            assert done.returncode == 3
            assert os.listdir(place) == []
            with FaultShare(tmp_path / "backing", place) as again:
                wait_until(lambda: mounted.status()["share"]["verified"], "it is found again")
                mounted.flush()
                assert (again.backing / "log").read_text() == "first\nsecond\n"
                assert sorted(os.listdir(mounted.path)) == ["data", "log"]
                assert mounted.umount().returncode == 0


def test_a_share_that_hangs_and_is_mounted_anew_is_found_again(
    share: FaultShare, tmp_path: Path
) -> None:
    """What hangs in its old mount may hang for good."""
    place = tmp_path / "place"
    place.mkdir()
    share.close()
    with FaultShare(tmp_path / "backing", place) as old, Mounted(place, config=CONFIG) as mounted:
        assert sorted(os.listdir(mounted.path)) == ["data"]
        assert sorted(os.listdir(mounted.path / "data")) == ["deep", "one", "three", "two"]
        old.hang()
        (mounted.path / "data" / "stuck").write_text("on its way")
        assert wbcache("flush", "--timeout", "1", mounted.path / "data" / "stuck").returncode == 3
        with pytest.raises(TimeoutError):
            os.listdir(mounted.path / "data" / "deep")
        subprocess.run(["umount", "-l", place], check=True)
        with FaultShare(tmp_path / "backing", place) as again:
            wait_until(lambda: "answers again" in mounted.log(), "it is found again")
            # This one has nothing older in its directory that is stuck.
            assert os.listdir(mounted.path / "data" / "deep") == []
            (mounted.path / "data" / "deep" / "new").write_text("later")
            mounted.flush("data/deep/new")
            assert (again.backing / "data" / "deep" / "new").read_text() == "later"
            old.release()
            old.clear()
            mounted.flush()
            assert (again.backing / "data" / "stuck").read_text() == "on its way"
            assert mounted.umount().returncode == 0


def test_a_killed_daemon_that_hangs_can_be_told_and_taken_away(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=CONFIG) as mounted:
        prepare(mounted)
        mounted.remount({"flush": {"idle_delay": "0s"}})
        share.hang(["create"])
        (mounted.path / "data" / "new").write_text("x")
        share.wait_hung("create")
        os.kill(mounted.pid, signal.SIGKILL)
        began = time.monotonic()
        done = wbcache("status", mounted.path)
        assert done.returncode == 9
        assert f"was killed (pid {mounted.pid})" in done.stderr
        done = wbcache("umount", mounted.path)
        assert time.monotonic() - began < SOON
        assert done.returncode == 3
        assert "carry on with 'wbcache mount" in done.stderr
        assert not mounted.is_mounted
        share.release()
        share.clear()
        mounted.remount()
        assert mounted.umount().returncode == 0
    assert (share.backing / "data" / "new").read_text() == "x"
    assert (share.backing / "data" / "dirty").read_text() == "before"


def test_a_killed_daemon_that_hangs_is_followed_over_the_share_itself(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=CONFIG, mountpoint=share.mountpoint) as mounted:
        known = prepare(mounted)
        mounted.remount({"flush": {"idle_delay": "0s"}})
        share.hang(["create"])
        (mounted.path / "data" / "dirty").write_text("again")
        share.wait_hung("create")
        share.hang()
        first = mounted.pid
        os.kill(first, signal.SIGKILL)
        mounted.remount()
        assert os.path.exists(f"/proc/{first}"), "it could just end: nothing was tested"
        (mounted.path / "data" / "dirty").write_text("before")
        check_served(mounted, known)
        assert str(first) in mounted.status()["share"]["problem"]
        share.release()
        share.clear()
        check_arrived(share, mounted)
        assert mounted.umount().returncode == 0
