"""PyTorch's SummaryWriter, read back by TensorBoard."""

from __future__ import annotations

from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.libraries.programs.frame import main


def write(top: Path) -> None:
    with SummaryWriter(top / "runs", flush_secs=1) as writer:
        for step in range(300):
            writer.add_scalar("loss", 1 / (step + 1), step)
            if step % 50 == 0:
                writer.add_histogram("weights", torch.arange(100.0), step)
                writer.add_image("sample", torch.full((3, 8, 8), 0.5), step)
                writer.flush()
        writer.add_hparams({"lr": 0.1}, {"final": 1.0})


def check(top: Path) -> None:
    events = EventAccumulator(str(top / "runs"), {"scalars": 0, "histograms": 0, "images": 0})
    events.Reload()
    scalars = events.Scalars("loss")
    assert [scalar.step for scalar in scalars] == list(range(300))
    assert all(abs(scalar.value * (scalar.step + 1) - 1) < 1e-5 for scalar in scalars)
    assert len(events.Histograms("weights")) == len(events.Images("sample")) == 6


if __name__ == "__main__":
    main(write, check)
