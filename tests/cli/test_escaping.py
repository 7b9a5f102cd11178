"""Names in output: nothing in a name may break its line, and JSON must be strict."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wbcache.cli.output import say_json, say_rows
from wbcache.errors import WbcacheError
from wbcache.escaping import json_name, one_line, printable, to_bytes, to_text

NASTY = b"a\nb\x1b[31m\x7f\xff\\\xe2\x80\xaetxt.exe\xc2\x85"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"plain name-1.txt", "plain name-1.txt"),
        ("größe/数据".encode(), "größe/数据"),
        (b"a\nb\tc\rd", r"a\nb\tc\rd"),
        (b"back\\slash", r"back\\slash"),
        (b"\x1b[2J\x07\x7f", r"\x1b[2J\x07\x7f"),
        (b"\xff\xfe", r"\xff\xfe"),
        ("\u202egnp.exe".encode(), r"\u202egnp.exe"),
        ("line\u2028two".encode(), r"line\u2028two"),
        ("\U000e0041tag".encode(), r"\U000e0041tag"),
    ],
)
def test_printable(name: bytes, shown: str) -> None:
    assert printable(name) == shown


@given(st.binary())
def test_printable_is_one_clean_line_and_distinct(name: bytes) -> None:
    shown = printable(name)
    assert shown.isprintable() or " " in shown
    assert len(shown.splitlines()) <= 1
    shown.encode("utf-8")
    assert to_bytes(to_text(name)) == name
    if name != b"x":
        assert shown != printable(b"x")


@given(st.binary())
def test_json_names_are_strict_and_exact(name: bytes) -> None:
    members = json.loads(json.dumps(json_name("path", name)).encode("utf-8"))
    members["path"].encode("utf-8")
    if "path_bytes_hex" in members:
        assert bytes.fromhex(members["path_bytes_hex"]) == name
    else:
        assert members["path"].encode("utf-8") == name


def test_errors_stay_on_one_line() -> None:
    text = str(WbcacheError(f"/mnt/{to_text(NASTY)}", "does not\nexist", "look"))
    assert text.isprintable()
    assert text.startswith(r"/mnt/a\nb\x1b[31m\x7f\xff")
    assert one_line(printable(b"a\nb")) == r"a\nb"


def test_listings_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        {"path": to_text(NASTY), "kind": "file", "state": "dirty", "bytes": 10, "age_seconds": 3},
        {"path": "b", "kind": "file", "state": "refused", "bytes": 0, "reason": "no\nspace"},
    ]
    say_rows(rows)
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert lines[0].endswith(printable(NASTY))
    assert lines[1].endswith(r"b  (no\nspace)")


def test_listings_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"rows": [{"path": to_text(b"\xff\n"), "bytes": 1}], "notes": [to_text(b"\xff")]})
    line = capsys.readouterr().out
    line.encode("ascii")
    assert "udcff" not in line
    assert json.loads(line) == {
        "rows": [{"path": "\\xff\n", "path_bytes_hex": "ff0a", "bytes": 1}],
        "notes": ["\\xff"],
    }
