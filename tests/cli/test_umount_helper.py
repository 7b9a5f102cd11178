"""The program that umount(8) runs for our mounts."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.tinymount import tiny_mount
from wbcache.mounts import mount_at, read_mounts

ROOT = Path(__file__).parents[2]
INSTALLER = ROOT / "mount-scripts" / "install-umount-helper.sh"
# As umount(8) has it: nothing of the caller's, and no virtual environment on the path.
BARE = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mount point"
    path.mkdir()
    yield path
    assert mount_at(str(path), read_mounts()) is None


def install(tmp_path: Path, python: str = sys.executable) -> Path:
    helper = tmp_path / "umount.fuse.wbcache"
    environment = {**os.environ, "WBCACHE_HELPER": str(helper)}
    subprocess.run(["bash", INSTALLER, python], check=True, env=environment, cwd="/")
    return helper


def test_it_runs_without_the_environment_it_was_installed_from(
    fuse: None, tmp_path: Path, mountpoint: Path
) -> None:
    helper = install(tmp_path)
    assert stat.S_IMODE(helper.stat().st_mode) == 0o755
    with tiny_mount(mountpoint):
        subprocess.run([helper, mountpoint, "-l", "-n"], check=True, env=BARE, cwd="/", timeout=30)
        assert mount_at(str(mountpoint), read_mounts()) is None


def test_it_ends_like_wbcache_umount(fuse: None, tmp_path: Path, mountpoint: Path) -> None:
    helper = install(tmp_path)
    with tiny_mount(mountpoint):
        # A daemon that is not registered cannot be asked what remains.
        result = subprocess.run(
            [helper, mountpoint, "-f", "-v", "-t", "fuse.wbcache"],
            check=False,
            env=BARE,
            cwd="/",
            timeout=30,
            capture_output=True,
            text=True,
        )
        assert mount_at(str(mountpoint), read_mounts()) is None
    assert result.returncode == 3
    assert "unmounted, but its daemon cannot be asked" in result.stderr


def test_it_still_unmounts_when_wbcache_was_removed(
    fuse: None, tmp_path: Path, mountpoint: Path
) -> None:
    helper = install(tmp_path)
    text = helper.read_text().replace(sys.executable, "/nowhere/python")
    assert "/nowhere/python" in text
    helper.write_text(text)
    with tiny_mount(mountpoint):
        subprocess.run([helper, mountpoint], check=True, env=BARE, cwd="/", timeout=30)
        assert mount_at(str(mountpoint), read_mounts()) is None


def test_an_interpreter_without_wbcache_is_refused(tmp_path: Path) -> None:
    helper = tmp_path / "helper"
    result = subprocess.run(
        ["bash", INSTALLER, "/usr/bin/env"],
        check=False,
        env={**os.environ, "WBCACHE_HELPER": str(helper)},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "does not have wbcache installed" in result.stderr
    assert not helper.exists()
