"""Programs of a working directory: git, rsync, vim, and pip in a virtual environment."""

from __future__ import annotations

import os
import random
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.endtoend.stage import Stage
from tests.libraries.running import Programs

pytestmark = pytest.mark.timeout(180)

CONFIG = {"flush": {"idle_delay": "100ms", "max_age": "300ms"}}

ALONE = {"PYTHONPATH": ""}
"""For what must not find this checkout."""

STAMP = 1_500_000_000_123_456_789


def need(program: str) -> None:
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")


def test_git(stage: Stage, programs: Programs, tmp_path: Path) -> None:
    need("git")
    work, origin = stage.path / "work", stage.path / "origin.git"

    def git(*arguments: str | Path, cwd: Path = work) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        return programs.command("git", *who, *arguments, cwd=cwd)

    git("init", "-q", "--bare", origin, cwd=stage.path)
    git("clone", "-q", origin, work, cwd=stage.path)
    for commit in range(4):
        for n in range(10):
            path = work / f"d{n % 3}" / f"file{n}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(random.Random(commit * 100 + n).randbytes(500) * (n + 1))
        git("add", "-A")
        git("commit", "-q", "-m", f"commit {commit}")
    git("push", "-q", "origin", "HEAD:main")
    git("switch", "-q", "-c", "side", "HEAD~2")
    (work / "side").write_text("of the side\n")
    git("add", "side")
    git("commit", "-q", "-m", "side")
    git("merge", "-q", "-m", "merged", "main")
    git("tag", "-a", "v1", "-m", "v1")
    git("gc", "-q", "--prune=now")
    git("push", "-q", "--tags", "origin", "HEAD:main")
    git("clone", "-q", origin, stage.path / "second", cwd=stage.path)
    git("worktree", "add", "-q", stage.path / "tree", "v1")
    head = git("rev-parse", "HEAD")
    for place in (work, stage.path / "second", stage.path / "tree"):
        git("fsck", "--strict", "--full", cwd=place)
        assert git("status", "--porcelain", cwd=place) == ""
    stage.settle()
    for name in ("work", "origin.git", "second"):
        git("fsck", "--strict", "--full", cwd=stage.backing / name)
        assert (
            git("rev-parse", "main" if name == "origin.git" else "HEAD", cwd=stage.backing / name)
            == head
        )
    git("clone", "-q", stage.backing / "origin.git", tmp_path / "clone", cwd=tmp_path)
    assert (tmp_path / "clone" / "side").read_text() == "of the side\n"


def _tree(top: Path) -> None:
    """Files of all sizes with odd times and modes, links of both kinds, empty things."""
    for n in range(60):
        path = top / f"d{n % 5}" / f"e{n % 2}" / f"file {n}"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(random.Random(n).randbytes(n * n * 20))
        path.chmod(0o400 | n % 0o70)
        os.utime(path, ns=(STAMP, STAMP + n * 10**9))
    os.link(top / "d0" / "e0" / "file 0", top / "hard")
    os.symlink("d0/nothing", top / "dangling")
    (top / "empty").mkdir()
    (top / "d1").chmod(0o710)
    for directory, _, _ in os.walk(top):
        os.utime(directory, ns=(STAMP, STAMP))


