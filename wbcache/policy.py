"""Which flush rule a file falls under: the first rule whose pattern matches its path.

Patterns are matched against the whole path relative to SOURCE:

    *      any characters within one name        [abc] [a-z] [!a]   one of, none of
    ?      one character                          **                 any number of directories

`**/x` matches `x` at the top as well as deeper; `dir/**` matches everything below `dir`.
A path is bytes; it is read as UTF-8, and a byte that is not UTF-8 counts as one character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyRule:
    """One entry of `policies`. Times are seconds; None leaves the general setting in force."""

    match: str
    idle_delay: float | None = None
    max_age: float | None = None
    never: bool = False


@dataclass(frozen=True)
class FlushPolicy:
    """When a file moves to the share. Times are seconds."""

    idle_delay: float
    max_age: float
    never: bool
    """True: the file stays local and never reaches the share."""


class Policies:
    """The rules of one mount, compiled."""

    def __init__(self, rules: Sequence[PolicyRule], *, idle_delay: float, max_age: float) -> None:
        """`idle_delay` and `max_age` (seconds) hold where no rule says otherwise."""
        self._default = FlushPolicy(idle_delay, max_age, never=False)
        self._rules = [
            (
                compile_glob(rule.match),
                FlushPolicy(
                    idle_delay if rule.idle_delay is None else rule.idle_delay,
                    max_age if rule.max_age is None else rule.max_age,
                    rule.never,
                ),
            )
            for rule in rules
        ]

    def for_path(self, path: bytes) -> FlushPolicy:
        """The policy of `path`, which is relative to SOURCE and has no leading slash."""
        if not self._rules:
            return self._default
        text = path.decode("utf-8", "surrogateescape")
        for pattern, policy in self._rules:
            if pattern.fullmatch(text):
                return policy
        return self._default


def compile_glob(glob: str) -> re.Pattern[str]:
    """The regular expression of a pattern.

    Raises ValueError, with a reason for the user, for a pattern that could never match.
    """
    if not glob:
        raise ValueError("the pattern is empty")
    if "\0" in glob:
        raise ValueError("no file name holds a NUL character")
    if glob.startswith("/"):
        raise ValueError("patterns are relative to SOURCE and do not start with '/'")
    if glob.endswith("/"):
        raise ValueError("a pattern names files; write 'dir/**' for all that a directory holds")
    names = glob.split("/")
    if any(name in ("", ".", "..") for name in names):
        raise ValueError("a pattern cannot hold empty names, '.' or '..'")
    # The names between two "**", each run of which stands for itself.
    runs: list[list[str]] = [[]]
    for name in names[:-1]:
        if name == "**":
            runs.append([])
        else:
            runs[-1].append(_name_expression(name) + "/")
    last = ".+" if names[-1] == "**" else _name_expression(names[-1])
    expression = "".join(runs[0])
    if len(runs) > 1:
        between = [_first("(?:[^/]+/)*?", "".join(run)) for run in runs[1:-1] if run]
        expression += "".join(between) + "(?:[^/]+/)*" + "".join(runs[-1])
    return re.compile(_number_groups(expression + last), re.DOTALL)


_GROUP = "\0"
"""Stands for the number of a group until the whole expression is known."""


def _first(anything: str, wanted: str) -> str:
    """The first place at which `wanted` follows `anything`, never tried again further on.

    If the rest of a pattern does not match after the first place, it does not after a later one:
    what follows starts with another wildcard. Without this, matching takes a time that grows with
    the length of the path to the power of the number of wildcards, on the daemon's event loop.
    """
    return f"(?=(?P<g{_GROUP}>{anything}{wanted}))(?P=g{_GROUP})"


def _number_groups(expression: str) -> str:
    """Give each group, opened and referred to in pairs that may nest, a number of its own."""
    parts = expression.split(_GROUP)
    numbered, open_groups, count = [parts[0]], [], 0
    for part in parts[1:]:
        if part.startswith(">"):
            count += 1
            open_groups.append(count)
            numbered.append(f"{count}{part}")
        else:
            numbered.append(f"{open_groups.pop()}{part}")
    return "".join(numbered)


def _name_expression(name: str) -> str:
    if "**" in name:
        raise ValueError("'**' stands for whole directories: write '**/' or '/**'")
    chunks = [""]
    position = 0
    while position < len(name):
        character = name[position]
        position += 1
        if character == "*":
            chunks.append("")
        elif character == "?":
            chunks[-1] += "[^/]"
        elif character == "[":
            end = name.find("]", position + (2 if name[position : position + 1] == "!" else 1))
            if end < 0:
                raise ValueError("a '[' has no ']'")
            chunks[-1] += _set_expression(name[position:end])
            position = end + 1
        else:
            chunks[-1] += re.escape(character)
    if len(chunks) == 1:
        return chunks[0]
    between = [_first("[^/]*?", chunk) for chunk in chunks[1:-1]]
    return chunks[0] + "".join(between) + "[^/]*" + chunks[-1]


def _set_expression(members: str) -> str:
    negated = members.startswith("!")
    body = members[1:] if negated else members
    escaped = re.sub(r"([\\\[\]^&|~])", r"\\\1", body)
    expression = f"(?!/)[{'^' if negated else ''}{escaped}]"
    try:
        re.compile(expression)
    except re.error:
        raise ValueError(f"'[{members}]' is not a set of characters") from None
    return expression
