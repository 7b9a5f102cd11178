"""Two mounts on two cache directories over one share write, rename and remove the same names."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.conflicts.conftest import listed
from tests.conflicts.twomounts import NAMES, history, judge, work
from tests.faultshare.client import FaultShare
from tests.mounting import Mounted, contents
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fuse")

CONFIG = {
    "flush": {"idle_delay": "300ms", "max_age": "1s"},
    "share": {"attr_ttl": "100ms", "dir_ttl": "100ms"},
}
LATENCY = 3.0
"""Milliseconds of a call on the share."""


def files(top: Path) -> dict[str, bytes]:
    return {name: data for name, (_, data) in contents(top).items() if name != "sub"}


def unseen(mount: Mounted, held: dict[str, bytes]) -> set[tuple[str, int]]:
    """Names and lengths (by which a content is known) that a mount shows and the share does not
    have, or the other way round."""
    found = set()
    for path in (*mount.path.iterdir(), *(mount.path / "sub").iterdir()):
        with suppress(FileNotFoundError):  # it has just been found to be gone
            found.add((str(path.relative_to(mount.path)), path.stat().st_size))
    on_share = {(name, len(data)) for name, data in held.items()}
    return {entry for entry in found ^ on_share if entry[0] != "sub"}


def _sees_all(mount: Mounted, held: dict[str, bytes]) -> bool:
    return not unseen(mount, held)


def drain(mounts: list[Mounted], backing: Path) -> dict[str, bytes]:
    """Flush both until neither finds anything of the other's; what the share holds then."""

    def drained() -> dict[str, bytes] | None:
        for mount in mounts:
            mount.hand_over()
            mount.client.flush([b""], 10.0)
        try:
            before = files(backing)
            for mount in mounts:
                mount.client.flush([b""], 10.0)
            quiet = not any(mount.client.pending() for mount in mounts)
            return before if quiet and files(backing) == before else None
        except FileNotFoundError:
            return None  # something was just being flushed

    held = wait_until(drained, "both mounts are drained", 60)
    assert held is not None
    return held


def run(seed: int, seconds: float) -> str:
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wbcache-two-")))
        backing = base / "backing"
        backing.mkdir()
        shares = [
            stack.enter_context(
                FaultShare(backing, latency_ms=LATENCY, jitter_ms=LATENCY, attr_timeout=1)
            )
            for _ in range(2)
        ]
        mounts = [stack.enter_context(Mounted(s.mountpoint, config=CONFIG)) for s in shares]
        workers = work(mounts, seed, seconds)
        held = drain(mounts, backing)
        verdict = judge(workers, history(share.log() for share in shares), held)
        told = {str(row["ours"]) for mount in mounts for row in listed(mount)}
        beside = {name for name in held if ".conflict-" in name}
        assert not verdict.lost, "\n".join([f"seed {seed}: {verdict}", *verdict.lost])
        assert {name.partition(".conflict-")[0] for name in held} <= set(NAMES)
        assert beside <= told, "a conflict of which nothing was told"
        assert verdict.kept and verdict.known and verdict.widths
        for mount in mounts:
            with suppress(AssertionError):
                wait_until(partial(_sees_all, mount, held), "it shows what the share has", 60)
            assert not unseen(mount, held)
        return str(verdict)


def test_nothing_goes_that_nobody_knew(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = run(seed=1, seconds=20)
    with capsys.disabled():
        print(f"\ntwo mounts, 20 s, {LATENCY:g} to {2 * LATENCY:g} ms a call: {verdict}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [2])
def test_nothing_goes_that_nobody_knew_in_ten_minutes(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = run(seed, seconds=600)
    with capsys.disabled():
        print(f"\ntwo mounts, 10 min, {LATENCY:g} to {2 * LATENCY:g} ms a call: {verdict}")
