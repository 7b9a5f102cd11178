"""Another writer changes a file while our flush of it is under way."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conflicts.conftest import BLIND, listed, plain
from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, contents, merge
from tests.waiting import wait_until
from wbcache.errors import WbcacheError

LOST = ["rename", "symlink", "utimens"]

pytestmark = pytest.mark.usefixtures("fuse")


class Stage(NamedTuple):
    share: FaultShare
    mount: Mounted

    @property
    def backing(self) -> Path:
        """What the share really holds."""
        return self.share.backing / self.mount.source.name

    def match(self, path: str) -> str:
        """A pattern for the share's rules."""
        return f"{self.mount.source.name}/{path}"

    def flush_into(self, op: str, path: str, meanwhile: Callable[[Path], object]) -> None:
        """Flush; when the share gets such a call, first something happens behind its back."""
        rule = self.share.hang([op], self.match(path), times=1)
        flush = threading.Thread(target=self.mount.client.flush, args=([b""], 20.0))
        flush.start()
        self.share.wait_hung(op)
        meanwhile(self.backing)
        self.share.release(rule)
        flush.join()

    def held(self) -> dict[str, bytes]:
        """What the share holds, which is what the mount shows."""
        self.mount.flush()
        held = contents(self.backing)
        assert held == contents(self.mount.path)
        return {plain(name): data for name, (_, data) in held.items()}


@pytest.fixture(scope="module")
def share() -> Iterator[FaultShare]:
    with tempfile.TemporaryDirectory(prefix="wbcache-under-way-") as name:
        with FaultShare(name) as share:
            yield share


@pytest.fixture
def stage(share: FaultShare, tmp_path: Path) -> Iterator[Stage]:
    config = merge(NEVER_BY_ITSELF, BLIND)
    (share.backing / tmp_path.name).mkdir()
    with Mounted(share.mountpoint / tmp_path.name, config=config) as mount:
        (mount.path / "f").write_text("before,")
        mount.flush()
        yield Stage(share, mount)
        share.clear()


def replace(top: Path) -> None:
    (top / "other-writers-temporary").write_text("theirs")
    (top / "other-writers-temporary").rename(top / "f")


@pytest.mark.parametrize("op", ["write", "fsync"])
def test_a_file_that_is_growing_is_replaced(stage: Stage, op: str) -> None:
    with open(stage.mount.path / "f", "a") as file:
        file.write("ours")
    stage.flush_into(op, "f", replace)
    assert stage.held() == {"f": b"theirs", "f!": b"before,ours"}
    assert [row["kind"] for row in listed(stage.mount)] == ["both kept"]


def test_a_file_that_is_growing_is_removed(stage: Stage) -> None:
    with open(stage.mount.path / "f", "a") as file:
        file.write("ours")
    stage.flush_into("write", "f", lambda top: (top / "f").unlink())
    assert stage.held() == {"f": b"before,ours"}
    assert [row["kind"] for row in listed(stage.mount)] == ["removed there"]


def test_what_is_seen_after_a_removal_was_not_known_to_it(
    share: FaultShare, tmp_path: Path
) -> None:
    """A look that is under way when a name is removed or replaced here, and finds the other
    writer's file, does not make that ours to remove."""
    (share.backing / tmp_path.name).mkdir()
    config = merge(NEVER_BY_ITSELF, {"share": {"attr_ttl": "0s", "dir_ttl": "1d"}})
    names = ["removed", "replaced", "renamed"]
    with Mounted(share.mountpoint / tmp_path.name, config=config) as mount:
        stage = Stage(share, mount)
        for name in (*names, "other"):
            (mount.path / name).write_text("ours")
        mount.flush()
        for name in names:
            (stage.backing / name).write_text("theirs")
        rule = share.hang(["lookup"], stage.match("re*"))

        def looks() -> bool:
            for name in names:
                (mount.path / name).stat()
            return len({call.path for call in share.hung()}) == len(names)

        wait_until(looks, "it looks at the share")
        (mount.path / "removed").unlink()
        (mount.path / "new").write_text("ours")
        (mount.path / "new").rename(mount.path / "replaced")
        (mount.path / "other").rename(mount.path / "renamed")
        share.release(rule)
        wait_until(lambda: not mount.status()["share"]["calls_under_way"], "it has looked")
        mount.flush()
        held = {plain(name): data for name, (_, data) in contents(stage.backing).items()}
        ours = {"replaced!": b"ours", "renamed!": b"ours"}
        assert held == {**dict.fromkeys(names, b"theirs"), **ours}
        assert len(listed(mount)) == len(names)


