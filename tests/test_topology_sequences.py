"""Compares Topology objects and the quantities that they compute with references written from the papers.

Weights are small fractions, so products of matrices can be computed without rounding; "exact" below means equality of
fractions. Only the last part needs a process group.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import fogdist
import networkx as nx
import numpy as np
import pytest
import torch
from fogdist import topology
from fogdist.bluefog.common import topology_util
from fogdist.topology import Topology, TopologyError
from harness import WorldPool, case, sizes

SIZES = range(1, 13)

STATIC = ["ring", "ring-right", "mesh", "star", "exp2", "symexp", "full"]

SEQUENCES: dict[str, Callable[[int], Topology]] = {
    **{name: lambda n, name=name: Topology.from_graph(name, topology.by_name(name, n)) for name in STATIC},
    "one-peer-exp2": topology.one_peer_exponential,
    "one-peer-ring": lambda n: topology.one_peer(topology.ring(n)),
    "base-2": topology.base_graph,
    "base-3": lambda n: topology.base_graph(n, 2),
    "base-5": lambda n: topology.base_graph(n, 4),
    "random-matching": topology.random_matching,
    "inner-outer-exp2": lambda n: topology.inner_outer_exponential(n, 3),
}

ALLOWED = {
    "inner-outer-exp2": [3, 6, 9, 12],
}


def fractions(matrix: np.ndarray) -> list[list[Fraction]]:
    """Returns the fractions that the weights stand for; their denominators are far below 1000."""
    exact = [[Fraction(float(w)).limit_denominator(1000) for w in row] for row in matrix]
    assert all(float(exact[i][j]) == matrix[i, j] for i, j in np.ndindex(matrix.shape))
    return exact


def product(a: list[list[Fraction]], b: list[list[Fraction]]) -> list[list[Fraction]]:
    columns = list(zip(*b, strict=True))
    return [
        [sum(x * y for x, y in zip(row, c, strict=True) if x and y) + Fraction(0) for c in columns]
        for row in a
    ]


def exact_after(sequence: Topology, start: int = 0) -> int:
    """Returns the number of rounds from `start` until the product of the matrices, as fractions, is 1/n everywhere."""
    n = sequence.size
    whole = [[Fraction(int(i == j)) for j in range(n)] for i in range(n)]
    for t in range(100):
        if all(weight == Fraction(1, n) for row in whole for weight in row):
            return t
        whole = product(whole, fractions(sequence.matrix(start + t)))
    raise AssertionError(f"{sequence} is not exact after 100 rounds")


# --- properties of every topology ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_sequence(name: str) -> None:
    """Sums of rows and columns, peers that agree, degrees, bytes, period, gap, and the decay of a random start."""
    limit = {"base-3": 2, "base-5": 4}.get(name, 1)
    for size in ALLOWED.get(name, SIZES):
        with case(size=size):
            sequence, again = SEQUENCES[name](size), SEQUENCES[name](size)
            period = sequence.period
            assert sequence.size == size
            assert (
                period == 1
                if name in STATIC
                else max(sequence.degrees(t).max() for t in range(period)) <= limit
            )
            for t in reversed(range(period + 2)):  # In any order, and independent of the rank.
                W = sequence.matrix(t)
                assert W.dtype == np.float64 and W.shape == (size, size) and (W >= 0).all()
                np.testing.assert_allclose([W.sum(axis=0), W.sum(axis=1)], 1.0, rtol=1e-14)
                np.testing.assert_array_equal(W, again.matrix(t))
                np.testing.assert_array_equal(W, sequence.matrix(t + 3 * period))
                with pytest.raises(ValueError, match="read-only"):
                    W[0, 0] = 2.0
                peers = [sequence.peers(rank, t) for rank in range(size)]
                assert sequence.degrees(t).tolist() == [len(part["dst_weights"]) for part in peers]
                if t < 12:
                    np.testing.assert_array_equal(W, matrix_of(peers))
                    np.testing.assert_array_equal(W, topology.mixing_matrix(sequence.graph(t)))
            whole = functools.reduce(np.matmul, map(sequence.matrix, range(period)))
            assert sequence.spectral_gap == pytest.approx(topology.spectral_gap(whole), abs=1e-12)
            assert size == 1 or sequence.spectral_gap > 0
            x = np.random.default_rng(0).standard_normal((size, 4000))
            x -= x.mean(axis=0)
            expected = []
            for t in range(6):
                expected.append(np.linalg.norm(x - x.mean(axis=0)))
                x = sequence.matrix(t).T @ x
            distance = decay(sequence, 6)
            if size > 1:
                # Of 4000 starts at random; the first bits depend on the CPU's dot product.
                np.testing.assert_allclose(distance, np.array(expected) / expected[0], rtol=0.05, atol=1e-14)
                assert distance[0] == pytest.approx(1.0)
            else:
                assert not any(distance)


def decay(sequence: Topology, rounds: int) -> list[float]:
    """Returns the ranks' distance from agreement before each round, relative to the start."""
    return list(itertools.islice(sequence._decay(), rounds))


