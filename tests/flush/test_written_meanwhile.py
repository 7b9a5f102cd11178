"""A flush, and what is written or cut while its calls are under way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.volumes import QUICK, Mounted, mounted
from tests.waiting import wait_until_async
from wbcache.filesystem import Changes
from wbcache.filesystem.files import INLINE_LIMIT
from wbcache.flush import blocking
from wbcache.flush.transfer import SupersededError
from wbcache.node import Content, Node

SPAN = (10, 20)
DATA = b"0123456789" * 10


async def _make(mount: Mounted) -> tuple[Node, Content]:
    mount.flusher.suspended = True
    root = mount.volume.tree.root
    node = await mount.filesystem.names.create(root, b"file", 0o644, os.getuid(), os.getgid())
    handle = mount.filesystem.files.open(node, os.O_WRONLY)
    await mount.filesystem.files.write(node, 0, DATA)
    mount.filesystem.files.release(handle)
    assert node.content is not None
    return node, node.content


def _check(mount: Mounted, node: Node, content: Content) -> None:
    assert content.dirty.covers(*SPAN) and not content.clean.overlap(*SPAN)
    rows = [row[2:4] for row in mount.volume.journal.rows("extent") if row[4] == 1]
    assert SPAN in rows, "a kill now would make it the share's"
    content.writing = ()
    assert node.dirty is not None


async def test_while_a_transfer_is_published(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        node, content = await _make(mount)
        root = mount.volume.tree.root
        await mount.flusher.files.copy(node, root)
        content.writing = (SPAN,)
        await mount.flusher.files.publish(node, (root, b"file"), None)
        _check(mount, node, content)


async def _make_growing(mount: Mounted) -> tuple[Node, Content]:
    """A file on the share that has grown here."""
    node, content = await _make(mount)
    root, flushing = mount.volume.tree.root, mount.flusher.files
    await flushing.copy(node, root)
    await flushing.publish(node, (root, b"file"), None)
    handle = mount.filesystem.files.open(node, os.O_WRONLY)
    await mount.filesystem.files.write(node, len(DATA), b"more")
    mount.filesystem.files.release(handle)
    return node, content


async def test_while_a_file_grows(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        node, content = await _make_growing(mount)
        work = mount.volume.share.work

        async def work_while_written(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
            content.writing = (SPAN,)
            return await work(call, *args, **named)

        mount.volume.share.work = work_while_written  # type: ignore[method-assign]
        await mount.flusher.files.update(node, (mount.volume.tree.root, b"file"))
        _check(mount, node, content)


async def test_a_file_that_is_cut_while_it_grows_never_shows_zeros(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache")) as mount:
        node, _ = await _make_growing(mount)
        work, attributes = mount.volume.share.work, mount.filesystem.attributes
        shown = set()

        async def work_after_a_cut(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
            if node.size > 50:
                await attributes.change(node, Changes(size=50))
            result = await work(call, *args, **named)
            shown.add((tmp_path / "share" / "file").read_bytes())
            return result

        mount.volume.share.work = work_after_a_cut  # type: ignore[method-assign]
        with pytest.raises(SupersededError):
            await mount.flusher.files.update(node, (mount.volume.tree.root, b"file"))
        assert shown == {DATA}
        mount.flusher.suspended = False
        await mount.drain()
        assert (tmp_path / "share" / "file").read_bytes() == DATA[:50]


async def test_an_append_whose_thread_outlasts_a_flush_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    async with mounted(str(share), str(tmp_path / "cache")) as mount:
        node, _ = await _make(mount)
        mount.flusher.suspended = False
        await mount.drain()
        started, go_on = trio.Event(), trio.Event()

        async def slowly(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
            started.set()
            await go_on.wait()
            return call(*args)

        with monkeypatch.context() as slow:
            slow.setattr(trio.to_thread, "run_sync", slowly)
            slow.setattr(mount.filesystem.files, "_threaded_until", float("inf"))
            mount.flusher.suspended = True
            more = b"m" * INLINE_LIMIT
            handle = mount.filesystem.files.open(node, os.O_WRONLY)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mount.filesystem.files.write, node, len(DATA), more)
                await started.wait()
                assert not mount.volume.tree.settle_if_clean(node)
                mount.volume.tree.settle(node, mount.volume.clock())  # a flush has ended
                assert node.dirty is not None
                go_on.set()
            mount.filesystem.files.release(handle)
        mount.flusher.suspended = False
        await mount.drain()
        assert (share / "file").read_bytes() == DATA + more


async def test_what_is_looked_at_while_it_is_written_is_looked_at_again(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    async with mounted(str(share), str(tmp_path / "cache")) as mount:
        node, content = await _make(mount)
        mount.flusher.suspended = False
        await mount.drain()
        content.writing = ((len(DATA), len(DATA) + 5),)
        mount.volume.tree.touch(node, mount.volume.clock())
        mount.flusher.pull(node)
        for _ in range(20):  # it neither rests nor is it called clean
            await trio.sleep(0.01)
            assert node.dirty is not None and not mount.flusher.is_stalled
        content.writing = ()
        await mount.drain()
        assert node.dirty is None


async def test_a_full_cache_and_a_share_that_hangs_hold_up_no_writer_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for a copy the writers wait for the share; not when it does nothing."""
    (tmp_path / "share").mkdir()
    config = replace(QUICK, share=replace(QUICK.share, deadline=0.2))
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache"), config=config) as mount:
        node, content = await _make(mount)
        volume, files = mount.volume, mount.filesystem.files
        monkeypatch.setattr(volume.space, "take", lambda count: False)
        work, sends, hang = volume.share.work, 0, trio.Event()

        async def work_meanwhile(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
            nonlocal sends
            if call is blocking.copy_range:
                sends += 1
                if content in volume.freezer:
                    await hang.wait()
                else:  # it is rewritten faster than it moves
                    await files.write(node, 0, b"%02d" % sends)
            return await work(call, *args, **named)

        monkeypatch.setattr(volume.share, "work", work_meanwhile)
        volume.space.look()
        async with trio.open_nursery() as nursery:
            outcome: list[int | None] = []

            async def copy() -> None:
                try:
                    await mount.flusher.files.copy(node, volume.tree.root)
                except OSError as error:
                    outcome.append(error.errno)

            nursery.start_soon(copy)
            await wait_until_async(lambda: content in volume.freezer, "it is frozen")
            with trio.fail_after(20):
                await files.write(node, 0, b"on")
            hang.set()
        assert outcome == [errno.EAGAIN]
        monkeypatch.undo()
        mount.flusher.suspended = False
        await mount.drain()
        assert (tmp_path / "share" / "file").read_bytes() == b"on" + DATA[2:]
