"""The problem that the recipes solve: a small network learns a linear function of 64 rows.

Every recipe trains the same network on the same rows, in the same number of steps. So the results depend on how
ranks average, and not on the framework.
"""

from __future__ import annotations

import argparse
import sys

import fogdist
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS = 64
FEATURES = 8
BATCH = 16
EPOCHS = 10
RATE = 0.05
MOMENTUM = 0.9


def read_how(description: str, *hows: str) -> str:
    """Returns the flag --how; by default the first of `hows`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--how", choices=hows, default=hows[0])
    how: str = parser.parse_args().how
    return how


def make_net() -> nn.Sequential:
    """Returns the network, the same on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def make_rows() -> TensorDataset:
    """Returns all rows; a rank trains on its part of them."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    targets = inputs @ torch.randn(FEATURES, 1, generator=generator) / FEATURES**0.5
    return TensorDataset(inputs, targets)


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    """Returns a loader of all rows, which the framework splits between the ranks."""
    return DataLoader(make_rows(), batch_size=BATCH)


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of one rank."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean squared error of a batch."""
    return (model(inputs) - targets).square().mean()


@torch.no_grad()
def report(model: nn.Module, loss: float | None = None, *, group: dist.ProcessGroup | None = None) -> None:
    """Prints how well this rank's model does on all rows, and how far the ranks' models are apart. Collective.

    Args:
        model: This rank's model.
        loss: For a model of another problem.
        group: The ranks that average with each other; by default all.
    """
    if not fogdist.is_initialized():
        fogdist.init()  # adopts the group that the framework has made
    loss = loss_of(model, *make_rows().tensors).item() if loss is None else loss
    distance = fogdist.consensus_distance(model, group=group)
    rank, backend = dist.get_rank(), dist.get_backend()
    sys.stdout.write(f"rank {rank} on {backend}: loss {loss:.6f}, distance from the mean {distance:.6f}\n")
    sys.stdout.flush()
