"""Rules, rates and capabilities, without a mount."""

from __future__ import annotations

import errno

import pytest

from tests.faultshare.faults import (
    MUTATIONS,
    OPS,
    Faults,
    Pacer,
    Request,
    Verdict,
    expand,
    path_matches,
)


def request(op: str, *paths: bytes, new_name: bytes | None = None, flags: int = 0) -> Request:
    return Request(
        op, paths or (b"f",), new_name=new_name, mutates=op in MUTATIONS, rename_flags=flags
    )


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*.ckpt", b"runs/1/a.ckpt", True),
        ("a.ckpt", b"runs/1/a.ckpt", True),
        ("runs/*", b"runs/1/a.ckpt", True),
        ("runs/*.tmp", b"runs/1/a.ckpt", False),
        ("1/a.ckpt", b"runs/1/a.ckpt", False),
        ("caf\udce9", b"caf\xe9", True),
    ],
)
def test_globs(pattern: str, path: bytes, matches: bool) -> None:
    assert path_matches(pattern, path) is matches


def test_groups_and_unknown_names() -> None:
    assert expand(None) is None
    assert sorted(expand(["setattr", "read"]) or ()) == [
        "chmod",
        "chown",
        "read",
        "truncate",
        "utimens",
    ]
    assert MUTATIONS < OPS
    with pytest.raises(ValueError, match="'wirte'"):
        expand(["wirte"])


def test_a_pacer_serves_in_order_at_its_rate() -> None:
    pacer = Pacer(100)
    assert [pacer.reserve(10.0, 50), pacer.reserve(10.0, 50), pacer.reserve(10.1, 100)] == [
        pytest.approx(10.5),
        pytest.approx(11.0),
        pytest.approx(12.0),
    ]
    assert pacer.reserve(20.0, 100) == pytest.approx(21.0), "idle time is not saved up"


def test_a_pacer_lets_a_burst_through() -> None:
    pacer = Pacer(10, burst=0.5)
    due = [pacer.reserve(100.0, 1) for _ in range(8)]
    assert due[:5] == [100.0] * 5
    assert due[5:] == [pytest.approx(100.1), pytest.approx(100.2), pytest.approx(100.3)]


def test_no_rate_is_no_limit() -> None:
    assert Pacer(0).reserve(5.0, 1e9) == 5.0


def test_fail_for_the_next_calls_only() -> None:
    faults = Faults()
    faults.add("fail", ["write"], error=errno.EIO, times=2)
    codes = [faults.verdict(request("write")).error for _ in range(4)]
    assert codes == [errno.EIO, errno.EIO, 0, 0]
    assert faults.verdict(request("read")).error == 0


def test_failing_with_a_probability_repeats_with_the_seed() -> None:
    def codes(seed: int) -> list[int]:
        faults = Faults()
        faults.add("fail", ["write"], error=errno.EIO, probability=0.3, seed=seed)
        return [faults.verdict(request("write")).error for _ in range(300)]

    assert codes(1) == codes(1) != codes(2)
    assert 50 < sum(map(bool, codes(1))) < 130


def test_a_lost_answer_still_takes_effect() -> None:
    faults = Faults()
    faults.add("fail", ["rename"], error=errno.ETIMEDOUT, after=True)
    assert faults.verdict(request("rename")) == Verdict(errno.ETIMEDOUT, effect=True)


def test_a_lost_write_has_no_effect_and_no_error() -> None:
    faults = Faults()
    faults.add("lose", ["write"], match="*.bin", times=1)
    assert faults.verdict(request("write", b"a.bin")) == Verdict(effect=False)
    assert faults.verdict(request("write", b"a.bin")) == Verdict()
    with pytest.raises(ValueError, match="only writes"):
        faults.add("lose", ["rename"])


def test_either_path_of_a_rename_matches() -> None:
    faults = Faults()
    faults.add("fail", ["rename"], match="target", error=errno.EACCES)
    assert faults.verdict(request("rename", b"d/tmp", b"d/target")).error == errno.EACCES
    assert faults.verdict(request("rename", b"d/tmp", b"d/other")).error == 0


def test_a_rule_for_everything_spares_what_nobody_waits_for() -> None:
    faults = Faults()
    faults.add("hang", None)
    assert faults.hang(request("getattr"), set()) is not None
    assert faults.hang(request("release"), set()) is None
    faults.add("hang", ["release"])
    assert faults.hang(request("release"), set()) is not None


def test_a_released_call_is_not_kept_by_the_same_rule_again() -> None:
    faults = Faults()
    rule = faults.add("hang", ["read"])
    assert faults.hang(request("read"), {rule.id}) is None


def test_hang_after_is_part_of_the_verdict() -> None:
    faults = Faults()
    rule = faults.add("hang", ["rename"], after=True)
    assert faults.hang(request("rename"), set()) is None
    assert faults.verdict(request("rename")) == Verdict(hang=rule)


@pytest.mark.parametrize(
    ("capability", "refused", "allowed", "code"),
    [
        ("symlink", request("symlink"), request("link"), errno.EPERM),
        ("xattr", request("setxattr"), request("chmod"), errno.EOPNOTSUPP),
        ("rename_flags", request("rename", flags=1), request("rename"), errno.EINVAL),
    ],
)
def test_capabilities(capability: str, refused: Request, allowed: Request, code: int) -> None:
    faults = Faults()
    faults.lack(capability)
    assert faults.verdict(refused) == Verdict(code, effect=False)
    assert faults.verdict(allowed) == Verdict()


def test_an_unknown_capability_is_refused() -> None:
    with pytest.raises(ValueError, match="hardlinks"):
        Faults().lack("hardlinks")


def test_conditions_of_the_share_come_before_rules() -> None:
    faults = Faults()
    faults.add("fail", None, error=errno.EIO, times=1)
    faults.name_max = 4
    assert faults.verdict(request("create", new_name=b"12345")).error == errno.ENAMETOOLONG
    faults.read_only = True
    assert faults.verdict(request("mkdir", new_name=b"1")).error == errno.EROFS
    faults.disconnected = errno.ENOTCONN
    assert faults.verdict(request("getattr")).error == errno.ENOTCONN
    faults.disconnected = 0
    assert faults.verdict(request("getattr")).error == errno.EIO, "the rule was not used up"


def test_latency_by_operation() -> None:
    faults = Faults()
    faults.latency, faults.latency_by_op = 0.03, {"fsync": 0.2}
    assert [faults.delay(op) for op in ("read", "fsync", "release")] == [0.03, 0.2, 0.0]
    faults.jitter = 0.01
    delays = {faults.delay("read") for _ in range(20)}
    assert len(delays) > 10
    assert all(0.03 <= delay <= 0.04 for delay in delays)
