"""What one exchange with neighbors is: its peers and weights, from the arguments of a call.

The peers of a dynamic exchange come from each rank's own arguments, so ranks can disagree about them;
`fogdist.verification` is the collective check of that.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from fogdist.context import Context
from fogdist.machines import homogeneous, number_of_machines
from fogdist.static_topology import StaticTopology
from fogdist.topology import check_neighbor_ranks

if TYPE_CHECKING:
    from fog_pg._C import NeighborPlan


# The operation, what exchanges in it, and the names of the arguments with sources and destinations.
_RANKS = ("neighbor_allreduce", "rank", "src_weights", "dst_weights")
_MACHINES = (
    "hierarchical_neighbor_allreduce",
    "machine",
    "src_machine_weights",
    "dst_machine_weights",
)


class Exchange(NamedTuple):
    """One exchange, seen from this rank.

    Attributes:
        operation: Name of the operation, for messages.
        node: What exchanges with its neighbors: a "rank", or a "machine", whose ranks all give the same.
        source_argument: Name of the argument that gave the sources.
        destination_argument: Name of the argument that gave the destinations.
        plan: Peers and weights, for the backend.
        is_dynamic: Whether the peers come from arguments, not from the topology.
    """

    operation: str
    node: str
    source_argument: str
    destination_argument: str
    plan: NeighborPlan
    is_dynamic: bool


class _Side(NamedTuple):
    """Whom an operation's exchange is among, and what its arguments are called."""

    operation: str
    node: str
    sources: str
    destinations: str
    own_number: int
    size: int

    def exchange(self, plan: NeighborPlan, is_dynamic: bool) -> Exchange:
        return Exchange(self.operation, self.node, self.sources, self.destinations, plan, is_dynamic)

    def dynamic(
        self,
        self_weight: float,
        src_weights: Mapping[int, float],
        dst_weights: Iterable[int] | Mapping[int, float],
    ) -> Exchange:
        from fog_pg._C import NeighborPlan

        own, sources = check_weight(self_weight, "self_weight"), self.source_weights(src_weights)
        if isinstance(dst_weights, Mapping):
            destinations = self._weights(dst_weights, self.destinations)
        else:
            peers = self._peers(dst_weights, self.destinations)
            destinations = [(peer, 1.0) for peer in sorted(peers)]
        return self.exchange(NeighborPlan(self.own_number, self.size, own, sources, destinations), True)

    def source_weights(self, src_weights: Mapping[int, float]) -> list[tuple[int, float]]:
        if not isinstance(src_weights, Mapping):
            raise TypeError(
                f"{self.sources} must be a dict of {self.node}s to weights, got {type(src_weights).__name__}"
            )
        return self._weights(src_weights, self.sources)

    def _weights(self, weights: Mapping[Any, float], argument: str) -> list[tuple[int, float]]:
        # Sorted: how sums are rounded does not depend on the order of a dict.
        return sorted(
            [
                (peer, value if _is_plain(value) else check_weight(value, f"{argument}[{peer}]"))
                for peer, value in zip(self._peers(weights, argument), weights.values(), strict=True)
            ]
        )

    def _peers(self, ranks: Iterable[SupportsIndex], argument: str) -> list[int]:
        # One peer or none is what a step of training has: no time for messages that nearly no call needs.
        if isinstance(ranks, (list, dict)) and len(ranks) <= 1:
            for peer in ranks:
                if not (type(peer) is int and 0 <= peer < self.size and peer != self.own_number):
                    break
            else:
                return list(ranks)
        return check_neighbor_ranks(ranks, self.own_number, self.size, argument)


def reject_unknown_arguments(
    operation: str, arguments: Mapping[str, object], renamed: Mapping[str, str]
) -> None:
    """Raises TypeError for a keyword that `operation` does not have, with the new name of an old one."""
    for name in arguments:
        if name in renamed:
            raise TypeError(f"{operation}() has no argument {name!r} any more; use {renamed[name]!r} instead")
        raise TypeError(f"{operation}() got an unexpected keyword argument {name!r}")


def weighted_exchange(
    context: Context,
    self_weight: float | None,
    src_weights: Mapping[int, float] | None,
    dst_weights: Iterable[int] | Mapping[int, float] | None,
) -> Exchange:
    """Returns the exchange of a `neighbor_allreduce`; the arguments are those of that function."""
    from fog_pg._C import NeighborPlan

    topology = context.topology
    if self_weight is None and src_weights is None:
        if dst_weights is not None:
            raise ValueError("dst_weights must come with self_weight and src_weights, got dst_weights alone")
        return Exchange(*_RANKS, topology.plan, is_dynamic=False)
    if self_weight is None or src_weights is None:
        given, missing = (
            ("src_weights", "self_weight") if self_weight is None else ("self_weight", "src_weights")
        )
        raise ValueError(f"self_weight and src_weights must be given together, got {given} without {missing}")
    side = _Side(*_RANKS, context.rank, context.size)
    if dst_weights is not None:
        return side.dynamic(self_weight, src_weights, dst_weights)
    own, sources = check_weight(self_weight, "self_weight"), dict(side.source_weights(src_weights))
    _check_neighbors(sources, topology.in_neighbors, "src_weights", f"in-neighbors of rank {context.rank}")
    # Every in-neighbor sends, whatever this rank makes of it: one that is left out weighs 0.
    plan = NeighborPlan(
        context.rank,
        context.size,
        own,
        [(source, sources.get(source, 0.0)) for source in sorted(topology.in_neighbors)],
        [(destination, 1.0) for destination in sorted(topology.out_neighbors)],
    )
    return side.exchange(plan, is_dynamic=False)


