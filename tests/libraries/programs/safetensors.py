"""safetensors: files that are replaced, and read in slices through a mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.libraries.programs.frame import main

RNG = np.random.default_rng(4)
TENSORS: dict[str, Any] = {
    "embedding": RNG.standard_normal((1000, 64), dtype=np.float32),
    "bias": RNG.standard_normal(64, dtype=np.float32).astype(np.float16),
    "empty": np.zeros((0, 3), dtype=np.int64),
}


def write(top: Path) -> None:
    for shard in range(3):
        save_file(TENSORS, top / f"model-{shard}-of-3.safetensors", {"shard": str(shard)})
    save_file({"embedding": TENSORS["embedding"] * 0}, top / "model.safetensors")
    save_file(TENSORS, top / "model.safetensors", {"format": "np"})


def check(top: Path) -> None:
    for name in ("model", *(f"model-{shard}-of-3" for shard in range(3))):
        loaded = load_file(top / f"{name}.safetensors")
        assert sorted(loaded) == sorted(TENSORS)
        assert all(np.array_equal(loaded[key], tensor) for key, tensor in TENSORS.items())
    with safe_open(top / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "np"}
        part = file.get_slice("embedding")[100:200, :7]
        assert np.array_equal(part, TENSORS["embedding"][100:200, :7])


if __name__ == "__main__":
    main(write, check)
