"""Optimizers of BlueFog under the names, and with the arguments, that they had before.

BlueFog 0.1 took parameters by name and no model. Without a model, forward passes cannot be noticed, so `step` makes the
whole exchange and compute does not hide it. The recursion is the same, as the gradient is that of the old parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import fogdist
from fogdist.bluefog.deprecation import warn_once

__all__ = [
    "DistributedAdaptThenCombineOptimizer",
    "DistributedAdaptWithCombineOptimizer",
    "DistributedAllreduceOptimizer",
    "DistributedBluefogOptimizer",
    "DistributedConsensusOptimizer",
    "DistributedGradientAllreduceOptimizer",
    "DistributedHierarchicalNeighborAllreduceOptimizer",
    "DistributedNeighborAllreduceOptimizer",
    "DistributedPullGetOptimizer",
    "DistributedPushSumOptimizer",
    "DistributedWinPutOptimizer",
]

# A module, several modules, or pairs as from `model.named_parameters()`.
Given = Module | Iterable[Module] | Iterable[tuple[str, Tensor]]


def _ignoring_weights(make: Callable[..., Any]) -> Callable[..., Any]:
    """BlueFog ignored weights that the `communication_type` of a step did not use."""

    @functools.wraps(make)
    def call(*arguments: Any, **options: Any) -> Any:
        optimizer = make(*arguments, **options)
        optimizer.ignores_weights = True
        return optimizer

    return call


def _in_pace(make: Callable[..., Any]) -> Callable[..., Any]:
    """BlueFog's ranks had cores of their own and stayed in pace. Ranks that share cores must wait for each other."""

    @functools.wraps(make)
    def call(*arguments: Any, max_staleness: int | None = 1, **options: Any) -> Any:
        return make(*arguments, max_staleness=max_staleness, **options)

    return call


DistributedAdaptThenCombineOptimizer = _ignoring_weights(fogdist.DistributedAdaptThenCombineOptimizer)
DistributedAdaptWithCombineOptimizer = _ignoring_weights(fogdist.DistributedAdaptWithCombineOptimizer)
DistributedPullGetOptimizer = _in_pace(fogdist.DistributedPullGetOptimizer)
DistributedPushSumOptimizer = _in_pace(fogdist.DistributedPushSumOptimizer)
DistributedWinPutOptimizer = _in_pace(fogdist.DistributedWinPutOptimizer)


def DistributedAllreduceOptimizer(
    optimizer: Optimizer,
    model: Given | None = None,
    num_steps_per_communication: int = 1,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
) -> Any:
    """Averages parameters over all ranks if it is given a model, as since BlueFog 0.2.2, else gradients, as in 0.1.

    Args:
        optimizer: Any torch optimizer that evaluates its closure once a step.
        model: Makes it ``DistributedAdaptWithCombineOptimizer(optimizer, model, CommunicationType.allreduce)``.
        num_steps_per_communication: As there; with a model only.
        named_parameters: Makes it ``DistributedGradientAllreduceOptimizer``, as does neither of both.

    Raises:
        TypeError: As there; `model` and `named_parameters` are both given.
        ValueError: As there; `num_steps_per_communication` without a model.
        RuntimeError: As there.
    """
    models, is_by_name = _models(optimizer, model, named_parameters, num_steps_per_communication)
    if is_by_name:
        return fogdist.DistributedGradientAllreduceOptimizer(optimizer, models)
    return _choosable(fogdist.DistributedAllreduceOptimizer(optimizer, models, num_steps_per_communication))


def DistributedNeighborAllreduceOptimizer(
    optimizer: Optimizer,
    model: Given | None = None,
    num_steps_per_communication: int = 1,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
) -> Any:
    """As `fogdist.DistributedAdaptWithCombineOptimizer`: ``w+ = Avg(w) - step(grad f(w))``.

    Args:
        optimizer: As there.
        model: As there.
        num_steps_per_communication: As there; with a model only.
        named_parameters: In place of a model; neither of both means all parameters of the optimizer.

    Raises:
        TypeError: As there; `model` and `named_parameters` are both given.
        ValueError: As there; `num_steps_per_communication` without a model.
        RuntimeError: As there.
    """
    models, _ = _models(optimizer, model, named_parameters, num_steps_per_communication)
    return _choosable(
        fogdist.DistributedNeighborAllreduceOptimizer(optimizer, models, num_steps_per_communication)
    )


