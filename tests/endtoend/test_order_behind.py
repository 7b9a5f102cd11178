"""The same order when the share falls behind: what is saved is rotated away before it arrives.

Everything is due at once here, and the share takes no changes for a while.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.endtoend.checkpoints import (
    SAVERS,
    Saver,
    blob,
    never_without,
    read,
    save_by_rename,
    whole,
)
from tests.endtoend.stage import Stage

pytestmark = pytest.mark.timeout(120)

CONFIG = {"flush": {"idle_delay": "0"}}


@pytest.mark.parametrize("save", SAVERS)
def test_the_old_checkpoint_stays_while_newer_ones_come_and_go(
    stage: Stage, tmp_path: Path, save: Saver
) -> None:
    steps = {f"step-{n}.ckpt": blob(f"{n}", 2_000_000 // (n + 1)) for n in range(5)}
    names = list(steps)
    save(stage.path / names[0], steps[names[0]])
    stage.flush()
    with stage.stuck():
        for old, new in itertools.pairwise(names):
            save(stage.path / new, steps[new])
            (stage.path / old).unlink()
    stage.settle()
    for top in stage.states(tmp_path / "replay"):
        for path in top.glob("step-*.ckpt"):
            assert path.read_bytes() == steps[path.name], path
    never_without(stage, tmp_path / "again", lambda top: any(top.glob("step-*.ckpt")))


def test_the_old_directory_stays_while_newer_ones_come_and_go(stage: Stage, tmp_path: Path) -> None:
    def files(step: int) -> dict[str, bytes]:
        return {f"step-{step}/{n}": blob(f"{step}{n}", 300_000) for n in ("model", "a/optim")}

    def save(step: int) -> None:
        for name, data in files(step).items():
            (stage.path / name).parent.mkdir(parents=True, exist_ok=True)
            (stage.path / name).write_bytes(data)

    save(0)
    stage.flush()
    with stage.stuck():
        for step in range(1, 5):
            save(step)
            shutil.rmtree(stage.path / f"step-{step - 1}")
    stage.settle()
    never_without(
        stage, tmp_path / "replay", lambda top: any(whole(top, files(s)) for s in range(5))
    )


def test_the_order_survives_a_kill(stage: Stage, tmp_path: Path) -> None:
    """What is known of checkpoints that came and went is not lost with the daemon."""
    steps = {f"step-{n}.ckpt": blob(f"{n}", 1_000_000) for n in range(4)}
    names = list(steps)
    (stage.path / names[0]).write_bytes(steps[names[0]])
    stage.flush()
    with stage.stuck():
        for old, new in itertools.pairwise(names):
            (stage.path / new).write_bytes(steps[new])
            (stage.path / old).unlink()
        os.kill(stage.mount.pid, signal.SIGKILL)
    stage.mount.kill()  # it ends once nothing of it hangs on the share any more
    stage.mount.remount()
    stage.settle()
    never_without(stage, tmp_path / "again", lambda top: any(top.glob("step-*.ckpt")))


def test_a_link_never_points_to_what_was_rotated_away(stage: Stage, tmp_path: Path) -> None:
    def save(n: int) -> None:
        (stage.path / f"{n}.ckpt").write_bytes(blob(f"{n}", 300_000))
        os.symlink(f"{n}.ckpt", stage.path / "link.tmp")
        os.replace(stage.path / "link.tmp", stage.path / "last.ckpt")
        if n:
            (stage.path / f"{n - 1}.ckpt").unlink()

    save(0)
    stage.flush()
    with stage.stuck():
        for n in range(1, 5):
            save(n)
    stage.settle()
    for top in stage.states(tmp_path / "replay"):
        link = top / "last.ckpt"
        if link.is_symlink():
            assert link.exists(), os.readlink(link)


def test_a_new_pointer_tells_only_of_what_is_there(stage: Stage, tmp_path: Path) -> None:
    """A pointer that the share never had, rewritten before it gets there."""
    with stage.stuck():
        for n in range(3):
            (stage.path / f"{n}").mkdir()
            (stage.path / f"{n}" / "model").write_bytes(blob(f"{n}", 1_500_000))
            (stage.path / "latest").write_text(f"{n}")
    stage.settle()
    for top in stage.states(tmp_path / "replay"):
        if pointed := read(top / "latest"):
            assert read(top / pointed.decode() / "model"), pointed


def test_files_that_wait_for_each_other_do_not_wait_for_a_large_one(stage: Stage) -> None:
    """Two small files are rewritten in turn: neither order is right, but one must be taken."""
    stage.share.set(bandwidth_mb=20)
    (stage.path / "small").mkdir()
    a, b = stage.path / "small" / "a", stage.path / "small" / "b"
    for path in (a, b):
        path.write_bytes(b"old")
    stage.flush()
    with stage.stuck():
        for n in range(3):
            for path in (a, b):
                path.write_bytes(b"%d" % n)
        (stage.path / "large").write_bytes(os.urandom(100_000_000))
    for path in (a, b):
        stage.arrives(f"small/{path.name}", b"2")
    assert not (stage.backing / "large").exists()
    stage.share.set(bandwidth_mb=0)
    stage.settle()


def test_a_late_transfer_does_not_replace_what_is_newer(stage: Stage) -> None:
    rule = stage.share.hang(["fsync"], f"{stage.name}/.wbcache-*", times=1)
    save_by_rename(stage.path / "status", b"old")
    stage.share.wait_hung("fsync")
    save_by_rename(stage.path / "status", b"new")
    stage.arrives("status", b"new")
    stage.share.release(rule)
    stage.share.wait_for("unlink", f"{stage.name}/.wbcache-*")
    assert (stage.backing / "status").read_bytes() == b"new"
    stage.settle()


def test_a_checkpoint_that_is_written_anew_still_counts(stage: Stage, tmp_path: Path) -> None:
    """Saved, the old one elsewhere removed, and opened again before the share had it."""
    (stage.path / "runs" / "1").mkdir(parents=True)
    (stage.path / "archive").mkdir()
    (stage.path / "archive" / "old.pt").write_bytes(blob("old", 100_000))
    stage.flush()
    with stage.stuck():
        (stage.path / "runs" / "1" / "last.pt").write_bytes(blob("1", 900_000))
        (stage.path / "archive" / "old.pt").unlink()
        stage.share.wait_hung("create", f"{stage.name}/runs/1/.wbcache-*")
        file = open(stage.path / "runs" / "1" / "last.pt", "wb", buffering=0)  # noqa: SIM115
    with file:
        file.write(blob("2", 900_000)[:1000])
        # What was saved first arrives though the file is open again, and then the old one goes.
        stage.arrives("runs/1/last.pt", blob("1", 900_000))
        stage.share.wait_for("unlink", f"{stage.name}/archive/old.pt")
        file.write(blob("2", 900_000)[1000:])
    stage.settle()
    versions = {blob("1", 900_000), blob("2", 900_000)}
    never_without(
        stage,
        tmp_path / "replay",
        lambda top: (
            read(top / "archive" / "old.pt") == blob("old", 100_000)
            or read(top / "runs" / "1" / "last.pt") in versions
        ),
    )


def test_a_directory_stays_while_its_successor_is_being_written(stage: Stage) -> None:
    for name in ("step-1", "step-2", "elsewhere"):
        (stage.path / name).mkdir()
    (stage.path / "step-1" / "model").write_bytes(blob("1"))
    stage.flush()
    with open(stage.path / "step-2" / "model", "wb", buffering=0) as file:
        file.write(blob("2")[:1000])
        shutil.rmtree(stage.path / "step-1")
        (stage.path / "elsewhere" / "marker").write_bytes(b"x")
        stage.arrives("elsewhere/marker")
        assert (stage.backing / "step-1" / "model").read_bytes() == blob("1")
        file.write(blob("2")[1000:])
    stage.settle()
