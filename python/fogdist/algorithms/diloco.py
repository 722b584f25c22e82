"""DiLoCo and its gossip variants: many local steps, then a step of an outer optimizer along their changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from fogdist.context import current
from fogdist.topology import random_matching
from fogdist.training.algorithm import check_factor
from fogdist.training.fragments import Arrive, FragmentedAlgorithm, FragmentOptions
from fogdist.training.mixing import GlobalAverage, MixingLike
from fogdist.training.view import Models


class DiLoCo(FragmentedAlgorithm):
    """DiLoCo: H local steps, then a Nesterov step along the average of their changes.

    Let a be the parameters before the H local steps and D = x - a their change::

        v  = W (a + outer_lr D)
        a+ = x+ = v + outer_momentum (v - v-),    at first v- = a

    If W is the exact average, which is the default, this is DiLoCo: SGD with Nesterov momentum, outer_lr and
    outer_momentum along the mean of all -D (Douillard et al., "DiLoCo: Distributed Low-Communication Training
    of Language Models", 2023, arXiv 2311.08105; the form of Nesterov's own paper, which gives the numbers of
    ``torch.optim.SGD(nesterov=True)``). With a `topology` it gossips, with momentum of the
    averages; `GASLoC` is a published way to do that. For ranks to agree, eigenvalues of W
    must be above -1 / (1 + 2 outer_momentum).

    The inner optimizer is AdamW in the paper. Any optimizer is allowed, and its state stays local.

    With `fragments` and `delay` it is Streaming DiLoCo: `fogdist.training.FragmentedAlgorithm`.

    Args:
        optimizer: The inner optimizer, as in `Algorithm`.
        model: As in `Algorithm`.
        outer_lr: More than 0.
        outer_momentum: Below 1.
        **options: As in `FragmentedAlgorithm`. `local_steps` is H, 100 by default; 500 in the paper. `topology` is
            `GlobalAverage()` by default.

    Raises:
        ValueError: As `FragmentedAlgorithm`.
    """

    state_vectors: ClassVar[tuple[str, ...]] = ("anchor", "previous")
    can_be_joined: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    compared: ClassVar[tuple[str, ...]] = (*FragmentedAlgorithm.compared, "outer_lr", "outer_momentum")
    accelerates_own: ClassVar[bool] = False
    """Whether the momentum is of what this rank has sent, and not of the averages."""

    outer_lr: float
    outer_momentum: float

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        **options: Unpack[FragmentOptions],
    ) -> None:
        self.outer_lr = check_factor(outer_lr, "outer_lr", positive=True)
        self.outer_momentum = check_factor(outer_momentum, "outer_momentum", below=1.0)
        if options.get("topology") is None:
            options["topology"] = self.default_topology(options.get("group"))
        options.setdefault("local_steps", 100)
        super().__init__(optimizer, model, **options)

    def default_topology(self, group: dist.ProcessGroup | None) -> MixingLike:
        """Returns the topology that is used if none is given."""
        return GlobalAverage()

    def initial(self, name: str) -> list[Tensor]:
        """See the class."""
        return self.buckets.copies()

    def begin(self, places: Sequence[int]) -> Arrive:
        """See the class. It sends a + outer_lr D: the parameters before the local steps plus outer_lr times their change."""
        anchors, previous = self.vectors["anchor"], self.vectors["previous"]
        targets = [anchors[place].lerp(self.buckets.flats[place], self.outer_lr) for place in places]
        finish = self.begin_mix(targets, in_place=not self.accelerates_own)

        def arrive() -> list[Tensor]:
            # In place, v is the target itself. The sums go into memory that is free afterwards, because new memory costs more.
            for place, v, target in zip(places, finish(), targets, strict=True):
                outer = before = previous[place]
                torch.sub(v, before.sub_(target), alpha=self.outer_momentum, out=outer)
                anchors[place], previous[place] = outer, target
            return [anchors[place] for place in places]

        return arrive


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
        outer_lr: As in `DiLoCo`.
        outer_momentum: As in `DiLoCo`.
        **options: As in `DiLoCo`; `topology` is `random_matching` of all ranks by default.

    Raises:
        ValueError: As `FragmentedAlgorithm`.
    """

    accelerates_own: ClassVar[bool] = True

    def default_topology(self, group: dist.ProcessGroup | None) -> MixingLike:
        """See `DiLoCo.default_topology`."""
        return random_matching(current(group).size)
