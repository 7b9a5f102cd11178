"""One directory of the share hangs, and the rest of it answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faultshare.client import FaultShare
from tests.mounting import Mounted, contents
from tests.waiting import wait_until

pytestmark = [pytest.mark.usefixtures("fuse"), pytest.mark.timeout(120)]

CONFIG = {
    "share": {"lookup_deadline": "500ms", "deadline": "3s", "attr_ttl": "100ms", "dir_ttl": "1h"}
}


@pytest.fixture
def share(tmp_path: Path) -> Iterator[FaultShare]:
    for directory in ("hangs", "answers"):
        (tmp_path / directory).mkdir()
        for number in range(100):
            (tmp_path / directory / f"{number}").write_text(directory)
    with FaultShare(tmp_path) as share:
        yield share


def outcome(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        return error.strerror or ""


def test_what_is_asked_of_others_is_answered(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=CONFIG) as mount, ThreadPoolExecutor(100) as pool:
        top = mount.path
        assert sorted(os.listdir(top)) == ["answers", "hangs"]
        share.hang(None, match="hangs/*")
        names = [top / "hangs" / f"{number}" for number in range(100)]
        assert set(pool.map(outcome, names)) == {"Connection timed out"}
        # They are asked about again and again, and what was given up still hangs.
        asking = threading.Event()

        def ask(path: Path) -> None:
            while not asking.is_set():
                outcome(path)

        waits = [pool.submit(ask, path) for path in names[:10]]
        try:
            for number in range(100):
                assert outcome(top / "answers" / f"{number}") == "answers"
        finally:
            asking.set()
        for wait in waits:
            wait.result()
        state = mount.status()["share"]
        assert state["calls_given_up"] <= 150
        wait_until(lambda: "some calls are not answered" in mount.log(), "it is told")
        share.clear()
        share.release()
        wait_until(lambda: not mount.status()["share"]["calls_given_up"], "all calls end")
        assert [outcome(path) for path in names] == ["hangs"] * 100


def test_files_that_hang_while_they_are_read(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=CONFIG) as mount, ThreadPoolExecutor(50) as pool:
        top = mount.path
        os.listdir(top / "hangs"), os.listdir(top / "answers")
        share.hang(["read"], match="hangs/*")
        reads = [pool.submit(outcome, top / "hangs" / f"{number}") for number in range(50)]
        share.wait_hung(count=32)
        for number in range(100):
            assert outcome(top / "answers" / f"{number}") == "answers"
        assert {read.result() for read in reads} == {"Connection timed out"}
        share.clear()
        share.release()


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_the_rest_is_flushed(share: FaultShare, tmp_path: Path, large: bool) -> None:
    data = bytes(2 << 20) if large else b"new"
    with Mounted(share.mountpoint, config=CONFIG) as mount:
        top = mount.path
        share.hang(["create", "open", "write", "rename"], match="hangs/*")
        for number in range(50):
            (top / "hangs" / f"new-{number}").write_bytes(data)
        share.wait_hung()
        for number in range(10):
            (top / "answers" / f"new-{number}").write_bytes(data)
        arrived = [tmp_path / "answers" / f"new-{number}" for number in range(10)]
        wait_until(lambda: all(path.exists() for path in arrived), "they arrive", 60)
        assert mount.status()["dirty_files"] == 50
        share.clear()
        share.release()
        mount.flush()
        assert contents(tmp_path) == contents(top)


def test_files_that_hang_while_they_are_closed(share: FaultShare, tmp_path: Path) -> None:
    """The share's client may ask the server at each close; nobody waits for that."""
    with Mounted(share.mountpoint, config=CONFIG) as mount, ThreadPoolExecutor(1) as pool:
        top = mount.path
        for number in range(3):
            os.mkdir(top / f"made-{number}")
        files = [open(top / "hangs" / f"{number}") for number in range(3)]  # noqa: SIM115
        for file in files:
            assert file.read() == "hangs"
        share.hang(["flush"], match="hangs/*")
        for file in files:
            file.close()
        share.wait_hung("flush", count=3)
        for number in range(3):
            written = pool.submit((top / f"made-{number}" / "file").write_text, "goes on")
            assert written.result(10)
        wait_until((tmp_path / "made-0" / "file").exists, "it is flushed")
        share.clear()
        share.release()
        mount.flush()
        assert contents(tmp_path) == contents(top)


def test_that_everything_hangs_is_noticed_though_something_did_before(share: FaultShare) -> None:
    with Mounted(share.mountpoint, config=CONFIG) as mount:
        top = mount.path
        assert sorted(os.listdir(top)) == ["answers", "hangs"]
        share.hang(None, match="hangs/*")
        assert outcome(top / "hangs" / "0") == "Connection timed out"
        wait_until(lambda: outcome(top / "answers" / "0") == "answers", "the rest answers")
        wait_until(lambda: "some calls are not answered" in mount.log(), "it is told")
        share.hang()

        def is_noticed() -> bool:
            outcome(top / "answers" / "1")
            return bool(mount.status()["share"]["state"] == "not answering")

        wait_until(is_noticed, "the share does not answer", 30)
        share.clear()
        share.release()
        wait_until(lambda: outcome(top / "answers" / "1") == "answers", "it answers again", 30)
