"""Push-sum over windows: stochastic gradient push for directed graphs and uneven speeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.exchange import check_weight
from fogdist.training.view import setting
from fogdist.training.window_algorithm import WindowAlgorithm
from fogdist.windows import Window

# The least part of p that a rank keeps if ranks are not in step, relative to the mean of p over about the last _MEMORY
# exchanges. Otherwise a rank that is much faster than its neighbors would give away its mass repeatedly before it
# receives any. Gradients are added to x, so x / p would then move by the step times 1 / p.
LEAST_PART = 0.5
_MEMORY = 100
# The tolerance for the sum of the shares, because weights are often computed in float32.
_TOLERANCE = 1e-6
# The same for weights p that are equal but for rounding.
_ROUNDING = 1e-9


class WindowPushSum(WindowAlgorithm):
    """Stochastic gradient push over windows: averages that are exact on directed graphs, at uneven speeds too.

    Each rank has biased parameters x and, for each bucket, a weight p that starts at 1. The model's parameters are
    z = x / p. At the end of a forward pass a rank sends shares of x and p to its out-neighbors; these shares and the
    one that it keeps add up to the whole. `step` collects the received shares, x = kept + received, and makes the
    optimizer's own step on x with the gradient at z. (Assran, Loizou, Ballas and Rabbat, "Stochastic gradient
    push for distributed deep learning", ICML 2019; the step comes after the exchange, which the backward
    pass hides, as in Nedic and Olshevsky's subgradient-push, IEEE Transactions on Automatic Control 60, 2015.)

    By default ranks exchange synchronously, as in the papers. With ``force_barrier = False`` each rank goes at its own
    pace: the sums of x and p over all ranks do not change, so z converges to the average at any speeds, but the
    gradients of a faster rank count more often. A rank then sends at most as much as leaves it half of its average p.

    If a neighbor is lost, the shares on their way to it are lost, of x and of p, and `step` raises. Set the weights so
    that no shares are sent to it any more.

    `state_dict` has p, so that training goes on with the mass that there was (`fogdist.checkpoint`).

    The arguments are those of `WindowAlgorithm`. Between steps the windows hold z, and their own p is 1; see
    `push_sum_weights`.

    Attributes:
        self_weight: The share that this rank keeps; by default 1 / (number of out-neighbors + 1).
        dst_weights: {out-neighbor: share}, by default the same for each. Set both before an iteration for a
            dynamic topology; they add up to 1.
        force_barrier: As in `WindowAlgorithm`, but True by default.
    """

    own_weights: ClassVar[tuple[str, ...]] = ("self_weight", "dst_weights")
    saves_state: ClassVar[bool] = True
    state_pieces: ClassVar[tuple[str, ...]] = ("push_sum",)

    force_barrier: bool = setting(True)
    # By the windows' names, which are the same in each epoch.
    _p: dict[str, float]
    _mean_p: dict[str, float]
    _before: dict[str, float]  # p before the shares of the round were sent, until those of others are taken
    _biased: set[str]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if options.get("topology") is not None:
            raise ValueError(
                f"topology must be None for {self.algorithm_name}, whose windows follow the group's: set_topology"
            )
        self._p, self._mean_p, self._before, self._biased = {}, {}, {}, set()
        super().__init__(*arguments, **options)
        self._p, self._mean_p = ({window.name: 1.0 for window in self.windows} for _ in range(2))
        neighbors = self.context.topology.out_neighbors
        share = 1.0 / (len(neighbors) + 1)
        self.self_weight = share
        self.dst_weights = dict.fromkeys(neighbors, share)

    def push_sum_weights(self) -> list[float]:
        """Returns p of each bucket. Over all ranks, with shares on their way, they add up to the number of ranks."""
        return list(self._p.values())

    def mean_weights(self) -> dict[Tensor, float]:
        """See `Algorithm.mean_weights`: the p of their buckets."""
        return {parameter: self._before.get(name, self._p[name]) for name, parameter in self._named()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`. The state has p, but no shares on their way: call `settle` before you save it.

        A state that is saved within a round is that of before the round, as the parameters are. All ranks load the state of
        one step, between two steps, and their parameters too.

        Raises:
            ValueError: As `Algorithm`; or the buckets are not those of the ranks that saved it, and p differs within one.
        """
        super().load_state_dict(state_dict)
        loaded, self._loaded = self._loaded.get("push_sum", {}), {}
        found: dict[str, list[list[float]]] = {}
        for name, parameter in self._named():
            if parameter in loaded:
                found.setdefault(name, []).append(loaded[parameter].tolist())
        for name, pairs in found.items():
            weights = [p for p, _ in pairs]
            if max(weights) - min(weights) > _ROUNDING * max(weights):
                raise ValueError(
                    f"bucket_cap_mb must be as when the state was saved: parameters of {name} have weights from "
                    f"{min(weights)} to {max(weights)}"
                )
        for name in self._p:
            self._p[name], self._mean_p[name] = found[name][0] if name in found else (1.0, 1.0)
        self._before = {}

    def _shares(self, p: float, mean_p: float) -> tuple[float, dict[int, float]]:
        """Returns the fractions of a bucket with weight `p` that the rank keeps and sends.

        Args:
            p: The bucket's weight.
            mean_p: The recent mean of p.

        Raises:
            TypeError: `dst_weights` is not a dict, or a weight is not a real number.
            ValueError: A weight is negative or not finite, nothing is kept, or they do not add up to 1.
        """
        kept = check_weight(cast("float", self.self_weight), "self_weight")
        if not isinstance(self.dst_weights, Mapping):
            raise TypeError(
                f"dst_weights must be a dict of ranks to shares, got {type(self.dst_weights).__name__}"
            )
        given = {r: check_weight(w, f"dst_weights[{r}]") for r, w in self.dst_weights.items()}
        if kept <= 0.0 or any(weight < 0.0 for weight in given.values()):
            raise ValueError(
                f"self_weight must be above 0 and dst_weights not below, got {kept} and {dict(given)}"
            )
        total = math.fsum([kept, *given.values()])
        if abs(total - 1.0) > _TOLERANCE:
            raise ValueError(
                f"self_weight and dst_weights must add up to 1, got {kept} and {dict(given)}, in all {total}"
            )
        # A rank that is ahead of others does not give all away.
        if not self.force_barrier and kept < 1.0 and kept * p < LEAST_PART * mean_p:
            before, kept = kept, min(1.0, LEAST_PART * mean_p / p)
            given = {rank: weight * (1.0 - kept) / (1.0 - before) for rank, weight in given.items()}
        return kept, {rank: weight for rank, weight in given.items() if weight > 0.0}

    def settle(self) -> None:
        """See `Algorithm.settle`: takes the shares that are on their way. Collective."""
        self.synchronize()
        if self._pace is None:
            return
        self.await_all()  # all shares have arrived
        with torch.no_grad():
            self.buckets.load()
            self.buckets.values()  # which `take` changes
            for window in self.windows:
                self.take(window)
            with self.stepping():
                pass
            self.buckets.write_changes()

    def check_weights(self) -> None:
        """See `WindowAlgorithm.check_weights`."""
        for window in self.windows:
            self._shares(self._p[window.name], self._mean_p[window.name])

    def send(self, window: Window) -> dist.Work:
        """See the class."""
        # The window holds z with a p of 1, so weights of p times the shares send x = p z. This does not change the
        # parameters, which autograd may have saved for the backward pass.
        p = self._p[window.name]
        kept, given = self._shares(p, self._mean_p[window.name])
        work = window.accumulate(
            window.tensor,
            async_op=True,
            dst_weights={rank: weight * p for rank, weight in given.items()},
            with_p=True,
        )
        self._before[window.name] = p
        self._p[window.name] = kept * p
        return work

    def take(self, window: Window) -> None:
        """See the class."""
        name = window.name
        window.update(
            self_weight=self._p[name],
            neighbor_weights=dict.fromkeys(window.in_neighbors, 1.0),
            reset=True,
            with_p=True,
        )
        self._p[name], window.p = window.p, 1.0
        self._before.pop(name, None)
        self._mean_p[name] += (self._p[name] - self._mean_p[name]) / _MEMORY
        self._biased.add(name)

    def stepping(self) -> AbstractContextManager[None]:
        """Sets the parameters to x within the block and to z afterwards."""
        return self._on_biased()

    def _pieces(self) -> dict[str, dict[Tensor, Tensor]]:
        pieces = {
            parameter: torch.tensor(
                [self._before.get(name, self._p[name]), self._mean_p[name]], dtype=torch.float64, device="cpu"
            )
            for name, parameter in self._named()
        }
        return {"push_sum": pieces} if pieces else {}

    def _named(self) -> list[tuple[str, Tensor]]:
        """Returns the parameters with the names of their windows, also after these were freed."""
        if not self._p:
            return []
        return [
            (f"{self._prefix}.{number}", parameter)
            for number in range(len(self.buckets.flats))
            for parameter in self.buckets.tensors_of(number)
        ]

    @contextmanager
    def _on_biased(self) -> Iterator[None]:
        self.buckets.values()  # which `_scale` changes
        windows = self.windows if self._pace is not None else []  # empty after the windows were freed
        for window in windows:
            if window.name not in self._biased:
                self._biased.add(window.name)
                _scale(window, self._p[window.name])
        try:
            yield
        finally:
            self.buckets.values()
            for window in windows:
                self._biased.discard(window.name)
                _scale(window, 1.0 / self._p[window.name])


def _scale(window: Window, factor: float) -> None:
    if factor != 1.0:
        window.put(window.tensor, self_weight=factor, dst_weights={})
