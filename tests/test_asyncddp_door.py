"""Tests of asyncddp through fogdist: the wrapper that steps in backward, its batches, optimizers and schedules.

Recursions are in float64, and are compared with one process that simulates all ranks with the mixing matrix.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import fogdist.bluefog  # noqa: F401  finds its modules by their own names
import networkx as nx
import pytest
import torch
from fogdist import topology as topologies
from harness import WorldPool, on_ranks
from reference import mix
from torch import Tensor, nn

bf: Any = importlib.import_module("bluefog.torch")
ddp: Any = importlib.import_module("bluefog.torch.ddp")
optim: Any = importlib.import_module("bluefog.torch.optim")

RANKS = 3
LR, MOMENTUM = 0.1, 0.5


# --- the wrapper --------------------------------------------------------------------------------------------


def weighted_ring(size: int) -> nx.DiGraph:
    matrix = [
        [0.6 if i == j else 0.4 if j == (i + 1) % size else 0.0 for j in range(size)] for i in range(size)
    ]
    return topologies.Topology("given", [matrix]).graph()


class Net(nn.Module):
    """A module with two parameters, one of which a pass may leave out, and a buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value, dtype=torch.float64))
        self.other = nn.Parameter(torch.full((3,), value, dtype=torch.float64))
        self.register_buffer("seen", torch.full((2,), value, dtype=torch.float64))

    def forward(self, target: float, is_whole: bool = True) -> Tensor:
        """Returns a loss with gradient `self.weight - target`, and the same for the other parameter."""
        tensors = [self.weight, self.other] if is_whole else [self.weight]
        return sum((0.5 * (tensor - target).square().sum() for tensor in tensors), torch.zeros(()))


def sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    assert [name for name, _ in named] == ["weight", "other"]
    return torch.optim.SGD([tensor for _, tensor in named], lr=LR, momentum=MOMENTUM)


def recursion(topology: nx.DiGraph, steps: int, clip: float = math.inf, parts: int = 1) -> list[list[float]]:
    """Returns one element of `weight` per rank after each step: x+ = Mix(x) - lr m, with m = momentum m + gradient.

    Args:
        topology: The topology, with its weights.
        steps: Number of steps.
        clip: Limit for the norm of the whole gradient, which has five equal elements.
        parts: Number of equal gradients that are added up for a step.
    """
    x, momentum = [0.0] * RANKS, [0.0] * RANKS
    matrix, path = topologies.mixing_matrix(topology), []
    for _ in range(steps):
        gradients = [parts * (x[rank] - rank - 1) for rank in range(RANKS)]
        scales = [min(1.0, clip / (math.sqrt(5) * abs(g) + 1e-6)) for g in gradients]
        momentum = [MOMENTUM * m + s * g for m, s, g in zip(momentum, scales, gradients)]
        mixed = mix([torch.tensor([value], dtype=torch.float64) for value in x], matrix)
        x = [float(value) - LR * m for value, m in zip(mixed, momentum)]
        path.append(x)
    return path


def train(options: dict[str, Any], parts: int = 1, named_topology: bool = False) -> list[float]:
    bf.init()
    rank, size = bf.rank(), bf.size()
    graph = weighted_ring(size)
    topology = {"topology": graph, "name": "ring"} if named_topology else graph
    if "scaler" in options:
        options = options | {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}
    # All ranks start with rank 0's parameters.
    model = ddp.DecentralizedDataParallel(Net(float(rank)), sgd, topology=topology, **options)
    scaler, path = options.get("scaler"), []
    for _ in range(6):
        for part in range(parts):
            model.set_accumulate_grad(part < parts - 1)
            loss = model(rank + 1.0)
            (loss if scaler is None else scaler.scale(loss)).backward()
        path.append(model.module.weight[0].item())
        assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    assert torch.equal(model.module.weight, model.module.other[:2])
    return path


