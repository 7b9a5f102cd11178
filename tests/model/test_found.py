"""Programs that once went wrong, as short as they could be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.programs import CAPABILITIES, Step, execute
from tests.model.world import Setting

FULL, NO_NOREPLACE, PLAIN = (Setting(capabilities=capabilities) for capabilities in CAPABILITIES)

FOUND: dict[str, tuple[Setting, list[Step]]] = {
    "a directory's time after a name came and went in it, and a kill": (
        FULL,
        [
            ("mkdir", 0, 0, 0),
            ("utimens", 0, 0, 0),
            ("open_file", 1511, 0, 1),
            ("unlink", 0, 0, 0),
            ("kill", 0, 0, 0),
        ],
    ),
    "another machine replaces the second name of a file": (
        FULL,
        [
            ("open_file", 0, 0, 1),
            ("link", 0, 1, 0),
            ("outside", 1, 1, 1),
        ],
    ),
    "attributes asked for before it is known what the last daemon renamed": (
        FULL,
        [
            ("mkdir", 0, 0, 0),
            ("flush_all", 0, 0, 0),
            ("rename", 0, 2, 0),
            ("wait", 0, 0, 0),
            ("kill", 1, 15, 0),
            ("fail", 0, 0, 0),
            ("look", 0, 0, 0),
        ],
    ),
    "a file is removed when its temporary is complete": (
        NO_NOREPLACE,
        [
            ("open_file", 0, 0, 1),
            ("fail", 6, 0, 0),
            ("wait", 0, 0, 0),
            ("run", 0, 0, 0),
            ("unlink", 0, 0, 0),
        ],
    ),
    "a directory is removed while nobody knows yet that the share has it, and again a kill": (
        PLAIN,
        [
            ("mkdir", 3611, 0, 0),
            ("mkdir", 0, 1, 0),
            ("wait", 0, 0, 0),
            ("kill", 0, 15, 0),
            ("rmdir", 0, 0, 0),
            ("kill", 0, 0, 0),
            ("list", 0, 0, 0),
        ],
    ),
    "a directory that its owner may not use changes hands while something goes from it": (
        FULL,
        [
            ("mkdir", 0, 0, 0),
            ("open_file", 2995, 0, 0),
            ("chmod", 0, 0, 0),
            ("flush_all", 0, 0, 0),
            ("unlink", 0, 0, 0),
            ("chown", 0, 0, 0),
        ],
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_found(tmp_path: Path, what: str) -> None:
    execute(tmp_path, *FOUND[what])
