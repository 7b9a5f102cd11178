"""Programs beside a test, each in processes of its own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.endtoend.stage import Stage

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 240.0
OUTPUT_TAIL = 4000
NOTHING: Mapping[str, str] = {}


class Beside:
    """A part of a program that goes on only when it is told to."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self._process = process
        self._errors = errors
        self._said = ""

    def says(self, message: str) -> None:
        """Wait until it has said so; other lines of it are passed over."""
        out = self._process.stdout
        assert out is not None
        while select.select([out], [], [], DEADLINE)[0]:
            line = out.readline()
            self._said = line.decode().strip()
            if self._said == message:
                return
            assert line, f"it ended before {message!r}: {self.errors()}"
        raise AssertionError(f"it does not come to {message!r}: {self.errors()}")

    def go(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    def ends(self) -> None:
        """Let it go on to its end, which must be a good one."""
        self._process.communicate(timeout=DEADLINE)
        assert self._process.returncode == 0, self.errors()

    def breaks(self) -> str:
        """Wait until it ends with an error; returns the last that it said."""
        out, _ = self._process.communicate(timeout=DEADLINE)
        assert self._process.returncode != 0
        return [self._said, *out.decode().split()][-1]

    def errors(self) -> str:
        """The end of what it has written on its standard error."""
        return self._errors.read_text(errors="replace")[-OUTPUT_TAIL:]


class Programs:
    """Runs programs that find none of the user's settings and reach no network.

    ``home`` is their home directory, of this test.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._environment = {
            **os.environ,
            "HOME": str(home),
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "GIT_CONFIG_NOSYSTEM": "1",
        }

    def command(
        self,
        *command: str | os.PathLike[str],
        cwd: Path | None = None,
        code: int = 0,
        variables: Mapping[str, str] = NOTHING,
    ) -> str:
        """What a command prints; it must end with ``code``. ``variables`` are laid over its
        environment."""
        done = subprocess.run(
            command,
            cwd=cwd or self._home,
            env={**self._environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        words = " ".join(map(str, command))
        said = (done.stdout + done.stderr)[-OUTPUT_TAIL:]
        assert done.returncode == code, f"{words}: exit code {done.returncode}\n{said}"
        return done.stdout

    def run(self, program: str, part: str, directory: Path, *, code: int = 0) -> str:
        """What a part of a program prints that is run on a directory."""
        return self.command(*_part(program, part, directory), code=code)

    @contextmanager
    def beside(self, program: str, part: str, directory: Path) -> Iterator[Beside]:
        """A part that says where it is and waits; it has ended when the block has."""
        errors = self._home / f"{program}-{part}.err"
        with (
            open(errors, "wb") as stderr,
            subprocess.Popen(
                _part(program, part, directory),
                bufsize=0,
                cwd=self._home,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            ) as process,
        ):
            try:
                yield Beside(process, errors)
            finally:
                process.kill()


def _part(program: str, part: str, directory: Path) -> Sequence[str | Path]:
    return (sys.executable, "-m", f"tests.libraries.programs.{program}", part, directory)


def there_and_back(programs: Programs, stage: Stage, program: str) -> None:
    """A program writes on the mount; what it wrote is read from the mount, and from the share once
    that has it."""
    programs.run(program, "write", stage.path)
    programs.run(program, "check", stage.path)
    stage.settle()
    programs.run(program, "check", stage.backing)


def through_trouble(programs: Programs, stage: Stage, program: str) -> None:
    """A program writes while the share hangs, and the daemon is killed in the flush after that."""
    hang = stage.share.hang()
    programs.run(program, "write", stage.path)
    programs.run(program, "check", stage.path)
    stage.share.release(hang)
    stage.mount.kill()
    stage.mount.remount()
    programs.run(program, "check", stage.path)
    stage.settle()
    programs.run(program, "check", stage.backing)
