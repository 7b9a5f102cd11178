"""Training frameworks and trackers, in a training run each. Run by hand:

mount-scripts/run-tests.sh -m libraries tests/libraries
"""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import pytest

from tests.endtoend.stage import Stage
from tests.libraries.running import Programs, there_and_back, through_trouble

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(600)]

CONFIG = {"flush": {"idle_delay": "100ms", "max_age": "300ms"}}

NEEDED = {
    "torch": ["torch"],
    "torch_events": ["torch", "tensorboard"],
    "torch_distributed": ["torch"],
    "lightning": ["lightning", "tensorboard"],
    "transformers": ["transformers", "accelerate", "tensorboard"],
    "orbax": ["orbax-checkpoint", "jax"],
    "huggingface_hub": ["huggingface-hub"],
    "mlflow": ["mlflow-skinny"],
    "wandb": ["wandb"],
    "pyarrow": ["pandas", "pyarrow"],
}
"""Programs, and the distributions that they need."""

EPOCHS = {
    "torch": [f"epoch {n}" for n in range(1, 6)],
    "lightning": [f"epoch {n}" for n in range(5)],
    "transformers": [f"step {n}" for n in range(4, 21, 4)],
}
"""Where those that train stop, and can be resumed from what they have saved."""


@pytest.fixture(autouse=True)
def installed(program: str) -> None:
    """Skip what is not installed here."""
    for name in NEEDED[program]:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"no {name} here: mount-scripts/run-tests.sh -m libraries installs it")


@pytest.mark.parametrize("program", NEEDED)
def test_it_is_read_back_from_the_share(program: str, stage: Stage, programs: Programs) -> None:
    there_and_back(programs, stage, program)


@pytest.mark.parametrize("program", NEEDED)
def test_it_is_written_while_the_share_hangs(
    program: str, stage: Stage, programs: Programs
) -> None:
    through_trouble(programs, stage, program)


@pytest.mark.parametrize("program", EPOCHS)
def test_the_daemon_is_killed_between_epochs(
    program: str, stage: Stage, programs: Programs
) -> None:
    with programs.beside(program, "write", stage.path) as training:
        for number, epoch in enumerate(EPOCHS[program]):
            training.says(epoch)
            if number % 2:
                stage.mount.kill()
                stage.mount.remount()
            training.go()
        training.ends()
    programs.run(program, "check", stage.path)
    stage.settle()
    programs.run(program, "check", stage.backing)


@pytest.mark.parametrize("program", ["torch"])
def test_checkpoints_on_the_share_are_whole(program: str, stage: Stage, programs: Programs) -> None:
    with (
        programs.beside(program, "watch", stage.backing) as watching,
        programs.beside(program, "write", stage.path) as training,
    ):
        for number, epoch in enumerate(EPOCHS[program]):
            training.says(epoch)
            watching.says(f"look {number}")
            watching.go()  # and looks on while this goes on, or the daemon dies
            if number % 2:
                stage.mount.kill()
                stage.mount.remount()
            training.go()
        watching.ends()
        training.ends()
    stage.settle()


@pytest.mark.parametrize("program", EPOCHS)
def test_another_machine_resumes(
    program: str, stage: Stage, programs: Programs, tmp_path: Path
) -> None:
    programs.run(program, "write", stage.path)
    stage.settle()
    shutil.copytree(stage.backing, tmp_path / "elsewhere", symlinks=True)
    programs.run(program, "resume", tmp_path / "elsewhere")
    programs.run(program, "resume", stage.path)
    stage.settle()
