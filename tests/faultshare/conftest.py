"""Shares for the fault share's own tests."""

from __future__ import annotations

import shutil
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


@pytest.fixture(scope="module")
def module_share(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultShare]:
    """One process for a module's tests, since starting one takes longer than most of them."""
    share = FaultShare(tmp_path_factory.mktemp("backing"), log_data=True)
    with share:
        mountpoint = share.mountpoint
        yield share
    assert not mountpoint.exists()


@pytest.fixture
def share(module_share: FaultShare) -> Iterator[FaultShare]:
    """An empty share without faults that logs data; its process must not complain."""
    module_share.clear_log()
    yield module_share
    module_share.clear()
    for path in module_share.mountpoint.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    assert module_share.errors() == ""
