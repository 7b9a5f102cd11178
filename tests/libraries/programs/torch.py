"""PyTorch: checkpoints that are replaced and rotated, mapped into memory, and resumed from."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from tests.libraries.programs.frame import main, meet

EPOCHS = 5
KEPT = 2


class Training:
    """The same numbers at every run, on one processor."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.epoch = 0
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, upto: int = EPOCHS) -> Any:
        """Yields the loss of each epoch."""
        while self.epoch < upto:
            inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(self.epoch))
            for _ in range(5):
                loss = self.model(inputs).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.epoch += 1
            yield loss.item()

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def same(one: Any, other: Any) -> bool:
    """Whether two states hold the same, to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)


def _states() -> list[dict[str, Any]]:
    training, states = Training(), []
    for _ in training.train():
        states.append(_copied(training.state()))
    return states


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def write(top: Path) -> None:
    training = Training()
    for _ in training.train():
        torch.save(training.state(), top / f"epoch{training.epoch}.pt")
        torch.save(training.state(), top / "last.pt")
        torch.save(training.state(), top / "legacy.pt", _use_new_zipfile_serialization=False)
        torch.save(training.state(), top / "best.tmp")
        os.replace(top / "best.tmp", top / "best.pt")
        (top / f"epoch{training.epoch - KEPT}.pt").unlink(missing_ok=True)
        meet(f"epoch {training.epoch}")
    shared = torch.from_file(str(top / "shared.bin"), shared=True, size=1000)
    shared[:] = torch.arange(1000)


def check(top: Path) -> None:
    states = _states()
    expected = {f"epoch{EPOCHS - n}.pt": states[-1 - n] for n in range(KEPT)}
    expected |= dict.fromkeys(("last.pt", "best.pt"), states[-1])
    assert sorted(p.name for p in top.glob("*.pt")) == sorted([*expected, "legacy.pt"])
    for name, state in expected.items():
        assert same(torch.load(top / name, weights_only=True), state), name
        assert same(torch.load(top / name, weights_only=True, mmap=True), state), name
    assert same(torch.load(top / "legacy.pt", weights_only=True), states[-1])
    shared = torch.from_file(str(top / "shared.bin"), shared=False, size=1000)
    assert torch.equal(shared, torch.arange(1000, dtype=shared.dtype))


def watch(top: Path) -> None:
    """Beside `write`, at the place where its files arrive: whatever is there is whole."""
    states = _states()
    for look in range(EPOCHS):
        for path in top.glob("*.pt"):
            with contextlib.suppress(FileNotFoundError):  # rotated away
                state = torch.load(path, weights_only=True)
                assert same(state, states[state["epoch"] - 1]), path.name
        meet(f"look {look}")


def resume(top: Path) -> None:
    """Go on from the last checkpoint as if nothing had been between."""
    without = Training()
    list(without.train(EPOCHS + 2))
    training = Training()
    training.load(torch.load(top / "last.pt", weights_only=True))
    assert training.epoch == EPOCHS
    list(training.train(EPOCHS + 2))
    assert same(training.state(), without.state())
    torch.save(training.state(), top / "last.pt")


if __name__ == "__main__":
    main(write, check, watch, resume)
