"""Rounds of work in bad weather, kills and remounts on one cache."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.churn.team import Team, Wrong
from tests.faultshare.client import FaultShare
from tests.mounting import LOG_TAIL, Mounted
from tests.soak.weather import Weather
from tests.waiting import wait_until

DRAIN = 120.0
"""Seconds for everything to arrive once the share is well."""

IDLE_THREADS = 8
"""Threads that a daemon keeps when there is nothing to do, at most."""

THREADS_END = 25.0
"""Seconds until idle worker threads are gone."""

CONFIGS: list[dict[str, Any]] = [
    {"flush": {"idle_delay": "50ms", "max_age": "1s"}},
    {"flush": {"idle_delay": "200ms", "max_age": "2s"}},
    {"flush": {"idle_delay": "2s", "max_age": "10s", "small_workers": 4, "workers": 1}},
    {"flush": {"idle_delay": "1h", "max_age": "1h"}},
]


class Soak:
    """Runs rounds until the time is up; every random choice follows from the seed."""

    def __init__(self, share: FaultShare, mount: Mounted, logs: Path, seed: int) -> None:
        self._share = share
        self._mount = mount
        self._seed = seed
        self._random = random.Random(seed)
        self.team = Team(mount.path, logs, seed)
        self.weather = Weather(share, random.Random(f"{seed}/weather"))
        self.rounds: Counter[str] = Counter()
        self._others = -1

    def run(self, seconds: float) -> None:
        """Work for so long; at the end everything is on the share. Raises Wrong."""
        end = time.monotonic() + seconds
        ends: dict[Callable[[], None], int] = {
            self._drain: 3,
            self._kill: 4,
            self._kill_twice: 1,
            self._remount: 1,
            self._leave_behind: 1,
            self._remount_as_it_is: 1,
        }
        try:
            self.team.make_directories()
            while time.monotonic() < end:
                self.team.start()
                for _ in range(self._random.randrange(1, 6)):
                    time.sleep(self._random.uniform(0.1, 1.5))
                    self.weather.change()
                (finish,) = self._random.choices(list(ends), list(ends.values()))
                self.weather.note(f"end of the round: {finish.__name__.strip('_')}")
                finish()
                self.rounds[finish.__name__.strip("_")] += 1
            self._settle()
            self._check_threads()
        except (AssertionError, OSError) as error:
            raise Wrong(self._describe(error)) from None
        finally:
            self.team.end()

    # -- how a round ends ----------------------------------------------------------------------

    def _drain(self) -> None:
        self._stop()
        self._settle()

    def _kill(self) -> None:
        self._mount.strike()
        self.weather.clear()  # a call that hangs keeps what is left of the process
        self._mount.wait_killed()
        self.team.collect()
        self._mount.remount(self._config())
        self.team.check_mount()

    def _kill_twice(self) -> None:
        """Again, perhaps before it has found out what became of the last one's calls."""
        self._mount.strike()
        self.weather.clear()
        self._mount.wait_killed()
        self.team.collect()
        self._mount.remount(self._config())
        time.sleep(self._random.random() * 0.2)
        self._mount.kill()
        self._mount.remount()
        self.team.check_mount()

    def _remount(self) -> None:
        self._stop()
        self.weather.clear()
        done = self._mount.umount()
        assert done.returncode == 0, f"umount: {done.stdout}{done.stderr}"
        self.team.check_share(self._share.backing)
        self._mount.remount(self._config())
        self.team.check_mount()

    def _leave_behind(self) -> None:
        """Unmount without waiting for the share."""
        self._stop()
        done = self._mount.umount("--timeout", "1")
        assert done.returncode in (0, 3), f"umount: {done.stdout}{done.stderr}"
        self.weather.clear()
        self._mount.remount(self._config())
        self.team.check_mount()

    def _remount_as_it_is(self) -> None:
        """The share is in the next mount's way, too."""
        self._stop()
        done = self._mount.umount("--timeout", "1")
        assert done.returncode in (0, 3), f"umount: {done.stdout}{done.stderr}"
        self._mount.remount(self._config())

    def _config(self) -> dict[str, Any]:
        self._others = -1
        return self._random.choice(CONFIGS)

    def _stop(self) -> None:
        self.team.stop()
        self.team.collect()

    # -- what must hold ------------------------------------------------------------------------

    def _settle(self) -> None:
        """Everything flushed, mount, share and model are equal, and nothing is left over."""
        self.weather.clear()
        self.team.check_mount()
        self._mount.flush(timeout=DRAIN)
        try:
            wait_until(lambda: not self._temporaries(), "no temporaries on the share")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self._temporaries()}") from None
        self.team.check_mount()
        self.team.check_share(self._share.backing)
        top = set(os.listdir(self._share.backing)) - self.team.names - {".wbcache"}
        assert not top, f"should not be on the share: {top}"
        self._check_descriptors()

    def _temporaries(self) -> list[str]:
        return [
            os.path.join(directory, name)
            for worker in self.team.names
            for directory, names, files in os.walk(self._share.backing / worker)
            for name in (*names, *files)
            if name.startswith(".wbcache")
        ]

    def _check_descriptors(self) -> None:
        """With no file open in the mount the daemon holds none on the share, none of a file that is
        gone, and of directories no more than there are."""
        try:
            wait_until(lambda: self._is_tidy(self._descriptors()), "descriptors are closed")
        finally:
            found = self._descriptors()
            self.weather.note(f"descriptors: {dict(found)}")
        if self._others < 0:
            self._others = found["other"]
        assert found["other"] <= self._others + 2, f"{found}, at first {self._others} others"

    def _descriptors(self) -> Counter[str]:
        found: Counter[str] = Counter()
        share = str(self._share.mountpoint)
        for name in os.listdir(f"/proc/{self._mount.pid}/fd"):
            try:
                target = os.readlink(f"/proc/{self._mount.pid}/fd/{name}")
            except FileNotFoundError:
                continue
            if target == share or target.startswith(share + "/"):
                found["directory" if os.path.isdir(target) else "unwanted on the share"] += 1
            elif target.startswith(f"{self._mount.cache_dir}/data/"):
                found["unwanted cache" if target.endswith(" (deleted)") else "cache"] += 1
            else:
                found["other"] += 1
        return found

    def _is_tidy(self, found: Counter[str]) -> bool:
        unwanted = found["unwanted on the share"] + found["unwanted cache"]
        return not unwanted and found["directory"] <= self.team.directories + 2

    def _check_threads(self) -> None:
        directory = f"/proc/{self._mount.pid}/task"
        wait_until(lambda: len(os.listdir(directory)) <= IDLE_THREADS, "threads end", THREADS_END)

    def _describe(self, error: Exception) -> str:
        lines = [f"seed {self._seed} after {sum(self.rounds.values())} rounds: {error}"]
        lines += ["the weather:", self.weather.record()]
        return "\n".join([*lines, "the daemons' log:", self._mount.log()[-LOG_TAIL:]])
