"""Who talks to whom: static graphs, dynamic one-peer generators, their weights and metrics. No communication.

A topology is a networkx.DiGraph on the ranks 0 ... n-1. `W[i, j]` is the weight of the edge i -> j: a row is
a sender, a column a receiver. One concept, one module: `graphs` (static), `dynamic` (generators), `weights`
(of edges, given or chosen), `neighbor_lists` (peers as lists), `metrics`, `registry` (graphs by name),
`legacy` (older names).
"""

from __future__ import annotations

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
)
from fogdist.topology.metrics import spectral_gap
from fogdist.topology.neighbor_lists import (
    in_neighbors,
    matrix_from_destinations,
    matrix_from_sources,
    out_neighbors,
    transpose_neighbor_ranks,
)
from fogdist.topology.registry import TOPOLOGY_NAMES, by_name
from fogdist.topology.validation import check_neighbor_ranks, check_topology
from fogdist.topology.weights import (
    GetRecvWeights,
    GetSendWeights,
    metropolis_hastings_weights,
    mixing_matrix,
    uniform_weights,
)

__all__ = [
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
    "RingGraph",
    "StarGraph",
    "SymmetricExponentialGraph",
    "TopologyError",
    "by_name",
    "check_neighbor_ranks",
    "check_topology",
    "in_neighbors",
    "matrix_from_destinations",
    "matrix_from_sources",
    "metropolis_hastings_weights",
    "mixing_matrix",
    "out_neighbors",
    "spectral_gap",
    "transpose_neighbor_ranks",
    "uniform_weights",
]
