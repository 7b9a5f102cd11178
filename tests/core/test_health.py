"""How the share's health is judged from its calls."""

from __future__ import annotations

import pytest

from wbcache.share.health import Health


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(clock)


def answered(health: Health, clock: Clock, seconds: float) -> None:
    ticket = health.begin()
    clock.now += seconds
    health.end(ticket)


def test_slow_and_as_usual_again(
    health: Health, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        health.observe()
        answered(health, clock, 0.03)
    assert health.state == "answering"
    for _ in range(30):
        answered(health, clock, 3.0)
        health.observe()
    assert health.state == "slow"
    for _ in range(60):
        answered(health, clock, 0.03)
        health.observe()
    assert health.state == "answering"
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(",")[0] for text in told] == [
        "the share is slow",
        "the share is as usual",
    ]


def test_slow_while_nothing_is_answered(health: Health, clock: Clock) -> None:
    ticket = health.begin()
    clock.now += 6.0
    health.observe()
    assert health.state == "slow"
    health.end(ticket)
    for _ in range(20):
        answered(health, clock, 0.01)
    health.observe()
    assert health.state == "answering"


def test_a_call_that_stays_stuck_is_told_once(
    health: Health, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ticket = health.begin()
    for _ in range(200):
        answered(health, clock, 0.1)
        health.observe()
    assert health.state == "slow"
    assert len(caplog.records) == 1
    health.end(ticket)
    for _ in range(50):
        answered(health, clock, 0.1)
        health.observe()
    assert health.state == "answering"
    assert len(caplog.records) == 2


def test_a_silence_is_not_taken_for_slowness(health: Health, clock: Clock) -> None:
    answered(health, clock, 0.03)
    waiting = [health.begin() for _ in range(40)]
    question = health.begin(question=True)
    clock.now += 600.0
    health.abandoned(question)
    assert health.state == "not answering"
    for ticket in waiting:
        health.end(ticket)
    health.observe()
    assert health.state == "answering"
    assert health.latency < 0.03


def test_what_the_way_to_the_share_says_is_no_answer(health: Health, clock: Clock) -> None:
    health.fall_silent()
    health.unanswered(health.begin())
    assert health.state == "not answering"
    answered(health, clock, 0.03)
    assert health.state == "answering"
