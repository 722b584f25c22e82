"""SparseLoCo and its gossip variant: DiLoCo with messages of a few percent of the elements, in two bits each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from fogdist.compression import TopK
from fogdist.context import current
from fogdist.topology import Topology
from fogdist.training.algorithm import check_factor
from fogdist.training.fragments import Arrive, FragmentedAlgorithm, FragmentOptions
from fogdist.training.replicas import ReplicaAlgorithm
from fogdist.training.view import Models


class SparseLoCo(FragmentedAlgorithm, ReplicaAlgorithm):
    """SparseLoCo: H local steps, then a step along the mean of their compressed changes, with error feedback.

    Let a be the parameters before the H local steps and D = x - a their change. With the codec C, the error e, at first 0,
    and h, the replica that a rank and its neighbors have of what it has sent in all rounds, at first the parameters::

        m  = error_decay e + outer_lr D + gamma (W h - h)
        h+ = h + C(m)
        e+ = m - C(m)
        a+ = x+ = a + W h+ - W h

    If W is the exact average, which is the default, gamma is left out, and this is SparseLoCo: ``a+ = a`` plus the mean of
    all C(m), the same on all ranks up to the last bit (Sarfi, Thérien, Lidin and Belilovsky, "Communication Efficient LLM
    Pre-training with SparseLoCo", 2025, arXiv 2508.15706, where a chunk's largest elements are sent; `TopK` sends those of
    all parameters of a dtype in a fragment). h becomes ``W h+`` then, which all ranks know, because changes that cancel out
    in the mean would add up in it. Error feedback takes the place of DiLoCo's outer momentum. Each rank sends its message to all others.

    With another W the ranks gossip: a is ``W h``, and h + e follows CHOCO-SGD (Koloskova, Stich and
    Jaggi, ICML 2019): ranks come together however much C loses, if gamma is small. With a codec that loses nothing and a
    gamma of 1 it is `DiLoCo` by gossip, without its momentum. `fogdist.training.ReplicaAlgorithm` tells when ranks exchange uncompressed.

    Args:
        optimizer: The inner optimizer, as in `DiLoCo`.
        model: As in `Algorithm`.
        compression: A codec of `fogdist.compression`, by default ``TopK(0.02, bits=2)``.
        outer_lr: More than 0; 1 in the paper.
        error_decay: The share of the error that is kept, from 0 to 1. With 1 nothing is lost, and the mean of all ranks
            moves by the mean of all D.
        gamma: More than 0, at most 1. Ranks come nearer to each other with a larger one, and go past each other with one
            that is too large for what the codec loses: with the default codec, 0.1 to 0.2 was best on a ring of 8 ranks.
            docs/compression.md has the limits.
        **options: As in `FragmentedAlgorithm`. `local_steps` is 100 by default. `topology` must be a graph, or a
            topology that is the same in all rounds; None is the complete graph with equal weights, ``Neighbors()`` the group's topology.

    Raises:
        TypeError: As `FragmentedAlgorithm`; `compression` is no codec.
        ValueError: As `FragmentedAlgorithm`; a number is out of its range, the codec or the mixing does not fit.
    """

    state_vectors: ClassVar[tuple[str, ...]] = (*ReplicaAlgorithm.state_vectors, "error")

    compared: ClassVar[tuple[str, ...]] = (
        *FragmentedAlgorithm.compared,
        *ReplicaAlgorithm.compared,
        "outer_lr",
        "error_decay",
    )

    outer_lr: float
    error_decay: float

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        outer_lr: float = 1.0,
        error_decay: float = 0.95,
        gamma: float = 0.1,
        **options: Unpack[FragmentOptions],
    ) -> None:
        self.outer_lr = check_factor(outer_lr, "outer_lr", positive=True)
        self.error_decay = check_factor(error_decay, "error_decay")
        if self.error_decay > 1.0:
            raise ValueError(f"error_decay must be at most 1, got {error_decay}")
        if options.get("topology") is None:
            options["topology"] = _complete(current(options.get("group")).size)
        options.setdefault("local_steps", 100)
        if options.get("compression") is None:
            options["compression"] = TopK(0.02, bits=2)
        super().__init__(optimizer, model, gamma=gamma, **options)

    def places_of(self, fragment: int) -> list[int]:
        """See `FragmentedAlgorithm.places_of`. Replicas that are stale begin anew all at once."""
        self.compare_replicas()
        if self.are_stale(self.context):
            return list(range(len(self.buckets.flats)))
        return super().places_of(fragment)

    def begin(self, places: Sequence[int]) -> Arrive:
        """See the class."""
        replicas, pulls, errors = (self.vectors[name] for name in self.state_vectors)
        share = 0.0 if self._averages_exactly(self.context) else self.gamma
        targets = []
        for place in places:
            x, h, p = self.buckets.flats[place], replicas[place], pulls[place]
            change = x.sub(h.add(p).to(x.dtype))  # from W h, as x was rounded, if it has 16 bits
            sent = h.add(errors[place], alpha=self.error_decay).add_(change, alpha=self.outer_lr)
            targets.append(sent.add_(p, alpha=share))
        finish = self.begin_following(targets, places, merges=True)

        def arrive() -> list[Tensor] | None:
            full = finish()
            if full is None:
                return None
            outer = []
            for place, target, pull in zip(places, targets, full, strict=True):
                after = replicas[place].add(pulls[place])
                # What this rank's replica lacks, before it is merged.
                errors[place] = target.sub_(after.sub(pull))
                # What is not finite, and was not sent, stays so on this rank.
                outer.append(after.add_(target, alpha=0.0).to(self.buckets.flats[place].dtype))
            return outer

        return arrive

    def members_changed(self) -> None:
        """See `ReplicaAlgorithm.members_changed`; the sum of replica and pull stays, from which the change is counted."""
        pulls = self.vectors["replica_pull"]
        kept = [pull.clone() for pull in pulls]
        super().members_changed()
        for pull, value in zip(pulls, kept, strict=True):
            pull.copy_(value)


def _complete(size: int) -> Topology:
    """Returns the exact average, which it also is of the ranks that are left after a loss."""
    return Topology("complete", [np.full((size, size), 1 / size)], resized=_complete)
