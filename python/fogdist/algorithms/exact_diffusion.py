"""Exact diffusion: diffusion without the bias that comes from different data on the ranks."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fogdist.training.algorithm import Algorithm


class ExactDiffusion(Algorithm):
    """Exact diffusion: corrects each rank's step by the change that averaging made in the previous step.

    With psi = x + d(x) the result of the local step at learning rate g, and psi- that of the step before::

        phi = psi + x - psi-
        x+  = V phi,    V = (I + W) / 2

    (Yuan, Ying, Zhao and Sayed, "Exact Diffusion for Distributed Optimization and Learning", parts I and II,
    IEEE Transactions on Signal Processing 67, 2019, arXiv 1702.05122, also known as NIDS.) Its fixed point is
    the optimum of the sum, also where ranks' data differ; diffusion (`DecentralizedSGD`) stays at a distance
    that grows with the learning rate and 1 / gap.

    The class keeps the correction in units of the gradient, ``c = (x - psi-) / g``, which converges to the rank's own
    gradient at the optimum. So a scheduler that changes the learning rate does not move the fixed point. With constant g
    this is the recursion above. While g is 0, c does not change. Optimizers other than SGD work too: d is their step.
    With local steps psi is their result, and the drift between ranks during these steps is not corrected.

    W should be symmetric and doubly stochastic. The arguments are those of `Algorithm`.
    """

    state_vectors: ClassVar[tuple[str, ...]] = ("correction",)
    needs_rates: ClassVar[bool] = True

    _corrected: list[Tensor]

    def members_changed(self) -> None:
        """Begins again without a correction: corrections add up to zero only if all ranks make all rounds."""
        for correction in self.vectors["correction"]:
            correction.zero_()
        for phi, psi in zip(self.__dict__.get("_corrected", ()), self.values, strict=False):
            phi.copy_(psi)

    def combine(self) -> None:
        """See the class."""
        adapted = self.values
        corrections = self.vectors["correction"]
        rates = self.rates()
        corrected = [
            psi.add(correction, alpha=rate)
            for psi, correction, rate in zip(adapted, corrections, rates, strict=True)
        ]
        self._corrected = corrected  # what an exchange that is repeated after a loss would send
        try:
            combined = self.mix(corrected)
        finally:
            self._corrected = []
        combined = [x.add_(phi).mul_(0.5) for x, phi in zip(combined, corrected, strict=True)]
        self.vectors["correction"] = [
            x.sub(psi).div_(rate) if rate != 0.0 else correction
            for x, psi, correction, rate in zip(combined, adapted, corrections, rates, strict=True)
        ]
        self.write(combined)
