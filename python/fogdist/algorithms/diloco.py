"""DiLoCo and its relatives that gossip: many local steps, then an outer optimizer over what they did."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fogdist.algorithms.frame import Algorithm, check_factor
from fogdist.algorithms.mixing import AllRanks, MixingLike
from fogdist.context import current
from fogdist.optim.wrapper import Models
from fogdist.topology import random_matching


class DiLoCo(Algorithm):
    """DiLoCo: H local steps, then a Nesterov step along the average of what they did.

    With a the parameters before the H local steps and D = x - a what they changed::

        v  = W (a + outer_lr D)
        a+ = x+ = v + outer_momentum (v - v-),    at first v- = a

    If W is the exact average, which is the default, this is DiLoCo: SGD with Nesterov momentum, outer_lr and
    outer_momentum along the mean of all -D (Douillard et al., "DiLoCo: Distributed Low-Communication Training
    of Language Models", 2023, arXiv 2311.08105; the form of Nesterov's own paper, which gives the numbers of
    ``torch.optim.SGD(nesterov=True)``). With a topology as `mixing` it gossips, with momentum of the
    averages; `GASLoC` and `NoLoCo` are two published ways to do that. For ranks to agree, eigenvalues of W
    must be above -1 / (1 + 2 outer_momentum).

    The inner optimizer is AdamW in the paper; any serves, and its state stays local.

    Args:
        optimizer: The inner optimizer, as in `Algorithm`.
        model: As in `Algorithm`.
        local_steps: H; 500 in the paper.
        outer_lr: More than 0.
        outer_momentum: Below 1.
        mixing: As in `Algorithm`; by default `AllRanks()`.

    Raises:
        ValueError: As `Algorithm`.
    """

    _fog_buffers: ClassVar[tuple[str, ...]] = ("anchor", "previous")

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        local_steps: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        mixing: MixingLike = None,
    ) -> None:
        self._fog_begin_outer(optimizer, mixing, local_steps, outer_lr, outer_momentum)

    def _fog_begin_outer(
        self,
        optimizer: Optimizer,
        mixing: MixingLike,
        local_steps: int,
        outer_lr: float,
        outer_momentum: float,
        **options: float,
    ) -> None:
        self._fog_outer_lr = check_factor(outer_lr, "outer_lr", positive=True)
        self._fog_outer_momentum = check_factor(outer_momentum, "outer_momentum", below=1.0)
        options |= {"outer_lr": self._fog_outer_lr, "outer_momentum": self._fog_outer_momentum}
        chosen = self._fog_default_mixing() if mixing is None else mixing
        self._fog_begin(optimizer, chosen, local_steps, **options)

    def _fog_default_mixing(self) -> MixingLike:
        return AllRanks()

    def _fog_initial(self, name: str) -> list[Tensor]:
        return self._fog_flats.copies()

    def _fog_targets(self) -> list[Tensor]:
        """Where outer_lr of the way that the local steps went leads: a + outer_lr D."""
        return [
            anchor.lerp(x, self._fog_outer_lr)
            for anchor, x in zip(self._fog_state["anchor"], self._fog_flats.values, strict=True)
        ]

    def _fog_combine(self) -> None:
        mixed = self._fog_average(self._fog_targets(), in_place=True)
        self._fog_accelerate(mixed, mixed)

    def _fog_accelerate(self, mixed: list[Tensor], targets: list[Tensor]) -> None:
        """Goes to `mixed` and on along what `targets` have changed since the last round."""
        anchors = self._fog_state[
            "previous"
        ]  # their memory is free after this: new memory costs more than the sums
        for x, v, target, before in zip(self._fog_flats.values, mixed, targets, anchors, strict=True):
            torch.sub(v, before.sub_(target), alpha=self._fog_outer_momentum, out=x)
            before.copy_(x)
        self._fog_state = {"anchor": anchors, "previous": targets}


class GASLoC(DiLoCo):
    """GASLoC: DiLoCo's outer step with gossip, and momentum of each rank's own outer iterates.

    As `DiLoCo`, but the momentum is of what is proposed before averaging::

        v  = a + outer_lr D
        a+ = x+ = W v + outer_momentum (v - v-),    at first v- = a

    (Cagnasso, Belilovsky and Oyallon, "Unifying Local Communications and Local Updates for LLM Pretraining",
    2026, arXiv 2606.11081, where W = I - alpha Laplacian.) The momentum makes gossip depend on the square
    root of 1 / gap, for any symmetric W. The mean of all ranks moves as DiLoCo's does where gradients are
    those at the mean; if W is the exact average and ranks should stay together exactly, take `DiLoCo`. Random
    pairs (`fogdist.topology.random_matching`) are what the paper recommends.

    Args:
        optimizer: As in `DiLoCo`.
        model: As in `DiLoCo`.
        local_steps: As in `DiLoCo`.
        outer_lr: As in `DiLoCo`.
        outer_momentum: As in `DiLoCo`.
        mixing: As in `Algorithm`; by default `random_matching` of all ranks.

    Raises:
        ValueError: As `Algorithm`.
    """

    def _fog_default_mixing(self) -> MixingLike:
        return random_matching(current().size)

    def _fog_combine(self) -> None:
        targets = self._fog_targets()
        self._fog_accelerate(self._fog_average(targets), targets)


class NoLoCo(DiLoCo):
    """NoLoCo: H local steps, then a momentum step with the averages of a random pair.

    With a the parameters before the H local steps, D = x - a, and m at first 0::

        m+ = outer_momentum m + outer_lr W D + consensus (W a - a)
        a+ = x+ = a + m+

    (Kolehmainen, Blagoev, Donaghy, Ersoy and Nies, "NoLoCo: No-all-reduce Low Communication Training Method
    for Large Models", 2025, arXiv 2506.10911.) W averages random pairs, drawn anew in each round; a and D
    travel in one exchange. If W is the exact average it is DiLoCo with heavy-ball momentum.

    Args:
        optimizer: As in `DiLoCo`.
        model: As in `DiLoCo`.
        local_steps: As in `DiLoCo`.
        outer_lr: More than 0.
        outer_momentum: Below 1.
        consensus: How fast partners come together, more than 0; for pairs, between `outer_momentum` and
            ``sqrt(2 + outer_momentum ** 2)``.
        mixing: As in `Algorithm`; by default `random_matching` of all ranks.

    Raises:
        ValueError: As `Algorithm`.
    """

    _fog_buffers: ClassVar[tuple[str, ...]] = ("anchor", "outer_momentum")

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        local_steps: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        consensus: float = 0.7,
        mixing: MixingLike = None,
    ) -> None:
        self._fog_consensus = check_factor(consensus, "consensus", positive=True)
        self._fog_begin_outer(
            optimizer, mixing, local_steps, outer_lr, outer_momentum, consensus=self._fog_consensus
        )

    def _fog_default_mixing(self) -> MixingLike:
        return random_matching(current().size)

    def _fog_initial(self, name: str) -> list[Tensor]:
        return self._fog_flats.copies() if name == "anchor" else self._fog_flats.zeros()

    def _fog_combine(self) -> None:
        anchors, momenta = self._fog_state["anchor"], self._fog_state["outer_momentum"]
        changes = [x.sub(anchor) for x, anchor in zip(self._fog_flats.values, anchors, strict=True)]
        mixed = self._fog_average([*changes, *anchors])
        mean_changes, mean_anchors = mixed[: len(changes)], mixed[len(changes) :]
        for anchor, momentum, change, mean in zip(anchors, momenta, mean_changes, mean_anchors, strict=True):
            momentum.mul_(self._fog_outer_momentum).add_(change, alpha=self._fog_outer_lr)
            momentum.add_(mean.sub_(anchor), alpha=self._fog_consensus)
            anchor.add_(momentum)
        self._fog_flats.write(anchors)
