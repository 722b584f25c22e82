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
from fogdist.bluefog.common import topology_util
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
    "exp2": (topology.exponential, lambda n: uniform_circle(n, lambda d: d & (d - 1) == 0)),
    "exp_default": (topology.exponential, lambda n: uniform_circle(n, lambda d: is_power(d, 2))),
    "exp3": (
        lambda n: topology.exponential(n, 3),
        lambda n: uniform_circle(n, lambda d: is_power(d, 3)),
    ),
    "symexp_default": (
        topology.symmetric_exponential,
        lambda n: uniform_circle(n, lambda d: is_power(d if d <= n // 2 else n - d, 4)),
    ),
    "mesh": (topology.mesh, lambda n: mesh_reference(*squarest(n))),
    "line": (lambda n: topology.mesh(n, (n, 1)), lambda n: mesh_reference(n, 1)),
    "star": (topology.star, lambda n: star_reference(n, 0)),
    "star_last": (lambda n: topology.star(n, center_rank=n - 1), lambda n: star_reference(n, n - 1)),
    "ring": (topology.ring, lambda n: uniform_circle(n, lambda d: d in (1, n - 1))),
    "ring_left": (lambda n: topology.ring(n, 1), lambda n: uniform_circle(n, lambda d: d == n - 1)),
    "ring_right": (
        lambda n: topology.ring(n, connect_style=2),
        lambda n: uniform_circle(n, lambda d: d == 1),
    ),
    "full": (topology.fully_connected, lambda n: uniform_circle(n, lambda d: True)),
}


def as_array(matrix: list[list[Fraction]]) -> np.ndarray:
    return np.array([[float(weight) for weight in row] for row in matrix])


# --- static graphs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_equals_its_definition(name: str) -> None:
    """Its weights, what kind of graph it is, and that it mixes to the average, at the rate that the gap says."""
    make, reference = GRAPHS[name]
    for size in SIZES:
        with case(size=size):
            graph = make(size)
            expected = as_array(reference(size))
            # Every weight is the float nearest to the exact fraction, so there is no tolerance.
            np.testing.assert_array_equal(nx.to_numpy_array(graph, nodelist=range(size)), expected)
            np.testing.assert_array_equal(topology.mixing_matrix(graph), expected)
            np.testing.assert_allclose(expected.sum(axis=0), 1.0, rtol=1e-14)
            np.testing.assert_allclose(expected.sum(axis=1), 1.0, rtol=1e-14)
            assert type(graph) is nx.DiGraph and list(graph) == list(range(size))
            assert all(type(weight) is float and weight > 0 for _, _, weight in graph.edges(data="weight"))
            for rank in range(size):
                assert graph.has_edge(rank, rank)
                for neighbors in (graph.successors(rank), graph.predecessors(rank)):
                    assert (found := list(neighbors)) == sorted(found)
            assert topology.is_regular(graph) or name in ("mesh", "line", "star", "star_last")
            assert topology.is_equivalent(make(np.int32(size)), graph)
            assert topology.is_equivalent(make(np.array(size)), graph)
            # All these matrices are normal, so the distance shrinks by 1 - gap in every step, and the slowest one, the
            # line of 17 ranks, has a gap of 0.011.
            steps = 12
            powers = np.linalg.matrix_power(expected - 1 / size, steps)
            rate = 1 - topology.spectral_gap(expected)
            assert 0 <= rate < 0.99
            assert np.linalg.norm(powers, 2) == pytest.approx(rate**steps, rel=1e-9, abs=1e-12)
    for wrong in (0, -1, np.int64(0)):
        for error in (ValueError, AssertionError):  # BlueFog's scripts catch AssertionError
            with pytest.raises(error, match=rf"size must be an integer >= 1, got {int(wrong)}"):
                make(wrong)


def test_published_graphs() -> None:
    # Regression: BlueFog used floating-point logarithms; log(243, 3) is 4.999..., so it missed 3^5.
    for graph, powers in (
        (topology.exponential(300, base=3), [0, 1, 3, 9, 27, 81, 243]),
        (topology.exponential(1001, base=10), [0, 1, 10, 100, 1000]),
        (topology.exponential(1000, base=10), [0, 1, 10, 100]),
        (
            topology.symmetric_exponential(500, base=3),
            [0, 1, 3, 9, 27, 81, 243, 257, 419, 473, 491, 497, 499],
        ),
    ):
        assert list(graph[0]) == powers
    np.testing.assert_array_equal(
        topology.mixing_matrix(topology.mesh(12, [np.int64(2), 6])),
        as_array(mesh_reference(2, 6)),
    )
    # The in- and out-degree of each rank sum to 3, but a plain mean would not keep the average.
    lopsided = nx.DiGraph([(0, 1), (0, 2), (3, 0), (1, 3), (1, 2), (2, 3)])
    for irregular in (topology.star(4), topology.mesh(6), lopsided):
        assert not topology.is_regular(irregular)


WRONG_TYPES = [
    (lambda: topology.exponential("4"), "size must be an integer, got '4'"),
    (lambda: topology.mesh(4, shape=(4,)), "shape must"),
    (lambda: topology.ring(4, connect_style="left"), "connect_style must"),
    (lambda: topology.recv_weights(topology.ring(4), 1.0), "rank must"),
    (lambda: topology_util.GetDynamicOnePeerSendRecvRanks(nx.MultiDiGraph([(0, 1)]), 0), "must be"),
    (lambda: topology_util.GetInnerOuterRingDynamicSendRecvRanks(8.0, 4, 0), "must be"),
    (lambda: topology.is_equivalent(topology.ring(4), "ring"), "must be"),
    (lambda: topology.mixing_matrix(None), "must be"),
    (lambda: topology.spectral_gap(np.eye(3) * 1j), "W must be a matrix of real numbers"),
    (lambda: topology.by_name(2, 4), "name must be"),
]
WRONG_VALUES = [
    (lambda: topology.symmetric_exponential(4, base=1), "base must be an integer >= 2, got 1"),
    (lambda: topology.mesh(6, shape=(2, 2)), r"shape must .* size = 6, got \(2, 2\)"),
    (lambda: topology.star(4, center_rank=4), r"center_rank must be a rank in \[0, 3\], got 4"),
    (lambda: topology.ring(1, connect_style=-1), "connect_style must be 0 .* 1 .* 2 .*, got -1"),
    (lambda: topology.mixing_matrix(nx.DiGraph()), "topology must have at least one node"),
    (lambda: topology.is_regular(nx.DiGraph([(1, 2)])), "topo must have the nodes 0 to 1, .* node 2"),
    (lambda: topology_util.GetExp2DynamicSendRecvMachineRanks(9, 4, 0, 0), "world_size must be a multiple"),
    (lambda: topology_util.GetExp2DynamicSendRecvMachineRanks(4, 4, 0, 0), "at least .* = 8 .*world_size 4"),
    (
        lambda: topology_util.GetExp2DynamicSendRecvMachineRanks(8, 4, 5, 0),
        "local_rank must be .* = 1, got 0",
    ),
    (lambda: topology_util.GetInnerOuterRingDynamicSendRecvRanks(8, 4, 8), r"self_rank .*\[0, 7\], got 8"),
    (lambda: topology_util.GetInnerOuterExpo2DynamicSendRecvRanks(4, 2, 0), "local_size must be at least 3"),
    (lambda: topology.metropolis_hastings_weights(nx.DiGraph([(1, 0)])), "reverse of every .* 1 -> 0"),
    (lambda: topology.by_name("cube", 4), "name must be one of ring, .*, full, got 'cube'"),
    (lambda: topology.spectral_gap(np.zeros((2, 3))), r"W must be a square matrix, got shape \(2, 3\)"),
    (lambda: topology.spectral_gap([[np.nan]]), "W must hold finite numbers"),
    (lambda: topology.spectral_gap(np.eye(2) / 2), "W must have columns or rows that sum to 1"),
    (lambda: topology.check_neighbor_ranks([1, 1], 0, 2, "dst_ranks"), "dst_ranks must not .* twice"),
    (lambda: topology.check_neighbor_ranks([-1], 0, 2, "dst_ranks"), r"dst_ranks\[0\] must .* got -1"),
]


def test_wrong_arguments() -> None:
    # BlueFog's scripts catch AssertionError.
    for rows, errors in ((WRONG_TYPES, [TypeError]), (WRONG_VALUES, [ValueError, AssertionError])):
        for call, message in rows:
            for error in errors:
                with pytest.raises(error, match=message):
                    call()


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
def test_weights_of_random_graphs(seed: int) -> None:
    """A rank receives with the weights of its column and sends with those of its row; lists of neighbors agree."""
    size = 1 + seed
    graph, matrix = random_digraph(seed, size)
    np.testing.assert_array_equal(topology.mixing_matrix(graph), matrix)
    for rank in range(size):
        others = [r for r in range(size) if r != rank]
        self_weight, sources = topology.recv_weights(graph, rank)
        assert self_weight == matrix[rank, rank]
        assert list(sources.items()) == [(r, matrix[r, rank]) for r in others if matrix[r, rank]]
        self_weight, destinations = topology_util.GetSendWeights(graph, np.int64(rank))
        assert self_weight == matrix[rank, rank]
        assert list(destinations.items()) == [(r, matrix[rank, r]) for r in others if matrix[rank, r]]
        assert topology.in_neighbors(graph, rank) == list(sources)
        assert topology.out_neighbors(graph, rank) == list(destinations)
        assert all(type(r) is int for r in [*sources, *destinations])
        assert all(type(w) is float for w in [self_weight, *sources.values(), *destinations.values()])
    reached = (matrix != 0) | np.eye(size, dtype=bool)
    expected = np.where(reached, 1.0 / reached.sum(axis=0), 0.0)
    uniform = topology.uniform_weights(graph)
    np.testing.assert_array_equal(topology.mixing_matrix(uniform), expected)
    assert all(type(node) is int for edge in uniform.edges for node in edge)
    np.testing.assert_array_equal(topology.mixing_matrix(graph), matrix)  # the argument is not changed


def test_published_weights() -> None:
    """The convention: rank 1 receives from rank 0 with the weight of the edge 0 -> 1, which is 1 if it has none."""
    for edges, received, sent in (
        (
            [(0, 1, 0.25), (1, 1, 0.75), (0, 0, 1.0)],
            [(1.0, {}), (0.75, {0: 0.25})],
            [(1.0, {1: 0.25}), (0.75, {})],
        ),
        # An edge of weight 0 is one.
        ([(0, 1, 0.0), (1, 0)], [(0.0, {1: 1.0}), (0.0, {0: 0.0})], [(0.0, {1: 0.0}), (0.0, {0: 1.0})]),
    ):
        graph = nx.DiGraph()
        for i, j, *weight in edges:
            graph.add_edge(i, j, **({"weight": weight[0]} if weight else {}))
        assert [topology.recv_weights(graph, rank) for rank in (0, 1)] == received
        assert [topology_util.GetSendWeights(graph, rank) for rank in (0, 1)] == sent


def test_weight_that_is_no_number() -> None:
    for weight, error in (
        (math.nan, ValueError),
        (math.inf, ValueError),
        ("1", TypeError),
        (None, TypeError),
    ):
        graph = nx.DiGraph()
        graph.add_edge(1, 0, weight=weight)
        for call in (topology.mixing_matrix, lambda graph: topology.recv_weights(graph, 0)):
            with pytest.raises(error, match="weight of the edge 1 -> 0 must be a finite real number"):
                call(graph)


def test_equivalence_sees_weights_edges_and_not_insertion_order() -> None:
    graph, _ = random_digraph(3, 6)
    shuffled = nx.DiGraph()
    shuffled.add_nodes_from(sorted(graph))
    shuffled.add_weighted_edges_from(reversed(list(graph.edges(data="weight"))))
    heavier = shuffled.copy()
    i, j = next(iter(heavier.edges))
    heavier[i][j]["weight"] = math.nextafter(heavier[i][j]["weight"], 2.0)
    # Two edges of weight 0 in different places: the matrices and counts are equal, the exchanges are not.
    zeros = [nx.DiGraph(), nx.DiGraph()]
    for edges, edge in zip(zeros, ((0, 1, 0.0), (1, 0, 0.0)), strict=True):
        edges.add_weighted_edges_from([edge, (0, 0, 1.0)])
    ring = topology.ring(4)
    for a, b, same in (
        (graph, shuffled, True),
        (graph, heavier, False),
        (*zeros, False),
        (ring, topology.ring(4), True),
        (topology.ring(3), topology.fully_connected(3), True),
        (ring, topology.ring(5), False),
        # The same number of edges, in other directions.
        (topology.ring(5, 1), topology.ring(5, 2), False),
        (ring, None, False),
        (None, None, False),
    ):
        assert topology.is_equivalent(a, b) == topology.is_equivalent(b, a) == same


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
    for size in range(3, 18):
        circle = max(abs(1 + 2 * math.cos(2 * math.pi * k / size)) / 3 for k in range(1, size))
        for graph, gap in (("full", 1.0), ("star", 1 / size), ("ring", 1 - circle)):
            matrix = topology.mixing_matrix(GRAPHS[graph][0](size))
            assert topology.spectral_gap(matrix) == pytest.approx(gap)


def test_by_name() -> None:
    same = {name: name for name in ("ring", "mesh", "star", "full", "exp2")}
    same |= {"symexp": "symexp_default", "ring-right": "ring_right"}
    for name, graph in same.items():
        assert topology.is_equivalent(topology.by_name(name, 17), GRAPHS[graph][0](17))
    assert set(topology.TOPOLOGY_NAMES) == {*same}


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


ONE_PEER = {name: make for name, (make, _) in GRAPHS.items()} | {
    # Regression: some ranks have no self loop, and some send to no rank; BlueFog counted out_degree - 1.
    "irregular": lambda size: random_digraph(size, size)[0],
}


@pytest.mark.parametrize("name", ONE_PEER)
def test_one_peer_follows_its_definition(name: str) -> None:
    """Each rank goes through its neighbors clockwise, so one round of its own uses each of them."""
    for size in SIZES:
        with case(size=size):
            graph = ONE_PEER[name](size)
            steps = steps_of_all(
                lambda rank: topology_util.GetDynamicOnePeerSendRecvRanks(graph, rank), size, 40
            )
            clockwise = [
                [(r + d) % size for d in range(1, size) if graph.has_edge(r, (r + d) % size)]
                for r in range(size)
            ]
            for t, step in enumerate(steps):
                check_consistent(step)
                for rank, others in enumerate(clockwise):
                    assert step[rank][0] == others[t % max(1, len(others)) :][:1]
                    assert step[rank][1] == sorted(i for i in range(size) if rank in step[i][0])


def test_one_peer_keeps_the_graph_it_was_given_and_gives_its_lists_away() -> None:
    graph = topology.ring(5)
    steps = topology_util.GetDynamicOnePeerSendRecvRanks(graph, 0)
    graph.remove_node(1)
    send, recv = next(steps)
    assert (send, recv) == ([1], [4])
    send.clear()
    recv.append(7)
    assert list(itertools.islice(steps, 2)) == [([4], [1]), ([1], [4])]


def test_exp2_between_machines() -> None:
    make = topology_util.GetExp2DynamicSendRecvMachineRanks
    for machines, local_size in itertools.product(range(2, 10), [1, 2, 3, 4]):
        with case(machines=machines, local_size=local_size):
            size = machines * local_size
            steps = steps_of_all(lambda rank: make(size, local_size, rank, rank % local_size), size, 20)
            for t, step in enumerate(steps):
                distance = 2 ** (t % (int(math.log2(machines - 1)) + 1))
                for rank, (send, recv) in enumerate(step):
                    machine = rank // local_size
                    assert send == [(machine + distance) % machines]
                    assert recv == [(machine - distance) % machines]
                check_consistent(step[::local_size])


def inner_outer_reference(machines: int, local_size: int, t: int, exponential: bool) -> list[int]:
    """Returns the destination of every rank at step t, as the contract defines it."""

    def distance_of(others: int) -> int:
        return 2 ** (t % (int(math.log2(others)) + 1)) if exponential else 1

    # Regression: on a single machine BlueFog computed log2(0), or let a rank send to itself; all ranks are one circle.
    outgoing = t % local_size if machines > 1 else None
    destinations = []
    for rank in range(machines * local_size):
        machine, local = divmod(rank, local_size)
        if local == outgoing:
            machine = (machine + distance_of(machines - 1)) % machines
            distance = 0
        else:
            distance = distance_of(local_size - (1 if outgoing is None else 2))
            if outgoing is not None and distance >= (outgoing - local) % local_size:
                distance += 1  # it would reach or pass the rank that is outside
        destinations.append(machine * local_size + (local + distance) % local_size)
    return destinations


INNER_OUTER = [
    (topology_util.GetInnerOuterRingDynamicSendRecvRanks, False),
    (topology_util.GetInnerOuterExpo2DynamicSendRecvRanks, True),
]
INNER_OUTER_IDS = ["ring", "exp2"]


@pytest.mark.parametrize(("make", "exponential"), INNER_OUTER, ids=INNER_OUTER_IDS)
def test_inner_outer_follows_its_definition(make: Callable, exponential: bool) -> None:
    for machines, local_size in itertools.product(range(1, 8), range(3, 9)):
        with case(machines=machines, local_size=local_size):
            size = machines * local_size
            for t, step in enumerate(steps_of_all(lambda rank: make(size, local_size, rank), size, 40)):
                check_consistent(step)
                destinations = inner_outer_reference(machines, local_size, t, exponential)
                assert [send for send, _ in step] == [[destination] for destination in destinations]
                assert all(len(recv) == 1 for _, recv in step)


def test_published_sequences() -> None:
    # Two machines of three: at step 0 ranks 0 and 3 go outside, 1 and 2 swap; at step 1 ranks 1 and 4 go outside.
    for make, _ in INNER_OUTER:
        steps = steps_of_all(lambda rank, make=make: make(6, 3, rank), 6, 3)
        for step, expected in zip(
            steps, ([3, 2, 1, 0, 5, 4], [2, 4, 0, 5, 1, 3], [1, 0, 5, 4, 3, 2]), strict=True
        ):
            assert [send for send, _ in step] == [[destination] for destination in expected]
    one_peer = topology_util.GetDynamicOnePeerSendRecvRanks(topology.exponential(8), 0)
    assert list(itertools.islice(one_peer, 4)) == [([1], [7]), ([2], [6]), ([4], [4]), ([1], [7])]
    of_machines = topology_util.GetExp2DynamicSendRecvMachineRanks(
        np.int64(10), np.int64(2), np.int64(3), np.int64(1)
    )
    assert list(itertools.islice(of_machines, 4)) == [([2], [0]), ([3], [4]), ([0], [2]), ([2], [0])]
