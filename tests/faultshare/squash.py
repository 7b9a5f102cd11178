"""A server to which every client is nobody (``all_squash``): what it then refuses."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from typing import TYPE_CHECKING

from tests.faultshare.backing import Backing, Owner
from tests.faultshare.nodes import Node, fail

if TYPE_CHECKING:
    from tests.faultshare.calls import Call

_READ, _WRITE, _SEARCH = 4, 2, 1
_CHANGES_NAMES = frozenset(
    ("create", "mknod", "mkdir", "symlink", "link", "unlink", "rmdir", "rename")
)
_OWNERS_ONLY = frozenset(("chmod", "utimens"))
_NEEDS = {
    "opendir": _READ,
    "getxattr": _READ,
    "setxattr": _WRITE,
    "removexattr": _WRITE,
    "truncate": _WRITE,
}


class Squash:
    """Checks calls as the server's own disk would, were they made by nobody."""

    def __init__(self) -> None:
        user = pwd.getpwnam("nobody")
        self.owner = Owner(user.pw_uid, user.pw_gid)

    def check(self, call: Call, backing: Backing) -> None:
        """Raise OSError, EACCES or EPERM, for a call that is refused."""
        for directory, name in ((call.parent, call.name), (call.parent2, call.name2)):
            if directory is None or name is None:
                continue
            writes = _WRITE if call.op in _CHANGES_NAMES else 0
            self._need(backing.stat(directory), _SEARCH | writes)
            if call.op in ("unlink", "rmdir", "rename"):
                self._check_sticky(backing, directory, name)
        if call.node is None:
            return
        st = backing.stat(call.node)
        if call.op == "open":
            accesses = call.flags & os.O_ACCMODE
            self._need(st, _READ * (accesses != os.O_WRONLY) | _WRITE * (accesses != os.O_RDONLY))
        elif call.op in _NEEDS and not (call.op == "truncate" and call.node.opens):
            self._need(st, _NEEDS[call.op])
        elif call.op == "chown" or (call.op in _OWNERS_ONLY and st.st_uid != self.owner.uid):
            raise fail(errno.EPERM)

    def _need(self, st: os.stat_result, bits: int) -> None:
        shift = 6 if st.st_uid == self.owner.uid else 3 if st.st_gid == self.owner.gid else 0
        if st.st_mode >> shift & bits != bits:
            raise fail(errno.EACCES)

    def _check_sticky(self, backing: Backing, directory: Node, name: bytes) -> None:
        above = backing.stat(directory)
        if not above.st_mode & stat.S_ISVTX or above.st_uid == self.owner.uid:
            return
        try:
            st = os.lstat(name, dir_fd=backing.nodes.fd(directory))
        except FileNotFoundError:
            return
        if st.st_uid != self.owner.uid:
            raise fail(errno.EPERM)
