"""Common parts of the training tests: a model with all kinds of parameters, its data, all entries, and a simulation.

An entry is one way to train with others. Most tests of the frame train a model with each entry, and compare it with
another run, or with `Simulation`, which runs all ranks in one process. All values are in float64, so a wrong weight, a
lost update or a gradient at the wrong point shows at once: trajectories agree up to rounding, or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import fogdist
import fogdist.bluefog.torch as bf
import networkx as nx
import numpy as np
import torch
import torch.distributed as dist
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.compression import TopK
from fogdist.context import current
from reference import mix
from torch import Tensor, nn
from torch.optim import Optimizer

EXACT = {"rtol": 1e-11, "atol": 1e-12}

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


class Net(nn.Module):
    """Has every kind of parameter that a walk over leaf modules or gradients would miss; one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(4))  # in the container itself
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight  # tied
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(2, 2)  # never has a gradient
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(x + self.position))
        return self.head(torch.tanh(self.frozen(self.decoder(hidden)) + self.encoder(hidden)))


def make_net(rank: int) -> Net:
    torch.manual_seed(100 + rank)  # ranks start with different values, so every exchange has an effect
    return Net().double()


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return (
        torch.randn(5, 4, generator=generator, dtype=torch.float64),
        torch.randn(5, 3, generator=generator, dtype=torch.float64),
    )


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    first = next(model.parameters())
    x, y = (part.to(first.device, first.dtype.to_real()) for part in batch(rank, number))
    return (model(x) - y).square().mean()


@contextlib.contextmanager
def averages_begun() -> Iterator[list[dist.Work]]:
    """Yields the exchanges with neighbors that optimizers have begun in this block."""
    works: list[dist.Work] = []
    backend = type(current().backend)
    plain = backend.neighbor_allreduce

    def begin(*arguments: Any, **options: Any) -> dist.Work:
        works.append(plain(*arguments, **options))
        return works[-1]

    with mock.patch.object(backend, "neighbor_allreduce", begin):
        yield works


