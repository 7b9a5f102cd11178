"""What was tested with which library, and the table of it in docs/compatibility.md.

    python -m tests.libraries.matrix

prints the table with the versions that are installed here.
"""

from __future__ import annotations

import platform
import re
import sqlite3
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata


def _package(name: str) -> Callable[[], str]:
    def version() -> str:
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            return ""

    return version


def _program(name: str) -> Callable[[], str]:
    def version() -> str:
        try:
            done = subprocess.run(
                [name, "--version"], capture_output=True, text=True, check=False, timeout=30
            )
        except OSError:
            return ""
        found = re.search(r"\d+(\.\d+)+", done.stdout)
        return found[0] if found else ""

    return version


@dataclass(frozen=True)
class Row:
    """One library or program."""

    name: str
    version: Callable[[], str]
    """As it is installed here; empty if it is not."""
    done: str
    tests: tuple[str, ...]
    """Relative to tests/."""
    remark: str = ""

    def line(self, version: str) -> str:
        """The row of the table."""
        tests = ", ".join(f"`{test}`" for test in self.tests)
        result = "as on a disk" + (f"; {self.remark}" if self.remark else "")
        return f"| {self.name} | {version} | {self.done} | {result} | {tests} |"


HEADER = [
    "| | version | what was done | result | test |",
    "| --- | --- | --- | --- | --- |",
]

FORMATS = "libraries/test_formats.py"
PROCESSES = "libraries/test_processes.py"
TOOLS = "libraries/test_tools.py"
FRAMEWORKS = "libraries/test_frameworks.py"
EVENTS = "endtoend/test_tensorboard.py"
PATTERNS = "endtoend/test_patterns.py"


def _formats(name: str) -> tuple[str, ...]:
    return (f"{FORMATS}::test_it_is_read_back_from_the_share[{name}]",)


def _together(*names: str) -> tuple[str, ...]:
    return tuple(f"{PROCESSES}::test_one_reads_what_another_writes[{name}]" for name in names)


def _turns(name: str) -> tuple[str, ...]:
    return (f"{PROCESSES}::test_processes_take_turns[{name}]",)


def _framework(name: str) -> tuple[str, ...]:
    return (f"{FRAMEWORKS}::test_it_is_read_back_from_the_share[{name}]",)


EVENTS_TEST = (f"{EVENTS}::test_events_are_written_at_local_speed_and_the_share_follows",)

SURVIVES = f"{PROCESSES}::test_what_was_committed_survives_a_kill_of_the_daemon"
RESUMED = f"{FRAMEWORKS}::test_another_machine_resumes"

