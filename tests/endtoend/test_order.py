"""If the machine vanishes at any moment, what the share holds can be trusted.

Every test ends by looking at each state that the share went through, call by call.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from tests.endtoend.checkpoints import (
    SAVERS,
    Saver,
    blob,
    never_without,
    read,
    save_in_pieces,
    save_plainly,
    whole,
)
from tests.endtoend.stage import Stage

pytestmark = pytest.mark.timeout(120)

AT_FDCWD, EXCHANGE = -100, 2


@pytest.mark.parametrize("save", SAVERS)
def test_an_old_checkpoint_goes_after_the_new_one_is_whole(
    stage: Stage, tmp_path: Path, save: Saver
) -> None:
    steps = {f"step-{n}.ckpt": blob(f"{n}", 2_000_000 // (n + 1)) for n in range(4)}
    names = list(steps)
    save(stage.path / names[0], steps[names[0]])
    stage.flush()
    for old, new in itertools.pairwise(names):
        save(stage.path / new, steps[new])
        (stage.path / old).unlink()
        stage.flush()
    stage.settle()

    for top in stage.states(tmp_path / "replay"):
        for path in top.glob("step-*.ckpt"):
            assert path.read_bytes() == steps[path.name], path
    never_without(stage, tmp_path / "again", lambda top: any(top.glob("step-*.ckpt")))


def test_an_old_directory_goes_after_the_new_one_is_whole(stage: Stage, tmp_path: Path) -> None:
    def files(step: int) -> dict[str, bytes]:
        return {
            f"step-{step}/{name}": blob(f"{step}{name}", size)
            for name, size in (("model.bin", 900_000), ("optim/a.bin", 300_000), ("meta", 20))
        }

    def save(step: int) -> None:
        for name, data in files(step).items():
            (stage.path / name).parent.mkdir(parents=True, exist_ok=True)
            (stage.path / name).write_bytes(data)

    save(1)
    stage.flush()
    save(2)
    shutil.rmtree(stage.path / "step-1")
    stage.settle()
    never_without(stage, tmp_path / "replay", lambda top: any(whole(top, files(s)) for s in (1, 2)))


@pytest.mark.parametrize("flushed", ["no", "in-part", "all", "open"])
def test_a_directory_gets_its_final_name_last(stage: Stage, tmp_path: Path, flushed: str) -> None:
    temporary, final = stage.path / "1.orbax-checkpoint-tmp", stage.path / "1"
    files = {f"{d}{n}": blob(f"{d}{n}", 200_000) for d in ("", "d/", "d/e/") for n in ("a", "b")}
    (temporary / "d" / "e").mkdir(parents=True)
    names = iter(files.items())
    for name, data in names:
        (temporary / name).write_bytes(data)
        if name == "d/a" and flushed == "in-part":
            stage.flush()
    if flushed == "all":
        stage.flush()
    if flushed == "open":
        with open(temporary / "d" / "b", "ab") as file:
            os.rename(temporary, final)
            os.fsync(file.fileno())
    else:
        os.rename(temporary, final)
    (stage.path / "after").write_bytes(b"x")
    stage.settle()

    for top in stage.states(tmp_path / "replay"):
        if (top / "1").exists():
            assert whole(top / "1", files), sorted(os.listdir(top / "1"))
        if (top / "after").exists():
            assert (top / "1").exists()
    if flushed in ("no", "open"):
        assert not any("orbax-checkpoint-tmp" in name for name in stage.names_seen())


def test_a_directory_renamed_with_its_parent_gets_its_final_name_last(
    stage: Stage, tmp_path: Path
) -> None:
    (stage.path / "run.tmp" / "ckpt.tmp").mkdir(parents=True)
    (stage.path / "run.tmp" / "ckpt.tmp" / "a").write_bytes(blob("a", 300_000))
    os.rename(stage.path / "run.tmp" / "ckpt.tmp", stage.path / "run.tmp" / "ckpt")
    (stage.path / "run.tmp" / "log").write_bytes(blob("log"))
    os.rename(stage.path / "run.tmp", stage.path / "run")
    stage.settle()
    files = {"run/ckpt/a": blob("a", 300_000), "run/log": blob("log")}
    for top in stage.states(tmp_path / "replay"):
        if (top / "run").exists():
            assert whole(top, files)
    assert not any("tmp" in name for name in stage.names_seen())


@pytest.mark.parametrize("where", ["inside", "beside"])
@pytest.mark.parametrize("save", SAVERS)
def test_a_marker_is_published_after_what_it_marks(
    stage: Stage, tmp_path: Path, save: Saver, where: str
) -> None:
    files = {f"ckpt/{n}": blob(f"{n}", 500_000) for n in range(5)}
    marker = "ckpt/DONE" if where == "inside" else "ckpt.done"
    (stage.path / "ckpt").mkdir()
    for name, data in files.items():
        save(stage.path / name, data)
    save(stage.path / marker, b"x" * 1500)
    stage.flush(marker)
    stage.settle()
    seen = 0
    for top in stage.states(tmp_path / "replay"):
        if (top / marker).exists():
            seen += 1
            assert whole(top, files)
    assert seen


def test_a_pointer_file_is_rewritten_after_what_it_points_to(stage: Stage, tmp_path: Path) -> None:
    """`latest` names a step, as DeepSpeed and others have it; rewritten in place."""
    steps = {f"step-{n}": blob(f"{n}", 400_000) for n in range(5)}
    for name, data in steps.items():
        (stage.path / name).mkdir()
        (stage.path / name / "model.pt").write_bytes(data)
        (stage.path / "latest").write_text(name)
        if name in ("step-0", "step-3"):
            stage.flush("latest")
    stage.settle()
    seen = set()
    for top in stage.states(tmp_path / "replay"):
        pointed = read(top / "latest")
        if pointed is not None:
            seen.add(pointed.decode())
            assert read(top / pointed.decode() / "model.pt") == steps[pointed.decode()]
    assert {"step-0", "step-3", "step-4"} <= seen


@pytest.mark.parametrize("save", [save_plainly, save_in_pieces])
def test_an_overwritten_checkpoint_is_never_empty_or_in_part(
    stage: Stage, tmp_path: Path, save: Saver
) -> None:
    versions = [blob(f"{n}", size) for n, size in enumerate((900_000, 400_000, 1_100_000, 900_000))]
    for version in versions:
        save(stage.path / "last.pt", version)
        stage.flush()
    # And while the file is being written, with everything else on its way.
    with open(stage.path / "last.pt", "wb") as file:
        file.write(b"begun")
        file.flush()
        (stage.path / "other").write_bytes(b"x")
        stage.flush("other")
        assert (stage.backing / "last.pt").read_bytes() == versions[-1]
        file.write(b" and ended")
    stage.settle()
    found = [read(top / "last.pt") for top in stage.states(tmp_path / "replay")]
    order = [None, *versions, b"begun and ended"]
    assert [data for n, data in enumerate(found) if not n or data != found[n - 1]] == order


def test_an_overwrite_whose_bytes_are_on_their_way_is_overwritten_again(
    stage: Stage, tmp_path: Path
) -> None:
    versions = [blob(f"{n}", 3_000_000) for n in range(4)]
    threads = []
    stage.share.set(latency_ms=5, bandwidth_mb=40)
    (stage.path / "last.pt").write_bytes(versions[0])
    stage.flush()
    for version in versions[1:]:
        (stage.path / "last.pt").write_bytes(version)
        mark = stage.share.mark()
        thread = threading.Thread(target=stage.flush, args=("last.pt",))
        thread.start()
        threads.append(thread)
        stage.share.wait_for("write", f"{stage.name}/.wbcache-*", since=mark)
    for thread in threads:
        thread.join()
    stage.settle()
    found = [read(top / "last.pt") for top in stage.states(tmp_path / "replay")]
    assert set(found) <= {None, *versions}
    assert [data for data in found if data is not None] == sorted(
        (data for data in found if data is not None), key=versions.index
    )


def test_a_link_to_the_last_checkpoint_always_points_to_a_whole_one(
    stage: Stage, tmp_path: Path
) -> None:
    def save(n: int) -> None:
        (stage.path / f"{n}.ckpt").write_bytes(blob(f"{n}", 300_000))
        os.symlink(f"{n}.ckpt", stage.path / "link.tmp")
        os.replace(stage.path / "link.tmp", stage.path / "last.ckpt")
        if n:
            (stage.path / f"{n - 1}.ckpt").unlink()

    save(0)
    save(1)
    stage.flush()
    save(2)
    stage.settle()
    for top in stage.states(tmp_path / "replay"):
        link = top / "last.ckpt"
        if link.is_symlink():
            assert link.exists(), os.readlink(link)
            assert link.read_bytes() == blob(os.readlink(link)[0], 300_000)
    assert os.readlink(stage.backing / "last.ckpt") == "2.ckpt"
    assert not any("link.tmp" in name for name in stage.names_seen())


@pytest.mark.parametrize("rename_first", [True, False])
def test_a_new_file_is_never_shown_empty(stage: Stage, tmp_path: Path, rename_first: bool) -> None:
    with open(stage.path / "tmp", "wb", buffering=0) as file:
        if rename_first:
            os.rename(stage.path / "tmp", stage.path / "final")
        file.write(blob("one", 700_000))
        file.write(blob("two", 700_000))
    if not rename_first:
        os.rename(stage.path / "tmp", stage.path / "final")
    stage.settle()
    for top in stage.states(tmp_path / "replay"):
        assert read(top / "final") in (None, blob("one", 700_000) + blob("two", 700_000))
    assert "tmp" not in stage.names_seen()


def test_a_growing_log_is_a_prefix_at_every_call(stage: Stage, tmp_path: Path) -> None:
    log = b""
    with open(stage.path / "train.log", "wb", buffering=0) as file:
        for n in range(60):
            line = b"%05d " % n * random.Random(n).randrange(1, 3000) + b"\n"
            file.write(line)
            log += line
            if n % 7 == 3:
                stage.flush()
    stage.settle()
    sizes = []
    for top in stage.states(tmp_path / "replay"):
        data = read(top / "train.log")
        if data is not None:
            assert data == log[: len(data)]
            sizes.append(len(data))
    assert sizes == sorted(sizes) and sizes[0] > 0 and sizes[-1] == len(log)


def test_exchanged_directories_stay_whole(stage: Stage, tmp_path: Path) -> None:
    """`current` and `next` change places again and again: one of them is always there, whole."""
    libc = ctypes.CDLL(None, use_errno=True)
    current, other = stage.path / "current", stage.path / "next"
    versions = []
    for path in (current, other):
        path.mkdir()
        versions.append(blob(path.name, 200_000))
        (path / "data").write_bytes(versions[-1])
    stage.flush()
    stage.begin()
    for turn in range(5):
        versions.append(blob(f"{turn}", 200_000))
        (other / "data").write_bytes(versions[-1])
        if turn == 2:
            stage.flush()
        assert not libc.renameat2(AT_FDCWD, bytes(other), AT_FDCWD, bytes(current), EXCHANGE)
        if turn in (1, 2):
            stage.flush()
    assert (current / "data").read_bytes() == versions[-1]
    stage.settle()
    for top in stage.states(tmp_path / "replay"):
        found = {read(path) for path in top.glob("*/data")}
        assert found and found <= set(versions)
