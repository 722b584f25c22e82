"""Gossip-PGA: gossip with neighbors, and now and then the exact average."""

from __future__ import annotations

from torch.optim import Optimizer

from fogdist.algorithms.frame import Algorithm, check_count
from fogdist.algorithms.mixing import AllRanks, MixingLike
from fogdist.optim.wrapper import Models


class GossipPGA(Algorithm):
    """Gossip SGD with periodic global averaging: in every H-th round, the exact average in place of W's.

    ``x+ = W (x + d(x))``, and in rounds H, 2 H, ...  ``x+ = mean(x + d(x))``.
    (Chen, Yuan, Zhang, Pan, Xu and Yin, "Accelerating Gossip SGD with Periodic Global Averaging", ICML 2021,
    arXiv 2105.09080.) W = I (`Nobody()`) is local SGD, W = 1/n (`AllRanks()`) is parallel SGD.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        period: H, counted in rounds of communication.
        mixing: W, as in `Algorithm`.
        local_steps: As in `Algorithm`.

    Raises:
        ValueError: As `Algorithm`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        period: int = 16,
        mixing: MixingLike = None,
        local_steps: int = 1,
    ) -> None:
        check_count(period, "period")
        self._fog_period = period
        self._fog_begin(optimizer, mixing, local_steps, period=period)

    def _fog_combine(self) -> None:
        is_global = (self._fog_rounds + 1) % self._fog_period == 0
        self._fog_average(self._fog_flats.values, AllRanks() if is_global else None, in_place=True)
