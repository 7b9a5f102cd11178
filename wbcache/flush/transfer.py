"""A transfer: one file's bytes on their way to a temporary on the share.

A transfer is *sealed* at an instant at which the temporary equals what the mount holds. What is
written later stays dirty and goes with the next flush; the temporary stays worth publishing.
"""

from __future__ import annotations

from wbcache.extents import END, Extents
from wbcache.node import Content, Directory, Node, Signature


class SupersededError(Exception):
    """The file was removed while it moved, or has to make room: nobody wants the rest."""


class Transfer:
    """State of one transfer; `bytes` moves it on, `publish` ends it."""

    __slots__ = (
        "content",
        "directory",
        "given_up",
        "limit",
        "meta",
        "occupant",
        "redirty",
        "seq",
        "signature",
        "size",
        "temporary",
        "times",
        "xattrs",
    )

    def __init__(
        self,
        node: Node,
        content: Content,
        directory: Directory,
        temporary: bytes,
        limit: int = END,
    ) -> None:
        self.content = content
        self.directory = directory
        """Where the temporary lies on the share."""
        self.temporary = temporary
        self.limit = limit
        """Bytes that it carries at most; the rest of the file follows in place."""
        self.size = min(node.size, limit)
        self.seq = content.seq
        self.redirty = Extents(*content.writing)
        """Written since its bytes were last read for the transfer."""
        self.meta = 0
        """The attribute bits that it carries."""
        self.xattrs: dict[bytes, bytes | None] = {}
        self.times: tuple[int, int] | None = None
        """The access and modification times that it carries, nanoseconds."""
        self.signature: Signature | None = None
        """What the share reports of the finished temporary; None while bytes move."""
        self.given_up = False
        """Its room is needed for something older."""

    def wanted(self, node: Node) -> bool:
        """Whether the file is still there, or at least the name that it had last."""
        if self.given_up:
            return False
        if node.links or node.dropped is None:
            return bool(node.links)
        directory, name, _ = node.dropped
        return name in directory.local

    def is_older_than(self, node: Node) -> bool:
        """Whether it carries, complete, what the file held before it was rewritten."""
        return self.current and self.content is not node.content

    @property
    def current(self) -> bool:
        """Whether the temporary is complete and can be published."""
        return self.signature is not None
