"""The program that this is for: tensorboard's writer, whose thread dies on a slow share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import tensorboardX
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted
from tests.waiting import wait_until

pytestmark = [pytest.mark.usefixtures("fuse"), pytest.mark.timeout(240)]

SCALARS = 5000
BATCH = 1000
LATENCY = 50.0
LOCAL = 30.0
"""Seconds within which all scalars are written at local speed, on any machine. Directly on the
share, with its three calls a scalar, they would take twelve minutes."""

CONFIG = {"flush": {"idle_delay": "200ms", "max_age": "400ms"}}

Write = Callable[[int, float], None]
Writer = Callable[[Path], tuple[Write, Callable[[], None]]]


def tensorboard_writer(directory: Path) -> tuple[Write, Callable[[], None]]:
    """Opens, appends and closes for every event or few."""
    writer = EventFileWriter(os.fspath(directory), max_queue_size=10, flush_secs=0)

    def write(step: int, value: float) -> None:
        summary = Summary(value=[Summary.Value(tag="loss", simple_value=value)])
        writer.add_event(Event(wall_time=float(step), step=step, summary=summary))

    return write, writer.close


def tensorboardx_writer(directory: Path) -> tuple[Write, Callable[[], None]]:
    """Holds the file open, and syncs it."""
    writer = tensorboardX.SummaryWriter(os.fspath(directory), max_queue=1, flush_secs=0)

    def write(step: int, value: float) -> None:
        writer.add_scalar("loss", value, step, walltime=float(step))

    return write, writer.close


class Watcher(threading.Thread):
    """Reads the share's event file again and again, as a tensorboard on another host does."""

    def __init__(self, behind: Path, mount: Path) -> None:
        super().__init__(daemon=True)
        self._behind = behind
        self._mount = mount
        self._ended = threading.Event()
        self.sizes: list[int] = []
        self.inodes: set[int] = set()
        self.steps: list[int] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        loader = None
        while not self._ended.wait(0.01):
            for path in self._behind.glob("events.out.tfevents.*"):
                shown = path.read_bytes()
                self.inodes.add(path.stat().st_ino)
                if self.sizes and len(shown) == self.sizes[-1]:
                    continue
                self.sizes.append(len(shown))
                if not (self._mount / path.name).read_bytes().startswith(shown):
                    self.wrong.append(f"{len(shown)} bytes are not a prefix")
                loader = loader or RawEventFileLoader(os.fspath(path))
                self.steps += steps(loader)

    def has_seen_more_than(self, count: int) -> bool:
        """Whether the file was seen in more than so many sizes."""
        return len(self.sizes) > count

    def stop(self) -> None:
        self._ended.set()
        self.join(30)


def steps(loader: RawEventFileLoader) -> list[int]:
    """The steps of the scalars that a reader has not seen yet."""
    events = [Event.FromString(raw) for raw in loader.Load()]
    return [event.step for event in events if event.HasField("summary")]


@contextmanager
def watching(behind: Path, mount: Path) -> Iterator[Watcher]:
    watcher = Watcher(behind, mount)
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.stop()


@pytest.mark.parametrize("writer", [tensorboard_writer, tensorboardx_writer])
def test_events_are_written_at_local_speed_and_the_share_follows(
    tmp_path: Path, writer: Writer
) -> None:
    (tmp_path / "backing").mkdir()
    with (
        FaultShare(tmp_path / "backing", latency_ms=LATENCY) as share,
        Mounted(share.mountpoint, config=CONFIG) as mount,
    ):
        behind, logs = share.backing / "runs" / "1", mount.path / "runs" / "1"
        logs.mkdir(parents=True)
        with watching(behind, logs) as watcher:
            seconds = -time.monotonic()
            write, close = writer(logs)
            seconds += time.monotonic()
            for first in range(0, SCALARS, BATCH):
                seen = len(watcher.sizes)
                seconds -= time.monotonic()
                for step in range(first, first + BATCH):
                    write(step, step / 7)
                seconds += time.monotonic()
                # So that there is something to watch. Training goes on, of course.
                wait_until(partial(watcher.has_seen_more_than, seen), "the share follows")
            seconds -= time.monotonic()
            close()
            seconds += time.monotonic()
            (name,) = os.listdir(logs)
            written = (logs / name).read_bytes()
            share.set(latency_ms=0)
            mount.flush()
            wait_until(lambda: watcher.sizes[-1:] == [len(written)], "all of it is seen")
        assert mount.umount().returncode == 0
        assert seconds < LOCAL
        assert watcher.wrong == []
        assert 0 not in watcher.sizes
        assert watcher.sizes == sorted(watcher.sizes) and len(watcher.sizes) > SCALARS // BATCH
        assert len(watcher.inodes) == 1
        assert watcher.steps == list(range(len(watcher.steps)))
        assert len(watcher.steps) >= SCALARS - BATCH
        assert (behind / name).read_bytes() == written
        assert steps(RawEventFileLoader(os.fspath(behind / name))) == list(range(SCALARS))
        assert os.listdir(behind) == [name]
