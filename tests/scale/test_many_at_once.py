"""Very many descriptors, names of one file, and links to one file."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import NEVER_BY_ITSELF, Mounted, contents
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("fuse")]


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with Mounted(tmp_path_factory.mktemp("many") / "share", config=NEVER_BY_ITSELF) as mounted:
        yield mounted


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_open_descriptors(mount: Mounted, count: int) -> None:
    """Written through, read through, of files here and of files that only the share has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + 200:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    top = mount.path / f"open-{count}"
    top.mkdir()
    mount.flush()
    behind = mount.source / top.name
    for number in range(count // 2):
        (behind / f"share-{number}").write_bytes(b"share %d" % number)
    wait_until(lambda: len(os.listdir(top)) == count // 2, "the mount shows them")
    fds = []
    try:
        for number in range(count // 2):
            fds.append(os.open(top / f"here-{number}", os.O_CREAT | os.O_RDWR))
            os.write(fds[-1], b"here %d" % number)
        for number in range(count // 2):
            fds.append(os.open(top / f"share-{number}", os.O_RDONLY))
        for number, fd in enumerate(fds):
            name = "here" if number < count // 2 else "share"
            assert os.pread(fd, 100, 0) == f"{name} {number % (count // 2)}".encode()
        for fd in fds[: count // 2]:
            os.write(fd, b", and more")
        # One more is no trouble, nor is the flush.
        (top / "one more").write_bytes(b"text")
        mount.flush(f"{top.name}/one more")
        assert (behind / "one more").read_bytes() == b"text"
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    mount.flush(timeout=300)
    for number in range(0, count // 2, 97):
        assert (behind / f"here-{number}").read_bytes() == b"here %d, and more" % number


@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_names_of_one_file(mount: Mounted, count: int) -> None:
    top = mount.path / f"names-{count}"
    top.mkdir()
    (top / "file").write_bytes(b"text")
    began = time.monotonic()
    for number in range(count):
        os.link(top / "file", top / f"name-{number}")
    took = time.monotonic() - began
    assert os.stat(top / "file").st_nlink == count + 1
    (top / "file").write_bytes(b"other text")
    began = time.monotonic()
    mount.flush(timeout=600)
    print(f"{count} links: {took:.1f} s, flushed in {time.monotonic() - began:.1f} s")
    behind = mount.source / top.name
    assert os.stat(behind / "file").st_nlink == count + 1
    assert (behind / f"name-{count - 1}").read_bytes() == b"other text"
    for number in range(count - 1):
        os.unlink(top / f"name-{number}")
    os.rename(top / f"name-{count - 1}", top / "last")
    mount.flush(timeout=600)
    assert sorted(os.listdir(behind)) == ["file", "last"]
    assert os.path.samefile(behind / "file", behind / "last")


def test_more_names_than_the_share_allows(tmp_path: Path) -> None:
    """It is told and does not hold up anything else; with fewer it arrives."""
    (tmp_path / "backing").mkdir()
    with FaultShare(tmp_path / "backing") as share:
        with Mounted(share.mountpoint, config=NEVER_BY_ITSELF) as mount:
            (mount.path / "file").write_bytes(b"text")
            mount.flush()
            share.fail(["link"], errno.EMLINK)
            os.link(mount.path / "file", mount.path / "one too many")
            (mount.path / "other").write_bytes(b"text")
            remaining = mount.client.flush([b""], 20.0)
            assert [row["reason"] for row in remaining] == [os.strerror(errno.EMLINK)]
            assert (share.backing / "other").read_bytes() == b"text"
            os.unlink(mount.path / "one too many")
            mount.flush()
            assert mount.umount().returncode == 0


@pytest.mark.parametrize("count", [1_000, pytest.param(5_000, marks=pytest.mark.slow)])
def test_links_to_one_file(mount: Mounted, count: int) -> None:
    top = mount.path / f"links-{count}"
    top.mkdir()
    (top / "file").write_bytes(b"text")
    for number in range(count):
        os.symlink("file", top / f"link-{number}")
    mount.flush(timeout=600)
    behind = mount.source / top.name
    assert len(os.listdir(behind)) == count + 1
    assert (behind / f"link-{count - 1}").read_bytes() == b"text"
    assert contents(top) == contents(behind)
