"""Workers of the flusher: whoever queues for one gets it, and none is ever lost."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.volumes import Mounted, mounted
from tests.waiting import wait_until_async
from wbcache.errors import CacheDiskError
from wbcache.flush import blocking
from wbcache.node import Node

LARGE = 2 << 20


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, no bytes arrive on the share."""
    go_on, copy_range = threading.Event(), blocking.copy_range

    def stuck(*args: Any, **named: Any) -> Any:
        go_on.wait()
        return copy_range(*args, **named)

    monkeypatch.setattr(blocking, "copy_range", stuck)
    yield go_on
    go_on.set()


async def _make(mount: Mounted, name: str, size: int) -> Node:
    filesystem = mount.filesystem
    uid, gid = os.getuid(), os.getgid()
    node = await filesystem.names.create(mount.volume.tree.root, name.encode(), 0o644, uid, gid)
    await _append(mount, node, size)
    return node


async def _append(mount: Mounted, node: Node, size: int) -> None:
    handle = mount.filesystem.files.open(node, os.O_WRONLY)
    await mount.filesystem.files.write(node, node.size, b"x" * size)
    mount.filesystem.files.release(handle)


async def _until(mount: Mounted, count: int) -> None:
    with trio.fail_after(20):
        while mount.flusher.running < count:
            await trio.sleep(0.005)


async def test_a_large_file_closed_many_times_does_not_hold_up_others(
    tmp_path: Path, go_on: threading.Event
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    async with mounted(str(share), str(tmp_path / "cache")) as mount:
        workers = mount.volume.config.flush.workers
        names = [f"stuck{i}" for i in range(workers)]
        for name in names:
            await _make(mount, name, LARGE)
        await _until(mount, workers)
        log = await _make(mount, "log", LARGE)
        for _ in range(30):
            await _append(mount, log, 1)
            await trio.sleep(0.03)  # it becomes due once more
        await _make(mount, "last", LARGE)
        go_on.set()
        # No drain: nothing but the end of the steps makes the others move.
        with trio.fail_after(30):
            while mount.flusher.unfinished():
                await trio.sleep(0.01)
        assert {path.name for path in share.iterdir()} == {*names, "log", "last"}


async def test_a_journal_that_refuses_while_sweeping_ends_no_step(
    tmp_path: Path, go_on: threading.Event
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    async with mounted(str(share), str(tmp_path / "cache")) as mount:
        volume, names = mount.volume, [f"file{i}" for i in range(8)]
        for name in names:
            await _make(mount, name, 100)
        await _until(mount, len(names))
        drop_temporary, refused = volume.journal.drop_temporary, trio.Event()

        def refuse_once(name: bytes) -> None:
            if not refused.is_set():
                refused.set()
                raise CacheDiskError(errno.ENOSPC, "the cache disk is full")
            drop_temporary(name)

        volume.journal.drop_temporary = refuse_once  # type: ignore[method-assign]
        volume.strays.append((volume.tree.root, volume.temporary_names.fresh()))
        mount.flusher.hurry()
        with trio.fail_after(20):
            await refused.wait()
        go_on.set()
        await mount.drain()
        assert {path.name for path in share.iterdir()} == set(names)
        await _make(mount, "later", 100)
        await mount.drain()
        assert (share / "later").exists()


async def test_a_journal_that_refuses_while_finding_out_ends_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    async with mounted(str(share), str(tmp_path / "cache")) as mount:
        failures, asked = mount.flusher.failures, []

        async def refuse(node: Node) -> None:
            asked.append(node)
            raise CacheDiskError(errno.EIO, "the cache disk fails")

        move, tried = blocking.move, []

        def fail_once(*args: Any, **named: Any) -> Any:
            tried.append(args)
            if len(tried) == 1:
                raise OSError(errno.EIO, "not now")
            return move(*args, **named)

        monkeypatch.setattr(failures, "find_out", refuse)
        monkeypatch.setattr(blocking, "move", fail_once)
        await _make(mount, "file", 100)
        with trio.fail_after(20):
            while mount.flusher.unfinished():
                await trio.sleep(0.005)
        assert asked and (share / "file").read_bytes() == b"x" * 100


async def test_what_was_refused_before_a_flush_was_asked_for_is_tried_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step was under way by then, and would have been the last for a long time."""
    (tmp_path / "share").mkdir()
    asked, go_on = threading.Event(), threading.Event()
    make_directory = blocking.make_directory

    def refuse(*args: object, **named: object) -> None:
        monkeypatch.setattr(blocking, "make_directory", make_directory)
        asked.set()
        go_on.wait(20)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        monkeypatch.setattr(blocking, "make_directory", refuse)
        node = await mount.filesystem.names.mkdir(mount.volume.tree.root, b"made", 0o755, 0, 0)
        mount.flusher.drain()
        await wait_until_async(asked.is_set, "it is being made")
        mount.flusher.drain()
        go_on.set()
        await wait_until_async(lambda: bool(node.dirty is None or node.trouble), "it is answered")
        assert not node.trouble
        await mount.drain()
        assert (tmp_path / "share" / "made").is_dir()
