"""After a start: find out what became of changes that had no answer, and tidy up.

Runs in the background once the mount serves, before anything is flushed.
"""

from __future__ import annotations

import logging

import trio

from wbcache.flush.files import FileFlusher
from wbcache.loading import Loaded
from wbcache.node import Directory, Node
from wbcache.share import calls
from wbcache.volume import Volume

log = logging.getLogger(__name__)

RETRY = 5.0


async def settle_intents(volume: Volume, loaded: Loaded) -> None:
    """Take over renames that had happened, and queue left-over temporaries for removal."""
    files = FileFlusher(volume)
    done: list[int] = []
    for identity, intent in loaded.intents:
        if intent.kind == "rename":
            node = volume.tree.nodes.get(intent.ino)
            directory = volume.tree.nodes.get(intent.parent)
            if node is not None and isinstance(directory, Directory):
                while True:
                    try:
                        await _settle_rename(volume, files, node, directory, intent.name)
                        break
                    except OSError as error:
                        log.info("recovery waits for the share: %s", error)
                        await trio.sleep(RETRY)
            done.append(identity)
        elif intent.ino not in volume.tree.nodes:
            done.append(identity)
    volume.commit_outcome(extra=lambda: volume.journal.drop_intents(done))
    loaded.intents.clear()
    held = {link for node in volume.tree.nodes.values() for link in node.slinks}
    volume.strays += [name for name in loaded.temporaries if name not in held]
    loaded.temporaries.clear()
    for gen in loaded.orphans:
        volume.discard(gen)
    loaded.orphans.clear()


async def _settle_rename(
    volume: Volume, files: FileFlusher, node: Node, directory: Directory, name: bytes
) -> None:
    old = [link for link in node.slinks if link != (directory, name)]
    if not old or directory.share.get(name) is node or not directory.on_share:
        return
    share, tree = volume.share, volume.tree
    target = await share.directory(directory, flush=True)
    st = await share.work(calls.lstat_or_none, target, name)
    if st is None or not files.accepts(node)(st):
        return
    source = await share.directory(old[0][0], flush=True)
    if await share.work(calls.lstat_or_none, source, old[0][1]) is not None:
        return
    now = volume.clock()
    tree.set_share(*old[0], None, now)
    tree.set_share(directory, name, node, now)
    tree.settle(node, now)
    volume.commit_outcome(node, old[0], (directory, name))