def matrix_of(peers: list[dict[str, Any]]) -> np.ndarray:
    """Returns the matrix that the peers of all ranks stand for, after a check that they agree."""
    W = np.zeros((len(peers), len(peers)))
    for rank, part in enumerate(peers):
        assert list(part) == ["self_weight", "src_weights", "dst_weights"]
        assert list(part["src_weights"]) == sorted(part["src_weights"])
        W[rank, rank] = part["self_weight"]
        for source, weight in part["src_weights"].items():
            assert type(source) is int and type(weight) is float and source != rank
            W[source, rank] = weight
            assert rank in peers[source]["dst_weights"]
        for destination in part["dst_weights"]:
            assert type(destination) is int and destination != rank
            assert rank in peers[destination]["src_weights"]
    return W


def test_receivers_mix_and_not_senders() -> None:
    """The matrices are not symmetric, their rows do not sum to 1, and the two rounds do not commute."""
    random = np.random.default_rng(0).random((2, 5, 5))
    random /= random.sum(axis=1, keepdims=True)
    x = np.eye(5) - 1 / 5  # Starting values, one per column, that span all disagreement.
    expected = [1.0]
    for W in random:
        x = np.array([sum(W[i, j] * x[i] for i in range(5)) for j in range(5)])
        expected.append(np.linalg.norm(x - x.mean(axis=0)) / 2)
    np.testing.assert_allclose(decay(Topology("random", random), 3), expected, rtol=1e-13)


def test_degrees_of_an_irregular_graph() -> None:
    """Rank 0 sends to all others and receives nothing; rank 2 has no self weight and sends nothing."""
    sequence = Topology("chain", [[[1.0, 0.5, 0.25], [0.0, 0.5, 0.75], [0.0, 0.0, 0.0]]])
    assert sequence.degrees().tolist() == [2, 1, 0]
    assert [sequence.peers(rank)["dst_weights"] for rank in range(3)] == [[1, 2], [2], []]
    assert Topology("shift", [np.roll(np.eye(4), 1, axis=1)]).degrees().tolist() == [1] * 4


# --- the exact average after the number of rounds that theory predicts --------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("make", [topology.one_peer_exponential, topology.base_graph])
def test_one_peer_on_powers_of_two_is_exact_after_log2_rounds(make: Callable, size: int) -> None:
    sequence = make(size)
    rounds = int(math.log2(size))
    assert sequence.period == sequence.rounds_to_exact_consensus == rounds
    for start in range(rounds):
        assert exact_after(sequence, start) == rounds
    assert sequence.spectral_gap == 1.0
    # Halves and sums of small integers have no rounding, so the average in float64 is exact to the bit.
    x = np.arange(size) ** 2.0
    for t in range(rounds):
        x = sequence.matrix(t).T @ x
    assert (x == (np.arange(size) ** 2.0).mean()).all()


