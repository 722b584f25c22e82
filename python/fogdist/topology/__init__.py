"""Topologies: static graphs, time-varying sequences, their weights and metrics. Nothing here communicates.

A static topology is a networkx.DiGraph on the ranks 0 ... n-1. `W[i, j]` is the weight of the edge i -> j: a
row is a sender, a column a receiver. A `Topology` has one such matrix per round, for static graphs and sequences
alike. Each module has one concept: `graphs` (static), `topology` (Topology), `sequences` and `base_graph`
(time-varying), `dynamic` (generators of BlueFog), `weights` (of edges, given or chosen), `neighbor_lists` (peers as
lists), `metrics`, `registry` (graphs by name), `comparison` and `drawing` (table and picture). Names of older BlueFog
versions are in `fogdist.legacy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fogdist import legacy
from fogdist.topology.base_graph import base_graph
from fogdist.topology.comparison import Summary, SummaryRow, summary
from fogdist.topology.drawing import plot
from fogdist.topology.dynamic import (
    GetDynamicOnePeerSendRecvRanks,
    GetExp2DynamicSendRecvMachineRanks,
    GetInnerOuterExpo2DynamicSendRecvRanks,
    GetInnerOuterRingDynamicSendRecvRanks,
)
from fogdist.topology.errors import TopologyError
from fogdist.topology.graphs import (
    ExponentialGraph,
    ExponentialTwoGraph,
    FullyConnectedGraph,
    IsRegularGraph,
    IsTopologyEquivalent,
    MeshGrid2DGraph,
    RingGraph,
    StarGraph,
    SymmetricExponentialGraph,
    Torus2DGraph,
)
from fogdist.topology.metrics import spectral_gap
from fogdist.topology.neighbor_lists import (
    in_neighbors,
    matrix_from_destinations,
    matrix_from_sources,
    out_neighbors,
    transpose_neighbor_ranks,
)
from fogdist.topology.registry import SEQUENCE_NAMES, TOPOLOGY_NAMES, by_name, named
from fogdist.topology.sequences import (
    inner_outer_exponential,
    inner_outer_ring,
    one_peer,
    one_peer_exponential,
    one_peer_hypercube,
    random_matching,
)
from fogdist.topology.topology import Peers, Topology
from fogdist.topology.validation import check_neighbor_ranks, check_topology
from fogdist.topology.weights import (
    GetRecvWeights,
    GetSendWeights,
    graph_from_matrix,
    metropolis_hastings_weights,
    mixing_matrix,
    uniform_weights,
)

__all__ = [
    "SEQUENCE_NAMES",
    "TOPOLOGY_NAMES",
    "ExponentialGraph",
    "ExponentialTwoGraph",
    "FullyConnectedGraph",
    "GetDynamicOnePeerSendRecvRanks",
    "GetExp2DynamicSendRecvMachineRanks",
    "GetInnerOuterExpo2DynamicSendRecvRanks",
    "GetInnerOuterRingDynamicSendRecvRanks",
    "GetRecvWeights",
    "GetSendWeights",
    "IsRegularGraph",
    "IsTopologyEquivalent",
    "MeshGrid2DGraph",
    "Peers",
    "RingGraph",
    "StarGraph",
    "Summary",
    "SummaryRow",
    "SymmetricExponentialGraph",
    "Topology",
    "TopologyError",
    "Torus2DGraph",
    "base_graph",
    "by_name",
    "check_neighbor_ranks",
    "check_topology",
    "graph_from_matrix",
    "in_neighbors",
    "inner_outer_exponential",
    "inner_outer_ring",
    "matrix_from_destinations",
    "matrix_from_sources",
    "metropolis_hastings_weights",
    "mixing_matrix",
    "named",
    "one_peer",
    "one_peer_exponential",
    "one_peer_hypercube",
    "out_neighbors",
    "plot",
    "random_matching",
    "spectral_gap",
    "summary",
    "transpose_neighbor_ranks",
    "uniform_weights",
]

if not TYPE_CHECKING:  # a type checker is to find misspelt names

    def __getattr__(name: str) -> Any:
        return legacy.find(name, __name__, globals())
