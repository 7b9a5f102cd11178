"""Shares for the fault share's own tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    """An empty backing directory."""
    path = tmp_path / "backing"
    path.mkdir()
    return path


@pytest.fixture
def share(backing: Path) -> Iterator[FaultShare]:
    """A share that logs data; the test fails if its process complained or its mount stays."""
    share = FaultShare(backing, log_data=True)
    with share:
        mountpoint = share.mountpoint
        yield share
        assert share.errors() == ""
    assert not mountpoint.exists()
