"""The mount as other mount namespaces see it, containers above all, and a mount inside of one."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mounting import NEVER_BY_ITSELF, Mounted, contents
from tests.plain_user import PLAIN_UID, as_plain_user
from tests.users.elsewhere import Elsewhere
from tests.waiting import wait_until
from wbcache.errors import BusyError

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("fuse"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mount namespaces here"),
]

_files: dict[str, object] = {}
"""Of a process elsewhere: what it holds open."""


def hold(path: str) -> None:
    """Keep a file open, for appending."""
    _files[path] = open(path, "ab", buffering=0)  # noqa: SIM115


def let_go() -> None:
    """Close what is held."""
    _files.clear()


def append(path: str, data: bytes) -> int:
    """Write to a file that is held."""
    return int(_files[path].write(data))  # type: ignore[attr-defined]


def map_only(path: str) -> None:
    """Map a file and close it."""
    fd = os.open(path, os.O_RDWR)
    _files[path] = mmap.mmap(fd, 0)
    os.close(fd)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def refused(mount: Mounted, *words: str) -> None:
    """Unmounting is refused in one line that says who uses the mount; it goes on to work."""
    done = mount.umount()
    assert done.returncode == BusyError.exit_code, done.stderr
    (line,) = done.stderr.splitlines()
    for word in (f"{mount.path}: is in use by ", *words):
        assert word in line, line
    assert mount.is_mounted and mount.status()["mounted"]


def unmounted(mount: Mounted) -> None:
    done = mount.umount()
    assert done.returncode == 0, done.stderr
    assert not mount.is_mounted


# -- a mount of the host in a container -----------------------------------------------------------


def test_a_directory_of_the_mount_in_a_container(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF) as mount:
        (mount.path / "sub").mkdir()
        (mount.path / "sub" / "file").write_bytes(b"of the host")
        with Elsewhere(root=tmp_path / "root", binds={"/data": mount.path / "sub"}) as container:
            assert container.call(os.listdir, "/") == ["data"]
            assert container.call(read, "/data/file") == b"of the host"
            container.call(hold, "/data/log")
            for number in range(3):
                container.call(append, "/data/log", b"line %d\n" % number)
                container.call(write, "/data/file", b"of the container %d" % number)
                before = container.call(os.stat, "/data/log").st_ino
                mount.flush()
                held = contents(mount.source / "sub")
                assert held == contents(mount.path / "sub")
                assert held["file"][1] == b"of the container %d" % number
                assert len(held["log"][1]) == 7 * (number + 1)
                assert container.call(os.stat, "/data/log").st_ino == before
            # In use by a process of it, then only mounted there.
            where = f"({container.pid}, in a container that has it at /data)"
            refused(mount, where)
            container.call(append, "/data/log", b"and on\n")
            container.call(let_go)
            refused(mount, where)
            container.call(write, "/data/last", b"to be flushed")
        unmounted(mount)
    assert (tmp_path / "share" / "sub" / "log").read_bytes().endswith(b"and on\n")
    assert (tmp_path / "share" / "sub" / "last").read_bytes() == b"to be flushed"


def test_a_copy_of_the_host_s_mounts_counts_while_it_is_used(tmp_path: Path) -> None:
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF) as mount:
        path = str(mount.path / "file")
        write(path, b"x" * 4096)
        with Elsewhere() as process:
            process.call(hold, path)
            refused(mount, f"({process.pid})")
            process.call(let_go)
            process.call(os.chdir, mount.mountpoint)
            refused(mount, f"({process.pid})")
            process.call(os.chdir, "/")
            process.call(map_only, path)
            refused(mount, f"({process.pid})")
            process.call(let_go)
            # What only stands in its table of mounts ends with ours.
            unmounted(mount)
    assert (tmp_path / "share" / "file").read_bytes() == b"x" * 4096


def test_a_service_that_is_stopped_ends_though_a_container_has_the_mount(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF) as mount:
        with Elsewhere(root=tmp_path / "root", binds={"/data": mount.path}) as container:
            container.call(hold, "/data/log")
            container.call(append, "/data/log", b"line\n")
            os.kill(mount.pid, signal.SIGTERM)
            wait_until(lambda: not os.path.exists(f"/proc/{mount.pid}"), "the daemon ends")
            with pytest.raises(OSError):
                container.call(read, "/data/log")
        assert (tmp_path / "share" / "log").read_bytes() == b"line\n"


@pytest.mark.parametrize("follow", [True, False])
def test_a_container_that_was_there_before_the_mount(tmp_path: Path, follow: bool) -> None:
    """It sees the mount if its mounts follow the host's, or else what is below."""
    base = tmp_path / "base"
    base.mkdir()
    # As /mnt of a host is: what is mounted there is passed on.
    subprocess.run(["mount", "--bind", base, base], check=True)
    try:
        subprocess.run(["mount", "--make-shared", base], check=True)
        (base / "mnt").mkdir()
        with Elsewhere(follow=follow) as process:
            with Mounted(tmp_path / "share", mountpoint=base / "mnt") as mount:
                write(str(mount.path / "file"), b"of the host")
                names = process.call(os.listdir, mount.mountpoint)
                assert names == (["file"] if follow else [])
                if follow:
                    process.call(write, f"{mount.path}/other", b"from elsewhere")
                    assert read(f"{mount.path}/other") == b"from elsewhere"
                unmounted(mount)
                assert process.call(os.listdir, mount.mountpoint) == []
    finally:
        subprocess.run(["umount", base], check=True)


