"""Descriptors on the share are closed as soon as nothing needs them, garbage collector or not."""

from __future__ import annotations

import errno
import gc
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tests.volumes import QUICK, Mounted, mounted
from tests.waiting import DEADLINE, wait_until_async
from wbcache.config import ShareConfig
from wbcache.node import Directory
from wbcache.share import calls
from wbcache.share.descriptor import Descriptor


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """In a daemon it is nearly as rare."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def share(tmp_path: Path) -> str:
    (tmp_path / "share").mkdir()
    return str(tmp_path / "share")


def _open_below(directory: str) -> list[str]:
    """Paths of open descriptors below a directory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(directory + "/"):
            found.append(target)
    return found


async def test_a_call_that_fails_keeps_none_open(share: str, tmp_path: Path) -> None:
    (tmp_path / "share" / "file").touch()
    async with mounted(share, str(tmp_path / "cache")) as mount:

        def fail(file: Descriptor) -> None:
            raise OSError(errno.EIO, f"no answer for {file.fd}")

        for call in (mount.volume.share.work, mount.volume.share.look, mount.volume.share.fetch):
            with pytest.raises(OSError, match="no answer"):
                await call(fail, Descriptor(os.open(f"{share}/file", os.O_RDONLY)))
            await wait_until_async(lambda: not _open_below(share), "it is closed")


async def test_one_that_fails_when_nobody_waits_any_more(share: str, tmp_path: Path) -> None:
    (tmp_path / "share" / "file").touch()
    answer = threading.Event()
    config = replace(QUICK, share=ShareConfig(lookup_deadline=0.05, deadline=0.1))
    async with mounted(share, str(tmp_path / "cache"), config=config) as mount:

        def fail(file: Descriptor) -> None:
            answer.wait(DEADLINE)
            raise OSError(errno.EIO, f"no answer for {file.fd}")

        with pytest.raises(TimeoutError):
            await mount.volume.share.look(fail, Descriptor(os.open(f"{share}/file", os.O_RDONLY)))
        assert _open_below(share)
        answer.set()
        await wait_until_async(lambda: not _open_below(share), "it is closed")


async def _make(mount: Mounted) -> Directory:
    """A directory, on the share."""
    root = mount.volume.tree.root
    made = await mount.filesystem.names.mkdir(root, b"made", stat.S_IFDIR | 0o755, 0, 0)
    assert isinstance(made, Directory)
    await mount.drain()
    return made


async def test_a_directory_that_is_gone_is_closed(share: str, tmp_path: Path) -> None:
    async with mounted(share, str(tmp_path / "cache")) as mount:
        names, made = mount.filesystem.names, await _make(mount)
        await names.create(made, b"file", 0o644, 0, 0)
        await mount.drain()
        assert _open_below(share) == [f"{share}/made"]
        await names.unlink(made, b"file")
        await names.rmdir(mount.volume.tree.root, b"made")
        await mount.drain()
        assert os.listdir(share) == []
        await wait_until_async(lambda: not _open_below(share), "it is closed")


async def test_one_that_goes_while_it_is_opened_is_not_kept(
    share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, go_on = threading.Event(), threading.Event()
    open_chain = calls.open_chain

    def slowly(base: Descriptor, names: tuple[bytes, ...]) -> list[Descriptor]:
        found = open_chain(base, names)
        opened.set()
        go_on.wait(DEADLINE)
        return found

    async with mounted(share, str(tmp_path / "cache")) as mount:
        made = await _make(mount)
        assert made.share_dirfd is None
        monkeypatch.setattr(calls, "open_chain", slowly)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.volume.share.directory, made)
            await wait_until_async(opened.is_set, "it is opened")
            await mount.filesystem.names.rmdir(mount.volume.tree.root, b"made")
            await mount.drain()
            go_on.set()
        await wait_until_async(lambda: not _open_below(share), "it is closed")


async def test_a_listing_without_an_answer_keeps_none_open(
    share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()

    def late(directory: Descriptor, found: list[calls.Entry]) -> list[calls.Entry]:
        answer.wait(DEADLINE)
        return found

    config = replace(QUICK, share=ShareConfig(lookup_deadline=0.2, deadline=0.1))
    os.mkdir(f"{share}/theirs")
    async with mounted(share, str(tmp_path / "cache"), config=config) as mount:
        root = mount.volume.tree.root
        theirs = await mount.filesystem.names.lookup(root, b"theirs")
        assert isinstance(theirs, Directory)
        monkeypatch.setattr(calls, "scan", late)
        with pytest.raises(TimeoutError):
            await mount.filesystem.listings.complete(theirs)
        answer.set()
        mount.volume.share.drop_directory(theirs)
        await wait_until_async(lambda: not _open_below(share), "it is closed")
