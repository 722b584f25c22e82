"""Infers the sources of each rank from the destinations of all ranks, and vice versa."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np
import torch.distributed as dist

from fogdist.agreement import gather
from fogdist.context import Context, current
from fogdist.topology import (
    check_neighbor_ranks,
    matrix_from_destinations,
    matrix_from_sources,
    transpose_neighbor_ranks,
)
from fogdist.topology.validation import check_flags


def InferSourceFromDestinationRanks(
    dst_ranks: Iterable[SupportsIndex],
    construct_adjacency_matrix: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> list[int] | tuple[list[int], np.ndarray]:
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
    check_flags(construct_adjacency_matrix=construct_adjacency_matrix)
    context = current(group)
    destinations = _gather_lists(context, dst_ranks, "dst_ranks")
    sources = transpose_neighbor_ranks(destinations)[context.rank]
    return (sources, matrix_from_destinations(destinations)) if construct_adjacency_matrix else sources


def InferDestinationFromSourceRanks(
    src_ranks: Iterable[SupportsIndex],
    construct_adjacency_matrix: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> list[int] | tuple[list[int], np.ndarray]:
    """Returns the ranks that this one sends to, given the sources of every rank. Collective.

    Args:
        src_ranks: The ranks this one receives from.
        construct_adjacency_matrix: As in `InferSourceFromDestinationRanks`.
        group: As in `InferSourceFromDestinationRanks`.

    Returns:
        The destinations, ascending; or (destinations, W) as in `InferSourceFromDestinationRanks`.

    Raises:
        TypeError: A rank is not an integer, or `construct_adjacency_matrix` not a bool.
        TopologyError: A rank is out of range, given twice, or this rank itself.
    """
    check_flags(construct_adjacency_matrix=construct_adjacency_matrix)
    context = current(group)
    sources = _gather_lists(context, src_ranks, "src_ranks")
    destinations = transpose_neighbor_ranks(sources)[context.rank]
    return (destinations, matrix_from_sources(sources)) if construct_adjacency_matrix else destinations


def _gather_lists(context: Context, ranks: Iterable[SupportsIndex], argument: str) -> list[list[int]]:
    peers = check_neighbor_ranks(ranks, context.rank, context.size, argument)
    return gather(context.backend, peers)
