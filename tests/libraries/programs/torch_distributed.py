"""torch.distributed: processes that find each other through a file and save a checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from tests.libraries.programs.frame import main
from tests.libraries.programs.torch import same

RANKS = 2


def _sharded(rank: int, step: int) -> dict[str, Any]:
    """What each rank adds of its own, and what all of them hold."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        f"rank{rank}": torch.randn(300, 100, generator=generator),
        "shared": torch.full((50, 50), float(step)),
    }


def _rank(rank: int, top: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    meeting = f"file://{top}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    for step in range(3):
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        assert total.item() == sum(range(1, RANKS + 1))
        dcp.save(_sharded(rank, step), checkpoint_id=f"{top}/step-{step}")
        dist.barrier()
        if rank == 0 and step > 0:
            shutil.rmtree(f"{top}/step-{step - 1}")
    future = dcp.async_save(_sharded(rank, 9), checkpoint_id=f"{top}/step-9")
    future.result()
    dist.destroy_process_group()


def write(top: Path) -> None:
    mp.spawn(_rank, (str(top),), nprocs=RANKS)
    # The last to leave removes the file by which they met, though not every time, on any disk.
    store = dist.FileStore(str(top / "store"), 1)
    for n in range(50):
        store.set(f"key{n}", str(n))
    assert store.add("counter", 5) == 5 and store.add("counter", 1) == 6
    assert store.get("key49") == b"49"


def check(top: Path) -> None:
    for step in (2, 9):
        expected = {
            name: value for rank in range(RANKS) for name, value in _sharded(rank, step).items()
        }
        loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load(loaded, checkpoint_id=top / f"step-{step}")
        assert same(loaded, expected)
    assert sorted(p.name for p in top.glob("step-*")) == ["step-2", "step-9"]


if __name__ == "__main__":
    main(write, check)
