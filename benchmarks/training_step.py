"""One training step per call, as benchmarks time it, on random batches that are in memory already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modes import Trainer

CLASSES = 10
BATCHES = 4


def training_step(trainer: Trainer, shape: tuple[int, ...], rank: int) -> Callable[[], None]:
    """Returns a function that takes the next training step of a classifier.

    Args:
        trainer: Trainer of examples/modes.py.
        shape: Shape of a batch's inputs.
        rank: This rank; ranks have different data.
    """
    import torch

    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(shape, generator=generator) for _ in range(BATCHES)]
    labels = [torch.randint(CLASSES, shape[:1], generator=generator) for _ in range(BATCHES)]
    steps = 0

    def step() -> None:
        nonlocal steps
        trainer.prepare(steps)
        trainer.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            trainer.module(inputs[steps % BATCHES]), labels[steps % BATCHES]
        )
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.step()
        steps += 1

    return step
