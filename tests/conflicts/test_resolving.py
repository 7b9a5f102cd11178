"""`wbcache conflicts`: they are listed until somebody deals with them, by command or by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conflicts.conftest import BLIND, listed
from tests.mounting import NEVER_BY_ITSELF, Mounted, contents, merge, wbcache

pytestmark = pytest.mark.usefixtures("fuse")

HOSTILE = os.fsdecode(b"a\nb\x1b[2J\xff")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounted]:
    with Mounted(tmp_path / "share", config=merge(NEVER_BY_ITSELF, BLIND)) as mount:
        yield mount


def dispute(mount: Mounted, *names: str) -> None:
    """Conflicts about files of these names: both sides have changed them."""
    for name in names:
        (mount.path / name).write_text("before")
    mount.flush()
    for name in names:
        (mount.path / name).write_text("ours")
        (mount.source / name).write_text("theirs")
    mount.flush()


def resolve(mount: Mounted, keep: str, *paths: str | os.PathLike[str]) -> tuple[int, str]:
    done = wbcache("conflicts", "resolve", *paths, "--keep", keep)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == (1 if done.returncode else 0), done.stderr
    return done.returncode, done.stderr


def copy_of(mount: Mounted, name: str) -> Path:
    (row,) = [row for row in listed(mount) if row["path"] == name]
    return mount.path / str(row["ours"])


def held(mount: Mounted) -> dict[str, bytes]:
    """What mount and share both hold, once all is flushed."""
    mount.flush()
    shown = {name: data for name, (_, data) in contents(mount.path).items()}
    assert {name: data for name, (_, data) in contents(mount.source).items()} == shown
    return shown


def test_ours_takes_the_name_again(mount: Mounted) -> None:
    dispute(mount, "f")
    assert resolve(mount, "ours", mount.path / "f") == (0, "")
    assert (mount.path / "f").read_text() == "ours"
    assert held(mount) == {"f": b"ours"}
    assert listed(mount) == []
    assert mount.status()["conflicts"] == 0


def test_theirs_is_all_that_stays(mount: Mounted) -> None:
    dispute(mount, "f")
    assert resolve(mount, "theirs", mount.path / "f") == (0, "")
    assert held(mount) == {"f": b"theirs"}
    assert listed(mount) == []


def test_both_stay(mount: Mounted) -> None:
    dispute(mount, "f")
    copy = copy_of(mount, "f")
    assert resolve(mount, "both", copy) == (0, "")
    assert held(mount) == {"f": b"theirs", copy.name: b"ours"}
    assert listed(mount) == []


def test_a_removal_that_met_a_change(mount: Mounted) -> None:
    for name in ("f", "g", "h"):
        (mount.path / name).write_text("before")
    (mount.path / "d").mkdir()
    mount.flush()
    for name in ("f", "g", "h"):
        (mount.path / name).unlink()
        (mount.source / name).write_text("theirs")
    (mount.path / "d").rmdir()
    (mount.source / "d" / "new").write_text("theirs")
    mount.flush()
    assert {row["kind"] for row in listed(mount)} == {"removed here"}
    assert resolve(mount, "ours", mount.path / "f") == (0, "")
    assert resolve(mount, "theirs", mount.path / "g") == (0, "")
    assert resolve(mount, "both", mount.path / "h") == (0, "")
    code, error = resolve(mount, "ours", mount.path / "d")
    assert (code, "Directory not empty" in error) == (16, True)  # it is theirs
    assert held(mount) == {"g": b"theirs", "h": b"theirs", "d": b"", "d/new": b"theirs"}
    assert [row["path"] for row in listed(mount)] == ["d"]


def test_a_change_that_met_a_removal(mount: Mounted) -> None:
    for name in ("f", "g"):
        (mount.path / name).write_text("before")
    mount.flush()
    for name in ("f", "g"):
        (mount.path / name).write_text("ours")
        (mount.source / name).unlink()
    mount.flush()
    assert {row["kind"] for row in listed(mount)} == {"removed there"}
    assert resolve(mount, "ours", mount.path / "f") == (0, "")
    assert resolve(mount, "theirs", mount.path / "g") == (0, "")
    assert held(mount) == {"f": b"ours"}
    assert listed(mount) == []


def test_several_at_once(mount: Mounted) -> None:
    dispute(mount, "f", "g")
    assert resolve(mount, "ours", mount.path / "f", mount.path / "g") == (0, "")
    assert held(mount) == {"f": b"ours", "g": b"ours"}


def test_who_renames_or_removes_the_copy_has_dealt_with_it(mount: Mounted) -> None:
    dispute(mount, "f", "g", "h")
    assert mount.status()["conflicts"] == 3
    copy_of(mount, "f").unlink()
    copy_of(mount, "g").rename(mount.path / "mine")
    copy = copy_of(mount, "h")
    copy.rename(mount.path / "h")
    assert listed(mount) == []
    assert mount.status()["conflicts"] == 0
    assert held(mount) == {"f": b"theirs", "g": b"theirs", "mine": b"ours", "h": b"ours"}


def test_they_are_known_after_a_kill_and_a_remount(mount: Mounted) -> None:
    dispute(mount, "f", "g")
    before = listed(mount)
    mount.kill()
    mount.remount()
    assert listed(mount) == before
    assert mount.status()["conflicts"] == 2
    assert resolve(mount, "theirs", mount.path / "g") == (0, "")
    assert mount.umount().returncode == 0
    mount.remount()
    assert [row["path"] for row in listed(mount)] == ["f"]
    copy_of(mount, "f").unlink()
    assert mount.umount().returncode == 0
    mount.remount()
    assert listed(mount) == []
    assert held(mount) == {"f": b"theirs", "g": b"theirs"}


def test_the_directory_may_be_renamed(mount: Mounted) -> None:
    (mount.path / "d").mkdir()
    dispute(mount, "d/f")
    (mount.path / "d").rename(mount.path / "e")
    assert [row["path"] for row in listed(mount)] == ["e/f"]
    assert resolve(mount, "ours", mount.path / "e" / "f") == (0, "")
    assert held(mount) == {"e": b"", "e/f": b"ours"}


def test_theirs_that_was_replaced_since_is_not_replaced_again(mount: Mounted) -> None:
    dispute(mount, "f")
    copy = copy_of(mount, "f")
    (mount.path / "new").write_text("newer")
    (mount.path / "new").rename(mount.path / "f")
    for keep in ("ours", "theirs"):
        code, error = resolve(mount, keep, mount.path / "f")
        assert (code, "was replaced or removed there since" in error) == (16, True)
    assert held(mount) == {"f": b"newer", copy.name: b"ours"}
    (mount.path / "f").unlink()
    assert resolve(mount, "ours", copy) == (0, "")
    assert held(mount) == {"f": b"ours"}


def test_of_several_copies_one_has_to_be_named(mount: Mounted) -> None:
    dispute(mount, "f")
    first = copy_of(mount, "f")
    (mount.path / "f").write_text("ours 2")
    (mount.source / "f").write_text("theirs 2")
    mount.flush()
    assert len(listed(mount)) == 2
    code, error = resolve(mount, "ours", mount.path / "f")
    assert (code, "2 versions of ours are kept" in error) == (16, True)
    assert resolve(mount, "both", first) == (0, "")
    assert resolve(mount, "ours", mount.path / "f") == (0, "")
    assert held(mount) == {"f": b"ours 2", first.name: b"ours"}


def test_what_can_not_be_resolved_is_one_line(mount: Mounted, tmp_path: Path) -> None:
    dispute(mount, "f")
    (mount.path / "other").write_text("")
    for arguments, code, why in (
        ((mount.path / "other", "--keep", "ours"), 16, "no conflict is recorded for it"),
        ((mount.path / "nothing", "--keep", "ours"), 16, "no conflict is recorded for it"),
        ((mount.path / "f", "--keep", "mine"), 2, "is not one of"),
        ((mount.path / "f",), 2, "--keep"),
        (("--keep", "ours"), 2, "PATH"),
        ((tmp_path / "f", "--keep", "ours"), 9, "is not in a wbcache mount"),
    ):
        done = wbcache("conflicts", "resolve", *arguments)
        assert (done.returncode, done.stdout) == (code, "")
        (line,) = done.stderr.splitlines()
        assert why in line
    assert wbcache("conflicts", tmp_path).returncode == 9
    mount.kill()
    done = wbcache("conflicts", "resolve", mount.path / "f", "--keep", "ours")
    assert done.returncode == 9
    assert len(done.stderr.splitlines()) == 1


def test_hostile_names(mount: Mounted) -> None:
    dispute(mount, HOSTILE)
    done = wbcache("conflicts", mount.path)
    (line,) = done.stdout.splitlines()
    assert r"a\nb\x1b[2J\xff" in line
    assert r"a\nb\x1b[2J\xff.conflict-" in line
    assert line.isprintable()
    (row,) = json.loads(wbcache("conflicts", mount.path, "--json").stdout)
    assert bytes.fromhex(row["path_bytes_hex"]) == os.fsencode(mount.path / HOSTILE)
    status = wbcache("status", mount.path).stdout
    assert "conflicts    1; " in status
    assert all(line.isprintable() for line in status.splitlines())
    assert resolve(mount, "ours", mount.path / HOSTILE) == (0, "")
    assert held(mount) == {HOSTILE: b"ours"}
    done = wbcache("conflicts", mount.path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "wbcache: no conflicts\n")


def test_ours_that_lost_bytes_is_not_put_over_theirs(mount: Mounted) -> None:
    (mount.source / "f").write_bytes(b"s" * 300_000)
    assert (mount.path / "f").stat().st_size == 300_000
    with open(mount.path / "f", "ab") as file:
        file.write(b"ours")
    (mount.source / "f").write_text("theirs")
    remaining = mount.client.flush([b""], 20)
    (row,) = listed(mount)
    assert row["ours_incomplete"]
    assert [r["path"] for r in remaining] == [row["ours"]]
    assert wbcache("conflicts", mount.path).stdout.rstrip().endswith("incomplete")
    code, error = resolve(mount, "ours", mount.path / "f")
    assert (code, "wbcache recover" in error) == (16, True)
    assert (mount.path / "f").read_text() == "theirs"
    assert resolve(mount, "theirs", mount.path / "f") == (0, "")
    assert held(mount) == {"f": b"theirs"}
