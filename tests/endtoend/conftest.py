"""One fault share and one mount for a module's tests, and a directory of its own for each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.endtoend.stage import Stage
from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, merge

STILL: dict[str, Any] = merge(NEVER_BY_ITSELF, {"cache": {"size": "4GiB"}})
"""Nothing is flushed unless the test says so."""


@pytest.fixture(scope="module")
def slow_share(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultShare]:
    """An empty fault share whose log can be replayed."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")
    with FaultShare(tmp_path_factory.mktemp("backing"), log_data=True) as share:
        yield share
        assert share.errors() == ""


@pytest.fixture(scope="module")
def mount(request: pytest.FixtureRequest, slow_share: FaultShare) -> Iterator[Mounted]:
    """The share, mounted. A module's ``CONFIG`` says how, otherwise nothing happens by itself."""
    config = getattr(request.module, "CONFIG", STILL)
    with Mounted(slow_share.mountpoint, config=config) as mounted:
        yield mounted


@pytest.fixture
def stage(
    request: pytest.FixtureRequest, slow_share: FaultShare, mount: Mounted
) -> Iterator[Stage]:
    """An empty directory for the test. After a test that passed it must be removable without a
    trace."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")[:100]
    stage = Stage(slow_share, mount, name)
    stage.open()
    failed = request.session.testsfailed
    yield stage
    slow_share.clear()
    if request.session.testsfailed == failed:
        stage.close()
