"""Infers the sources of each rank from the destinations of all ranks, and vice versa."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import SupportsIndex

import numpy as np
import torch.distributed as dist

from fogdist.agreement import gather
from fogdist.context import current
from fogdist.topology import (
    check_neighbor_ranks,
    matrix_from_destinations,
    matrix_from_sources,
    transpose_neighbor_ranks,
)
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
    return _infer(dst_ranks, "dst_ranks", construct_adjacency_matrix, matrix_from_destinations, group)


def InferDestinationFromSourceRanks(
    src_ranks: Iterable[SupportsIndex],
    construct_adjacency_matrix: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Inferred:
    """Returns the ranks that this one sends to, given the sources of every rank, as `InferSourceFromDestinationRanks`."""
    return _infer(src_ranks, "src_ranks", construct_adjacency_matrix, matrix_from_sources, group)


def _infer(
    ranks: Iterable[SupportsIndex],
    argument: str,
    with_matrix: bool,
    matrix: Callable[[Sequence[list[int]]], np.ndarray],
    group: dist.ProcessGroup | None,
) -> Inferred:
    check_flags(construct_adjacency_matrix=with_matrix)
    context = current(group)
    peers = gather(context.backend, check_neighbor_ranks(ranks, context.rank, context.size, argument))
    others = transpose_neighbor_ranks(peers)[context.rank]
    return (others, matrix(peers)) if with_matrix else others
