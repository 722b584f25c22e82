"""Weights of a topology: a rank's share of the mixing matrix, how well it mixes, and rules that choose weights for edges.

The convention everywhere: `W[i, j]` is the weight of the edge i -> j, as in networkx's adjacency matrix. A
row is a sender, a column a receiver: rank j gets ``sum_i W[i, j] * x_i``, and averages if its column sums
to 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fogdist.lazy import nx
from fogdist.topology.validation import TopologyError, check_rank, check_topology, edge_weight

Matrix = NDArray[np.float64]

# Sums of a few thousand float32 weights stay within this of 1; a forgotten weight does not.
SUM_TOLERANCE = 1e-5


def build_topology(size: int, edges: Iterable[tuple[int, int, float | Fraction]]) -> nx.DiGraph:
    """Returns the graph on ranks 0 ... size-1 with the given (source, destination, weight) edges.

    Edges are inserted in ascending order, so that predecessors and successors come in ascending order of
    rank, and weights are Python floats.
    """
    topology = nx.DiGraph()
    topology.add_nodes_from(range(size))
    topology.add_weighted_edges_from((i, j, float(weight)) for i, j, weight in sorted(edges))
    return topology


def in_neighbors(topology: nx.DiGraph, rank: int) -> list[int]:
    """Returns the ranks that send to `rank` in a topology: ascending Python ints, `rank` itself left out."""
    return sorted({int(source) for source in topology.predecessors(rank)} - {rank})


def out_neighbors(topology: nx.DiGraph, rank: int) -> list[int]:
    """Returns the ranks that `rank` sends to in a topology: ascending Python ints, `rank` itself left out."""
    return sorted({int(destination) for destination in topology.successors(rank)} - {rank})


def mixing_matrix(topology: nx.DiGraph) -> Matrix:
    """Returns the mixing matrix of a topology.

    Args:
        topology: A graph on the ranks 0 ... n-1; an edge without a weight weighs 1.

    Returns:
        A float64 array W of shape (n, n): `W[i, j]` is the weight of the edge i -> j, 0 where there is none.

    Raises:
        TypeError: `topology` is not a networkx.DiGraph, or a weight is not a real number.
        TopologyError: Its nodes are not 0 ... n-1, or a weight is not finite.
    """
    size = check_topology(topology)
    matrix = np.zeros((size, size))
    for i, j in topology.edges:
        matrix[int(i), int(j)] = edge_weight(topology, i, j)
    return matrix


def has_weights(topology: nx.DiGraph) -> bool:
    """Returns whether any edge has a weight. A graph without weights stands for plain means."""
    return any("weight" in data for _, _, data in topology.edges(data=True))


def check_matrix(W: ArrayLike, argument: str = "W", *, averages: bool = True) -> Matrix:
    """Returns `W` as float64 after checking that it is a mixing matrix.

    Args:
        W: Real numbers of shape (n, n), n at least 1; negative weights are allowed.
        argument: Name of the caller's argument, for the message.
        averages: Whether columns must sum to 1 within 1e-5, so that each receiver averages.

    Raises:
        TypeError: `W` does not hold real numbers.
        TopologyError: `W` is not square, holds an infinity or NaN, or a column does not sum to 1.
    """
    try:
        array = np.asarray(W)
    except ValueError as error:  # Rows of different lengths.
        raise TopologyError(f"{argument} must be a square matrix: {error}") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{argument} must be a matrix of real numbers, got dtype {array.dtype}")
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.size == 0:
        raise TopologyError(f"{argument} must be a square matrix, got shape {array.shape}")
    matrix = array.astype(np.float64)
    if not np.isfinite(matrix).all():
        i, j = np.argwhere(~np.isfinite(matrix))[0]
        raise TopologyError(f"{argument} must hold finite numbers, got {argument}[{i}, {j}] = {matrix[i, j]}")
    totals = matrix.sum(axis=0)
    wrong = np.flatnonzero(np.abs(totals - 1.0) > SUM_TOLERANCE)
    if averages and wrong.size:
        raise TopologyError(
            f"each column of {argument} must sum to 1, got {totals[wrong[0]]:.9g} in column {wrong[0]}"
            + (f" (and {wrong.size - 1} more)" if wrong.size > 1 else "")
        )
    return matrix


def recv_weights(topo: nx.DiGraph, rank: SupportsIndex) -> tuple[float, dict[int, float]]:
    """Returns the weights with which `rank` receives: its column of the mixing matrix.

    Args:
        topo: A graph on the ranks 0 ... n-1.
        rank: The receiver.

    Returns:
        (self weight, {source rank: weight of the edge source -> rank}), sources ascending. The self weight is
        0.0 if the rank has no self loop.

    Raises:
        TypeError: `topo` is not a networkx.DiGraph, `rank` not an integer, or a weight not a real number.
        TopologyError: The nodes are not 0 ... n-1, `rank` is none of them, or a weight is not finite.
    """
    rank = check_rank(rank, check_topology(topo, "topo"), "rank")
    weights = {source: edge_weight(topo, source, rank) for source in in_neighbors(topo, rank)}
    return edge_weight(topo, rank, rank) if topo.has_edge(rank, rank) else 0.0, weights


def uniform_weights(topology: nx.DiGraph) -> nx.DiGraph:
    """Returns the same edges with the plain mean of every rank and its in-neighbors, self loops added.

    `W[i, j] = 1 / (in-degree of j + 1)`, self loops not counted. A rank uses these weights if the weights of the
    topology are ignored. Columns sum to 1; rows do too if, self loops aside, the graph is regular.

    Args:
        topology: A graph on the ranks 0 ... n-1; its weights are not looked at.

    Raises:
        TypeError: `topology` is not a networkx.DiGraph.
        TopologyError: Its nodes are not 0 ... n-1.
    """
    size = check_topology(topology)
    sources = [[j, *in_neighbors(topology, j)] for j in range(size)]
    edges = [(i, j, Fraction(1, len(sources[j]))) for j in range(size) for i in sources[j]]
    return build_topology(size, edges)


def metropolis_hastings_weights(topology: nx.DiGraph) -> nx.DiGraph:
    """Returns the same edges with Metropolis-Hastings weights, self loops added.

    `W[i, j] = 1 / (1 + max(degree i, degree j))` on an edge, self loops not counted in the degrees, and a
    self loop keeps the rest: symmetric and doubly stochastic on any symmetric graph (Xiao and Boyd, "Fast
    linear iterations for distributed averaging", Systems & Control Letters 53, 2004).

    Args:
        topology: A graph on the ranks 0 ... n-1 in which i -> j comes with j -> i; its weights are not looked
            at.

    Raises:
        TypeError: `topology` is not a networkx.DiGraph.
        TopologyError: Its nodes are not 0 ... n-1, or an edge has no reverse.
    """
    size = check_topology(topology)
    neighbors = [out_neighbors(topology, i) for i in range(size)]
    edges = []
    for i in range(size):
        rest = Fraction(1)  # Exact: the self weight does not collect the rounding of the other weights.
        for j in neighbors[i]:
            if i not in neighbors[j]:
                raise TopologyError(
                    f"topology must have the reverse of every edge, got {i} -> {j} without {j} -> {i}"
                )
            weight = Fraction(1, 1 + max(len(neighbors[i]), len(neighbors[j])))
            edges.append((i, j, weight))
            rest -= weight
        edges.append((i, i, rest))
    return build_topology(size, edges)


def spectral_gap(W: ArrayLike) -> float:
    """Returns 1 - |lambda_2|, lambda_2 being the eigenvalue of second-largest modulus of a mixing matrix.

    Repeated mixing shrinks the consensus distance by |lambda_2| a step in the long run: a gap of 1 means the
    exact average at once, a gap of 0 that some ranks never agree (the graph is disconnected or periodic).

    Args:
        W: Real matrix of shape (n, n) whose columns or rows (or both) sum to 1; `mixing_matrix` of a
            topology, or a product of the matrices of several steps.

    Returns:
        A float in [0, 1] for nonnegative weights; 1.0 for n = 1. Negative weights that make mixing diverge
        give a negative gap.

    Raises:
        TypeError: `W` does not hold real numbers.
        TopologyError: `W` is not a square matrix of finite numbers whose columns or rows sum to 1.
    """
    matrix = check_matrix(W, averages=False)
    sums = [matrix.sum(axis=axis) for axis in (0, 1)]
    if not any(np.allclose(s, 1.0, rtol=0.0, atol=SUM_TOLERANCE) for s in sums):
        raise TopologyError(f"W must have columns or rows that sum to 1, got column sums {sums[0]}")
    eigenvalues = np.linalg.eigvals(matrix)
    # One eigenvalue is 1 (the vector of the average); the rest is what mixing has to shrink.
    rest = np.delete(eigenvalues, np.argmin(np.abs(eigenvalues - 1.0)))
    gap = 1.0 - float(np.max(np.abs(rest), initial=0.0))
    # A modulus of exactly 1 comes out of the eigenvalue solver with rounding on either side.
    return 0.0 if abs(gap) < 1e-12 else gap
