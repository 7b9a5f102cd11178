"""The program behind /sbin/umount.fuse.wbcache, which umount(8) runs for our mounts.

umount(8) calls it as `umount.fuse.wbcache MOUNTPOINT [-flnrv] [-N NAMESPACE] [-t TYPE]`. It does
what `wbcache umount` does, so that a bare `umount` returns when the share has everything. The
unmounting itself goes through the system call: umount(8) would come back here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from wbcache.cli import run
from wbcache.cli.umount import umount
from wbcache.errors import UsageError
from wbcache.mounts import canonical, unmount
from wbcache.processes import speak_utf8


def helper(arguments: Sequence[str]) -> None:
    """Do what umount(8) asks for."""
    mountpoint: str | None = None
    lazy = False
    waiting = iter(arguments)
    for argument in waiting:
        if not argument.startswith("-"):
            mountpoint = argument
        elif argument in ("-t", "-N"):
            next(waiting, None)
        else:
            # -f is left out on purpose: it would abort the connection under the daemon.
            lazy = lazy or "l" in argument
    if mountpoint is None:
        raise UsageError("umount.fuse.wbcache", "no mount point is given", "umount(8) runs it")
    if lazy:
        unmount(canonical(mountpoint), lazy=True)
    else:
        umount.main([mountpoint], standalone_mode=False)


if __name__ == "__main__":
    speak_utf8("wbcache.cli.umount_helper")
    sys.exit(run(lambda: helper(sys.argv[1:])))
