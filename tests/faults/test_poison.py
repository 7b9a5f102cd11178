"""What the share refuses stays, is shown, and holds back only what is near it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.injection import Call, Fault
from tests.faults.world import FaultyWorld, blob, faulty_world, shape
from tests.flush.stepworld import StuckError
from wbcache.daemon import report


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FaultyWorld]:
    with faulty_world(str(tmp_path)) as world:
        yield world


def refuse(world: FaultyWorld, operation: str, path: str) -> None:
    """The share refuses an operation on a name (with a slash at its end: on any name in there)."""

    def decide(call: Call) -> Fault | None:
        is_it = call.path == path.encode() or (path.endswith("/") and path.encode() in call.path)
        return Fault(errno.EACCES) if call.operation == operation and is_it else None

    world.injector.decide = decide


def flush(world: FaultyWorld) -> None:
    """Flush all that can be flushed."""
    world.again()
    try:
        world.settle()
    except StuckError:
        assert world.flusher.is_stalled
        assert all(map(world.flusher.is_hopeless, world.flusher.unfinished()))


def on_share(world: FaultyWorld, path: str) -> bytes | None:
    """What the share has under a name."""
    entry = shape(world.share).get(path)
    return entry[1] if entry is not None else None


def pending(world: FaultyWorld) -> dict[str, str]:
    """What `wbcache pending` says: reason by path."""
    rows = report.rows(world.fs, world.flusher.unfinished())
    return {os.fsdecode(row["path"]): row["reason"] for row in rows}


def heals(world: FaultyWorld) -> None:
    """Once the share takes it all arrives."""
    world.injector.decide = lambda call: None
    world.again()
    world.settle()
    assert shape(world.share) == shape(world.native)
    world.check_clean()


def prepare(world: FaultyWorld) -> None:
    for directory in ("here", "here/in", "here/beside", "elsewhere", "elsewhere/deep"):
        world.mkdir(directory)
        for name in ("replaced", "removed"):
            world.write(f"{directory}/{name}", blob(name))
    flush(world)
    assert shape(world.share) == shape(world.native)


def poison_file(world: FaultyWorld) -> str:
    refuse(world, "publish", "here/in/poison")
    world.write("here/in/poison", b"poison")
    return "here/in/poison"


def poison_directory(world: FaultyWorld) -> str:
    refuse(world, "mkdir", "here/in/poison")
    world.mkdir("here/in/poison")
    world.mkdir("here/in/poison/below")
    for n in range(3):
        world.write(f"here/in/poison/below/{n}", blob(str(n)))
    return "here/in/poison"


def poison_rename(world: FaultyWorld) -> str:
    refuse(world, "rename", "here/in/poison")
    world.rename("here/in/replaced", "here/in/poison")
    return "here/in/poison"


@pytest.mark.parametrize("poison", [poison_file, poison_directory, poison_rename])
def test_it_holds_back_removals_beside_it_and_nothing_else(
    world: FaultyWorld, poison: Callable[[FaultyWorld], str]
) -> None:
    prepare(world)
    path = poison(world)
    flush(world)
    for directory in ("here", "here/in", "here/beside", "elsewhere", "elsewhere/deep"):
        world.unlink(f"{directory}/removed")
        if directory != "here/in" or poison is not poison_rename:
            world.write(f"{directory}/replaced", blob("new"))
        world.write(f"{directory}/made", blob("made"))
    flush(world)
    for directory in ("here/beside", "elsewhere", "elsewhere/deep"):
        assert on_share(world, f"{directory}/replaced") == blob("new"), directory
        assert on_share(world, f"{directory}/removed") is None, directory
    for directory in ("here", "here/in"):
        # Kept, since what came before it may be what it was to replace.
        assert on_share(world, f"{directory}/removed") == blob("removed"), directory
        assert on_share(world, f"{directory}/replaced") in (blob("replaced"), None), directory
        assert on_share(world, f"{directory}/made") == blob("made")
    told = pending(world)
    assert told[path] == "Permission denied"
    waiting = f"waits for {path!r}, which is quarantined"
    assert {reason for p, reason in told.items() if p != path} == {waiting}
    heals(world)


def test_what_waits_for_a_removal_that_is_refused_holds_up_nobody_else(world: FaultyWorld) -> None:
    prepare(world)
    refuse(world, "unlink", "here/in/removed")
    world.unlink("here/in/replaced")
    world.unlink("here/in/removed")
    world.rmdir("here/in")
    world.write("here/in", b"a file in its place")
    flush(world)
    world.write("elsewhere/replaced", blob("new"))
    world.unlink("elsewhere/removed")
    flush(world)
    assert on_share(world, "elsewhere/replaced") == blob("new")
    assert on_share(world, "elsewhere/removed") is None
    assert pending(world) == {
        "here/in/removed": "Permission denied",
        "here/in": "waits for 'here/in/removed', which is quarantined",
    }
    heals(world)


def test_the_state_names_the_reason(world: FaultyWorld) -> None:
    world.write("poison", b"poison")
    refuse(world, "publish", "poison")
    flush(world)

    def state() -> str:
        values = []

        async def read() -> None:
            node = await world.find("poison")
            values.append(await world.fs.attributes.get_xattr(node, b"user.wbcache.state"))

        world.do(read)
        return str(values[0].decode())

    assert state() == "quarantined: Permission denied"
    status = report.status(world.fs, world.flusher)
    assert status["errors"] == [{"path": b"poison", "reason": "Permission denied"}]
    assert "'poison': Permission denied" in status["events"][-1]["text"]
    heals(world)
    assert state() == "clean"


@pytest.mark.parametrize("how", ["rename", "rewrite"])
def test_another_name_or_other_bytes_are_tried_at_once(world: FaultyWorld, how: str) -> None:
    refuse(world, "publish", "poison")
    world.write("poison", b"poison")
    flush(world)
    assert pending(world) == {"poison": "Permission denied"}
    world.injector.decide = lambda call: None
    if how == "rename":
        world.rename("poison", "antidote")
    else:
        world.write("poison", b"antidote")
    world.settle()
    assert shape(world.share) == shape(world.native)


def test_it_is_tried_again_at_the_next_mount(world: FaultyWorld) -> None:
    refuse(world, "publish", "poison")
    world.write("poison", b"poison")
    flush(world)
    assert on_share(world, "poison") is None
    world.injector.decide = lambda call: None
    world.kill()
    world.again()
    world.settle()
    assert on_share(world, "poison") == b"poison"


def test_a_flush_of_what_waits_for_it_tries_it_again(world: FaultyWorld) -> None:
    prepare(world)
    poison_directory(world)
    flush(world)
    world.injector.decide = lambda call: None
    nodes = []

    async def find() -> None:
        nodes.append(await world.find("here/in/poison/below/1"))

    world.do(find)
    world.flusher.timing.all_due = False
    world.flusher.pull(nodes[0])
    assert not world.flusher.is_hopeless(nodes[0])
    world.settle()
    assert on_share(world, "here/in/poison/below/1") == blob("1")


def test_nothing_is_given_up_that_is_about_to_be_looked_at_again(world: FaultyWorld) -> None:
    """What it waited for may wait in vain itself since, and then does not hold it up: a drain that
    ended now would leave behind what can go."""
    prepare(world)
    poison_file(world)
    world.write("here/in/replaced", blob("new"))
    flush(world)
    nodes = []

    async def find() -> None:
        nodes.append(await world.find("here/in/replaced"))

    world.do(find)
    assert world.flusher.is_hopeless(nodes[0])
    world.fs.tree.touch_item(nodes[0])
    assert not world.flusher.is_hopeless(nodes[0])
    flush(world)
    assert world.flusher.is_hopeless(nodes[0])
    heals(world)
