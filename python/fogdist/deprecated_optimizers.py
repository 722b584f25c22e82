"""Deprecated names of BlueFog 0.3's optimizers: each makes one of the optimizers with current names.

Names of BlueFog 0.1 and 0.2 are in `fogdist.bluefog`.
"""

from __future__ import annotations

from torch.optim import Optimizer

from fogdist.optimizers import (
    AdaptWithCombineOptimizer,
    CommunicationType,
    DistributedAdaptWithCombineOptimizer,
)
from fogdist.training.view import Models
from fogdist.warn import warn_user


def DistributedAllreduceOptimizer(
    optimizer: Optimizer, model: Models, num_steps_per_communication: int = 1
) -> AdaptWithCombineOptimizer:
    """As `DistributedAdaptWithCombineOptimizer` with ``CommunicationType.allreduce``. Deprecated.

    It averages parameters. In BlueFog 0.2.1 and before the name stood for an average of gradients, which is
    `DistributedGradientAllreduceOptimizer`.
    """
    kind = CommunicationType.allreduce
    return _made("DistributedAllreduceOptimizer", optimizer, model, kind, num_steps_per_communication)


def DistributedNeighborAllreduceOptimizer(
    optimizer: Optimizer, model: Models, num_steps_per_communication: int = 1
) -> AdaptWithCombineOptimizer:
    """As `DistributedAdaptWithCombineOptimizer`. Deprecated."""
    kind = CommunicationType.neighbor_allreduce
    return _made("DistributedNeighborAllreduceOptimizer", optimizer, model, kind, num_steps_per_communication)


def DistributedHierarchicalNeighborAllreduceOptimizer(
    optimizer: Optimizer, model: Models, num_steps_per_communication: int = 1
) -> AdaptWithCombineOptimizer:
    """As `DistributedAdaptWithCombineOptimizer` with ``CommunicationType.hierarchical_neighbor_allreduce``. Deprecated."""
    kind = CommunicationType.hierarchical_neighbor_allreduce
    name = "DistributedHierarchicalNeighborAllreduceOptimizer"
    return _made(name, optimizer, model, kind, num_steps_per_communication)


def _made(
    name: str, optimizer: Optimizer, model: Models, kind: CommunicationType, local_steps: int
) -> AdaptWithCombineOptimizer:
    warn_user(
        f"fogdist.{name} is fogdist.DistributedAdaptWithCombineOptimizer with {kind} now",
        PendingDeprecationWarning,
    )
    return DistributedAdaptWithCombineOptimizer(optimizer, model, kind, local_steps)
