"""Other users of the machine: what they can reach, and what they have prepared."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounting import NEVER_BY_ITSELF, Mounted, wbcache
from tests.plain_user import PLAIN_UID, as_plain_user
from wbcache.control import protocol, registry
from wbcache.control.client import ControlClient
from wbcache.control.registry import MountRecord
from wbcache.errors import CacheDirError, WbcacheError
from wbcache.probe import within

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("fuse")]


# -- the control socket ------------------------------------------------------------------------


def test_the_daemon_of_another_user_does_nothing_for_one(
    tmp_path: Path, plain_user_dir: Path
) -> None:
    cache = plain_user_dir / "cache"
    cache.mkdir(mode=0o700)

    def ask(command: str) -> tuple[str, int]:
        client = ControlClient(str(cache))
        try:
            if command == "status":
                return str(client.status()), 0
            return str(client.umount(0, False)), 0
        except WbcacheError as error:
            return str(error), error.exit

    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF, cache=cache) as mount:
        (mount.path / "file").write_bytes(b"x")
        text, code = as_plain_user(lambda: ask("status"))
        assert (code, "belongs to another user" in text) == (9, True), text
        # Also if somebody has opened the way to it.
        os.chmod(cache, 0o755)
        os.chmod(cache / protocol.SOCKET_NAME, 0o666)
        for command in ("status", "umount"):
            text, code = as_plain_user(lambda command=command: ask(command))  # type: ignore[misc]
            assert (code, "belongs to another user" in text) == (9, True), text
        assert mount.status()["mounted"] and mount.is_mounted
        assert mount.status()["dirty_files"] == 1
        # Connections that say nothing don't keep others from being served.
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                with protocol.socket_address(str(cache)) as address:
                    sock.connect(address)
            assert mount.status()["mounted"]
        mount.flush()


# -- where records of mounts lie ---------------------------------------------------------------


def test_a_place_in_tmp_that_somebody_else_took_is_not_used(
    plain_user_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = 61234  # whom no other test takes for itself
    taken = Path(f"/tmp/wbcache-{user}")
    monkeypatch.setenv("HOME", str(plain_user_dir))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    os.chown(plain_user_dir, user, user)
    record = MountRecord("/m", "/s", str(plain_user_dir), 1)

    def register() -> list[MountRecord]:
        os.setresuid(user, user, user)
        registry.register(record)
        return [found for found in registry.records() if found.source == record.source]

    taken.mkdir(mode=0o777)
    try:
        forged = {**record.__dict__, "mountpoint": "/forged"}
        (taken / "forged.json").write_text(json.dumps(forged))
        assert within(30, register) == [record]
        assert os.listdir(taken) == ["forged.json"]
    finally:
        (taken / "forged.json").unlink()
        taken.rmdir()


# -- the cache directory -----------------------------------------------------------------------


def refused(share: Path, cache: Path, mountpoint: Path) -> str:
    """The line with which a mount on a cache directory is refused."""
    mountpoint.mkdir(exist_ok=True)
    done = wbcache("mount", "--cache-dir", cache, share, mountpoint)
    assert done.returncode == CacheDirError.exit_code, done.stderr
    assert not os.path.ismount(mountpoint)
    (line,) = done.stderr.splitlines()
    return line


def test_nobody_else_gets_at_what_the_daemon_keeps(tmp_path: Path) -> None:
    cache = tmp_path / "made" / "on" / "the" / "way"
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF, cache=cache, umask=0) as mount:
        (mount.path / "file").write_bytes(b"x" * 100_000)
        os.chmod(mount.path / "file", 0o666)
        mount.kill()
        mount.remount()
        mount.flush()
        for top, names, files in os.walk(tmp_path / "made"):
            for path in [top, *(os.path.join(top, name) for name in names + files)]:
                st = os.lstat(path)
                # SQLite gives its files the mode of the first.
                assert not st.st_mode & 0o077, (path, oct(st.st_mode))
    # The share is not affected.
    assert stat.S_IMODE((tmp_path / "share" / "file").stat().st_mode) == 0o666
    assert stat.S_IMODE((tmp_path / "share" / ".wbcache").stat().st_mode) == 0o755


def test_a_cache_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF, cache=tmp_path / "cache") as mount:
        (mount.path / "file").write_bytes(b"kept")
        assert mount.umount("--no-drain").returncode == 3
        for mode in (0o777, 0o720):
            os.chmod(tmp_path / "cache", mode)
            line = refused(tmp_path / "share", tmp_path / "cache", tmp_path / "mnt")
            assert "can be written by other users" in line and "chmod go-w" in line
        os.chmod(tmp_path / "cache", 0o700)
        mount.remount()
        assert (mount.path / "file").read_bytes() == b"kept"
        mount.flush()


def _link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def _foreign(path: Path, victim: Path) -> None:
    path.write_bytes(b"")
    os.chown(path, PLAIN_UID, PLAIN_UID)


@pytest.mark.parametrize("plant", [_link, _foreign])
@pytest.mark.parametrize(
    "name", ["journal.db", "journal.db-wal", "daemon.log", "lock", "mount.json", "data"]
)
def test_what_others_planted_in_a_cache_directory_is_not_used(
    tmp_path: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "share").mkdir()
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    plant(cache / name, victim)
    line = refused(tmp_path / "share", cache, tmp_path / "mnt")
    assert f"{name} in it" in line
    assert victim.read_bytes() == b"precious"
    assert os.listdir(cache) == [name]


def test_links_deeper_in_a_cache_lead_nowhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF, cache=tmp_path / "cache") as mount:
        (mount.path / "file").write_bytes(b"kept")
        assert mount.umount("--no-drain").returncode == 3
        data = tmp_path / "cache" / "data"
        (directory,) = {path.parent for path in data.glob("*/*") if path.stat().st_size}
        directory.rename(tmp_path / "aside")
        directory.symlink_to(victim)
        line = refused(tmp_path / "share", tmp_path / "cache", tmp_path / "mnt")
        assert f"{directory} is not a directory" in line
        directory.unlink()
        (tmp_path / "aside").rename(directory)

        # One file that is a link is not read either.
        (file,) = (path for path in directory.iterdir() if path.stat().st_size)
        file.rename(tmp_path / "aside")
        file.symlink_to("/etc/hostname")
        mount.remount()
        with pytest.raises(OSError):
            (mount.path / "file").read_bytes()
        assert mount.client.flush([b""], 1.0)
        assert not (tmp_path / "share" / "file").exists()
