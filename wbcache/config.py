"""The configuration file: YAML in, frozen values out.

The defaults need no file. Anything that is not understood is an error naming the key and its line,
because a misspelt key that silently means "default" is found out when data is at stake.

In memory durations are seconds (float) and sizes are bytes (int) or a share of the disk.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import yaml

from wbcache.errors import ConfigError
from wbcache.policy import PolicyRule, compile_glob

GIB = 1 << 30
MAX_FILE_SIZE = 1 << 20
MAX_WORKERS = 256
XattrMode = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Size:
    """Bytes, or a percentage of the disk that holds the cache."""

    bytes: int = 0
    percent: float | None = None

    def resolve(self, disk_bytes: int) -> int:
        """Bytes on a disk of that total size."""
        if self.percent is None:
            return self.bytes
        return int(disk_bytes * self.percent / 100)


@dataclass(frozen=True)
class CacheConfig:
    """Where the cache is and how much of the disk it may take."""

    dir: str | None = None
    """An absolute path; None chooses the largest local disk."""
    size: Size = Size(percent=50)
    min_free: Size = Size(bytes=5 * GIB)
    """What stays free on the disk whatever `size` allows."""


@dataclass(frozen=True)
class RetryConfig:
    """The wait before a failed flush is tried again, doubling from `first` to `max` (seconds)."""

    first: float = 1.0
    max: float = 60.0


@dataclass(frozen=True)
class FlushConfig:
    """When files move to the share and how many at a time."""

    idle_delay: float = 5.0
    """Seconds without a write after which a file is flushed."""
    max_age: float = 30.0
    """Seconds after which a file is flushed though it is still being written."""
    workers: int = 4
    """Transfers at a time."""
    small_workers: int = 32
    """Small transfers and name operations at a time, kept apart so that they never queue."""
    retry: RetryConfig = RetryConfig()


@dataclass(frozen=True)
class ShareConfig:
    """How long to wait for the share and how long to believe it (seconds)."""

    lookup_deadline: float = 2.0
    deadline: float = 30.0
    """For data that only the share holds."""
    attr_ttl: float = 1.0
    dir_ttl: float = 5.0


@dataclass(frozen=True)
class DrainConfig:
    """The final flush at unmount."""

    timeout: float = 0.0
    """Seconds after which unmounting gives up and says what remains; 0 waits for ever."""


@dataclass(frozen=True)
class Config:
    """All settings of one mount."""

    cache: CacheConfig = CacheConfig()
    flush: FlushConfig = FlushConfig()
    share: ShareConfig = ShareConfig()
    drain: DrainConfig = DrainConfig()
    xattr: XattrMode = "auto"
    policies: tuple[PolicyRule, ...] = field(default=())


def load(path: str | None) -> Config:
    """The settings in the file at `path`, or the defaults for None.

    Raises ConfigError when the file cannot be read or when anything in it is not understood.
    """
    if path is None:
        return Config()
    text = _read(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _yaml_error(path, error) from None
    except RecursionError:
        raise ConfigError(path, "is nested too deeply") from None
    if root is None:
        return Config()
    return _Reader(path).config(root)


def parse_duration(text: str) -> float:
    """Seconds of "250ms", "5s", "10m", "2h", "1d", or 0. Raises ValueError with a reason."""
    matched = _QUANTITY.fullmatch(text)
    if matched is None:
        raise ValueError(f"{text!r} is not a duration; {_DURATION_HINT}")
    number, unit = float(matched["number"]), matched["unit"]
    if not unit and number == 0:
        return 0.0
    if unit not in _DURATION_UNITS:
        missing = "has no unit" if not unit else f"has the unknown unit {unit!r}"
        raise ValueError(f"{text!r} {missing}; {_DURATION_HINT}")
    return _finite(number * _DURATION_UNITS[unit], text)


def parse_size(text: str) -> Size:
    """Bytes of "5GiB", "200MB", "4096", or a share of the disk ("50%"). Raises ValueError."""
    matched = _QUANTITY.fullmatch(text)
    if matched is None:
        raise ValueError(f"{text!r} is not a size; {_SIZE_HINT}")
    number, unit = float(matched["number"]), matched["unit"]
    if unit == "%":
        if number > 100:
            raise ValueError(f"{text!r} is more than the whole disk")
        return Size(percent=number)
    if unit not in _SIZE_UNITS:
        raise ValueError(f"{text!r} has the unknown unit {unit!r}; {_SIZE_HINT}")
    return Size(bytes=int(_finite(number * _SIZE_UNITS[unit], text)))


_QUANTITY = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[A-Za-z]*|%)", re.ASCII)
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_HINT = "write a number with ms, s, m, h or d, such as 5s"
_SIZE_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KiB": 1 << 10, "kB": 10**3, "KB": 10**3,
    "M": 1 << 20, "MiB": 1 << 20, "MB": 10**6,
    "G": 1 << 30, "GiB": 1 << 30, "GB": 10**9,
    "T": 1 << 40, "TiB": 1 << 40, "TB": 10**12,
}  # fmt: skip
_SIZE_HINT = "write a number of bytes, or one with KiB, MiB, GiB, TiB, MB, GB, TB or %"
_T = TypeVar("_T")


def _finite(value: float, text: str) -> float:
    if not math.isfinite(value) or value >= 2**62:
        raise ValueError(f"{text!r} is too large")
    return value


def _read(path: str) -> str:
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(path, "is not a regular file", "give the path of a YAML file")
            data = file.read(MAX_FILE_SIZE + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            path, f"cannot be read ({why})", "check the path after --config"
        ) from None
    if len(data) > MAX_FILE_SIZE:
        raise ConfigError(path, "is larger than 1 MiB", "check the path after --config")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path} line {line}", "is not UTF-8 text") from None


def _open_without_waiting(path: str, flags: int) -> int:
    """Open such that a fifo given by mistake is seen to be one, not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _yaml_error(path: str, error: yaml.YAMLError) -> ConfigError:
    where = path
    why = str(error).splitlines()[0]
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        if mark is not None:
            where = f"{path} line {mark.line + 1}"
        why = error.problem or error.context or why
    return ConfigError(where, f"is not valid YAML ({why})")


