"""Gradient averaging of virtual ranks."""

from __future__ import annotations

from typing import Any

from fogdist.training.algorithm import Algorithm
from fogdist.training.mixing import GlobalAverage


class GradientAverage(Algorithm):
    """Parallel SGD, ``x+ = x + d(x)`` with the mean of all ranks' gradients, of virtual ranks.

    It is what DistributedDataParallel, `DistributedGradientAllreduceOptimizer` of BlueFog and a batch of all ranks' samples on one
    rank compute. The arguments are those of `Algorithm`; `topology` is not used.
    """

    def advance(self) -> Any:
        """See the class."""
        self.count_step()
        self.rounds += 1
        return self.step_along(self.mix(self.gradients(), GlobalAverage(), in_place=True))
