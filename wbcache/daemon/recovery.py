"""After a start: find out what became of changes that had no answer, and tidy up.

Runs in the background once the mount serves, before anything is flushed and before any listing of
the share is believed: a file that we had renamed there must not look removed here and new there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import trio

from wbcache.flush.errors import describe, refused
from wbcache.flush.files import FileFlusher
from wbcache.flush.settling import Settler
from wbcache.journal import Intent
from wbcache.loading import Loaded
from wbcache.node import Directory
from wbcache.volume import Volume

log = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds between two tries when the share does not answer as it should."""


async def settle_intents(
    volume: Volume, loaded: Loaded, inherit: Callable[[list[Intent]], None]
) -> None:
    """Take over what had happened on the share, and queue left-over temporaries for removal.

    ``inherit`` gets what can't be known while the share refuses to tell where something is.
    """
    settler = Settler(volume, FileFlusher(volume))
    unsettled = [volume.tree.nodes.get(intent.ino) for _, intent in loaded.intents]
    left: list[Intent] = []
    while loaded.intents:
        later, failed, withheld = [], False, False
        for identity, intent in loaded.intents:
            try:
                await settler.settle(intent)
            except (FileNotFoundError, NotADirectoryError):
                # A directory on the way to it is perhaps what another of them has renamed.
                later.append((identity, intent))
            except OSError as error:
                if not refused(error):
                    log.info("recovery waits for the share: %s", error)
                    failed = True
                elif intent.kind == "rename":
                    withheld = True  # that is waited for, though not by everybody
                else:
                    # It will never say. What was sent still explains what it shows, and the change
                    # is made again.
                    volume.report(
                        f"what became of a change of {_name(volume, intent)!r} is not known:"
                        f" {describe(error)}"
                    )
                    continue
                later.append((identity, intent))
            else:
                settler.forget(identity, intent)
        if failed:
            await trio.sleep(RETRY)
        elif len(later) == len(loaded.intents):
            if withheld:
                left = [intent for _, intent in later]
                break
            # Their directories are gone, and whatever was done in them: it was made sure that the
            # share is there.
            for identity, intent in later:
                settler.forget(identity, intent)
            break
        loaded.intents = later
    loaded.intents = []
    inherit(left)
    kept = {intent.ino for intent in left}
    for node in filter(None, unsettled):
        if node.ino not in kept:
            node.busy = False
            volume.tree.touch_item(node)
            volume.forget_if_gone(node)
    settler.finish()
    held = {link for node in volume.tree.nodes.values() for link in node.slinks}
    for directory, name in loaded.temporaries:
        if (directory, name) in held:
            volume.journal.drop_temporary(name)  # a directory on its way to its name
        else:
            volume.strays.append((directory, name))
    loaded.temporaries.clear()
    for gen in loaded.orphans:
        volume.discard(gen)
    loaded.orphans.clear()
    volume.settled.set()


def _name(volume: Volume, intent: Intent) -> str:
    """Where the change shows on the share, for people."""
    directory = volume.tree.nodes.get(intent.parent)
    way = volume.tree.name_path(directory, intent.name) if isinstance(directory, Directory) else b""
    return os.fsdecode(way or intent.name)
