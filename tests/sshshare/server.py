"""An sshd of our own: keys, configuration and port belong to one test and vanish with it."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.waiting import wait_until

_DEADLINE = 15.0
_PRIVILEGE_SEPARATION = "/run/sshd"  # compiled into Debian's sshd, which as root insists on it


class SshServer(NamedTuple):
    """A running server and what a client needs to reach it."""

    pid: int
    port: int
    user: str
    client_key: str
    host_key_line: str  # for a known_hosts file, without the host


def programs() -> dict[str, str]:
    """Where the programs are; those not installed are missing from the answer."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    found = {name: shutil.which(name, path=path) for name in ("sshd", "ssh", "ssh-keygen", "sshfs")}
    return {name: where for name, where in found.items() if where}


@contextmanager
def ssh_server(directory: str) -> Iterator[SshServer]:
    """Run an sshd with sftp only, for the user of this process, on a free port of 127.0.0.1.

    Keys, configuration and log go into `directory`, which must exist.  On leaving, the listener
    and the sessions it started are ended.  Raises RuntimeError with the server's own words when
    it does not come up.
    """
    found = programs()
    host_key, client_key = os.path.join(directory, "host"), os.path.join(directory, "client")
    for key in (host_key, client_key):
        subprocess.run(
            [found["ssh-keygen"], "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key],
            check=True,
            stdin=subprocess.DEVNULL,
        )
    if os.getuid() == 0:
        os.makedirs(_PRIVILEGE_SEPARATION, mode=0o755, exist_ok=True)
    port = _free_port()
    log = os.path.join(directory, "sshd.log")
    config = os.path.join(directory, "sshd_config")
    with open(config, "w", encoding="utf-8") as text:
        text.write(_configuration(port, host_key, client_key, directory))
    with open(log, "wb") as output:
        # sshd insists on an absolute path of its own, because it executes itself for each session
        process = subprocess.Popen(
            [found["sshd"], "-D", "-e", "-f", config],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: _listens(port) or process.poll() is not None, "sshd listens")
        if process.poll() is not None:
            with open(log, encoding="utf-8", errors="replace") as text:
                raise RuntimeError(f"sshd did not start: {text.read().strip()[-500:]}")
        with open(f"{host_key}.pub", encoding="utf-8") as text:
            line = " ".join(text.read().split()[:2])
        user = pwd.getpwuid(os.getuid()).pw_name
        yield SshServer(process.pid, port, user, client_key, line)
    finally:
        sessions = _children(process.pid)
        process.terminate()
        try:
            process.wait(_DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _end_sessions(sessions)


def _configuration(port: int, host_key: str, client_key: str, directory: str) -> str:
    lines = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {host_key}",
        f"PidFile {os.path.join(directory, 'sshd.pid')}",
        f"AuthorizedKeysFile {client_key}.pub",
        "StrictModes no",  # the keys lie in a temporary directory, others may write beside it
        "PubkeyAuthentication yes",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "UsePAM no",
        "UseDNS no",
        "PrintMotd no",
        "AllowTcpForwarding no",
        "X11Forwarding no",
        "MaxStartups 100",
        "Subsystem sftp internal-sftp",
        "ForceCommand internal-sftp",
        "LogLevel ERROR",
    ]
    return "\n".join(lines) + "\n"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


class _Process(NamedTuple):
    pid: int
    started: str  # clock ticks since boot: with the pid it names one process for good


def _children(pid: int) -> list[_Process]:
    """The descendants of `pid`."""
    parents: dict[int, list[_Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))):
            parents.setdefault(int(fields[1]), []).append(_Process(int(entry), fields[19]))
    found: list[_Process] = []
    waiting = [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child.pid)
    return found


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name (state, parent, ...); empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as text:
            return text.read().rpartition(")")[2].split()
    except OSError:
        return []


def _alive(process: _Process) -> bool:
    fields = _stat_fields(process.pid)
    return bool(fields) and fields[19] == process.started and fields[0] != "Z"


def _end_sessions(sessions: list[_Process]) -> None:
    """Sessions end by themselves when their connection does; what hangs is killed."""
    try:
        wait_until(lambda: not any(map(_alive, sessions)), "sshd sessions end", 5.0)
    except AssertionError:
        for session in filter(_alive, sessions):
            os.kill(session.pid, 9)
