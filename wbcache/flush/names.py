"""How names reach the share: directories, renames, links, removals.

Each step records an intent durably where its answer can be lost, makes one composite call in a
thread, and takes the outcome over into the share view.
"""

from __future__ import annotations

import errno
import os
import stat
from functools import partial

from wbcache.flush import blocking
from wbcache.flush.blocking import Attempts
from wbcache.flush.files import FileFlusher
from wbcache.journal import Intent
from wbcache.node import META_MODE, Directory, Node, Signature
from wbcache.share import calls
from wbcache.tree import Name
from wbcache.volume import Volume


class NameFlusher:
    """Brings the share's names in line, one step at a time."""

    def __init__(self, volume: Volume, files: FileFlusher) -> None:
        self._volume = volume
        self._tree = volume.tree
        self._share = volume.share
        self._files = files
        self._sender = files.sender

    async def make_directory(self, node: Directory, to: Name, *, temporary: bool) -> None:
        """Make a directory: under its own name, or under a temporary one beside its target."""
        volume = self._volume
        parent, name = to
        if temporary:
            name = volume.temporary_names.fresh()
            volume.journal.add_temporary(parent, name)
        self._tree.snapshot(node)
        self._intend(node, (parent, name))
        descriptor = await self._share.directory(parent, flush=True)
        attempt, mode = Attempts(), self._sender.mode(node)
        st, new = await self._share.work(
            blocking.make_directory,
            descriptor,
            name,
            mode,
            self._sender.ownership(node),
            attempt,
            chmod=volume.capabilities.chmod,
        )
        if temporary and not new:
            # Ours, made by a call that was made twice below us, unless it is something worse.
            raise FileExistsError(errno.EEXIST, "a directory has the temporary name already")
        self._sender.kept_here(node, {}, attempt)
        if new and mode != stat.S_IMODE(node.mode) and volume.capabilities.chmod:
            node.meta |= META_MODE
        now = volume.clock()
        node.base = volume.signature(st)
        node.attrs_at = now
        self._tree.set_share(parent, name, node, now)
        volume.changed_on_share(parent, name)
        # One that was there already may hold anything; one that we made holds nothing yet.
        node.listed_at = now if new else None
        if not new:
            path = os.fsdecode(self._tree.name_path(parent, name))
            volume.report(f"directory {path!r} was made on the share too; the two are one now")
        self._tree.settle(node, now)
        journal = volume.journal
        remember = volume.remembered.made(node) if new else None

        def store() -> None:
            journal.drop_moves_of(node.ino)
            if remember is not None:
                remember()
            if temporary:
                journal.drop_temporary(name)

        volume.commit_outcome(node, (parent, name), extra=store)

    def _intend(self, node: Node, at: Name) -> None:
        """Record that a name is about to be made: should we die, the next start looks for it.

        It need not be durable: after a power loss the worst is an empty directory, or a link.
        """
        intent = Intent("make", node.ino, at[0].ino, at[1], node.mode, 0, 0)
        self._volume.journal.add_intents([intent])

    async def publish_symlink(self, node: Node, to: Name, occupant: Node | None) -> None:
        """Make a symbolic link, in place of whatever had the name."""
        volume = self._volume
        directory, name = to
        self._tree.snapshot(node)
        parent = await self._share.directory(directory, flush=True)
        self._intend(node, to)
        if occupant is None:
            await self._share.work(blocking.make_symlink, parent, name, node.target)
        else:
            with volume.temporary(directory) as temporary:
                await self._share.work(calls.symlink, parent, temporary, node.target)
                await self._share.work(
                    blocking.move,
                    parent,
                    temporary,
                    parent,
                    name,
                    is_ours=_is_symlink,
                    may_replace=self._files.accepts(occupant),
                    noreplace=False,
                    link=False,
                )
                if not await self._share.work(calls.is_link_to, parent, name, node.target):
                    raise OSError(errno.EAGAIN, "the new link is not there")
        attributes = self._sender.attributes(node, new=True)
        if volume.capabilities.chown and volume.capabilities.link_attributes:
            attributes = attributes._replace(owner=(node.uid, node.gid))
        meta, xattrs = self._sender.take(node)
        attempt = Attempts()
        try:
            _, st = await self._share.work(
                blocking.set_attributes, parent, name, attributes, attempt, stat.S_IFLNK
            )
        except BaseException:
            self._sender.put_back(node, meta)
            raise
        self._sender.delivered(node, meta, self._sender.kept_here(node, xattrs, attempt))
        now = volume.clock()
        node.base = volume.signature(st)
        node.attrs_at = now
        self._tree.set_share(directory, name, node, now)
        self._finish(node, to, occupant)

    async def rename(self, node: Node, old: Name, to: Name, occupant: Node | None) -> None:
        """Move what the share has under ``old`` to ``to``."""
        share, volume = self._share, self._volume
        journal = volume.journal
        signature = node.base or Signature(0, 0, 0)
        journal.add_intents([Intent("rename", node.ino, to[0].ino, to[1], *signature)])
        await volume.sync_journal()
        source = await share.directory(old[0], flush=True)
        target = await share.directory(to[0], flush=True)
        self._tree.snapshot(node)
        await share.work(
            blocking.move,
            source,
            old[1],
            target,
            to[1],
            is_ours=self._files.accepts(node),
            may_replace=self._files.accepts(occupant) if occupant is not None else None,
            noreplace=volume.capabilities.noreplace,
            link=False,
        )
        now = volume.clock()
        self._tree.set_share(*old, None, now)
        self._tree.set_share(*to, node, now)
        if isinstance(node, Directory):
            node.renamed = False
        volume.changed_on_share(*old)
        self._finish(node, to, occupant, old)

    async def park(self, node: Node, at: Name) -> None:
        """Move what has a name on the share aside, so that another node can take it."""
        temporary = self._volume.temporary_names.fresh()
        parent = await self._share.directory(at[0], flush=True)
        # Another writer's file must not be hidden: it would be taken for ours from then on.
        await self._share.work(blocking.check, parent, at[1], self._files.accepts(node))
        await self.rename(node, at, (at[0], temporary), None)

    async def link(self, node: Node, old: Name, to: Name, occupant: Node | None) -> None:
        """A further name for a file that the share has."""
        volume, share = self._volume, self._share
        source = await share.directory(old[0], flush=True)
        target = await share.directory(to[0], flush=True)
        accepts = self._files.accepts(node)
        self._tree.snapshot(node)
        self._intend(node, to)
        if occupant is None:
            await share.work(blocking.make_link, source, old[1], target, to[1], accepts)
        else:
            with volume.temporary(to[0]) as temporary:
                await share.work(calls.link, source, old[1], target, temporary)
                await share.work(
                    blocking.move,
                    target,
                    temporary,
                    target,
                    to[1],
                    is_ours=accepts,
                    may_replace=self._files.accepts(occupant),
                    noreplace=False,
                    link=False,
                )
        self._tree.set_share(*to, node, volume.clock())
        self._finish(node, to, occupant)

    async def remove(self, node: Node, at: Name) -> None:
        """Remove a name from the share."""
        volume, share = self._volume, self._share
        directory, name = at
        parent = await share.directory(directory, flush=True)
        if isinstance(node, Directory):
            # What was on its way into it, and is not needed any more, may still lie there.
            is_ours = volume.temporary_names.is_ours
            await share.remove(blocking.remove_directory, parent, name, is_ours)
        else:
            accepts = self._files.accepts(node)
            if volume.temporary_names.is_ours(name):
                accepts = _is_anything  # it was parked there, and is nobody else's
            await share.remove(blocking.remove_file, parent, name, accepts)
        self._tree.set_share(directory, name, None, volume.clock())
        volume.changed_on_share(directory, name)
        volume.commit_outcome(at, node)
        volume.forget_if_gone(node)

    def _finish(
        self,
        node: Node,
        to: Name,
        occupant: Node | None,
        *others: Name,
    ) -> None:
        volume = self._volume
        volume.changed_on_share(*to)
        self._tree.settle(node, volume.clock())
        gone = [occupant] if occupant is not None else []
        drop = partial(volume.journal.drop_moves_of, node.ino)
        volume.commit_outcome(node, to, *others, *gone, extra=drop)
        for other in gone:
            volume.forget_if_gone(other)


def _is_anything(st: os.stat_result) -> bool:
    return True


def _is_symlink(st: os.stat_result) -> bool:
    return stat.S_ISLNK(st.st_mode)
