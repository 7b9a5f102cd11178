"""File names in output: one line each, unambiguous, and strict UTF-8.

A name on Linux is any run of bytes without NUL and slash, so a listing printed raw can be made to
lie: a newline forges a row, an escape sequence repaints the terminal, a right-to-left override
swaps an extension. Every name that reaches a person goes through `printable`; every name that
reaches a program goes through `json_name`.

Inside the program a name is bytes, or text that `to_text` made from bytes (UTF-8 with
surrogateescape, whatever the locale says), which `to_bytes` turns back without loss.
"""

from __future__ import annotations

import unicodedata

_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})


def to_text(name: bytes) -> str:
    """The name as text from which `to_bytes` gives the same bytes back."""
    return name.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """The bytes of a name made by `to_text` (or of any ordinary text)."""
    return text.encode("utf-8", "surrogateescape")


def printable(name: bytes | str) -> str:
    r"""One line for a person: `\n`, `\t`, `\xNN` for a byte, `\uNNNN`, and `\\` for a backslash."""
    text = to_text(name) if isinstance(name, bytes) else name
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    return "".join(map(_printable_character, text))


def one_line(message: str) -> str:
    """A message (our words around somebody's names) with what could break its line escaped.

    Backslashes stay as they are, so that text which `printable` escaped is not escaped twice.
    """
    return "".join(c if c == "\\" else _printable_character(c) for c in message)


def json_name(key: str, name: bytes | str) -> dict[str, str]:
    r"""The members that carry a name in JSON output: `{key: text}`.

    A name that is not UTF-8 cannot be a JSON string. Its undecodable bytes appear as `\xNN` in the
    text, and `key_bytes_hex` holds the exact bytes; that second member is there only then.
    """
    text = to_text(name) if isinstance(name, bytes) else name
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        readable = "".join(_printable_character(c) if _is_surrogate(c) else c for c in text)
        raw = name if isinstance(name, bytes) else to_bytes(text)
        return {key: readable, f"{key}_bytes_hex": raw.hex()}
    return {key: text}


def _is_surrogate(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def _printable_character(character: str) -> str:
    named = _NAMED.get(character)
    if named is not None:
        return named
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
