"""The exchanges of a rank in each round of a topology: `Plans`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fogdist.agreement import digest
from fogdist.context import Context
from fogdist.exchange import RANKS, Exchange
from fogdist.lazy import nx
from fogdist.topology import Peers, Topology, mixing_matrix, named, uniform_weights
from fogdist.topology.validation import no_topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fog_pg._C import NeighborPlan

# The types of the argument `topology`, which `as_topology` converts.
TopologyLike: TypeAlias = "nx.DiGraph | Sequence[nx.DiGraph] | Topology | str | None"

# The most rounds of a topology that ranks compare and that are cached. Periods are mostly a few rounds, and endless
# topologies that differ usually differ in an early round.
_COMPARED_ROUNDS = 64
_KEPT_PLANS = 1024


class Plans:
    """The exchanges of one rank: round t is `plan(t)`.

    Args:
        topology: As `as_topology`; None for the group's topology at the time of each round.
        context: The group.

    If the group is what is left of a larger one, a topology of the larger one stands for what is left of it.

    Attributes:
        topology: The argument as rounds; None for the group's topology.
        context: The group.

    Raises:
        TypeError: As `as_topology`.
        ValueError: Its nodes are not the group's ranks; and as `as_topology`.
    """

    def __init__(self, topology: TopologyLike, context: Context) -> None:
        self.topology = as_topology(topology, context.size)
        self.context = context
        survivors = context.survivors
        if survivors and self.topology is not None and self.topology.size == survivors.size:
            self.topology = self.topology.grown(survivors.numbers).among(survivors.living)
        if self.topology is not None and self.topology.size != context.size:
            raise ValueError(
                f"topology must have as many nodes as ranks, {context.size}, got {self.topology.size}"
            )
        # Short sequences repeat often, so the plan of each round is computed once.
        self._plans: dict[tuple[int, bool], NeighborPlan] = {}

    def items(self) -> list[str]:
        """Returns the items that must be the same on all ranks."""
        topology = self.topology
        if topology is None:
            return ["topology: the group's topology"]
        count = _COMPARED_ROUNDS if topology.period is None else min(topology.period, _COMPARED_ROUNDS)
        rounds = (digest(topology.matrix(t).tobytes().hex()) for t in range(count))
        return [
            f"topology: {topology.name!r} of period {topology.period}",
            *(f"topology: round {t} has the matrix {matrix}" for t, matrix in enumerate(rounds)),
        ]

    def plan(self, t: int) -> NeighborPlan:
        """Returns this rank's weighted average in round t."""
        if self.topology is None:
            return self.context.topology.along.plan
        return self._kept(self.topology, t, False)

    def push_plan(self, t: int) -> NeighborPlan:
        """Returns this rank's sums of push-sum in round t.

        The rank keeps and sends equal shares, which add up to 1. A topology defines only the ranks to
        send to. Its weights are those of receivers and do not count here.
        """
        if self.topology is None:
            static = self.context.topology
            return self._push(static.in_neighbors, static.out_neighbors)
        return self._kept(self.topology, t, True)

    def _kept(self, topology: Topology, t: int, is_push: bool) -> NeighborPlan:
        round_ = t if topology.period is None else t % topology.period
        key = (round_, is_push)
        if key not in self._plans:
            peers = topology.peers(self.context.rank, round_)
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            self._plans[key] = (
                self._push(peers["src_weights"], peers["dst_weights"]) if is_push else self._average(peers)
            )
        return self._plans[key]

    def _average(self, peers: Peers) -> NeighborPlan:
        # The receivers hold the weights.
        destinations = [(rank, 1.0) for rank in peers["dst_weights"]]
        return self._made(peers["self_weight"], sorted(peers["src_weights"].items()), destinations)

    def _push(self, sources: Iterable[int], destinations: Iterable[int]) -> NeighborPlan:
        receivers = sorted(destinations)
        share = 1.0 / (len(receivers) + 1)
        return self._made(share, [(rank, 1.0) for rank in sorted(sources)], [(r, share) for r in receivers])

    def _made(
        self, own: float, sources: list[tuple[int, float]], destinations: list[tuple[int, float]]
    ) -> NeighborPlan:
        size = self.context.size
        return Exchange(RANKS, self.context.rank, size, own, tuple(sources), tuple(destinations)).plan


def as_topology(value: TopologyLike, size: int | None = None) -> Topology | None:
    """Returns a user's argument `topology` as rounds; topologies and None unchanged.

    Args:
        value: A topology; a graph, whose weights are used and must sum to 1 at each receiver; a sequence of graphs, one a
            round; or a name that `fog topology` lists.
        size: The number of ranks, for a name; None if it is not known, so that there can be none.

    Raises:
        TypeError: It is none of these, or a weight is not a real number.
        ValueError: A rank's weights do not sum to 1; no topology of this name exists for this many ranks.
    """
    if isinstance(value, str) and size is not None:
        return named(value, size)
    if isinstance(value, nx.DiGraph):
        return Topology.from_graph("graph", value)
    if isinstance(value, (list, tuple)) and all(isinstance(graph, nx.DiGraph) for graph in value):
        return Topology("graphs", [mixing_matrix(graph) for graph in value])
    if value is not None and not isinstance(value, Topology):
        kinds = "a fogdist.topology.Topology, a networkx.DiGraph, a sequence of graphs, a name that `fog topology` lists"
        raise no_topology(value, f"{kinds}, None or, for an optimizer, a fogdist.algorithms.Mixing")
    return value


def topology_of(context: Context) -> Topology:
    """Returns the group's current topology, with the weights that its exchanges use.

    Raises:
        ValueError: Its weights do not sum to 1 at a rank.
    """
    graph = context.topology.graph
    return Topology.from_graph(
        "group's topology", graph if context.topology.is_weighted else uniform_weights(graph)
    )


def edges_of(topology: Topology) -> NDArray[np.bool_]:
    """Returns, as a matrix, whether there is an edge in any round of a topology with a period."""
    return np.asarray(np.any([topology.matrix(t) != 0 for t in range(topology.period or 1)], axis=0))


def neighbors_of(topology: Topology, rank: int) -> tuple[list[int], list[int]]:
    """Returns a rank's in-neighbors and out-neighbors in any round of a topology with a period."""
    union = edges_of(topology)
    others = [r for r in range(topology.size) if r != rank]
    return [r for r in others if union[r, rank]], [r for r in others if union[rank, r]]
