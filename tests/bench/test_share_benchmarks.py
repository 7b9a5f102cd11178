"""The benchmarks over a faulty share still run, and judge what they see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.drain import back, drain
from tests.bench.hang import PEERS, Plan, Result, differences, judge, measure

pytestmark = pytest.mark.usefixtures("fuse")


def test_the_loop_goes_on_while_the_share_hangs(tmp_path: Path) -> None:
    plan = Plan(hang=2, around=1, latency_ms=1, bandwidth_mb=0, checkpoint=2 << 20, every=0.5)

    result = measure(PEERS["wbcache"]("wbcache", ""), plan, str(tmp_path), lambda _: None)

    assert result.errors == {}
    assert result.complete.startswith("identical")
    assert result.calls > 50
    assert 0 < result.p50 <= result.p99 <= result.worst < plan.hang


def test_a_call_counts_if_it_overlaps_with_the_hang() -> None:
    result = Result("any")
    calls = [
        ("stat", 1.0, 0.1, 0),  # before
        ("write", 9.0, 11.0, 0),
        ("rename", 12.0, 0.5, 110),
        ("stat", 31.0, 0.2, 5),  # afterwards
    ]
    judge(result, calls, 10.0, 30.0)
    assert (result.calls, result.worst, result.elsewhere) == (2, 11.0, 0.2)
    assert result.errors == {"rename ETIMEDOUT": 1}
    assert result.slowest[0] == ("write", -1.0, 11.0)


def test_what_is_missing_and_what_differs_is_named(tmp_path: Path) -> None:
    (tmp_path / "same").write_bytes(b"")
    (tmp_path / "other").write_bytes(b"x")
    (tmp_path / "additional").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    wanted = {"same": empty, "other": empty, "gone": empty}
    assert differences(str(tmp_path), wanted) == (
        "gone missing, additional should not be there, other differs"
    )


def test_small_files_are_drained_and_come_back(tmp_path: Path) -> None:
    for name in ("drain", "back"):
        (tmp_path / name).mkdir()
    drained = drain(str(tmp_path / "drain"), 20, 4, latency_ms=1)
    assert drained.calls["rename"] >= 20
    assert drained.ratio > 0
    found = back(str(tmp_path / "back"), 30)
    assert 0 < found.mount_seconds < found.usable_seconds
    assert found.memory_mib > 1
