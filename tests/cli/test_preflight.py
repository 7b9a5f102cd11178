"""Bad input to `mount`: each gets its own error and exit code, and nothing is touched."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.plain_user import as_plain_user
from wbcache.config import CacheConfig, Config, Size
from wbcache.daemon import preflight
from wbcache.daemon.preflight import MountPlan, MountRequest, check
from wbcache.errors import (
    CacheDirError,
    FuseError,
    MountpointError,
    SourceError,
    UsageError,
    WbcacheError,
)
from wbcache.mounts import MountEntry
from wbcache.options import parse_options
from wbcache.processes import is_being_killed

SMALL = Config(cache=CacheConfig(min_free=Size(bytes=0)))

Check = Callable[..., MountPlan]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a share, an empty mount point and room for a cache."""
    (tmp_path / "share" / "sub").mkdir(parents=True)
    (tmp_path / "share" / "file").write_text("data")
    (tmp_path / "m").mkdir()
    return tmp_path


@pytest.fixture
def checked(place: Path) -> Iterator[Check]:
    """Checks a request that differs from a good one, and that the check has changed nothing."""

    def run(
        source: str = "share",
        mountpoint: str = "m",
        cache_dir: str | None = "cache",
        options: str = "",
        config: Config = SMALL,
        config_path: str | None = None,
    ) -> MountPlan:
        return check(
            MountRequest(
                source=str(place / source),
                mountpoint=str(place / mountpoint),
                cache_dir=None if cache_dir is None else str(place / cache_dir),
                config=config,
                options=parse_options(options),
                config_path=config_path,
            )
        )

    yield run
    assert not (place / "cache").exists()


