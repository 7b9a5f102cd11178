"""The daemon's log stays small, however often the same thing goes wrong."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from wbcache.daemon.log import A_MINUTE, MAX_BYTES, NAME, OLDER_NAME, Sparing


def record(text: str, *values: object, name: str = "wbcache.flush") -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "", 0, text, values, None)


def test_messages_of_one_kind_are_counted_when_they_are_many() -> None:
    now = 0.0
    sparing = Sparing(lambda: now)
    passed = [sparing.filter(record("%s failed", f"file-{n}")) for n in range(A_MINUTE + 50)]
    assert passed == [True] * A_MINUTE + [False] * 50
    assert sparing.filter(record("something else"))
    assert sparing.filter(record("%s failed", "file", name="wbcache.other"))
    now = 60.0
    later, next_one = record("%s failed", "file"), record("%s failed", "file")
    assert sparing.filter(later) and vars(later)["left_out"] == 50
    assert sparing.filter(next_one) and vars(next_one)["left_out"] == 0


PROGRAM = """
import logging, os, signal, sys
from wbcache.daemon.log import log_into
log_into(sys.argv[1], foreground=False)
for number in range(int(sys.argv[2])):
    logging.getLogger(f"wbcache.{number // 100}").warning("%d %s", number, "x" * 1000)
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_the_file_is_bounded_and_goes_on_taking_stacks(tmp_path: Path) -> None:
    """More is logged than two files hold."""
    count = 3 * MAX_BYTES // 1000
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path, str(count)], check=True, timeout=60)
    assert sorted(os.listdir(tmp_path)) == [NAME, OLDER_NAME]
    assert all(
        (tmp_path / name).stat().st_size <= MAX_BYTES + 65536 for name in os.listdir(tmp_path)
    )
    last = (tmp_path / NAME).read_text().splitlines()
    assert any(f" {count - 1} xxx" in line for line in last[-20:])
    assert "Current thread" in "\n".join(last[-5:])
