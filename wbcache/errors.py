"""What can go wrong for the person at the command line, each with its own exit code.

    WbcacheError                 1  something unexpected
    ├── UsageError               2  the command line makes no sense
    ├── RemainsError             3  something is not on the share yet
    ├── SourceError              4  SOURCE is missing, unreadable, hung, or not a directory
    ├── MountpointError          5  MOUNTPOINT is missing, not empty, or mounted already
    ├── CacheDirError            6  the cache directory cannot be used
    ├── ConfigError              7  the configuration file is wrong
    ├── FuseError                8  this machine cannot mount FUSE file systems
    ├── NoSuchMountError         9  no wbcache mount there, or no daemon that answers
    │   ├── NotRunningError      9  the mount is known, but its daemon has ended
    │   └── ConnectionLostError  9  the daemon ended in the middle of a command
    ├── BindingError            10  the share that the cache belongs to is not at SOURCE
    ├── CacheInUseError         11  another daemon is using the cache directory
    ├── CacheFormatError        12  the cache directory was made by a newer version
    ├── DaemonStartError        13  the daemon ended, or was silent, before it was ready
    ├── BusyError               14  programs still use the mount
    ├── RecoverError            15  `recover` cannot read the cache or write its target
    ├── ResolveError            16  `conflicts resolve` cannot do what it was asked
    ├── InterruptedWorkError   130  Ctrl-C, while something goes on without the command
    └── ReportedError            *  an error and its code as a daemon reported them

The numbers are an interface: a number is never given another meaning. 0 is success, 130 an
interruption by Ctrl-C. `docs/exit-codes.md` lists them for users.

Errors of single file operations on the mount are plain errno values and not in this tree.
"""

from __future__ import annotations

from typing import ClassVar

from wbcache.escaping import one_line

EXIT_OK = 0
EXIT_INTERRUPTED = 130


class CacheDiskError(OSError):
    """The cache's own disk refuses something; the share has no part in it."""


class WbcacheError(Exception):
    """One line for the user: what failed, why, and what to do about it.

    `what` names the operation or thing, `why` the cause, `hint` the next step (may be empty).
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, why: str, hint: str = "") -> None:
        super().__init__(what, why, hint)
        self.what = what
        self.why = why
        self.hint = hint

    @property
    def exit(self) -> int:
        """The exit code of a command that ends with this error."""
        return self.exit_code

    def __str__(self) -> str:
        text = f"{self.what}: {self.why}"
        return one_line(f"{text}; {self.hint}" if self.hint else text)


class UsageError(WbcacheError):
    """The command line makes no sense."""

    exit_code = 2


class RemainsError(WbcacheError):
    """Something is not on the share yet; it is safe in the cache directory."""

    exit_code = 3


class SourceError(WbcacheError):
    """SOURCE is missing, not a directory, not readable, or does not answer."""

    exit_code = 4


class MountpointError(WbcacheError):
    """MOUNTPOINT is missing, not an empty directory, or mounted already."""

    exit_code = 5


class CacheDirError(WbcacheError):
    """The cache directory is in a place, or in a state, in which it cannot be used."""

    exit_code = 6


class ConfigError(WbcacheError):
    """The configuration file cannot be read, or a key or value in it is wrong."""

    exit_code = 7


class FuseError(WbcacheError):
    """FUSE file systems cannot be mounted here."""

    exit_code = 8


class NoSuchMountError(WbcacheError):
    """There is no wbcache mount at that place, or its daemon does not answer."""

    exit_code = 9


class NotRunningError(NoSuchMountError):
    """A mount's daemon has ended; what it could not flush is in its cache directory."""


class ConnectionLostError(NoSuchMountError):
    """The daemon ended, or closed the connection, in the middle of a command."""


class BindingError(WbcacheError):
    """The cache belongs to a share that is not at SOURCE (its network mount is missing, say)."""

    exit_code = 10


class CacheInUseError(WbcacheError):
    """Another daemon holds the cache directory."""

    exit_code = 11


class CacheFormatError(WbcacheError):
    """The cache directory was written by a newer version of wbcache."""

    exit_code = 12


class DaemonStartError(WbcacheError):
    """The daemon ended, or stayed silent too long, before the mount was ready."""

    exit_code = 13


class BusyError(WbcacheError):
    """The mount cannot be unmounted while programs use it."""

    exit_code = 14


class RecoverError(WbcacheError):
    """`recover` cannot read the cache directory or cannot write its target."""

    exit_code = 15


class ResolveError(WbcacheError):
    """There is no such conflict, or it can't be resolved that way."""

    exit_code = 16


class InterruptedWorkError(WbcacheError):
    """The user pressed Ctrl-C; what the command had begun goes on without it."""

    exit_code = EXIT_INTERRUPTED


class ReportedError(WbcacheError):
    """An error that a daemon reported, with the daemon's own wording and exit code."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text, "")
        self._text = text
        self._exit = exit_code

    @property
    def exit(self) -> int:
        return self._exit

    def __str__(self) -> str:
        return one_line(self._text)
