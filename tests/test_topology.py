"""Compares the topology package with references written from the definitions, not from the code under test.

References are dense matrices of exact fractions, where `W[i][j]` is the weight of the edge i -> j. No process group is
needed, because all functions here are pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from fogdist import topology
from harness import case

SIZES = range(1, 18)


# --- references ---------------------------------------------------------------------------------------------


def uniform_circle(size: int, is_distance: Callable[[int], bool]) -> list[list[Fraction]]:
    """Rank i sends to j if the clockwise distance is 0 or passes the test; all edges have the same weight."""
    distances = [d for d in range(size) if d == 0 or is_distance(d)]
    return [
        [Fraction(1, len(distances)) if (j - i) % size in distances else Fraction(0) for j in range(size)]
        for i in range(size)
    ]


def is_power(number: int, base: int) -> bool:
    while number % base == 0:
        number //= base
    return number == 1


def mesh_reference(rows: int, columns: int) -> list[list[Fraction]]:
    places = list(itertools.product(range(rows), range(columns)))
    size = len(places)

    def adjacent(a: int, b: int) -> bool:
        return sum(abs(x - y) for x, y in zip(places[a], places[b], strict=True)) == 1

    degrees = [1 + sum(adjacent(i, j) for j in range(size)) for i in range(size)]
    matrix = [
        [Fraction(1, max(degrees[i], degrees[j])) if adjacent(i, j) else Fraction(0) for j in range(size)]
        for i in range(size)
    ]
    for i in range(size):
        matrix[i][i] = 1 - sum(matrix[i])
    return matrix


def star_reference(size: int, center: int) -> list[list[Fraction]]:
    matrix = [[Fraction(0)] * size for _ in range(size)]
    for i in range(size):
        matrix[i][center] = matrix[center][i] = Fraction(1, size)
        if i != center:
            matrix[i][i] = 1 - Fraction(1, size)
    return matrix


def squarest(size: int) -> tuple[int, int]:
    return max((r, size // r) for r in range(1, size + 1) if size % r == 0 and r * r <= size)


Case = tuple[Callable[[int], nx.DiGraph], Callable[[int], list[list[Fraction]]]]
GRAPHS: dict[str, Case] = {
    "exp2": (topology.ExponentialTwoGraph, lambda n: uniform_circle(n, lambda d: d & (d - 1) == 0)),
    "exp_default": (topology.ExponentialGraph, lambda n: uniform_circle(n, lambda d: is_power(d, 2))),
    "exp3": (
        lambda n: topology.ExponentialGraph(n, 3),
        lambda n: uniform_circle(n, lambda d: is_power(d, 3)),
    ),
    "exp5": (
        lambda n: topology.ExponentialGraph(n, base=5),
        lambda n: uniform_circle(n, lambda d: is_power(d, 5)),
    ),
    "symexp_default": (
        topology.SymmetricExponentialGraph,
        lambda n: uniform_circle(n, lambda d: is_power(d if d <= n // 2 else n - d, 4)),
    ),
    "symexp2": (
        lambda n: topology.SymmetricExponentialGraph(n, base=2),
        lambda n: uniform_circle(n, lambda d: is_power(d if d <= n // 2 else n - d, 2)),
    ),
    "mesh": (topology.MeshGrid2DGraph, lambda n: mesh_reference(*squarest(n))),
    "line": (lambda n: topology.MeshGrid2DGraph(n, (n, 1)), lambda n: mesh_reference(n, 1)),
    "star": (topology.StarGraph, lambda n: star_reference(n, 0)),
    "star_last": (lambda n: topology.StarGraph(n, center_rank=n - 1), lambda n: star_reference(n, n - 1)),
    "ring": (topology.RingGraph, lambda n: uniform_circle(n, lambda d: d in (1, n - 1))),
    "ring_left": (lambda n: topology.RingGraph(n, 1), lambda n: uniform_circle(n, lambda d: d == n - 1)),
    "ring_right": (
        lambda n: topology.RingGraph(n, connect_style=2),
        lambda n: uniform_circle(n, lambda d: d == 1),
    ),
    "full": (topology.FullyConnectedGraph, lambda n: uniform_circle(n, lambda d: True)),
}


def as_array(matrix: list[list[Fraction]]) -> np.ndarray:
    return np.array([[float(weight) for weight in row] for row in matrix])


# --- static graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_equals_its_definition(name: str) -> None:
    make, reference = GRAPHS[name]
    for size in SIZES:
        graph = make(size)
        expected = as_array(reference(size))
        # Every weight is the float nearest to the exact fraction, so there is no tolerance.
        np.testing.assert_array_equal(nx.to_numpy_array(graph, nodelist=range(size)), expected)
        np.testing.assert_array_equal(topology.mixing_matrix(graph), expected)
        np.testing.assert_allclose(expected.sum(axis=0), 1.0, rtol=1e-14)
        np.testing.assert_allclose(expected.sum(axis=1), 1.0, rtol=1e-14)


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_is_a_plain_digraph_with_self_loops(name: str) -> None:
    for size in SIZES:
        graph = GRAPHS[name][0](size)
        assert type(graph) is nx.DiGraph
        assert list(graph) == list(range(size))
        assert all(graph.has_edge(rank, rank) for rank in range(size))
        assert all(type(weight) is float and weight > 0 for _, _, weight in graph.edges(data="weight"))
        for rank in range(size):
            assert list(graph.successors(rank)) == sorted(graph.successors(rank))
            assert list(graph.predecessors(rank)) == sorted(graph.predecessors(rank))


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_mixes_to_the_average(name: str) -> None:
    for size in SIZES:
        matrix = topology.mixing_matrix(GRAPHS[name][0](size))
        # The slowest graph here is the line of 17 ranks, with a gap of 0.011; 2 ** 12 steps are more than enough.
        mixed = np.linalg.matrix_power(matrix, 4096)
        np.testing.assert_allclose(mixed, np.full((size, size), 1 / size), atol=1e-10)


def test_powers_are_exact_integers() -> None:
    """Regression: BlueFog used floating-point logarithms; log(243, 3) is 4.999..., so it missed 3^5."""
    assert 243 in topology.ExponentialGraph(300, base=3)[0]
    assert 125 in topology.ExponentialGraph(200, base=5)[0]
    assert 243 in topology.SymmetricExponentialGraph(500, base=3)[0]
    assert list(topology.ExponentialGraph(1001, base=10)[0]) == [0, 1, 10, 100, 1000]
    assert list(topology.ExponentialGraph(1000, base=10)[0]) == [0, 1, 10, 100]


def test_mesh_with_a_shape() -> None:
    np.testing.assert_array_equal(
        topology.mixing_matrix(topology.MeshGrid2DGraph(12, (2, 6))), as_array(mesh_reference(2, 6))
    )
    np.testing.assert_array_equal(
        topology.mixing_matrix(topology.MeshGrid2DGraph(12, [np.int64(4), 3])), as_array(mesh_reference(4, 3))
    )
    # Computed by hand: corners have degree 3, with themselves, and a 2 x 2 grid is a circle of four.
    np.testing.assert_array_equal(
        topology.mixing_matrix(topology.MeshGrid2DGraph(4)),
        np.array([[1, 1, 1, 0], [1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1]]) / 3,
    )


@pytest.mark.parametrize("name", ["exp2", "exp_default", "symexp_default", "mesh", "star", "ring", "full"])
def test_numpy_integers_are_sizes(name: str) -> None:
    make = GRAPHS[name][0]
    assert topology.IsTopologyEquivalent(make(np.int32(6)), make(6))
    assert topology.IsTopologyEquivalent(make(np.array(6)), make(6))


@pytest.mark.parametrize("make", [make for make, _ in GRAPHS.values()], ids=list(GRAPHS))
@pytest.mark.parametrize("size", [0, -1, np.int64(0)])
def test_size_below_one(make: Callable[[int], nx.DiGraph], size: int) -> None:
    for expected in (ValueError, AssertionError):  # BlueFog's scripts catch AssertionError
        with pytest.raises(expected, match=rf"size must be an integer >= 1, got {int(size)}"):
            make(size)


@pytest.mark.parametrize(
    "call",
    [
        lambda: topology.ExponentialTwoGraph(4.0),
        lambda: topology.ExponentialGraph("4"),
        lambda: topology.ExponentialGraph(4, base=2.0),
        lambda: topology.SymmetricExponentialGraph(4, base=None),
        lambda: topology.MeshGrid2DGraph(4, shape=4),
        lambda: topology.MeshGrid2DGraph(4, shape=(4,)),
        lambda: topology.MeshGrid2DGraph(4, shape=(2.0, 2.0)),
        lambda: topology.StarGraph(4, center_rank=0.0),
        lambda: topology.RingGraph(4, connect_style="left"),
        lambda: topology.FullyConnectedGraph(None),
        lambda: topology.GetRecvWeights(topology.RingGraph(4), 1.0),
        lambda: topology.GetSendWeights(np.eye(4), 1),
        lambda: topology.GetDynamicOnePeerSendRecvRanks(nx.complete_graph(4), 0),
        lambda: topology.GetDynamicOnePeerSendRecvRanks(nx.MultiDiGraph([(0, 1)]), 0),
        lambda: topology.GetExp2DynamicSendRecvMachineRanks(8, 4, 0, 0.0),
        lambda: topology.GetInnerOuterRingDynamicSendRecvRanks(8.0, 4, 0),
        lambda: topology.GetInnerOuterExpo2DynamicSendRecvRanks(8, 4, None),
        lambda: topology.IsTopologyEquivalent(topology.RingGraph(4), "ring"),
        lambda: topology.IsRegularGraph(None),
        lambda: topology.mixing_matrix(None),
        lambda: topology.uniform_weights(nx.path_graph(3)),
        lambda: topology.metropolis_hastings_weights(nx.path_graph(3)),
        lambda: topology.spectral_gap(np.eye(3) * 1j),
        lambda: topology.by_name(2, 4),
        lambda: topology.by_name("ring", 4.0),
        lambda: topology.matrix_from_sources([1, 0]),
        lambda: topology.matrix_from_destinations([[1.0], [0]]),
        lambda: topology.transpose_neighbor_ranks([["1"], [0]]),
    ],
)
def test_wrong_type(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"must (be|have|hold)"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: topology.ExponentialGraph(4, base=1), "base must be an integer >= 2, got 1"),
        (lambda: topology.SymmetricExponentialGraph(4, base=0), "base must be an integer >= 2, got 0"),
        (lambda: topology.MeshGrid2DGraph(6, shape=(2, 2)), r"shape must .* size = 6, got \(2, 2\)"),
        (lambda: topology.MeshGrid2DGraph(4, shape=(-2, -2)), r"shape\[0\] must be an integer >= 1, got -2"),
        (lambda: topology.StarGraph(4, center_rank=4), r"center_rank must be a rank in \[0, 3\], got 4"),
        (lambda: topology.StarGraph(4, center_rank=-1), r"center_rank must be a rank in \[0, 3\], got -1"),
        (lambda: topology.RingGraph(4, connect_style=3), "connect_style must be 0 .* 1 .* 2 .*, got 3"),
        (lambda: topology.RingGraph(1, connect_style=-1), "connect_style must be .*, got -1"),
        (lambda: topology.GetRecvWeights(topology.RingGraph(4), 4), r"rank must .*\[0, 3\], got 4"),
        (lambda: topology.GetSendWeights(topology.RingGraph(4), -1), r"rank must .*\[0, 3\], got -1"),
        (lambda: topology.mixing_matrix(nx.DiGraph()), "topology must have at least one node"),
        (lambda: topology.IsRegularGraph(nx.DiGraph([(1, 2)])), "topo must have the nodes 0 to 1, .* node 2"),
        (lambda: topology.mixing_matrix(nx.DiGraph([("a", "b")])), "nodes 0 to 1, .* node 'a'"),
        (lambda: topology.GetDynamicOnePeerSendRecvRanks(topology.RingGraph(4), 4), "self_rank .* got 4"),
        (lambda: topology.GetExp2DynamicSendRecvMachineRanks(9, 4, 0, 0), "world_size must be a multiple"),
        (lambda: topology.GetExp2DynamicSendRecvMachineRanks(4, 4, 0, 0), "at least .* = 8 .*world_size 4"),
        (lambda: topology.GetExp2DynamicSendRecvMachineRanks(8, 4, 5, 0), "local_rank must be .* = 1, got 0"),
        (lambda: topology.GetExp2DynamicSendRecvMachineRanks(8, 4, 5, 5), r"local_rank .*\[0, 3\], got 5"),
        (lambda: topology.GetExp2DynamicSendRecvMachineRanks(8, 0, 0, 0), "local_size must .* >= 1, got 0"),
        (lambda: topology.GetInnerOuterRingDynamicSendRecvRanks(8, 3, 0), "world_size must be a multiple"),
        (lambda: topology.GetInnerOuterRingDynamicSendRecvRanks(8, 2, 0), "local_size must be at least 3"),
        (lambda: topology.GetInnerOuterRingDynamicSendRecvRanks(8, 4, 8), r"self_rank .*\[0, 7\], got 8"),
        (lambda: topology.GetInnerOuterExpo2DynamicSendRecvRanks(9, 4, 0), "world_size must be a multiple"),
        (lambda: topology.GetInnerOuterExpo2DynamicSendRecvRanks(4, 2, 0), "local_size must be at least 3"),
        (lambda: topology.GetInnerOuterExpo2DynamicSendRecvRanks(8, 4, -1), r"self_rank .*\[0, 7\], got -1"),
        (lambda: topology.metropolis_hastings_weights(nx.DiGraph([(0, 1)])), "reverse of every .* 0 -> 1"),
        (lambda: topology.metropolis_hastings_weights(nx.DiGraph([(1, 0)])), "reverse of every .* 1 -> 0"),
        (lambda: topology.by_name("cube", 4), "name must be one of exp, exp2, .*, full, got 'cube'"),
        (lambda: topology.by_name("ring", 0), "size must be an integer >= 1, got 0"),
        (lambda: topology.spectral_gap(np.zeros((2, 3))), r"W must be a square matrix, got shape \(2, 3\)"),
        (lambda: topology.spectral_gap(np.zeros((0, 0))), r"W must be a square matrix, got shape \(0, 0\)"),
        (lambda: topology.spectral_gap([[np.nan]]), "W must hold finite numbers"),
        (lambda: topology.spectral_gap(np.eye(2) / 2), "W must have columns or rows that sum to 1"),
        (lambda: topology.transpose_neighbor_ranks([[1], [2]]), r"neighbors\[1\]\[0\] .*\[0, 1\], got 2"),
        (lambda: topology.matrix_from_sources([[1], [1]]), r"sources\[1\] must not contain the rank itself"),
        (lambda: topology.matrix_from_destinations([[1, 1], []]), r"destinations\[0\] must not .* twice"),
        (lambda: topology.check_neighbor_ranks([-1], 0, 2, "dst_ranks"), r"dst_ranks\[0\] must .* got -1"),
    ],
)
def test_wrong_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(topology.TopologyError, match=message) as raised:
        call()
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, AssertionError)


# --- weights and comparisons --------------------------------------------------------------------------------


def random_digraph(seed: int, size: int) -> tuple[nx.DiGraph, np.ndarray]:
    """Returns a sparse asymmetric graph with some self loops; nodes and edges are inserted in random order."""
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(0.1, 1.0, (size, size)) * (rng.random((size, size)) < 0.4)
    graph = nx.DiGraph()
    graph.add_nodes_from(rng.permutation(size))  # nodes are NumPy integers, as in users' code
    edges = [(i, j, matrix[i, j]) for i in range(size) for j in range(size) if matrix[i, j]]
    graph.add_weighted_edges_from(edges[k] for k in rng.permutation(len(edges)))
    return graph, matrix


@pytest.mark.parametrize("seed", range(10))
def test_weights_of_a_rank_are_its_column_and_row(seed: int) -> None:
    size = 2 + seed
    graph, matrix = random_digraph(seed, size)
    np.testing.assert_array_equal(topology.mixing_matrix(graph), matrix)
    for rank in range(size):
        others = [r for r in range(size) if r != rank]
        self_weight, sources = topology.GetRecvWeights(graph, rank)
        assert self_weight == matrix[rank, rank]
        assert list(sources.items()) == [(r, matrix[r, rank]) for r in others if matrix[r, rank]]
        self_weight, destinations = topology.GetSendWeights(graph, np.int64(rank))
        assert self_weight == matrix[rank, rank]
        assert list(destinations.items()) == [(r, matrix[rank, r]) for r in others if matrix[rank, r]]
        assert topology.in_neighbors(graph, rank) == list(sources)
        assert topology.out_neighbors(graph, rank) == list(destinations)
        assert all(type(r) is int for r in [*sources, *destinations])
        assert all(type(w) is float for w in [self_weight, *sources.values(), *destinations.values()])


def test_column_not_row() -> None:
    """The convention: rank 1 receives from rank 0 with the weight of the edge 0 -> 1."""
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.25), (1, 1, 0.75), (0, 0, 1.0)])
    assert topology.GetRecvWeights(graph, 1) == (0.75, {0: 0.25})
    assert topology.GetSendWeights(graph, 0) == (1.0, {1: 0.25})
    assert topology.GetRecvWeights(graph, 0) == (1.0, {})
    np.testing.assert_array_equal(topology.mixing_matrix(graph), [[1.0, 0.25], [0.0, 0.75]])


def test_edges_without_a_weight_weigh_one_and_no_self_loop_is_zero() -> None:
    graph = nx.DiGraph([(0, 1), (1, 0)])
    assert topology.GetRecvWeights(graph, 0) == (0.0, {1: 1.0})
    assert topology.GetSendWeights(graph, 0) == (0.0, {1: 1.0})


def test_weight_zero_is_an_edge() -> None:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.0), (1, 0, 1.0)])
    assert topology.GetSendWeights(graph, 0) == (0.0, {1: 0.0})


@pytest.mark.parametrize(
    ("weight", "error"), [(math.nan, ValueError), (math.inf, ValueError), ("1", TypeError), (None, TypeError)]
)
def test_weight_that_is_no_number(weight: object, error: type[Exception]) -> None:
    graph = nx.DiGraph()
    graph.add_edge(1, 0, weight=weight)
    for call in (
        lambda: topology.mixing_matrix(graph),
        lambda: topology.GetRecvWeights(graph, 0),
        lambda: topology.GetSendWeights(graph, 1),
        lambda: topology.IsTopologyEquivalent(graph, graph),
    ):
        with pytest.raises(error, match="weight of the edge 1 -> 0 must be a finite real number"):
            call()


def test_equivalence() -> None:
    ring = topology.RingGraph(4)
    assert topology.IsTopologyEquivalent(ring, topology.RingGraph(4))
    assert topology.IsTopologyEquivalent(topology.ExponentialGraph(13), topology.ExponentialTwoGraph(13))
    assert topology.IsTopologyEquivalent(topology.RingGraph(3), topology.FullyConnectedGraph(3))
    assert not topology.IsTopologyEquivalent(ring, topology.RingGraph(5))
    # The same number of edges, in other directions.
    assert not topology.IsTopologyEquivalent(topology.RingGraph(5, 1), topology.RingGraph(5, 2))
    assert not topology.IsTopologyEquivalent(ring, None)
    assert not topology.IsTopologyEquivalent(None, ring)
    assert not topology.IsTopologyEquivalent(None, None)


def test_equivalence_sees_weights_edges_and_not_insertion_order() -> None:
    graph, _ = random_digraph(3, 6)
    shuffled = nx.DiGraph()
    shuffled.add_nodes_from(sorted(graph))
    shuffled.add_weighted_edges_from(reversed(list(graph.edges(data="weight"))))
    assert topology.IsTopologyEquivalent(graph, shuffled)
    i, j = next(iter(shuffled.edges))
    shuffled[i][j]["weight"] = math.nextafter(shuffled[i][j]["weight"], 2.0)
    assert not topology.IsTopologyEquivalent(graph, shuffled)
    # Two edges of weight 0 in different places: the matrices and counts are equal, the exchanges are not.
    a, b = nx.DiGraph(), nx.DiGraph()
    a.add_weighted_edges_from([(0, 1, 0.0), (0, 0, 1.0)])
    b.add_weighted_edges_from([(1, 0, 0.0), (0, 0, 1.0)])
    assert not topology.IsTopologyEquivalent(a, b)


def test_regular() -> None:
    for size in SIZES:
        for name in ("exp2", "exp3", "symexp_default", "ring", "ring_left", "ring_right", "full"):
            assert topology.IsRegularGraph(GRAPHS[name][0](size)), (name, size)
    assert not topology.IsRegularGraph(topology.StarGraph(4))
    assert not topology.IsRegularGraph(topology.MeshGrid2DGraph(6))
    # The in- and out-degree of each rank sum to 3, but a plain mean would not keep the average.
    assert not topology.IsRegularGraph(nx.DiGraph([(0, 1), (0, 2), (3, 0), (1, 3), (1, 2), (2, 3)]))


@pytest.mark.parametrize("seed", range(10))
def test_uniform_weights(seed: int) -> None:
    size = 1 + seed
    graph, matrix = random_digraph(seed, size)
    reached = (matrix != 0) | np.eye(size, dtype=bool)
    expected = np.array(
        [[1.0 / int(reached[:, j].sum()) if reached[i, j] else 0.0 for j in range(size)] for i in range(size)]
    )
    result = topology.uniform_weights(graph)
    np.testing.assert_array_equal(topology.mixing_matrix(result), expected)
    np.testing.assert_allclose(expected.sum(axis=0), 1.0, rtol=1e-14)
    assert all(type(node) is int for edge in result.edges for node in edge)
    np.testing.assert_array_equal(topology.mixing_matrix(graph), matrix)  # the argument is not changed


@pytest.mark.parametrize("seed", range(10))
def test_metropolis_hastings_weights(seed: int) -> None:
    size = 3 + seed
    graph = nx.gnp_random_graph(size, 0.5, seed=seed).to_directed()
    graph.add_edge(0, 0)  # a self loop does not count as a neighbor
    matrix = topology.mixing_matrix(topology.metropolis_hastings_weights(graph))
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=1e-14)
    assert (np.diag(matrix) > 0).all()
    neighbors = [{j for j in graph[i] if j != i} for i in range(size)]
    for i in range(size):
        for j in range(size):
            if i != j:
                degree = max(len(neighbors[i]), len(neighbors[j]))
                assert matrix[i, j] == (1.0 / (degree + 1) if j in neighbors[i] else 0.0)


# --- lists of neighbors -------------------------------------------------------------------------------------


def test_neighbor_lists_by_hand() -> None:
    """Rank 0 sends to ranks 1 and 2, rank 1 to rank 2, rank 2 to none: the in-degrees are 0, 1, 2."""
    destinations = [[2, 1], [2], []]
    sources = [[], [0], [0, 1]]
    assert topology.transpose_neighbor_ranks(destinations) == sources
    assert topology.transpose_neighbor_ranks(sources) == [[1, 2], [2], []]
    expected = np.array([[1, 1 / 2, 1 / 3], [0, 1 / 2, 1 / 3], [0, 0, 1 / 3]])
    np.testing.assert_array_equal(topology.matrix_from_destinations(destinations), expected)
    np.testing.assert_array_equal(topology.matrix_from_sources(sources), expected)
    # Regression: BlueFog divided columns by ROW sums, so on such an irregular graph the columns did not sum to 1.
    np.testing.assert_allclose(expected.sum(axis=0), 1.0, rtol=1e-15)


@pytest.mark.parametrize("seed", range(8))
def test_neighbor_lists_agree_with_graphs(seed: int) -> None:
    size = 1 + seed
    graph, _ = random_digraph(seed, size)
    rng = np.random.default_rng(seed)
    destinations = [
        rng.permutation(np.array(topology.out_neighbors(graph, rank), dtype=int)) for rank in range(size)
    ]
    sources = [topology.in_neighbors(graph, r) for r in range(size)]
    assert topology.transpose_neighbor_ranks(destinations) == sources
    expected = topology.mixing_matrix(topology.uniform_weights(graph))
    np.testing.assert_array_equal(topology.matrix_from_destinations(destinations), expected)
    np.testing.assert_array_equal(topology.matrix_from_sources(sources), expected)


def test_check_neighbor_ranks_keeps_the_order() -> None:
    ranks = topology.check_neighbor_ranks(np.array([3, 0, 2]), np.int64(1), 4, "src_ranks")
    assert ranks == [3, 0, 2]
    assert all(type(rank) is int for rank in ranks)
    assert topology.check_neighbor_ranks([], 0, 1, "src_ranks") == []
    assert topology.check_neighbor_ranks({2: 0.5}, 0, 4, "src_weights") == [2]


# --- metrics and names --------------------------------------------------------------------------------------


def test_spectral_gap_of_known_matrices() -> None:
    assert topology.spectral_gap([[1.0]]) == 1.0
    assert topology.spectral_gap(np.eye(3)) == 0.0  # no rank communicates
    assert topology.spectral_gap([[0, 1], [1, 0]]) == 0.0  # periodic
    assert topology.spectral_gap(np.kron(np.eye(2), np.full((2, 2), 0.5))) == 0.0  # two islands
    # One rank collects: columns sum to 1, rows do not. [[1, 0.5], [0, 0.5]] has the eigenvalues 1 and 0.5.
    assert topology.spectral_gap([[1.0, 0.5], [0.0, 0.5]]) == pytest.approx(0.5)
    assert topology.spectral_gap([[1.0, 0.0], [0.5, 0.5]]) == pytest.approx(0.5)  # rows sum to 1
    assert topology.spectral_gap([[-1.0, 2.0], [2.0, -1.0]]) == pytest.approx(-2.0)  # diverges: eigenvalue -3
    for size in range(2, 18):
        full = topology.mixing_matrix(topology.FullyConnectedGraph(size))
        assert topology.spectral_gap(full) == pytest.approx(1.0)
        star = topology.mixing_matrix(topology.StarGraph(size))
        assert topology.spectral_gap(star) == pytest.approx(1 / size if size > 2 else 1.0)
    for size in range(3, 18):
        ring = topology.mixing_matrix(topology.RingGraph(size))
        moduli = [abs(1 + 2 * math.cos(2 * math.pi * k / size)) / 3 for k in range(1, size)]
        assert topology.spectral_gap(ring) == pytest.approx(1 - max(moduli))


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "full"])
def test_spectral_gap_is_the_rate_of_mixing(name: str) -> None:
    """The consensus distance shrinks by 1 - gap in every step, because all these matrices are normal."""
    size = 11
    matrix = topology.mixing_matrix(GRAPHS[name][0](size))
    distance = matrix - 1 / size
    steps = 12
    rate = np.linalg.norm(np.linalg.matrix_power(distance, steps), 2) ** (1 / steps)
    assert 1 - topology.spectral_gap(matrix) == pytest.approx(rate, abs=1e-9)


def test_by_name() -> None:
    same = {
        "exp": "exp_default",
        "exp2": "exp2",
        "exp3": "exp3",
        "symexp": "symexp_default",
        "ring": "ring",
        "ring-left": "ring_left",
        "ring-right": "ring_right",
        "mesh": "mesh",
        "star": "star",
        "full": "full",
    }
    for name, graph in same.items():
        assert topology.IsTopologyEquivalent(topology.by_name(name, 17), GRAPHS[graph][0](17))
    assert topology.IsTopologyEquivalent(topology.by_name("exp4", 17), topology.ExponentialGraph(17, base=4))
    assert set(topology.TOPOLOGY_NAMES) == {*same, "exp4", "torus", "d-equistatic", "u-equistatic"}


def test_public_names() -> None:
    assert len(set(topology.__all__)) == len(topology.__all__)
    for name in topology.__all__:
        assert hasattr(topology, name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_older_names() -> None:
    ring = topology.RingGraph(5)
    assert topology.IsTopologyEquivalent(topology.PowerTwoRingGraph(8), topology.ExponentialTwoGraph(8))
    assert topology.IsTopologyEquivalent(
        topology.PowerGraph(30, base=3), topology.ExponentialGraph(30, base=3)
    )
    assert topology.IsTopologyEquivalent(topology.BiRingGraph(5), ring)
    assert topology.GetWeights(ring, 1) == topology.GetRecvWeights(ring, 1)
    assert next(topology.GetDynamicSendRecvRanks(topology.ExponentialGraph(8), 0)) == ([1], [7])


# --- dynamic topologies -------------------------------------------------------------------------------------

Step = tuple[list[int], list[int]]


def steps_of_all(make: Callable[[int], Iterator[Step]], size: int, count: int) -> list[list[Step]]:
    """Returns the steps as steps[t][rank]."""
    per_rank = [list(itertools.islice(make(rank), count)) for rank in range(size)]
    return [[per_rank[rank][t] for rank in range(size)] for t in range(count)]


def check_consistent(step: list[Step]) -> None:
    size = len(step)
    sends = {(i, j) for i in range(size) for j in step[i][0]}
    recvs = {(i, j) for j in range(size) for i in step[j][1]}
    assert sends == recvs
    assert all(0 <= j < size and i != j for i, j in sends)
    for send, recv in step:
        assert len(set(send)) == len(send) and len(set(recv)) == len(recv)
        assert all(type(rank) is int for rank in [*send, *recv])


def averaging_matrix(step: list[Step]) -> np.ndarray:
    """Returns the matrix that users apply in a step: 1 / (len(recv) + 1) for the rank itself and for each source."""
    matrix = np.zeros((len(step), len(step)))
    for rank, (_, sources) in enumerate(step):
        matrix[[rank, *sources], rank] = 1 / (len(sources) + 1)
    return matrix


def test_one_peer_sequence_of_the_contract() -> None:
    steps = topology.GetDynamicOnePeerSendRecvRanks(topology.ExponentialTwoGraph(8), 0)
    expected = [([1], [7]), ([2], [6]), ([4], [4])]
    assert list(itertools.islice(steps, 9)) == expected * 3


@pytest.mark.parametrize("name", GRAPHS)
def test_one_peer_follows_its_definition(name: str) -> None:
    for size in SIZES:
        with case(size=size):
            graph = GRAPHS[name][0](size)
            steps = steps_of_all(lambda rank: topology.GetDynamicOnePeerSendRecvRanks(graph, rank), size, 40)
            for t, step in enumerate(steps):
                check_consistent(step)
                for rank in range(size):
                    clockwise = [
                        (rank + d) % size for d in range(1, size) if graph.has_edge(rank, (rank + d) % size)
                    ]
                    assert step[rank][0] == ([clockwise[t % len(clockwise)]] if clockwise else [])
                    assert step[rank][1] == sorted(i for i in range(size) if rank in step[i][0])


@pytest.mark.parametrize("seed", range(12))
def test_one_peer_on_irregular_graphs(seed: int) -> None:
    """Regression: some ranks have no self loop, and some send to no rank; BlueFog counted out_degree - 1."""
    size = 2 + seed
    graph, matrix = random_digraph(seed, size)
    steps = steps_of_all(lambda rank: topology.GetDynamicOnePeerSendRecvRanks(graph, rank), size, 60)
    used = set()
    for step in steps:
        check_consistent(step)
        used |= {(i, j) for i in range(size) for j in step[i][0]}
        for rank in range(size):
            assert len(step[rank][0]) == (len(topology.out_neighbors(graph, rank)) > 0)
    assert used == {(i, j) for i in range(size) for j in range(size) if i != j and matrix[i, j]}


def test_one_peer_without_self_loops_is_the_same() -> None:
    graph = topology.ExponentialTwoGraph(8)
    bare = graph.copy()
    bare.remove_edges_from([(rank, rank) for rank in range(8)])
    for rank in range(8):
        pair = [topology.GetDynamicOnePeerSendRecvRanks(g, rank) for g in (graph, bare)]
        assert list(itertools.islice(pair[0], 7)) == list(itertools.islice(pair[1], 7))


def test_one_peer_of_a_lone_rank_idles() -> None:
    steps = topology.GetDynamicOnePeerSendRecvRanks(topology.ExponentialTwoGraph(1), 0)
    assert list(itertools.islice(steps, 3)) == [([], [])] * 3


def test_one_peer_keeps_the_graph_it_was_given() -> None:
    graph = topology.RingGraph(5)
    steps = topology.GetDynamicOnePeerSendRecvRanks(graph, 0)
    graph.remove_node(1)
    assert list(itertools.islice(steps, 2)) == [([1], [4]), ([4], [1])]


def test_yielded_lists_belong_to_the_caller() -> None:
    steps = topology.GetDynamicOnePeerSendRecvRanks(topology.RingGraph(2), 0)
    send, recv = next(steps)
    send.clear()
    recv.append(7)
    assert next(steps) == ([1], [1])


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_one_peer_exponential_is_exact_after_log2_steps(size: int) -> None:
    graph = topology.ExponentialTwoGraph(size)
    steps = steps_of_all(
        lambda rank: topology.GetDynamicOnePeerSendRecvRanks(graph, rank), size, int(math.log2(size))
    )
    product = np.linalg.multi_dot([np.eye(size), *map(averaging_matrix, steps)])
    np.testing.assert_array_equal(product, np.full((size, size), 1 / size))


@pytest.mark.parametrize("name", ["exp2", "exp3", "symexp_default", "ring", "ring_left", "full"])
def test_one_peer_on_regular_graphs_mixes_to_the_average(name: str) -> None:
    for size in [1, 2, 3, 5, 6, 8, 11]:
        with case(size=size):
            graph = GRAPHS[name][0](size)
            steps = steps_of_all(lambda rank: topology.GetDynamicOnePeerSendRecvRanks(graph, rank), size, 600)
            product = np.eye(size)
            for step in steps:
                product = product @ averaging_matrix(step)
            np.testing.assert_allclose(product, np.full((size, size), 1 / size), atol=1e-7)


def test_exp2_between_machines() -> None:
    for machines, local_size in itertools.product(range(2, 10), [1, 2, 3, 4]):
        with case(machines=machines, local_size=local_size):
            size = machines * local_size
            steps = steps_of_all(
                lambda rank: topology.GetExp2DynamicSendRecvMachineRanks(
                    size, local_size, rank, rank % local_size
                ),
                size,
                20,
            )
            for t, step in enumerate(steps):
                distance = 2 ** (t % (int(math.log2(machines - 1)) + 1))
                for rank, (send, recv) in enumerate(step):
                    machine = rank // local_size
                    assert send == [(machine + distance) % machines]
                    assert recv == [(machine - distance) % machines]
                check_consistent(step[::local_size])


def test_exp2_between_machines_by_hand() -> None:
    steps = topology.GetExp2DynamicSendRecvMachineRanks(np.int64(10), np.int64(2), np.int64(3), np.int64(1))
    assert list(itertools.islice(steps, 4)) == [([2], [0]), ([3], [4]), ([0], [2]), ([2], [0])]


def inner_outer_reference(machines: int, local_size: int, t: int, exponential: bool) -> list[int]:
    """Returns the destination of every rank at step t, as the contract defines it."""
    outgoing = t % local_size
    destinations = []
    for rank in range(machines * local_size):
        machine, local = divmod(rank, local_size)
        if local == outgoing:
            distance = 2 ** (t % (int(math.log2(machines - 1)) + 1)) if exponential else 1
            destinations.append((machine + distance) % machines * local_size + local)
        else:
            distance = 2 ** (t % (int(math.log2(local_size - 2)) + 1)) if exponential else 1
            if distance >= (outgoing - local) % local_size:  # it would reach or pass the rank that is outside
                distance += 1
            destinations.append(machine * local_size + (local + distance) % local_size)
    return destinations


INNER_OUTER = [
    (topology.GetInnerOuterRingDynamicSendRecvRanks, False),
    (topology.GetInnerOuterExpo2DynamicSendRecvRanks, True),
]
INNER_OUTER_IDS = ["ring", "exp2"]


@pytest.mark.parametrize(("make", "exponential"), INNER_OUTER, ids=INNER_OUTER_IDS)
def test_inner_outer_follows_its_definition(make: Callable, exponential: bool) -> None:
    for machines, local_size in itertools.product(range(2, 8), range(3, 9)):
        with case(machines=machines, local_size=local_size):
            size = machines * local_size
            for t, step in enumerate(steps_of_all(lambda rank: make(size, local_size, rank), size, 40)):
                check_consistent(step)
                destinations = inner_outer_reference(machines, local_size, t, exponential)
                assert [send for send, _ in step] == [[destination] for destination in destinations]
                assert all(len(recv) == 1 for _, recv in step)


@pytest.mark.parametrize("local_size", range(3, 9))
@pytest.mark.parametrize(("make", "exponential"), INNER_OUTER, ids=INNER_OUTER_IDS)
def test_inner_outer_on_a_single_machine_stays_inside(
    make: Callable, exponential: bool, local_size: int
) -> None:
    """Regression: here BlueFog computed log2(0), or let a rank send to itself. Now all ranks exchange in one circle."""
    for t, step in enumerate(steps_of_all(lambda rank: make(local_size, local_size, rank), local_size, 20)):
        check_consistent(step)
        distance = 2 ** (t % (int(math.log2(local_size - 1)) + 1)) if exponential else 1
        for rank, (send, recv) in enumerate(step):
            assert send == [(rank + distance) % local_size]
            assert recv == [(rank - distance) % local_size]


def test_inner_outer_by_hand() -> None:
    """Two machines of three: at step 0 ranks 0 and 3 go outside, 1 and 2 swap; at step 1 ranks 1 and 4 go outside."""
    for make, _ in INNER_OUTER:
        steps = steps_of_all(lambda rank, make=make: make(6, 3, rank), 6, 3)
        assert [send for send, _ in steps[0]] == [[3], [2], [1], [0], [5], [4]]
        assert [send for send, _ in steps[1]] == [[2], [4], [0], [5], [1], [3]]
        assert [send for send, _ in steps[2]] == [[1], [0], [5], [4], [3], [2]]
    # Three machines of five ranks at step 1: rank 1 of each goes two machines on, the others go two ranks on.
    steps = steps_of_all(lambda rank: topology.GetInnerOuterExpo2DynamicSendRecvRanks(15, 5, rank), 15, 2)
    assert [send for send, _ in steps[1]][:5] == [[3], [11], [4], [0], [2]]
    assert [recv for _, recv in steps[1]][:5] == [[3], [6], [4], [0], [2]]


@pytest.mark.parametrize(
    ("machines", "local_size"), [(1, 3), (1, 4), (2, 3), (2, 4), (3, 3), (3, 5), (4, 4), (5, 3)]
)
@pytest.mark.parametrize("make", [make for make, _ in INNER_OUTER], ids=INNER_OUTER_IDS)
def test_inner_outer_mixes_to_the_average(make: Callable, machines: int, local_size: int) -> None:
    size = machines * local_size
    product = np.eye(size)
    for step in steps_of_all(lambda rank: make(size, local_size, rank), size, 600):
        product = product @ averaging_matrix(step)
    np.testing.assert_allclose(product, np.full((size, size), 1 / size), atol=1e-7)
