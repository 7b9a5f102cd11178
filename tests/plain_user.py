"""Doing something as a user without privileges, in tests that run as root."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from typing import TypeVar

from wbcache.probe import within

_USER = pwd.getpwnam("nobody")
PLAIN_UID, PLAIN_GID = _USER.pw_uid, _USER.pw_gid

T = TypeVar("T")


def as_plain_user(work: Callable[[], T], deadline: float = 30.0) -> T:
    """What `work` returns or raises in a child process that has given up its privileges."""

    def drop_and_work() -> T:
        os.setgroups([])
        os.setresgid(PLAIN_GID, PLAIN_GID, PLAIN_GID)
        os.setresuid(PLAIN_UID, PLAIN_UID, PLAIN_UID)
        return work()

    return within(deadline, drop_and_work)
