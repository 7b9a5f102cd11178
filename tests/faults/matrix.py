"""What each error means at each operation: the table of `docs/guarantees.md`, and how it is
observed.

    python -m tests.faults.matrix        prints the table
"""

from __future__ import annotations

import errno
from typing import NamedTuple

from tests.faults.injection import Call, Fault
from tests.faults.world import faulty_world
from tests.flush.stepworld import StuckError


class Kind(NamedTuple):
    """Errors that mean the same."""

    text: str
    errors: tuple[int, ...]
    lost: bool = False
    """The call is made, and only its answer is an error."""
    everything: bool = False
    """From then on every call fails so, until the share is well again."""


KINDS = {
    "no answer": Kind("the call hangs, and is carried out late (`faults/test_late.py`)", ()),
    "may pass": Kind(
        "EIO, ETIMEDOUT, ENOTCONN, EAGAIN, EINTR, ECONNRESET and whatever is not named here",
        (
            errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN, errno.EINTR,
            errno.ECONNRESET, errno.EHOSTDOWN, errno.EBUSY, errno.ENOMEM, errno.EREMOTEIO,
        ),
    ),
    "answer lost": Kind(
        "the call is made, and answered with such an error all the same",
        (errno.EIO, errno.ETIMEDOUT),
        lost=True,
    ),
    "stale": Kind("ESTALE; the place is looked up anew", (errno.ESTALE,)),
    "not there": Kind(
        "ENOENT to everything, our id file included: a network mount that is missing",
        (errno.ENOENT,),
        everything=True,
    ),
    "full": Kind("ENOSPC, EDQUOT", (errno.ENOSPC, errno.EDQUOT)),
    "refused": Kind(
        "EACCES, EROFS, ENAMETOOLONG, EFBIG, ELOOP: permission lost, a share made read-only, a"
        " name or file that it will not take",
        (errno.EACCES, errno.EROFS, errno.ENAMETOOLONG, errno.EFBIG, errno.ELOOP),
    ),
    "impossible": Kind(
        "EPERM, EINVAL, EOPNOTSUPP", (errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP)
    ),
}  # fmt: skip

ROWS = {
    "create": ("create",),
    "write": ("write",),
    "fsync": ("fsync",),
    "close": ("close",),
    "publish": ("publish",),
    "append, patch": ("open", "append", "sync in place"),
    "truncate": ("truncate",),
    "rename, link": ("rename", "link", "symlink"),
    "mkdir": ("mkdir",),
    "unlink, rmdir": ("unlink", "rmdir"),
    "attributes": ("chmod", "chown", "utimens", "setxattr"),
    "look up": ("look up", "getxattr"),
}
"""Rows of the table, and the operations in each."""

WAITS, AGAIN, ROOM, QUARANTINED, KEPT = "waits", "again", "room", "quarantine", "kept"

OUTCOMES = {
    WAITS: (
        "nothing",
        'the share as "slow" or "not answering", and calls under way',
        "by itself: the call is not repeated while it may still be carried out, and nothing else is"
        " done to the same names; a daemon that follows a killed one flushes nothing before the"
        " last call of that one has ended",
    ),
    AGAIN: (
        "nothing",
        "one line in the log, and the age of what is pending",
        "by itself: tried again for ever, after 1 s, 2 s, … 60 s, each a quarter more or less",
    ),
    ROOM: (
        "nothing, until the cache is full as well; then writers wait",
        '"the share is full" in the log; "order suspended" in `status` if it comes to that',
        "by itself once there is room",
    ),
    QUARANTINED: (
        'nothing; `user.wbcache.state` of the file says "quarantined" and why',
        "`status` and `pending` name it and the reason; what waits for it names it",
        "`wbcache flush`, the next mount, another name, or new content",
    ),
    KEPT: (
        "nothing: the mount goes on to show it",
        "one event for each kind of attribute in `status`, the rest in the log",
        "the bytes arrive without it; set it again when the share can have it",
    ),
}
"""What the application sees, what the operator sees, and how it heals."""

EXPECTED = {
    (kind, row): {
        "no answer": WAITS,
        "full": ROOM,
        "refused": QUARANTINED,
        "impossible": QUARANTINED,
    }.get(kind, AGAIN)
    for kind in KINDS
    for row in ROWS
} | {("impossible", "attributes"): KEPT}
"""The table."""


class Observed(NamedTuple):
    """What an error led to."""

    outcome: str
    reasons: frozenset[str]
    """What `status` says of what is quarantined."""


def observe(place: str, operation: str, kind: Kind, error: int) -> Observed:
    """Let an operation fail a few times, and then the share be well again.

    Raises AssertionError unless the application sees nothing of it, and all arrives in the end.
    """
    with faulty_world(place) as world:
        world.everything()

        def decide(call: Call) -> Fault | None:
            failed = len(world.injector.failed)
            is_it = call.operation == operation or (kind.everything and failed)
            if not is_it or failed >= (40 if kind.everything else 3):
                return None
            return Fault(error, after=kind.lost or call.operation == "close")

        world.injector.decide = decide
        world.again()
        stuck = False
        try:
            world.settle()
        except StuckError:
            stuck = True
            assert all(map(world.flusher.is_hopeless, world.flusher.unfinished()))
        assert world.injector.failed, f"the scenario has no {operation}"
        reasons = frozenset(filter(None, map(world.trouble, world.flusher.unfinished())))
        kept = any("kept here only" in text for text in world.events())
        world.check_mount()
        world.injector.decide = lambda call: None
        world.again()
        world.settle()
        world.check(attributes=not kept)
        world.check_mount()
        assert not any("conflict" in text for text in world.events())
        if stuck:
            return Observed(QUARANTINED, reasons)
        return Observed(KEPT if kept else ROOM if world.was_full() else AGAIN, reasons)


def render() -> str:
    """The table as it stands in the documentation, and what its words mean."""
    lines = [f"- **{kind}**: {KINDS[kind].text}" for kind in KINDS]
    lines += ["", _row("", *KINDS), _row(*["---"] * (1 + len(KINDS)))]
    for row in ROWS:
        lines.append(_row(row, *(EXPECTED[kind, row] for kind in KINDS)))
    lines += ["", _row("", "the application sees", "the operator sees", "it heals")]
    lines.append(_row(*["---"] * 4))
    lines += [_row(f"**{outcome}**", *texts) for outcome, texts in OUTCOMES.items()]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print(render(), end="")
