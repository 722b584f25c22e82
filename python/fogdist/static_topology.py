"""A topology from the point of view of one of its nodes: the neighbors, and the exchange with all of them.

The nodes are the ranks of a group, or its machines.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass

from fogdist.exchange import RANKS, Exchange, Exchanges, Nodes
from fogdist.lazy import nx
from fogdist.topology import (
    Topology,
    TopologyError,
    check_topology,
    exponential,
    mixing_matrix,
    named,
    recv_weights,
    uniform_weights,
)
from fogdist.topology.validation import check_flags, edge_weight, no_topology
from fogdist.topology.weights import check_matrix, has_weights


@dataclass(frozen=True)
class StaticTopology:
    """The topology that exchanges without explicit weights follow, from the point of view of one node.

    It holds the cache of exchanges, which is discarded with it when another topology is set.

    Attributes:
        graph: A private copy of the user's graph.
        is_weighted: Whether the graph's weights are used; if not, a node takes the plain mean of itself and
            its in-neighbors.
        in_neighbors: Predecessors of this node without itself, in the graph's order.
        out_neighbors: Successors of this node without itself, in the graph's order.
        along: The exchange with all of them.
        exchanges: The cache of this node's exchanges.
    """

    graph: nx.DiGraph
    is_weighted: bool
    in_neighbors: list[int]
    out_neighbors: list[int]
    along: Exchange
    exchanges: Exchanges

    @property
    def mean_weights(self) -> tuple[float, dict[int, float]]:
        """The node's weight in its average, and the weights of its in-neighbors in ascending order of nodes."""
        sources = sorted(self.along.sources)
        if not self.along.mean:
            return self.along.self_weight, dict(sources)
        share = 1.0 / (len(sources) + 1)
        return share, {source: share for source, _ in sources}

    def as_topology(self) -> Topology:
        """Returns it with the weights that exchanges use. Raises TopologyError if a user's weights do not sum to 1."""
        return Topology.from_graph(
            "group's topology", self.graph if self.is_weighted else uniform_weights(self.graph)
        )

    def items(self) -> list[str]:
        """Returns the items that must be the same on all ranks, in an order that does not depend on the graph's."""
        edges = sorted(
            (int(i), int(j), data.get("weight", 1.0)) for i, j, data in self.graph.edges(data=True)
        )
        return [f"is_weighted={self.is_weighted}", *(f"edge {i} -> {j} {_weighing(w)}" for i, j, w in edges)]


def one_graph(topology: nx.DiGraph | Topology | str | None, size: int) -> nx.DiGraph:
    """Returns the graph of a static topology, given as an algorithm takes it.

    Raises:
        TypeError: It is no topology.
        TopologyError: It has several rounds, or no topology has this name.
    """
    if topology is None:
        return exponential(size)
    if isinstance(topology, str):
        topology = named(topology, size)
    if isinstance(topology, nx.DiGraph):
        return topology
    if not isinstance(topology, Topology):
        kinds = "a networkx.DiGraph, a Topology of one round or a name that `fog topology` lists"
        raise no_topology(topology, kinds)
    if topology.period != 1:
        raise TopologyError(f"topology must have one round here, got {topology!r}; give it to an algorithm")
    return topology.graph()


def see_topology(
    graph: nx.DiGraph,
    is_weighted: bool | None,
    node: int,
    size: int,
    *,
    nodes: Nodes = RANKS,
) -> StaticTopology:
    """Returns a topology from the point of view of one of its nodes.

    Args:
        graph: Its nodes must be 0 ... size-1.
        is_weighted: Whether its weights are used. All weights are then checked, not only this node's, so that all
            ranks raise the same error. None to use them if there are any, which then must sum to 1 at each receiver.
        node: The node.
        size: The expected number of nodes.
        nodes: The kind of nodes.

    Raises:
        TypeError: Not a networkx.DiGraph, a weight is not a real number, or `is_weighted` not a bool.
        TopologyError: The nodes are not 0 ... size-1, a weight is not finite, or the weights do not sum to 1.
    """
    if is_weighted is not None:
        check_flags(is_weighted=is_weighted)
    if isinstance(graph, nx.DiGraph) and graph.number_of_nodes() != size:
        raise TopologyError(
            f"topology must have as many nodes as {nodes.node}s, {size}, got {graph.number_of_nodes()}"
        )
    check_topology(graph)
    may_be_mean = is_weighted is None
    if is_weighted is None:
        is_weighted = has_weights(graph)
        if is_weighted:
            check_matrix(mixing_matrix(graph), "topology")
    in_neighbors = [source for source in graph.predecessors(node) if source != node]
    out_neighbors = [destination for destination in graph.successors(node) if destination != node]
    self_weight, sources = 1.0, dict.fromkeys(sorted(in_neighbors), 1.0)
    if is_weighted:
        for i, j in graph.edges:
            edge_weight(graph, i, j)
        self_weight, sources = recv_weights(graph, node)
    # A mean is rounded once, and a sum of equal weights is not.
    share = 1.0 / (len(sources) + 1)
    has_equal_weights = all(weight == share for weight in (self_weight, *sources.values()))
    is_mean = not is_weighted or (may_be_mean and has_equal_weights)
    if is_mean:
        self_weight, sources = 1.0, dict.fromkeys(sources, 1.0)
    along = Exchange(
        nodes,
        node,
        size,
        self_weight,
        tuple(sources.items()),
        tuple((destination, 1.0) for destination in sorted(out_neighbors)),
        mean=is_mean,
    )
    exchanges = Exchanges(nodes, node, size, in_neighbors, out_neighbors, along)
    return StaticTopology(graph.copy(), is_weighted, in_neighbors, out_neighbors, along, exchanges)


def _weighing(weight: object) -> str:
    # Without is_weighted the weights may be anything, so they are not read.
    return (
        f"of weight {float(weight)!r}"
        if isinstance(weight, numbers.Real)
        else f"of a {type(weight).__name__}"
    )
