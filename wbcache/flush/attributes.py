"""Attributes on their way to the share: what a step brings there, and what the share can't have."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping

from wbcache.flush.blocking import XATTRS, Attempts, Attributes, Ownership
from wbcache.flush.errors import describe
from wbcache.node import META_MODE, META_OWNER, META_TIMES, META_XATTR, OWNER_ALL, Node
from wbcache.volume import Volume

log = logging.getLogger(__name__)


class AttributeSender:
    """Keeps account of which attributes the share has, is getting, or refuses."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._refused: set[tuple[str, int]] = set()
        """Attributes and errors of which the operator has been told."""

    def attributes(self, node: Node, *, new: bool) -> Attributes:
        """What the share's file shall have, of what the share can hold."""
        can, meta = self._volume.capabilities, node.meta
        if node.is_symlink and not can.link_attributes:
            return Attributes(None, None, None, {})
        owner = None
        if can.chown and (meta & META_OWNER or (new and node.uid | node.gid)):
            owner = (node.uid, node.gid)
        elif can.chgrp and meta & META_OWNER:
            owner = (-1, node.gid)
        set_id = node.mode & 0o7000
        mode = None
        now = meta & ~node.late_meta
        if can.chmod and (now & META_MODE or owner is not None or (new and set_id)):
            mode = self.mode(node)
        xattrs: dict[bytes, bytes | None] = {}
        if can.xattr and (meta & META_XATTR) and node.xattrs:
            xattrs = dict(node.xattrs)
        times = None
        if (new or meta & META_TIMES) and not node.late_meta & META_TIMES:
            times = (node.atime, node.mtime)
        return Attributes(mode, owner, times, xattrs)

    def mode(self, node: Node) -> int:
        """The permissions that the share's file shall have for now."""
        return stat.S_IMODE(node.mode) | (OWNER_ALL if node.late_meta & META_MODE else 0)

    def ownership(self, node: Node) -> Ownership | None:
        """What something new on the share must have in the end, where the share lets us say."""
        can = self._volume.capabilities
        if not can.chown and not can.chgrp:
            return None
        return Ownership(node.uid if can.chown else -1, node.gid, self.mode(node))

    def take(self, node: Node) -> tuple[int, dict[bytes, bytes | None]]:
        """The attributes that a step is about to bring to the share: bits of `meta`, and xattrs.

        Until the answer they stay in the journal, and the xattrs are still what the mount shows.
        """
        kept = node.late_meta
        if node.meta & META_OWNER and kept & META_MODE:
            node.meta |= META_MODE  # with the owner goes a mode, which is not the last
        meta, node.meta = node.meta & ~kept, node.meta & kept
        node.sending |= meta
        return meta, dict(node.xattrs or {}) if self._volume.capabilities.xattr else {}

    def put_back(self, node: Node, meta: int) -> None:
        """The share did not take them."""
        node.sending &= ~meta
        node.meta |= meta

    def delivered(self, node: Node, meta: int, xattrs: Mapping[bytes, bytes | None]) -> None:
        """The share has them; what was changed meanwhile is still to be sent."""
        node.sending &= ~meta
        left = (node.xattrs or {}).items()
        node.xattrs = {n: v for n, v in left if n not in xattrs or xattrs[n] != v} or None

    def kept_here(
        self, node: Node, xattrs: dict[bytes, bytes | None], attempt: Attempts
    ) -> dict[bytes, bytes | None]:
        """Report the attributes that a file on the share can't have; returns the extended ones that
        it has. The mount goes on to show them, for as long as it knows the file."""
        for what, error in attempt.refused:
            path = os.fsdecode(self._volume.tree.path(node))
            text = f"the share refuses the {what} of {path!r} ({describe(error)}), kept here only"
            kind = (what, error.errno or 0)
            if kind in self._refused:
                log.info("%s", text)
            else:
                self._refused.add(kind)
                self._volume.report(text)
        return {} if any(what == XATTRS for what, _ in attempt.refused) else xattrs
