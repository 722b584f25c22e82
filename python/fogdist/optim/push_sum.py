"""Stochastic gradient push: gradient steps on push-sum, for directed graphs and uneven speeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, cast

from torch.optim import Optimizer

from fogdist.buckets import BUCKET_CAP_MB
from fogdist.context import current
from fogdist.exchange import check_weight
from fogdist.optim.window_optimizer import WindowOptimizer, make
from fogdist.optim.wrapper import Models, setting
from fogdist.windows import Window

# What a rank keeps of p at least when ranks are not in step, as a part of its mean over about the last _MEMORY
# exchanges. A rank that is much faster than its neighbors would give away its mass again and again before anything
# comes, and as gradients are added to x, x / p would move by the step times 1 / p.
LEAST_PART = 0.5
_MEMORY = 100
# By how much shares may differ from adding up to 1: weights are often made in float32.
_TOLERANCE = 1e-6


def DistributedPushSumOptimizer(
    optimizer: Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    bucket_cap_mb: float = BUCKET_CAP_MB,
) -> PushSumOptimizer:
    """Returns an optimizer that averages by push-sum, which is exact on directed graphs.

    Each rank has biased parameters x and a weight p, of each bucket, at first 1. The model's parameters are
    z = x / p. At the end of a forward pass a rank gives shares of x and p to its out-neighbors, which
    add up with what it keeps to what it had; `step` collects what has come, x = kept + received, and makes
    the optimizer's own step on x with the gradient at z. (Assran, Loizou, Ballas and Rabbat, "Stochastic gradient
    push for distributed deep learning", ICML 2019; the step is after the exchange, which the backward
    pass hides, as in Nedic and Olshevsky's subgradient-push, IEEE Transactions on Automatic Control 60, 2015.)

    By default ranks exchange in step, as the papers have it. With ``force_barrier = False`` each goes at its own
    pace: the sums of x and p over all ranks stay as they are, so z goes to the average however uneven the speeds,
    but a faster rank's gradients count more often. A rank then gives away no more than leaves it half of the p
    that it had on average.

    If a neighbor is lost, what was on its way there is lost, of x and p alike, and `step` raises; set the weights
    so that nothing goes there any more.

    The other arguments, errors and all else are as of `DistributedWinPutOptimizer`. Between steps the windows hold
    z, and their own p is 1; see `push_sum_weights`.

    Returns:
        An instance of the optimizer's class with `step` as above, `synchronize`, `skip_synchronize`,
        `unregister_window`, `push_sum_weights` and the attributes `self_weight`, `dst_weights`, `force_barrier`.
    """
    made = make(PushSumOptimizer, optimizer, model, num_steps_per_communication, window_prefix, bucket_cap_mb)
    return cast("PushSumOptimizer", made)


class PushSumOptimizer(WindowOptimizer):
    """See `DistributedPushSumOptimizer`, which makes it.

    Attributes:
        self_weight: The share that this rank keeps; by default 1 / (number of out-neighbors + 1).
        dst_weights: {out-neighbor: share}, by default the same for each. Set both before an iteration for a
            dynamic topology; they add up to 1.
        force_barrier: As in `WindowOptimizer`, but True by default.
    """

    _public: ClassVar[frozenset[str]] = frozenset({"self_weight", "dst_weights", "force_barrier"})
    _kind: ClassVar[str] = "push_sum"
    _zero_init: ClassVar[bool] = True

    force_barrier: bool = setting(True)
    self_weight: float
    dst_weights: Mapping[int, float]
    _fog_p: dict[Window, float]
    _fog_mean_p: dict[Window, float]
    _fog_biased: set[Window]

    def push_sum_weights(self) -> list[float]:
        """Returns p of each bucket. Over all ranks, and what is on its way, they add up to the number of ranks."""
        return list(self._fog_p.values())

    def _fog_start(self, is_alone: bool) -> None:
        neighbors = current().topology.out_neighbors
        share = 1.0 / (len(neighbors) + 1)
        self.self_weight = share
        self.dst_weights = dict.fromkeys(neighbors, share)
        self._fog_p = {}
        self._fog_mean_p = {}
        self._fog_biased = set()
        super()._fog_start(is_alone)

    def _fog_adopt(self, window: Window) -> None:
        self._fog_p[window] = self._fog_mean_p[window] = 1.0

    def _fog_shares(self, p: float, mean_p: float) -> tuple[float, dict[int, float]]:
        """What is kept and what is given away of a bucket with weight `p`, as fractions of it.

        Args:
            p: Of the bucket.
            mean_p: What it was on average.

        Raises:
            TypeError: `dst_weights` is no dict, or a weight not a real number.
            ValueError: A weight is negative or not finite, nothing is kept, or they do not add up to 1.
        """
        kept = check_weight(self.self_weight, "self_weight")
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
        if not self.force_barrier and kept < 1.0 and kept * p < LEAST_PART * mean_p:
            before, kept = kept, min(1.0, LEAST_PART * mean_p / p)
            given = {rank: weight * (1.0 - kept) / (1.0 - before) for rank, weight in given.items()}
        return kept, {rank: weight for rank, weight in given.items() if weight > 0.0}

    def _fog_send(self, window: Window) -> int:
        # The window holds z with a p of 1, so x = p z is sent by weights of p times the shares. What autograd
        # saved for the backward pass, the parameters among it, stays as it is.
        p = self._fog_p[window]
        kept, given = self._fog_shares(p, self._fog_mean_p[window])
        handle = window.accumulate_nonblocking(
            window.tensor,
            dst_weights={rank: weight * p for rank, weight in given.items()},
            with_p=True,
        )
        self._fog_p[window] = kept * p
        return handle

    def _fog_combine(self, window: Window) -> None:
        window.update(
            self_weight=self._fog_p[window],
            neighbor_weights=dict.fromkeys(window.in_neighbors, 1.0),
            reset=True,
            with_p=True,
        )
        self._fog_p[window], window.p = window.p, 1.0
        self._fog_mean_p[window] += (self._fog_p[window] - self._fog_mean_p[window]) / _MEMORY
        self._fog_biased.add(window)

    def _fog_stepping(self) -> AbstractContextManager[None]:
        return self._fog_on_biased()

    @contextmanager
    def _fog_on_biased(self) -> Iterator[None]:
        """Inside, parameters are x; afterwards they are z."""
        for buckets in self._fog_each():
            buckets.flats.rehome()
            for window in buckets.windows:
                if window not in self._fog_biased:
                    self._fog_biased.add(window)
                    _scale(window, self._fog_p[window])
        try:
            yield
        finally:
            for buckets in self._fog_each():
                buckets.flats.rehome()  # an optimizer may have replaced data, too
                for window in buckets.windows:
                    self._fog_biased.discard(window)
                    _scale(window, 1.0 / self._fog_p[window])


def _scale(window: Window, factor: float) -> None:
    if factor != 1.0:
        window.put(window.tensor, self_weight=factor, dst_weights={})
