"""Every kind of conflict, on real mounts: whatever the other writer did, both sides are kept.

Each runs twice: with a mount that finds out when it flushes, and with one that has seen it before.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conflicts.conftest import Stage
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("fuse")


def replace(path: Path, text: str) -> None:
    """Give a name to a new file, as most programs save."""
    beside = path.with_name("other-writers-temporary")
    beside.write_text(text)
    beside.rename(path)


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def patch(path: Path, text: str) -> None:
    with open(path, "r+") as file:
        file.write(text)


BOTH = {"f": b"theirs", "f!": b"ours"}


def test_rewritten_and_rewritten(stage: Stage) -> None:
    stage.put(f="before")
    (stage.path / "f").write_text("ours")
    (stage.share / "f").write_text("theirs")
    expect_both(stage)


def test_rewritten_and_replaced(stage: Stage) -> None:
    stage.put(f="before")
    (stage.path / "f").write_text("ours")
    replace(stage.share / "f", "theirs")
    expect_both(stage)


def test_replaced_and_replaced(stage: Stage) -> None:
    stage.put(f="before")
    replace(stage.path / "f", "ours")
    replace(stage.share / "f", "theirs")
    expect_both(stage)


def test_created_and_created(stage: Stage) -> None:
    stage.put()
    (stage.path / "f").write_text("ours")
    (stage.share / "f").write_text("theirs")
    expect_both(stage)


def test_created_by_a_rename_and_created(stage: Stage) -> None:
    """The target of a rename was made meanwhile."""
    stage.put(g="ours")
    (stage.path / "g").rename(stage.path / "f")
    (stage.share / "f").write_text("theirs")
    expect_both(stage)


def test_created_by_a_link_and_created(stage: Stage) -> None:
    stage.put(g="ours")
    os.link(stage.path / "g", stage.path / "f")
    (stage.share / "f").write_text("theirs")
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown() == {**BOTH, "g": b"ours"}
    kept(stage)


def test_replaced_by_a_link_and_replaced(stage: Stage) -> None:
    stage.put(f="before", g="ours")
    os.link(stage.path / "g", stage.path / "h")
    (stage.path / "h").rename(stage.path / "f")
    replace(stage.share / "f", "theirs")
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown() == {**BOTH, "g": b"ours"}
    kept(stage)


def test_appended_and_replaced(stage: Stage) -> None:
    """What was appended stands on bytes that are in the cache: ours is kept whole."""
    stage.put(f="before,")
    append(stage.path / "f", "ours")
    replace(stage.share / "f", "theirs")
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown() == {"f": b"theirs", "f!": b"before,ours"}
    kept(stage)


def test_appended_and_appended(stage: Stage) -> None:
    stage.put(f="before,")
    append(stage.path / "f", "ours")
    append(stage.share / "f", "theirs!")
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown() == {"f": b"before,theirs!", "f!": b"before,ours"}
    kept(stage)


def test_what_was_just_made_here_and_then_replaced_is_noticed(stage: Stage) -> None:
    """Not a conflict: ours was on the share already. The kernel must not go on to show it."""
    if stage.notices:
        (stage.path / "f").write_text("before")
        assert (stage.path / "f").stat().st_size == len("before")
        stage.flush()
        replace(stage.share / "f", "theirs and longer")
        shown = stage.path / "f"
        wait_until(lambda: shown.stat().st_size == len("theirs and longer"), "it is noticed")
        wait_until(lambda: shown.read_text() == "theirs and longer", "it is noticed")
        assert stage.conflicts() == []


def test_a_change_is_noticed_by_who_lists_again_and_again(stage: Stage) -> None:
    """The kernel is given attributes with a listing, and must not believe them anew each time."""
    if stage.notices:
        stage.put(f="before")
        with open(stage.share / "f", "w") as file:
            file.write("theirs and longer")

        def shown() -> list[int]:
            return [path.stat().st_size for path in stage.path.iterdir()]

        wait_until(lambda: shown() == [len("theirs and longer")], "it is noticed")


def test_who_has_ours_open_goes_on_with_it(stage: Stage) -> None:
    stage.put(f="before,")
    with open(stage.path / "f", "a", buffering=1) as file:
        file.write("ours\n")
        replace(stage.share / "f", "theirs")
        stage.theirs_is_done()
        stage.mount.client.flush([stage.name.encode()], 2.0)  # ours waits to be closed
        assert (stage.path / "f").read_text() == "theirs"
        file.write("more of ours\n")
    stage.flush()
    held = {"f": b"theirs", "f!": b"before,ours\nmore of ours\n"}
    assert stage.held() == stage.shown() == held
    kept(stage)


def test_patched_and_replaced(stage: Stage) -> None:
    stage.put(f="before")
    patch(stage.path / "f", "OURS")
    replace(stage.share / "f", "theirs")
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown() == {"f": b"theirs", "f!": b"OURSre"}
    kept(stage)


def test_hard_linked_and_one_name_replaced(stage: Stage) -> None:
    """What is written through one name is not written over another writer's file at the other."""
    stage.put(f="before")
    os.link(stage.path / "f", stage.path / "g")
    stage.flush()
    append(stage.path / "g", ",ours")
    replace(stage.share / "f", "theirs")
    stage.theirs_is_done()
    stage.flush()
    held = stage.held()
    assert held == stage.shown()
    assert held["f"] == b"theirs"
    assert held["g"] == b"before,ours"


