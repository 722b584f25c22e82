"""`bluefog.common.topology_util`: the graphs and generators of BlueFog; those of `fogdist.topology` under their old names."""

from __future__ import annotations

from typing import Any

import networkx as nx

from fogdist import topology
from fogdist.bluefog.common import inference
from fogdist.bluefog.deprecation import find
from fogdist.topology import dynamic

ExponentialGraph = topology.exponential
FullyConnectedGraph = topology.fully_connected
GetDynamicOnePeerSendRecvRanks = dynamic.one_peer_ranks
GetExp2DynamicSendRecvMachineRanks = dynamic.exp2_machine_ranks
GetInnerOuterExpo2DynamicSendRecvRanks = dynamic.inner_outer_exponential_ranks
GetInnerOuterRingDynamicSendRecvRanks = dynamic.inner_outer_ring_ranks
InferDestinationFromSourceRanks = inference.InferDestinationFromSourceRanks
InferSourceFromDestinationRanks = inference.InferSourceFromDestinationRanks
GetRecvWeights = topology.recv_weights
GetSendWeights = topology.send_weights
IsRegularGraph = topology.is_regular
IsTopologyEquivalent = topology.is_equivalent
MeshGrid2DGraph = topology.mesh
StarGraph = topology.star
SymmetricExponentialGraph = topology.symmetric_exponential

# The names that BlueFog has here.
OWN = [
    "ExponentialGraph",
    "ExponentialTwoGraph",
    "FullyConnectedGraph",
    "GetDynamicOnePeerSendRecvRanks",
    "GetExp2DynamicSendRecvMachineRanks",
    "GetInnerOuterExpo2DynamicSendRecvRanks",
    "GetInnerOuterRingDynamicSendRecvRanks",
    "GetRecvWeights",
    "GetSendWeights",
    "InferDestinationFromSourceRanks",
    "InferSourceFromDestinationRanks",
    "IsRegularGraph",
    "IsTopologyEquivalent",
    "MeshGrid2DGraph",
    "RingGraph",
    "StarGraph",
    "SymmetricExponentialGraph",
]
__all__ = [*OWN, "isPowerOf", *topology.__all__]  # noqa: PLE0604  strings, all of them


def ExponentialTwoGraph(size: int) -> nx.DiGraph:
    """As `fogdist.topology.exponential` of base 2."""
    return topology.exponential(size)


def RingGraph(size: int, connect_style: int = 0, *, left_connect: bool | None = None) -> nx.DiGraph:
    """As `fogdist.topology.ring`; with `left_connect`, by position too, the ring of BlueFog 0.1 in one direction."""
    if isinstance(connect_style, bool):
        left_connect = connect_style
    return topology.ring(size, connect_style if left_connect is None else 1 if left_connect else 2)


def isPowerOf(x: int, base: int) -> bool:
    """Returns whether `x` is a power of an integer `base` of at least 2."""
    while x > 1 and x % base == 0:
        x //= base
    return x == 1


def __getattr__(name: str) -> Any:
    if name in topology.__all__:
        return getattr(topology, name)
    return find(name, "bluefog.common.topology_util", globals())
