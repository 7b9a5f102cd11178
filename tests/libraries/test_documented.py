"""The table of libraries in docs/compatibility.md is the matrix, and every row has its test."""

from __future__ import annotations

import re

from tests.libraries.matrix import HEADER, ROWS
from tests.libraries.running import REPOSITORY

VERSION = re.compile(r"\d+(\.\w+)+")


def test_the_table_is_the_matrix() -> None:
    text = (REPOSITORY / "docs" / "compatibility.md").read_text()
    section = text.split("\n## Libraries and programs\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert table[:2] == HEADER
    versions = [line.split(" | ")[1] for line in table[2:]]
    assert table[2:] == [row.line(version) for row, version in zip(ROWS, versions, strict=True)]
    assert all(map(VERSION.fullmatch, versions)), versions


def test_every_row_has_its_test() -> None:
    for row in ROWS:
        for test in row.tests:
            path, _, name = test.partition("::")
            source = (REPOSITORY / "tests" / path).read_text()
            function, _, parameter = name.partition("[")
            assert f"def {function}(" in source, test
            assert all(f'"{word}"' in source for word in parameter.rstrip("]").split("-") if word)
