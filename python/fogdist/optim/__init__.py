"""When to communicate: torch optimizers that average with neighbors while they train.

`wrapper` makes a distributed optimizer out of the user's. `adapt_with_combine`, `adapt_then_combine`,
`gradient_allreduce`, `win_put`, `pull_get` and `push_sum` are one algorithm each: when to communicate.
`parameter_average`, `gradient_average` and `bucket_windows` are what is communicated. `combining` is what the
first two algorithms have in common, `window_optimizer` the last three, `overlapping` those that exchange while
the gradient is computed; `pass_counter` counts backward passes for num_steps_per_communication.
`backward_steps` makes steps within them. `deprecated` has the names of older scripts.
"""

from __future__ import annotations

from fogdist.optim.adapt_then_combine import DistributedAdaptThenCombineOptimizer
from fogdist.optim.adapt_with_combine import DistributedAdaptWithCombineOptimizer
from fogdist.optim.deprecated import (
    DistributedAllreduceOptimizer,
    DistributedBluefogOptimizer,
    DistributedHierarchicalNeighborAllreduceOptimizer,
    DistributedNeighborAllreduceOptimizer,
)
from fogdist.optim.gradient_allreduce import DistributedGradientAllreduceOptimizer
from fogdist.optim.parameter_average import CommunicationType
from fogdist.optim.pull_get import DistributedPullGetOptimizer
from fogdist.optim.push_sum import DistributedPushSumOptimizer
from fogdist.optim.win_put import DistributedWinPutOptimizer

__all__ = [
    "CommunicationType",
    "DistributedAdaptThenCombineOptimizer",
    "DistributedAdaptWithCombineOptimizer",
    "DistributedAllreduceOptimizer",
    "DistributedBluefogOptimizer",
    "DistributedGradientAllreduceOptimizer",
    "DistributedHierarchicalNeighborAllreduceOptimizer",
    "DistributedNeighborAllreduceOptimizer",
    "DistributedPullGetOptimizer",
    "DistributedPushSumOptimizer",
    "DistributedWinPutOptimizer",
]
