"""A container started while the mount was there has a copy of it, which `umount` does not reach."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mounting import Mounted
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.usefixtures("fuse"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mount namespaces here"),
]


def test_umount_ends_the_daemon_though_another_namespace_has_the_mount(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    unshare = shutil.which("unshare")
    assert unshare is not None
    with Mounted(tmp_path / "share") as mount:
        (mount.path / "file").write_bytes(b"content")
        sleeper = subprocess.Popen([unshare, "--mount", "sleep", "600"])
        try:
            own = os.readlink("/proc/self/ns/mnt")
            link = f"/proc/{sleeper.pid}/ns/mnt"
            wait_until(lambda: os.readlink(link) != own, "the other namespace is there")
            done = mount.umount()
            assert done.returncode == 0, done.stderr
        finally:
            sleeper.kill()
            sleeper.wait()
    assert (tmp_path / "share" / "file").read_bytes() == b"content"
