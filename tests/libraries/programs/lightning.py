"""Lightning: the best checkpoints and a link to the last, CSV and TensorBoard logs, resuming."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.libraries.programs.frame import main, meet

EPOCHS = 5
STEPS = 8
KEPT = 2


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("score", float(EPOCHS - self.current_epoch))  # better and better

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Meeting(Callback):
    """Stops at the end of each epoch."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        meet(f"epoch {trainer.current_epoch}")


def _fit(top: Path, epochs: int, checkpoint: str | None = None) -> Any:
    lightning.seed_everything(1, verbose=False)
    model = Model()
    data = torch.utils.data.DataLoader(torch.randn(STEPS, 32), batch_size=1)
    saving = ModelCheckpoint(
        top / "checkpoints",
        "{epoch}-{score:.0f}",
        monitor="score",
        save_top_k=KEPT,
        save_last="link",
        save_on_train_epoch_end=True,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=top,
        callbacks=[saving, Meeting()],
        logger=[CSVLogger(top, "csv", version=0), TensorBoardLogger(top, "tb", version=0)],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data, ckpt_path=checkpoint)
    return model


def write(top: Path) -> None:
    model = _fit(top, EPOCHS)
    torch.save(model.state_dict(), top / "final.pt")


def check(top: Path) -> None:
    saved = top / "checkpoints"
    names = [f"epoch={epoch}-score={EPOCHS - epoch}.ckpt" for epoch in range(EPOCHS - KEPT, EPOCHS)]
    assert sorted(path.name for path in saved.iterdir()) == [*names, "last.ckpt"]
    assert (saved / "last.ckpt").is_symlink()
    last = torch.load(saved / "last.ckpt", weights_only=False)
    assert last["epoch"] == EPOCHS - 1 and last["global_step"] == EPOCHS * STEPS
    final = torch.load(top / "final.pt", weights_only=True)
    assert all(torch.equal(last["state_dict"][name], final[name]) for name in final)
    for name in names:
        Model.load_from_checkpoint(saved / name)
    with open(top / "csv" / "version_0" / "metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    assert steps == list(range(EPOCHS * STEPS))
    events = EventAccumulator(str(top / "tb" / "version_0"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("loss")] == list(range(EPOCHS * STEPS))


def resume(top: Path) -> None:
    """Train on from the link."""
    model = _fit(top, EPOCHS + 2, os.fspath(top / "checkpoints" / "last.ckpt"))
    assert model.trainer.global_step == (EPOCHS + 2) * STEPS


if __name__ == "__main__":
    main(write, check, resume)
