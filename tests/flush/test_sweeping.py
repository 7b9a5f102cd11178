"""Left-over temporaries are removed from the share, each as often as it takes."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from tests.volumes import mounted
from wbcache.flush.sweeping import Sweeper


async def test_one_that_the_journal_and_a_listing_tell_of(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    async with mounted(str(share), str(tmp_path / "cache")) as mount:
        volume = mount.volume
        mount.flusher.suspended = True
        at = (volume.tree.root, volume.temporary_names.fresh())
        (share / at[1].decode()).touch()
        remove, calls = volume.share.remove, []

        async def fail_at_first(*arguments: Any, **named: Any) -> None:
            calls.append(arguments)
            if len(calls) == 1:
                raise OSError(errno.EIO, "not now")
            await remove(*arguments, **named)

        volume.share.remove = fail_at_first  # type: ignore[method-assign]
        sweeper = Sweeper(volume)
        sweeper.insist()
        volume.strays += [at, at]
        for directory, names in sweeper.take().items():
            await sweeper.sweep(directory, names)
        assert sweeper.is_busy and not volume.strays and len(calls) == 1
        sweeper.insist()  # its time has come
        sweeper.collect()
        for directory, names in sweeper.take().items():
            await sweeper.sweep(directory, names)
        assert not sweeper.is_busy and not sweeper.later
        assert not list(share.iterdir())
