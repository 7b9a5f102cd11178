"""Rounds of work and SIGKILL on one cache, with every acknowledged operation checked after each."""

from __future__ import annotations

import os
import random
import time

from tests.churn.team import DEADLINE, Team, Wrong
from tests.crash.mounting import MountedCache, leftovers

DELAYS = ("0s", "50ms", "300ms", "2s")
AGES = ("200ms", "1s", "30s")


class Rounds:
    """Runs rounds on a mount; every random choice follows from the seed."""

    def __init__(self, mount: MountedCache, seed: int, *, max_seconds: float = 1.5) -> None:
        self._mount = mount
        self._random = random.Random(seed)
        self._max_seconds = max_seconds
        self.team = Team(mount.mountpoint, mount.base / "logs", seed)

    def start(self) -> None:
        """The first mount, with an empty directory for each worker."""
        self._configure()
        self._mount.mounted()
        self.team.make_directories()

    def round(self) -> None:
        """Work, kill, mount, check."""
        self.team.start()
        time.sleep(self._random.choice([0.05, 1.0]) * self._random.random() * self._max_seconds)
        umount = None
        if self._random.random() < 0.15:
            # In the middle of a drain.
            self.team.stop()
            self._collect()
            umount = self._mount.start_command("umount", self._mount.mountpoint)
            time.sleep(self._random.random() * 0.5)
        pid = self._mount.pid
        self._mount.kill()
        if umount is not None:
            umount.wait(DEADLINE)
        else:
            self._collect()
        if self._random.random() < 0.5:
            self._mount.wait_for_end(pid)
        self._configure()
        self._mount.mounted()
        if self._random.random() < 0.1:
            # Killed again, perhaps before it has found out what became of the last one's calls.
            time.sleep(self._random.random() * 0.05)
            self._mount.kill()
            self._mount.mounted()
        try:
            self.team.check_mount()
        except Wrong as error:
            raise Wrong(f"{error}\n{self._mount.log()}") from None

    def finish(self) -> None:
        """Unmount; the share holds what the mount held, and nothing else."""
        self._mount.drained()
        self.team.check_share(self._mount.source)
        top = set(os.listdir(self._mount.source)) - self.team.names
        wrong = [f"{name}: should not be on the share" for name in top - {".wbcache"}]
        wrong += [f"{path}: left behind" for path in leftovers(self._mount.source)]
        assert not wrong, "\n".join([*wrong, self._mount.log()])

    def _configure(self) -> None:
        self._mount.configure(
            idle_delay=self._random.choice(DELAYS), max_age=self._random.choice(AGES)
        )

    def _collect(self) -> None:
        try:
            self.team.collect()
        except Wrong as error:
            raise Wrong(f"{error}\n{self._mount.log()}") from None
