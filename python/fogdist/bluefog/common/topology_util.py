"""`bluefog.common.topology_util`: the graphs and generators of BlueFog; those of `fogdist.topology` under their old names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, SupportsIndex

import networkx as nx
import numpy as np
import torch.distributed as dist

from fogdist import topology
from fogdist.agreement import gather
from fogdist.bluefog.deprecation import find
from fogdist.context import current
from fogdist.topology.sequences import inner_outer, walk_of
from fogdist.topology.validation import check_flags, check_int, check_rank, check_topology

Inferred = list[int] | tuple[list[int], np.ndarray]


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


def InferSourceFromDestinationRanks(
    dst_ranks: Iterable[SupportsIndex],
    construct_adjacency_matrix: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Inferred:
    """Returns the ranks that send to this one, ascending, given the destinations of every rank. Collective.

    With `construct_adjacency_matrix` it returns (sources, W), W being a float64 array of shape (n, n), the adjacency
    matrix with self loops divided by its column sums: `W[i, j]` is the weight of the edge i -> j.
    """
    return _infer(dst_ranks, "dst_ranks", construct_adjacency_matrix, group)


def InferDestinationFromSourceRanks(
    src_ranks: Iterable[SupportsIndex],
    construct_adjacency_matrix: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Inferred:
    """Returns the ranks that this one sends to, given the sources of every rank, as `InferSourceFromDestinationRanks`."""
    return _infer(src_ranks, "src_ranks", construct_adjacency_matrix, group)


def _infer(
    ranks: Iterable[SupportsIndex], argument: str, with_matrix: bool, group: dist.ProcessGroup | None
) -> Inferred:
    """Returns the ranks that have named this one; with a matrix, also that of the plain mean."""
    check_flags(construct_adjacency_matrix=with_matrix)
    context = current(group)
    named = topology.check_neighbor_ranks(ranks, context.rank, context.size, argument)
    edges = np.eye(context.size)
    for i, others in enumerate(gather(context.backend, named)):
        edges[i, others] = 1.0
    found = [int(i) for i in np.flatnonzero(edges[:, context.rank]) if i != context.rank]
    if argument == "src_ranks":  # a rank that names sources is the end of its edges
        edges = edges.T
    return (found, edges / edges.sum(axis=0)) if with_matrix else found


# The names that BlueFog has here.
OWN: dict[str, Any] = {
    "ExponentialGraph": topology.exponential,
    "ExponentialTwoGraph": ExponentialTwoGraph,
    "FullyConnectedGraph": topology.fully_connected,
    "GetDynamicOnePeerSendRecvRanks": GetDynamicOnePeerSendRecvRanks,
    "GetExp2DynamicSendRecvMachineRanks": GetExp2DynamicSendRecvMachineRanks,
    "GetInnerOuterExpo2DynamicSendRecvRanks": GetInnerOuterExpo2DynamicSendRecvRanks,
    "GetInnerOuterRingDynamicSendRecvRanks": GetInnerOuterRingDynamicSendRecvRanks,
    "GetRecvWeights": topology.recv_weights,
    "GetSendWeights": GetSendWeights,
    "InferDestinationFromSourceRanks": InferDestinationFromSourceRanks,
    "InferSourceFromDestinationRanks": InferSourceFromDestinationRanks,
    "IsRegularGraph": topology.is_regular,
    "IsTopologyEquivalent": topology.is_equivalent,
    "MeshGrid2DGraph": topology.mesh,
    "RingGraph": RingGraph,
    "StarGraph": topology.star,
    "SymmetricExponentialGraph": topology.symmetric_exponential,
}
__all__ = [*OWN, "isPowerOf", *topology.__all__]  # noqa: PLE0604  strings, all of them


def __getattr__(name: str) -> Any:
    if name in topology.__all__:
        return getattr(topology, name)
    return OWN[name] if name in OWN else find(name, "bluefog.common.topology_util", OWN)
