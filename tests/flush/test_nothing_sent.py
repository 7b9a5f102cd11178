"""A change in place that failed before it began explains nothing of what the share shows later."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.volumes import mounted
from wbcache.flush import blocking

MIB = 1 << 20
THEIRS = b"theirs" * 50


@pytest.mark.parametrize("kind", ["grow", "patch"])
async def test_another_writer_after_a_failed_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    size = 1000 if kind == "grow" else 65 * MIB  # a large file is patched rather than replaced
    at = size if kind == "grow" else 100
    async with mounted(str(share), str(tmp_path / "cache")) as mount:
        files, root = mount.filesystem.files, mount.volume.tree.root
        node = await mount.filesystem.names.create(root, b"file", 0o644, os.getuid(), os.getgid())
        handle = files.open(node, os.O_WRONLY)
        for start in range(0, size, MIB):
            await files.write(node, start, b"a" * min(MIB, size - start))
        await mount.drain()
        mount.flusher.timing.all_due = False
        open_for_update, tries, broken = blocking.open_for_update, trio.Event(), True

        def fail(*args: Any) -> Any:
            if broken:
                trio.from_thread.run_sync(tries.set)
                raise OSError(errno.EIO, "not now")
            return open_for_update(*args)

        monkeypatch.setattr(blocking, "open_for_update", fail)
        await files.write(node, at, b"ours" * 250)
        files.release(handle)
        with trio.fail_after(20):
            await tries.wait()
        with open(share / "file", "r+b") as file:
            file.seek(at)
            file.write(THEIRS)
        broken = False
        await mount.drain()
        found = {path.name: path.read_bytes()[at:][:1000] for path in share.iterdir()}
        assert found.pop("file").startswith(THEIRS)
        assert list(found.values()) == [b"ours" * 250]
        assert len(mount.volume.conflicts.standing()) == 1
