"""Push-sum SGD (SGP): exact averages on directed graphs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fogdist.algorithms.frame import Algorithm


class PushSumSGD(Algorithm):
    """Stochastic gradient push: push-sum of the parameters, gradients at what they stand for.

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

    The arguments are those of `Algorithm`.

    Attributes:
        p: This rank's weight.
    """

    _public: ClassVar[frozenset[str]] = Algorithm._public | {"p"}
    _fog_numbers: ClassVar[dict[str, float]] = {"p": 1.0}

    @property
    def p(self) -> float:
        """This rank's weight: 1 at first, and always where graphs are regular."""
        return self._fog_numbers_now["p"]

    def _fog_adapt(self) -> Any:
        p = self.p
        if p != 1.0:
            self._fog_scale(p)
        result = super()._fog_adapt()
        if p != 1.0 and (self._fog_step_count + 1) % self._fog_local_steps != 0:
            self._fog_scale(1 / p)
        return result

    def _fog_scale(self, factor: float) -> None:
        for x in self._fog_flats.values:
            x.mul_(factor)

    def _fog_combine(self) -> None:
        if self._fog_is_alone:
            return
        # In double, whatever the parameters are: p is a product of all rounds.
        weight = torch.tensor([self.p], dtype=torch.float64, device="cpu")
        self._fog_mixing.start_push(
            [*self._fog_flats.values, weight],
            self._fog_rounds,
            self._fog_weights(),
            self._fog_name,
            in_place=True,
        )()
        self._fog_numbers_now["p"] = float(weight)
        self._fog_scale(1 / float(weight))
