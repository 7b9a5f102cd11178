"""The commands against a daemon whose answers the test decides."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.cli.test_control import FakeDaemon
from tests.waiting import wait_until
from wbcache import cli, errors
from wbcache.cli import launch
from wbcache.control import registry
from wbcache.control.registry import MountRecord
from wbcache.control.server import ControlServer
from wbcache.errors import DaemonStartError, ReportedError, WbcacheError

ROW = {"path": "run\n1/\udcff.pt", "kind": "file", "state": "dirty", "bytes": 2048}
EXIT_CODES = Path(__file__).parents[2] / "docs" / "exit-codes.md"


@dataclass
class Mounted:
    """A served mount: a plain directory stands for the mount point."""

    record: MountRecord
    daemon: FakeDaemon
    call: Callable[[Callable[[], object]], None]
    """Runs something in the daemon's event loop."""
    stop: Callable[[], None]
    """Ends the daemon, whatever it is doing."""


@pytest.fixture
def quiet_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with nothing in it, in place of the machine's."""
    directory = str(tmp_path / "registry")
    monkeypatch.setattr(registry, "_own_directory", lambda: directory)
    monkeypatch.setattr(registry, "_searched_directories", lambda: [directory])
    # Not by name: the package's attribute of that name is the command.
    monkeypatch.setattr(sys.modules["wbcache.cli.status"], "read_mounts", list)


@pytest.fixture
def mounted(tmp_path: Path, quiet_registry: None) -> Iterator[Mounted]:
    """A registered mount with a daemon that answers."""
    with Serving(tmp_path) as mounted:
        registry.register(mounted.record)
        yield mounted


class Serving:
    """A fake daemon in a thread."""

    def __init__(self, base: Path) -> None:
        (base / "m").mkdir()
        (base / "cache").mkdir()
        self._cache = str(base / "cache")
        # No process has this number, so no command waits for it to end.
        self._record = MountRecord(str(base / "m"), "/mnt/share", self._cache, 2**22 + 1)

    def __enter__(self) -> Mounted:
        started = threading.Event()
        daemon = FakeDaemon()
        holder: dict[str, Any] = {}

        async def serve() -> None:
            server = ControlServer(self._cache, daemon)
            holder["stop"] = trio.CancelScope()
            holder["token"] = trio.lowlevel.current_trio_token()
            started.set()
            with holder["stop"]:
                await server.serve()

        self._thread = threading.Thread(target=trio.run, args=(serve,))
        self._thread.start()
        started.wait()
        self._holder = holder
        token = holder["token"]
        return Mounted(self._record, daemon, lambda work: token.run_sync_soon(work), self._stop)

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._holder["token"].run_sync_soon(self._holder["stop"].cancel)
            self._thread.join()


def run(*arguments: str) -> int:
    return cli.run(lambda: cli.command.main(list(arguments), "wbcache", standalone_mode=False))


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[list[str], list[str]]]:
    def read() -> tuple[list[str], list[str]]:
        captured = capsys.readouterr()
        return captured.out.splitlines(), captured.err.splitlines()

    return read


Out = Callable[[], tuple[list[str], list[str]]]


def test_status_of_one_mount_is_an_object(mounted: Mounted, out: Out) -> None:
    assert run("status", mounted.record.mountpoint, "--json") == 0
    (line,), _ = out()
    assert json.loads(line) == {
        "mountpoint": r"/m\xff",
        "mountpoint_bytes_hex": "2f6dff",
        "dirty_files": 3,
    }


def test_status_of_all_is_a_list(mounted: Mounted, out: Out) -> None:
    assert run("status", "--json") == 0
    (line,), _ = out()
    assert [state["dirty_files"] for state in json.loads(line)] == [3]
    assert run("status") == 0
    lines, _ = out()
    assert lines[0] == r"/m\xff"
    assert "3 files" in lines[1]


def test_status_shows_a_mount_whose_daemon_is_gone(
    quiet_registry: None, tmp_path: Path, out: Out
) -> None:
    record = MountRecord(str(tmp_path / "m"), "/mnt/share", str(tmp_path), 2**22 + 1)
    registry.register(record)
    assert run("status", "--json") == 0
    (line,), _ = out()
    (state,) = json.loads(line)
    assert state["mountpoint"] == record.mountpoint
    assert "is not running" in state["errors"][0]
    assert run("status", record.mountpoint) == 9
    _, (line,) = out()
    assert "is not running; mount again with this cache directory to carry on" in line


