"""When to communicate: torch optimizers that average with neighbors while they train.

`wrapper` makes a distributed optimizer out of the user's. `adapt_with_combine`, `adapt_then_combine` and
`gradient_allreduce` are one algorithm each: when to communicate. `parameter_average` and `gradient_average`
are what is communicated; `combining` is what the first two algorithms have in common, and `pass_counter`
counts backward passes for num_steps_per_communication.
"""

from __future__ import annotations

from fogdist.optim.adapt_then_combine import DistributedAdaptThenCombineOptimizer
from fogdist.optim.adapt_with_combine import DistributedAdaptWithCombineOptimizer
from fogdist.optim.gradient_allreduce import DistributedGradientAllreduceOptimizer
from fogdist.optim.parameter_average import CommunicationType

__all__ = [
    "CommunicationType",
    "DistributedAdaptThenCombineOptimizer",
    "DistributedAdaptWithCombineOptimizer",
    "DistributedGradientAllreduceOptimizer",
]