def test_a_file_is_replaced_while_ours_is_copied(stage: Stage) -> None:
    (stage.mount.path / "f").write_text("ours")
    stage.flush_into("write", ".wbcache-*", replace)
    assert stage.held() == {"f": b"theirs", "f!": b"ours"}
    assert [row["kind"] for row in listed(stage.mount)] == ["both kept"]


def test_a_file_is_made_where_ours_is_about_to_get_its_name(stage: Stage) -> None:
    """There is no window for new names: whoever comes first has it."""
    (stage.mount.path / "g").write_text("ours")
    stage.flush_into("rename", ".wbcache-*", lambda top: (top / "g").write_text("theirs"))
    assert stage.held() == {"f": b"before,", "g": b"theirs", "g!": b"ours"}
    assert [row["kind"] for row in listed(stage.mount)] == ["both kept"]


def test_the_directory_is_removed_while_ours_is_copied(stage: Stage) -> None:
    (stage.mount.path / "d").mkdir()
    stage.mount.flush()
    (stage.mount.path / "d" / "g").write_text("ours")

    def remove(top: Path) -> None:
        for path in (top / "d").iterdir():
            path.unlink()
        (top / "d").rmdir()

    stage.flush_into("write", "d/.wbcache-*", remove)
    assert stage.held() == {"f": b"before,", "d": b"", "d/g": b"ours"}


def test_our_own_publish_with_a_lost_answer_is_no_conflict(stage: Stage) -> None:
    (stage.mount.path / "f").write_text("ours")
    (stage.mount.path / "g").write_text("ours")
    (stage.mount.path / "l").symlink_to("ours")
    rule = stage.share.fail(LOST, times=4, match=stage.match("*"), after=True)
    assert stage.held() == {"f": b"ours", "g": b"ours", "l": b"ours"}
    stage.share.clear(rule)
    (stage.mount.path / "l").unlink()
    (stage.mount.path / "l").symlink_to("again")
    stage.share.fail(LOST, times=4, match=stage.match("*"), after=True)
    assert stage.held() == {"f": b"ours", "g": b"ours", "l": b"again"}
    assert listed(stage.mount) == []


def test_the_memory_of_the_shares_client_is_not_asked(tmp_path: Path) -> None:
    """Clients of network file systems remember attributes for seconds, this one for an hour."""
    backing = tmp_path / "backing"
    backing.mkdir()
    names = ["rewritten", "replaced", "appended", "removed"]
    with (
        FaultShare(backing, attr_timeout=3600, entry_timeout=3600) as share,
        Mounted(share.mountpoint, config=merge(NEVER_BY_ITSELF, BLIND)) as mount,
    ):
        for name in names:
            (mount.path / name).write_text("before,")
        mount.flush()
        for name in names:
            assert (share.mountpoint / name).stat()
        (mount.path / "rewritten").write_text("ours")
        (mount.path / "new").write_text("ours")
        (mount.path / "new").rename(mount.path / "replaced")
        with open(mount.path / "appended", "a") as file:
            file.write("ours")
        (mount.path / "removed").unlink()
        for name in names:
            (backing / name).write_text("theirs!")
        mount.flush()
        held = {plain(name): data for name, (_, data) in contents(backing).items()}
        ours = {"rewritten!": b"ours", "replaced!": b"ours", "appended!": b"before,ours"}
        assert held == {**dict.fromkeys(names, b"theirs!"), **ours}
        assert len(listed(mount)) == 4


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("op", ["rename", "symlink"])
def test_our_own_publish_cut_off_by_a_kill_is_no_conflict(
    stage: Stage, op: str, done: bool
) -> None:
    (stage.mount.path / "l").symlink_to("before")
    stage.mount.flush()
    (stage.mount.path / "f").write_text("ours")
    (stage.mount.path / "l").unlink()
    (stage.mount.path / "l").symlink_to("ours")
    rule = stage.share.hang([op], stage.match("*"), after=done)
    flush = threading.Thread(target=_flush_until_killed, args=(stage.mount,))
    flush.start()
    stage.share.wait_hung(op)
    os.kill(stage.mount.pid, signal.SIGKILL)
    stage.share.release(rule, late=False)
    stage.mount.kill()  # it has ended when this returns
    flush.join()
    stage.mount.remount()
    assert stage.held() == {"f": b"ours", "l": b"ours"}
    assert listed(stage.mount) == []
    assert "conflict" not in stage.mount.log()