def test_a_clean_hard_link_of_which_one_name_was_replaced(stage: Stage) -> None:
    stage.put(f="before")
    os.link(stage.path / "f", stage.path / "g")
    stage.flush()
    replace(stage.share / "f", "theirs!")
    if stage.notices:
        wait_until(lambda: (stage.path / "f").read_text() == "theirs!", "it is noticed")
        assert (stage.path / "g").read_text() == "before"
    append(stage.path / "g", ",ours")
    stage.flush()
    held = stage.held()
    assert held == stage.shown()
    assert held["f"] == b"theirs!"
    assert held["g"] == b"before,ours"


def test_a_clean_hard_link_of_which_one_name_was_removed(stage: Stage) -> None:
    stage.put(f="before")
    os.link(stage.path / "f", stage.path / "g")
    stage.flush()
    (stage.share / "f").unlink()
    stage.theirs_is_done()
    append(stage.path / "g", ",ours")
    stage.flush()
    assert stage.held() == stage.shown() == {"g": b"before,ours"}


def test_rewritten_and_removed(stage: Stage) -> None:
    stage.put(f="before")
    (stage.path / "f").write_text("ours")
    (stage.share / "f").unlink()
    expect_ours_again(stage, b"ours")


def test_appended_and_removed(stage: Stage) -> None:
    stage.put(f="before,")
    append(stage.path / "f", "ours")
    (stage.share / "f").unlink()
    expect_ours_again(stage, b"before,ours")


def test_attributes_changed_and_removed(stage: Stage) -> None:
    """There is nothing of ours to keep."""
    stage.put(f="before")
    (stage.path / "f").chmod(0o600)
    (stage.share / "f").unlink()
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown() == {}


def test_linked_and_removed(stage: Stage) -> None:
    stage.put(f="before")
    os.link(stage.path / "f", stage.path / "g")
    (stage.share / "f").unlink()
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown()


def test_renamed_and_removed(stage: Stage) -> None:
    stage.put(f="before")
    (stage.path / "f").rename(stage.path / "g")
    (stage.share / "f").unlink()
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown()


def test_renamed_and_replaced(stage: Stage) -> None:
    stage.put(f="before")
    (stage.path / "f").rename(stage.path / "g")
    replace(stage.share / "f", "theirs")
    stage.theirs_is_done()
    stage.flush()
    assert b"theirs" in stage.held().values()


def test_removed_and_changed(stage: Stage) -> None:
    stage.put(f="before")
    (stage.path / "f").unlink()
    (stage.share / "f").write_text("theirs")
    expect_theirs(stage, "f")
    assert stage.held() == {"f": b"theirs"}


def test_removed_and_removed(stage: Stage) -> None:
    stage.put(f="before")
    (stage.path / "f").unlink()
    (stage.share / "f").unlink()
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown() == {}
    assert stage.conflicts() == []
    assert not stage.reported()


def test_a_removed_directory_with_something_new_in_it(stage: Stage) -> None:
    (stage.path / "d").mkdir()
    (stage.path / "d" / "old").write_text("before")
    stage.flush()
    (stage.path / "d" / "old").unlink()
    (stage.path / "d").rmdir()
    (stage.share / "d" / "new").write_text("theirs")
    expect_theirs(stage, "d")
    assert stage.held() == {"d": b"", "d/new": b"theirs"}


def test_a_removed_tree_with_something_new_deep_in_it(stage: Stage) -> None:
    (stage.path / "d" / "e").mkdir(parents=True)
    stage.flush()
    (stage.path / "d" / "e").rmdir()
    (stage.path / "d").rmdir()
    (stage.share / "d" / "e" / "new").write_text("theirs")
    expect_theirs(stage, "d/e")
    assert stage.held() == {"d": b"", "d/e": b"", "d/e/new": b"theirs"}


def test_a_file_that_became_a_directory(stage: Stage) -> None:
    stage.put(f="before")
    (stage.path / "f").write_text("ours")
    (stage.share / "f").unlink()
    (stage.share / "f").mkdir()
    (stage.share / "f" / "inside").write_text("theirs")
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown() == {"f": b"", "f/inside": b"theirs", "f!": b"ours"}
    kept(stage)


