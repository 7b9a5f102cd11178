"""One mount for all comparisons, over a share on the real disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounting import NEVER_BY_ITSELF, Mounted
from tests.posix.parity import STATES, Parity, State


@pytest.fixture(scope="session")
def base() -> Iterator[Path]:
    """A directory that every user can enter."""
    with tempfile.TemporaryDirectory(prefix="wbcache-posix-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def parity(base: Path, request: pytest.FixtureRequest) -> Iterator[Parity]:
    """The mount and the native directory beside it."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")
    here = base / request.module.__name__
    native = here / "native"
    native.mkdir(parents=True)
    old = os.umask(0)
    try:
        with Mounted(here / "share", config=NEVER_BY_ITSELF) as mount:
            yield Parity(mount, native)
    finally:
        os.umask(old)


@pytest.fixture(params=STATES)
def state(request: pytest.FixtureRequest) -> State:
    """Each state of what a case builds."""
    found: State = request.param
    return found