def _flush_until_killed(mount: Mounted) -> None:
    with pytest.raises(WbcacheError):
        mount.client.flush([b""], 20.0)


def test_a_late_answer_is_no_conflict(stage: Stage) -> None:
    """The call takes effect long after the flush that asked for it was given up."""
    (stage.mount.path / "f").write_text("ours")
    rule = stage.share.hang(["rename"], stage.match("*"), times=1)
    assert stage.mount.client.flush([b""], 0.5)
    stage.share.wait_hung("rename")
    (stage.mount.path / "f").write_text("ours, newer")
    assert stage.mount.client.flush([b""], 0.5)
    stage.share.release(rule)
    assert stage.held() == {"f": b"ours, newer"}
    assert listed(stage.mount) == []


def append(path: Path, data: str) -> None:
    with open(path, "a") as file:
        file.write(data)


@pytest.mark.parametrize("kill", [False, True], ids=["an error", "a kill"])
def test_another_appends_after_ours_was_cut_off(stage: Stage, kill: bool) -> None:
    """No more than we had sent, so that its length alone does not tell whose it is."""
    append(stage.mount.path / "f", "and this is ours")
    stage.share.hang(["write"], stage.match("f"))
    flush = threading.Thread(target=lambda: _ignored(stage.mount.client.flush, [b""], 2.0))
    flush.start()
    stage.share.wait_hung("write")
    if kill:
        stage.mount.strike()
    stage.share.release(late=False)
    append(stage.backing / "f", "theirs")
    stage.share.clear()
    if kill:
        stage.mount.wait_killed()
        stage.mount.remount()
    flush.join()
    assert stage.held() == {"f": b"before,theirs", "f!": b"before,and this is ours"}
    assert [row["kind"] for row in listed(stage.mount)] == ["both kept"]


def test_what_is_left_of_ours_is_no_conflict_whatever_was_written_since(stage: Stage) -> None:
    append(stage.mount.path / "f", "first")
    stage.share.fail(["write"], errno.EIO, match=stage.match("f"), after=True)
    with pytest.raises(AssertionError):
        stage.mount.flush(timeout=1)
    assert (stage.backing / "f").read_text() == "before,first"
    with open(stage.mount.path / "f", "r+") as file:
        file.seek(len("before,"))
        file.write("again")
    stage.share.clear()
    assert stage.held() == {"f": b"before,again"}
    assert listed(stage.mount) == []


def test_another_appends_after_a_patch_was_cut_off(stage: Stage) -> None:
    """Of bytes that only the share has, or else the file would be published whole."""
    (stage.backing / "g").write_text("before,")
    wait_until((stage.mount.path / "g").exists, "it is seen")
    with open(stage.mount.path / "g", "r+") as file:
        file.write("B")
    stage.share.fail(["write"], errno.EIO, match=stage.match("g"))
    with pytest.raises(AssertionError):
        stage.mount.flush(timeout=1)
    append(stage.backing / "g", "theirs")
    stage.share.clear()
    with contextlib.suppress(AssertionError):  # the rest of ours was in the file that was changed
        stage.mount.flush(timeout=5)
    assert (stage.backing / "g").read_text() == "before,theirs"
    assert [row["kind"] for row in listed(stage.mount)] == ["both kept"]


def _ignored(call: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(WbcacheError):
        call(*args)