@pytest.mark.parametrize(
    "options, parts, clip",
    [
        ({}, 1, math.inf),
        ({"sync": True, "bucket_size_in_mb": 1e-5}, 1, math.inf),
        ({"grad_clip_norm": 1.5}, 1, 1.5),
        ({"scaler": True}, 1, math.inf),
        ({"scaler": True, "grad_clip_norm": 1.5}, 1, 1.5),
        ({}, 3, math.inf),
    ],
    ids=["plain", "buckets", "clipped", "scaled", "scaled-clipped", "accumulated"],
)
def test_backward_makes_the_step(worlds: WorldPool, options: dict[str, Any], parts: int, clip: float) -> None:
    found = worlds(RANKS).run(train, options, parts, parts > 1)
    expected = recursion(weighted_ring(RANKS), 6, clip, parts)
    assert expected[0] != expected[-1]
    for rank in range(RANKS):
        assert found[rank] == pytest.approx([row[rank] for row in expected], rel=1e-9)


@on_ranks(RANKS)
def test_topologies_and_averages() -> None:
    bf.init()
    rank, size = bf.rank(), bf.size()
    model = ddp.DecentralizedDataParallel(net := Net(0.0), sgd)
    graph = weighted_ring(size)
    for topology in (graph, {"topology": graph, "name": "ring"}):
        before = bf.allgather(net.weight.detach()[:1])
        model.optimizer.param_groups[0]["lr"] = 0.0
        model.set_topology(topology)
        with torch.no_grad():
            net.weight[0] = float(rank)
            net.other[0] = float(rank)
        model(0.0).backward()
        assert net.weight[0].item() == pytest.approx(0.6 * rank + 0.4 * ((rank - 1) % size)), before
    model.train()
    with torch.no_grad():
        net.weight.fill_(float(rank))
    # A parameter that a pass leaves out is mixed, but otherwise unchanged.
    model(0.0, is_whole=False).backward()
    assert net.other.grad is None or not net.other.grad.any()
    model.eval()
    model(0.0)
    for is_averaged in (False, True):
        wrapped = ddp.DecentralizedDataParallel(
            Net(0.0), sgd, topology=graph, sync_buffer_in_global_avg=is_averaged
        )
        with torch.no_grad():
            wrapped.module.seen.fill_(float(rank))
            wrapped.module.weight.fill_(float(rank))
        assert wrapped.sync and wrapped._optims == [wrapped.optimizer] and wrapped._model is wrapped.module
        wrapped.load_state_dict(wrapped.state_dict())
        wrapped.load_state_dict(
            {f"_model.{name}": value for name, value in wrapped.module.state_dict().items()}
        )
        wrapped.global_avg()
        assert wrapped.module.weight[0].item() == (size - 1) / 2
        assert wrapped.module.seen[0].item() == ((size - 1) / 2 if is_averaged else rank)


@on_ranks(2)
def test_backward_that_raises() -> None:
    """A backward pass that raises takes no step, neither of the optimizer nor of the scheduler, and the next one takes one."""
    bf.init()
    model = ddp.DecentralizedDataParallel(
        Net(0.0), sgd, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    )

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    loss = model(1.0)
    hook = model.module.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    assert model.module.weight[0].item() == 0.0
    model.zero_grad()
    model(1.0).backward()
    assert model.module.weight[0].item() == pytest.approx(LR)
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(LR / 2)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="optim_fn must be callable, got SGD"):
        model = Net(0.0)
        ddp.DecentralizedDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="lr_scheduler_fn must be callable, got int"):
        ddp.DecentralizedDataParallel(Net(0.0), sgd, 3)
    with pytest.raises(ValueError, match="grad_clip_norm must be at least 0, got -1"):
        ddp.DecentralizedDataParallel(Net(0.0), sgd, grad_clip_norm=-1)
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got int"):
        ddp.DecentralizedDataParallel(1, sgd)


# --- batches ------------------------------------------------------------------------------------------------


