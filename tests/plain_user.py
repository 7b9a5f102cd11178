"""Doing something as a user without privileges, in tests that run as root."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from wbcache.probe import within

_USER = pwd.getpwnam("nobody")
PLAIN_UID, PLAIN_GID = _USER.pw_uid, _USER.pw_gid

T = TypeVar("T")


def as_plain_user(
    work: Callable[[], T],
    deadline: float = 30.0,
    *,
    uid: int = PLAIN_UID,
    gid: int = PLAIN_GID,
    groups: Sequence[int] = (),
) -> T:
    """What `work` returns or raises in a child process that has given up its privileges."""

    def drop_and_work() -> T:
        os.setgroups(list(groups))
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        return work()

    return within(deadline, drop_and_work)


def plain_command(
    home: str, *, uid: int = PLAIN_UID, gid: int = PLAIN_GID, groups: Sequence[int] = ()
) -> list[str]:
    """What to put before a command so that it runs without privileges.

    It may still read whatever it likes: the interpreter and the checkout of a test that runs as
    root are often where only root gets to.
    """
    return [
        "setpriv",
        f"--reuid={uid}",
        f"--regid={gid}",
        f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups",
        "--inh-caps=-all,+dac_read_search",
        "--ambient-caps=+dac_read_search",
        "env",
        "-u",
        "XDG_RUNTIME_DIR",
        f"HOME={home}",
    ]


@contextmanager
def fuse_for_everyone() -> Iterator[None]:
    """/dev/fuse as distributions have it; some containers give it to root alone."""
    mode = stat.S_IMODE(os.stat("/dev/fuse").st_mode)
    os.chmod("/dev/fuse", 0o666)
    try:
        yield
    finally:
        os.chmod("/dev/fuse", mode)
