"""Every fault, on a real mount."""

from __future__ import annotations

import errno
import functools
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faultshare.client import FaultShare, ShareError
from tests.faultshare.faults import UNAWAITED
from tests.faultshare.walk import EXCHANGE, NOREPLACE, Walk, outcome, rename_with, start


class Background:
    """A call made in a thread; `result` is what it returned or the errno it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except OSError as error:
            self.result = error.errno

    @property
    def waiting(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Any:
        self._thread.join(10)
        assert not self.waiting
        return self.result


def code(call: Callable[[], Any]) -> int:
    """The errno that a call fails with, 0 if it does not."""
    try:
        call()
    except OSError as error:
        return error.errno or -1
    return 0


def elapsed(call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


class TestSpeed:
    def test_every_call_takes_its_latency(self, share: FaultShare) -> None:
        (share.mountpoint / "f").write_text("x")
        begin = share.mark()
        share.set(latency_ms=40)
        assert elapsed(lambda: os.stat(share.mountpoint / "f")) >= 0.08, "root and file"
        for op in share.log(begin):
            if op.op in UNAWAITED:
                continue
            assert op.end is not None
            assert 0.038 < op.end - op.start < 0.2

    def test_calls_wait_side_by_side(self, share: FaultShare) -> None:
        for i in range(20):
            (share.mountpoint / f"d{i}").mkdir()
        share.set(latency_by_op={"readdir": 300})
        begin = time.monotonic()
        listings = [
            Background(functools.partial(os.listdir, share.mountpoint / f"d{i}")) for i in range(20)
        ]
        assert [listing.join() for listing in listings] == [[]] * 20
        assert time.monotonic() - begin < 3, "each takes at least 0.3 s"

    def test_iops(self, share: FaultShare) -> None:
        share.set(iops=200)
        begin = share.mark()
        took = elapsed(lambda: [os.stat(share.mountpoint) for _ in range(30)])
        calls = share.mark() - begin
        assert took >= calls / 200 - 0.1

    def test_bandwidth_is_shared_by_both_directions(self, share: FaultShare) -> None:
        path = share.mountpoint / "f"
        share.set(bandwidth_mb=20)
        assert 0.19 < elapsed(lambda: path.write_bytes(bytes(4_000_000))) < 2
        assert 0.19 < elapsed(path.read_bytes) < 2
        share.clear()
        assert elapsed(lambda: path.write_bytes(bytes(4_000_000))) < 0.19


class TestHang:
    def test_a_hung_call_takes_effect_on_release(self, share: FaultShare) -> None:
        (share.mountpoint / "tmp").write_text("x")
        share.hang(["rename"], match="*.ckpt")
        os.rename(share.mountpoint / "tmp", share.mountpoint / "other")
        call = Background(
            lambda: os.rename(share.mountpoint / "other", share.mountpoint / "a.ckpt")
        )
        (hung,) = share.wait_hung("rename")
        assert (hung.path, hung.late) == ("other", False)
        assert os.listdir(share.backing) == ["other"]
        assert share.release() == 1
        assert call.join() is None
        assert os.listdir(share.backing) == ["a.ckpt"]

    def test_a_hung_call_can_fail_without_effect(self, share: FaultShare) -> None:
        share.hang(["mkdir"])
        call = Background(lambda: os.mkdir(share.mountpoint / "d"))
        share.wait_hung()
        share.release(late=False, errno=errno.ETIMEDOUT)
        assert call.join() == errno.ETIMEDOUT
        assert os.listdir(share.backing) == []
        op = share.log()[-1]
        assert (op.op, op.errno, op.effect) == ("mkdir", errno.ETIMEDOUT, False)

    def test_only_the_answer_hangs(self, share: FaultShare) -> None:
        share.hang(["mkdir"], after=True)
        call = Background(lambda: os.mkdir(share.mountpoint / "d"))
        (hung,) = share.wait_hung("mkdir")
        assert hung.late
        assert os.listdir(share.backing) == ["d"]
        assert share.wait_for("mkdir").end is None
        share.release()
        assert call.join() is None
        assert share.wait_for("mkdir").end is not None

    def test_everything_hangs_but_the_control_socket(self, share: FaultShare) -> None:
        share.hang()
        calls = [Background(lambda: os.stat(share.mountpoint)) for _ in range(60)]
        share.wait_hung("getattr", count=1)
        begin = time.monotonic()
        for _ in range(50):
            share.mark()
        assert time.monotonic() - begin < 1
        share.release()
        assert all(isinstance(call.join(), os.stat_result) for call in calls)

    def test_many_hung_reads_do_not_hold_up_others(self, share: FaultShare) -> None:
        for i in range(100):
            (share.mountpoint / f"hung{i}").write_bytes(bytes(300_000))
        (share.mountpoint / "free").write_bytes(b"free")
        share.hang(["read"], match="hung*")
        reads = [Background((share.mountpoint / f"hung{i}").read_bytes) for i in range(100)]
        share.wait_hung("read", count=100)
        assert elapsed((share.mountpoint / "free").read_bytes) < 2
        share.release()
        assert {len(read.join()) for read in reads} == {300_000}

    def test_hang_the_next_call_only_and_by_rule(self, share: FaultShare) -> None:
        one = share.hang(["mkdir"], times=1)
        two = share.hang(["symlink"])
        first = Background(lambda: os.mkdir(share.mountpoint / "1"))
        share.wait_hung("mkdir")
        # The kernel holds the directory while the first call is under way.
        share.release(one)
        first.join()
        os.mkdir(share.mountpoint / "2")
        link = Background(lambda: os.symlink("x", share.mountpoint / "l"))
        assert share.wait_hung("symlink")[0].rule == two
        share.clear(two)
        link.join()
        assert sorted(os.listdir(share.backing)) == ["1", "2", "l"]

    def test_a_call_on_its_way_is_caught(self, share: FaultShare) -> None:
        share.set(latency_by_op={"mkdir": 400})
        call = Background(lambda: os.mkdir(share.mountpoint / "d"))
        share.wait_for("lookup", "d", errno=errno.ENOENT)
        share.hang(["mkdir"])
        share.wait_hung("mkdir")
        assert os.listdir(share.backing) == []
        share.release()
        call.join()

    def test_release_of_nothing(self, share: FaultShare) -> None:
        assert share.release() == 0
        assert share.hung() == []
        with pytest.raises(ShareError, match="in vain"):
            share.wait_hung(timeout=0.05)


class TestErrors:
    def test_errors_by_name_and_number(self, share: FaultShare) -> None:
        share.fail(["create"], errno.EACCES, match="*.bin", times=2)
        codes = [code((share.mountpoint / f"{i}.bin").touch) for i in range(3)]
        assert codes == [errno.EACCES, errno.EACCES, 0]
        assert code((share.mountpoint / "f.txt").touch) == 0

    def test_a_lost_answer(self, share: FaultShare) -> None:
        (share.mountpoint / "tmp").write_text("x")
        share.fail(["rename"], errno.EIO, after=True, times=1)
        assert (
            code(lambda: os.rename(share.mountpoint / "tmp", share.mountpoint / "f")) == errno.EIO
        )
        assert os.listdir(share.backing) == ["f"]
        op = share.log()[-1]
        assert (op.op, op.path, op.path2, op.errno, op.effect) == ("rename", "tmp", "f", 5, True)

    @pytest.mark.parametrize("op", ["create", "open", "opendir", "lookup", "mkdir", "symlink"])
    def test_lost_answers_leak_nothing(self, share: FaultShare, op: str) -> None:
        path = share.mountpoint / "f"
        if op in ("open", "lookup"):
            (share.backing / "f").touch()
        calls: dict[str, Callable[[], Any]] = {
            "create": lambda: path.open("x").close(),
            "open": lambda: path.open().close(),
            "opendir": lambda: os.listdir(share.mountpoint),
            "lookup": path.stat,
            "mkdir": path.mkdir,
            "symlink": lambda: path.symlink_to("x"),
        }
        share.fail([op], errno.EIO, after=True)
        descriptors = []
        for _ in range(5):
            assert {code(calls[op]) for _ in range(10)} <= {errno.EIO, errno.EEXIST}
            descriptors.append(len(os.listdir(f"/proc/{share.pid}/fd")))
        assert max(descriptors) - min(descriptors) <= 1
        share.clear()
        assert code(path.lstat) in (0, errno.ENOENT)

    def test_a_lost_write(self, share: FaultShare) -> None:
        share.lose("f", times=1)
        (share.mountpoint / "f").write_text("gone")
        assert (share.backing / "f").read_text() == ""
        op = share.wait_for("write")
        assert (op.errno, op.effect, op.size) == (0, False, 4)
        assert share.counts().bytes_written == 0

    def test_failing_fsync_and_close(self, share: FaultShare) -> None:
        with (share.mountpoint / "f").open("wb", buffering=0) as file:
            share.fail(["fsync"], errno.EDQUOT, times=1)
            assert code(lambda: os.fsync(file.fileno())) == errno.EDQUOT
            share.fail(["flush"], errno.ENOSPC, times=1)
            other = os.dup(file.fileno())
            assert code(lambda: os.close(other)) == errno.ENOSPC

    def test_clearing_one_rule(self, share: FaultShare) -> None:
        rule = share.fail(["statfs"], errno.EIO)
        share.fail(["mkdir"], errno.EIO)
        share.clear(rule)
        assert code(lambda: os.statvfs(share.mountpoint)) == 0
        assert code(lambda: os.mkdir(share.mountpoint / "d")) == errno.EIO

    def test_nonsense_is_refused(self, share: FaultShare) -> None:
        before = share.mark()
        for nonsense in (
            lambda: share.fail(["wirte"]),
            lambda: share.fail(["write"], -5),
            lambda: share.lack("hardlinks"),
            lambda: share._ask("explode"),
            lambda: share._ask("set", colour="red"),
        ):
            with pytest.raises(ShareError):
                nonsense()
        assert share.mark() == before


class TestSpace:
    def test_quota_of_bytes(self, share: FaultShare) -> None:
        (share.mountpoint / "old").write_bytes(bytes(60_000))
        os.link(share.mountpoint / "old", share.mountpoint / "same")
        share.quota(bytes=100_000)
        assert share.usage() == (60_000, 1)
        new = share.mountpoint / "new"
        assert code(lambda: new.write_bytes(bytes(50_000))) == errno.EDQUOT
        assert new.stat().st_size == 0, "nothing of a refused write is stored"
        new.write_bytes(bytes(40_000))
        assert code(lambda: os.truncate(new, 40_001)) == errno.EDQUOT
        new.write_bytes(bytes(30_000))  # rewritten in place
        assert share.usage() == (90_000, 2)
        (share.mountpoint / "same").unlink()
        assert share.usage() == (90_000, 2), "the other link is still there"
        os.rename(new, share.mountpoint / "old")
        assert share.usage() == (30_000, 1)

    def test_an_open_file_keeps_its_space(self, share: FaultShare) -> None:
        share.quota(bytes=10_000)
        with (share.mountpoint / "f").open("wb", buffering=0) as file:
            file.write(bytes(8_000))
            (share.mountpoint / "f").unlink()
            assert share.usage() == (8_000, 1)
        share.wait_for("release")
        assert share.usage() == (0, 0)

    def test_quota_of_inodes(self, share: FaultShare) -> None:
        share.quota(inodes=3, errno=errno.ENOSPC)
        (share.mountpoint / "d").mkdir()
        (share.mountpoint / "l").symlink_to("d")
        (share.mountpoint / "f").touch()
        assert code((share.mountpoint / "g").touch) == errno.ENOSPC
        assert code((share.mountpoint / "e").mkdir) == errno.ENOSPC
        os.link(share.mountpoint / "f", share.mountpoint / "f2")
        (share.mountpoint / "l").unlink()
        (share.mountpoint / "g").touch()
        (share.mountpoint / "d").rmdir()
        assert share.usage() == (0, 2)

    def test_usage_is_what_a_new_count_gives(self, share: FaultShare) -> None:
        share.quota(bytes=10**9)
        start(share.mountpoint)
        walk = Walk(7)
        for _ in range(1500):
            outcome(walk.step()[1], share.mountpoint)
        counted = share.usage()
        share.quota(bytes=10**9)
        assert share.usage() == counted
        assert counted[0] > 0

    def test_statfs_answers_for_the_quota(self, share: FaultShare) -> None:
        share.quota(bytes=1_000_000 * 4096, inodes=50)
        (share.mountpoint / "f").write_bytes(bytes(10 * 4096))
        st = os.statvfs(share.mountpoint)
        assert (st.f_frsize * st.f_blocks, st.f_blocks - st.f_bavail) == (4_096_000_000, 10)
        assert (st.f_files, st.f_favail) == (50, 49)
        share.freeze_statfs()
        share.quota()
        assert os.statvfs(share.mountpoint).f_blocks == 1_000_000
        share.freeze_statfs(False)
        native = os.statvfs(share.backing)
        total = os.statvfs(share.mountpoint).f_blocks * 4096
        assert total == pytest.approx(native.f_blocks * native.f_frsize, rel=0.01)


class TestCapabilities:
    def test_what_a_share_may_lack(self, share: FaultShare) -> None:
        m = share.mountpoint
        (m / "f").touch()
        (m / "g").touch()
        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "symlink": (lambda: os.symlink("x", m / "l"), errno.EPERM),
            "link": (lambda: os.link(m / "f", m / "h"), errno.EPERM),
            "mknod": (lambda: os.mkfifo(m / "p"), errno.EPERM),
            "chmod": (lambda: os.chmod(m / "f", 0o600), errno.EPERM),
            "chown": (lambda: os.chown(m / "f", os.getuid(), os.getgid()), errno.EPERM),
            "utimens": (lambda: os.utime(m / "f", (1, 1)), errno.EPERM),
            "xattr": (lambda: os.setxattr(m / "f", "user.a", b"1"), errno.EOPNOTSUPP),
            "rename_flags": (lambda: rename_with(EXCHANGE, m / "f", m / "g"), errno.EINVAL),
        }
        assert {name: code(call) for name, (call, _) in calls.items()} == dict.fromkeys(calls, 0)
        share.lack(*calls)
        for name in ("h", "p", "l"):
            (m / name).unlink()
        expected = {name: error for name, (_, error) in calls.items()}
        assert {name: code(call) for name, (call, _) in calls.items()} == expected
        share.lack("link", errno=errno.EOPNOTSUPP)
        assert code(calls["link"][0]) == errno.EOPNOTSUPP
        os.rename(m / "f", m / "g")
        share.clear()
        assert code(lambda: rename_with(NOREPLACE, m / "g", m / "f")) == 0

    def test_open_files_cannot_be_removed(self, share: FaultShare) -> None:
        share.lack("open_unlink")
        path, other = share.mountpoint / "f", share.mountpoint / "g"
        other.touch()
        with path.open("w"):
            assert code(path.unlink) == errno.EBUSY
            assert code(lambda: os.rename(other, path)) == errno.EBUSY
        share.wait_for("release", "f")
        os.rename(other, path)

    def test_no_xattrs_from_the_start(self, backing: Path) -> None:
        with FaultShare(backing, no_xattr=True) as share:
            (share.mountpoint / "f").touch()
            call = lambda: os.setxattr(share.mountpoint / "f", "user.a", b"1")  # noqa: E731
            assert code(call) == errno.EOPNOTSUPP, "the kernel's answer to ENOSYS"

    def test_security_xattrs_cost_no_call(self, share: FaultShare) -> None:
        with (share.mountpoint / "f").open("wb", buffering=0) as file:
            for _ in range(10):
                file.write(b"x")
        assert "getxattr" not in share.counts().calls

    def test_long_names(self, share: FaultShare) -> None:
        share.set(name_max=20)
        assert code((share.mountpoint / ("n" * 21)).touch) == errno.ENAMETOOLONG
        assert code((share.mountpoint / ("n" * 20)).touch) == 0
        assert os.statvfs(share.mountpoint).f_namemax == 20

    def test_coarse_time_stamps(self, share: FaultShare) -> None:
        path = share.mountpoint / "f"
        path.touch()
        share.set(mtime_resolution=2)
        os.utime(path, ns=(5_999_999_999, 5_999_999_999))
        assert path.stat().st_mtime_ns == 4_000_000_000
        path.write_text("now")
        assert path.stat().st_mtime_ns % 2_000_000_000 == 0

    def test_read_only(self, share: FaultShare) -> None:
        path = share.mountpoint / "f"
        path.write_text("x")
        share.set(read_only=True)
        for call in (
            lambda: path.open("w"),
            lambda: path.open("a"),
            path.unlink,
            (share.mountpoint / "d").mkdir,
            lambda: os.utime(path),
            (share.mountpoint / "g").touch,
        ):
            assert code(call) == errno.EROFS
        assert path.read_text() == "x"


class TestDisconnect:
    def test_every_call_fails_at_once_until_it_is_back(self, share: FaultShare) -> None:
        path = share.mountpoint / "f"
        path.write_text("x")
        share.set(latency_ms=5_000)
        share.disconnect()
        assert elapsed(lambda: code(path.stat)) < 2
        assert code(path.read_text) == errno.ENOTCONN
        share.reconnect()
        share.set(latency_ms=0)
        assert path.read_text() == "x"

    def test_handles_may_be_stale_afterwards(self, share: FaultShare) -> None:
        path = share.mountpoint / "f"
        with path.open("w+b", buffering=0) as file:
            file.write(b"x")
            share.disconnect(errno.EIO)
            assert code(lambda: os.fsync(file.fileno())) == errno.EIO
            assert share.reconnect(stale_handles=True) == 1
            assert code(lambda: file.write(b"y")) == errno.ESTALE
            assert code(lambda: os.fsync(file.fileno())) == errno.ESTALE
            share.fail(["flush"], errno.ESTALE)
            assert stat.S_ISREG(path.stat().st_mode)
            share.clear()
            detached = os.dup(file.fileno())
            assert code(lambda: os.close(detached)) == errno.ESTALE
            null = os.open(os.devnull, os.O_RDWR)
            code(lambda: os.dup2(null, file.fileno()))
            os.close(null)
        assert path.read_text() == "x"