def test_one_peer_sequences_by_hand() -> None:
    exponential, cube = topology.one_peer_exponential(8), topology.base_graph(8)
    assert [exponential.peers(3, t)["dst_weights"] for t in range(4)] == [[4], [5], [7], [4]]
    assert [exponential.peers(3, t)["src_weights"] for t in range(3)] == [{2: 0.5}, {1: 0.5}, {7: 0.5}]
    assert [cube.peers(3, t)["dst_weights"] for t in range(4)] == [[2], [1], [7], [2]]


def fewest_factors(number: int, largest: int) -> int | None:
    """Tries all products of 0, 1, 2, ... factors."""
    for count in range(6):
        if number in {
            math.prod(c) for c in itertools.combinations_with_replacement(range(2, largest + 1), count)
        }:
            return count
    return None


def simple_base_length(size: int, k: int) -> int:
    """Returns m_1 rounds inside the parts + 1 hand-over + p_1 inside the blocks (arXiv 2305.11420, section 4)."""
    smooth = fewest_factors(size, k + 1)
    if smooth is not None:
        return smooth
    power = max(p for p in range(10) if (k + 1) ** p <= size)
    largest_part = size // (k + 1) ** power * (k + 1) ** power
    inside = fewest_factors(largest_part, k + 1)
    assert inside is not None
    return inside + 1 + power


