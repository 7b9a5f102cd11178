"""Mounts over a directory that the tests change behind their backs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mounting import NEVER_BY_ITSELF, Mounted, contents, merge
from tests.waiting import wait_until

BLIND = {"share": {"attr_ttl": "1d", "dir_ttl": "1d"}}
"""Settings under which the mount looks at nothing twice."""

Row = dict[str, Any]


class Stage:
    """A directory of a mounted share for one test.

    ``notices`` tells whether the mount sees what another writer does before it flushes.
    """

    def __init__(self, mount: Mounted, name: str, *, notices: bool) -> None:
        self.mount, self.name, self.notices = mount, name, notices
        self.path = mount.path / name
        self.share = mount.source / name
        self.path.mkdir()

    def put(self, **files: str) -> None:
        """Files that both sides know."""
        for name, text in files.items():
            (self.path / name).write_text(text)
        self.flush()

    def theirs_is_done(self) -> None:
        """The other writer has done its part: the mount may notice."""
        if self.notices:
            (self.share / "sentinel").write_text("")
            wait_until(lambda: "sentinel" in self._look(), "it is noticed")
            (self.share / "sentinel").unlink()
            wait_until(lambda: "sentinel" not in self._look(), "it is noticed")

    def _look(self) -> set[str]:
        found = set()
        for path in self.path.iterdir():
            found.add(path.name)
            with contextlib.suppress(FileNotFoundError):
                path.lstat()
        return found

    def flush(self) -> None:
        self.mount.flush(self.name, timeout=8.0)

    def conflicts(self) -> list[Row]:
        """What `wbcache conflicts` lists of this directory, paths relative to it."""
        return [row for row in listed(self.mount) if row["path"].startswith(f"{self.name}/")]

    def held(self) -> dict[str, bytes]:
        """What the share holds; the host and time in the names of conflicts are left out."""
        return {plain(name): data for name, (_, data) in contents(self.share).items()}

    def shown(self) -> dict[str, bytes]:
        """The same of the mount."""
        return {plain(name): data for name, (_, data) in contents(self.path).items()}

    def reported(self) -> str:
        """What the status tells of this directory."""
        return "\n".join(
            event["text"] for event in self.mount.status()["events"] if self.name in event["text"]
        )


def plain(path: str) -> str:
    return "/".join(
        part.partition(".conflict-")[0] + ("!" if ".conflict-" in part else "")
        for part in path.split("/")
    )


def listed(mount: Mounted) -> list[Row]:
    """What `wbcache conflicts` lists, paths relative to the mount."""
    return mount.client.conflicts()


@pytest.fixture(scope="module")
def mounts() -> Iterator[dict[bool, Mounted]]:
    with tempfile.TemporaryDirectory(prefix="wbcache-conflicts-") as base:
        blind, noticing = Path(base, "blind"), Path(base, "noticing")
        with (
            Mounted(blind, config=merge(NEVER_BY_ITSELF, BLIND)) as first,
            Mounted(noticing, config=NEVER_BY_ITSELF) as second,
        ):
            yield {False: first, True: second}


@pytest.fixture(params=[False, True], ids=["blind", "noticing"])
def stage(
    mounts: dict[bool, Mounted], request: pytest.FixtureRequest, fuse: None
) -> Iterator[Stage]:
    name = request.node.originalname.removeprefix("test_")
    yield Stage(mounts[request.param], name, notices=request.param)
