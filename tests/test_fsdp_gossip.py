"""Compares groups of FSDP2 that gossip with each other, 2 x 2 ranks, with two ranks that have the whole models."""

from __future__ import annotations

from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

KINDS: dict[str, Any] = {
    "awc": bf.DistributedAdaptWithCombineOptimizer,
    "atc": bf.DistributedAdaptThenCombineOptimizer,
    "gradient tracking": fogdist.algorithms.GradientTracking,
}


def make_net(replica: int) -> nn.Sequential:
    """Returns a model whose rows two ranks share unevenly, 7 and 3, and evenly."""
    torch.manual_seed(replica)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    device = next(model.parameters()).device
    return (model(x.to(device)) - y.to(device)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)


def vector_of(model: nn.Module) -> Tensor:
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([part.detach().reshape(-1) for part in parts]).cpu()


STEPS = 5


def train(kind: str, is_sharded: bool, device: str = "cpu") -> list[Tensor]:
    """Trains a model that two ranks share, or the whole model on one rank with the data of both."""
    fogdist.init()
    rank = dist.get_rank()
    replica = rank // 2 if is_sharded else rank
    model, group = make_net(replica).to(device), None
    if is_sharded:
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("gossip", "shard"))
        group = mesh["gossip"].get_group()
        for part in (model[0], model[2], model[4], model):
            fully_shard(part, mesh=mesh["shard"])
    optimizer = KINDS[kind](sgd(model), model, group=group)
    assert [p.shape for p in optimizer.buckets.tensors] == [p.shape for p in model.parameters()]
    trajectory = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if is_sharded:
            loss_of(model, rank, step).backward()
        else:
            (sum(loss_of(model, 2 * replica + shard, step) for shard in range(2)) / 2).backward()
        optimizer.step()
        trajectory.append(vector_of(model))
    assert (fogdist.consensus_distance(model, group=group) > 0) == (kind == "awc")
    fogdist.allreduce_parameters(model.named_parameters(), group=group)
    assert fogdist.consensus_distance(model, group=group) < 1e-12
    trajectory.append(vector_of(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(replica + 1)
    fogdist.broadcast_parameters(model.named_parameters(), 0, group=group)
    trajectory.append(vector_of(model))
    # Functions of torch that take the model and the optimizer return the same as before.
    state = get_model_state_dict(model)
    assert set(state) == set(make_net(0).state_dict())
    assert get_optimizer_state_dict(model, optimizer)["state"].keys() == state.keys()
    return trajectory


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_fsdp_gossip(worlds, kind):
    whole = worlds(2).run(train, kind, False)
    for rank, trajectory in enumerate(worlds(4).run(train, kind, True)):
        for got, expected in zip(trajectory, whole[rank // 2], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(trajectory[-1], trajectory[-2], rtol=1e-11, atol=1e-12)
