"""Push-sum SGD (SGP): exact averages on directed graphs."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from fogdist.topology.validation import check_choice
from fogdist.training.algorithm import AlgorithmOptions
from fogdist.training.mixing import Finish
from fogdist.training.overlapping import OverlappingAlgorithm
from fogdist.training.view import Models

PushSumOrder: TypeAlias = Literal["atc", "awc"]


class PushSumSGD(OverlappingAlgorithm):
    """Stochastic gradient push: push-sum of the parameters, with gradients at the estimated average.

    Each rank holds x and a weight p, at first 1; the model has z = x / p. With P column-stochastic in the
    usual notation, which means that each sender's shares sum to 1, and d(z) the optimizer's step with the gradient at z:

    - "atc": ``x+ = P (x + d(z)),  p+ = P p,  z+ = x+ / p+``. (Assran, Loizou, Ballas and Rabbat, "Stochastic Gradient Push for
      Distributed Deep Learning", ICML 2019, arXiv 1811.10792; push-sum is of Kempe, Dobra and Gehrke, FOCS 2003.)
    - "awc": ``x+ = P x + d(z)``, else the same; the exchange is hidden behind the forward and the backward pass. (As Nedic and
      Olshevsky's subgradient-push, IEEE Transactions on Automatic Control 60, 2015.)

    The mean of x is kept on any directed graph, where plain averages drift to a weighted mean. A rank gives equal shares to
    itself and to its out-neighbors of the round; with the attributes of a dynamic topology it gives `self_weight` and
    `dst_weights`, a dict, which together must sum to 1, and `src_weights` are 1. Weight decay acts on x, as
    in the paper's code.

    If ranks are lost and ``on_loss="continue"``, each rank that is left goes on from its z with a weight of 1. So the
    sum of the weights is the number of these ranks, and shares that were in flight, which some ranks may have taken and
    others not, count nowhere: the average goes on from the mean of what the ranks hold.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        order: "atc" or "awc".
        **options: As in `Algorithm`, without `compression`.

    Attributes:
        p: This rank's weight; a vector of all ranks' weights where one process holds them all.

    Raises:
        ValueError: `order` is none of them; and as `Algorithm`.
    """

    takes_compression: ClassVar[bool] = False  # the weight must travel exactly as the values do
    state_numbers: ClassVar[dict[str, float]] = {"p": 1.0}
    can_be_joined: ClassVar[bool] = True
    mean_weight: ClassVar[str | None] = "p"
    compared: ClassVar[tuple[str, ...]] = ("order",)

    order: PushSumOrder
    _is_biased: bool  # whether the buckets have x, and not z
    _shared: tuple[Finish, Tensor] | None  # the exchange in flight, and its p

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        order: PushSumOrder = "atc",
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        self.order = check_choice(order, "order", PushSumOrder)
        self._is_biased, self._shared = False, None
        super().__init__(optimizer, model, **options)
        if self.overlaps:
            self.watch_forward("with forward")

    @property
    def overlaps(self) -> bool:
        """See `OverlappingAlgorithm.overlaps`."""
        return self.order == "awc"

    @property
    def p(self) -> Any:
        """This rank's weight: 1 at first, and always where graphs are regular."""
        return self.numbers["p"]

    def advance(self) -> Any:
        """See `Algorithm.advance`. If it fails, the model has z again."""
        try:
            return super().advance()
        except BaseException:
            self._unbias()
            self.buckets.write_changes()
            raise

    def adapt(self) -> Any:
        """See the class."""
        self._bias()
        result = super().adapt()
        if self.overlaps or (self.steps + 1) % self.local_steps != 0:
            self._unbias()
        return result

    def combine(self) -> None:
        """See the class."""
        if self.is_alone:
            self._unbias()
            return
        self.begin()
        self.finish()

    def begin(self) -> None:
        """Sends the shares of x, which the buckets have until `finish`, and of p."""
        self._bias()
        # In double, whatever the parameters are: p is a product of all rounds.
        weight = torch.as_tensor(self.p, dtype=torch.float64, device="cpu").expand(self.context.held).clone()
        try:
            begun = self.mixing.begin_push([*self.values, weight], self.this_round(), in_place=True)
        except BaseException:
            self._forget_shares()
            raise
        self._shared = begun, weight

    def finish(self) -> None:
        """Takes the shares of the round."""
        assert self._shared is not None
        finish, weight = self._shared
        try:
            finish()
        except BaseException:
            self._forget_shares()
            raise
        self._shared = None
        self.numbers["p"] = float(weight) if self.context.held == 1 else weight
        self._is_biased = True
        self._unbias()

    def members_changed(self) -> None:
        """See `Algorithm.members_changed`, and the class."""
        self._unbias()
        self.numbers["p"] = 1.0
        if self._shared is not None:
            self._shared[1].fill_(1.0)

    def _forget_shares(self) -> None:
        """Gives up an exchange that failed. If a forward pass has begun it, the parameters still are z."""
        self._shared = None
        if self.overlaps:
            self._is_biased = False
            self.buckets.outdate()

    def _bias(self) -> None:
        if not self._is_biased:
            self._scale(self.p)
            self._is_biased = True

    def _unbias(self) -> None:
        if self._is_biased:
            self._scale(1 / self.p)
            self._is_biased = False

    def _scale(self, factor: Any) -> None:
        if isinstance(factor, Tensor):
            for x in self.values:
                x.view(len(factor), -1).mul_(factor.to(x).unsqueeze(1))
        elif factor != 1.0:
            torch._foreach_mul_(self.values, factor)
