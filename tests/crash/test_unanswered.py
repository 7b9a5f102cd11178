"""The daemon is killed while a call on the share has happened and its answer has not come.

The next one has to find that out: what it did not hear of is neither another writer's, nor missing,
nor to be done twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.crash.mounting import MountedCache, leftovers
from tests.faultshare.client import FaultShare
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fuse")

Step = Callable[[Path], object]


class Stage(NamedTuple):
    """A mount over a share whose calls can be kept."""

    mount: MountedCache
    share: FaultShare

    @property
    def top(self) -> Path:
        return self.mount.mountpoint

    def flush(self) -> None:
        """Bring everything to the share."""
        done = self.mount.run("flush", self.top)
        assert done.returncode == 0, done.stderr

    def kill_in(
        self,
        op: str,
        match: str,
        *,
        begin: Step,
        then: Step = lambda top: None,
        done: bool = True,
    ) -> None:
        """Begin something that leads to a call, do more once that is without answer, and kill.

        ``done`` tells whether the call takes effect. Ends with the next mount.
        """
        rule = self.share.hang([op], match=match, after=done)
        begin(self.top)
        self.share.wait_hung(op)
        then(self.top)
        pid = self.mount.pid
        self.mount.kill()
        self.share.release(rule, late=False)
        self.share.clear()
        self.mount.wait_for_end(pid)
        self.mount.mounted()

    def drained(self) -> dict[str, str]:
        """Drain; what is on the share then, by path: content, link target, "/" for directories."""
        self.mount.drained()
        assert not leftovers(self.mount.source)
        assert "conflict" not in self.mount.log(1000)
        return tree(self.mount.source)


def tree(top: Path) -> dict[str, str]:
    found = {}
    for path in sorted(top.rglob("*")):
        relative = path.relative_to(top)
        if relative.parts[0] == ".wbcache":
            continue
        if path.is_symlink():
            found[str(relative)] = "-> " + os.readlink(path)
        else:
            found[str(relative)] = "/" if path.is_dir() else path.read_text()
    return found


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    backing = tmp_path / "backing"
    backing.mkdir()
    with FaultShare(backing) as share, MountedCache(tmp_path, share.mountpoint) as mount:
        mount.configure(idle_delay="300ms", max_age="300ms")
        mount.mounted()
        yield Stage(mount, share)


def write(name: str, text: str) -> Step:
    return lambda top: (top / name).write_text(text)


def append(name: str, text: str) -> Step:
    def step(top: Path) -> None:
        with open(top / name, "a") as file:
            file.write(text)

    return step


def test_a_publish(stage: Stage) -> None:
    stage.kill_in("rename", "file", begin=write("file", "new"), then=append("file", " and more"))
    assert (stage.top / "file").read_text() == "new and more"
    assert stage.drained() == {"file": "new and more"}


@pytest.mark.parametrize(
    ("op", "begin", "remove"),
    [
        ("rename", write("thing", "text"), lambda top: (top / "thing").unlink()),
        ("mkdir", lambda top: (top / "thing").mkdir(), lambda top: (top / "thing").rmdir()),
        (
            "symlink",
            lambda top: (top / "thing").symlink_to("target"),
            lambda top: (top / "thing").unlink(),
        ),
    ],
)
def test_what_was_removed_meanwhile_does_not_come_back(
    stage: Stage, op: str, begin: Step, remove: Step
) -> None:
    stage.kill_in(op, "thing", begin=begin, then=remove)
    assert not os.path.lexists(stage.top / "thing")
    assert stage.drained() == {}


def test_a_publish_under_a_new_name(stage: Stage) -> None:
    """The old name still shows the old file, which is not the one that was published."""
    write("old", "first")(stage.top)
    stage.flush()

    def begin(top: Path) -> None:
        (top / "old").rename(top / "new")
        (top / "new").write_text("second")

    stage.kill_in("rename", "new", begin=begin)
    assert tree(stage.top) == {"new": "second"}
    assert stage.drained() == {"new": "second"}


def test_a_hard_link_in_place_of_a_file(stage: Stage) -> None:
    write("one", "text")(stage.top)
    write("two", "older")(stage.top)
    stage.flush()

    def begin(top: Path) -> None:
        os.link(top / "one", top / "three")
        (top / "three").rename(top / "two")

    stage.kill_in("rename", "two", begin=begin)
    assert stage.drained() == {"one": "text", "two": "text"}
    assert os.path.samefile(stage.mount.source / "one", stage.mount.source / "two")


def test_a_renamed_directory_with_work_going_on_in_it(stage: Stage) -> None:
    (stage.top / "dir" / "below").mkdir(parents=True)
    write("dir/below/file", "text")(stage.top)
    stage.flush()

    def begin(top: Path) -> None:
        (top / "dir").rename(top / "renamed")

    def then(top: Path) -> None:
        (top / "renamed" / "below").rename(top / "renamed" / "lower")
        append("renamed/lower/file", " and more")(top)

    stage.kill_in("rename", "renamed", begin=begin, then=then)
    wanted = {"renamed": "/", "renamed/lower": "/", "renamed/lower/file": "text and more"}
    assert tree(stage.top) == wanted
    # What the share lists does not take anything away.
    wait_until(lambda: tree(stage.top) == wanted, "the listing is as before")
    assert stage.drained() == wanted


def test_an_append_that_was_cut_off_here_since(stage: Stage) -> None:
    write("log", "first\n")(stage.top)
    stage.flush()

    def then(top: Path) -> None:
        os.truncate(top / "log", len("first\n"))
        append("log", "third line\n")(top)

    stage.kill_in("write", "log", begin=append("log", "second line\n"), then=then)
    assert (stage.top / "log").read_text() == "first\nthird line\n"
    assert stage.drained() == {"log": "first\nthird line\n"}


def test_a_temporary_in_a_directory_that_was_removed(stage: Stage) -> None:
    (stage.top / "dir").mkdir()
    write("dir/kept", "kept")(stage.top)
    stage.flush()

    def then(top: Path) -> None:
        for name in ("kept", "file"):
            (top / "dir" / name).unlink()
        (top / "dir").rmdir()

    stage.kill_in("write", "dir/.wbcache-*", begin=write("dir/file", "text"), then=then)
    assert stage.drained() == {}


def test_attributes_that_were_on_their_way(stage: Stage) -> None:
    write("file", "text")(stage.top)
    (stage.top / "dir").mkdir()
    stage.flush()

    def begin(top: Path) -> None:
        os.setxattr(top / "file", "user.test", b"value")

    def then(top: Path) -> None:
        assert os.getxattr(top / "file", "user.test") == b"value"
        # The journal stores the attributes again, of which a step has taken one.
        os.chmod(top / "file", 0o600)
        os.utime(top / "file", ns=(10**18, 10**18))

    stage.kill_in("setxattr", "file", begin=begin, then=then, done=False)
    (stage.top / "dir" / "made").mkdir()
    os.utime(stage.top / "dir", ns=(2 * 10**18, 2 * 10**18))
    stage.mount.kill()
    stage.mount.wait_for_end()
    stage.mount.mounted()
    assert (stage.top / "dir").stat().st_mtime_ns == 2 * 10**18
    assert stage.drained() == {"file": "text", "dir": "/", "dir/made": "/"}
    assert (stage.mount.source / "dir").stat().st_mtime_ns == 2 * 10**18
    file = stage.mount.source / "file"
    assert os.getxattr(file, "user.test") == b"value"
    assert (file.stat().st_mode & 0o777, file.stat().st_mtime_ns) == (0o600, 10**18)
