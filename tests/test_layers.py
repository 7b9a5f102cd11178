"""Imports point downward: the layers of the package, from the bottom up."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "wbcache"

LAYERS: list[set[str]] = [
    {"extents", "occupants", "order", "escaping", "probe", "processes", "share.descriptor"},
    {"errors", "node"},
    {"skipped"},
    {"mounts", "policy", "metrics", "tree", "listing"},
    {"config", "options", "disks", "recovered"},
    {"share"},
    {"journal", "store", "space", "daemon.lock", "sharedcall"},
    {"remembered", "retired", "conflicts", "frozen"},
    {"loading", "volume", "laying"},
    {"flush"},
    {"filesystem"},
    {"fuse", "recover"},
    {"control.protocol", "control.registry"},
    {"control.client", "control.server"},
    {"daemon"},
    {"cli"},
]
"""A module imports only from layers below its own, or from its own part of the package."""

CLI_MAY_NOT_USE = {
    "daemon", "fuse", "filesystem", "flush", "volume", "tree", "journal", "store", "share",
}  # fmt: skip
"""The commands reach a daemon through its socket, never through its code."""


def _layer_name(module: str) -> str:
    """The part of a module's name that LAYERS lists ("share.calls" is "share")."""
    parts = module.split(".")
    for length in (2, 1):
        name = ".".join(parts[:length])
        if any(name in layer for layer in LAYERS):
            return name
    return parts[0]


def _height(name: str) -> int | None:
    return next((height for height, layer in enumerate(LAYERS) if name in layer), None)


def _modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] in ("__init__", "__main__"):
            parts.pop()
        if parts and parts != ["control"]:
            found.append((".".join(parts), path))
    return found


def _imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, without the package's own name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # "from wbcache.control import registry" imports a module, not a name.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("wbcache.") for name in names if name.startswith("wbcache.")}


@pytest.mark.parametrize(("module", "path"), _modules())
def test_imports_point_downward(module: str, path: Path) -> None:
    own = _layer_name(module)
    height = _height(own)
    assert height is not None, f"{module} is in no layer: add it to LAYERS"
    for imported in _imports(path):
        name = _layer_name(imported)
        other = _height(name)
        if name == own or other is None:
            continue
        assert other < height, f"{module} ({own}) imports {imported} ({name})"


def test_commands_use_no_code_of_the_daemon() -> None:
    for module, path in _modules():
        if module.split(".")[0] == "cli":
            used = {_layer_name(name) for name in _imports(path)} & CLI_MAY_NOT_USE
            assert not used, f"{module} imports {used}"


def test_modules_stay_readable() -> None:
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for _, path in _modules()
    }
    too_long = {name: lines for name, lines in sizes.items() if lines > 600}
    assert not too_long, "a module this long holds two things"
