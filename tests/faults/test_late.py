"""Calls that hang and are carried out late never undo what was done since.

A call of the flusher is kept by the share, before it has any effect. The mount goes on: what the
call was about is changed, removed, replaced. Then the share carries the call out, while the daemon
lives, or after it was killed, with the next one serving already.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.endtoend.checkpoints import blob
from tests.faults.matrix import ROWS
from tests.faultshare.client import FaultShare
from tests.mounting import Mounted, contents
from tests.waiting import wait_until

pytestmark = [pytest.mark.usefixtures("fuse"), pytest.mark.timeout(120)]

Act = Callable[[Path], object]


class Late(NamedTuple):
    """One kind of call, and what happens around it."""

    row: str
    """In the table of `matrix`."""
    call: str
    """As the share names it."""
    match: str
    begin: Act
    """Leads to the call."""
    meanwhile: Act
    """Makes it wrong."""


def write(name: str, data: bytes) -> Act:
    return lambda top: (top / name).write_bytes(data)


def both(*acts: Act) -> Act:
    def act(top: Path) -> None:
        for one in acts:
            one(top)

    return act


def append(name: str, data: bytes) -> Act:
    def act(top: Path) -> None:
        with open(top / name, "ab") as file:
            file.write(data)

    return act


def patch(name: str, data: bytes, offset: int) -> Act:
    def act(top: Path) -> None:
        with open(top / name, "r+b") as file:
            file.seek(offset)
            file.write(data)

    return act


def replace(name: str, data: bytes) -> Act:
    def act(top: Path) -> None:
        (top / "tmp").write_bytes(data)
        (top / "tmp").rename(top / name)

    return act


def unlink(name: str) -> Act:
    return lambda top: (top / name).unlink()


NEW, TEMPORARY = blob("new", 3000), ".wbcache-*"

CASES = {
    "create": Late("create", "create", TEMPORARY, write("f", b"1"), write("f", NEW)),
    "write": Late(
        "write", "write", TEMPORARY, write("f", b"1"), both(unlink("f"), write("f", NEW))
    ),
    "fsync": Late("fsync", "fsync", TEMPORARY, replace("f", b"1"), replace("f", NEW)),
    "publish": Late("publish", "rename", "*/f", write("f", b"1"), write("f", NEW)),
    "publish over": Late("publish", "rename", "*/old", replace("old", b"1"), unlink("old")),
    "grow": Late(
        "append, patch", "write", "*/old", append("old", b"more"),
        both(lambda top: os.truncate(top / "old", 5), append("old", NEW)),
    ),
    "grow, replaced": Late(
        "append, patch", "write", "*/old", append("old", b"more"), replace("old", NEW)
    ),
    "patch": Late(
        "append, patch", "write", "*/linked*", patch("linked", b"patched", 7),
        patch("linked", b"newer still", 3),
    ),
    "truncate": Late(
        "truncate", "truncate", "*/linked*", lambda top: os.truncate(top / "linked", 10),
        append("linked", NEW),
    ),
    "rename": Late(
        "rename, link", "rename", "*/moved", lambda top: (top / "old").rename(top / "moved"),
        both(write("old", NEW), unlink("moved")),
    ),
    "link": Late(
        "rename, link", "link", "*/second", lambda top: os.link(top / "old", top / "second"),
        replace("second", NEW),
    ),
    "symlink": Late(
        "rename, link", "symlink", "*/link", lambda top: os.symlink("old", top / "link"),
        both(unlink("link"), write("link", NEW)),
    ),
    "mkdir": Late(
        "mkdir", "mkdir", "*/made", lambda top: (top / "made").mkdir(),
        both(lambda top: (top / "made").rmdir(), write("made", NEW)),
    ),
    "unlink": Late("unlink, rmdir", "unlink", "*/old", unlink("old"), write("old", NEW)),
    "rmdir": Late(
        "unlink, rmdir", "rmdir", "*/empty", lambda top: (top / "empty").rmdir(),
        both(lambda top: (top / "empty").mkdir(), write("empty/file", NEW)),
    ),
    "chmod": Late(
        "attributes", "chmod", "*/old", lambda top: (top / "old").chmod(0o600),
        both(lambda top: (top / "old").chmod(0o640), append("old", NEW)),
    ),
    "utimens": Late(
        "attributes", "utimens", "*/old", lambda top: os.utime(top / "old", (1, 1)),
        both(replace("old", NEW), lambda top: os.utime(top / "old", (2, 2))),
    ),
    "setxattr": Late(
        "attributes", "setxattr", "*/old", lambda top: os.setxattr(top / "old", "user.a", b"1"),
        lambda top: os.setxattr(top / "old", "user.a", b"2"),
    ),
}  # fmt: skip

SHORT = ("write", "publish", "grow", "rename", "unlink", "rmdir")
"""Those that are tried with a kill every time."""


def prepare(top: Path) -> None:
    """What the share holds before."""
    (top / "old").write_bytes(blob("old", 200))
    (top / "linked").write_bytes(blob("linked", 200))
    os.link(top / "linked", top / "linked-too")  # so it is changed in place
    (top / "empty").mkdir()


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultShare]:
    with FaultShare(tmp_path_factory.mktemp("backing")) as share:
        yield share
        assert share.errors() == ""


CONFIG = {"flush": {"idle_delay": "0"}, "share": {"lookup_deadline": "1s"}}


@pytest.fixture(scope="module")
def mount(share: FaultShare) -> Iterator[Mounted]:
    with Mounted(share.mountpoint, config=CONFIG) as mount:
        yield mount


@pytest.fixture
def place(request: pytest.FixtureRequest, share: FaultShare, mount: Mounted) -> Iterator[str]:
    """The name of a directory for the test, with the same in the mount and on the share."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    (mount.path / name).mkdir()
    prepare(mount.path / name)
    mount.flush()
    yield name
    share.clear()