def hierarchical_exchange(
    context: Context,
    self_weight: float | None,
    src_machine_weights: Mapping[int, float] | None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None,
) -> Exchange:
    """Returns the exchange of a `hierarchical_neighbor_allreduce`; arguments as of that function."""
    machine = homogeneous(context).machine_of[context.rank]
    side = _Side(*_MACHINES, machine, number_of_machines(context))
    topology: StaticTopology | None = context.machine_topology
    if self_weight is None and src_machine_weights is None and dst_machine_weights is None:
        if topology is None:
            raise RuntimeError(
                "hierarchical_neighbor_allreduce needs weights or a machine topology; "
                "call fogdist.set_machine_topology() first"
            )
        return side.exchange(topology.plan, is_dynamic=False)
    if self_weight is None or src_machine_weights is None or dst_machine_weights is None:
        raise ValueError(
            "self_weight, src_machine_weights and dst_machine_weights must be given together, got "
            f"self_weight={self_weight}, src_machine_weights={src_machine_weights}, "
            f"dst_machine_weights={dst_machine_weights}"
        )
    exchange = side.dynamic(self_weight, src_machine_weights, dst_machine_weights)
    for argument, peers, neighbors, what in (
        (side.sources, exchange.plan.sources, topology.in_neighbors if topology else [], "in"),
        (side.destinations, exchange.plan.destinations, topology.out_neighbors if topology else [], "out"),
    ):
        _check_neighbors(
            [peer for peer, _ in peers], neighbors, argument, f"{what}-neighbors of machine {machine}"
        )
    return exchange


def gathering_exchange(
    context: Context, src_ranks: Iterable[SupportsIndex] | None, dst_ranks: Iterable[SupportsIndex] | None
) -> Exchange:
    """Returns the exchange of a `neighbor_allgather`; the arguments are those of that function."""
    from fog_pg._C import NeighborPlan

    rank, size = context.rank, context.size
    if (src_ranks is None) != (dst_ranks is None):
        given, missing = ("src_ranks", "dst_ranks") if dst_ranks is None else ("dst_ranks", "src_ranks")
        raise ValueError(f"src_ranks and dst_ranks must be given together, got {given} without {missing}")
    if src_ranks is None or dst_ranks is None:
        sources, destinations = sorted(context.topology.in_neighbors), sorted(context.topology.out_neighbors)
    else:
        sources = check_neighbor_ranks(src_ranks, rank, size, "src_ranks")
        destinations = check_neighbor_ranks(dst_ranks, rank, size, "dst_ranks")
    plan = NeighborPlan(rank, size, 1.0, [(s, 1.0) for s in sources], [(d, 1.0) for d in destinations])
    return Exchange("neighbor_allgather", "rank", "src_ranks", "dst_ranks", plan, src_ranks is not None)


def gossip_exchange(
    context: Context,
    target_rank: SupportsIndex,
    self_weight: float | None,
    pair_weight: float | None,
) -> tuple[int, NeighborPlan]:
    """Returns the other rank of a `pair_gossip`, and the plan; the arguments are those of that function."""
    from fog_pg._C import NeighborPlan

    (peer,) = check_neighbor_ranks([target_rank], context.rank, context.size, "target_rank")
    if self_weight is None and pair_weight is None:
        return peer, NeighborPlan(context.rank, context.size, 1.0, [(peer, 1.0)], [(peer, 1.0)], mean=True)
    if self_weight is None or pair_weight is None:
        given, missing = (
            ("pair_weight", "self_weight") if self_weight is None else ("self_weight", "pair_weight")
        )
        raise ValueError(f"self_weight and pair_weight must be given together, got {given} without {missing}")
    own, other = check_weight(self_weight, "self_weight"), check_weight(pair_weight, "pair_weight")
    return peer, NeighborPlan(context.rank, context.size, own, [(peer, other)], [(peer, 1.0)])


def check_weight(value: float, argument: str) -> float:
    """Returns a weight as a float.

    Raises:
        TypeError: Not a real number.
        ValueError: Not finite.
    """
    if _is_plain(value):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{argument} must be a real number, got {value!r} of type {type(value).__name__}")
    try:
        weight = float(value)
    except OverflowError:  # of an int or a Fraction
        weight = math.inf
    if not math.isfinite(weight):
        raise ValueError(f"{argument} must be finite as a float, got {value}")
    return weight


def _is_plain(value: object) -> bool:
    """Whether a weight needs no further look, as nearly all do."""
    return type(value) is float and math.isfinite(value)


def _check_neighbors(peers: Iterable[int], neighbors: Sequence[int], argument: str, what: str) -> None:
    strangers = [peer for peer in peers if peer not in neighbors]
    if strangers:
        hint = "; other peers need dst_weights too" if argument == "src_weights" else ""
        raise ValueError(
            f"{argument} must name {what} only, in the current topology {sorted(neighbors)}, "
            f"got {strangers}{hint}"
        )
