"""Describing directory trees, to compare them."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any


def describe(top: str | os.PathLike[str], *, times: bool = False) -> dict[str, tuple[Any, ...]]:
    """Everything below *top*: type, mode, links, and content, link target or names of xattrs.

    Hard links show by the path of their first name. With *times*, modification times of files too.
    """
    found: dict[str, tuple[Any, ...]] = {}
    first: dict[int, str] = {}
    for directory, names, files in os.walk(top):
        names.sort()
        for name in sorted(names + files):
            path = Path(directory, name)
            st = path.lstat()
            relative = str(path.relative_to(top))
            content: Any = None
            if stat.S_ISLNK(st.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(st.st_mode):
                content = (st.st_size, hashlib.sha256(path.read_bytes()).hexdigest()[:16])
            xattrs = {
                attribute: os.getxattr(path, attribute, follow_symlinks=False)
                for attribute in os.listxattr(path, follow_symlinks=False)
            }
            found[relative] = (
                stat.filemode(st.st_mode),
                st.st_nlink if not stat.S_ISDIR(st.st_mode) else None,
                None if stat.S_ISDIR(st.st_mode) else first.setdefault(st.st_ino, relative),
                (st.st_uid, st.st_gid),
                content,
                xattrs,
                st.st_mtime_ns if times and stat.S_ISREG(st.st_mode) else None,
            )
    return found