def facts(top: Path) -> dict[str, object]:
    """All that the calls change: bytes, modes, and of files times and extended attributes."""
    found: dict[str, object] = dict(contents(top))
    for path in top.rglob("*"):
        if path.is_file() and not path.is_symlink():
            st = path.stat()
            marked = {n: os.getxattr(path, n) for n in os.listxattr(path) if n == "user.a"}
            whole = st.st_mtime if st.st_mtime < 10 else None
            found[f"{path.relative_to(top)} more"] = (whole, marked, st.st_nlink)
    return found


def check(share: FaultShare, mount: Mounted, place: str, late: Late, native: Path) -> None:
    """The share has what the same acts made of a plain directory."""
    native.mkdir()
    prepare(native)
    late.begin(native)
    late.meanwhile(native)
    mount.flush()
    wanted = facts(native)
    assert facts(mount.path / place) == wanted
    wait_until(lambda: facts(share.backing / place) == wanted, "the share has it all", 5)
    assert not [row for row in mount.client.pending() if place in os.fsdecode(row["path"])]


@pytest.mark.parametrize("case", CASES)
def test_while_the_daemon_lives(
    share: FaultShare, mount: Mounted, place: str, tmp_path: Path, case: str
) -> None:
    late = CASES[case]
    rule = share.hang([late.call], f"{place}/{late.match.removeprefix('*/')}", times=1)
    late.begin(mount.path / place)
    share.wait_hung(late.call)
    late.meanwhile(mount.path / place)
    # In other directories everything goes on.
    (mount.path / f"{place}other").mkdir()
    wait_until((share.backing / f"{place}other").is_dir, "the rest goes on")
    share.release(rule)
    check(share, mount, place, late, tmp_path / "native")


@pytest.mark.parametrize(
    "case",
    [case if case in SHORT else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_after_the_daemon_was_killed(
    share: FaultShare, mount: Mounted, place: str, tmp_path: Path, case: str
) -> None:
    """The next daemon serves while the last one still is in the call."""
    late = CASES[case]
    rule = share.hang([late.call], f"{place}/{late.match.removeprefix('*/')}", times=1)
    late.begin(mount.path / place)
    share.wait_hung(late.call)
    mount.strike()
    mount.remount()
    late.meanwhile(mount.path / place)
    assert share.hung()
    share.release(rule)
    check(share, mount, place, late, tmp_path / "native")


def test_every_call_that_changes_the_share_is_among_them() -> None:
    assert {late.row for late in CASES.values()} == ROWS.keys() - {"close", "look up"}


def test_the_share_refuses_to_tell_where_something_is(tmp_path: Path) -> None:
    """Until it tells, the mount goes on showing the file, and the rest arrives."""
    (tmp_path / "old").write_text("bytes")
    with FaultShare(tmp_path) as share, Mounted(share.mountpoint) as mount:
        assert os.listdir(mount.path) == ["old"]
        share.hang(["rename"], after=True)
        os.rename(mount.path / "old", mount.path / "new")
        share.wait_hung()
        for name in ("old", "new"):
            share.fail(["lookup", "getattr"], errno.EACCES, match=name)
        share.release(late=False)
        wait_until(
            lambda: any("where it is" in event["text"] for event in mount.status()["events"]),
            "the share refuses to tell",
        )
        (mount.path / "other").write_text("arrives")
        wait_until((tmp_path / "other").exists, "the rest goes on")
        assert (tmp_path / "new").exists()
        assert sorted(os.listdir(mount.path)) == ["new", "other"]
        share.clear()
        mount.flush()
        assert (mount.path / "new").read_text() == "bytes"
        assert contents(tmp_path) == contents(mount.path)
        assert not any("another writer" in event["text"] for event in mount.status()["events"])
