"""Optimizers of BlueFog under the names that they had before: each is one of the others."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fogdist.algorithms.asynchronous_diffusion import WinPut
from fogdist.optimizers import (
    AdaptWithCombineOptimizer,
    CommunicationType,
    DistributedAdaptWithCombineOptimizer,
    DistributedWinPutOptimizer,
)
from fogdist.training.view import Models


def DistributedAllreduceOptimizer(
    optimizer: Optimizer, model: Models, num_steps_per_communication: int = 1
) -> AdaptWithCombineOptimizer:
    """As `DistributedAdaptWithCombineOptimizer` with ``CommunicationType.allreduce``. Deprecated.

    It averages parameters. In BlueFog 0.2.1 and before the name stood for an average of gradients, which is
    `DistributedGradientAllreduceOptimizer`.
    """
    kind = CommunicationType.allreduce
    return _adapt_with_combine(
        "DistributedAllreduceOptimizer", optimizer, model, kind, num_steps_per_communication
    )


def DistributedNeighborAllreduceOptimizer(
    optimizer: Optimizer, model: Models, num_steps_per_communication: int = 1
) -> AdaptWithCombineOptimizer:
    """As `DistributedAdaptWithCombineOptimizer`. Deprecated."""
    kind = CommunicationType.neighbor_allreduce
    name = "DistributedNeighborAllreduceOptimizer"
    return _adapt_with_combine(name, optimizer, model, kind, num_steps_per_communication)


def DistributedHierarchicalNeighborAllreduceOptimizer(
    optimizer: Optimizer, model: Models, num_steps_per_communication: int = 1
) -> AdaptWithCombineOptimizer:
    """As `DistributedAdaptWithCombineOptimizer` with ``CommunicationType.hierarchical_neighbor_allreduce``. Deprecated."""
    kind = CommunicationType.hierarchical_neighbor_allreduce
    name = "DistributedHierarchicalNeighborAllreduceOptimizer"
    return _adapt_with_combine(name, optimizer, model, kind, num_steps_per_communication)


def DistributedBluefogOptimizer(
    optimizer: Optimizer,
    model: Models | Iterable[tuple[str, Tensor]] | None = None,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    **options: Any,
) -> WinPut:
    """As `DistributedWinPutOptimizer`, with the arguments of BlueFog 0.1 and 0.2. Deprecated.

    Args:
        optimizer: As there.
        model: As there; or, as in BlueFog 0.1, names and parameters such as ``model.named_parameters()``.
        named_parameters: These by name, in place of `model`. Without a model nobody knows when a forward pass
            is made, so what `step` needs it sends itself, and nothing hides it. Neither of both: all parameters
            of the optimizer.
        **options: As there.

    Raises:
        TypeError: `model` and `named_parameters` are both given; as there.
        ValueError: As there.
        RuntimeError: As there.
    """
    warnings.warn(
        "fogdist.DistributedBluefogOptimizer is now called fogdist.DistributedWinPutOptimizer; the old name will go",
        DeprecationWarning,
        stacklevel=2,
    )
    if model is not None and named_parameters is not None:
        raise TypeError("model and named_parameters must not both be given")
    if isinstance(model, Module):
        return DistributedWinPutOptimizer(optimizer, model, **options)
    if model is None:
        model = named_parameters
    given: list[Any] = [] if model is None else list(model)
    if model is None:
        for number, group in enumerate(optimizer.param_groups):
            given += [(f"parameter.{number}.{place}", tensor) for place, tensor in enumerate(group["params"])]
    if all(isinstance(each, Module) for each in given):
        return DistributedWinPutOptimizer(optimizer, given, **options)
    return DistributedWinPutOptimizer(optimizer, _Parameters(given), **options)


class _Parameters(Module):
    """Parameters that came without the model they belong to."""

    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._named = named

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[Any]:
        return iter(self._named)


def _adapt_with_combine(
    name: str, optimizer: Optimizer, model: Models, kind: CommunicationType, num_steps_per_communication: int
) -> AdaptWithCombineOptimizer:
    warnings.warn(
        f"fogdist.{name} is fogdist.DistributedAdaptWithCombineOptimizer with {kind} now",
        PendingDeprecationWarning,
        stacklevel=3,
    )
    return DistributedAdaptWithCombineOptimizer(optimizer, model, kind, num_steps_per_communication)