def base_length(size: int, k: int) -> int:
    smooth = max(p for p in range(1, size + 1) if size % p == 0 and fewest_factors(p, k + 1) is not None)
    across = fewest_factors(smooth, k + 1)
    assert across is not None
    return min(simple_base_length(size, k), simple_base_length(size // smooth, k) + across)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 11])
def test_base_graph_is_exact_for_every_size(k: int) -> None:
    for size in [*range(2, 13), 15, 22, 25]:
        with case(size=size):
            sequence, rounds = topology.base_graph(size, k), base_length(size, k)
            assert sequence.period == sequence.rounds_to_exact_consensus == rounds
            assert exact_after(sequence) == rounds
            assert rounds <= 2 * math.log(size, k + 1) + 2
            assert max(sequence.degrees(t).max() for t in range(sequence.period)) <= k
            assert sequence.spectral_gap == 1.0
            whole = np.eye(size)
            for t in range(rounds):
                whole = whole @ sequence.matrix(t)
            np.testing.assert_allclose(whole, 1 / size, rtol=8 * np.finfo(np.float64).eps)


def test_base_graph_lengths_by_hand() -> None:
    # Values from the figures of arXiv 2305.11420: Base-2 of 6 ranks; Base-3 of 7.
    assert topology.base_graph(6).period == 4
    assert topology.base_graph(7, 2).period == 4
    assert [topology.base_graph(n).period for n in range(2, 13)] == [1, 3, 2, 5, 4, 5, 3, 7, 6, 7, 5]
    assert [topology.base_graph(n, 2).period for n in range(2, 13)] == [1, 1, 2, 3, 2, 4, 3, 2, 4, 5, 3]


def test_exact_is_told_from_nearly_exact() -> None:
    """A matrix is exact after finitely many rounds; a fast decay, or agreement on another value, is not exact."""
    de_bruijn = np.zeros((8, 8))
    for i in range(8):
        de_bruijn[i, [2 * i % 8, (2 * i + 1) % 8]] = 0.5
    assert Topology("de-bruijn", [de_bruijn]).rounds_to_exact_consensus == 3
    full = np.full((8, 8), 1 / 8)
    for remainder in (1e-1, 1e-3, 1e-5):
        nearly = Topology("nearly", [remainder * np.eye(8) + (1 - remainder) * full])
        assert nearly.rounds_to_exact_consensus is None
    copy_rank_0 = np.zeros((8, 8))
    copy_rank_0[0] = 1.0
    leader = Topology("leader", [copy_rank_0])
    assert leader.rounds_to_exact_consensus is None
    assert leader.rounds_to(1e-9) == 1
    assert Topology.from_graph("full", topology.fully_connected(7)).rounds_to_exact_consensus == 1
    assert Topology.from_graph("ring", topology.ring(7)).rounds_to_exact_consensus is None
    assert topology.random_matching(2).rounds_to_exact_consensus == 1
    assert topology.random_matching(1).rounds_to_exact_consensus == 0
    for size in (3, 5, 6, 7, 9, 12):
        one_peer = topology.one_peer_exponential(size)
        assert one_peer.period == math.ceil(math.log2(size)) and one_peer.rounds_to_exact_consensus is None
        assert 0 < one_peer.spectral_gap < 1


def test_rounds_to_a_distance() -> None:
    ring = Topology.from_graph("ring", topology.ring(6))
    rounds = ring.rounds_to(1e-3)
    assert rounds is not None
    distance = decay(ring, rounds + 1)
    assert distance[rounds] <= 1e-3 < distance[rounds - 1]
    assert ring.rounds_to(1e-3, limit=rounds - 1) is None
    assert ring.rounds_to(1.0, limit=0) == 0


# --- draws that are the same on all ranks -------------------------------------------------------------------


def test_random_matchings_are_matchings_and_all_equally_likely() -> None:
    sequence = topology.random_matching(4)
    counts: dict[tuple[int, ...], int] = {}
    for t in range(sequence.period):
        partners = tuple(sequence.peers(rank, t)["dst_weights"][0] for rank in range(4))
        assert all(partners[partners[rank]] == rank for rank in range(4))
        counts[partners] = counts.get(partners, 0) + 1
    assert len(counts) == 3 and min(counts.values()) > 60
    sitting_out = {
        rank
        for t in range(60)
        for rank in range(5)
        if not topology.random_matching(5).peers(rank, t)["dst_weights"]
    }
    assert sitting_out == set(range(5))


def test_draws_are_the_same_in_every_version_of_python_and_numpy() -> None:
    """Ranks of one job may differ in both versions. The expected values were computed once, with Python 3.11."""
    sequence = topology.random_matching(8, seed=7)
    assert [[sequence.peers(rank, t)["dst_weights"][0] for rank in range(8)] for t in range(3)] == [
        [2, 5, 0, 4, 3, 1, 7, 6],
        [7, 4, 3, 2, 1, 6, 5, 0],
        [3, 5, 7, 0, 6, 1, 4, 2],
    ]


def test_seeds_give_different_draws() -> None:
    a, b = topology.random_matching(16, seed=0), topology.random_matching(16, seed=1)
    assert sum(np.array_equal(a.matrix(t), b.matrix(t)) for t in range(20)) < 10


# --- inside and between machines; walks along a graph -------------------------------------------------------


def generated(
    size: int, make: Callable[[int], Iterator[tuple[list[int], list[int]]]], sequence: Topology
) -> None:
    """Checks that the sequence has the neighbors of the generators of all ranks, each with the mean of what it has."""
    generators = [make(rank) for rank in range(size)]
    for t in range(3 * sequence.period + 1):
        for rank, generator in enumerate(generators):
            send, receive = next(generator)
            mean = 1 / (len(receive) + 1)
            expected = {"self_weight": mean, "src_weights": dict.fromkeys(receive, mean), "dst_weights": send}
            assert sequence.peers(rank, t) == expected
    # No shorter period would do.
    rounds = [sequence.matrix(t) for t in range(2 * sequence.period)]
    for shorter in range(1, sequence.period):
        assert not all(np.array_equal(rounds[t], rounds[t + shorter]) for t in range(sequence.period))


@pytest.mark.parametrize(("machines", "local_size"), [(1, 3), (1, 5), (2, 3), (2, 4), (3, 4), (4, 3), (5, 6)])
def test_inner_outer_is_the_generators(machines: int, local_size: int) -> None:
    size = machines * local_size
    generator = topology_util.GetInnerOuterExpo2DynamicSendRecvRanks
    sequence = topology.inner_outer_exponential(size, local_size)
    generated(size, lambda rank: generator(size, local_size, rank), sequence)


@pytest.mark.parametrize("seed", range(5))
def test_walk_on_irregular_graphs_is_the_generators(seed: int) -> None:
    graph = nx.gnp_random_graph(7, 0.4, seed=seed, directed=True)
    walk = topology.one_peer(graph, "walk")
    generated(7, lambda rank: topology_util.GetDynamicOnePeerSendRecvRanks(graph, rank), walk)


@pytest.mark.parametrize(
    "sites", [[0, 0, 0, 1, 1, 1], [2, 7, 2, 7, 7, 2, 7], [0, 0, 1, 1, 2, 2, 2, 2], [0, 1], [5] * 4]
)
@pytest.mark.parametrize("every", [1, 3])
def test_one_rank_of_a_site_goes_outside(sites: list[int], every: int) -> None:
    sequence = topology.by_sites(sites, every=every)
    outside = set()
    for t in range(sequence.period):
        W = sequence.matrix(t)
        np.testing.assert_allclose(W.sum(axis=1), 1.0)  # as columns: the average stays
        crossing = [(i, j) for i, j in np.argwhere(W) if sites[i] != sites[j]]
        lines = [(sites[i], sites[j]) for i, j in crossing]
        assert len(set(lines)) == len(lines) and (t % every == every - 1 or not lines)
        outside.update(int(i) for i, _ in crossing)
        assert np.count_nonzero(W, axis=1).max() <= 2
    assert outside == (set(range(len(sites))) if len(set(sites)) > 1 else set())
    assert sequence.spectral_gap > 0.05


# --- weights of a matrix ------------------------------------------------------------------------------------


def test_graph_of_a_matrix() -> None:
    W = np.array([[0.5, 0.0, 0.25], [0.5, 1.0, 0.25], [0.0, 0.0, 0.5]])
    graph = Topology("given", [W]).graph()
    np.testing.assert_array_equal(topology.mixing_matrix(graph), W)
    assert not graph.has_edge(0, 1) and graph.has_edge(1, 0)
    assert Topology("given", [[[3, 1], [-2, 0]]]).graph()[1][0]["weight"] == -2.0
    Topology("given", [np.full((3, 3), 1 / 3, dtype=np.float32)])


def test_given_matrices_are_copied() -> None:
    W = np.eye(2)
    sequence = Topology("given", [W, np.full((2, 2), 0.5)])
    W[0, 0] = 5.0
    assert sequence.matrix(2)[0, 0] == 1.0
    assert sequence.period == 2 and repr(sequence) == "<Topology given: 2 ranks, period 2>"


# --- bad arguments ------------------------------------------------------------------------------------------


WRONG = {
    TopologyError: [
        (lambda: topology.base_graph(5, 0), "degree must be an integer >= 1, got 0"),
        (lambda: topology.inner_outer_exponential(8, 2), "local_size must be at least 3"),
        (lambda: topology.by_sites([]), "site_of must hold the site of at least one rank, got none"),
        (lambda: topology.by_sites([0, 1], every=0), "every must be an integer >= 1, got 0"),
        (lambda: Topology("none", []), "at least one matrix"),
        (lambda: Topology("two", [np.eye(2), np.eye(3)]), "must all have one shape"),
        (
            lambda: Topology("one", [np.eye(2), np.eye(2) * 2]),
            r"column of matrices\[1\] must sum to 1, got 2",
        ),
        (lambda: topology.one_peer_exponential(4).peers(4), r"rank must be a rank in \[0, 3\], got 4"),
        (lambda: topology.one_peer_exponential(4).rounds_to(0.0), "distance must be at least 1e-12"),
        (lambda: topology.one_peer(nx.fast_gnp_random_graph(40, 0.5, 0, True)), "least common multiple"),
        (lambda: topology.summary(4, [topology.base_graph(5)]), "size = 4, got <Topology base-2"),
        (lambda: Topology("w", [[[0.5, 0.2], [0.5, 0.7]]]), r"got 0\.9 in column 1$"),
        (lambda: Topology("w", [[[0.5, 0.7], [0.0, 0.5]]]), r"got 0\.5 in column 0 \(and 1 more\)$"),
        (lambda: Topology("w", [[[1.0], [0.0, 1.0]]]), r"matrices\[0\] must be a square matrix"),
        (lambda: topology.spectral_gap([[math.nan]]), r"finite numbers, got W\[0, 0\] = nan"),
    ],
    TypeError: [
        (lambda: topology.base_graph(4.0), "size must be an integer"),
        (lambda: topology.by_sites([0, 1.5]), r"site_of\[1\] must be an integer"),
        (lambda: topology.one_peer(nx.Graph([(0, 1)])), "graph must be a networkx.DiGraph"),
        (lambda: Topology(3, [np.eye(2)]), "name must be a string"),
        (lambda: Topology("text", [[["a"]]]), r"matrices\[0\] must be a matrix of real numbers"),
        (lambda: topology.base_graph(4).peers(0, 1.5), "t must be an integer"),
    ],
}


def test_wrong_arguments() -> None:
    for error, rows in WRONG.items():
        for call, message in rows:
            with pytest.raises(error, match=message):
                call()


# --- table --------------------------------------------------------------------------------------------------


def test_documentation_shows_the_table_as_printed() -> None:
    text = (Path(__file__).parents[1] / "docs" / "topologies.md").read_text()
    assert f"```text\n{topology.summary(8)}\n```" in text
    exp2 = Topology.from_graph("exp2", topology.exponential(6))
    sequences = [topology.one_peer_exponential(6), topology.base_graph(6, 1), topology.base_graph(6, 2)]
    assert f"```text\n{topology.summary(6, [exp2, *sequences])}\n```" in text


# --- with process groups ------------------------------------------------------------------------------------


def consensus(names: list[str]) -> None:
    """Mixes over the group by `neighbor_allreduce`, with the object's peers."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    start = np.random.default_rng(size).standard_normal((size, 3))
    for name in names:
        sequence = SEQUENCES[name](size)
        exact = sequence.rounds_to_exact_consensus
        rounds = 5 if exact is None else exact
        x = torch.from_numpy(start[rank].copy())
        expected = start
        for t in range(rounds):
            x = fogdist.neighbor_allreduce(x, **sequence.peers(rank, t))
            expected = sequence.matrix(t).T @ expected
        np.testing.assert_allclose(x.numpy(), expected[rank], rtol=0, atol=5e-15, err_msg=name)
        if exact is not None:
            np.testing.assert_allclose(x.numpy(), start.mean(axis=0), rtol=0, atol=5e-15, err_msg=name)
    fogdist.set_topology(SEQUENCES["exp2"](size).graph())
    mixed = fogdist.neighbor_allreduce(torch.from_numpy(start[rank].copy()))
    expected = SEQUENCES["exp2"](size).matrix().T @ start
    np.testing.assert_allclose(mixed.numpy(), expected[rank], rtol=0, atol=5e-15)
    fogdist.shutdown()


@pytest.mark.parametrize("size", sizes([5], [6, 8]))
def test_ranks_reach_the_exact_average(worlds: Callable[[int], WorldPool], size: int) -> None:
    finite = ["base-2", "base-3", "base-5"]
    others = ["random-matching", "one-peer-exp2"]
    others += {6: ["inner-outer-exp2"]}.get(size, [])
    assert all(SEQUENCES[name](size).rounds_to_exact_consensus for name in finite)
    worlds(size).run(consensus, finite + others)
