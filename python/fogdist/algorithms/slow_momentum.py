"""SlowMo: momentum of the averages of many steps, over any algorithm of averages."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from fogdist.algorithms.frame import Algorithm, check_count, check_factor
from fogdist.algorithms.mixing import AllRanks, MixingLike, Nobody
from fogdist.optim.wrapper import Models


class SlowMo(Algorithm):
    """Slow momentum: every T steps the exact average, and a momentum step along what they did together.

    With a the parameters at the beginning of the T steps, the mean after them over all ranks, g the
    learning rate and u at first 0::

        u+ = slow_momentum u + (a - mean) / g
        x+ = a - slow_lr g u+

    (Wang, Tantia, Ballas and Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
    Momentum", ICLR 2020, arXiv 1910.00643.) Between, each step is ``x+ = W (x + d(x))`` if a mixing is given,
    and a local step by default: with slow_momentum 0 and slow_lr 1 that is local SGD. The optimizer's own
    momentum stays as it is over the average. g is the learning rate of the T-th step; if it is 0, the slow
    step is left out.

    Args:
        optimizer: As in `Algorithm`; the paper has SGD with momentum, and Adam.
        model: As in `Algorithm`.
        period: T, in steps.
        slow_momentum: Below 1.
        slow_lr: More than 0.
        mixing: As in `Algorithm`, for the steps between; by default `Nobody()`.
        local_steps: As in `Algorithm`, for the steps between.

    Raises:
        ValueError: As `Algorithm`.
    """

    _fog_buffers: ClassVar[tuple[str, ...]] = ("anchor", "slow_momentum")
    _fog_needs_rates: ClassVar[bool] = True

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        period: int = 12,
        slow_momentum: float = 0.7,
        slow_lr: float = 1.0,
        mixing: MixingLike = None,
        local_steps: int = 1,
    ) -> None:
        check_count(period, "period")
        self._fog_period = period
        self._fog_slow_momentum = check_factor(slow_momentum, "slow_momentum", below=1.0)
        self._fog_slow_lr = check_factor(slow_lr, "slow_lr", positive=True)
        self._fog_begin(
            optimizer,
            Nobody() if mixing is None else mixing,
            local_steps,
            period=period,
            slow_momentum=self._fog_slow_momentum,
            slow_lr=self._fog_slow_lr,
        )

    def _fog_initial(self, name: str) -> list[Tensor]:
        return self._fog_flats.copies() if name == "anchor" else super()._fog_initial(name)

    def _fog_advance(self) -> Any:
        result = super()._fog_advance()
        if self._fog_step_count % self._fog_period == 0:
            self._fog_slow_step()
        return result

    def _fog_slow_step(self) -> None:
        means = self._fog_average(self._fog_flats.values, AllRanks())
        anchors, momenta = self._fog_state["anchor"], self._fog_state["slow_momentum"]
        for anchor, mean, momentum, rate in zip(anchors, means, momenta, self._fog_rates(), strict=True):
            if rate == 0.0:
                anchor.copy_(mean)
            else:
                momentum.mul_(self._fog_slow_momentum).add_(anchor - mean, alpha=1 / rate)
                anchor.sub_(momentum, alpha=self._fog_slow_lr * rate)
        self._fog_flats.write(anchors)
