"""Whom an algorithm averages with: neighbors along a topology, all ranks, or nobody."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from fogdist.arguments import Average
from fogdist.collectives import allreduce_nonblocking, allreduce_nonblocking_, wait
from fogdist.context import current, handles
from fogdist.lazy import nx
from fogdist.neighbor_collectives import (
    neighbor_allreduce_nonblocking,
    neighbor_allreduce_nonblocking_,
)
from fogdist.optim.parameter_average import NeighborWeights
from fogdist.rounds import Rounds, TopologyLike, as_topology
from fogdist.topology import Topology

if TYPE_CHECKING:
    from fog_pg._C import NeighborPlan

# Waits for an exchange in flight and returns its results, one for each tensor that was given.
Finish = Callable[[], list[Tensor]]


class Mixing(abc.ABC):
    """One exchange a round. All ranks must give an algorithm the same mixing."""

    @abc.abstractmethod
    def start(
        self, tensors: Sequence[Tensor], t: int, weights: NeighborWeights, name: str, in_place: bool = False
    ) -> Finish:
        """Starts the weighted averages of round t.

        Args:
            tensors: What this rank gives; they must not change before the exchange is finished.
            t: Round, from 0.
            weights: The optimizer's dynamic attributes.
            name: What all ranks call the exchange.
            in_place: Whether the averages go into the tensors themselves.

        Returns:
            A function that waits for the averages and returns them; without `in_place` new tensors, which may
            be changed.
        """

    def items(self) -> list[str]:
        """Returns what must be the same on all ranks: lines of text, which they compare.

        Raises:
            ValueError: It does not fit the group.
        """
        return [f"mixing: {self!r}"]

    def start_push(
        self, tensors: Sequence[Tensor], t: int, weights: NeighborWeights, name: str, in_place: bool = False
    ) -> Finish:
        """Starts the sums of push-sum in round t: each rank gives shares away that add up to what it has.

        Arguments and result are those of `start`. By default averages are such sums.
        """
        return self.start(tensors, t, weights, name, in_place)


# What algorithms take as `mixing`.
MixingLike: TypeAlias = "Mixing | TopologyLike"


class Neighbors(Mixing):
    """Neighbors: those of a topology's rounds, or those that the group and the optimizer say.

    Args:
        topology: Round t of the algorithm is round t of this; a graph is the same in all rounds. None for the
            optimizer's dynamic attributes `self_weight`, `src_weights` and `dst_weights`, and where these are
            None for the group's topology.

    Raises:
        TypeError: `topology` is none of these, or a weight not a real number.
        ValueError: A rank's weights in a graph do not sum to 1.
    """

    def __init__(self, topology: TopologyLike = None) -> None:
        self._topology = as_topology(topology, "topology")
        self._rounds: Rounds | None = None

    def __repr__(self) -> str:
        return f"Neighbors({'' if self._topology is None else self._topology.name})"

    def items(self) -> list[str]:
        """See `Mixing.items`: the weights of all rounds, of an endless topology the first ones."""
        return self._here().items()

    def start(
        self, tensors: Sequence[Tensor], t: int, weights: NeighborWeights, name: str, in_place: bool = False
    ) -> Finish:
        """See `Mixing.start`."""
        if self._topology is None:
            return _exchange(tensors, weights, name, in_place)
        return _planned_exchange(tensors, self._here().plan(t), name, in_place)

    def start_push(
        self, tensors: Sequence[Tensor], t: int, weights: NeighborWeights, name: str, in_place: bool = False
    ) -> Finish:
        """See `Mixing.start_push`: a rank and its out-neighbors get equal shares of what it has.

        A topology says whom a rank sends to; its weights, which are those of receivers, do not count here.
        The dynamic attributes are taken as they are: `self_weight` and `dst_weights` must sum to 1.
        """
        dynamic = (weights.self_weight, weights.src_weights, weights.dst_weights)
        if self._topology is None and dynamic != (None, None, None):
            return _exchange(tensors, weights, name, in_place)
        return _planned_exchange(tensors, self._here().push_plan(t), name, in_place)

    def _here(self) -> Rounds:
        """Returns the rounds of the group that there is now; this may outlive one."""
        context = current()
        if self._rounds is None or self._rounds.context is not context:
            self._rounds = Rounds(self._topology, context, "mixing")
        return self._rounds


class AllRanks(Mixing):
    """The exact average of all ranks."""

    def __repr__(self) -> str:
        return "AllRanks()"

    def start(
        self, tensors: Sequence[Tensor], t: int, weights: NeighborWeights, name: str, in_place: bool = False
    ) -> Finish:
        """See `Mixing.start`."""
        begin = allreduce_nonblocking_ if in_place else allreduce_nonblocking
        handles = [
            begin(tensor, average=True, name=f"{name}.all.{place}") for place, tensor in enumerate(tensors)
        ]
        return lambda: [wait(handle) for handle in handles]


class Nobody(Mixing):
    """No exchange."""

    def __repr__(self) -> str:
        return "Nobody()"

    def start(
        self, tensors: Sequence[Tensor], t: int, weights: NeighborWeights, name: str, in_place: bool = False
    ) -> Finish:
        """See `Mixing.start`."""
        return lambda: list(tensors) if in_place else [tensor.clone() for tensor in tensors]


def as_mixing(mixing: MixingLike) -> Mixing:
    """Returns what a user gave as `mixing` as one.

    Raises:
        TypeError: It is none.
        ValueError: A graph's weights do not sum to 1 at a rank.
    """
    if mixing is None or isinstance(mixing, (nx.DiGraph, Topology)):
        return Neighbors(mixing)
    if not isinstance(mixing, Mixing):
        raise TypeError(
            "mixing must be a fogdist.topology.Topology, a networkx.DiGraph, a fogdist.algorithms.Mixing or "
            f"None, got {type(mixing).__name__}"
        )
    return mixing


def _exchange(tensors: Sequence[Tensor], weights: NeighborWeights, name: str, in_place: bool) -> Finish:
    begin = neighbor_allreduce_nonblocking_ if in_place else neighbor_allreduce_nonblocking
    return _by_device(
        tensors,
        name,
        lambda those, name: begin(
            those,
            self_weight=weights.self_weight,
            src_weights=weights.src_weights,
            dst_weights=weights.dst_weights,
            enable_topo_check=weights.enable_topo_check,
            name=name,
        ),
    )


def _planned_exchange(tensors: Sequence[Tensor], plan: NeighborPlan, name: str, in_place: bool) -> Finish:
    backend = current().backend

    def begin(those: list[Tensor], name: str) -> int:
        average = Average(those, in_place)
        work = backend.neighbor_allreduce(average.given, plan, output=average.output, name=name)
        return handles().add(work, average.finish, *average.sources)

    return _by_device(tensors, name, begin)


def _by_device(tensors: Sequence[Tensor], name: str, begin: Callable[[list[Tensor], str], int]) -> Finish:
    """Begins one exchange for the tensors of each device: of numbers on the CPU beside parameters elsewhere, say."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    handles = [
        begin([tensors[place] for place in mine], f"{name}.{number}" if number else name)
        for number, mine in enumerate(places.values())
    ]

    def finish() -> list[Tensor]:
        results = list(tensors)
        for mine, handle in zip(places.values(), handles, strict=True):
            for place, result in zip(mine, wait(handle), strict=True):
                results[place] = result
        return results

    return finish
