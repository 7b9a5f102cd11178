"""The mounts for all comparisons: one over a directory, one over a share that can be held up."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, merge
from tests.posix.parity import AT_REST, UNDER_WAY, Parity, State, UnderWay

SAMPLE = 5
"""With the flush under way every so many-th case is tried, all of them only with `-m slow`."""


@pytest.fixture(scope="session")
def base() -> Iterator[Path]:
    """A directory that every user can enter."""
    with tempfile.TemporaryDirectory(prefix="wbcache-posix-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextlib.contextmanager
def _any_mode() -> Iterator[None]:
    old = os.umask(0)
    try:
        yield
    finally:
        os.umask(old)


@pytest.fixture(scope="session")
def at_rest(base: Path) -> Iterator[Parity]:
    """A mount of which nothing is flushed before a test says so."""
    native = base / "native"
    native.mkdir()
    with Mounted(base / "share", config=NEVER_BY_ITSELF) as mount:
        yield Parity(mount, native)


@pytest.fixture(scope="session")
def under_way(base: Path) -> Iterator[UnderWay]:
    """A mount of which everything is being flushed while a test makes its calls."""
    native, backing = base / "native2", base / "backing"
    native.mkdir()
    backing.mkdir()
    with (
        FaultShare(backing) as share,
        Mounted(share.mountpoint, config=merge(NEVER_BY_ITSELF, UNDER_WAY)) as mount,
    ):
        yield UnderWay(share, mount, native)
        share.release()


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Iterator[Parity]:
    """The mount that a test's state asks for, and the native directory beside it."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")
    names = request.fixturenames
    with _any_mode():
        if "state" not in names or request.getfixturevalue("state") != "flushing":
            yield request.getfixturevalue("at_rest")
            return
        mount: UnderWay = request.getfixturevalue("under_way")
        mount.step = 1 if request.node.get_closest_marker("slow") else SAMPLE
        yield mount
        mount.release()


@pytest.fixture(
    params=[
        *AT_REST,
        pytest.param("flushing", id="flushing"),
        pytest.param("flushing", id="flushing all", marks=pytest.mark.slow),
    ]
)
def state(request: pytest.FixtureRequest) -> State:
    """Each state of what a case builds."""
    found: State = request.param
    return found
