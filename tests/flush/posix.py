"""A small model of a file system: what the mount must show, and the share after a drain."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class ModelFile:
    """A regular file with its history."""

    data: bytes = b""
    mode: int = 0o644
    writers: int = 0
    ino: int = 0
    """Its inode number in the mount, once it was looked up."""
    versions: list[bytes] = field(default_factory=list)
    """Every content it ever had, oldest first."""
    closed: list[tuple[int, int]] = field(default_factory=list)
    """(sequence number, index of the version) whenever it was closed or fsynced."""

    def __post_init__(self) -> None:
        self.versions.append(self.data)

    def become(self, data: bytes) -> None:
        """Change the content."""
        self.data = data
        self.versions.append(data)

    def safe(self, seq: int) -> None:
        """It is closed or fsynced: what happens later shows on the share after this version."""
        self.closed.append((seq, len(self.versions) - 1))

    def since(self, seq: int) -> tuple[int, list[bytes]] | None:
        """When it was last closed before an operation, and the versions from then on."""
        before = [(when, index) for when, index in self.closed if when < seq]
        if not before:
            return None
        return before[-1][0], self.versions[before[-1][1] :]


@dataclass(eq=False)
class ModelLink:
    """A symbolic link."""

    target: bytes


@dataclass(eq=False)
class ModelDirectory:
    """A directory, and the sequence number at which each name was last changed."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    changed: dict[bytes, int] = field(default_factory=dict)
    mode: int = 0o755

    def give(self, name: bytes, entry: Entry | None, seq: int) -> None:
        """Let a name mean something else (None: nothing)."""
        if entry is None:
            del self.entries[name]
        else:
            self.entries[name] = entry
        self.changed[name] = seq


Entry = ModelFile | ModelLink | ModelDirectory
Path = tuple[bytes, ...]


class Model:
    """The tree of one mount."""

    def __init__(self) -> None:
        self.root = ModelDirectory()

    def walk(self) -> Iterator[tuple[Path, Entry]]:
        """Every path but the root's, parents first."""
        stack: list[tuple[Path, ModelDirectory]] = [((), self.root)]
        while stack:
            prefix, directory = stack.pop()
            for name, entry in directory.entries.items():
                yield (*prefix, name), entry
                if isinstance(entry, ModelDirectory):
                    stack.append(((*prefix, name), entry))

    def find(self, path: Path) -> Entry:
        """What a path means; it must exist."""
        at: Entry = self.root
        for name in path:
            assert isinstance(at, ModelDirectory)
            at = at.entries[name]
        return at

    def directory(self, path: Path) -> ModelDirectory:
        """The same, for a directory."""
        found = self.find(path)
        assert isinstance(found, ModelDirectory)
        return found

    def file(self, path: Path) -> ModelFile:
        """The same, for a regular file."""
        found = self.find(path)
        assert isinstance(found, ModelFile)
        return found

    def directories(self) -> list[Path]:
        """Paths of all directories."""
        return [(), *(p for p, e in self.walk() if isinstance(e, ModelDirectory))]

    def files_below(self, directory: ModelDirectory) -> list[ModelFile]:
        """The regular files in a directory and deeper."""
        found, stack = [], [directory]
        while stack:
            for entry in stack.pop().entries.values():
                if isinstance(entry, ModelDirectory):
                    stack.append(entry)
                elif isinstance(entry, ModelFile):
                    found.append(entry)
        return found

    def shape(self, without: Collection[str] = ()) -> dict[str, tuple[str, bytes, int]]:
        """Kind, bytes or target and number of the link group by path."""
        groups: dict[int, int] = {}
        found = {}
        for path, entry in sorted(self.walk(), key=lambda item: item[0]):
            name = b"/".join(path).decode()
            if name in without:
                continue
            group = groups.setdefault(id(entry), len(groups))
            if isinstance(entry, ModelDirectory):
                found[name] = ("directory", b"", group)
            elif isinstance(entry, ModelLink):
                found[name] = ("symlink", entry.target, group)
            else:
                found[name] = ("file", entry.data, group)
        return found
