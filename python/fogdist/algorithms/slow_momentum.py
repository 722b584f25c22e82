"""SlowMo: momentum of the change over many steps, on top of averages with any mixing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from fogdist.training.algorithm import Algorithm, check_count, check_factor
from fogdist.training.mixing import GlobalAverage, NoMixing
from fogdist.training.view import Models

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fogdist.training.algorithm import AlgorithmOptions


class SlowMo(Algorithm):
    """Slow momentum: every T steps the exact average, and a momentum step along their common change.

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
        **options: As in `Algorithm`, for the steps between; `mixing` is `NoMixing()` by default.

    Raises:
        ValueError: As `Algorithm`.
    """

    state_vectors: ClassVar[tuple[str, ...]] = ("anchor", "slow_momentum")
    needs_rates: ClassVar[bool] = True

    period: int
    slow_momentum: float
    slow_lr: float

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        period: int = 12,
        slow_momentum: float = 0.7,
        slow_lr: float = 1.0,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        check_count(period, "period")
        self.period = period
        self.slow_momentum = check_factor(slow_momentum, "slow_momentum", below=1.0)
        self.slow_lr = check_factor(slow_lr, "slow_lr", positive=True)
        options["compare"] = {
            **options.get("compare", {}),
            "period": period,
            "slow_momentum": self.slow_momentum,
            "slow_lr": self.slow_lr,
        }
        if options.get("mixing") is None:
            options["mixing"] = NoMixing()
        super().__init__(optimizer, model, **options)

    def initial(self, name: str) -> list[Tensor]:
        """See the class."""
        return self.buckets.copies() if name == "anchor" else super().initial(name)

    def advance(self) -> Any:
        """See the class."""
        result = super().advance()
        if self.steps % self.period == 0:
            self._slow_step()
        return result

    def _slow_step(self) -> None:
        means = self.mix(self.values, GlobalAverage())
        anchors, momenta = self.vectors["anchor"], self.vectors["slow_momentum"]
        for anchor, mean, momentum, rate in zip(anchors, means, momenta, self.rates(), strict=True):
            if rate == 0.0:
                anchor.copy_(mean)
            else:
                momentum.mul_(self.slow_momentum).add_(anchor - mean, alpha=1 / rate)
                anchor.sub_(momentum, alpha=self.slow_lr * rate)
        self.write(anchors)
