"""Tests a rank alone: training exchanges nothing, unless a test asks for the exchanges of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import fogdist
import fogdist.bluefog.torch as bf
import pytest
import torch
import torch.distributed as dist
from fogdist.context import Context
from harness import WorldPool
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

STEPS = 3


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrapped(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = fogdist.DecentralizedDataParallel(model, sgd(model))
    if fogdist.size() == 1:
        module.set_topology(fogdist.topology.fully_connected(1))
    return module, module.optimizer


MODES: dict[str, Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "awc": lambda model: (model, bf.DistributedAdaptWithCombineOptimizer(sgd(model), model)),
    "atc": lambda model: (model, bf.DistributedAdaptThenCombineOptimizer(sgd(model), model)),
    "gradient": lambda model: (model, bf.DistributedGradientAllreduceOptimizer(sgd(model), model)),
    "win_put": lambda model: (model, bf.DistributedWinPutOptimizer(sgd(model), model)),
    "wrapper": wrapped,
    "algorithm": lambda model: (model, fogdist.algorithms.DecentralizedSGD(sgd(model), model)),
}


def train(mode: str | None) -> tuple[list[Tensor], set[str]]:
    """Returns the parameters and fog's operations in the last step; without a mode, of the bare optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(STEPS, 16, 4)
    module, optimizer = MODES[mode](model) if mode else (model, sgd(model))
    for x in inputs:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    names = {event.name for event in seen.events() if event.name.startswith("fog:")}
    if hasattr(optimizer, "unregister_window"):
        optimizer.unregister_window()
    return [parameter.detach().clone() for parameter in model.parameters()], names


def train_alone(mode: str, exchanges: bool) -> set[str]:
    fogdist.init()
    assert dist.get_world_size() == 1
    with mock.patch.object(Context, "exchanges_alone", exchanges):
        found, names = train(mode)
    expected, _ = train(None)
    for one, other in zip(found, expected, strict=True):
        assert one.equal(other)
    return names


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_alone_exchanges_if_asked(worlds: WorldPool, mode: str) -> None:
    assert worlds(1).run(train_alone, mode, False) == [set()]
    (names,) = worlds(1).run(train_alone, mode, True)
    kinds = {"gradient": "fog:all_reduce", "win_put": "fog:Window.put"}
    assert kinds.get(mode, "fog:neighbor_allreduce") in names