ROWS = [
    Row(
        "numpy",
        _package("numpy"),
        "save, savez, savetxt, memmap and open_memmap, the last pages never flushed",
        _formats("numpy"),
    ),
    Row(
        "h5py",
        _package("h5py"),
        "datasets resized, compressed, deleted, changed in place; SWMR: a second process reads"
        " while one writes",
        _formats("h5py") + _together("h5py-append"),
    ),
    Row(
        "zarr",
        _package("zarr"),
        "groups, chunks, shards, appending, consolidated metadata, a store in a zip file",
        _formats("zarr"),
    ),
    Row(
        "lmdb",
        _package("lmdb"),
        "transactions through calls and through the mapping (writemap, map_async), compacting"
        " copy, a second process that reads; the daemon killed between commits",
        (*_formats("lmdb"), *_together("lmdb-append", "lmdb-append_mapped"), SURVIVES),
    ),
    Row(
        "SQLite",
        lambda: sqlite3.sqlite_version,
        "rollback journal and WAL: one process reads while one writes, two write, the daemon killed"
        " between commits, integrity_check",
        (*_together("sqlite-append"), *_turns("sqlite"), SURVIVES, f"{PATTERNS}::test_sqlite"),
    ),
    Row(
        "safetensors",
        _package("safetensors"),
        "save_file over an older file, load_file, slices through safe_open",
        _formats("safetensors"),
    ),
    Row(
        "filelock",
        _package("filelock"),
        "FileLock and SoftFileLock between processes; the holder killed",
        (*_turns("filelock"), f"{PROCESSES}::test_a_lock_goes_with_the_process_that_has_it"),
    ),
    Row(
        "joblib",
        _package("joblib"),
        "dump, mapped load, Memory, workers that share an array through a file",
        _formats("joblib"),
    ),
    Row(
        "Pillow",
        _package("pillow"),
        "images in six formats, several pages, one file rewritten",
        _formats("pillow"),
    ),
    Row(
        "Python",
        platform.python_version,
        "RotatingFileHandler, tar shards streamed as WebDataset does, zipfile, shelve, pickle",
        _formats("stdlib"),
    ),
    Row(
        "TensorBoard",
        _package("tensorboard"),
        "5,000 scalars; the share's file is at every moment a prefix, in the same file",
        EVENTS_TEST,
    ),
    Row(
        "tensorboardX",
        _package("tensorboardX"),
        "the same, through a descriptor held open",
        EVENTS_TEST,
    ),
    Row(
        "git",
        _program("git"),
        "init, clone, commit, merge, push, gc, worktree, fsck in the mount and on the share",
        (f"{TOOLS}::test_git", f"{PATTERNS}::test_git"),
    ),
    Row(
        "rsync",
        _program("rsync"),
        "-aH, a second run that has nothing to do, --inplace, --delete, --checksum with the share",
        (f"{TOOLS}::test_a_second_rsync_has_nothing_to_do",),
        "a directory on the share gets a new time when a file in it is replaced there",
    ),
    Row(
        "vim",
        _program("vim"),
        "saves with backup, swap and undo file, with each backupcopy",
        (f"{TOOLS}::test_vim_saves",),
    ),
    Row(
        "pip",
        _package("pip"),
        "venv made on the mount, install, upgrade and uninstall there; the share's copy runs",
        (f"{TOOLS}::test_pip_installs_into_a_virtual_environment",),
    ),
    Row(
        "coreutils, tar, sed",
        _program("cp"),
        "cp -a, cp --sparse, mv, install, dd, truncate, rm; tar -xp; sed -i",
        (f"{PATTERNS}::test_coreutils_and_tar",),
    ),
    Row(
        "PyTorch",
        _package("torch"),
        "torch.save over older files and with rotation, load with and without mmap, resuming; each"
        " checkpoint on the share is whole at every moment",
        (*_framework("torch"), RESUMED, f"{FRAMEWORKS}::test_checkpoints_on_the_share_are_whole"),
    ),
    Row(
        "torch SummaryWriter",
        _package("torch"),
        "scalars, histograms, images, hparams, read by TensorBoard from the share",
        _framework("torch_events"),
    ),
    Row(
        "torch.distributed",
        _package("torch"),
        "two processes meet through a FileStore; checkpoint save, async_save and load",
        _framework("torch_distributed"),
    ),
    Row(
        "Lightning",
        _package("lightning"),
        "ModelCheckpoint with save_top_k and save_last='link', CSVLogger, TensorBoardLogger,"
        " resuming",
        (*_framework("lightning"), RESUMED),
    ),
    Row(
        "transformers",
        _package("transformers"),
        "Trainer with save_total_limit, resuming from the last checkpoint",
        (*_framework("transformers"), RESUMED),
    ),
    Row(
        "orbax",
        _package("orbax-checkpoint"),
        "CheckpointManager, asynchronous, max_to_keep",
        _framework("orbax"),
    ),
    Row(
        "huggingface_hub",
        _package("huggingface-hub"),
        "two revisions downloaded from a local server into a cache, and found there offline",
        _framework("huggingface_hub"),
    ),
    Row(
        "mlflow",
        _package("mlflow-skinny"),
        "file store: runs, metrics, tags, artifacts, a deleted run",
        _framework("mlflow"),
        "artifact addresses name the mount",
    ),
    Row(
        "wandb",
        _package("wandb"),
        "offline run, its records read from the share",
        _framework("wandb"),
    ),
    Row(
        "pandas, pyarrow",
        _package("pyarrow"),
        "Parquet, a partitioned data set, CSV appended, an Arrow file read through a mapping",
        _framework("pyarrow"),
    ),
]

if __name__ == "__main__":
    print("\n".join([*HEADER, *(row.line(row.version() or "?") for row in ROWS)]))
