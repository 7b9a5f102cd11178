"""Each error at each call that the flusher makes: nothing of it reaches the application, nothing is
lost or doubled, and all arrives once the share is well again."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.injection import Call, Fault, Injector
from tests.faults.matrix import EXPECTED, KINDS, QUARANTINED, ROWS, observe, render
from tests.faults.world import FaultyWorld, faulty_world
from tests.flush.stepworld import StuckError
from wbcache.share.capabilities import Capabilities

CELLS = [
    (kind, row, operation)
    for kind in KINDS
    if KINDS[kind].errors
    for row in ROWS
    for operation in ROWS[row]
]
GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"

POOR = Capabilities(symlink=True, link=False, noreplace=False, xattr=False, chown=False)
"""A share that can do less."""


def errors_of(kind: str, operation: str) -> list[int]:
    """The errors of a kind that an operation can be answered with."""
    errors = list(KINDS[kind].errors)
    if operation == "getxattr" and errno.EOPNOTSUPP in errors:
        errors.remove(errno.EOPNOTSUPP)  # that is an answer: there are none
    return errors


def check_cell(place: Path, kind: str, row: str, operation: str, error: int) -> None:
    observed = observe(str(place), operation, KINDS[kind], error)
    assert observed.outcome == EXPECTED[kind, row]
    assert bool(observed.reasons) == (observed.outcome == QUARANTINED)


@pytest.mark.parametrize(
    ("number", "kind", "row", "operation"), [(n, *cell) for n, cell in enumerate(CELLS)]
)
def test_the_table_holds(tmp_path: Path, number: int, kind: str, row: str, operation: str) -> None:
    errors = errors_of(kind, operation)
    check_cell(tmp_path, kind, row, operation, errors[number % len(errors)])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_holds_for_every_error(tmp_path: Path) -> None:
    for kind, row, operation in CELLS:
        for error in errors_of(kind, operation):
            place = tmp_path / f"{kind}-{operation}-{error}"
            place.mkdir()
            check_cell(place, kind, row, operation, error)


def test_the_documentation_has_the_table() -> None:
    assert render() in GUARANTEES.read_text()


# -- any call ------------------------------------------------------------------------------------


def from_call(
    injector: Injector, number: int, fault: Fault, length: int
) -> Callable[[Call], Fault | None]:
    """From the ``number``-th call on, so many fail."""

    def decide(call: Call) -> Fault | None:
        at = len(injector.calls) - 1
        if not number <= at < number + length:
            return None
        return fault if call.operation != "close" else fault._replace(after=True)

    return decide


def converges(world: FaultyWorld) -> None:
    """With faults first, and without them in the end."""
    world.again()
    try:
        world.settle()
    except StuckError:
        assert all(map(world.flusher.is_hopeless, world.flusher.unfinished()))
    world.check_mount()
    world.injector.decide = lambda call: None
    world.again()
    world.settle()
    world.check()
    assert not any("conflict" in text for text in world.events())


def run(place: Path, number: int, fault: Fault, length: int, can: Capabilities) -> bool:
    """Let calls fail; returns whether there were so many."""
    place.mkdir()
    with faulty_world(str(place), number, can) as world:
        world.everything()
        world.injector.decide = from_call(world.injector, number, fault, length)
        converges(world)
        return bool(world.injector.failed)


ONE = [
    Fault(code, after)
    for code in (errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE, errno.EEXIST, errno.ENOTDIR)
    for after in (False, True)
]
SPELLS = [Fault(errno.ENOENT), Fault(errno.ENOTCONN), Fault(errno.ENOTDIR)]

SHARES = {"rich": Capabilities(), "poor": POOR}


def name_of(fault: Fault) -> str:
    return f"{errno.errorcode[fault.errno]}{'-lost' if fault.after else ''}"


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("fault", ONE, ids=name_of)
def test_any_call_may_fail(tmp_path: Path, fault: Fault, share: str) -> None:
    first = random.Random(name_of(fault) + share).randrange(11)
    numbers = range(first, 99, 11)
    came = [run(tmp_path / str(n), n, fault, 1, SHARES[share]) for n in numbers]
    assert any(came)


@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("fault", SPELLS, ids=name_of)
def test_every_call_may_fail_for_a_while(tmp_path: Path, fault: Fault, length: int) -> None:
    """A share that suddenly knows of nothing is not one from which all was removed."""
    first = random.Random(name_of(fault)).randrange(11)
    for number in range(first, 90, 11):
        assert run(tmp_path / str(number), number, fault, length, SHARES["rich"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_call_fails(tmp_path: Path) -> None:
    for share, can in SHARES.items():
        for fault in ONE:
            number = 0
            while run(tmp_path / f"{share}-{name_of(fault)}-{number}", number, fault, 1, can):
                number += 1
        for fault in SPELLS:
            for length in (5, 40, 100):
                for number in range(95):
                    place = tmp_path / f"{share}-{name_of(fault)}-{number}-{length}"
                    run(place, number, fault, length, can)


AT_RANDOM = [
    Fault(code, after)
    for kind in ("may pass", "stale", "full")
    for code in KINDS[kind].errors
    for after in (False, True)
]


def play_at_random(place: Path, seed: int, errors: list[Fault]) -> None:
    rng = random.Random(seed)
    with faulty_world(str(place), seed, rng.choice(list(SHARES.values()))) as world:
        chance = rng.choice([0.05, 0.2, 0.4])

        def decide(call: Call) -> Fault | None:
            if rng.random() >= chance or len(world.injector.failed) > 300:
                return None
            fault = rng.choice(errors)
            return fault if call.operation != "close" else fault._replace(after=True)

        world.injector.decide = decide
        world.everything()
        converges(world)


@pytest.mark.parametrize("seed", range(30))
def test_faults_at_random(tmp_path: Path, seed: int) -> None:
    refused = [Fault(code) for code in KINDS["refused"].errors]
    play_at_random(tmp_path, seed, AT_RANDOM + refused if seed % 3 == 0 else AT_RANDOM)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_faults_at_random_for_long(tmp_path: Path) -> None:
    for seed in range(100, 1100):
        place = tmp_path / str(seed)
        place.mkdir()
        play_at_random(place, seed, AT_RANDOM)
