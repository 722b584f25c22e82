"""Whom a rank mixes with in each iteration: a topology, seen from one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import networkx as nx

from fogdist.agreement import digest
from fogdist.context import Context
from fogdist.topology import Topology, uniform_weights

if TYPE_CHECKING:
    from fog_pg._C import NeighborPlan

TopologyLike: TypeAlias = "nx.DiGraph | Topology | None"

# What ranks compare of a topology at most, and what is kept of it: an endless topology is a function of t
# that differs early or not at all, and periods are mostly a few rounds.
_COMPARED_ROUNDS = 64
_KEPT_PLANS = 1024


class Rounds:
    """The exchanges of one rank: round t is `plan(t)`.

    Args:
        topology: A graph, whose weights are used and must sum to 1 at each receiver; or one graph a round; or
            None for whatever the group's topology is when a round is asked for.
        context: The group.

    Attributes:
        topology: What was given, as rounds; None for the group's.

    Raises:
        TypeError: `topology` is none of these, or a weight not a real number.
        ValueError: Its nodes are not the group's ranks, or a rank's weights do not sum to 1.
    """

    def __init__(self, topology: TopologyLike, context: Context) -> None:
        if isinstance(topology, nx.DiGraph):
            topology = Topology.from_graph("graph", topology)
        if topology is not None and not isinstance(topology, Topology):
            raise TypeError(
                "topology must be a networkx.DiGraph, a fogdist.topology.Topology or None, got "
                f"{type(topology).__name__}"
            )
        if topology is not None and topology.size != context.size:
            raise ValueError(
                f"topology must have as many nodes as ranks, {context.size}, got {topology.size}"
            )
        self.topology = topology
        self._context = context
        self._plans: dict[int, NeighborPlan] = {}

    def items(self) -> list[str]:
        """Returns what must be the same on all ranks."""
        topology = self.topology
        if topology is None:
            return ["topology: the group's"]
        count = _COMPARED_ROUNDS if topology.period is None else min(topology.period, _COMPARED_ROUNDS)
        rounds = (f"{digest(topology.matrix(t).tobytes().hex()):x}" for t in range(count))
        return [
            f"topology: {topology.name!r} of period {topology.period}",
            *(f"topology: round {t} has the matrix {matrix}" for t, matrix in enumerate(rounds)),
        ]

    def plan(self, t: int) -> NeighborPlan:
        """Returns this rank's exchange in round t."""
        from fog_pg._C import NeighborPlan

        topology, context = self.topology, self._context
        if topology is None:
            return context.topology.plan
        if topology.period is not None:
            t %= topology.period
        if t not in self._plans:
            peers = topology.peers(context.rank, t)
            sources = sorted(peers["src_weights"].items())
            destinations = [(rank, 1.0) for rank in peers["dst_weights"]]  # the receivers hold the weights
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            self._plans[t] = NeighborPlan(
                context.rank, context.size, peers["self_weight"], sources, destinations
            )
        return self._plans[t]


def topology_of(context: Context) -> Topology:
    """Returns the topology that the group has now, with the weights that its exchanges have.

    Raises:
        ValueError: It was set with weights that do not sum to 1 at a rank.
    """
    graph = context.topology.graph
    return Topology.from_graph(
        "group's topology", graph if context.topology.is_weighted else uniform_weights(graph)
    )