def test_a_directory_that_became_a_file(stage: Stage) -> None:
    (stage.path / "f").mkdir()
    stage.flush()
    (stage.path / "f" / "inside").write_text("ours")
    (stage.share / "f").rmdir()
    (stage.share / "f").write_text("theirs")
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown() == {"f": b"theirs", "f!": b"", "f!/inside": b"ours"}
    kept(stage)


def test_a_removed_file_that_became_a_directory(stage: Stage) -> None:
    stage.put(f="before")
    (stage.path / "f").unlink()
    (stage.share / "f").unlink()
    (stage.share / "f").mkdir()
    (stage.share / "f" / "inside").write_text("theirs")
    expect_theirs(stage, "f", made_anew=True)
    assert stage.held() == {"f": b"", "f/inside": b"theirs"}


def test_a_removed_directory_that_became_a_file(stage: Stage) -> None:
    (stage.path / "f").mkdir()
    stage.flush()
    (stage.path / "f").rmdir()
    (stage.share / "f").rmdir()
    (stage.share / "f").write_text("theirs")
    expect_theirs(stage, "f", made_anew=True)
    assert stage.held() == {"f": b"theirs"}


def test_a_directory_made_on_both_sides(stage: Stage) -> None:
    stage.put()
    (stage.path / "d").mkdir()
    (stage.path / "d" / "a").write_text("ours")
    (stage.share / "d").mkdir()
    (stage.share / "d" / "b").write_text("theirs")
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == {"d": b"", "d/a": b"ours", "d/b": b"theirs"}
    assert stage.shown() == stage.held()
    assert "the two are one now" in stage.reported()


def test_a_symlink_replaced_on_both_sides(stage: Stage) -> None:
    (stage.path / "f").symlink_to("before")
    stage.flush()
    (stage.path / "f").unlink()
    (stage.path / "f").symlink_to("ours")
    (stage.share / "f").unlink()
    (stage.share / "f").symlink_to("theirs")
    expect_both(stage)


def test_a_symlink_removed_and_replaced(stage: Stage) -> None:
    (stage.path / "f").symlink_to("before")
    stage.flush()
    (stage.path / "f").unlink()
    (stage.share / "f").unlink()
    (stage.share / "f").symlink_to("theirs")
    expect_theirs(stage, "f")
    assert stage.held() == {"f": b"theirs"}


def test_a_symlink_made_on_both_sides(stage: Stage) -> None:
    stage.put()
    (stage.path / "f").symlink_to("ours")
    (stage.share / "f").symlink_to("theirs")
    expect_both(stage)


def test_a_symlink_replaced_by_a_file_and_replaced(stage: Stage) -> None:
    (stage.path / "f").symlink_to("before")
    stage.flush()
    replace(stage.path / "f", "ours")
    (stage.share / "f").unlink()
    (stage.share / "f").symlink_to("theirs")
    expect_both(stage)


def test_a_file_replaced_by_a_symlink_and_replaced(stage: Stage) -> None:
    stage.put(f="before")
    (stage.path / "f").unlink()
    (stage.path / "f").symlink_to("ours")
    replace(stage.share / "f", "theirs")
    expect_both(stage)


def expect_both(stage: Stage) -> None:
    """Theirs has the name, ours is kept beside it, and that is told."""
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == BOTH
    assert stage.shown() == BOTH
    kept(stage)


def kept(stage: Stage) -> None:
    """It is told that theirs has the name `f`, and where ours is."""
    (row,) = stage.conflicts()
    assert row["kind"] == "both kept"
    assert row["path"] == row["theirs"] == f"{stage.name}/f"
    assert row["ours"].startswith(f"{stage.name}/f.conflict-")
    ours = stage.mount.path / row["ours"]
    assert row["ours_bytes"] == (None if ours.is_dir() else ours.lstat().st_size)
    assert not row["ours_incomplete"]
    assert "was changed on the share by another writer" in stage.reported()
    assert "was changed on the share by another writer" in stage.mount.log()


def expect_ours_again(stage: Stage, data: bytes) -> None:
    """The other writer removed what was changed here: that is told, and it is there again."""
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown() == {"f": data}
    (row,) = stage.conflicts()
    assert (row["kind"], row["theirs"]) == ("removed there", None)
    assert row["path"] == row["ours"] == f"{stage.name}/f"
    assert "was removed on the share by another writer" in stage.reported()


def expect_theirs(stage: Stage, name: str, *, made_anew: bool = False) -> None:
    """What was removed here and changed there stays, and that is told.

    Unless it is seen in time that both sides removed it and the other writer put something else
    there (``made_anew``).
    """
    stage.theirs_is_done()
    stage.flush()
    assert stage.held() == stage.shown()
    if made_anew and stage.notices:
        assert stage.conflicts() == []
        return
    (row,) = stage.conflicts()
    assert (row["kind"], row["ours"]) == ("removed here", None)
    assert row["path"] == row["theirs"] == f"{stage.name}/{name}"
    assert "was removed here and changed on the share" in stage.reported()
