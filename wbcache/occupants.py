"""Who uses a mount: processes of all mount namespaces, found without asking the mount anything.

Only what the caller may see of other users' processes is seen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_SHOWN = 4
"""So many are named; of more, how many there are."""


class Occupant(NamedTuple):
    """A process that uses the mount."""

    pid: int
    command: str
    place: bytes
    """Where that namespace has the mount."""
    contained: bool
    """That namespace has another root, as containers do."""

    def __str__(self) -> str:
        place = f", in a container that has it at {os.fsdecode(self.place)}"
        return f"{self.command} ({self.pid}{place if self.contained else ''})"


class _Namespace:
    """What a mount namespace has of the mount."""

    def __init__(self, pid: int | str, device: str) -> None:
        self.places: dict[int, bytes] = {}
        """Mount points by the ids of the mounts."""
        self.root: tuple[bytes, bytes] | None = None
        """Device and directory at the root."""
        self.groups: set[bytes] = set()
        """The numbers of the groups of mounts that tell the mounts above of each other's changes,
        or are told."""
        groups: dict[bytes, set[bytes]] = {}
        above = []
        with open(f"/proc/{pid}/mountinfo", "rb") as file:
            for line in file:
                fields = line.split()
                tags = [tag.split(b":") for tag in fields[6 : fields.index(b"-")]]
                groups[fields[0]] = {tag[1] for tag in tags if tag[0] in (b"shared", b"master")}
                if fields[4] == b"/":
                    self.root = fields[2], fields[3]
                if fields[2] == device.encode():
                    self.places[int(fields[0])] = fields[4]
                    above.append(fields[1])
        for number in above:
            self.groups |= groups.get(number, set())


def occupants(device: str, *, elsewhere: bool) -> list[Occupant]:
    """The processes that use the mounts of a device (MAJOR:MINOR): those in the caller's mount
    namespace, or (``elsewhere``) in others, and one for each container that only has it mounted,
    and would still have it when it is unmounted here."""
    own = os.readlink("/proc/self/ns/mnt")
    seen: dict[str, _Namespace] = {own: _Namespace("self", device)}
    found: list[Occupant] = []
    busy: set[str] = set()
    idle: dict[str, Occupant] = {}
    """By namespace: a process of a container that does not use what it has mounted."""
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to look into
            name = os.readlink(f"/proc/{pid}/ns/mnt")
            if (name != own) != elsewhere:
                continue
            if name not in seen:
                seen[name] = _Namespace(pid, device)
            space = seen[name]
            if not space.places:
                continue
            mounted = next((i for i in _mounts_used(pid) if i in space.places), None)
            if mounted is None and _has_mapped(pid, device):
                mounted = min(space.places)
            contained = space.root != seen[own].root
            stays = contained and not space.groups & seen[own].groups
            if mounted is None and (name in idle or not stays):
                continue
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                command = file.read().strip()
            place = space.places[min(space.places) if mounted is None else mounted]
            occupant = Occupant(pid, command, place, contained)
            if mounted is None:
                idle[name] = occupant
            else:
                busy.add(name)
                found.append(occupant)
    return found + [occupant for name, occupant in idle.items() if name not in busy]


def in_words(who: Sequence[str]) -> str:
    """Those who use a mount, for a message."""
    if len(who) > _SHOWN + 1:
        who = [*who[:_SHOWN], f"{len(who) - _SHOWN} more"]
    return " and ".join(filter(None, (", ".join(who[:-1]), *who[-1:])))


def _has_mapped(pid: int, device: str) -> bool:
    """Whether a process has a file of a device mapped; its descriptor may be closed."""
    major, minor = map(int, device.split(":"))
    wanted = b"%02x:%02x" % (major, minor)
    with open(f"/proc/{pid}/maps", "rb") as file:
        return any(line.split(maxsplit=4)[3] == wanted for line in file)


def _mounts_used(pid: int) -> Iterator[int]:
    """The ids of the mounts that a process has something open in."""
    for link in ("cwd", "root"):
        # Nothing is asked of what is only located.
        fd = os.open(f"/proc/{pid}/{link}", os.O_PATH | os.O_CLOEXEC)
        try:
            yield _mount_id("self", fd)
        finally:
            os.close(fd)
    for name in os.listdir(f"/proc/{pid}/fdinfo"):
        with contextlib.suppress(OSError):
            yield _mount_id(pid, name)


def _mount_id(pid: int | str, fd: int | str) -> int:
    with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key == "mnt_id":
                return int(value)
    return -1
