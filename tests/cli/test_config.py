"""The configuration file: the documented defaults, and an error with key and line for the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wbcache.config import Config, Size, load, parse_duration, parse_size
from wbcache.errors import ConfigError
from wbcache.policy import PolicyRule

DOCUMENTED_DEFAULTS = """
cache:  {dir: auto, size: 50%, min_free: 5GiB}
flush:  {idle_delay: 5s, max_age: 30s, workers: 4, small_workers: 32, retry: {first: 1s, max: 60s}}
share:  {lookup_deadline: 2s, deadline: 30s, attr_ttl: 1s, dir_ttl: 5s}
drain:  {timeout: 0}
xattr:  auto
"""


def written(directory: Path, text: str) -> str:
    path = directory / "wbcache.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_defaults_are_the_documented_ones(tmp_path: Path) -> None:
    assert load(written(tmp_path, DOCUMENTED_DEFAULTS)) == load(None) == Config()


@pytest.mark.parametrize("text", ["", "# nothing\n", "cache:\nflush: {}\n", "\ufeffxattr: auto\n"])
def test_empty_files_and_sections_mean_the_defaults(tmp_path: Path, text: str) -> None:
    assert load(written(tmp_path, text)) == Config()


def test_every_key_is_read(tmp_path: Path) -> None:
    config = load(
        written(
            tmp_path,
            """
            cache: {dir: /fast/disk, size: 20GiB, min_free: 10%}
            flush:
              idle_delay: 250ms
              max_age: 10m
              workers: 2
              small_workers: 8
              retry: {first: 2s, max: 1h}
            share: {lookup_deadline: 1.5s, deadline: 1m, attr_ttl: 0, dir_ttl: 1d}
            drain: {timeout: 2h}
            xattr: off
            policies:
              - {match: "**/events.out.tfevents.*", max_age: 10s}
              - {match: "keep/*.tmp", flush: auto}
              - {match: "**/*.tmp", flush: never}
            """,
        )
    )
    assert config.cache.dir == "/fast/disk"
    assert config.cache.size == Size(bytes=20 << 30)
    assert config.cache.min_free == Size(percent=10)
    assert (config.flush.idle_delay, config.flush.max_age) == (0.25, 600)
    assert (config.flush.workers, config.flush.small_workers) == (2, 8)
    assert (config.flush.retry.first, config.flush.retry.max) == (2, 3600)
    assert (config.share.lookup_deadline, config.share.deadline) == (1.5, 60)
    assert (config.share.attr_ttl, config.share.dir_ttl) == (0, 86400)
    assert config.drain.timeout == 7200
    assert config.xattr == "off"
    assert config.policies == (
        PolicyRule("**/events.out.tfevents.*", max_age=10),
        PolicyRule("keep/*.tmp"),
        PolicyRule("**/*.tmp", never=True),
    )


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(written(tmp_path, "cache: {dir: ~/wb}")).cache.dir == "/home/someone/wb"


@pytest.mark.parametrize(
    ("text", "line", "key", "complaint"),
    [
        ("flush:\n  idle_dely: 5s", 2, "flush.idle_dely", "not a known key; known here: idle_"),
        ("flsh: {}", 1, "flsh", "not a known key"),
        ("1: 2", 1, "1", "not a known key"),
        ("? [a]\n: b", 1, "a list", "not a known key"),
        ("cache:\n  <<: {dir: /a}", 2, "cache.<<", "not a known key"),
        ("cache: {}\nflush: {}\ncache: {}", 3, "cache", "given twice"),
        ("flush:\n  workers: 1\n  workers: 2", 3, "flush.workers", "given twice"),
        ("- 1", 1, "the file", "must map keys to values, but is a list"),
        ("cache: 5GiB", 1, "cache", "must map keys to values, but is '5GiB'"),
        ("flush: {idle_delay: 5}", 1, "flush.idle_delay", "'5' has no unit"),
        ("flush: {idle_delay: 5 parsecs}", 1, "flush.idle_delay", "unknown unit 'parsecs'"),
        ("flush: {idle_delay: -5s}", 1, "flush.idle_delay", "not a duration"),
        ("flush: {idle_delay: 5GiB}", 1, "flush.idle_delay", "unknown unit 'GiB'"),
        ("flush: {idle_delay: }", 1, "flush.idle_delay", "must be a single value, not nothing"),
        ("flush: {idle_delay: [5s]}", 1, "flush.idle_delay", "must be a single value, not a list"),
        ("flush: {max_age: {s: 5}}", 1, "flush.max_age", "must be a single value, not a mapping"),
        ("flush: {workers: 0}", 1, "flush.workers", "not a number from 1 to 256"),
        ("flush: {workers: 4.5}", 1, "flush.workers", "not a number from 1 to 256"),
        ("flush: {workers: yes}", 1, "flush.workers", "not a number from 1 to 256"),
        ("flush: {small_workers: 1000}", 1, "flush.small_workers", "not a number from 1 to 256"),
        ("flush: {retry: {first: 2m}}", 1, "flush.retry", "first (120s) exceeds max (60s)"),
        ("flush: {retry: {max: 0}}", 1, "flush.retry.max", "must be more than 0"),
        ("share: {deadline: 0s}", 1, "share.deadline", "must be more than 0"),
        ("cache: {size: 5GB, min_free: 120%}", 1, "cache.min_free", "more than the whole disk"),
        ("cache: {size: 0}", 1, "cache.size", "must be more than 0"),
        ("cache: {size: 5s}", 1, "cache.size", "unknown unit 's'"),
        ("cache: {size: 9999999999TiB}", 1, "cache.size", "too large"),
        ("cache: {dir: here}", 1, "cache.dir", "not an absolute path"),
        ("cache: {dir: ''}", 1, "cache.dir", "is empty"),
        ("xattr: true", 1, "xattr", "'true' is not auto, on or off"),
        ("policies: {match: a}", 1, "policies", "must be a list"),
        ("policies:\n- match: a\n  max_age: 1s\n- max_age: 1s", 4, "policies[1]", "no 'match'"),
        ("policies: [{match: a}]", 1, "policies[0]", "says nothing but 'match'"),
        ("policies: [{match: a, flush: no}]", 1, "policies[0].flush", "'no' is not auto or never"),
        ("policies: [{match: a, flush: never, max_age: 1s}]", 1, "policies[0]", "beside a time"),
        ("policies: [{match: /a, flush: never}]", 1, "policies[0].match", "relative to SOURCE"),
        ("policies: [{match: 'a[b', flush: never}]", 1, "policies[0].match", "a '[' has no ']'"),
        ("policies: [{match: 'a/../b', flush: never}]", 1, "policies[0].match", "'..'"),
        ("policies: [{match: 'a**', flush: never}]", 1, "policies[0].match", "whole directories"),
    ],
)
def test_a_mistake_names_key_and_line(
    tmp_path: Path, text: str, line: int, key: str, complaint: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path} line {line}: {key}: ")
    assert complaint in message
    assert "\n" not in message
    assert caught.value.exit == 7


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "line 1: is not valid YAML"),
        ("a:\n\t- b", "line 2: is not valid YAML"),
        ("a: b\n---\nc: d", "line 2: is not valid YAML"),
        ("a: '\x01'", "is not valid YAML"),
        ("a: *nothing", "line 1: is not valid YAML"),
        ("[" * 20_000, "is nested too deeply"),
    ],
)
def test_what_is_not_yaml_is_said_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_in_the_file_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    path = written(tmp_path, f"!!python/object/apply:os.mkdir ['{target}']: 1")
    with pytest.raises(ConfigError):
        load(path)
    assert not target.exists()


def test_files_that_cannot_be_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        load(str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigError, match="Is a directory"):
        load(str(tmp_path))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(str(fifo))
    binary = tmp_path / "binary"
    binary.write_bytes(b"cache:\n  dir: \xff\n")
    with pytest.raises(ConfigError, match="line 2: is not UTF-8 text"):
        load(str(binary))
    huge = tmp_path / "huge"
    huge.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load(str(huge))


def test_units() -> None:
    seconds = {"250ms": 0.25, "5s": 5, "1.5m": 90, "2 h": 7200, "1d": 86400, "0": 0}
    assert {text: parse_duration(text) for text in seconds} == seconds
    sizes = {"17": 17, "1KiB": 1024, "1kB": 1000, "1.5MiB": 1572864, "2G": 2 << 30, "1TB": 10**12}
    assert {text: parse_size(text).bytes for text in sizes} == sizes
    assert Size(percent=50).resolve(1000) == 500
    assert Size(bytes=7).resolve(1000) == 7


def test_the_reference_lists_every_key_with_its_default(tmp_path: Path) -> None:
    reference = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text("utf-8")
    first, *_ = (block.split("```")[0] for block in reference.split("```yaml\n")[1:])
    assert load(written(tmp_path, first)) == Config()
    # A key that the reference forgot would be one of the defaults that it does not name.
    for section in (Config(), Config().cache, Config().flush, Config().share, Config().drain):
        for key in section.__dataclass_fields__:
            assert f"{key}:" in first, key


def test_the_examples_in_the_reference_are_valid(tmp_path: Path) -> None:
    reference = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text("utf-8")
    blocks = [block.split("```")[0] for block in reference.split("```yaml\n")[1:]]
    assert len(blocks) == 2
    assert len(load(written(tmp_path, blocks[1])).policies) == 4
