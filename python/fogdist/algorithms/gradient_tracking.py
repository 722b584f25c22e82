"""Gradient tracking: each rank estimates the mean of all ranks' gradients and steps along the estimate."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from fogdist.topology.validation import check_choice
from fogdist.training.algorithm import Algorithm, AlgorithmOptions
from fogdist.training.view import Models

TrackingOrder: TypeAlias = Literal["atc", "awc"]


class GradientTracking(Algorithm):
    """Gradient tracking: ``y+ = W y + grad f(x+) - grad f(x)``, begun at ``y = grad f(x)``, and a step along
    y.

    - "atc": ``x+ = W (x - g y)``: DSGT (Pu and Nedic, "Distributed stochastic gradient tracking methods",
      Mathematical Programming 187, 2021, arXiv 1805.11454), before as NEXT (Di Lorenzo and Scutari, 2016).
    - "awc": ``x+ = W x - g y``: DIGing (Nedic, Olshevsky and Shi, SIAM Journal on Optimization 27, 2017,
      arXiv 1607.03218), which is for time-varying graphs.

    The mean of all y is the mean of all gradients at any time, so the fixed point is the optimum of the sum,
    with any doubly stochastic W, one after the other too. x and y travel in one exchange, twice
    the bytes of `DecentralizedSGD`. The learning rate is the optimizer's in each step; other optimizers than SGD make
    their own step along y (with momentum SGD, the momentum is of y). In local steps W is I.

    Where a gradient scaler finds an overflow, the last gradient stands in for the rank's own, and it makes its step along y.

    During the optimizer's step the parameters' gradients are y; afterwards they are what they were.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        order: "atc" or "awc".
        **options: As in `Algorithm`.

    Raises:
        ValueError: `order` is none of them; and as `Algorithm`. In `step`: a gradient is sparse.
    """

    # `tracker` is W y after a round and y after a local step.
    state_vectors: ClassVar[tuple[str, ...]] = ("tracker", "gradient")
    compared: ClassVar[tuple[str, ...]] = ("order",)

    order: TrackingOrder

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        order: TrackingOrder = "atc",
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        self.order = check_choice(order, "order", TrackingOrder)
        super().__init__(optimizer, model, **options)

    def advance(self) -> Any:
        """See the class."""
        # After an overflow, the last gradient replaces this one.
        gradients = self.vectors["gradient"] if self.overflowed else self.gradients()
        tracked = [
            tracker.add(gradient).sub_(before)
            for tracker, gradient, before in zip(
                self.vectors["tracker"], gradients, self.vectors["gradient"], strict=True
            )
        ]
        self.vectors = {"tracker": tracked, "gradient": gradients}
        is_due = self.count_step()
        directions = [y.clone() for y in tracked]
        if is_due and self.order == "awc":
            self._exchange(tracked)
        result = self.step_along(directions)
        if is_due and self.order == "atc":
            self._exchange(tracked)
        self.rounds += is_due
        return result

    def members_changed(self) -> None:
        """Begins again with y = grad f(x): the sum of y is that of the gradients only if all ranks make all rounds."""
        for tracker, gradient in zip(self.vectors["tracker"], self.vectors["gradient"], strict=True):
            tracker.copy_(gradient)

    def _exchange(self, tracked: list[Tensor]) -> None:
        """Averages the parameters and the trackers in place, in one exchange."""
        self.mix([*self.values, *tracked], in_place=True)
