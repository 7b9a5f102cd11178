"""A transfer: one file's bytes on their way to a temporary on the share.

A transfer is *sealed* at an instant at which the temporary equals what the mount holds. What is
written later stays dirty and goes with the next flush; the temporary stays worth publishing.
"""

from __future__ import annotations

from wbcache.extents import Extents
from wbcache.node import Content, Directory, Node, Signature
from wbcache.tree import Name


class SupersededError(Exception):
    """The file was removed while it moved: nobody wants the rest."""


class Transfer:
    """State of one transfer; `bytes` moves it on, `publish` ends it."""

    __slots__ = (
        "content",
        "directory",
        "last_name",
        "meta",
        "redirty",
        "seq",
        "signature",
        "size",
        "temporary",
        "xattrs",
    )

    def __init__(
        self, node: Node, content: Content, directory: Directory, temporary: bytes
    ) -> None:
        self.content = content
        self.directory = directory
        """Where the temporary lies on the share."""
        self.temporary = temporary
        self.size = node.size
        self.seq = content.seq
        self.redirty = Extents(*content.writing)
        """Written since its bytes were last read for the transfer."""
        self.last_name: Name | None = node.links[0] if node.links else None
        """The name it was begun for, which may since have been given to a replacement."""
        self.meta = 0
        """The attribute bits that it carries."""
        self.xattrs: dict[bytes, bytes | None] = {}
        self.signature: Signature | None = None
        """What the share reports of the finished temporary; None while bytes move."""

    def wanted(self, node: Node) -> bool:
        """Whether the file, or the name that it was begun for, is still there."""
        if node.links or self.last_name is None:
            return True
        directory, name = self.last_name
        return name in directory.local

    @property
    def current(self) -> bool:
        """Whether the temporary is complete and can be published."""
        return self.signature is not None
