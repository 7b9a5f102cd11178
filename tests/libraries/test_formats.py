"""Libraries that keep data in files of their own format."""

from __future__ import annotations

import sys

import pytest

from tests.endtoend.stage import Stage
from tests.libraries.running import Programs, there_and_back, through_trouble

pytestmark = pytest.mark.timeout(180)

CONFIG = {"flush": {"idle_delay": "100ms", "max_age": "300ms"}}

PROGRAMS = ["numpy", "h5py", "zarr", "lmdb", "safetensors", "joblib", "pillow", "stdlib"]
QUICK = {"h5py"}


@pytest.fixture(autouse=True)
def supported(program: str) -> None:
    """Skip what there is no version of for this Python."""
    if program == "zarr" and sys.version_info < (3, 11):
        pytest.skip("zarr 3 needs Python 3.11")


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_read_back_from_the_share(program: str, stage: Stage, programs: Programs) -> None:
    there_and_back(programs, stage, program)


@pytest.mark.parametrize(
    "program",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS],
)
def test_it_is_written_while_the_share_hangs(
    program: str, stage: Stage, programs: Programs
) -> None:
    through_trouble(programs, stage, program)
