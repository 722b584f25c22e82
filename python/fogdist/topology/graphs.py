"""The static topologies, and comparisons of topologies.

Every graph is a networkx.DiGraph on the ranks 0 ... size-1 with a self loop at every rank and doubly
stochastic weights, so that one mixing step keeps the average of all ranks. Arguments are those of BlueFog.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import SupportsIndex

from fogdist.lazy import nx
from fogdist.topology.validation import TopologyError, check_int, check_rank, check_topology, edge_weight
from fogdist.topology.weights import build_topology, metropolis_hastings_weights


def _circulant(size: int, distances: Iterable[int]) -> nx.DiGraph:
    """Every rank sends to itself and to the ranks at these clockwise distances, all with one weight."""
    distances = {0, *(distance % size for distance in distances)}
    weight = Fraction(1, len(distances))
    return build_topology(size, ((i, (i + d) % size, weight) for i in range(size) for d in distances))


def _powers(base: int, limit: int) -> list[int]:
    """1, base, base^2, ... up to and including `limit`."""
    # By multiplication: floating-point logarithms miss some powers, such as 3^5.
    powers = []
    power = 1
    while power <= limit:
        powers.append(power)
        power *= base
    return powers


def exponential(size: SupportsIndex, base: SupportsIndex = 2) -> nx.DiGraph:
    """Returns the exponential graph: rank i sends to i + 1, i + base, i + base^2, ... (mod size), uniform weights.

    With base 2, the default topology of `fogdist.init()`, it has ceil(log2(size)) out-neighbors a rank, and its spectral
    gap shrinks only like 1/log(size) (Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep
    Training", NeurIPS 2021, arXiv 2110.13363).

    Args:
        size: Number of ranks, at least 1.
        base: At least 2. A larger base has fewer neighbors and mixes more slowly.

    Raises:
        TypeError: `size` or `base` is not an integer.
        TopologyError: `size` is below 1 or `base` below 2.
    """
    size = check_int(size, "size", minimum=1)
    base = check_int(base, "base", minimum=2)
    return _circulant(size, _powers(base, size - 1))


def symmetric_exponential(size: SupportsIndex, base: SupportsIndex = 4) -> nx.DiGraph:
    """Returns the exponential graph with every edge both ways: i +- 1, i +- base, i +- base^2, ... (mod
    size).

    Only powers up to size / 2 count, the shorter way around the circle. Uniform weights; W is symmetric.

    Args:
        size: Number of ranks, at least 1.
        base: At least 2.

    Raises:
        TypeError: `size` or `base` is not an integer.
        TopologyError: `size` is below 1 or `base` below 2.
    """
    size = check_int(size, "size", minimum=1)
    base = check_int(base, "base", minimum=2)
    powers = _powers(base, size // 2)
    return _circulant(size, [*powers, *(-power for power in powers)])


def _grid_shape(size: int, shape: tuple[SupportsIndex, SupportsIndex] | None) -> tuple[int, int]:
    if shape is None:
        rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
        return rows, size // rows
    try:
        given_rows, given_columns = shape
    except (TypeError, ValueError):
        raise TypeError(f"shape must be a pair (rows, columns) or None, got {shape!r}") from None
    rows = check_int(given_rows, "shape[0]", minimum=1)
    columns = check_int(given_columns, "shape[1]", minimum=1)
    if rows * columns != size:
        raise TopologyError(f"shape must have the product size = {size}, got {(rows, columns)}")
    return rows, columns


def mesh(size: SupportsIndex, shape: tuple[SupportsIndex, SupportsIndex] | None = None) -> nx.DiGraph:
    """Returns a two-dimensional grid with up to four neighbors a rank, without wrap-around.

    Rank ``row * columns + column`` stands at (row, column). Metropolis-Hastings weights; W is symmetric.

    Args:
        size: Number of ranks, at least 1.
        shape: (rows, columns) with rows * columns == size. None: the factors nearest to the square root, rows
            first and not more rows than columns (a prime size gives a line).

    Raises:
        TypeError: `size` or an entry of `shape` is not an integer, or `shape` is not a pair.
        TopologyError: `size` or an entry of `shape` is below 1, or the product of `shape` is not `size`.
    """
    size = check_int(size, "size", minimum=1)
    grid = nx.grid_2d_graph(*_grid_shape(size, shape), create_using=nx.DiGraph)
    return metropolis_hastings_weights(nx.convert_node_labels_to_integers(grid))


def star(size: SupportsIndex, center_rank: SupportsIndex = 0) -> nx.DiGraph:
    """Returns a star: the center and every other rank exchange with weight 1/size.

    Self weights are 1/size at the center and 1 - 1/size elsewhere; W is symmetric.

    Args:
        size: Number of ranks, at least 1.
        center_rank: The rank in the middle, in [0, size).

    Raises:
        TypeError: An argument is not an integer.
        TopologyError: `size` is below 1, or `center_rank` outside [0, size).
    """
    size = check_int(size, "size", minimum=1)
    center = check_rank(center_rank, size, "center_rank")
    edge = Fraction(1, size)
    edges = [(center, center, edge)]
    for leaf in range(size):
        if leaf != center:
            edges += [(leaf, leaf, 1 - edge), (leaf, center, edge), (center, leaf, edge)]
    return build_topology(size, edges)


def ring(size: SupportsIndex, connect_style: SupportsIndex = 0) -> nx.DiGraph:
    """Returns a ring with uniform weights: 1/3 each when bidirectional, 1/2 each when not.

    One rank is left alone with weight 1; with two, all weights are 1/2 in every style.

    Args:
        size: Number of ranks, at least 1.
        connect_style: 0: to both sides. 1: rank i sends to the left, i - 1. 2: rank i sends to the right, i +
            1.

    Raises:
        TypeError: An argument is not an integer.
        TopologyError: `size` is below 1, or `connect_style` is not 0, 1 or 2.
    """
    size = check_int(size, "size", minimum=1)
    style = check_int(connect_style, "connect_style")
    distances = {0: (-1, 1), 1: (-1,), 2: (1,)}
    if style not in distances:
        raise TopologyError(f"connect_style must be 0 (bidirectional), 1 (left) or 2 (right), got {style}")
    return _circulant(size, distances[style])


def fully_connected(size: SupportsIndex) -> nx.DiGraph:
    """Returns the complete graph: every weight is 1/size, and one step gives the exact average.

    Args:
        size: Number of ranks, at least 1.

    Raises:
        TypeError: `size` is not an integer.
        TopologyError: `size` is below 1.
    """
    size = check_int(size, "size", minimum=1)
    return _circulant(size, range(size))


def is_equivalent(topo1: nx.DiGraph | None, topo2: nx.DiGraph | None) -> bool:
    """Returns whether two topologies have the same ranks, the same edges and exactly the same weights.

    An edge of weight 0 is an edge, since ranks communicate over it. The order in which a graph was built does
    not matter. None is equivalent to nothing.

    Raises:
        TypeError: An argument is neither None nor a networkx.DiGraph, or a weight is not a real number.
        TopologyError: The nodes of a graph are not 0 ... n-1, or a weight is not finite.
    """
    if topo1 is None or topo2 is None:
        return False
    sizes = check_topology(topo1, "topo1"), check_topology(topo2, "topo2")
    weights = [{edge: edge_weight(topo, *edge) for edge in topo.edges} for topo in (topo1, topo2)]
    return sizes[0] == sizes[1] and weights[0] == weights[1]


def is_regular(topo: nx.DiGraph) -> bool:
    """Returns whether all ranks have the same in-degree and the same out-degree, self loops counted.

    On a regular graph with a self loop everywhere the plain mean over in-neighbors keeps the global average.

    Raises:
        TypeError: `topo` is not a networkx.DiGraph.
        TopologyError: Its nodes are not 0 ... n-1.
    """
    check_topology(topo, "topo")
    return len({degree for _, degree in [*topo.in_degree(), *topo.out_degree()]}) == 1
