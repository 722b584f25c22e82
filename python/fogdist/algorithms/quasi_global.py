"""Quasi-global momentum: momentum along where the averages went, not where the rank's own gradients point."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.optim import Optimizer

from fogdist.algorithms.frame import Algorithm, check_factor
from fogdist.algorithms.mixing import MixingLike
from fogdist.optim.wrapper import Models


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
        mixing: As in `Algorithm`.
        local_steps: As in `Algorithm`.

    Raises:
        ValueError: `optimizer` has momentum or betas; and as `Algorithm`.
    """

    _fog_buffers: ClassVar[tuple[str, ...]] = ("momentum",)
    _fog_needs_rates: ClassVar[bool] = True

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        momentum: float = 0.9,
        smoothing: float | None = None,
        mixing: MixingLike = None,
        local_steps: int = 1,
    ) -> None:
        for group in optimizer.param_groups:
            if group.get("momentum") or "betas" in group:
                own = "betas" if "betas" in group else "momentum"
                raise ValueError(
                    f"optimizer must have no momentum of its own, got one with {own}={group[own]}"
                )
        self._fog_momentum = check_factor(momentum, "momentum", below=1.0)
        self._fog_smoothing = (
            self._fog_momentum if smoothing is None else check_factor(smoothing, "smoothing", below=1.0)
        )
        self._fog_begin(
            optimizer, mixing, local_steps, momentum=self._fog_momentum, smoothing=self._fog_smoothing
        )

    def _fog_advance(self) -> Any:
        momenta, rates = self._fog_state["momentum"], self._fog_rates()
        before = self._fog_flats.copies()
        result = None
        if not self._fog_overflowed:
            directions = [
                gradient.add_(momentum, alpha=self._fog_momentum)
                for gradient, momentum in zip(self._fog_flats.gradients(), momenta, strict=True)
            ]
            result = self._fog_step_along(directions)
        if self._fog_count():
            self._fog_combine()
            self._fog_rounds += 1
        for momentum, start, end, rate in zip(momenta, before, self._fog_flats.values, rates, strict=True):
            if rate != 0.0:
                momentum.mul_(self._fog_smoothing).add_(
                    start.sub_(end), alpha=(1 - self._fog_smoothing) / rate
                )
        return result
