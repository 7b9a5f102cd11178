"""Random programs converge: on a healthy share everything arrives, in an order that can be trusted.

The real file system, flusher, journal and loader run on a real directory, one call at a time
(`stepwise`), beside a model (`posix`, `contract`). Each program begins with a random share of which
nothing is known yet, and ends with a drain. Asserted are

- that a step is always found while the views differ, and the end comes within a bounded number;
- that the share, the mount and the model are equal then, and nothing is left over anywhere;
- at every step, that what was closed before an operation precedes it on the share, and that whoever
  waits in a circle passes over nobody else;
- after every call, that each file on the share is one that the mount showed at some instant.

A failure prints the seed and the shortest program that fails too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.flush.programs import ORDINARY, run_program
from tests.flush.world import CONFIG, Setting
from wbcache.policy import PolicyRule
from wbcache.share.capabilities import Capabilities

BLOCK = 50
"""Programs a test."""

HEALTHY = Setting(ORDINARY)
KILLED = HEALTHY.but(kill_now=3)
PAIRS = replace(HEALTHY.but(shuffle=4, kill_now=1), length=16)
"""Everything gets another place: pairs of views that have nothing in common."""

SWAPPED = replace(HEALTHY.but(exchange=20, rename=20, link=6, rotate=4), length=24)
PLAIN = Setting(
    {
        "create_once": 12, "mkdir": 5, "unlink_old": 8, "replace_old": 8,
        "symlink": 1, "turn": 4, "resume": 10, "run": 6, "wait": 4,
    },
    circles=False,
)  # fmt: skip
"""Files are written once, under names of their own: nobody waits in a circle."""

LOCAL = replace(
    KILLED.but(link=0), config=replace(CONFIG, policies=(PolicyRule("**/c", never=True),))
)
"""One name in four is kept from the share."""

FLAKY = replace(HEALTHY, fault_rate=0.05)
"""One call in twenty fails before it is made, and one after it was."""

POOR = replace(
    KILLED, capabilities=Capabilities(noreplace=False, chmod=True, chown=False, xattr=False)
)
"""A share without RENAME_NOREPLACE: new names are given by link and unlink."""


@pytest.fixture
def place() -> Iterator[str]:
    """A directory in memory where there is one: the programs make many files, and sync them."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else None, prefix="wbcache-plan-"
    ) as name:
        yield name


def run_block(place: str, setting: Setting, block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        failure = run_program(place, seed, setting)
        if failure is not None:
            pytest.fail(str(failure))


@pytest.mark.parametrize("block", range(10))
def test_everything_arrives(place: str, block: int) -> None:
    run_block(place, HEALTHY, block)


@pytest.mark.parametrize("block", range(10))
def test_everything_arrives_though_it_is_killed_between_any_two_calls(
    place: str, block: int
) -> None:
    run_block(place, KILLED, block)


@pytest.mark.parametrize("block", range(6))
def test_any_view_becomes_any_other(place: str, block: int) -> None:
    run_block(place, PAIRS, block)


@pytest.mark.parametrize("block", range(6))
def test_exchanges_and_nested_swaps_arrive(place: str, block: int) -> None:
    run_block(place, SWAPPED, block)


@pytest.mark.parametrize("block", range(6))
def test_no_order_is_dropped_when_nobody_waits_in_a_circle(place: str, block: int) -> None:
    run_block(place, PLAIN, block)


@pytest.mark.parametrize("block", range(4))
def test_a_share_that_can_do_little(place: str, block: int) -> None:
    run_block(place, POOR, block)


@pytest.mark.parametrize("block", range(4))
def test_files_that_a_policy_keeps_hold_nothing_up(place: str, block: int) -> None:
    run_block(place, LOCAL, block)


@pytest.mark.parametrize("block", range(8))
def test_everything_arrives_though_calls_fail_and_answers_are_lost(place: str, block: int) -> None:
    run_block(place, FLAKY, block)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", [HEALTHY, KILLED, PAIRS, SWAPPED, PLAIN, LOCAL, FLAKY, POOR])
def test_many_more(place: str, setting: Setting) -> None:
    for block in range(1000, 1200):
        run_block(place, setting, block)
