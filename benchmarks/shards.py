"""Samples divided among ranks: alike, by label, or in proportions drawn from a Dirichlet distribution."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor


class Shards:
    """Gives each rank equally many samples of its own, and batches of them.

    Each rank goes through its samples in a new random order, again and again; with fewer samples than a batch needs, a
    batch has some several times.

    Args:
        inputs: Of shape (samples, ...).
        labels: Integers from 0 on, of shape (samples,).
        ranks: Number of ranks, at most as many as samples.
        batch: Samples of a rank in a step.
        split: "iid": any samples. "sorted": samples in the order of their labels, so that a rank has one label or few.
            A number: each rank draws its labels' proportions from a Dirichlet distribution with this concentration, as
            far as samples of these labels are left; 0.1 is far from alike, 10 is close.
        seed: Of all draws.

    Attributes:
        owned: The samples of each rank, of shape (ranks, samples // ranks).
    """

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        ranks: int,
        batch: int,
        split: Literal["iid", "sorted"] | float = "iid",
        seed: int = 0,
    ) -> None:
        self._inputs, self._labels, self._batch = inputs, labels, batch
        self._seed = seed
        random = np.random.default_rng([seed, 0])
        order = random.permutation(len(labels))
        share = len(labels) // ranks
        if split == "sorted":
            order = order[np.argsort(labels.cpu().numpy()[order], kind="stable")]
            # Those that are left over belong to no label in particular.
            order = np.delete(order, random.choice(len(order), len(order) - share * ranks, replace=False))
        elif not isinstance(split, str):
            order = _skewed(labels.cpu().numpy()[order], order, ranks, share, split, random)
        self.owned = torch.from_numpy(order[: share * ranks].reshape(ranks, share).copy())
        self._epoch = -1
        self._permuted = self.owned

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs and labels of a step, of shape (ranks, batch, ...) and (ranks, batch)."""
        share = self.owned.shape[1]
        places = [divmod(step * self._batch + i, share) for i in range(self._batch)]
        columns = [self._order(epoch)[:, place] for epoch, place in places]
        chosen = torch.stack(columns, dim=1)
        return self._inputs[chosen], self._labels[chosen]

    def _order(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            random = np.random.default_rng([self._seed, 1, epoch])
            self._permuted = torch.from_numpy(random.permuted(self.owned.numpy(), axis=1))
            self._epoch = epoch
        return self._permuted


def _skewed(
    labels: np.ndarray,
    samples: np.ndarray,
    ranks: int,
    share: int,
    concentration: float,
    random: np.random.Generator,
) -> np.ndarray:
    """Returns samples rank after rank, each rank's labels in proportions of its own."""
    pools = [list(samples[labels == label]) for label in range(int(labels.max()) + 1)]
    chosen: list[int] = []
    for _ in range(ranks):
        wanted = random.multinomial(share, random.dirichlet([concentration] * len(pools)))
        taken: list[int] = []
        for pool, count in zip(pools, wanted):
            taken += [pool.pop() for _ in range(min(count, len(pool)))]
        while len(taken) < share:
            left = np.array([len(pool) for pool in pools], dtype=float)
            taken.append(pools[random.choice(len(pools), p=left / left.sum())].pop())
        chosen += taken
    return np.array(chosen)
