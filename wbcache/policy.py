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
    if glob.startswith("/"):
        raise ValueError("patterns are relative to SOURCE and do not start with '/'")
    if glob.endswith("/"):
        raise ValueError("a pattern names files; write 'dir/**' for all that a directory holds")
    names = glob.split("/")
    if any(name in ("", ".", "..") for name in names):
        raise ValueError("a pattern cannot hold empty names, '.' or '..'")
    parts: list[str] = []
    for index, name in enumerate(names):
        last = index == len(names) - 1
        if name == "**":
            # A run of ** means the same as one, and costs the matcher less.
            if index and names[index - 1] == "**" and not last:
                continue
            parts.append(".+" if last else "(?:[^/]+/)*")
        else:
            if "**" in name:
                raise ValueError("'**' stands for whole directories: write '**/' or '/**'")
            parts.append(_name_expression(name) + ("" if last else "/"))
    return re.compile("".join(parts), re.DOTALL)


def _name_expression(name: str) -> str:
    out: list[str] = []
    position = 0
    while position < len(name):
        character = name[position]
        position += 1
        if character == "*":
            out.append("[^/]*")
        elif character == "?":
            out.append("[^/]")
        elif character == "[":
            end = name.find("]", position + (2 if name[position : position + 1] == "!" else 1))
            if end < 0:
                raise ValueError("a '[' has no ']'")
            out.append(_set_expression(name[position:end]))
            position = end + 1
        else:
            out.append(re.escape(character))
    return "".join(out)


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