@pytest.mark.parametrize("command", ["status", "umount", "pending", "flush"])
def test_a_path_that_is_not_on_a_mount(
    quiet_registry: None, tmp_path: Path, out: Out, command: str
) -> None:
    assert run(command, str(tmp_path)) == 9
    lines, (error,) = out()
    assert lines == []
    assert error.startswith(f"wbcache: {tmp_path}: is not ")


def test_the_only_running_mount_needs_no_name(mounted: Mounted, tmp_path: Path, out: Out) -> None:
    (tmp_path / "old").mkdir()
    registry.register(MountRecord("/dead", "/mnt/share", str(tmp_path / "old"), 2**22 + 1))
    assert run("pending") == 0
    mounted.stop()
    assert run("pending") == 9
    assert "nothing is mounted" in out()[1][-1]


def test_pending(mounted: Mounted, out: Out) -> None:
    assert run("pending") == 0
    assert out() == ([], ["wbcache: everything is on the share"])
    mounted.daemon.rows = [ROW]
    assert run("pending", mounted.record.mountpoint) == 0
    (line,), _ = out()
    assert line.split() == ["dirty", "file", "2.0", "KiB", "0.0", "s", r"run\n1/\xff.pt"]
    assert run("pending", "--json") == 0
    (line,), _ = out()
    (row,) = json.loads(line)
    assert bytes.fromhex(row["path_bytes_hex"]) == b"run\n1/\xff.pt"


def test_flush_names_what_is_meant(mounted: Mounted, out: Out) -> None:
    mountpoint = Path(mounted.record.mountpoint)
    (mountpoint / "dir").mkdir()
    (mountpoint / "dir" / "file").write_text("x")
    (mountpoint / "last").symlink_to("dir/file")
    (mountpoint / "out").symlink_to("/etc/passwd")
    mounted.call(mounted.daemon.release.set)
    paths = [mountpoint / "dir", mountpoint / "last", mountpoint / "out", mountpoint]
    assert run("flush", *map(str, paths)) == 0
    # A link means itself and what it leads to, as far as that is on the mount.
    assert mounted.daemon.flushed == [b"dir", b"last", b"dir/file", b"out", b""]
    mounted.daemon.flushed.clear()
    assert run("flush") == 0
    assert mounted.daemon.flushed == [b""]
    assert run("flush", str(mountpoint / "nothing")) == 2


def test_flush_that_leaves_something(mounted: Mounted, out: Out) -> None:
    mounted.daemon.rows = [{**ROW, "reason": "EACCES"}]
    mounted.call(mounted.daemon.release.set)
    assert run("flush", mounted.record.mountpoint) == 3
    (line,), (error,) = out()
    assert line.endswith(r"run\n1/\xff.pt  (EACCES)")
    assert error == "wbcache: flush: not on the share yet: 1 item, 2.0 KiB"


def test_umount(mounted: Mounted, out: Out) -> None:
    mounted.call(mounted.daemon.release.set)
    assert run("umount", mounted.record.mountpoint) == 0
    assert out() == ([], [])
    mounted.daemon.rows = [ROW]
    assert run("umount", mounted.record.mountpoint, "--timeout", "5", "--json") == 3
    (line,), (error,) = out()
    assert json.loads(line)["remaining"][0]["bytes"] == 2048
    assert "unmounted, but not on the share yet: 1 item, 2.0 KiB; mount again" in error


def test_umount_of_a_daemon_that_dies_meanwhile(mounted: Mounted, out: Out) -> None:
    result: list[int] = []
    thread = threading.Thread(
        target=lambda: result.append(run("umount", mounted.record.mountpoint))
    )
    thread.start()
    wait_until(mounted.daemon.started.is_set, "the drain begins")
    mounted.stop()
    thread.join()
    assert result == [3]
    _, (error,) = out()
    assert "its daemon ended before the final flush was done" in error
    assert f"--cache-dir {mounted.record.cache_dir}" in error


