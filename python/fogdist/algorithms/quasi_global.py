"""Quasi-global momentum: momentum along the change of the averages instead of the rank's own gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim import Optimizer

from fogdist.training.algorithm import Algorithm, check_factor
from fogdist.training.view import Models

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fogdist.training.algorithm import AlgorithmOptions


class QuasiGlobalMomentum(Algorithm):
    """QG-DSGDm: decentralized SGD with a momentum that follows the parameters after averaging.

    At learning rate g and with m at first 0::

        x' = x - g (grad f(x) + momentum m)
        x+ = W x'
        m+ = smoothing m + (1 - smoothing) (x - x+) / g

    (Lin, Karimireddy, Stich and Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on
    Heterogeneous Data", ICML 2021, arXiv 2102.04761.) The optimizer makes the first line without its own
    momentum; m costs no communication. In local steps W is I. While g is 0, m stays.

    Args:
        optimizer: An optimizer without momentum of its own, such as ``torch.optim.SGD(..., momentum=0)``.
        model: As in `Algorithm`.
        momentum: Below 1.
        smoothing: Below 1; by default as `momentum`.
        **options: As in `Algorithm`.

    Raises:
        ValueError: `optimizer` has momentum or betas; and as `Algorithm`.
    """

    state_vectors: ClassVar[tuple[str, ...]] = ("momentum",)
    needs_rates: ClassVar[bool] = True

    momentum: float
    smoothing: float

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        momentum: float = 0.9,
        smoothing: float | None = None,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        for group in optimizer.param_groups:
            if group.get("momentum") or "betas" in group:
                own = "betas" if "betas" in group else "momentum"
                raise ValueError(
                    f"optimizer must have no momentum of its own, got one with {own}={group[own]}"
                )
        self.momentum = check_factor(momentum, "momentum", below=1.0)
        self.smoothing = (
            self.momentum if smoothing is None else check_factor(smoothing, "smoothing", below=1.0)
        )
        options["compare"] = {
            **options.get("compare", {}),
            "momentum": self.momentum,
            "smoothing": self.smoothing,
        }
        super().__init__(optimizer, model, **options)

    def advance(self) -> Any:
        """See the class."""
        momenta, rates = self.vectors["momentum"], self.rates()
        before = self.buckets.copies()
        result = None
        if not self.overflowed:
            directions = [
                gradient.add_(momentum, alpha=self.momentum)
                for gradient, momentum in zip(self.gradients(), momenta, strict=True)
            ]
            result = self.step_along(directions)
        if self.count_step():
            self.combine()
            self.rounds += 1
        for momentum, start, end, rate in zip(momenta, before, self.values, rates, strict=True):
            if rate != 0.0:
                momentum.mul_(self.smoothing).add_(start.sub_(end), alpha=(1 - self.smoothing) / rate)
        return result