class _Reader:
    """Walks the YAML nodes of one file, so that each complaint has its line."""

    def __init__(self, path: str) -> None:
        self._path = path

    def config(self, root: yaml.Node) -> Config:
        members = self._members(root, "", ("cache", "flush", "share", "drain", "xattr", "policies"))
        return Config(
            cache=self._value(members, "", "cache", self._cache, CacheConfig()),
            flush=self._value(members, "", "flush", self._flush, FlushConfig()),
            share=self._value(members, "", "share", self._share, ShareConfig()),
            drain=self._value(members, "", "drain", self._drain, DrainConfig()),
            xattr=self._value(members, "", "xattr", self._xattr, "auto"),
            policies=self._value(members, "", "policies", self._policies, ()),
        )

    def _cache(self, node: yaml.Node, key: str) -> CacheConfig:
        members = self._members(node, key, ("dir", "size", "min_free"))
        default = CacheConfig()
        return CacheConfig(
            dir=self._value(members, key, "dir", self._directory, default.dir),
            size=self._value(members, key, "size", self._positive_size, default.size),
            min_free=self._value(members, key, "min_free", self._size, default.min_free),
        )

    def _flush(self, node: yaml.Node, key: str) -> FlushConfig:
        names = ("idle_delay", "max_age", "workers", "small_workers", "retry")
        members = self._members(node, key, names)
        default = FlushConfig()
        return FlushConfig(
            idle_delay=self._value(members, key, "idle_delay", self._duration, default.idle_delay),
            max_age=self._value(members, key, "max_age", self._duration, default.max_age),
            workers=self._value(members, key, "workers", self._count, default.workers),
            small_workers=self._value(
                members, key, "small_workers", self._count, default.small_workers
            ),
            retry=self._value(members, key, "retry", self._retry, default.retry),
        )

    def _retry(self, node: yaml.Node, key: str) -> RetryConfig:
        members = self._members(node, key, ("first", "max"))
        default = RetryConfig()
        retry = RetryConfig(
            first=self._value(members, key, "first", self._positive_duration, default.first),
            max=self._value(members, key, "max", self._positive_duration, default.max),
        )
        if retry.first > retry.max:
            raise self._error(node, key, f"first ({retry.first:g}s) exceeds max ({retry.max:g}s)")
        return retry

    def _share(self, node: yaml.Node, key: str) -> ShareConfig:
        members = self._members(node, key, ("lookup_deadline", "deadline", "attr_ttl", "dir_ttl"))
        default = ShareConfig()
        return ShareConfig(
            lookup_deadline=self._value(
                members, key, "lookup_deadline", self._positive_duration, default.lookup_deadline
            ),
            deadline=self._value(
                members, key, "deadline", self._positive_duration, default.deadline
            ),
            attr_ttl=self._value(members, key, "attr_ttl", self._duration, default.attr_ttl),
            dir_ttl=self._value(members, key, "dir_ttl", self._duration, default.dir_ttl),
        )

    def _drain(self, node: yaml.Node, key: str) -> DrainConfig:
        members = self._members(node, key, ("timeout",))
        default = DrainConfig()
        return DrainConfig(
            timeout=self._value(members, key, "timeout", self._duration, default.timeout)
        )

    def _xattr(self, node: yaml.Node, key: str) -> XattrMode:
        # YAML 1.1 reads on and off as booleans; here they are words.
        word = self._scalar(node, key)
        modes: dict[str, XattrMode] = {"auto": "auto", "on": "on", "off": "off"}
        if word not in modes:
            raise self._error(node, key, f"{word!r} is not auto, on or off")
        return modes[word]

    def _policies(self, node: yaml.Node, key: str) -> tuple[PolicyRule, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, key, "must be a list", "start each rule with '- match: …'")
        return tuple(self._policy(item, f"{key}[{index}]") for index, item in enumerate(node.value))

    def _policy(self, node: yaml.Node, key: str) -> PolicyRule:
        members = self._members(node, key, ("match", "idle_delay", "max_age", "flush"))
        if "match" not in members:
            raise self._error(node, key, "has no 'match'", "say which files the rule is for")
        rule = PolicyRule(
            match=self._value(members, key, "match", self._glob, ""),
            idle_delay=self._value(members, key, "idle_delay", self._duration, None),
            max_age=self._value(members, key, "max_age", self._duration, None),
            never=self._value(members, key, "flush", self._never, False),
        )
        if len(members) == 1:
            raise self._error(
                node, key, "says nothing but 'match'", "add max_age, idle_delay or flush"
            )
        if rule.never and len(members) > 2:
            raise self._error(node, key, "has 'flush: never' beside a time", "remove one of them")
        return rule

    def _glob(self, node: yaml.Node, key: str) -> str:
        text = self._text(node, key)
        try:
            compile_glob(text)
        except ValueError as error:
            raise self._error(node, key, f"{text!r}: {error}") from None
        return text

    def _never(self, node: yaml.Node, key: str) -> bool:
        word = self._scalar(node, key)
        if word not in ("auto", "never"):
            raise self._error(node, key, f"{word!r} is not auto or never")
        return word == "never"

    def _directory(self, node: yaml.Node, key: str) -> str | None:
        text = self._text(node, key)
        if text == "auto":
            return None
        expanded = os.path.expanduser(text)
        if not os.path.isabs(expanded):
            raise self._error(node, key, f"{text!r} is not an absolute path")
        if "\0" in expanded:
            raise self._error(node, key, "a path cannot hold a NUL character")
        return expanded

    def _size(self, node: yaml.Node, key: str) -> Size:
        text = self._scalar(node, key)
        try:
            return parse_size(text)
        except ValueError as error:
            raise self._error(node, key, str(error)) from None

    def _positive_size(self, node: yaml.Node, key: str) -> Size:
        size = self._size(node, key)
        if size.resolve(1 << 60) <= 0:
            raise self._error(node, key, "must be more than 0")
        return size

    def _duration(self, node: yaml.Node, key: str) -> float:
        text = self._scalar(node, key)
        try:
            return parse_duration(text)
        except ValueError as error:
            raise self._error(node, key, str(error)) from None

    def _positive_duration(self, node: yaml.Node, key: str) -> float:
        seconds = self._duration(node, key)
        if seconds <= 0:
            raise self._error(node, key, "must be more than 0")
        return seconds

    def _count(self, node: yaml.Node, key: str) -> int:
        text = self._scalar(node, key)
        if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= MAX_WORKERS:
            raise self._error(node, key, f"{text!r} is not a number from 1 to {MAX_WORKERS}")
        return int(text)

    def _scalar(self, node: yaml.Node, key: str) -> str:
        if isinstance(node, yaml.ScalarNode) and not _is_null(node):
            return str(node.value)
        raise self._error(node, key, f"must be a single value, not {_kind(node)}")

    def _text(self, node: yaml.Node, key: str) -> str:
        text = self._scalar(node, key)
        if not text:
            raise self._error(node, key, "is empty")
        return text

    def _value(
        self,
        members: Mapping[str, yaml.Node],
        parent: str,
        name: str,
        read: Callable[[yaml.Node, str], _T],
        default: _T,
    ) -> _T:
        node = members.get(name)
        return default if node is None else read(node, f"{parent}.{name}" if parent else name)

    def _members(
        self, node: yaml.Node, parent: str, known: tuple[str, ...]
    ) -> dict[str, yaml.Node]:
        """The members of a mapping by key, each key known and given once."""
        if parent and _is_null(node):
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, parent, f"must map keys to values, but is {_kind(node)}")
        members: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            name = key_node.value if isinstance(key_node, yaml.ScalarNode) else _kind(key_node)
            full = f"{parent}.{name}" if parent else name
            if name not in known:
                hint = f"known here: {', '.join(known)}"
                raise self._error(key_node, full, "is not a known key", hint)
            if name in members:
                raise self._error(key_node, full, "is given twice")
            members[name] = value_node
        return members

    def _error(self, node: yaml.Node, key: str, why: str, hint: str = "") -> ConfigError:
        line = node.start_mark.line + 1
        return ConfigError(f"{self._path} line {line}: {key or 'the file'}", why, hint)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "nothing" if _is_null(node) else f"{node.value!r}"
