"""orbax: a manager that keeps some checkpoints and writes them in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tests.libraries.programs.frame import main

STEPS = 5
KEPT = 2


def _state(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {
        "params": {"w": jnp.asarray(rng.standard_normal((200, 50), dtype=np.float32))},
        "step": jnp.asarray(step),
    }


def _manager(top: Path, **options: Any) -> Any:
    options = ocp.CheckpointManagerOptions(**options)
    return ocp.CheckpointManager(top / "checkpoints", options=options)


def write(top: Path) -> None:
    with _manager(top, max_to_keep=KEPT, enable_async_checkpointing=True) as manager:
        for step in range(STEPS):
            manager.save(step, args=ocp.args.StandardSave(_state(step)))
        manager.wait_until_finished()


def check(top: Path) -> None:
    with _manager(top, read_only=True) as manager:
        assert sorted(manager.all_steps()) == list(range(STEPS - KEPT, STEPS))
        for step in manager.all_steps():
            expected = _state(step)
            loaded = manager.restore(step, args=ocp.args.StandardRestore(expected))
            assert jnp.array_equal(loaded["params"]["w"], expected["params"]["w"])
            assert int(loaded["step"]) == step
    names = [path.name for path in (top / "checkpoints").iterdir() if path.is_dir()]
    assert not [name for name in names if "tmp" in name]


if __name__ == "__main__":
    main(write, check)
