"""Topologies without lost ranks: for every kind of topology and random sets of lost ranks."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from fogdist import topology
from fogdist.topology import Topology, TopologyError
from harness import ALL
from hypothesis import given, settings
from hypothesis import strategies as st
from test_topology_sequences import ALLOWED, SEQUENCES

# Every graph that has a short name, and every sequence.
KINDS = {
    **{
        name: lambda n, name=name: Topology.from_graph(name, topology.by_name(name, n))
        for name in topology.TOPOLOGY_NAMES
    },
    **SEQUENCES,
    "mean-of-mesh": lambda n: Topology.from_graph("mean-of-mesh", topology.uniform_weights(topology.mesh(n))),
    "one-peer-star": lambda n: topology.one_peer(topology.star(n)),
}


@st.composite
def losses(draw: st.DrawFn) -> tuple[Topology, list[int]]:
    """Draws a topology and the ranks that it loses, at least one of which is left."""
    name = draw(st.sampled_from(sorted(KINDS)))
    size = draw(st.sampled_from(ALLOWED.get(name, range(1, 18))))
    lost = draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    return KINDS[name](size), sorted(lost)


def without(whole: Topology, lost: list[int]) -> Topology:
    """Returns what is left by the numbers of all ranks; lost ones keep their own value."""
    living = [rank for rank in range(whole.size) if rank not in lost]
    rest, rounds = whole.among(living), []
    for t in range(rest.period):
        W = np.eye(whole.size)
        W[np.ix_(living, living)] = rest.matrix(t)
        rounds.append(W)
    return Topology(whole.name, rounds)


def rounds_of(sequence: Topology) -> list[np.ndarray]:
    return [sequence.matrix(t) for t in range(sequence.period)]


def connects(rounds: list[np.ndarray], ranks: list[int]) -> bool:
    """Returns whether each of the ranks reaches all others over all rounds together."""
    union = np.any([W[np.ix_(ranks, ranks)] != 0 for W in rounds], axis=0)
    return nx.is_strongly_connected(nx.from_numpy_array(union, create_using=nx.DiGraph))


def check_promises(before: list[np.ndarray], after: list[np.ndarray], stays_symmetric: bool = True) -> None:
    """Columns sum to 1, and rows do and matrices are symmetric if they were before."""
    balanced = all(np.allclose(W.sum(axis=1), 1.0) for W in before)
    symmetric = stays_symmetric and all(np.array_equal(W, W.T) for W in before)
    for W in after:
        assert (W >= 0).all()
        np.testing.assert_allclose(W.sum(axis=0), 1.0, rtol=1e-12)
        if balanced:
            np.testing.assert_allclose(W.sum(axis=1), 1.0, rtol=1e-12)
        if symmetric:
            np.testing.assert_allclose(W, W.T, rtol=1e-12)


@settings(max_examples=2000 if ALL else 150, deadline=None, derandomize=not ALL)
@given(losses())
def test_what_is_left_is_a_topology_of_the_same_promises(case: tuple[Topology, list[int]]) -> None:
    whole, lost = case
    healed = without(whole, lost)
    living = [rank for rank in range(whole.size) if rank not in lost]
    assert healed.size == whole.size
    before, after = rounds_of(whole), rounds_of(healed)
    check_promises(before, after)
    for W in after:
        for rank in lost:
            assert W[rank, rank] == 1.0
            assert np.count_nonzero(W[rank]) == np.count_nonzero(W[:, rank]) == 1
    if connects(before, list(range(whole.size))):
        assert connects(after, living)


@pytest.mark.parametrize("name", ["one-peer-exp2", "base-2", "base-3", "random-matching"])
def test_a_sequence_shrinks_to_its_own_construction(name: str) -> None:
    living = [0, 1, 3, 4, 5, 7]
    healed, smaller = without(KINDS[name](8), [2, 6]), KINDS[name](6)
    assert healed.period == smaller.period
    for t in range(smaller.period):
        np.testing.assert_array_equal(healed.matrix(t)[np.ix_(living, living)], smaller.matrix(t))


def test_a_ring_closes_around_lost_ranks() -> None:
    for style, (rank, neighbors) in {"ring": (4, {1, 5}), "ring-right": (1, {4})}.items():
        healed = without(Topology.from_graph(style, topology.by_name(style, 6)), [2, 3])
        graph = healed.graph()
        assert set(graph.successors(rank)) - {rank} == neighbors
        assert all(graph[i][j]["weight"] == graph[4][4]["weight"] for i, j in graph.edges if i not in (2, 3))


def test_the_next_rank_becomes_the_center_of_a_star() -> None:
    graph = without(Topology.from_graph("star", topology.star(5, center_rank=2)), [2]).graph()
    assert {rank: sorted(set(graph.successors(rank)) - {rank}) for rank in graph} == {
        0: [3],
        1: [3],
        2: [],
        3: [0, 1, 4],
        4: [3],
    }


def test_the_weight_of_a_lost_neighbor_returns_to_self_while_the_graph_holds_together() -> None:
    whole = Topology.from_graph("mesh", topology.mesh(9))  # rank 0 is a corner, beside 1 and 3
    healed = without(whole, [0])
    difference = healed.matrix() - whole.matrix()
    assert set(zip(*np.nonzero(difference), strict=True)) == {
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 3),
        (3, 0),
        (1, 1),
        (3, 3),
    }
    assert difference[1, 1] == pytest.approx(whole.matrix()[0, 1])


def test_a_cycle_of_one_round_is_closed() -> None:
    """A rank that loses its receiver sends to the rank that loses its sender: the mean of all stays."""
    order = [0, 3, 1, 4, 2]
    W = np.eye(5) / 2
    for i, j in zip(order, [*order[1:], order[0]], strict=True):
        W[i, j] += 0.5
    healed = without(Topology("cycle", [W]), [1])
    assert healed.matrix()[3, 4] == 0.5
    assert sorted(healed.peers(3)["dst_weights"]) == [4]


def test_a_users_own_mean_of_neighbors_is_divided_by_what_is_left() -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (3, 0), (2, 3)])
    healed = without(Topology.from_graph("own", topology.uniform_weights(graph)), [3])
    np.testing.assert_allclose(healed.matrix()[:, 0], [0.5, 0, 0.5, 0])
    np.testing.assert_allclose(healed.matrix()[:, 2], [1 / 3, 1 / 3, 1 / 3, 0])


# --- more ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "one-peer-exp2",
        "base-2",
        "random-matching",
        "exp2",
        "ring",
        "ring-right",
        "full",
        "star",
    ],
)
def test_a_kind_for_any_number_of_ranks_is_made_anew(name: str) -> None:
    grown, larger = KINDS[name](5).grown(9), KINDS[name](9)
    assert grown.period == larger.period
    for t in range(larger.period):
        np.testing.assert_allclose(grown.matrix(t), larger.matrix(t), rtol=0.0, atol=1e-15)


@settings(max_examples=500 if ALL else 60, deadline=None, derandomize=not ALL)
@given(losses(), st.integers(1, 4))
def test_more_ranks_keep_what_holds_for_the_matrices(case, more: int) -> None:
    """Sums of columns and rows, symmetry and connectedness; the others' distances from a mean that they kept are theirs."""
    whole, _ = case
    size = whole.size + more
    grown = whole.grown(size)
    assert (grown.size, grown.grown(size)) == (size, grown)
    before, after = rounds_of(whole), rounds_of(grown)
    # A directed kind may be symmetric for up to 6 ranks, and not for more.
    check_promises(before, after, whole.size > 6)
    if connects(before, list(range(whole.size))):
        assert connects(after, list(range(size)))


def test_a_new_rank_halves_what_another_gives_to_its_own_values() -> None:
    mesh = Topology.from_graph("mesh", topology.mesh(6))
    W, grown = mesh.matrix(), mesh.grown(8).matrix()
    first = int(np.argmax(W.diagonal()))
    np.testing.assert_allclose(grown[first, 6], W[first, first] / 2)
    np.testing.assert_allclose(grown[:6, :6] - np.diag(grown.diagonal()[:6]), W - np.diag(W.diagonal()))
    assert np.count_nonzero(grown[6]) == np.count_nonzero(grown[7]) == 2
    assert set(np.flatnonzero(grown[7])) & set(np.flatnonzero(grown[6])) == set()


def test_bad_ranks() -> None:
    ring = Topology.from_graph("ring", topology.ring(4))
    assert ring.among(range(4)) is ring
    with pytest.raises(TopologyError, match=r"living must be a rank in \[0, 3\], got 4"):
        ring.among([0, 4])
    with pytest.raises(TypeError, match="living must be an integer, got 'a'"):
        ring.among(["a"])
    with pytest.raises(TopologyError, match="living must hold at least one rank, got none"):
        ring.among([])
    with pytest.raises(TopologyError, match="size"):
        ring.grown(3)
