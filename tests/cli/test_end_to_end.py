"""The whole job on real mounts: mount, train, crash, carry on, unmount, and all is on the share.

The same test for a separate mount point, mounted over the share's own path, over a real network
share, over that share's own path, and as a user without privileges.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli import workload
from tests.plain_user import PLAIN_GID, PLAIN_UID, fuse_for_everyone, plain_command
from tests.sshshare import SshShare
from tests.waiting import wait_until
from wbcache.mounts import mount_at, read_mounts, unmount

pytestmark = [pytest.mark.usefixtures("fuse"), pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]


@dataclass
class Place:
    """Where a share is, where it gets mounted, and as whom."""

    source: Path
    mountpoint: Path
    cache: Path
    backing: Path
    """The share's files, as its server has them."""
    prefix: Sequence[str] = field(default=())

    def run(self, module: str, *arguments: object, code: int = 0) -> str:
        """Run a module of this checkout as the user; its output."""
        result = subprocess.run(
            [*self.prefix, sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert result.returncode == code, result.stderr
        return result.stdout

    def wbcache(self, *arguments: object, code: int = 0) -> str:
        return self.run("wbcache.cli", *arguments, code=code)

    def mount(self) -> None:
        self.wbcache("mount", self.source, self.mountpoint, "--cache-dir", self.cache)

    def shown(self) -> dict[str, Any]:
        """What the mount shows its user."""
        shown: dict[str, Any] = json.loads(self.run("tests.cli.workload", "show", self.mountpoint))
        return shown

    def kill_daemon(self) -> None:
        status = json.loads(self.wbcache("status", "--json", self.mountpoint))
        process = os.pidfd_open(status["pid"])
        signal.pidfd_send_signal(process, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{status['pid']}"), "the daemon is gone")
        os.close(process)


def separate(base: Path) -> contextlib.AbstractContextManager[Place]:
    return contextlib.nullcontext(_local(base))


def over_itself(base: Path) -> contextlib.AbstractContextManager[Place]:
    place = _local(base)
    place.mountpoint = place.source
    return contextlib.nullcontext(place)


@contextlib.contextmanager
def network_share(base: Path) -> Iterator[Place]:
    if missing := SshShare.missing():
        pytest.skip("not installed: " + ", ".join(missing))
    place = _local(base)
    with SshShare(str(place.backing), delay_ms=2) as share:
        place.source = Path(share.mountpoint)
        yield place


@contextlib.contextmanager
def network_share_over_itself(base: Path) -> Iterator[Place]:
    with network_share(base) as place:
        place.mountpoint = place.source
        yield place


@contextlib.contextmanager
def plain_user(base: Path) -> Iterator[Place]:
    # Temporary directories of the tests can be entered by root only.
    with tempfile.TemporaryDirectory(prefix="wbcache-plain-") as name, fuse_for_everyone():
        place = _local(Path(name))
        for path in (name, *(os.path.join(name, each) for each in os.listdir(name))):
            os.chown(path, PLAIN_UID, PLAIN_GID)
        place.prefix = plain_command(name)
        yield place


def _local(base: Path) -> Place:
    for name in ("share", "m"):
        (base / name).mkdir()
    return Place(base / "share", base / "m", base / "cache", base / "share")


@contextlib.contextmanager
def _detached_at_the_end(place: Place) -> Iterator[None]:
    """Whatever a failing test leaves mounted is detached before its directories go."""
    try:
        yield
    finally:
        entry = mount_at(str(place.mountpoint), read_mounts())
        if entry is not None and entry.is_wbcache:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                place.wbcache("umount", "--no-drain", place.mountpoint)
            if mount_at(str(place.mountpoint), read_mounts()) == entry:
                unmount(str(place.mountpoint), lazy=True)


Kind = Callable[[Path], contextlib.AbstractContextManager[Place]]


@pytest.mark.parametrize(
    "kind", [separate, over_itself, network_share, network_share_over_itself, plain_user]
)
def test_a_training_run_survives_a_crash_and_arrives_whole(kind: Kind, tmp_path: Path) -> None:
    with kind(tmp_path) as place, _detached_at_the_end(place):
        workload.prepare(place.backing)
        if place.prefix:
            for path in (place.backing, *place.backing.rglob("*")):
                os.chown(path, PLAIN_UID, PLAIN_GID)
        # The same run in a plain directory says what the mount and the share must show. Contents
        # are random, so only names, kinds, modes and sizes are compared with it.
        plain = tmp_path / "plain"
        plain.mkdir()
        workload.prepare(plain)

        place.mount()
        workload.first(plain)
        place.run("tests.cli.workload", "first", place.mountpoint)
        written = place.shown()
        assert _shape(written) == _shape(workload.show(plain))

        place.kill_daemon()
        place.mount()
        assert place.shown() == written

        workload.second(plain)
        place.run("tests.cli.workload", "second", place.mountpoint)
        written = place.shown()
        assert _shape(written) == _shape(workload.show(plain))

        place.wbcache("umount", place.mountpoint)
        assert workload.show(place.backing) == written
        events = (place.backing / "events.out.tfevents.1").read_bytes()
        assert events == (plain / "events.out.tfevents.1").read_bytes()
        old = (place.backing / "old.bin").read_bytes()
        assert old == (plain / "old.bin").read_bytes()


def _shape(shown: dict[str, Any]) -> dict[str, Any]:
    return {path: facts[:2] for path, facts in shown.items()}
