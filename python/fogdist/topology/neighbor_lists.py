"""Peers as lists: the neighbors of a rank in a graph, and results from the lists of all ranks.

A rank may know only the ranks that it sends to (or receives from). The lists of all ranks, transposed, give the other
direction, and the mixing matrix of the plain mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from fogdist.lazy import nx
from fogdist.topology.validation import check_neighbor_ranks


def in_neighbors(topology: nx.DiGraph, rank: int) -> list[int]:
    """Returns the ranks that send to `rank` in a topology: ascending Python ints, `rank` itself left out."""
    return sorted({int(source) for source in topology.predecessors(rank)} - {rank})


def out_neighbors(topology: nx.DiGraph, rank: int) -> list[int]:
    """Returns the ranks that `rank` sends to in a topology: ascending Python ints, `rank` itself left out."""
    return sorted({int(destination) for destination in topology.successors(rank)} - {rank})


def transpose_neighbor_ranks(neighbors: Sequence[Iterable[SupportsIndex]]) -> list[list[int]]:
    """Returns every rank's sources from every rank's destinations, or destinations from sources.

    Args:
        neighbors: `neighbors[i]` holds the peers of rank i; there are as many lists as ranks.

    Returns:
        A list in which entry j holds, ascending, the ranks i with j in `neighbors[i]`.

    Raises:
        TypeError: A list is not an iterable of integers.
        TopologyError: A rank is out of range, twice in one list, or in its own list.
    """
    size = len(neighbors)
    transposed: list[list[int]] = [[] for _ in range(size)]
    for i, ranks in enumerate(neighbors):
        for j in check_neighbor_ranks(ranks, i, size, f"neighbors[{i}]"):
            transposed[j].append(i)
    return transposed


def matrix_from_destinations(destinations: Sequence[Iterable[SupportsIndex]]) -> NDArray[np.float64]:
    """Returns the mixing matrix of the plain mean over each rank and the ranks that send to it.

    Args:
        destinations: `destinations[i]` holds the ranks that rank i sends to; there are as many lists as
            ranks.

    Returns:
        A float64 array W of shape (n, n): (A + I) divided by its column sums, where A[i, j] = 1 if i sends to
        j. Columns sum to 1.

    Raises:
        TypeError: A list is not an iterable of integers.
        TopologyError: A rank is out of range, twice in one list, or in its own list.
    """
    size = len(destinations)
    matrix = np.eye(size)
    for i, ranks in enumerate(destinations):
        matrix[i, check_neighbor_ranks(ranks, i, size, f"destinations[{i}]")] = 1.0
    matrix /= matrix.sum(axis=0)
    return matrix
