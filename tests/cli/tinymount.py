"""The smallest mount that the table shows as ours, in a process a test can stop and kill."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyfuse3
import trio

from wbcache.errors import WbcacheError
from wbcache.mounts import mount_at, read_mounts, unmount


@contextmanager
def tiny_mount(mountpoint: Path) -> Iterator[int]:
    """Mount at an existing directory; the process id of the daemon."""
    reading, writing = os.pipe()
    daemon = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.tinymount", str(mountpoint), str(writing)],
        pass_fds=[writing],
    )
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"r", "the tiny mount did not come up"
        yield daemon.pid
    finally:
        os.close(reading)
        daemon.send_signal(signal.SIGCONT)
        daemon.kill()
        daemon.wait()
        while mount_at(str(mountpoint), read_mounts()) is not None:
            try:
                unmount(str(mountpoint), lazy=True)
            except WbcacheError:
                break


class EmptyDirectory(pyfuse3.Operations):
    """A root directory with nothing in it."""

    async def getattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = inode
        attributes.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o755)
        attributes.st_nlink = 2
        # The kernel answers stat from memory, also when the daemon is long dead.
        attributes.attr_timeout = 3600
        return attributes

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        return pyfuse3.StatvfsData()

    async def opendir(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileHandleT:
        return pyfuse3.FileHandleT(1)

    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        raise pyfuse3.FUSEError(2)


async def _serve(ready: int) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        os.write(ready, b"r")


def _main(mountpoint: str, ready: int) -> None:
    # No `allow_other`, so that it works for any user.
    pyfuse3.init(EmptyDirectory(), mountpoint, {"fsname=tiny share", "subtype=wbcache"})
    try:
        trio.run(_serve, ready)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
