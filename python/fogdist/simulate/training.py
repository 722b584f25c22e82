"""A loop that trains virtual ranks, and what it records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fogdist.algorithms import DecentralizedSGD
from fogdist.simulate.model import StackedModel
from fogdist.simulate.ranks import VirtualRanks
from fogdist.training.algorithm import check_count
from fogdist.training.mixing import MixingLike

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]
"""Of a rank's results and targets: a scalar."""
Data: TypeAlias = Callable[[int], tuple[Tensor, Tensor]]
"""Of the number of a step: inputs and targets of all ranks, of shape (ranks, batch, ...)."""


@dataclass(frozen=True)
class Result:
    """What became of a training.

    Attributes:
        losses: The loss of each step, at the parameters that the gradient was taken at: of shape (steps,), the mean over
            ranks, float64.
        consensus: The consensus distance after each step, of shape (steps,), float64.
        evaluated: Steps that were made before each evaluation, and what `evaluate` returned there.
        model: The ranks' parameters at the end.
    """

    losses: Tensor
    consensus: Tensor
    evaluated: list[tuple[int, float]]
    model: StackedModel


def _sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


def train(
    model: nn.Module,
    loss: Loss,
    data: Data,
    *,
    ranks: int,
    steps: int,
    topology: MixingLike = None,
    algorithm: Callable[..., Optimizer] = DecentralizedSGD,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = _sgd,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
    evaluate: Callable[[StackedModel], float] | None = None,
    every: int = 1,
    seed: int = 0,
) -> Result:
    """Trains a model on many ranks in this process, with the algorithms and topologies of real ranks.

    Rank r gets, up to rounding, the parameters that it would have as a real rank with the same data. One tensor holds all
    ranks' parameters, so that thousands of ranks with a small model take one process and little time::

        result = fogdist.simulate.train(
            model, torch.nn.functional.cross_entropy, data, ranks=1024, steps=300,
            topology=fogdist.topology.one_peer_exponential(1024),
            algorithm=fogdist.algorithms.ExactDiffusion,
        )

    Args:
        model: What all ranks start from, as for `StackedModel`. It is copied.
        loss: Returns a rank's loss, a scalar, of the model's result for a batch and the batch's targets.
        data: Returns the inputs and the targets of a step, 0 first: of shape (ranks, batch, ...) each.
        ranks: Number of ranks.
        steps: Number of steps.
        topology: The algorithm's: a topology of so many ranks; None for the algorithm's own default, which is
            the static exponential graph for most.
        algorithm: A class of `fogdist.algorithms` that goes in step, `GradientAverage`, or a `functools.partial` of
            one with its options.
        optimizer: Makes the local optimizer of parameters, which must treat each element by itself; by default SGD with
            a learning rate of 0.1.
        schedule: Makes the learning rate's scheduler of the distributed optimizer, which goes on after each step; None
            for a constant rate.
        evaluate: Called before the first step and after every `every` steps, with the model in eval mode and without
            gradients; a loss, say, of ``stacked.model_of()``, the mean of all ranks.
        every: Steps from one evaluation to the next.
        seed: Of torch's random numbers, which dropout takes; those of the caller stay as they were.

    Returns:
        Losses, consensus distances, evaluations and the parameters.

    Raises:
        TypeError: An argument has a wrong type; `topology` is a mixing whose matrix is not known.
        ValueError: A number below 1; a topology of another number of ranks; a model with statistics of batches in training
            mode, such as BatchNorm; data without a row for each rank; an algorithm with windows.
    """
    check_count(steps, "steps")
    check_count(every, "every")
    stacked = StackedModel(model, ranks)
    stacked.check_statistics()
    options = {} if topology is None else {"topology": topology}
    view = algorithm(optimizer([stacked.stacked]), stacked, group=VirtualRanks(ranks), **options)
    scheduler = None if schedule is None else schedule(view)
    of_ranks = torch.func.vmap(loss, randomness="different")
    losses, distances = torch.zeros(2, steps, dtype=torch.float64)
    evaluated: list[tuple[int, float]] = []

    def look(step: int) -> None:
        if evaluate is not None and step % every == 0:
            with stacked.evaluating():
                evaluated.append((step, float(evaluate(stacked))))

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        look(0)
        for made in range(steps):
            inputs, targets = data(made)
            view.zero_grad()
            each = of_ranks(stacked(inputs), targets)
            if each.shape != (ranks,):
                raise ValueError(f"loss must return a scalar, got shape {tuple(each.shape[1:])}")
            torch.autograd.backward(each.sum())
            view.step()
            if scheduler is not None:
                scheduler.step()
            losses[made] = each.detach().mean()
            distances[made] = stacked.consensus_distance()
            look(made + 1)
    return Result(losses, distances, evaluated, stacked)
