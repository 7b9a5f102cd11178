"""Directories in directories, far beyond what one path can name."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounting import NEVER_BY_ITSELF, Mounted
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fuse")]

NAME = b"a-directory-of-directories"
LEVELS = [300, pytest.param(1000, marks=pytest.mark.slow)]


@contextlib.contextmanager
def opened(top: Path, name: bytes, levels: int, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the innermost directory, reached step by step."""
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for level in range(levels):
            own = NAME if level else name
            if make:
                os.mkdir(own, dir_fd=fd)
            below = os.open(own, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def put(fd: int, name: str, text: str) -> None:
    with open(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, dir_fd=fd), "w") as file:
        file.write(text)


def get(fd: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY, dir_fd=fd)) as file:
        return file.read()


def depth(top: Path, name: bytes) -> int:
    """How deep it goes, names listed on the way."""
    fd, levels = os.open(top, os.O_RDONLY | os.O_DIRECTORY), 0
    try:
        while os.fsdecode(name) in os.listdir(fd):
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd, name = below, NAME
            levels += 1
    finally:
        os.close(fd)
    return levels


def remove(top: Path, name: bytes, levels: int) -> None:
    """rm -r, without recursion: what is innermost first."""
    fds = [os.open(top, os.O_RDONLY | os.O_DIRECTORY)]
    names = [name] + [NAME] * (levels - 1)
    for own in names:
        fds.append(os.open(own, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fds[-1]))
    try:
        for fd, own in zip(reversed(fds[:-1]), reversed(names), strict=True):
            inner = fds.pop()
            for left in os.listdir(inner):
                os.unlink(left, dir_fd=inner)
            os.close(inner)
            os.rmdir(own, dir_fd=fd)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("levels", LEVELS)
def test_deep_paths(tmp_path: Path, levels: int) -> None:
    share = tmp_path / "share"
    with Mounted(share, config=NEVER_BY_ITSELF) as mount:
        with opened(mount.path, b"top", levels, make=True) as fd:
            put(fd, "file", "made")
            os.symlink("file", "link", dir_fd=fd)
        # The longest path that a call may take ends far above.
        with pytest.raises(OSError) as caught:
            os.stat(os.path.join(mount.path, b"top".decode(), *[NAME.decode()] * (levels - 1)))
        assert caught.value.errno == errno.ENAMETOOLONG
        os.rename(mount.path / "top", mount.path / "renamed")
        pending = mount.client.pending()
        assert len(pending) == levels + 2
        mount.flush(timeout=120)
        assert depth(share, b"renamed") == levels
        with opened(share, b"renamed", levels) as fd:
            assert get(fd, "file") == "made"

        # Renamed at the top while something at the bottom is dirty.
        with opened(mount.path, b"renamed", levels) as fd:
            put(fd, "file", "changed")
            put(fd, "new", "new")
        os.rename(mount.path / "renamed", mount.path / "again")
        mount.kill()
        mount.remount()
        mount.flush(timeout=120)
        with opened(share, b"again", levels) as fd:
            assert (get(fd, "file"), get(fd, "new")) == ("changed", "new")
        assert mount.umount().returncode == 0

    # With a new cache, from the share alone.
    with Mounted(share, config=NEVER_BY_ITSELF) as mount:
        assert depth(mount.path, b"again") == levels
        with opened(mount.path, b"again", levels) as fd:
            assert get(fd, "file") == "changed"
            put(fd, "file", "once more")
            with open(os.open("new", os.O_APPEND | os.O_WRONLY, dir_fd=fd), "a") as file:
                file.write(" and longer")
        mount.flush(timeout=120)
        with opened(share, b"again", levels) as fd:
            assert (get(fd, "file"), get(fd, "new")) == ("once more", "new and longer")
        os.rename(mount.path / "again", mount.path / "top")
        remove(mount.path, b"top", levels)
        assert os.listdir(mount.path) == []
        mount.flush(timeout=120)
        assert os.listdir(share) == [".wbcache"]

        # Made, and removed as a whole, by somebody else.
        with opened(share, b"theirs", levels, make=True) as fd:
            put(fd, "file", "theirs")
        wait_until((mount.path / "theirs").exists, "the mount shows it")
        assert depth(mount.path, b"theirs") == levels
        remove(share, b"theirs", levels)
        wait_until(lambda: os.listdir(mount.path) == [], "the mount sees that it has gone")
        assert mount.umount().returncode == 0
