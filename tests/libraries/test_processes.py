"""Several processes in one file of a library."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.endtoend.stage import Stage
from tests.libraries.running import Programs

pytestmark = pytest.mark.timeout(180)

CONFIG = {"flush": {"idle_delay": "100ms", "max_age": "300ms"}}

ROUNDS = 5
"""As the programs have it."""

COMMITS = 20


@pytest.mark.parametrize(
    ("program", "writer"),
    [("h5py", "append"), ("lmdb", "append"), ("lmdb", "append_mapped"), ("sqlite", "append")],
)
def test_one_reads_what_another_writes(
    program: str, writer: str, stage: Stage, programs: Programs
) -> None:
    if program == "sqlite":
        programs.run(program, "make", stage.path)
    with programs.beside(program, writer, stage.path) as writing:
        writing.says("open")
        with programs.beside(program, "follow", stage.path) as reading:
            reading.says("open")
            for number in range(ROUNDS):
                if number == 1:
                    stage.flush()
                if number == 2:
                    stage.share.hang()
                if number == 4:
                    stage.share.release()
                writing.go()
                writing.says(f"round {number}")
                reading.go()
                reading.says(f"round {number}")
            writing.ends()
            reading.ends()
    stage.settle()
    programs.run(program, "whole", stage.backing)


@pytest.mark.parametrize(
    ("program", "writer"), [("sqlite", "endure"), ("lmdb", "endure"), ("lmdb", "endure_mapped")]
)
def test_what_was_committed_survives_a_kill_of_the_daemon(
    program: str, writer: str, stage: Stage, programs: Programs, tmp_path: Path
) -> None:
    if program == "sqlite":
        programs.run(program, "make", stage.path)
    with programs.beside(program, writer, stage.path) as writing:
        for number in range(COMMITS):
            writing.says(f"{number}")
        stage.mount.kill()
        stage.mount.remount()
        committed = int(writing.breaks())
    assert int(programs.run(program, "survived", stage.path)) >= committed
    stage.settle()
    shutil.copytree(stage.backing, tmp_path / "elsewhere")
    assert int(programs.run(program, "survived", tmp_path / "elsewhere")) >= committed


@pytest.mark.parametrize("program", ["sqlite", "filelock"])
def test_processes_take_turns(program: str, stage: Stage, programs: Programs) -> None:
    if program == "sqlite":
        programs.run(program, "make", stage.path)
    with (
        programs.beside(program, "count", stage.path) as one,
        programs.beside(program, "count", stage.path) as other,
    ):
        one.says("ready")
        other.says("ready")
        one.go()
        other.go()
        one.ends()
        other.ends()
    programs.run(program, "counted", stage.path)
    stage.settle()
    programs.run(program, "counted", stage.backing)


def test_a_lock_goes_with_the_process_that_has_it(stage: Stage, programs: Programs) -> None:
    programs.run("filelock", "die_with_it", stage.path, code=-signal.SIGKILL)
    programs.run("filelock", "take", stage.path)
    stage.settle()
    assert (stage.backing / "held").read_text() == "mine"
