"""SIGKILL just before the N-th call that changes something, for every N.

The scenario is the same each time: work in three parts, each flushed, then a drain. After the kill
the next mount has to have what was acknowledged, the work goes on, and the share ends as if nothing
had happened.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.churn.model import Model, Operation, after_kill, differences
from tests.churn.operations import Executor
from tests.churn.worker import DEAD
from tests.crash.mounting import MountedCache, leftovers
from tests.crash.test_kill_random import seed_of_run
from wbcache.control.client import ControlClient
from wbcache.errors import NoSuchMountError

pytestmark = pytest.mark.usefixtures("fuse")

BEFORE: list[Operation] = [
    ["create", "old.log", 0o644],
    ["append", "old.log", 1, 5000],
    ["create", "old.bin", 0o600],
    ["append", "old.bin", 2, 70_000],
    ["mkdir", "old dir", 0o755],
    ["create", "old dir/kept", 0o644],
    ["append", "old dir/kept", 3, 100],
    ["create", "old dir/removed", 0o644],
    ["symlink", "old.log", "old link"],
]
"""What the share holds at first."""

PARTS: list[list[Operation]] = [
    [
        ["mkdir", "run", 0o700],
        ["create", "run/log", 0o644],
        ["append", "run/log", 10, 180],
        ["append", "old.log", 11, 300],
        ["write", "old.bin", 1000, 12, 5000],
        ["symlink", "/no/where", "run/link"],
        ["create", "run/state.tmp", 0o600],
        ["append", "run/state.tmp", 13, 5000],
        ["fsync", "run/state.tmp"],
        ["rename", "run/state.tmp", "run/state"],
        ["mkdir", "ckpt.tmp", 0o755],
        ["create", "ckpt.tmp/part", 0o644],
        ["append", "ckpt.tmp/part", 14, 100_000],
        ["rename", "ckpt.tmp", "ckpt"],
        ["utime", "run/log", 123_456_789_012_345_678],
    ],
    [
        ["append", "run/log", 20, 180],
        ["write", "run/state", 100, 21, 50],
        ["link", "run/state", "linked"],
        ["rename", "old dir", "run/moved"],
        ["unlink", "run/moved/removed"],
        ["chmod", "old.log", 0o600],
        ["setxattr", "old.bin", "user.test.0", "value"],
        ["truncate", "old.bin", 2000],
        ["create", "run/state.tmp", 0o600],
        ["append", "run/state.tmp", 22, 6000],
        ["rename", "run/state.tmp", "run/state"],
        ["exchange", "old.log", "run/log"],
        ["mkdir", "ckpt.tmp", 0o755],
        ["create", "ckpt.tmp/part", 0o644],
        ["append", "ckpt.tmp/part", 23, 1000],
        ["unlink", "ckpt/part"],
        ["rename", "ckpt.tmp", "ckpt"],
    ],
    [
        ["unlink", "old link"],
        ["rename", "run/moved/kept", "kept"],
        ["rmdir", "run/moved"],
        ["restart", "old.bin"],
        ["append", "old.bin", 30, 3000],
        ["rename", "linked", "run/link"],
        ["mkdir", "empty", 0o755],
        ["rename", "run", "empty"],
        ["utime", "empty", 987_654_321_000_000_001],
    ],
]

SAMPLE = 12
"""At how many calls the short version kills."""


def _numbers(count: int) -> range:
    """At which calls the short version kills: other ones each time, evenly spread."""
    stride = count // SAMPLE
    return range(random.Random(seed_of_run()).randrange(stride) + 1, count, stride)


class Scenario:
    """One run of the work, on a share and a cache of its own."""

    def __init__(self, base: Path) -> None:
        base.mkdir()
        self.mount = MountedCache(base)
        self.mount.configure(idle_delay="0s", max_age="1s")
        self.model = Model()
        self._left = [list(part) for part in PARTS]
        self._under_way: Operation | None = None
        share = Executor(str(self.mount.source))
        for operation in BEFORE:
            share.execute(operation)
            self.model.apply(operation)

    def work(self) -> bool:
        """Do what is left to be done, with a flush after each part; False when the mount died."""
        executor = Executor(str(self.mount.mountpoint))
        client = ControlClient(str(self.mount.cache))
        try:
            while self._left:
                while self._left[0]:
                    self._under_way = self._left[0][0]
                    executor.execute(self._under_way)
                    self.model.apply(self._left[0].pop(0))
                    self._under_way = None
                client.flush([b""], 30.0)
                self._left.pop(0)
        except OSError as error:
            if error.errno not in DEAD:
                raise
            return False
        except NoSuchMountError:
            return False
        return True

    def resume(self) -> None:
        """Mount again; whatever was acknowledged has to be there."""
        self.mount.mounted()
        directory = str(self.mount.mountpoint)
        before = self.model
        self.model = after_kill(directory, before, self._under_way)
        if self.model is not before:
            self._left[0].pop(0)
        self._under_way = None

    def check_share(self) -> None:
        """After a drain the share holds what the mount held."""
        share = str(self.mount.source)
        wrong = differences(share, self.model, hidden=(".wbcache",), on_share=True)
        wrong += [f"{path}: left behind" for path in leftovers(self.mount.source)]
        assert not wrong, "\n".join(wrong)


@contextlib.contextmanager
def _daemon(mount: MountedCache, kill_at: int) -> Iterator[tuple[subprocess.Popen[bytes], bool]]:
    """A daemon that kills itself, and whether it got as far as being ready."""
    ready, sending = os.pipe()
    command = [sys.executable, "-m", "tests.crash.killer", str(kill_at)]
    command += ["--cache-dir", str(mount.cache), "--config", str(mount.config)]
    command += ["--ready-fd", str(sending), "--", str(mount.source), str(mount.mountpoint)]
    with os.fdopen(ready, "rb") as pipe:
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[sending],
        )
        os.close(sending)
        try:
            yield process, b"true" in pipe.readline()
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _killed_at(base: Path, number: int) -> bool:
    """Run the scenario with a kill before call `number`; False when it never came to that."""
    scenario = Scenario(base)
    with scenario.mount as mount:
        with _daemon(mount, number) as (process, ready):
            if ready and scenario.work() and mount.umount().returncode == 0:
                # It may be killed while it ends, when the share has everything.
                code = process.wait(10)
                assert code in (0, -9), mount.log()
                scenario.check_share()
                return code == -9
            assert process.wait(10) == -9, mount.log()
        scenario.resume()
        assert scenario.work(), mount.log()
        mount.drained()
        scenario.check_share()
    return True


def _checked(base: Path, number: int) -> bool:
    place = base / f"at-{number}"
    try:
        killed = _killed_at(place, number)
    except AssertionError as error:
        raise AssertionError(f"killed before call {number}: {error}") from None
    shutil.rmtree(place)  # a cache is many directories, and there are many calls
    return killed


def _count(base: Path) -> int:
    """How many calls the scenario takes when nothing is killed; roughly, since threads race."""
    scenario = Scenario(base)
    with scenario.mount as mount, _daemon(mount, 0) as (process, ready):
        assert ready and scenario.work()
        process.send_signal(12)
        assert process.stdout is not None
        count = int(process.stdout.readline())
        mount.drained()
        assert process.wait(10) == 0
        scenario.check_share()
    return count


def test_killed_at_some_calls(tmp_path: Path) -> None:
    count = _count(tmp_path / "whole")
    assert count > 100
    killed = [_checked(tmp_path, number) for number in _numbers(count)]
    assert killed.count(True) > SAMPLE / 2


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_killed_at_every_call(tmp_path: Path) -> None:
    number, last = 1, _count(tmp_path / "whole")
    while _checked(tmp_path, number) or number < last:
        number += 1
    print(f"{number - 1} calls")