DistributedConsensusOptimizer = DistributedNeighborAllreduceOptimizer


def DistributedHierarchicalNeighborAllreduceOptimizer(
    optimizer: Optimizer, model: Module | list[Module], num_steps_per_communication: int = 1
) -> Any:
    """As `fogdist.DistributedAdaptWithCombineOptimizer` between machines; arguments and errors of there."""
    make = fogdist.DistributedHierarchicalNeighborAllreduceOptimizer
    return _choosable(make(optimizer, model, num_steps_per_communication))


def DistributedGradientAllreduceOptimizer(
    optimizer: Optimizer,
    model: Module | list[Module],
    num_steps_per_communication: int = 1,
    *,
    backward_passes_per_step: int | None = None,
    **options: Any,
) -> Any:
    """As `fogdist.DistributedGradientAllreduceOptimizer`, whose J was `backward_passes_per_step` in BlueFog 0.2.2."""
    if backward_passes_per_step is not None:
        warn_once("backward_passes_per_step is called num_steps_per_communication now; the old name will go")
        num_steps_per_communication = backward_passes_per_step
    return fogdist.DistributedGradientAllreduceOptimizer(
        optimizer, model, num_steps_per_communication, **options
    )


def DistributedBluefogOptimizer(
    optimizer: Optimizer,
    model: Given | None = None,
    num_steps_per_communication: int = 1,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    **options: Any,
) -> Any:
    """As `DistributedWinPutOptimizer`, or with parameters by name; errors as of there.

    Args:
        optimizer: As there.
        model: As there.
        num_steps_per_communication: As there; with a model only.
        named_parameters: As in `DistributedNeighborAllreduceOptimizer`.
        **options: As there.
    """
    models, _ = _models(optimizer, model, named_parameters, num_steps_per_communication)
    return DistributedWinPutOptimizer(optimizer, models, num_steps_per_communication, **options)


def _choosable(combining: Any) -> Any:
    """Gives AWC the methods of BlueFog 0.2.2 that choose `communication_type`; it ignores weights that this does not use."""
    combining.ignores_weights = True
    this = weakref.ref(combining)
    for name, chosen in (
        ("allreduce", fogdist.CommunicationType.allreduce),
        ("neighbor_allreduce", fogdist.CommunicationType.neighbor_allreduce),
        ("hierarchical_neighbor_allreduce", fogdist.CommunicationType.hierarchical_neighbor_allreduce),
        ("empty_function", fogdist.CommunicationType.empty),
    ):
        setattr(combining, f"use_{name}_in_communication", partial(_choose, this, chosen))
    return combining


def _choose(reference: weakref.ref[Any], kind: fogdist.CommunicationType) -> None:
    optimizer: Any = reference()  # the caller keeps it alive
    optimizer.communication_type = kind


class _Parameters(Module):
    """A module for parameters that were passed without their model."""

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._named = named

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[Any]:
        return iter(self._named)


def _models(
    optimizer: Optimizer,
    model: Given | None,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
    num_steps_per_communication: int,
) -> tuple[Module | list[Module], bool]:
    """Returns the modules that hold the parameters, and whether the parameters were passed by name."""
    if model is not None and named_parameters is not None:
        raise TypeError("model and named_parameters must not both be given")
    if isinstance(model, Module):
        return model, False
    given: list[Any] = list(named_parameters if model is None and named_parameters else model or ())
    if given and all(isinstance(each, Module) for each in given):
        return given, False
    if num_steps_per_communication != 1:
        raise ValueError(
            f"num_steps_per_communication must be 1 without a model, got {num_steps_per_communication}"
        )
    if model is None and named_parameters is None:
        for number, group in enumerate(optimizer.param_groups):
            given += [(f"parameter.{number}.{place}", tensor) for place, tensor in enumerate(group["params"])]
    for pair in given:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise TypeError(f"model must be a Module, Modules, or pairs of name and parameter, got {pair!r}")
    return _Parameters(given), True