def test_a_second_rsync_has_nothing_to_do(stage: Stage, programs: Programs, tmp_path: Path) -> None:
    need("rsync")
    tree = tmp_path / "tree"
    _tree(tree)

    def rsync(*arguments: str | Path) -> str:
        return programs.command("rsync", "-aH", "--itemize-changes", *arguments)

    assert rsync(f"{tree}/", stage.path / "copy/") != ""
    assert rsync(f"{tree}/", stage.path / "copy/") == ""
    stage.settle()
    assert rsync(f"{tree}/", stage.path / "copy/") == ""
    assert rsync("--checksum", f"{tree}/", stage.path / "copy/") == ""
    assert rsync("--checksum", "--dry-run", f"{tree}/", f"{stage.backing}/copy/") == ""
    with open(tree / "d4" / "e1" / "file 59", "r+b") as file:
        file.write(b"changed")
    (tree / "d2" / "e0" / "file 12").unlink()
    changed = rsync("--inplace", "--no-whole-file", "--delete", f"{tree}/", stage.path / "copy/")
    assert [line.split(maxsplit=1)[1] for line in changed.splitlines() if "file" in line] == [
        "d2/e0/file 12",
        "d4/e1/file 59",
    ]
    stage.settle()
    # What is replaced on the share gives its directory there a new time; not so in the mount.
    there = ("--checksum", "--delete", "--omit-dir-times", "--dry-run")
    assert rsync(*there, f"{tree}/", f"{stage.backing}/copy/") == ""
    assert rsync(f"{stage.path}/copy/", tmp_path / "back/") != ""
    assert rsync("--checksum", f"{tree}/", tmp_path / "back/") == ""


@pytest.mark.parametrize("how", ["no", "yes", "auto"])
def test_vim_saves(how: str, stage: Stage, programs: Programs) -> None:
    """By renaming the old file to the backup, or by copying it; with a swap file."""
    need("vim")
    path = stage.path / "train.py"
    path.write_text("lr = 0\n")
    path.chmod(0o754)
    settings = f"set nocompatible backup writebackup backupcopy={how} backupskip= swapfile undofile"
    for turn in range(5):
        edit = f"%s/lr = {turn}/lr = {turn + 1}/"
        programs.command("vim", "-es", "-u", "NONE", "-c", settings, "-c", edit, "-c", "wq", path)
        if turn == 2:
            stage.flush()
    stage.settle()
    for place in (stage.path, stage.backing):
        assert (place / "train.py").read_text() == "lr = 5\n"
        assert (place / "train.py~").read_text() == "lr = 4\n"
        assert (place / "train.py").stat().st_mode & 0o777 == 0o754
        assert sorted(os.listdir(place)) == [".train.py.un~", "train.py", "train.py~"]


def _wheel(directory: Path, version: str) -> Path:
    """A small package, as pip installs it."""
    info = f"demo-{version}.dist-info"
    files = {
        "demo/__init__.py": f"def main():\n    print('demo {version}')\n",
        **{f"demo/part{n}.py": f"NUMBER = {n}\n" for n in range(30)},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ndemo = demo:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    path = directory / f"demo-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


@pytest.mark.parametrize(
    "with_pip", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_pip_installs_into_a_virtual_environment(
    with_pip: bool, stage: Stage, programs: Programs, tmp_path: Path
) -> None:
    """With the pip of the environment, of some 900 files, or one from elsewhere."""
    environment = stage.path / "venv"
    without = [] if with_pip else ["--without-pip"]
    programs.command(sys.executable, "-m", "venv", *without, environment)
    python = environment / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip"]
    if not with_pip:
        pip = [sys.executable, "-m", "pip", "--python", python]

    def run_pip(*arguments: str | Path) -> None:
        compiling = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}
        programs.command(*pip, "--disable-pip-version-check", *arguments, variables=compiling)

    def demo(place: Path) -> str:
        """What the package says that is installed there."""
        script = "import demo, demo.part29; demo.main()"
        return programs.command(place / "venv" / "bin" / "python", "-c", script, variables=ALONE)

    run_pip("install", "--no-index", _wheel(tmp_path, "1.0"))
    assert programs.command(environment / "bin" / "demo", variables=ALONE) == "demo 1.0\n"
    run_pip("install", "--no-index", "--upgrade", _wheel(tmp_path, "2.0"))
    assert programs.command(environment / "bin" / "demo", variables=ALONE) == "demo 2.0\n"
    stage.settle(timeout=90)
    assert demo(stage.backing) == demo(stage.path) == "demo 2.0\n"
    run_pip("uninstall", "--yes", "demo")
    stage.settle(timeout=90)
    assert not list((stage.backing / "venv").glob("lib/*/site-packages/demo*"))