def message(error: pytest.ExceptionInfo[WbcacheError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert error.value.hint, "an error says what to do"
    return text


def test_a_good_request(checked: Check, place: Path) -> None:
    plan = checked()
    assert (plan.source, plan.mountpoint) == (str(place / "share"), str(place / "m"))
    assert plan.cache_dir == str(place / "cache")
    assert not plan.over_source and not plan.read_only and not plan.rebind
    assert plan.kernel_options == ("allow_other",)
    assert plan.warnings == ()


def test_over_the_source_itself(checked: Check, place: Path) -> None:
    assert checked(mountpoint="share").over_source
    (place / "link").symlink_to("share")
    plan = checked(source="link", mountpoint="share/../link/.")
    assert plan.over_source
    assert plan.mountpoint == plan.source == str(place / "share")


def test_options(checked: Check) -> None:
    plan = checked(options="ro,noexec,nosuid,rebind")
    assert plan.read_only and plan.rebind
    assert plan.kernel_options == ("ro", "noexec", "allow_other")
    with pytest.raises(UsageError, match="-o frobnicate: is not a known option"):
        parse_options("ro,frobnicate")


def test_source_missing(checked: Check) -> None:
    with pytest.raises(SourceError) as caught:
        checked(source="nowhere")
    assert "nowhere: does not exist; " in message(caught)
    assert caught.value.exit == 4


def test_source_not_a_directory(checked: Check) -> None:
    with pytest.raises(SourceError) as caught:
        checked(source="share/file")
    assert "is not a directory" in message(caught)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_source_not_readable(plain_user_dir: Path, mode: int) -> None:
    source = plain_user_dir / "share"
    source.mkdir(mode=0o700)
    os.chmod(source, mode)
    with pytest.raises(SourceError) as caught:
        as_plain_user(lambda: preflight.check_source(str(source), []))
    assert "is not readable" in message(caught)


def test_source_that_does_not_answer(
    checked: Check, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(place / "stuck")
    monkeypatch.setattr(preflight, "SHARE_DEADLINE", 0.2)
    # As a hung share does, a fifo without a writer keeps the caller in the kernel.
    monkeypatch.setattr(preflight, "_list_directory", lambda _: (place / "stuck").read_bytes())
    with pytest.raises(SourceError) as caught:
        checked()
    assert "did not answer within 0.2 s" in message(caught)


@pytest.mark.parametrize("passes", [errno.EBUSY, errno.EIO, errno.ENOTCONN, errno.ENOMEM])
def test_source_with_an_error_that_may_pass(
    place: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """A cache of it can be served all the same."""

    def fail(path: str) -> bool:
        raise OSError(passes, os.strerror(passes))

    monkeypatch.setattr(preflight, "_list_directory", fail)
    with pytest.raises(preflight.UnreachableError) as caught:
        preflight.check_source(str(place), [])
    assert f"cannot be read ({os.strerror(passes)})" in message(caught)


def test_source_behind_wbcache_already() -> None:
    entry = MountEntry(1, 0, "0:9", "/", "/mnt/m", ("rw",), "fuse.wbcache", "/mnt/share")
    with pytest.raises(SourceError) as caught:
        preflight.check_source("/mnt/m/sub", [entry])
    assert "is itself a wbcache mount" in message(caught)


def test_mountpoint_missing(checked: Check) -> None:
    with pytest.raises(MountpointError) as caught:
        checked(mountpoint="nowhere")
    assert "nowhere: does not exist; create it: mkdir -p" in message(caught)
    assert caught.value.exit == 5


def test_mountpoint_not_a_directory(checked: Check, place: Path) -> None:
    (place / "plain").write_text("")
    with pytest.raises(MountpointError) as caught:
        checked(mountpoint="plain")
    assert "is not a directory" in message(caught)


def test_mountpoint_not_empty(checked: Check, place: Path) -> None:
    (place / "m" / "thesis.tex").write_text("precious")
    with pytest.raises(MountpointError) as caught:
        checked()
    assert "is not empty" in message(caught)
    assert (place / "m" / "thesis.tex").read_text() == "precious"


def test_mountpoint_inside_the_source(checked: Check) -> None:
    with pytest.raises(MountpointError) as caught:
        checked(mountpoint="share/sub")
    assert "is inside SOURCE" in message(caught)


def test_mountpoint_of_somebody_else(plain_user_dir: Path) -> None:
    other = plain_user_dir / "of-root"
    other.mkdir(mode=0o755)
    with pytest.raises(MountpointError) as caught:
        as_plain_user(lambda: preflight.check_mountpoint(str(other), "/mnt/share"))
    assert "is not writable" in message(caught)


def test_mountpoint_already_mounted() -> None:
    ours = MountEntry(1, 0, "0:9", "/", "/mnt/m", ("rw",), "fuse.wbcache", "/mnt/share")
    for over_source in (True, False):
        with pytest.raises(MountpointError) as caught:
            preflight.check_not_mounted("/mnt/m", [ours], over_source=over_source)
        assert "is already mounted by wbcache" in message(caught)
    foreign = MountEntry(1, 0, "0:9", "/", "/mnt/m", ("rw",), "nfs4", "server:/a")
    preflight.check_not_mounted("/mnt/m", [foreign], over_source=True)
    with pytest.raises(MountpointError) as caught:
        preflight.check_not_mounted("/mnt/m", [foreign], over_source=False)
    assert "is the mount point of another file system (nfs4)" in message(caught)


@pytest.mark.parametrize(
    ("cache_dir", "mountpoint", "why"),
    [
        ("share", "m", "is inside SOURCE"),
        ("share/sub/cache", "m", "is inside SOURCE"),
        ("m/cache", "m", "is inside MOUNTPOINT"),
        (".", "m", "holds MOUNTPOINT"),
    ],
)
def test_cache_in_the_wrong_place(
    checked: Check, cache_dir: str, mountpoint: str, why: str
) -> None:
    with pytest.raises(CacheDirError) as caught:
        checked(cache_dir=cache_dir, mountpoint=mountpoint)
    assert why in message(caught)
    assert caught.value.exit == 6


def test_cache_inside_the_source_through_a_link(checked: Check, place: Path) -> None:
    (place / "innocent").symlink_to("share/sub")
    with pytest.raises(CacheDirError, match="is inside SOURCE"):
        checked(cache_dir="innocent/cache")


@pytest.mark.parametrize("fstype", ["nfs", "nfs4", "cifs", "fuse.sshfs", "fuse.juicefs", "lustre"])
def test_cache_on_a_network_file_system(fstype: str) -> None:
    mounts = [MountEntry(1, 0, "0:9", "/", "/mnt/net", ("rw",), fstype, "server:/a")]
    with pytest.raises(CacheDirError) as caught:
        preflight.check_cache_place("/mnt/net/cache", "/mnt/share", "/mnt/m", mounts)
    assert f"is on a network or FUSE file system ({fstype} at /mnt/net)" in message(caught)


def test_cache_in_memory_needs_to_be_asked_for(checked: Check) -> None:
    with pytest.raises(CacheDirError) as caught:
        checked(cache_dir="/dev/shm/wbcache-test")
    assert "would not survive a reboot" in message(caught)
    plan = checked(cache_dir="/dev/shm/wbcache-test", options="volatile_cache")
    assert plan.cache_dir == "/dev/shm/wbcache-test"


def test_cache_of_another_user(checked: Check, place: Path) -> None:
    (place / "theirs").mkdir()
    os.chown(place / "theirs", 12345, 12345)
    with pytest.raises(CacheDirError) as caught:
        checked(cache_dir="theirs")
    assert "belongs to another user (uid 12345)" in message(caught)


def test_cache_that_is_something_else(checked: Check, place: Path) -> None:
    (place / "plain").write_text("")
    with pytest.raises(CacheDirError) as caught:
        checked(cache_dir="plain")
    assert "is not a directory" in message(caught)
    with pytest.raises(CacheDirError) as caught:
        checked(cache_dir="plain/cache")
    assert caught.value.exit == 6
    (place / "home").mkdir()
    (place / "home" / "thesis.tex").write_text("precious")
    with pytest.raises(CacheDirError) as caught:
        checked(cache_dir="home")
    assert "holds other things (thesis.tex for one)" in message(caught)


def test_cache_that_cannot_be_made(plain_user_dir: Path) -> None:
    cache_dir = str(plain_user_dir / "of-root" / "cache")
    (plain_user_dir / "of-root").mkdir(mode=0o755)
    with pytest.raises(CacheDirError) as caught:
        as_plain_user(lambda: preflight.check_cache_dir(cache_dir, SMALL))
    assert "of-root is not writable" in message(caught)


def test_a_full_disk_refuses_a_new_cache_but_not_one_to_be_flushed(
    checked: Check, place: Path
) -> None:
    greedy = Config(cache=CacheConfig(min_free=Size(percent=100)))
    with pytest.raises(CacheDirError) as caught:
        checked(config=greedy)
    assert "MiB free" in message(caught)
    (place / "old").mkdir()
    (place / "old" / "journal.db").write_bytes(b"")
    (warning,) = checked(cache_dir="old", config=greedy).warnings
    assert "what it holds will be flushed" in warning


def test_over_the_source_nothing_of_the_daemon_may_be_inside(
    checked: Check, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = str(place / "share" / "wbcache.yaml")
    with pytest.raises(SourceError) as caught:
        checked(mountpoint="share", config_path=inside)
    assert "while the configuration file" in message(caught)
    checked(config_path=inside)
    monkeypatch.setattr("sys.prefix", str(place / "share" / "venv"))
    with pytest.raises(SourceError) as caught:
        checked(mountpoint="share")
    assert "while the Python environment" in message(caught)


def test_no_fuse_device(checked: Check, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "FUSE_DEVICE", str(place / "fuse"))
    with pytest.raises(FuseError) as caught:
        checked()
    assert "does not exist" in message(caught)
    assert caught.value.exit == 8


def test_a_fuse_device_that_may_not_be_used(
    place: Path, monkeypatch: pytest.MonkeyPatch, plain_user_dir: Path
) -> None:
    device = plain_user_dir / "fuse"
    device.touch(mode=0o600)
    monkeypatch.setattr(preflight, "FUSE_DEVICE", str(device))
    with pytest.raises(FuseError) as caught:
        as_plain_user(preflight.check_fuse)
    assert "cannot be opened (Permission denied)" in message(caught)


def test_a_plain_user_without_fusermount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "FUSE_DEVICE", os.devnull)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(FuseError) as caught:
        as_plain_user(preflight.check_fuse)
    assert "fusermount3: is not installed" in message(caught)
    # Root needs no such program.
    preflight.check_fuse()


def test_allow_other_for_a_plain_user(
    place: Path, monkeypatch: pytest.MonkeyPatch, plain_user_dir: Path
) -> None:
    conf = plain_user_dir / "fuse.conf"
    conf.write_text("# user_allow_other\nmount_max = 9\n")
    monkeypatch.setattr(preflight, "FUSE_CONF", str(conf))

    def options(text: str) -> tuple[tuple[str, ...], list[str]]:
        warnings: list[str] = []
        return preflight._kernel_options(parse_options(text), warnings), warnings

    assert as_plain_user(lambda: options("noexec")) == (("noexec",), [])
    kernel, (warning,) = as_plain_user(lambda: options("allow_other"))
    assert kernel == ()
    assert "user_allow_other" in warning
    conf.write_text("user_allow_other\n")
    assert as_plain_user(lambda: options("")) == (("allow_other",), [])


def test_a_killed_process_is_recognised() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert not is_being_killed(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        # Not waited for, it is as a daemon whose threads hang: dead, but not gone.
        assert is_being_killed(child.pid)
    finally:
        child.kill()
        child.wait()
    assert not is_being_killed(child.pid)


def test_a_cache_that_is_too_small(tmp_path: Path) -> None:
    tiny = Config(cache=CacheConfig(size=Size(bytes=10 << 20)))
    with pytest.raises(CacheDirError) as caught:
        preflight.check_cache_dir(str(tmp_path / "cache"), tiny)
    assert "comes to 10 MiB" in message(caught)
    assert not (tmp_path / "cache").exists()
