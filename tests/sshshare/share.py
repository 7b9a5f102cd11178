"""SshShare: a directory, served by an sshd and mounted by sshfs through a delaying proxy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from types import TracebackType

from tests.sshshare.server import SshServer, programs, ssh_server
from tests.waiting import wait_until
from wbcache.mounts import canonical, mount_at, read_mounts

_ROOT_OF_TESTS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class SshShare:
    """Use as a context manager: on entry `mountpoint` shows `backing_dir` over the network.

    `delay_ms` is added to every message in each direction, so one call costs at least twice that
    (and calls sent at the same time share it).  `cache_timeout`, in seconds, is how long sshfs
    and the kernel trust attributes and names; 0 turns sshfs' own caches off.  With `reconnect`
    a broken connection is made anew, as people use sshfs on a laptop; without it, every call
    after a break fails.  `options` are further sshfs options ("allow_other", ...).

    Works as root and as a plain user whose account sshd lets in (`nobody` it does not).  On
    leaving, everything is gone: mount, processes, files; the backing directory stays.  A share
    that hangs is torn down by force.
    """

    def __init__(
        self,
        backing_dir: str,
        delay_ms: float = 0.0,
        *,
        cache_timeout: float = 1.0,
        reconnect: bool = False,
        options: tuple[str, ...] = (),
    ) -> None:
        self._backing = os.path.abspath(backing_dir)
        self._delay_ms = delay_ms
        self._cache_timeout = cache_timeout
        self._reconnect = reconnect
        self._options = options
        self._stack = ExitStack()
        self._proxy: subprocess.Popen[bytes] | None = None
        self._hung = False
        self.mountpoint = ""
        self.sshfs_pid = 0
        self.sshd_pid = 0

    @staticmethod
    def missing() -> list[str]:
        """Programs this needs and this machine lacks (Debian: sshfs, openssh-server)."""
        needed = {"sshd", "ssh", "ssh-keygen", "sshfs"}
        lacking = needed - programs().keys()
        return sorted(lacking) + ([] if os.path.exists("/dev/fuse") else ["/dev/fuse"])

    def __enter__(self) -> SshShare:
        with ExitStack() as stack:
            directory = tempfile.mkdtemp(prefix="sshshare-")
            # Not rmtree while a mount may still be below: that would empty the backing directory.
            stack.callback(self._remove, directory)
            server = stack.enter_context(ssh_server(directory))
            self.sshd_pid = server.pid
            port = self._start_proxy(stack, server)
            # Added before the mount itself, so that a mount that half succeeds is taken down too.
            self.mountpoint = os.path.join(directory, "mnt")
            os.mkdir(self.mountpoint)
            self._start_sshfs(stack, directory, server, port)
            self._stack = stack.pop_all()
        self.set_delay(self._delay_ms)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def set_delay(self, delay_ms: float) -> None:
        """From the next chunk on, hold traffic back `delay_ms` milliseconds in each direction."""
        self._command(delay_ms=delay_ms)

    def hang(self) -> None:
        """Forward nothing from now on, as a server that stopped answering; nothing is lost."""
        self._hung = True
        self._command(hang=True)

    def resume(self) -> None:
        """End a hang: what was held back goes on its way."""
        self._command(hang=False)
        self._hung = False

    def _command(self, **command: float | bool) -> None:
        proxy = self._proxy
        if proxy is None or proxy.stdin is None or proxy.stdout is None:
            raise RuntimeError("the share is not mounted")
        proxy.stdin.write(json.dumps(command).encode() + b"\n")
        proxy.stdin.flush()
        if not proxy.stdout.readline():
            raise RuntimeError("the proxy has ended")

    def _start_proxy(self, stack: ExitStack, server: SshServer) -> int:
        proxy = subprocess.Popen(
            [sys.executable, "-m", "tests.sshshare.proxy", str(server.port), str(server.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT_OF_TESTS,
        )
        stack.callback(self._end_proxy, proxy)
        self._proxy = proxy
        assert proxy.stdout is not None
        return int(proxy.stdout.readline())

    def _end_proxy(self, proxy: subprocess.Popen[bytes]) -> None:
        self._proxy = None
        for pipe in (proxy.stdin, proxy.stdout):
            if pipe is not None:
                pipe.close()
        _finish(proxy)

    def _start_sshfs(self, stack: ExitStack, directory: str, server: SshServer, port: int) -> None:
        known_hosts = os.path.join(directory, "known_hosts")
        with open(known_hosts, "w", encoding="utf-8") as text:
            text.write(f"[127.0.0.1]:{port} {server.host_key_line}\n")
        log = os.path.join(directory, "sshfs.log")
        command = [
            programs()["sshfs"],
            "-f",
            f"{server.user}@127.0.0.1:{self._backing}",
            self.mountpoint,
            "-p",
            str(port),
            *(f"-o{option}" for option in self._mount_options(server, known_hosts)),
        ]
        with open(log, "wb") as output:
            sshfs = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        stack.callback(self._end_sshfs, sshfs)
        self.sshfs_pid = sshfs.pid
        wait_until(lambda: _serves(self.mountpoint) or sshfs.poll() is not None, "sshfs mounted")
        if sshfs.poll() is not None:
            with open(log, encoding="utf-8", errors="replace") as text:
                raise RuntimeError(f"sshfs did not mount: {text.read().strip()[-500:]}")

    def _mount_options(self, server: SshServer, known_hosts: str) -> list[str]:
        seconds = self._cache_timeout
        caches = [f"attr_timeout={seconds:g}", f"entry_timeout={seconds:g}"]
        if seconds > 0:
            whole = max(1, round(seconds))
            caches += [f"dcache_timeout={whole}", f"dcache_clean_interval={whole}"]
        else:
            caches.append("dir_cache=no")
        return [
            "ssh_command=" + programs()["ssh"] + " -F /dev/null",
            f"IdentityFile={server.client_key}",
            "IdentitiesOnly=yes",
            f"UserKnownHostsFile={known_hosts}",
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
            "PasswordAuthentication=no",
            "default_permissions",
            *caches,
            *(["reconnect", "ServerAliveInterval=1", "ServerAliveCountMax=3"] * self._reconnect),
            *self._options,
        ]

    def _end_sshfs(self, sshfs: subprocess.Popen[bytes]) -> None:
        """Unmount, by force when the share hangs or is busy, and wait for the process."""
        if self._hung:
            sshfs.kill()  # its open requests then fail at once instead of waiting for the server
        polite = _start_unmount(self.mountpoint, lazily=False)
        try:
            polite.wait(5.0)
        except subprocess.TimeoutExpired:
            # It looked at the mount, and nothing but an answer ends that: not even a kill.
            sshfs.kill()
            polite.wait(5.0)
        if _mounted_at(self.mountpoint):
            sshfs.kill()
            _start_unmount(self.mountpoint, lazily=True).wait(5.0)
        _finish(sshfs)

    @staticmethod
    def _remove(directory: str) -> None:
        if not _mounted_at(os.path.join(directory, "mnt")):
            shutil.rmtree(directory)


def _start_unmount(mountpoint: str, *, lazily: bool) -> subprocess.Popen[bytes]:
    if os.getuid() == 0:
        command = ["umount", *(["-l"] if lazily else []), mountpoint]
    else:
        command = ["fusermount3", "-uz" if lazily else "-u", mountpoint]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _serves(mountpoint: str) -> bool:
    """Whether the file system answers: sshfs mounts first, then connects, and may fail yet."""
    try:
        return os.stat(mountpoint).st_dev != os.stat(os.path.dirname(mountpoint)).st_dev
    except OSError:
        return False


def _mounted_at(mountpoint: str) -> bool:
    """Asked of the kernel's table: a dead or hung mount answers no stat call."""
    mounts = read_mounts()
    return mount_at(canonical(mountpoint, mounts), mounts) is not None


def _finish(process: subprocess.Popen[bytes]) -> None:
    for act in (process.terminate, process.kill):
        try:
            process.wait(5.0)
            return
        except subprocess.TimeoutExpired:
            act()
    process.wait(5.0)
