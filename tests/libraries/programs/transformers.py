"""transformers: a Trainer of a tiny model that rotates its checkpoints, and resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from tests.libraries.programs.frame import main, meet

STEPS = 20
EVERY = 4
KEPT = 2


class Meeting(TrainerCallback):
    """Stops after each checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        meet(f"step {state.global_step}")


def _trainer(top: Path, steps: int) -> Any:
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(top / "runs")
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    )
    tokens = torch.randint(0, 64, (200, 16), generator=torch.Generator().manual_seed(2))
    arguments = TrainingArguments(
        output_dir=str(top / "out"),
        max_steps=steps,
        per_device_train_batch_size=4,
        save_steps=EVERY,
        save_total_limit=KEPT,
        logging_steps=2,
        lr_scheduler_type="constant",
        report_to="tensorboard",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model, arguments, train_dataset=rows, callbacks=[Meeting()])


def write(top: Path) -> None:
    trainer = _trainer(top, STEPS)
    trainer.train()
    trainer.save_model(str(top / "final"))


def _check(top: Path, steps: int) -> None:
    checkpoints = sorted(path.name for path in (top / "out").glob("checkpoint-*"))
    assert checkpoints == sorted(f"checkpoint-{steps - EVERY * n}" for n in range(KEPT))
    last = get_last_checkpoint(str(top / "out"))
    assert last is not None and last.endswith(f"-{steps}")
    state = json.loads((Path(last) / "trainer_state.json").read_text())
    assert state["global_step"] == steps
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [
        *range(2, steps + 1, 2)
    ]
    final = AutoModelForCausalLM.from_pretrained(top / "final").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(last).state_dict().items():
        assert torch.equal(tensor, final[name]), name
    torch.load(Path(last) / "optimizer.pt", weights_only=True)


def check(top: Path) -> None:
    _check(top, STEPS)


def resume(top: Path) -> None:
    """Train on from the last checkpoint, to the end that a run without a break comes to."""
    trainer = _trainer(top, STEPS + 2 * EVERY)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model(str(top / "final"))
    _check(top, STEPS + 2 * EVERY)
    without = _trainer(top / "without", STEPS + 2 * EVERY)
    without.train()
    resumed = trainer.model.state_dict()
    for name, tensor in without.model.state_dict().items():
        assert torch.allclose(tensor, resumed[name], atol=1e-5), name


if __name__ == "__main__":
    main(write, check, resume)
