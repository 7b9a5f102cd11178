"""What should happen to a call: rules, capabilities and rates, free of any I/O.

Everything here is a plain synchronous object, so that it can be tested without a mount.
`tests.faultshare.gate` asks it, and does the waiting.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

#: Every call that can be named in a rule. ``truncate``, ``chmod``, ``chown`` and ``utimens`` are
#: FUSE's setattr, named after the first of them that it changes.
OPS: frozenset[str] = frozenset(
    (
        *("lookup", "getattr", "readlink", "opendir", "readdir", "releasedir", "fsyncdir"),
        *("open", "create", "read", "write", "flush", "fsync", "release", "statfs"),
        *("mknod", "mkdir", "symlink", "link", "unlink", "rmdir", "rename"),
        *("truncate", "chmod", "chown", "utimens"),
        *("getxattr", "setxattr", "listxattr", "removexattr"),
    )
)

#: Calls that change what the share holds (an ``open`` with O_TRUNC does as well).
MUTATIONS: frozenset[str] = frozenset(
    (
        *("create", "write", "mknod", "mkdir", "symlink", "link", "unlink", "rmdir", "rename"),
        *("truncate", "chmod", "chown", "utimens", "setxattr", "removexattr"),
    )
)

#: Nobody waits for these, so only a rule that names them touches them.
UNAWAITED: frozenset[str] = frozenset({"release", "releasedir"})

#: Names that stand for several calls in a rule.
GROUPS: Mapping[str, frozenset[str]] = {
    "mutations": MUTATIONS,
    "setattr": frozenset({"truncate", "chmod", "chown", "utimens"}),
    "xattr": frozenset({"getxattr", "setxattr", "listxattr", "removexattr"}),
    "names": frozenset({"lookup", "getattr", "opendir", "readdir"}),
}

#: What a share without a capability answers, unless told otherwise.
CAPABILITIES: Mapping[str, int] = {
    "symlink": errno.EPERM,
    "link": errno.EPERM,
    "mknod": errno.EPERM,
    "chmod": errno.EPERM,
    "chown": errno.EPERM,
    "utimens": errno.EPERM,
    "xattr": errno.EOPNOTSUPP,
    "rename_flags": errno.EINVAL,
    "open_unlink": errno.EBUSY,
}


def expand(ops: Iterable[str] | None) -> frozenset[str] | None:
    """Resolve group names in *ops*; None stands for every awaited call.

    Raises ValueError for a name that is neither a call nor a group.
    """
    if ops is None:
        return None
    names: set[str] = set()
    for op in ops:
        if op in GROUPS:
            names |= GROUPS[op]
        elif op in OPS:
            names.add(op)
        else:
            known = ", ".join(sorted(OPS | set(GROUPS)))
            raise ValueError(f"unknown operation {op!r}; known are {known}")
    return frozenset(names)


def path_matches(pattern: str, path: bytes) -> bool:
    """Whether the glob *pattern* matches *path* (relative to the root of the share).

    ``*`` also crosses slashes. A pattern without a slash may match the last component alone.
    """
    text = os.fsdecode(path)
    if fnmatch.fnmatchcase(text, pattern):
        return True
    return "/" not in pattern and fnmatch.fnmatchcase(text.rpartition("/")[2], pattern)


@dataclass
class Rule:
    """One fault: which calls it hits, and what it does to them.

    kind: ``hang`` keeps the call until it is released, ``fail`` answers *errno*, ``lose``
        reports success for a write that never happens.
    times: how many more calls it hits; None is for ever.
    after: the call takes effect first, and the fault befalls its answer.
    """

    id: int
    kind: Literal["hang", "fail", "lose"]
    ops: frozenset[str] | None = None
    match: str | None = None
    times: int | None = None
    probability: float = 1.0
    errno: int = errno.EIO
    after: bool = False
    random: random.Random = field(default_factory=random.Random)

    def applies(self, op: str, paths: tuple[bytes, ...]) -> bool:
        """Whether the rule is meant for this call; does not count it."""
        if self.ops is None:
            if op in UNAWAITED:
                return False
        elif op not in self.ops:
            return False
        return self.match is None or any(path_matches(self.match, path) for path in paths)

    def take(self, op: str, paths: tuple[bytes, ...]) -> bool:
        """Whether the rule hits this call, using up one of its *times* if it does."""
        if self.times == 0 or not self.applies(op, paths):
            return False
        if self.probability < 1.0 and self.random.random() >= self.probability:
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass(frozen=True)
class Request:
    """The parts of a call that decide its fate."""

    op: str
    paths: tuple[bytes, ...]
    new_name: bytes | None = None
    mutates: bool = False
    opens_for_writing: bool = False
    rename_flags: int = 0
    victim_is_open: bool = False


@dataclass(frozen=True)
class Verdict:
    """What happens to a call that has waited its turn.

    error: the errno to answer, or 0.
    effect: whether the call is carried out; an error with an effect is a lost answer.
    hang: the rule that withholds the answer once the effect has taken place.
    """

    error: int = 0
    effect: bool = True
    hang: Rule | None = None


class Pacer:
    """Shares out a rate among the calls that ask, first come first served.

    rate: units a second; 0 is without limit.
    burst: seconds of unused rate that may be used at once.
    """

    def __init__(self, rate: float, burst: float = 0.0) -> None:
        self.rate = rate
        self.burst = burst
        self._free_at = float("-inf")

    def reserve(self, now: float, amount: float) -> float:
        """Book *amount* units and return when they have been served (at *now* or later)."""
        if self.rate <= 0:
            return now
        self._free_at = max(self._free_at, now - self.burst) + amount / self.rate
        return max(now, self._free_at)


#: Seconds of idle time that an IOPS limit lets calls catch up on.
IOPS_BURST = 0.02


class Faults:
    """The present condition of the share: how slow it is, what fails, what it cannot do."""

    def __init__(self) -> None:
        self.latency = 0.0
        self.jitter = 0.0
        self.latency_by_op: dict[str, float] = {}
        self.iops = Pacer(0, IOPS_BURST)
        self.bandwidth = Pacer(0)
        self.name_max = 255
        self.mtime_resolution_ns = 1
        self.read_only = False
        self.disconnected = 0
        self.lacking: dict[str, int] = {}
        self.rules: list[Rule] = []
        self._random = random.Random(0)
        self._next_rule = 1

    def delay(self, op: str) -> float:
        """Seconds of latency for one call of *op*."""
        if op in UNAWAITED:
            return self.latency_by_op.get(op, 0.0)
        base = self.latency_by_op.get(op, self.latency)
        return base + (self._random.uniform(0, self.jitter) if self.jitter else 0.0)

    def add(
        self,
        kind: Literal["hang", "fail", "lose"],
        ops: Iterable[str] | None,
        *,
        match: str | None = None,
        times: int | None = None,
        probability: float = 1.0,
        error: int = errno.EIO,
        after: bool = False,
        seed: int = 0,
    ) -> Rule:
        """Add a rule behind the others. Raises ValueError if it could never make sense."""
        expanded = expand(ops)
        if kind == "lose" and expanded != frozenset({"write"}):
            raise ValueError("only writes can be lost without a word")
        if kind == "fail" and error <= 0:
            raise ValueError(f"not an errno: {error}")
        rule = Rule(
            id=self._next_rule,
            kind=kind,
            ops=expanded,
            match=match,
            times=times,
            probability=probability,
            errno=error,
            after=after,
            random=random.Random(seed),
        )
        self._next_rule += 1
        self.rules.append(rule)
        return rule

    def remove(self, ids: set[int] | None = None, kind: str | None = None) -> None:
        """Remove the rules with one of *ids*, or all; only those of *kind* if given."""
        self.rules = [
            rule
            for rule in self.rules
            if (ids is not None and rule.id not in ids) or (kind is not None and rule.kind != kind)
        ]

    def lack(self, capability: str, error: int | None = None) -> None:
        """Take a capability away. Raises ValueError for one that does not exist."""
        if capability not in CAPABILITIES:
            known = ", ".join(sorted(CAPABILITIES))
            raise ValueError(f"unknown capability {capability!r}; known are {known}")
        self.lacking[capability] = CAPABILITIES[capability] if error is None else error

    def hang(self, request: Request, seen: set[int]) -> Rule | None:
        """The next rule that keeps this call from taking effect, unless in *seen*."""
        for rule in self.rules:
            if rule.kind != "hang" or rule.after or rule.id in seen:
                continue
            if rule.take(request.op, request.paths):
                return rule
        return None

    def verdict(self, request: Request) -> Verdict:
        """Decide on a call that is about to take effect."""
        refused = self._refused(request)
        if refused:
            return Verdict(error=refused, effect=False)
        late = None
        for rule in self.rules:
            if rule.kind == "hang":
                if rule.after and late is None and rule.take(request.op, request.paths):
                    late = rule
            elif rule.take(request.op, request.paths):
                if rule.kind == "lose":
                    return Verdict(effect=False, hang=late)
                return Verdict(error=rule.errno, effect=rule.after, hang=late)
        return Verdict(hang=late)

    def _refused(self, request: Request) -> int:
        """The errno that the condition of the share itself gives this call, or 0."""
        if request.op in UNAWAITED:
            return 0
        if self.disconnected:
            return self.disconnected
        if request.new_name is not None and len(request.new_name) > self.name_max:
            return errno.ENAMETOOLONG
        if self.read_only and (request.mutates or request.opens_for_writing):
            return errno.EROFS
        return self._incapable(request)

    def _incapable(self, request: Request) -> int:
        lacking = self.lacking
        if not lacking:
            return 0
        if request.op in lacking:
            return lacking[request.op]
        if request.op in GROUPS["xattr"]:
            return lacking.get("xattr", 0)
        if request.rename_flags:
            return lacking.get("rename_flags", 0)
        if request.victim_is_open:
            return lacking.get("open_unlink", 0)
        return 0
