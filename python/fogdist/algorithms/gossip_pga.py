"""Gossip-PGA: gossip with neighbors, and periodically the exact average."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch.optim import Optimizer

from fogdist.training.algorithm import Algorithm, check_count
from fogdist.training.mixing import GlobalAverage
from fogdist.training.view import Models

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fogdist.training.algorithm import AlgorithmOptions


class GossipPGA(Algorithm):
    """Gossip SGD with periodic global averaging: in every H-th round, the exact average in place of W's.

    ``x+ = W (x + d(x))``, and in rounds H, 2 H, ...  ``x+ = mean(x + d(x))``.
    (Chen, Yuan, Zhang, Pan, Xu and Yin, "Accelerating Gossip SGD with Periodic Global Averaging", ICML 2021,
    arXiv 2105.09080.) W = I (`NoMixing()`) is local SGD, W = 1/n (`GlobalAverage()`) is parallel SGD.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        period: H, counted in rounds of communication.
        **options: As in `Algorithm`; W is `topology`.

    Raises:
        ValueError: As `Algorithm`.
    """

    can_be_joined: ClassVar[bool] = True
    compared: ClassVar[tuple[str, ...]] = ("period",)

    period: int

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        period: int = 16,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        check_count(period, "period")
        self.period = period
        super().__init__(optimizer, model, **options)

    def combine(self) -> None:
        """See the class."""
        is_global = (self.rounds + 1) % self.period == 0
        self.mix(self.values, GlobalAverage() if is_global else None, in_place=True)
