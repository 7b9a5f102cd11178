"""What a training run does to its output directory, in two parts, as a program of its own.

    python -m tests.cli.workload first|second|show DIRECTORY

`show` prints everything below the directory as JSON, so that a user whose mount nobody else may
enter can be asked.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import stat
import sys
from pathlib import Path

OLD = bytes(range(256)) * 4096
"""What `old.bin` holds on the share before the run."""


def prepare(share: Path) -> None:
    """What is on the share before it is mounted."""
    (share / "old.bin").write_bytes(OLD)
    (share / "kept").mkdir()
    (share / "kept" / "note.txt").write_text("from before\n")
    (share / "rotated").mkdir()
    (share / "rotated" / "step-0.ckpt").write_bytes(OLD)


def first(top: Path) -> None:
    """A run up to its first checkpoints."""
    for number in range(300):
        with open(top / "events.out.tfevents.1", "ab", buffering=0) as file:
            file.write(f"event {number:08d}".encode().ljust(41, b".") + b"\n")
    with open(top / "train.log", "ab", buffering=0) as log:
        for step in range(50):
            log.write(f"step {step}\n".encode())
            os.fsync(log.fileno())
    _patch(top / "old.bin")
    for generation in range(3):
        temporary = top / "last.ckpt.tmp"
        temporary.write_bytes(os.urandom(300_000) + bytes([generation]))
        os.replace(temporary, top / "last.ckpt")
    _commit(top, "step-1")
    (top / "latest").symlink_to("step-1")
    _map(top / "array.npy")
    (top / "large.bin").write_bytes(OLD * 20)
    _scratch(top)
    (top / "mode.sh").write_text("#!/bin/sh\n")
    os.chmod(top / "mode.sh", 0o750)
    os.utime(top / "mode.sh", ns=(1_600_000_000_000_000_000, 1_600_000_000_000_000_000))
    _link(top / "mode.sh", top / "linked.sh")


def second(top: Path) -> None:
    """The run goes on: more of the same files, and the rotation of old checkpoints."""
    for number in range(300, 400):
        with open(top / "events.out.tfevents.1", "ab", buffering=0) as file:
            file.write(f"event {number:08d}".encode().ljust(41, b".") + b"\n")
    with open(top / "old.bin", "ab") as file:
        file.write(b"appended again")
    _commit(top, "step-2")
    os.symlink("step-2", top / "latest.new")
    os.replace(top / "latest.new", top / "latest")
    shutil.rmtree(top / "step-1")
    os.unlink(top / "rotated" / "step-0.ckpt")
    os.rename(top / "kept", top / "renamed")
    (top / "last.ckpt").write_bytes(b"rewritten in place")


def show(top: Path) -> dict[str, list[object]]:
    """Path -> type and mode, size, and a digest of the content or the link's target."""
    shown: dict[str, list[object]] = {}
    for directory, subdirectories, files in os.walk(top):
        if Path(directory) == top and ".wbcache" in subdirectories:
            subdirectories.remove(".wbcache")
        for name in (*subdirectories, *files):
            path = Path(directory, name)
            info = path.lstat()
            content = ""
            if stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(info.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
            shown[str(path.relative_to(top))] = [oct(info.st_mode), size, content]
    return shown


def _patch(path: Path) -> None:
    """Change the middle of a file that is only on the share, and append to it."""
    with open(path, "r+b") as file:
        file.seek(500_000)
        file.write(b"patched")
        file.seek(0, os.SEEK_END)
        file.write(b"appended")


def _commit(top: Path, name: str) -> None:
    """A directory that gets its name when everything is in it."""
    temporary = top / f"{name}.tmp"
    (temporary / "shards").mkdir(parents=True)
    for shard in range(4):
        (temporary / "shards" / f"{shard}.bin").write_bytes(os.urandom(50_000))
    (temporary / "DONE").write_text("")
    os.rename(temporary, top / name)


def _map(path: Path) -> None:
    """Written through a shared mapping after the descriptor is closed."""
    with open(path, "w+b") as file:
        file.truncate(200_000)
        mapping = mmap.mmap(file.fileno(), 200_000)
    mapping[100_000:100_006] = b"mapped"
    mapping.flush()
    mapping.close()


def _scratch(top: Path) -> None:
    """What never needs to reach the share."""
    with open(top / "unlinked", "w+b") as file:
        os.unlink(top / "unlinked")
        file.write(b"nobody sees this")
    (top / "scratch" / "deep").mkdir(parents=True)
    (top / "scratch" / "deep" / "file").write_text("short-lived")
    shutil.rmtree(top / "scratch")


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "show":
        print(json.dumps(show(where), sort_keys=True))
    else:
        {"first": first, "second": second}[what](where)
