"""Whom an algorithm averages with: neighbors along a topology, all ranks, or nobody."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from fogdist.collectives import allreduce_nonblocking, allreduce_nonblocking_, wait
from fogdist.context import current
from fogdist.neighbor_collectives import (
    neighbor_allreduce_nonblocking,
    neighbor_allreduce_nonblocking_,
)
from fogdist.optim.parameter_average import NeighborWeights
from fogdist.topology import Peers, Topology

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

    def start_push(
        self, tensors: Sequence[Tensor], t: int, weights: NeighborWeights, name: str, in_place: bool = False
    ) -> Finish:
        """Starts the sums of push-sum in round t: each rank gives shares away that add up to what it has.

        Arguments and result are those of `start`. By default averages are such sums.
        """
        return self.start(tensors, t, weights, name, in_place)


class Neighbors(Mixing):
    """Neighbors: those of a topology's rounds, or those that the group and the optimizer say.

    Args:
        topology: Round t of the algorithm is round t of this. None for the optimizer's dynamic attributes
            `self_weight`, `src_weights` and `dst_weights`, and where these are None for the group's topology.

    Raises:
        TypeError: `topology` is neither.
    """

    def __init__(self, topology: Topology | None = None) -> None:
        if topology is not None and not isinstance(topology, Topology):
            raise TypeError(f"topology must be a fogdist.topology.Topology, got {type(topology).__name__}")
        self._topology = topology
        # A short sequence comes again and again: what a rank does in its rounds is worked out once.
        self._peers: dict[int, Peers] = {}

    def __repr__(self) -> str:
        return f"Neighbors({'' if self._topology is None else self._topology.name})"

    def start(
        self, tensors: Sequence[Tensor], t: int, weights: NeighborWeights, name: str, in_place: bool = False
    ) -> Finish:
        """See `Mixing.start`."""
        if self._topology is None:
            return _exchange(tensors, weights, name, in_place)
        peers = self._round(self._topology, t)
        chosen = NeighborWeights(peers["self_weight"], peers["src_weights"], peers["dst_weights"], False)
        return _exchange(tensors, chosen, name, in_place)

    def start_push(
        self, tensors: Sequence[Tensor], t: int, weights: NeighborWeights, name: str, in_place: bool = False
    ) -> Finish:
        """See `Mixing.start_push`: a rank and its out-neighbors get equal shares of what it has.

        A topology says whom a rank sends to; its weights, which are those of receivers, do not count here.
        The dynamic attributes are taken as they are: `self_weight` and `dst_weights` must sum to 1.
        """
        if self._topology is not None:
            peers = self._round(self._topology, t)
            return _exchange(tensors, _shares(peers["src_weights"], peers["dst_weights"]), name, in_place)
        if weights.self_weight is None and weights.src_weights is None and weights.dst_weights is None:
            static = current().topology
            return _exchange(tensors, _shares(static.in_neighbors, static.out_neighbors), name, in_place)
        return _exchange(tensors, weights, name, in_place)

    def _round(self, topology: Topology, t: int) -> Peers:
        context = current()
        if topology.size != context.size:
            raise ValueError(
                f"mixing must have a topology of as many ranks as the group, {context.size}, got {topology!r}"
            )
        if topology.period is None:
            return topology.peers(context.rank, t)
        place = t % topology.period
        if place not in self._peers:
            self._peers[place] = topology.peers(context.rank, place)
        return self._peers[place]


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


def as_mixing(mixing: Mixing | Topology | None, size: int) -> Mixing:
    """Returns what a user gave as `mixing` as one.

    Raises:
        TypeError: It is none.
        ValueError: A topology of another number of ranks.
    """
    if mixing is None or isinstance(mixing, Topology):
        if mixing is not None and mixing.size != size:
            raise ValueError(f"mixing must be a topology of {size} ranks, got {mixing!r}")
        return Neighbors(mixing)
    if not isinstance(mixing, Mixing):
        raise TypeError(
            "mixing must be a fogdist.topology.Topology, a fogdist.algorithms.Mixing or None, got "
            f"{type(mixing).__name__}"
        )
    return mixing


def _exchange(tensors: Sequence[Tensor], weights: NeighborWeights, name: str, in_place: bool) -> Finish:
    if not tensors:
        return list
    begin = neighbor_allreduce_nonblocking_ if in_place else neighbor_allreduce_nonblocking
    handle = begin(
        list(tensors),
        self_weight=weights.self_weight,
        src_weights=weights.src_weights,
        dst_weights=weights.dst_weights,
        enable_topo_check=weights.enable_topo_check,
        name=name,
    )

    def finish() -> list[Tensor]:
        results: list[Tensor] = wait(handle)
        return results

    return finish


def _shares(sources: Iterable[int], destinations: Iterable[int]) -> NeighborWeights:
    receivers = list(destinations)
    share = 1.0 / (len(receivers) + 1)
    return NeighborWeights(share, dict.fromkeys(sources, 1.0), dict.fromkeys(receivers, share), False)
