"""What an error from the share means for the flush."""

from __future__ import annotations

import errno
import os

from wbcache.errors import CacheDiskError

REFUSED = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.EFBIG,
        errno.EILSEQ,
        errno.ELOOP,
        errno.EMLINK,
        errno.EOPNOTSUPP,
    }
)
"""The share will not take it, however often it is tried: quarantine."""

NOT_SETTABLE = frozenset({errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.E2BIG, errno.ERANGE})
"""As an answer to the setting of an attribute: this file on the share can't have it."""

SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The share is full: tried again until somebody makes room."""


def refused(error: OSError) -> bool:
    """Whether trying again is useless until somebody acts."""
    return error.errno in REFUSED


def is_full(error: OSError) -> bool:
    """Whether the share has no room."""
    return error.errno in SPACE and not isinstance(error, CacheDiskError)


def describe(error: OSError) -> str:
    """The error in words, without file names (those are shown beside it, escaped)."""
    text = os.strerror(error.errno) if error.errno else str(error)
    if isinstance(error, CacheDiskError):
        return f"the cache's disk: {text}"
    if is_full(error):
        return f"the share is full ({text})"
    return text
