"""A flush, and what is written or cut while its calls are under way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.volumes import Mounted, mounted
from wbcache.filesystem import Changes
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