def test_an_interrupted_umount_leaves_the_drain_going(tmp_path: Path) -> None:
    with Serving(tmp_path) as mounted:
        registry.register(mounted.record)
        try:
            command = subprocess.Popen(
                [sys.executable, "-m", "wbcache.cli", "umount", mounted.record.mountpoint],
                stderr=subprocess.PIPE,
                text=True,
                # What a script runs in the background ignores it.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            wait_until(mounted.daemon.started.is_set, "the drain begins")
            command.send_signal(signal.SIGINT)
            _, error = command.communicate(timeout=20)
            assert command.returncode == 130
            (line,) = error.splitlines()
            assert "the final flush goes on in the background; 'wbcache umount" in line
            assert not mounted.daemon.cancelled
            mounted.call(mounted.daemon.release.set)
            wait_until(lambda: mounted.daemon.umount_finished, "the drain ends")
        finally:
            registry.unregister(mounted.record)


def start(script: str) -> dict[str, Any]:
    """What `mount` makes of a daemon that runs this script, with the descriptor as `ready`."""
    prologue = "import os, sys; ready = int(sys.argv[sys.argv.index('--ready-fd') + 1]); "
    return launch.start_daemon([sys.executable, "-c", prologue + script], ["--", "/s", "/m"])


def test_mount_waits_for_the_daemons_word() -> None:
    ready = start(
        """os.write(ready, b'{"ready": '); os.write(ready, b'true, "cache_dir": "/c"}\\n')"""
    )
    assert ready == {"ready": True, "cache_dir": "/c"}


def test_mount_passes_on_what_the_daemon_reports() -> None:
    with pytest.raises(ReportedError, match="cache: in use; stop it") as caught:
        start("""os.write(ready, b'{"error": "cache: in use; stop it", "exit": 11}\\n')""")
    assert caught.value.exit == 11


def test_mount_reports_a_daemon_that_only_crashes() -> None:
    with pytest.raises(DaemonStartError, match="status 1; ImportError: libfuse3 is missing"):
        start("raise ImportError('libfuse3 is missing')")


def test_mount_gives_up_on_a_silent_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "START_DEADLINE", 0.3)
    with pytest.raises(DaemonStartError, match=r"not ready after 0\.3 s"):
        start("import signal; signal.sigwait([signal.SIGTERM])")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["frobnicate"], 2),
        (["mount", "/a"], 2),
        (["mount", "-o", "frobnicate", "/a", "/b"], 2),
        (["umount", "--timeout", "soon", "/a"], 2),
        (["mount", "--config", "/nowhere.yaml", "/a", "/b"], 7),
        (["recover", "/nowhere", "--to", "/elsewhere"], 15),
        (["--help"], 0),
        (["--version"], 0),
    ],
)
def test_usage(arguments: list[str], code: int, out: Out) -> None:
    assert run(*arguments) == code
    _, error = out()
    assert len(error) == (1 if code else 0)


def test_recover_refuses_targets_that_hold_something(tmp_path: Path, out: Out) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    cache = str(tmp_path / "cache")
    for target, why in (
        ("full", "is not empty"),
        ("cache/out", "is inside the cache directory"),
        ("full/thesis.tex", "cannot be used (Not a directory)"),
    ):
        assert run("recover", cache, "--to", str(tmp_path / target)) == 15
        assert why in out()[1][0]


def test_an_unexpected_error_is_one_line(
    mounted: Mounted, out: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of course\nnot")

    monkeypatch.setattr(registry, "find", broken)
    assert run("pending", mounted.record.mountpoint) == 1
    (error,) = out()[1]
    assert error.startswith(r"wbcache: unexpected error: ZeroDivisionError: of course\nnot; set ")


def test_output_that_nobody_reads_is_nothing_to_complain_about() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "wbcache.cli", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert result.stderr == ""


def test_every_exit_code_is_documented_once() -> None:
    documented = re.findall(r"^\| (\d+) \|", EXIT_CODES.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(documented) == len(set(documented))
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    used = {cls.exit_code for cls in classes if issubclass(cls, WbcacheError)}
    assert set(map(int, documented)) == used | {errors.EXIT_OK, errors.EXIT_INTERRUPTED}
