"""What `recover` laid out, as it reports it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RecoveredFile:
    """One file, directory or link taken from a cache."""

    path: bytes
    """Relative to SOURCE."""
    bytes: int
    reason: str = ""
    """What is missing or in doubt; empty for a whole file."""


@dataclass(frozen=True)
class PendingChange:
    """A change that the share has not seen and that a laid out file does not show."""

    path: bytes
    """Relative to SOURCE."""
    change: str
    """"removed", "renamed from …", "a hard link to …", "cut to … bytes" or "attributes"."""


@dataclass
class RecoverReport:
    """Everything that was dirty in a cache, by how much of it could be had."""

    written: list[RecoveredFile] = field(default_factory=list)
    """Whole."""
    incomplete: list[RecoveredFile] = field(default_factory=list)
    """Ranges are missing that only the share has; which are there is written beside the file."""
    torn: list[RecoveredFile] = field(default_factory=list)
    """Perhaps not as the program wrote it: a power loss came before it was synced."""
    pending: list[PendingChange] = field(default_factory=list)
    """For what only the share has: to be done there by hand."""
