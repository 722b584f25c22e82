"""`bluefog.common.topology_util`: the graphs and generators of BlueFog; those of `fogdist.topology` under their old names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, SupportsIndex

import networkx as nx

from fogdist import topology
from fogdist.bluefog.common import inference
from fogdist.bluefog.deprecation import find
from fogdist.topology.sequences import inner_outer, walk_of
from fogdist.topology.validation import check_int, check_rank, check_topology

ExponentialGraph = topology.exponential
FullyConnectedGraph = topology.fully_connected
InferDestinationFromSourceRanks = inference.InferDestinationFromSourceRanks
InferSourceFromDestinationRanks = inference.InferSourceFromDestinationRanks
GetRecvWeights = topology.recv_weights
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


def _steps(sequence: topology.Topology, self_rank: SupportsIndex) -> Iterator[tuple[list[int], list[int]]]:
    """Returns an endless iterator of (ranks that a rank sends to, ranks that it receives from), ascending."""
    rank = check_rank(self_rank, sequence.size, "self_rank")
    rounds = (sequence.peers(rank, t) for t in count())
    return ((peers["dst_weights"], list(peers["src_weights"])) for peers in rounds)


def GetDynamicOnePeerSendRecvRanks(
    topo: nx.DiGraph, self_rank: SupportsIndex
) -> Iterator[tuple[list[int], list[int]]]:
    """Returns the steps of a rank along `fogdist.topology.one_peer` of a graph, of any period."""
    return _steps(walk_of(topo, "one-peer"), self_rank)


def GetExp2DynamicSendRecvMachineRanks(
    world_size: SupportsIndex, local_size: SupportsIndex, self_rank: SupportsIndex, local_rank: SupportsIndex
) -> Iterator[tuple[list[int], list[int]]]:
    """Returns the steps of a rank's machine along `fogdist.topology.one_peer_exponential` of at least two machines."""
    world_size = check_int(world_size, "world_size", minimum=1)
    local_size = check_int(local_size, "local_size", minimum=1)
    rank = check_rank(self_rank, world_size, "self_rank")
    if world_size % local_size or world_size == local_size:
        raise topology.TopologyError(
            f"world_size must be a multiple of local_size, at least 2 * local_size = {2 * local_size} (two "
            f"machines), got world_size {world_size}"
        )
    if check_rank(local_rank, local_size, "local_rank") != rank % local_size:
        raise topology.TopologyError(
            f"local_rank must be self_rank % local_size = {rank % local_size}, got {local_rank}"
        )
    return _steps(topology.one_peer_exponential(world_size // local_size), rank // local_size)


def GetInnerOuterRingDynamicSendRecvRanks(
    world_size: SupportsIndex, local_size: SupportsIndex, self_rank: SupportsIndex
) -> Iterator[tuple[list[int], list[int]]]:
    """Returns a rank's steps: one rank of each machine in turn goes to the next machine, the others around their machine."""
    return _steps(inner_outer("inner-outer-ring", world_size, local_size, lambda t, n: 1), self_rank)


def GetInnerOuterExpo2DynamicSendRecvRanks(
    world_size: SupportsIndex, local_size: SupportsIndex, self_rank: SupportsIndex
) -> Iterator[tuple[list[int], list[int]]]:
    """Returns the steps of a rank along `fogdist.topology.inner_outer_exponential`."""
    return _steps(topology.inner_outer_exponential(world_size, local_size), self_rank)


def GetSendWeights(topo: nx.DiGraph, rank: SupportsIndex) -> tuple[float, dict[int, float]]:
    """Returns the weights with which `rank` sends, as `GetRecvWeights` returns those with which it receives."""
    check_topology(topo, "topo")
    return topology.recv_weights(topo.reverse(), rank)


def isPowerOf(x: int, base: int) -> bool:
    """Returns whether `x` is a power of an integer `base` of at least 2."""
    while x > 1 and x % base == 0:
        x //= base
    return x == 1


def __getattr__(name: str) -> Any:
    if name in topology.__all__:
        return getattr(topology, name)
    return find(name, "bluefog.common.topology_util", globals())
