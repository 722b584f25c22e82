"""`bluefog.common.topology_util`: the graphs and generators of BlueFog; those of `fogdist.topology` under their old names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import networkx as nx
import numpy as np
import torch.distributed as dist

from fogdist import topology
from fogdist.agreement import gather
from fogdist.bluefog.deprecation import find
from fogdist.context import current
from fogdist.topology import dynamic
from fogdist.topology.validation import check_flags

Inferred = list[int] | tuple[list[int], np.ndarray]


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


def InferSourceFromDestinationRanks(
    dst_ranks: Iterable[SupportsIndex],
    construct_adjacency_matrix: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Inferred:
    """Returns the ranks that send to this one, given the destinations of every rank. Collective.

    Args:
        dst_ranks: The ranks this one sends to.
        construct_adjacency_matrix: True to get the mixing matrix of the plain mean too.
        group: The group of ranks; by default that of `init`.

    Returns:
        The sources, ascending; or (sources, W), W being a float64 array of shape (n, n), the adjacency
        matrix with self loops divided by its column sums: `W[i, j]` is the weight of the edge i -> j.

    Raises:
        TypeError: A rank is not an integer, or `construct_adjacency_matrix` not a bool.
        TopologyError: A rank is out of range, given twice, or this rank itself. It is a ValueError and an
            AssertionError.
    """
    return _infer(
        dst_ranks, "dst_ranks", construct_adjacency_matrix, topology.matrix_from_destinations, group
    )


def InferDestinationFromSourceRanks(
    src_ranks: Iterable[SupportsIndex],
    construct_adjacency_matrix: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Inferred:
    """Returns the ranks that this one sends to, given the sources of every rank, as `InferSourceFromDestinationRanks`."""
    return _infer(src_ranks, "src_ranks", construct_adjacency_matrix, topology.matrix_from_sources, group)


def _infer(
    ranks: Iterable[SupportsIndex],
    argument: str,
    with_matrix: bool,
    matrix: Callable[[Sequence[list[int]]], np.ndarray],
    group: dist.ProcessGroup | None,
) -> Inferred:
    check_flags(construct_adjacency_matrix=with_matrix)
    context = current(group)
    peers = gather(
        context.backend, topology.check_neighbor_ranks(ranks, context.rank, context.size, argument)
    )
    others = topology.transpose_neighbor_ranks(peers)[context.rank]
    return (others, matrix(peers)) if with_matrix else others


# The names that BlueFog has here.
OWN: dict[str, Any] = {
    "ExponentialGraph": topology.exponential,
    "ExponentialTwoGraph": ExponentialTwoGraph,
    "FullyConnectedGraph": topology.fully_connected,
    "GetDynamicOnePeerSendRecvRanks": dynamic.one_peer_ranks,
    "GetExp2DynamicSendRecvMachineRanks": dynamic.exp2_machine_ranks,
    "GetInnerOuterExpo2DynamicSendRecvRanks": dynamic.inner_outer_exponential_ranks,
    "GetInnerOuterRingDynamicSendRecvRanks": dynamic.inner_outer_ring_ranks,
    "GetRecvWeights": topology.recv_weights,
    "GetSendWeights": topology.send_weights,
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
