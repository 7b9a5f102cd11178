"""The share fails, or does what it was told and does not say so: all arrives all the same."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.endtoend.checkpoints import blob
from tests.endtoend.stage import TEMPORARY, Stage
from tests.mounting import contents
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

CALLS = [
    *("lookup", "getattr", "open", "create", "write", "fsync", "flush", "mkdir", "rmdir"),
    *("unlink", "rename", "link", "symlink", "truncate", "chmod", "utimens"),
]

LOST = ["rename", "create", "write", "mkdir", "rmdir", "unlink", "link", "symlink", "truncate"]
"""Calls of which the answer gets lost after they took effect."""


def prepare(top: Path) -> None:
    """What the share holds before."""
    for name in ("old", "cut", "patched", "to-rename", "to-link", "grown", "to-chmod"):
        (top / name).write_bytes(blob(name, 5000))
    (top / "to-remove" / "deep").mkdir(parents=True)
    (top / "to-remove" / "deep" / "file").write_bytes(b"x")
    (top / "to-move").mkdir()
    (top / "to-move" / "inside").write_bytes(b"inside")


def change(top: Path) -> None:
    """Something of everything that a flush can be asked to do."""
    (top / "new" / "deep").mkdir(parents=True)
    (top / "new" / "deep" / "file").write_bytes(blob("file", 300_000))
    (top / "old").write_bytes(blob("replaced", 20_000))
    (top / "tmp").write_bytes(blob("tmp"))
    os.rename(top / "tmp", top / "final")
    os.truncate(top / "cut", 1000)
    with open(top / "patched", "r+b") as file:
        file.seek(100)
        file.write(b"patch")
    os.rename(top / "to-rename", top / "renamed")
    os.link(top / "to-link", top / "linked")
    with open(top / "grown", "ab") as file:
        file.write(b"grown")
    os.chmod(top / "to-chmod", 0o600)
    os.utime(top / "to-chmod", ns=(10**18, 10**18))
    os.symlink("final", top / "symlink")
    shutil.rmtree(top / "to-remove")
    os.rename(top / "to-move", top / "moved")


def converge(stage: Stage, native: Path) -> None:
    """After the flush the share equals what the same calls made of a plain directory."""
    stage.settle()
    native.mkdir()
    prepare(native)
    change(native)
    assert stage.held() == contents(native)
    assert stage.mount.status()["errors"] == []


@pytest.mark.parametrize("call", CALLS)
def test_a_passing_error_is_tried_again(stage: Stage, tmp_path: Path, call: str) -> None:
    prepare(stage.backing)
    stage.appears("to-move/inside")
    change(stage.path)
    rule = stage.share.fail([call], errno.EIO, times=2, match=f"{stage.name}/*")
    stage.flush()
    stage.share.clear(rule)
    converge(stage, tmp_path / "native")


@pytest.mark.parametrize("call", LOST)
def test_a_lost_answer_leads_to_no_conflict(stage: Stage, tmp_path: Path, call: str) -> None:
    prepare(stage.backing)
    stage.appears("to-move/inside")
    change(stage.path)
    rule = stage.share.fail([call], errno.EIO, times=2, match=f"{stage.name}/*", after=True)
    stage.flush()
    stage.share.clear(rule)
    assert [op for op in stage.ops(call) if op.errno == errno.EIO], "nothing got lost"
    converge(stage, tmp_path / "native")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("after", [False, True], ids=["failed", "lost"])
def test_any_call_may_fail(stage: Stage, tmp_path: Path, after: bool, seed: int) -> None:
    prepare(stage.backing)
    stage.appears("to-move/inside")
    change(stage.path)
    rule = stage.share.fail(
        None, errno.EIO, probability=0.1, match=f"{stage.name}/*", after=after, seed=seed
    )
    stage.flush(timeout=60)
    stage.share.clear(rule)
    converge(stage, tmp_path / "native")


@pytest.mark.parametrize("error", [errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT])
def test_a_share_that_is_away_for_a_while_is_waited_for(
    stage: Stage, tmp_path: Path, error: int
) -> None:
    """Unreachable is never read as removed, whatever the share calls it."""
    prepare(stage.backing)
    stage.appears("to-move/inside")
    change(stage.path)
    stage.share.disconnect(error)
    assert stage.mount.client.flush([os.fsencode(stage.name)], 1.5)
    assert (stage.path / "moved" / "inside").stat().st_size == len(b"inside")
    assert (stage.path / "final").read_bytes() == blob("tmp")
    stage.share.reconnect(stale_handles=True)
    converge(stage, tmp_path / "native")


def verified(stage: Stage) -> bool:
    return bool(stage.mount.status()["share"]["verified"])


def test_no_temporary_name_is_used_again_when_the_share_is_back(stage: Stage) -> None:
    """What had it before may be under way still, or be a directory that was moved aside."""
    for number in range(3):
        (stage.path / f"file-{number}").write_bytes(blob("file", 5000))
        stage.flush()
        stage.share.disconnect()
        (stage.path / "new").write_bytes(b"%d" % number)
        assert stage.mount.client.flush([os.fsencode(stage.name)], 0.1), "it is gone"
        wait_until(lambda: not verified(stage), "it is noticed that the share is gone")
        stage.share.reconnect()
        wait_until(lambda: verified(stage), "it is noticed that the share is back")
    stage.settle()
    made = [op.path for op in stage.ops("create", match=TEMPORARY)]
    assert len(made) >= 3
    assert sorted(set(made)) == sorted(made)


def test_a_directory_made_under_a_temporary_name_by_a_lost_call_is_ours(stage: Stage) -> None:
    """A client that sends a call again is told that the name exists."""
    (stage.path / "run.tmp").mkdir()
    (stage.path / "run.tmp" / "part").write_bytes(b"x")
    os.rename(stage.path / "run.tmp", stage.path / "run")
    stage.share.fail(["mkdir"], errno.EEXIST, times=1, match="*/.wbcache-*", after=True)
    stage.settle()
    assert len([op for op in stage.ops("mkdir") if op.errno == errno.EEXIST]) == 1
    assert not [text for text in stage.told() if "made on the share too" in text]


def test_a_lost_write_is_noticed_before_it_matters(stage: Stage) -> None:
    """The share says that it wrote something and did not: what it had stays."""
    (stage.path / "ckpt").write_bytes(blob("old", 100_000))
    stage.flush()
    (stage.path / "ckpt").write_bytes(blob("new", 100_000))
    stage.share.lose(f"{stage.name}/.wbcache-*", times=1)
    stage.flush()
    assert (stage.backing / "ckpt").read_bytes() in (blob("old", 100_000), blob("new", 100_000))
    stage.settle()


def test_a_full_share_is_waited_for(stage: Stage) -> None:
    (stage.path / "first").write_bytes(blob("first", 100_000))
    stage.flush()
    stage.share.quota(bytes=stage.share.usage()[0] or 150_000)
    (stage.path / "second").write_bytes(blob("second", 200_000))
    assert stage.mount.client.flush([os.fsencode(stage.name)], 1.0)
    assert (stage.path / "second").read_bytes() == blob("second", 200_000)
    assert not (stage.backing / "second").exists()
    stage.share.quota()
    stage.settle()
    assert (stage.backing / "second").read_bytes() == blob("second", 200_000)


def test_what_the_share_refuses_is_kept_and_shown(stage: Stage) -> None:
    (stage.path / "refused").write_bytes(b"mine")
    (stage.path / "other").write_bytes(b"goes through")
    rule = stage.share.fail(["create"], errno.EACCES, match="*/.wbcache-*", times=1)
    refused = stage.mount.client.flush([os.fsencode(f"{stage.name}/refused")], 20)
    stage.flush("other")
    assert [row["path"].rpartition("/")[2] for row in refused] == ["refused"]
    assert refused[0]["reason"]
    assert (stage.path / "refused").read_bytes() == b"mine"
    stage.share.clear(rule)
    stage.settle()
    assert (stage.backing / "refused").read_bytes() == b"mine"
