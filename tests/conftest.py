"""What every test relies on: a real disk for temporary files, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from wbcache.errors import WbcacheError
from wbcache.mounts import canonical, is_below, mount_of, read_mounts, unmount

TEST_FILE_SYSTEMS = ("fuse.wbcache", "fuse.faultshare", "fuse.sshfs")
SESSION_MARK = "WBCACHE_TEST_SESSION"
"""In the environment of everything that the tests start, so that it can be told from the rest."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary files off tmpfs: a cache there is refused, as it should be."""
    place = mount_of(canonical(tempfile.gettempdir()), read_mounts())
    if place is not None and place.is_memory:
        os.environ["TMPDIR"] = "/var/tmp"
        tempfile.tempdir = None


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the run, and clean up, when a mount or a process outlives the tests."""
    os.environ[SESSION_MARK] = mark = uuid.uuid4().hex
    # Others may be testing at the same time: what is below these is ours.
    own = tempfile.mkdtemp(prefix="wbcache-tests-")
    places = [canonical(str(tmp_path_factory.getbasetemp())), canonical(own)]
    os.chmod(own, 0o755)  # other users get to the mount points
    before, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), own
    tempfile.tempdir = None
    yield
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
    mounts = [
        entry
        for entry in read_mounts()
        if entry.fstype in TEST_FILE_SYSTEMS
        and any(is_below(entry.mountpoint, place) for place in places)
    ]
    # A daemon that is told to end unmounts by itself; what is still mounted then is detached.
    processes = _processes_marked(mark)
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for entry in reversed(mounts):
        with contextlib.suppress(WbcacheError):
            unmount(entry.mountpoint, lazy=True)
    if not any(is_below(entry.mountpoint, own) for entry in read_mounts()):
        shutil.rmtree(own)
    left = [f"{entry.fstype} at {entry.mountpoint}" for entry in mounts]
    left += [f"process {pid}: {command}" for pid, command in processes.items()]
    assert not left, "left behind by the tests: " + "; ".join(left)


@pytest.fixture(autouse=True)
def same_working_directory() -> Iterator[None]:
    """Fail a test that leaves another working directory to those after it, and go back."""
    before = os.getcwd()
    yield
    after = os.getcwd()
    os.chdir(before)
    assert after == before


@pytest.fixture
def fuse() -> None:
    """For tests that mount. They are skipped only where the kernel has no FUSE device."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")


@pytest.fixture
def plain_user_dir() -> Iterator[Path]:
    """A directory of the user `tests.plain_user.PLAIN_UID`, reachable by them, on a real disk."""
    from tests.plain_user import PLAIN_GID, PLAIN_UID

    # Temporary directories of pytest can be entered by their owner only.
    with tempfile.TemporaryDirectory(prefix="wbcache-plain-") as name:
        os.chown(name, PLAIN_UID, PLAIN_GID)
        yield Path(name)


def _processes_marked(mark: str) -> dict[int, str]:
    """Processes of this test session other than this one, once those that are ending have ended."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not _marked_now(mark), "the tests' processes end", deadline=5)
    return _marked_now(mark)


def _marked_now(mark: str) -> dict[int, str]:
    found = {}
    wanted = f"{SESSION_MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                command = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(name)] = command.decode("utf-8", "replace").strip()
    return found