def test_a_container_that_follows_the_host_loses_the_mount_with_it(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "root").mkdir()
    subprocess.run(["mount", "--bind", base, base], check=True)
    try:
        subprocess.run(["mount", "--make-shared", base], check=True)
        (base / "mnt").mkdir()
        with Elsewhere(follow=True, root=tmp_path / "root", binds={"/host": base}) as container:
            with Mounted(tmp_path / "share", mountpoint=base / "mnt") as mount:
                container.call(write, "/host/mnt/file", b"from the container")
                container.call(hold, "/host/mnt/file")
                refused(mount, str(container.pid))
                container.call(let_go)
                unmounted(mount)
                assert container.call(os.listdir, "/host/mnt") == []
    finally:
        subprocess.run(["umount", base], check=True)
    assert (tmp_path / "share" / "file").read_bytes() == b"from the container"


def test_over_itself_a_container_from_before_is_another_writer(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    with Elsewhere() as process, Mounted(share, mountpoint=share) as mount:
        write(str(share / "file"), b"through the mount")
        mount.flush()
        assert process.call(read, str(share / "file")) == b"through the mount"
        process.call(write, str(share / "theirs"), b"past the mount")
        wait_until(lambda: (share / "theirs").exists(), "the mount shows it")
        assert read(str(share / "theirs")) == b"past the mount"
        unmounted(mount)
    assert sorted(contents(share)) == ["file", "theirs"]


# -- what keeps a mount busy in its own namespace -------------------------------------------------


def test_whoever_keeps_the_mount_busy_is_named(tmp_path: Path) -> None:
    with Mounted(tmp_path / "share", config=NEVER_BY_ITSELF) as mount:
        (mount.path / "sub").mkdir()
        sleep = ["sleep", "600"]

        def busy(process: subprocess.Popen[bytes], name: str) -> None:
            try:
                wait_until(lambda: _command(process.pid) == name, f"{name} runs")
                refused(mount, f"{name} ({process.pid})")
            finally:
                process.kill()
                process.wait()

        busy(subprocess.Popen(sleep, cwd=mount.path / "sub"), "sleep")
        with open(mount.path / "file", "w") as file:
            busy(subprocess.Popen(sleep, stdout=file), "sleep")
        # Inside a chroot.
        with Elsewhere() as process:
            process.call(os.chroot, mount.mountpoint)
            process.call(os.chdir, "/")
            assert sorted(process.call(os.listdir, "/")) == ["file", "sub"]
            process.call(write, "/inside", b"text")
            assert read(str(mount.path / "inside")) == b"text"
            refused(mount, str(process.pid))
        subprocess.run(["mount", "--bind", mount.path / "sub", mount.path / "sub"], check=True)
        try:
            refused(mount, f"the mount at {mount.path}/sub")
        finally:
            subprocess.run(["umount", "-i", mount.path / "sub"], check=True)
        unmounted(mount)


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


# -- a mount inside -------------------------------------------------------------------------------

INSIDE = """
import json, os, subprocess, sys
source, mountpoint, cache, umount = sys.argv[1:]
def wbcache(*arguments):
    command = [sys.executable, "-m", "wbcache.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return [done.returncode, done.stderr]
said = {"mount": wbcache("mount", "--cache-dir", cache, source, mountpoint)}
said["uid"] = os.stat(source).st_uid, os.stat(mountpoint).st_uid, os.getuid()
said["before"] = sorted(os.listdir(mountpoint))
os.makedirs(mountpoint + "/run", exist_ok=True)
name = f"{mountpoint}/run/{umount}"
with open(name, "w") as file:
    file.write("text")
os.chmod(name, 0o640)
st = os.stat(name)
said["file"] = st.st_uid, st.st_gid, oct(st.st_mode)
try:
    os.chown(name, 12345, 12345)
except OSError as error:
    said["chown"] = error.strerror
said["status"] = wbcache("status", mountpoint)
if umount == "umount":
    said["umount"] = wbcache("umount", mountpoint)
    said["left"] = os.listdir(mountpoint)
print(json.dumps(said))
"""


def _is_reachable_for_all() -> bool:
    return as_plain_user(lambda: os.access(os.path.realpath(sys.executable), os.X_OK))


@pytest.mark.parametrize("uid", [0, PLAIN_UID], ids=["root", "user"])
def test_a_mount_in_a_user_namespace(plain_user_dir: Path, uid: int) -> None:
    top = plain_user_dir
    if uid and not _is_reachable_for_all():
        pytest.skip("the interpreter is in a directory of root's")
    top.chmod(0o755)
    for name in ("share", "mnt", "cache"):
        (top / name).mkdir(mode=0o700)
        os.chown(top / name, uid, uid)
    (top / "share" / "data").touch()  # an empty one costs a warning
    os.chown(top / "share" / "data", uid, uid)
    prefix = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
    namespace = [*prefix, "unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "test", "-w", "/dev/fuse"], check=False).returncode:
        pytest.skip("the kernel allows no user namespaces, or no FUSE in them")

    def inside(*options: str, umount: str) -> dict[str, object]:
        command = [*namespace, *options, sys.executable, "-c", INSIDE]
        done = subprocess.run(
            [*command, top / "share", top / "mnt", top / "cache", umount],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, object] = json.loads(done.stdout)
        assert said["mount"] == [0, ""], said
        assert said["uid"] == [0, 0, 0]
        assert said["file"] == [0, 0, "0o100640"]
        assert said["chown"] == os.strerror(22)
        assert said["status"] == [0, ""]
        return said

    said = inside(umount="umount")
    assert said["umount"] == [0, ""] and said["left"] == []
    assert contents(top / "share")["run/umount"][1] == b"text"
    # It ends with everything in it, as a container does, in the middle of its work.
    inside("--pid", "--fork", "--mount-proc", "--kill-child", umount="killed")
    assert (top / "share" / "run" / "umount").exists()
    said = inside(umount="umount")
    assert said["before"] == ["data", "run"] and said["umount"] == [0, ""]
    held = contents(top / "share")
    assert held["run/killed"][1] == held["run/umount"][1] == b"text"
    assert {os.lstat(top / "share" / name).st_uid for name in held} == {uid}
    assert not os.path.ismount(top / "mnt")
