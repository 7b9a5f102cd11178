"""The fixtures of the end-to-end tests on a slow share, and which versions are tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endtoend.conftest import mount, slow_share, stage
from tests.endtoend.stage import Stage
from tests.libraries.matrix import ROWS
from tests.libraries.running import Programs

__all__ = ["mount", "slow_share", "stage"]

LATENCY = 25.0


@pytest.fixture(autouse=True)
def slowly(request: pytest.FixtureRequest) -> None:
    """Every call on the share takes its time."""
    if "stage" in request.fixturenames:
        stage: Stage = request.getfixturevalue("stage")
        stage.share.set(latency_ms=LATENCY)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    """Runs what belongs to a test."""
    return Programs(tmp_path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which versions are installed here: docs/compatibility.md names those of its writing."""
    found = [f"{row.name} {version}" for row in ROWS if (version := row.version())]
    terminalreporter.write_line("libraries here: " + ", ".join(found))
