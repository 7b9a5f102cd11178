"""The benchmark still runs, and what it compares with is a file system one can compare with."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench import load
from tests.bench.columns import Ceiling, Column, Native
from tests.bench.mounting import BenchError, is_mounted, served
from tests.bench.report import TARGETS, as_json, ratio
from tests.bench.runner import Plan, Results, run, workload_names

pytestmark = pytest.mark.usefixtures("fuse")


def test_every_workload_is_measured_on_every_column(tmp_path: Path) -> None:
    columns: list[Column] = [Native(), Ceiling(), Ceiling(xattr=False)]
    plan = Plan(rounds=2, scale=0.005, write_back=3600, workloads=frozenset(), awake=False)

    results = run(columns, plan, str(tmp_path), lambda _: None)

    assert results.problems == []
    for column in columns:
        assert sorted(results.rates[column.name]) == sorted(workload_names())
        for rates in results.rates[column.name].values():
            assert len(rates) == 2
            assert min(rates) > 0
    assert os.listdir(tmp_path) == []


def test_a_column_that_cannot_run_is_named_and_left_out(tmp_path: Path) -> None:
    class Broken(Native):
        name = "broken"
        title = "broken"

        def mounted(self, *_: object) -> None:  # type: ignore[override]
            raise BenchError("no such program")

    plan = Plan(1, 0.005, 3600, frozenset({"reopen"}), awake=False)
    results = run([Broken(), Native()], plan, str(tmp_path), lambda _: None)

    assert results.problems == ["broken: no such program"]
    assert list(results.rates) == ["native"]


def test_ratios_are_of_medians_and_against_the_best_peer() -> None:
    results = Results(
        rates={
            "wbcache": {"reopen": [10.0, 40.0, 30.0]},
            "rclone": {"reopen": [10.0, 10.0, 99.0]},
            "juicefs": {"reopen": [5.0]},
        }
    )
    assert ratio(results, "reopen", "wbcache", ("rclone", "juicefs")) == 3.0
    assert ratio(results, "reopen", "wbcache", ("ceiling",)) is None
    verdicts = {target["text"]: target["met"] for target in as_json(results)["targets"]}
    assert verdicts["reopen: wbcache at least 2 of the better of rclone and juicefs"] is True
    assert verdicts["reopen: wbcache at least 0.7 of the ceiling"] is None


def test_targets_name_workloads_that_exist() -> None:
    assert {target.workload for target in TARGETS} <= set(workload_names())


def test_amounts_shrink_with_the_scale_but_never_to_nothing() -> None:
    small = load.Size().scaled(1e-9)
    assert small.bulk == load.MIB
    assert small.files == small.reopens == 1


@pytest.fixture
def ceiling(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(mount point, directory below) of a pass-through."""
    below, mountpoint = tmp_path / "below", tmp_path / "mnt"
    below.mkdir()
    mountpoint.mkdir()
    command = [sys.executable, "-m", "tests.bench.passthrough", str(below), str(mountpoint)]
    with served(command, str(mountpoint), str(tmp_path / "log")):
        yield mountpoint, below
    assert not is_mounted(str(mountpoint))


def test_the_ceiling_does_what_a_directory_does(ceiling: tuple[Path, Path], tmp_path: Path) -> None:
    mount, below = ceiling
    plain = tmp_path / "plain"
    plain.mkdir()

    assert _exercise(mount) == _exercise(plain)
    assert sorted(os.listdir(below)) == sorted(os.listdir(plain))


def _exercise(root: Path) -> list[object]:
    """Do many things below `root`; what came of each."""
    seen: list[object] = []

    def attempt(path: Path, call: str, *arguments: object) -> None:
        try:
            seen.append(getattr(os, call)(path, *arguments))
        except OSError as error:
            seen.append(error.errno)

    (root / "a").write_bytes(b"hello")
    with open(root / "a", "r+b") as patched:
        patched.seek(3)
        patched.write(b"XYZ")
        patched.truncate(5)
    with open(root / "a", "ab") as log:
        log.write(b" more")
        log.flush()
        os.fsync(log.fileno())
    seen.append((root / "a").read_bytes())
    (root / "a").write_bytes(b"new")
    seen.append((root / "a").read_bytes())

    (root / "d").mkdir(mode=0o750)
    os.link(root / "a", root / "d" / "b")
    os.rename(root / "a", root / "c")
    seen.append(os.stat(root / "c").st_ino == os.stat(root / "d" / "b").st_ino)
    os.unlink(root / "c")
    seen += [os.stat(root / "d" / "b").st_nlink, (root / "d" / "b").read_bytes()]
    os.symlink("d/b", root / "s")
    seen += [os.readlink(root / "s"), (root / "s").read_bytes()]
    os.mkfifo(root / "fifo")
    seen.append(stat.S_ISFIFO(os.lstat(root / "fifo").st_mode))

    attempt(root / "d", "rmdir")
    attempt(root / "none", "unlink")
    attempt(root / "none", "stat")
    attempt(root / "d", "mkdir")
    attempt(root / "s", "listdir")
    attempt(root / ("n" * 256), "mkdir")
    attempt(root / "d" / "b", "getxattr", b"user.none")
    attempt(root / "d" / "b", "open", os.O_RDONLY | os.O_DIRECTORY)
    attempt(root / "d" / "b", "open", os.O_CREAT | os.O_EXCL | os.O_WRONLY)

    os.chmod(root / "d" / "b", 0o640)
    os.utime(root / "d" / "b", ns=(1, 2_000_000_003))
    os.setxattr(root / "d" / "b", b"user.k", b"v")
    found = os.stat(root / "d" / "b")
    seen += [
        oct(found.st_mode),
        found.st_mtime_ns,
        found.st_size,
        os.getxattr(root / "d/b", "user.k"),
    ]
    seen += [oct(os.stat(root / "d").st_mode), sorted(os.listdir(root)), os.listdir(root / "d")]

    with open(root / "open", "w+b") as file:
        file.write(b"still here")
        file.flush()
        os.unlink(root / "open")
        seen += [os.fstat(file.fileno()).st_nlink, os.pread(file.fileno(), 99, 0)]
    (root / "x").write_bytes(b"x")
    (root / "y").write_bytes(b"yy")
    os.rename(root / "x", root / "y")
    seen += [(root / "y").read_bytes(), os.path.exists(root / "x")]
    os.rename(root / "d", root / "e")
    seen += [(root / "e" / "b").read_bytes(), os.path.exists(root / "d")]
    return seen
