"""Infers the sources of each rank from the destinations of all ranks, and vice versa."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np
import torch.distributed as dist

from fogdist.agreement import gather
from fogdist.context import current
from fogdist.topology import check_neighbor_ranks
from fogdist.topology.validation import check_flags

Inferred = list[int] | tuple[list[int], np.ndarray]


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
    edges, rank = _edges(dst_ranks, "dst_ranks", construct_adjacency_matrix, group)
    sources = [int(i) for i in np.flatnonzero(edges[:, rank]) if i != rank]
    return (sources, edges / edges.sum(axis=0)) if construct_adjacency_matrix else sources


def InferDestinationFromSourceRanks(
    src_ranks: Iterable[SupportsIndex],
    construct_adjacency_matrix: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Inferred:
    """Returns the ranks that this one sends to, given the sources of every rank, as `InferSourceFromDestinationRanks`."""
    edges, rank = _edges(src_ranks, "src_ranks", construct_adjacency_matrix, group)
    destinations = [int(j) for j in np.flatnonzero(edges[:, rank]) if j != rank]
    return (destinations, edges.T / edges.sum(axis=1)) if construct_adjacency_matrix else destinations


def _edges(
    ranks: Iterable[SupportsIndex], argument: str, with_matrix: bool, group: dist.ProcessGroup | None
) -> tuple[np.ndarray, int]:
    """Returns a matrix with ones on the diagonal, and in row i those that rank i has named; and this rank."""
    check_flags(construct_adjacency_matrix=with_matrix)
    context = current(group)
    edges = np.eye(context.size)
    named = gather(context.backend, check_neighbor_ranks(ranks, context.rank, context.size, argument))
    for i, others in enumerate(named):
        edges[i, others] = 1.0
    return edges, context.rank
