"""Topologies: static graphs, time-varying sequences, their weights and metrics. Nothing here communicates.

A static topology is a networkx.DiGraph on the ranks 0 ... n-1. `W[i, j]` is the weight of the edge i -> j: a
row is a sender, a column a receiver. A `Topology` has one such matrix per round, for static graphs and sequences
alike. Each module has one concept: `graphs` (static), `topology` (Topology), `sequences` and `base_graph`
(time-varying), `weights` (of edges, given or chosen), `registry` (by name, and a table).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fogdist.removed import missing
from fogdist.topology.base_graph import base_graph
from fogdist.topology.graphs import (
    exponential,
    fully_connected,
    is_equivalent,
    is_regular,
    mesh,
    ring,
    star,
    symmetric_exponential,
)
from fogdist.topology.registry import TOPOLOGY_NAMES, by_name, named, summary
from fogdist.topology.sequences import (
    by_sites,
    inner_outer_exponential,
    one_peer,
    one_peer_exponential,
    random_matching,
)
from fogdist.topology.topology import Peers, Topology
from fogdist.topology.validation import TopologyError, check_neighbor_ranks, check_topology
from fogdist.topology.weights import (
    in_neighbors,
    metropolis_hastings_weights,
    mixing_matrix,
    out_neighbors,
    recv_weights,
    spectral_gap,
    uniform_weights,
)

__all__ = [
    "TOPOLOGY_NAMES",
    "Peers",
    "Topology",
    "TopologyError",
    "base_graph",
    "by_name",
    "by_sites",
    "check_neighbor_ranks",
    "check_topology",
    "exponential",
    "fully_connected",
    "in_neighbors",
    "inner_outer_exponential",
    "is_equivalent",
    "is_regular",
    "mesh",
    "metropolis_hastings_weights",
    "mixing_matrix",
    "named",
    "one_peer",
    "one_peer_exponential",
    "out_neighbors",
    "random_matching",
    "recv_weights",
    "ring",
    "spectral_gap",
    "star",
    "summary",
    "symmetric_exponential",
    "uniform_weights",
]

if not TYPE_CHECKING:  # a type checker is to find misspelt names

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)
