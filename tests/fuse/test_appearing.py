"""A name appears on the share between two requests of the kernel for one open(O_CREAT)."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from pyfuse3 import FUSEError

from tests.volumes import QUICK, mounted
from wbcache.fuse import Operations

ROOT: Any = 1
CONTEXT: Any = SimpleNamespace(uid=0, gid=0, umask=0o022)


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[Operations]:
    (tmp_path / "share").mkdir()
    config = replace(QUICK, share=replace(QUICK.share, dir_ttl=0.1))
    async with mounted(str(tmp_path / "share"), str(tmp_path / "cache"), config=config) as mount:
        operations = Operations(mount.filesystem)
        try:
            yield operations
        finally:
            operations.close()


async def is_missing(operations: Operations, name: Any) -> bool:
    try:
        await operations.lookup(ROOT, name, CONTEXT)
    except FUSEError as error:
        return error.errno == errno.ENOENT
    return False


@pytest.mark.parametrize("extra", [0, os.O_TRUNC, os.O_EXCL])
async def test_the_kernel_is_told_to_look_again(tmp_path: Path, extra: int) -> None:
    """It has checked no permissions; what it would be told of the size may be a guess."""
    name: Any = b"theirs"
    mode: Any = 0o644
    flags: Any = os.O_WRONLY | os.O_CREAT | extra
    async with serving(tmp_path) as operations:
        assert await is_missing(operations, name)
        (tmp_path / "share" / "theirs").write_bytes(b"of another machine")
        (tmp_path / "share" / "theirs").chmod(0o600)
        with trio.fail_after(20):
            while await is_missing(operations, name):
                await trio.sleep(0.05)
        with pytest.raises(FUSEError) as caught:
            await operations.create(ROOT, name, mode, flags, CONTEXT)
        assert caught.value.errno == (errno.EEXIST if extra == os.O_EXCL else errno.ESTALE)
        found = await operations.lookup(ROOT, name, CONTEXT)
        assert (found.st_size, found.st_mode & 0o777) == (18, 0o600)
    assert (tmp_path / "share" / "theirs").read_bytes() == b"of another machine"
