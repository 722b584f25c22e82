"""Push-sum SGD (SGP): exact averages on directed graphs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fogdist.training.algorithm import Algorithm


class PushSumSGD(Algorithm):
    """Stochastic gradient push: push-sum of the parameters, with gradients at the estimated average.

    Each rank holds x and a weight p, at first 1; the model has z = x / p. With P column-stochastic in the
    usual notation, which means that each sender's shares sum to 1::

        x' = x + d(z)        the optimizer's step, with the gradient at z
        x+ = P x',  p+ = P p,  z+ = x+ / p+

    (Assran, Loizou, Ballas and Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
    arXiv 1811.10792; push-sum is of Kempe, Dobra and Gehrke, FOCS 2003.) The mean of x is kept on any
    directed graph, where plain averages drift to a weighted mean. A rank gives equal shares to itself and to
    its out-neighbors of the round; with the attributes of a dynamic topology it gives `self_weight` and
    `dst_weights`, a dict, which together must sum to 1, and `src_weights` are 1. Weight decay acts on x, as
    in the paper's code.

    If ranks are lost and ``on_loss="continue"``, each rank that is left goes on from its z with a weight of 1. So the
    sum of the weights is the number of these ranks, and shares that were in flight, which some ranks may have taken and
    others not, count nowhere: the average goes on from the mean of what the ranks hold.

    The arguments are those of `Algorithm`.

    Attributes:
        p: This rank's weight; a vector of all ranks' weights where one process holds them all.
    """

    takes_compression: ClassVar[bool] = False  # the weight must travel exactly as the values do
    state_numbers: ClassVar[dict[str, float]] = {"p": 1.0}
    can_be_joined: ClassVar[bool] = True
    mean_weight: ClassVar[str | None] = "p"

    _is_biased: bool = False
    _shared: Tensor | None = None  # p of the exchange in flight

    @property
    def p(self) -> Any:
        """This rank's weight: 1 at first, and always where graphs are regular."""
        return self.numbers["p"]

    def advance(self) -> Any:
        """See `Algorithm.advance`. If it fails, the model has z again."""
        p, self._is_biased = self.p, False
        try:
            return super().advance()
        except BaseException:
            if self._is_biased:
                self._scale(1 / p)
                self.buckets.write_changes()
            raise

    def adapt(self) -> Any:
        """See the class."""
        p = self.p
        is_weighted = isinstance(p, Tensor) or p != 1.0
        if is_weighted:
            self._scale(p)
            self._is_biased = True
        result = super().adapt()
        if is_weighted and (self.steps + 1) % self.local_steps != 0:
            self._scale(1 / p)
            self._is_biased = False
        return result

    def members_changed(self) -> None:
        """See `Algorithm.members_changed`, and the class."""
        if self._is_biased:
            self._scale(1 / self.p)
            self._is_biased = False
        self.numbers["p"] = 1.0
        if self._shared is not None:
            self._shared.fill_(1.0)

    def _scale(self, factor: Any) -> None:
        for x in self.values:
            if isinstance(factor, Tensor):
                x.view(len(factor), -1).mul_(factor.to(x).unsqueeze(1))
            else:
                x.mul_(factor)

    def combine(self) -> None:
        """See the class."""
        if self.is_alone:
            return
        # In double, whatever the parameters are: p is a product of all rounds.
        held = self.context.held
        self._shared = weight = (
            torch.as_tensor(self.p, dtype=torch.float64, device="cpu").expand(held).clone()
        )
        try:
            self.mixing.begin_push([*self.values, weight], self.this_round(), in_place=True)()
        finally:
            self._shared = None
        self.numbers["p"] = float(weight) if held == 1 else weight
        self._is_biased = False
        self._scale(1 / self.p)
