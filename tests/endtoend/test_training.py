"""A whole training run on every kind of mount leaves on the share what it leaves on a disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_end_to_end import (
    Kind,
    Place,
    _detached_at_the_end,
    network_share,
    over_itself,
    plain_user,
)
from tests.endtoend.stage import compact
from tests.endtoend.training import STAMP, train
from tests.faultshare.client import FaultShare
from tests.mounting import contents

pytestmark = [pytest.mark.usefixtures("fuse"), pytest.mark.timeout(180)]

LATENCY = 30.0


@contextlib.contextmanager
def slow_share(base: Path) -> Iterator[Place]:
    for name in ("backing", "m"):
        (base / name).mkdir()
    with FaultShare(base / "backing", latency_ms=LATENCY) as share:
        yield Place(share.mountpoint, base / "m", base / "cache", base / "backing")


@pytest.mark.parametrize("kind", [over_itself, network_share, plain_user, slow_share])
def test_the_share_holds_what_a_disk_would(kind: Kind, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    train(disk)
    with kind(tmp_path) as place, _detached_at_the_end(place):
        place.mount()
        place.run("tests.endtoend.training", place.mountpoint)
        place.wbcache("umount", place.mountpoint)
        assert compact(contents(place.backing)) == compact(contents(disk))
        assert os.stat(place.backing / "run.sh").st_mtime_ns // 10**9 == STAMP // 10**9
        assert os.path.samefile(place.backing / "run.sh", place.backing / "linked.sh")