def snapshot(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train_step(called: Any, optimizer: Any, rank: int, number: int) -> None:
    """Runs a training step as in most training loops."""
    optimizer.zero_grad()
    loss_of(called, rank, number).backward()
    optimizer.step()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def sgd(model: nn.Module, momentum: float = 0.9) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


# --- entries ------------------------------------------------------------------------------------------------

FACTORIES: dict[str, Callable[..., Any]] = {
    "awc": bf.DistributedAdaptWithCombineOptimizer,
    "atc": bf.DistributedAdaptThenCombineOptimizer,
    "gradient": bf.DistributedGradientAllreduceOptimizer,
}
BLUEFOGS: dict[str, Callable[..., Any]] = {**FACTORIES, "push-sum": bf.DistributedPushSumOptimizer}
WINDOWS: dict[str, Callable[..., Any]] = {"put": bf.DistributedWinPutOptimizer}
# The classes of fogdist.algorithms whose ranks go in step.
IN_STEP: dict[str, dict[str, Any]] = {
    "DecentralizedSGD": {},
    "LocalSGD": {"local_steps": 2},
    "ExactDiffusion": {},
    "GradientTracking": {},
    "PushSumSGD": {},
    "DiLoCo": {"local_steps": 2},
    "GASLoC": {"local_steps": 2},
    "SparseLoCo": {"local_steps": 2, "compression": TopK(1.0)},
}
VIEWS: dict[str, Callable[..., Any]] = {
    **BLUEFOGS,
    "cta": partial(algorithms.DecentralizedSGD, order="cta", broadcast=False),
    **WINDOWS,
    **{
        name: partial(getattr(algorithms, name), broadcast=False, **options)
        for name, options in IN_STEP.items()
    },
    "streaming": partial(algorithms.DiLoCo, broadcast=False, local_steps=2, fragments=2, delay=1),
}
ENTRIES = [*VIEWS, "wrapper"]
# The rules of `Simulation` for the entries, on a graph on which push-sum's p stays 1.
RULES = {
    "awc": "awc",
    "atc": "atc",
    "gradient": "gradient",
    "cta": "cta",
    "push-sum": "awc",
    "put": "awc",
    "wrapper": "awc",
}


def start(graph: Callable[[int], nx.DiGraph] | None = None) -> tuple[int, int]:
    """Begins a test in a world that others have used; frees their windows, which would keep the topology fixed.

    Args:
        graph: Makes the group's topology; by default the group's own.

    Returns:
        Rank and size.
    """
    fogdist.init()
    bf.win_free()
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.set_topology(None if graph is None else graph(size))
    return rank, size


def distribute(kind: str, base: Optimizer, model: Any, **options: Any) -> tuple[Any, Any]:
    """Makes an entry; returns the module to call and the optimizer to step."""
    if kind == "wrapper":
        wrapper = fogdist.DecentralizedDataParallel(model, base, broadcast=False, **options)
        return wrapper, base
    optimizer = VIEWS[kind](base, model, **options)
    if kind in WINDOWS:
        optimizer.force_barrier = True
    return model, optimizer


def end(called: Any, optimizer: Any) -> None:
    """Ends the entry that `distribute` made."""
    if isinstance(called, fogdist.DecentralizedDataParallel):
        called.close()
    elif hasattr(optimizer, "unregister_window"):
        optimizer.unregister_window()


@contextlib.contextmanager
def distributed(kind: str, base: Optimizer, model: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Calls `distribute`, and `end` if the block raised no error."""
    made = distribute(kind, base, model, **options)
    yield made
    end(*made)


# --- all ranks in one process -------------------------------------------------------------------------------


class Simulation:
    """All ranks of a run.

    Args:
        rule: "awc", "atc", "cta" or "gradient".
        models: The models of the ranks.
        make: Makes a model's optimizer, or several.
        matrix: The matrix that mixes models or gradients. By default models have plain means on the exponential graph,
            as in a group, and gradients the mean over all ranks.
    """

    def __init__(
        self,
        rule: str,
        models: Iterable[nn.Module],
        make: Callable[[Any], Optimizer | list[Optimizer]] = sgd,
        matrix: np.ndarray | None = None,
    ) -> None:
        self.rule = rule
        self.models = list(models)
        made = [make(model) for model in self.models]
        self.optimizers = [each if isinstance(each, list) else [each] for each in made]
        size = len(self.models)
        if matrix is None:
            graph = topologies.uniform_weights(topologies.exponential(size))
            matrix = (
                np.full((size, size), 1 / size) if rule == "gradient" else topologies.mixing_matrix(graph)
            )
        self.matrix = matrix

    def step(
        self,
        backward: Callable[[Any, int], object],
        mixes: bool = True,
        skips: Collection[int] = (),
        clips: float | None = None,
    ) -> None:
        """Runs one step of all ranks.

        Args:
            backward: Computes the gradients of a rank's model.
            mixes: Whether ranks communicate.
            skips: Ranks that leave out the optimizer's own step.
            clips: The norm to which gradients are clipped, if any.
        """
        if self.rule == "cta" and mixes:
            self.mix()
        for rank, model in enumerate(self.models):
            for optimizer in self.optimizers[rank]:
                optimizer.zero_grad()
            backward(model, rank)
        if self.rule == "gradient" and mixes:
            self.mix_gradients()
        if clips is not None:
            for model in self.models:
                nn.utils.clip_grad_norm_(model.parameters(), clips)
        if self.rule == "awc" and mixes:
            self.mix()
        for rank, own in enumerate(self.optimizers):
            if rank not in skips:
                for optimizer in own:
                    optimizer.step()
        if self.rule == "atc" and mixes:
            self.mix()

    def train(self, number: int) -> None:
        """Runs `train_step` on all ranks."""
        self.step(lambda model, rank: loss_of(model, rank, number).backward())

    def mix(self) -> None:
        """Mixes the trained parameters of the optimizers."""
        with torch.no_grad():
            for same in zip(*map(self._held, range(len(self.models))), strict=True):
                values = mix([p.detach().clone() for p in same], self.matrix)
                for parameter, value in zip(same, values, strict=True):
                    parameter.copy_(value)

    def mix_gradients(self) -> None:
        """Missing gradients of some ranks count as zeros; a gradient that is missing on all ranks stays missing."""
        for same in zip(*map(self._held, range(len(self.models))), strict=True):
            if any(p.grad is not None for p in same):
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
                for parameter, value in zip(same, mix(gradients, self.matrix), strict=True):
                    parameter.grad = value.to(parameter.dtype)

    def _held(self, rank: int) -> list[nn.Parameter]:
        groups = [group for optimizer in self.optimizers[rank] for group in optimizer.param_groups]
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def check(self, rank: int, model: nn.Module, **tolerance: float) -> None:
        """Raises AssertionError unless a rank's model has the values of the simulation."""
        torch.testing.assert_close(snapshot(model), snapshot(self.models[rank]), **(tolerance or EXACT))
