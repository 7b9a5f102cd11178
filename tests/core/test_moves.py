"""What a move on the share does when it finds that it has been done, or half done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wbcache.flush import blocking
from wbcache.share.descriptor import Descriptor


def _move(directory: Path, *, may_replace: bool) -> None:
    """From `old` to `new`, either of which is ours."""
    held = Descriptor(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
    blocking.move(
        held,
        b"old",
        held,
        b"new",
        is_ours=lambda st: True,
        may_replace=(lambda st: True) if may_replace else None,
        noreplace=True,
        link=False,
    )


@pytest.mark.parametrize("may_replace", [True, False])
def test_two_names_of_one_file_become_one(tmp_path: Path, may_replace: bool) -> None:
    (tmp_path / "old").write_text("data")
    os.link(tmp_path / "old", tmp_path / "new")
    _move(tmp_path, may_replace=may_replace)
    assert os.listdir(tmp_path) == ["new"]
    assert (tmp_path / "new").read_text() == "data"


def test_a_file_with_other_names_is_replaced_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("newer")
    (tmp_path / "new").write_text("older")
    os.link(tmp_path / "new", tmp_path / "other")
    _move(tmp_path, may_replace=True)  # though both are accepted as ours
    assert sorted(os.listdir(tmp_path)) == ["new", "other"]
    assert (tmp_path / "new").read_text() == "newer"
    assert (tmp_path / "other").read_text() == "older"


def test_what_has_been_moved_already_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("data")
    _move(tmp_path, may_replace=True)
    assert os.listdir(tmp_path) == ["new"]
