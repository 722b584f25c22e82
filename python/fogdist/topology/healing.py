"""Topologies without lost ranks: which edges and weights the living ones keep.

Pure functions of the matrices and the lost ranks, so all ranks that know the same lost ranks get the same topology.
The result is on the living ranks only, numbered in their order.

A topology that can be made for any number of ranks is made anew for the number of the living (`Topology.among`). The
rules here are for all others, such as a user's graph:

1. The edges of lost ranks go. If the matrices were doubly stochastic, a rank that loses a receiver and a sender keeps what
   the two weighed, and what is left of it goes from those who have lost a receiver to those who have lost a sender. So a
   symmetric matrix stays symmetric, and a cycle is closed around a lost rank. If only the columns summed to 1, each column
   is divided by what is left of it.
2. If the graph falls apart by that (all rounds together), each lost rank is replaced by the next living one instead, which
   gets its edges. Edges then go both ways and have Metropolis-Hastings weights; if only the columns summed to 1, they
   keep their directions, and receivers take the plain mean.

For more ranks (`Topology.grown`) each new rank is attached, in each round, to the old one with the largest weight of its own
values: that gives half of this weight to an edge in each direction. So the sums of rows and columns, and symmetry, stay as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fogdist.lazy import nx
from fogdist.topology.weights import (
    SUM_TOLERANCE,
    Matrix,
    metropolis_hastings_weights,
    mixing_matrix,
    uniform_weights,
)


def healed_rounds(
    matrix: Callable[[int], Matrix], period: int, living: Sequence[int]
) -> Callable[[int], Matrix]:
    """Returns the matrices of the rounds among the living ranks.

    Args:
        matrix: Gives the matrix of a round among all ranks.
        period: The number of rounds.
        living: The living ranks, ascending, at least one.
    """
    seen = range(period)
    ranks = np.asarray(living)
    balanced = all(np.allclose(matrix(t).sum(axis=1), 1.0, rtol=0.0, atol=SUM_TOLERANCE) for t in seen)
    if _is_connected([_remaining(matrix(t), ranks, balanced) for t in seen]):
        return lambda t: _remaining(matrix(t), ranks, balanced)
    return lambda t: _replaced(matrix(t), ranks, balanced)


def attached(W: Matrix, size: int) -> Matrix:
    """Returns the matrix with an edge in each direction between each new rank and an old one."""
    before = len(W)
    whole = np.eye(size)
    # Where no rank keeps a part of its own values, all keep a half.
    whole[:before, :before] = W if W.diagonal().max() > _LEAST else (W + np.eye(before)) / 2
    for rank in range(before, size):
        old = int(np.argmax(whole.diagonal()[:before]))
        share = whole[old, old] / 2
        whole[old, rank] = whole[rank, old] = share
        whole[old, old] -= share
        whole[rank, rank] -= share
    return whole


def _remaining(W: Matrix, living: NDArray[np.int64], balanced: bool) -> Matrix:
    """Returns the matrix without the edges of lost ranks, with weights that sum to 1 again."""
    rest = W[np.ix_(living, living)].copy()
    if not balanced:
        totals = rest.sum(axis=0)
        # A column in which little is left, or whose negative weights outweigh the others, cannot be divided by its sum.
        poor = totals < SUM_TOLERANCE
        rest[:, poor] = np.eye(len(living))[:, poor]
        rest /= np.where(poor, 1.0, totals)
        return rest
    lost = np.setdiff1d(np.arange(len(W)), living)
    kept, missed = W[np.ix_(living, lost)].sum(axis=1), W[np.ix_(lost, living)].sum(axis=0)
    both = np.minimum(kept, missed)
    rest[np.diag_indices(len(living))] += both
    kept, missed = kept - both, missed - both
    # The sums of the two are equal up to rounding: each rank passes on what it has left, in the order of ranks.
    receivers = [int(j) for j in np.flatnonzero(missed > _LEAST)]
    for i in np.flatnonzero(kept > _LEAST):
        while receivers and kept[i] > _LEAST:
            j = receivers[0]
            share = min(kept[i], missed[j])
            rest[i, j] += share
            kept[i] -= share
            missed[j] -= share
            if missed[j] <= _LEAST:
                receivers.pop(0)
    # What rounding has left, so that the columns sum to 1 to the last bits.
    rest[np.diag_indices(len(living))] += 1.0 - rest.sum(axis=0)
    return rest


# Shares below this are rounding errors of weights.
_LEAST = 1e-9


def _replaced(W: Matrix, living: NDArray[np.int64], balanced: bool) -> Matrix:
    """Returns the graph in which the next living rank has the edges of a lost one too, with new weights."""
    # Of a lost rank: that of the next living one.
    places = np.searchsorted(living, np.arange(len(W))) % len(living)
    edges = np.zeros((len(living), len(living)), dtype=bool)
    sources, destinations = np.nonzero(W)
    edges[places[sources], places[destinations]] = True
    if not balanced:
        return mixing_matrix(uniform_weights(nx.DiGraph(edges)))
    return mixing_matrix(metropolis_hastings_weights(nx.DiGraph(edges | edges.T)))


def _is_connected(rounds: Sequence[Matrix]) -> bool:
    """Returns whether news of each rank reach all others, over all rounds together."""
    return is_strongly_connected(np.any([W != 0 for W in rounds], axis=0))


def is_strongly_connected(edges: NDArray[np.bool_]) -> bool:
    """Returns whether each node of a graph reaches all others; `edges[i, j]` tells whether there is an edge i -> j."""
    return bool(nx.is_strongly_connected(nx.from_numpy_array(edges, create_using=nx.DiGraph)))
