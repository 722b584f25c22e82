"""Compares fogdist.gossip_hook in torch's DistributedDataParallel with one process that simulates all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import fogdist
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from harness import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_cases import Simulation, loss_of, make_net, start, trained

STEPS = 6


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=0.02, weight_decay=0.1)


def topology_of(name: str, size: int) -> Any:
    return {
        "group": None,
        "star": topologies.star(size),
        "one-peer": topologies.one_peer_exponential(size),
    }[name]


def matrix_of(name: str, size: int, t: int) -> np.ndarray:
    if name == "one-peer":
        return topologies.one_peer_exponential(size).matrix(t).copy()
    graph = topologies.exponential(size) if name == "group" else topologies.star(size)
    return topologies.mixing_matrix(topologies.uniform_weights(graph) if name == "group" else graph)


# The topology, the passes before each step, and bucket_cap_mb.
CASES = [("group", 1, 25), ("star", 1, 0.0001), ("one-peer", 1, 0.0001), ("one-peer", 3, 0.0001)]


@on_ranks([1, 4], case=CASES)
def test_trajectories(case: tuple[str, int, float]) -> None:
    topology, passes, bucket_cap_mb = case
    rank, size = start()
    model = DistributedDataParallel(
        make_net(7), broadcast_buffers=False, find_unused_parameters=True, bucket_cap_mb=bucket_cap_mb
    )
    state = fogdist.GossipState(topology_of(topology, size))
    model.register_comm_hook(state, fogdist.gossip_hook)
    optimizer = adamw(model)
    simulation = Simulation("awc", [make_net(7) for _ in range(size)], adamw)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            with model.no_sync() if part < passes - 1 else nullcontext():
                loss_of(model, rank, passes * step + part).backward()
        optimizer.step()

        def backward(each: nn.Module, r: int, step: int = step) -> None:
            for part in range(passes):
                loss_of(each, r, passes * step + part).backward()

        simulation.matrix = matrix_of(topology, size, step)
        simulation.step(backward)
        simulation.check(rank, model)
    assert state.round == STEPS  # one round per step, not per bucket


def fail() -> None:
    fogdist.init()
    size = fogdist.size()
    with pytest.raises(ValueError, match="as many nodes as ranks"):
        fogdist.GossipState(topologies.ring(size + 1))
    rank = fogdist.rank()
    with pytest.raises(ValueError, match="state must be the same on all ranks"):
        fogdist.GossipState(topologies.ring(size) if rank else topologies.one_peer_exponential(size))
    # The parameters that a graph has saved have changed since, and autograd raises an error.
    model = DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)
    model.register_comm_hook(fogdist.GossipState(), fogdist.gossip_hook)
    loss = model(torch.ones(1, 2, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # If one rank does not come to its backward pass, that of the other raises an error and does not hang.
    model = DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)
    model.register_comm_hook(fogdist.GossipState(), fogdist.gossip_hook)
    if rank == 0:
        with pytest.raises(RuntimeError, match="timed out"):
            model(torch.ones(1, 2)).sum().backward()


def share_a_state(together: bool) -> None:
    """Two models with one state raise an error at the second one's first bucket, on all ranks."""
    rank, _ = start()
    state = fogdist.GossipState()
    models = []
    for _ in range(2):
        # There are several buckets from the second backward pass on.
        model = DistributedDataParallel(
            make_net(7), broadcast_buffers=False, bucket_cap_mb=0.0001, find_unused_parameters=True
        )
        model.register_comm_hook(state, fogdist.gossip_hook)
        models.append(model)
    if not together:
        for number in range(3):
            loss_of(models[0], rank, number).backward()
        assert state.round == 3
    with pytest.raises(RuntimeError, match="state must be of one DistributedDataParallel only"):
        (loss_of(models[0], rank, 4) + loss_of(models[1], rank, 4)).backward()
    dist.barrier()


@pytest.mark.parametrize("together", [False, True])
def test_a_state_serves_one_model(new_world, together):
    new_world(2, timeout=20.0).run(share_a_state, together)


def test_errors(new_world):
    outcomes = new_world(2, timeout=3.0).run_raw(fail)
    assert [o.state for o in outcomes] == ["returned"] * 2, "\n".join(map(str, outcomes))


@on_ranks(2)
def test_who_came_last_has_the_parameters() -> None:
    """A hook takes over from an optimizer of the same parameters, and an optimizer from a hook: both would mix them."""
    start()
    net = nn.Linear(2, 2)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    first = fogdist.algorithms.LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), net)
    model.register_comm_hook(fogdist.GossipState(), fogdist.gossip_hook)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="LocalSGD .* was replaced"):
        first.step()
    with fogdist.algorithms.LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), net):
        with pytest.raises(RuntimeError, match="state was replaced"):
            model(torch.ones(1, 2)).sum().backward()
        dist.barrier()
