"""The options after `-o`: a few of the kernel's, and two of our own."""

from __future__ import annotations

from dataclasses import dataclass

from wbcache.errors import UsageError

KERNEL_OPTIONS = ("atime", "exec", "noatime", "noexec", "nodiratime", "relatime", "ro", "rw")
ALWAYS_SET = ("default_permissions", "nodev", "nosuid")
"""Accepted because scripts write them; they hold anyway."""
OWN_OPTIONS = ("allow_other", "rebind", "volatile_cache")


@dataclass(frozen=True)
class MountOptions:
    """What the user asked for with `-o`."""

    kernel: tuple[str, ...] = ()
    """Passed on to the kernel as they are."""
    allow_other: bool | None = None
    """None: where it is permitted."""
    rebind: bool = False
    """Accept that the cache belongs to another share, or that its share has lost its id."""
    volatile_cache: bool = False
    """Accept a cache directory in memory, whose data a power loss or reboot takes."""

    @property
    def read_only(self) -> bool:
        """Whether the last word on it was `ro`."""
        words = [option for option in self.kernel if option in ("ro", "rw")]
        return bool(words) and words[-1] == "ro"


def parse_options(text: str) -> MountOptions:
    """The options in "a,b,c"; an empty text is none. Raises UsageError for an unknown one."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in (*KERNEL_OPTIONS, *ALWAYS_SET, *OWN_OPTIONS):
            known = ", ".join(sorted((*KERNEL_OPTIONS, *OWN_OPTIONS)))
            raise UsageError(f"-o {name}", "is not a known option", f"known are: {known}")
    return MountOptions(
        kernel=tuple(name for name in names if name in KERNEL_OPTIONS),
        allow_other=True if "allow_other" in names else None,
        rebind="rebind" in names,
        volatile_cache="volatile_cache" in names,
    )