def chain(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def test_rounds_of_batches() -> None:
    make = partial(ddp.LocalStepRandomBatchSampler, range(10), 4, 7)
    sampler, rounds = make(), [list(make(rank=rank)) for rank in (0, 1)]
    assert len(sampler) == 3 and [len(batch) for batch in rounds[0]] == [4, 4, 2]
    assert sorted(chain(rounds[0])) == list(range(10)) and rounds[0] != rounds[1]
    iterator = iter(sampler)
    first = [next(iterator), next(iterator)]
    # The sampler continues where it was, and then draws another order.
    assert first + list(sampler) == rounds[0]
    assert sampler.local_step == 3
    second = list(sampler)
    assert sorted(chain(second)) == list(range(10)) and second != rounds[0]
    permutation = torch.randperm(10, generator=torch.Generator().manual_seed(7 + 10000 * 2 + 0)).tolist()
    assert chain(make(rank=2)) == permutation
    assert [len(batch) for batch in make(drop_last=True)] == [4, 4]
    loader = torch.utils.data.DataLoader(torch.arange(10), batch_sampler=make())
    assert [batch.tolist() for batch in loader] == rounds[0]
    with pytest.raises(ValueError, match="batch_size.*got 0"):
        ddp.LocalStepRandomBatchSampler(range(10), 0, 7)
    with pytest.raises(ValueError, match="dataset.*batch of 11.*got 10"):
        ddp.LocalStepRandomBatchSampler(range(10), 11, 7, drop_last=True)


# --- optimizers and schedules -------------------------------------------------------------------------------


def named_parameters() -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    return [
        (name, nn.Parameter(torch.randn(shape).double())) for name, shape in (("w", (2, 3)), ("bias", (3,)))
    ]


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_moments_of_accumulated_gradients(name: str) -> None:
    """Compares the moments with the recursion, written for one number; the state is saved and loaded on the way."""
    lr, beta1, beta2, eps, decay, count = 0.1, 0.9, 0.99, 1e-8, 0.01, 3
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    kind = {"adam": optim.AccumAdam, "adamw": optim.AccumAdamW}[name]
    optimizer = kind([parameter], lr, (beta1, beta2), eps, decay, count)
    x, m, v, gradients = 1.0, 0.0, 0.0, []
    for step in range(8):
        if step == 5:
            state = optimizer.state_dict()
            optimizer = kind([parameter], lr, (beta1, beta2), eps, decay, count)
            optimizer.load_state_dict(state)
        g = math.sin(step + 1.0)
        parameter.grad = torch.tensor([g], dtype=torch.float64)
        loss = optimizer.step(lambda: 17)
        assert loss == 17 and parameter.grad.item() == g
        if name == "adamw":
            x *= 1 - lr * decay
        else:
            g += decay * x
        gradients.append(g)
        commits = step // count + 1
        first = (beta1 * m + (1 - beta1) * g) / (1 - beta1**commits)
        second = (beta2 * v + (1 - beta2) * g * g) / (1 - beta2**commits)
        x -= lr * first / (math.sqrt(second) + eps)
        if len(gradients) == count:
            mean = sum(gradients) / count
            m, v, gradients = beta1 * m + (1 - beta1) * mean, beta2 * v + (1 - beta2) * mean * mean, []
        assert parameter.item() == pytest.approx(x, rel=1e-12)
    with pytest.raises(ValueError, match="accum_iter.*got 0"):
        kind([parameter], accum_iter=0)


@pytest.mark.parametrize("name", ["adam", "adamw", "accum_adam", "accum_adamw"])
def test_weights_decay_and_biases_do_not(name: str) -> None:
    groups = getattr(optim, f"optim_fn_{name}")(named_parameters(), weight_decay=0.25).param_groups
    found = {
        tuple(parameter.shape): group["weight_decay"] for group in groups for parameter in group["params"]
    }
    assert found == {(2, 3): 0.25, (3,): 0.0}


def test_warm_up_and_cosine() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = optim.lr_scheduler_fn_cosine_with_warmup(
        optimizer, 8, 4, cosine_eta_min=0.1, warmup_decay=0.2
    )
    rates = []
    for _ in range(13):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [0.2 + 0.8 * t / 4 for t in range(4)]
    expected += [0.1 + 0.9 * (1 + math.cos(math.pi * t / 8)) / 2 for t in range(9)]
    assert rates == pytest.approx(expected)
