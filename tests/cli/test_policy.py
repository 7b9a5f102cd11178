"""Which files a pattern means: the first rule that matches decides."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wbcache.policy import FlushPolicy, Policies, PolicyRule, compile_glob


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("a.txt", "a.txt", True),
        ("a.txt", "d/a.txt", False),
        ("a.txt", "axtxt", False),
        ("*.tmp", "a.tmp", True),
        ("*.tmp", ".tmp", True),
        ("*.tmp", "d/a.tmp", False),
        ("**/*.tmp", "a.tmp", True),
        ("**/*.tmp", "d/e/a.tmp", True),
        ("**/*.tmp", "d/a.tmp/b", False),
        ("**/events.out.tfevents.*", "run1/events.out.tfevents.17.host", True),
        ("**/events.out.tfevents.*", "run1/xevents.out.tfevents.17", False),
        ("logs/**", "logs/a", True),
        ("logs/**", "logs/a/b/c", True),
        ("logs/**", "logs", False),
        ("logs/**", "logs2/a", False),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**/b", "a/xb", False),
        ("a/**/**/b", "a/b", True),
        ("**/b/**/c/**/d", "a/b/b/x/c/c/d", True),
        ("**/b/**/c/**/d", "b/c/d", True),
        ("**/b/**/c/**/d", "a/c/b/d", False),
        ("**/x*y*z/**/*a*a*", "p/xyyz/q/banana", True),
        ("**/x*y*z/**/*a*a*", "p/xz/q/banana", False),
        ("**/x*y*z/**/*a*a*", "p/xyz/banan", True),
        ("**/x*y*z/**/*a*a*", "p/xyz/ban/an", False),
        ("**/**", "a", True),
        ("**", "a/b", True),
        ("*", "a/b", False),
        ("?", "é", True),
        ("?", "ab", False),
        ("?", "/", False),
        ("[a-c]x", "bx", True),
        ("[!a-c]x", "bx", False),
        ("[!a-c]x", "dx", True),
        ("a[+-9]b", "a/b", False),
        ("[]]", "]", True),
        ("[!]]", "]", False),
        ("[[]", "[", True),
        ("[a\\]", "\\", True),
        ("a+b(c)", "a+b(c)", True),
        ("**/a*\\0*b", "x/a1\\02b", True),
        ("new\nline", "new\nline", True),
        ("*", "new\nline", True),
    ],
)
def test_patterns(glob: str, path: str, matches: bool) -> None:
    assert bool(compile_glob(glob).fullmatch(path)) is matches


def test_names_that_are_not_utf8_match_like_others() -> None:
    policies = Policies([PolicyRule("r?n/*", never=True)], idle_delay=1, max_age=2)
    assert policies.for_path(b"r\xffn/x").never
    assert not policies.for_path(b"r\xff\xfen/x").never


def test_the_first_match_wins_and_inherits_what_it_does_not_say() -> None:
    policies = Policies(
        [
            PolicyRule("keep/*.tmp", max_age=7),
            PolicyRule("**/*.tmp", never=True),
            PolicyRule("**", idle_delay=0),
        ],
        idle_delay=5,
        max_age=30,
    )
    assert policies.for_path(b"keep/a.tmp") == FlushPolicy(5, 7, never=False)
    assert policies.for_path(b"other/a.tmp") == FlushPolicy(5, 30, never=True)
    assert policies.for_path(b"a") == FlushPolicy(0, 30, never=False)
    assert Policies([], idle_delay=5, max_age=30).for_path(b"a") == FlushPolicy(5, 30, never=False)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("**/a/" * 12 + "b", "a/" * 2000 + "c"),
        ("*a" * 12 + "*b", "a" * 255),
        ("**/*a*a*a*a*/" * 6 + "b", "aaaaaaaaa/" * 400 + "c"),
    ],
)
def test_many_stars_do_not_stall_the_daemon(glob: str, path: str) -> None:
    assert not compile_glob(glob).fullmatch(path)


_names = st.text(alphabet="ab", min_size=1, max_size=3)
_patterns = st.one_of(st.just("**"), st.text(alphabet="ab*?", min_size=1, max_size=4))


@given(st.lists(_patterns, min_size=1, max_size=5), st.lists(_names, min_size=1, max_size=6))
def test_patterns_match_as_their_definition_says(patterns: list[str], names: list[str]) -> None:
    if any("**" in pattern and pattern != "**" for pattern in patterns):
        return
    expression = compile_glob("/".join(patterns))
    assert bool(expression.fullmatch("/".join(names))) is _matches(patterns, names)


def _matches(patterns: list[str], names: list[str]) -> bool:
    """The definition, written for clarity and not for speed."""
    if not patterns:
        return not names
    if patterns == ["**"]:
        return bool(names)
    if patterns[0] == "**":
        return any(_matches(patterns[1:], names[skip:]) for skip in range(len(names)))
    return (
        bool(names)
        and fnmatch.fnmatchcase(names[0], patterns[0])
        and _matches(patterns[1:], names[1:])
    )
