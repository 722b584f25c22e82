"""`Topology`: one mixing matrix per round, for static graphs and time-varying sequences.

A static graph is a sequence of period 1. All properties of a topology (peers, gap, rounds to consensus, bytes) are
computed from its matrices, and not taken from the claims of papers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import SupportsIndex, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fogdist.lazy import nx
from fogdist.topology.graphs import exponential, fully_connected, ring, star, symmetric_exponential
from fogdist.topology.healing import attached, healed_rounds
from fogdist.topology.validation import TopologyError, check_int, check_rank
from fogdist.topology.weights import (
    Matrix,
    build_topology,
    check_matrix,
    has_weights,
    mixing_matrix,
    spectral_gap,
    uniform_weights,
)

# The most weights that a topology keeps.
_MOST_KEPT = 1 << 22
# A smaller distance is the rounding error of an exact average. An average that is only approached passes through the
# distances between the two numbers; the distance of an exact one falls below them in one round.
_EXACT_BELOW = 1e-13
_NEAR_BELOW = 1e-6

# Graphs for any number of ranks. Some are the same for few ranks; the first one then counts.
_ANY_SIZE: tuple[Callable[[int], nx.DiGraph], ...] = (
    exponential,
    ring,
    lambda size: ring(size, 1),
    lambda size: ring(size, 2),
    symmetric_exponential,
    fully_connected,
    star,
)


class Peers(TypedDict):
    """A rank's part in one round: the keyword arguments of `fogdist.neighbor_allreduce`.

    Attributes:
        self_weight: Weight of the rank's own tensor.
        src_weights: {source rank: weight}, ascending; empty if the rank receives nothing.
        dst_weights: The ranks to send to, ascending, unscaled: the receivers hold the weights.
    """

    self_weight: float
    src_weights: dict[int, float]
    dst_weights: list[int]


class Topology:
    """The edges and weights of the rounds 0, 1, 2, ...: one graph, or a period of graphs.

    ``W[i, j]`` of a round is the weight of the edge i -> j: a row is a sender, a column a receiver, and each
    column sums to 1. An edge of weight 0 is no edge. Ranks that create the same topology agree without
    communication::

        topology = fogdist.topology.one_peer_exponential(fogdist.size())
        for t in range(steps):
            x = fogdist.neighbor_allreduce(x, **topology.peers(fogdist.rank(), t))

    Attributes:
        name: A short name for tables and titles.
        size: Number of ranks.
        period: Number of rounds after which the sequence repeats, 1 for a static graph.
    """

    def __init__(
        self,
        name: str,
        matrices: Iterable[ArrayLike],
        *,
        resized: Callable[[int], Topology] | None = None,
    ) -> None:
        """Makes a topology from the matrices of one period.

        Args:
            name: A short name.
            matrices: Real numbers of shape (n, n) each, kept as float64; columns sum to 1 within 1e-5. One
                matrix makes a static topology.
            resized: Makes the topology of this kind for another number of ranks; see `among`.

        Raises:
            TypeError: A matrix does not hold real numbers, or `name` is not a string.
            TopologyError: There is no matrix, shapes differ or are not square, an entry is not finite, or a
                column does not sum to 1.
        """
        # These are copies, so later changes of the caller's arrays have no effect.
        rounds = [check_matrix(W, f"matrices[{t}]") for t, W in enumerate(matrices)]
        if not rounds:
            raise TopologyError("matrices must hold at least one matrix, got none")
        shapes = {W.shape for W in rounds}
        if len(shapes) > 1:
            raise TopologyError(f"matrices must all have one shape, got {sorted(shapes)}")
        self._set(name, len(rounds[0]), len(rounds), rounds.__getitem__, resized)

    @classmethod
    def from_graph(cls, name: str, graph: nx.DiGraph) -> Topology:
        """Returns the static topology of a graph with its weights.

        Args:
            name: A short name.
            graph: A graph on the ranks 0 ... n-1 whose weights sum to 1 at each receiver, self loop counted. A graph
                without weights stands for the plain mean of a rank and its in-neighbors.

        Raises:
            TypeError: `graph` is not a networkx.DiGraph, or a weight is not a real number.
            TopologyError: Its nodes are not 0 ... n-1, a weight is not finite, or a rank's weights do not sum
                to 1.
        """
        if not has_weights(graph):
            graph = uniform_weights(graph)
        return cls(name, [check_matrix(mixing_matrix(graph), "graph")])

    @classmethod
    def of_rounds(
        cls,
        name: str,
        size: int,
        period: int,
        matrix: Callable[[int], ArrayLike],
        *,
        resized: Callable[[int], Topology] | None = None,
    ) -> Topology:
        """Returns a sequence whose matrices are made when they are asked for, from functions that need no other check."""
        topology = cls.__new__(cls)
        topology._set(name, size, period, lambda t: check_matrix(matrix(t), f"matrix({t})"), resized)
        return topology

    def _set(
        self,
        name: str,
        size: int,
        period: int,
        matrix: Callable[[int], Matrix],
        resized: Callable[[int], Topology] | None,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r} of type {type(name).__name__}")
        self.name = name
        self.size = size
        self.period = period
        self._make = matrix
        self._resized = resized
        # Rounds that were asked for: all, or of large ones the last, as ranks often ask for it several times in a row.
        self._kept: dict[int, Matrix] = {}

    def __repr__(self) -> str:
        return f"<Topology {self.name}: {self.size} ranks, period {self.period}>"

    def matrix(self, t: SupportsIndex = 0) -> Matrix:
        """Returns the mixing matrix of round t: float64 of shape (n, n), read-only.

        Args:
            t: Round, at least 0.

        Raises:
            TypeError: `t` is not an integer.
            TopologyError: `t` is negative.
        """
        t = check_int(t, "t", minimum=0) % self.period
        if t not in self._kept:
            if self.period * self.size**2 > _MOST_KEPT:
                self._kept.clear()
            W = self._kept[t] = self._make(t)
            W.setflags(write=False)
        return self._kept[t]

    def graph(self, t: SupportsIndex = 0) -> nx.DiGraph:
        """Returns the weighted graph of round t, self loops included: fit for `fogdist.set_topology`.

        Raises:
            TypeError: `t` is not an integer.
            TopologyError: `t` is negative.
        """
        W = self.matrix(t)
        return build_topology(self.size, ((int(i), int(j), float(W[i, j])) for i, j in np.argwhere(W)))

    def peers(self, rank: SupportsIndex, t: SupportsIndex = 0) -> Peers:
        """Returns the peers of a rank in round t, as the keyword arguments of `fogdist.neighbor_allreduce`.

        Args:
            rank: The rank.
            t: Round, at least 0.

        Raises:
            TypeError: `rank` or `t` is not an integer.
            TopologyError: `rank` is out of range, or `t` negative.
        """
        rank = check_rank(rank, self.size, "rank")
        W = self.matrix(t)
        sources = [int(i) for i in np.flatnonzero(W[:, rank]) if i != rank]
        return Peers(
            self_weight=float(W[rank, rank]),
            src_weights={i: float(W[i, rank]) for i in sources},
            dst_weights=[int(j) for j in np.flatnonzero(W[rank]) if j != rank],
        )

    def among(self, living: Iterable[SupportsIndex]) -> Topology:
        """Returns the topology of some of the ranks only, which get the numbers 0, 1, ... in ascending order.

        A pure function, so ranks that know the same living ranks agree without communication. A kind that exists for any
        number of ranks is made anew: one-peer exponential, Base-(k+1), random matchings, exponential graphs of base 2, the
        symmetric ones of base 4, rings, the complete graph and the star. (Some of these are the same graph for few ranks. The
        first one here counts then that is symmetric if the graph is.) Other graphs lose the edges of the missing ranks; where
        a graph falls apart by that, the next living rank gets the edges of each missing one.

        Rows sum to 1 in the result if they do here, in each round, and columns always do. A matrix that is symmetric stays
        symmetric.

        Args:
            living: At least one rank.

        Raises:
            TypeError: A rank is not an integer.
            TopologyError: A rank is out of range, or there is none.
        """
        ranks = sorted({check_rank(rank, self.size, "living") for rank in living})
        if not ranks:
            raise TopologyError("living must hold at least one rank, got none")
        if len(ranks) == self.size:
            return self
        return self._anew(len(ranks)) or self._of_as_many_rounds(
            len(ranks), healed_rounds(self.matrix, self.period, ranks)
        )

    def grown(self, size: SupportsIndex) -> Topology:
        """Returns the topology of more ranks: the new ones have the last numbers.

        A pure function, as `among`. A kind that exists for any number of ranks is made anew. To any other graph each new rank
        is attached by an edge in each direction, whose weight is half of what the old rank gave to its own values: the one
        that gave most to them.

        Rows sum to 1 in the result if they do here, in each round, and columns always do. A matrix that is symmetric stays
        symmetric.

        Args:
            size: The number of ranks, at least the present one.

        Raises:
            TypeError: `size` is not an integer.
            TopologyError: `size` is below the present one.
        """
        ranks = check_int(size, "size", minimum=self.size)
        if ranks == self.size:
            return self
        return self._anew(ranks) or self._of_as_many_rounds(ranks, lambda t: attached(self.matrix(t), ranks))

    def _of_as_many_rounds(self, size: int, matrix: Callable[[int], Matrix]) -> Topology:
        """Returns the topology of these matrices, with the period of this one."""
        return Topology.of_rounds(self.name, size, self.period, matrix)

    def _anew(self, size: int) -> Topology | None:
        """Returns the topology of the same kind for another number of ranks; None if it is of no kind for any number."""
        if self._resized is not None:
            return self._resized(size)
        W = self.matrix()
        for make in _ANY_SIZE if self.period == 1 else ():
            if np.allclose(W, mixing_matrix(make(self.size)), rtol=0.0, atol=_EXACT_BELOW):
                other = mixing_matrix(make(size))
                if np.array_equal(other, other.T) or not np.array_equal(W, W.T):
                    return Topology(self.name, [other])
        return None

    def degrees(self, t: SupportsIndex = 0) -> NDArray[np.int64]:
        """Returns to how many ranks each rank sends in round t."""
        W = self.matrix(t)
        return np.asarray(np.count_nonzero(W, axis=1) - (W.diagonal() != 0))

    @property
    def spectral_gap(self) -> float:
        """1 - |lambda_2|: of W for a static graph, of the product over one period for a sequence.

        A period of several rounds is thus judged as a whole, and 1 means that it ends in consensus.
        """
        product = np.eye(self.size)
        for t in range(self.period):
            product = product @ self.matrix(t)
        # An exactly averaging product has a multiple eigenvalue 0, which the solver finds inexactly.
        return 1.0 if self._disagreement(product) < _EXACT_BELOW else spectral_gap(product)

    def rounds_to(self, distance: float, limit: SupportsIndex = 1000) -> int | None:
        """Returns the first number of rounds after which the ranks are no further than `distance` from agreement.

        The root mean square of the ranks' distance from their common mean counts, for starts drawn independently.

        Args:
            distance: Relative to the start; at least 1e-12.
            limit: The most rounds that are tried.

        Returns:
            The number of rounds; None if they are more than `limit`.

        Raises:
            TypeError: `limit` is not an integer.
            TopologyError: `distance` is below 1e-12, or `limit` negative.
        """
        if not distance >= 1e-12:
            raise TopologyError(f"distance must be at least 1e-12, got {distance!r}")
        limit = check_int(limit, "limit", minimum=0)
        return next(
            (t for t, now in zip(range(limit + 1), self._decay(), strict=False) if now <= distance), None
        )

    @property
    def rounds_to_exact_consensus(self) -> int | None:
        """After how many rounds, from round 0, every rank holds the exact average of the start.

        Up to rounding. None if that happens after no finite number of rounds.
        """
        if self.size == 1:
            return 0
        product = np.eye(self.size)
        before = self._disagreement(product)
        # A matrix whose eigenvalues but one are 0 needs at most n - 1 factors.
        for t in range(self.period * (self.size - 1)):
            product = product @ self.matrix(t)
            now = self._disagreement(product)
            if now < _EXACT_BELOW:
                return t + 1 if before > _NEAR_BELOW else None
            before = now
        return None

    def _disagreement(self, product: Matrix) -> float:
        """Returns the distance of a product of mixing matrices from the matrix of the exact average."""
        return float(np.abs(product - 1.0 / self.size).max())

    def _decay(self) -> Iterator[float]:
        state = np.eye(self.size) - 1.0 / self.size  # unit vectors without their mean span all disagreement
        start = max(float(np.linalg.norm(state)), np.finfo(np.float64).tiny)
        for t in itertools.count():
            yield float(np.linalg.norm(state - state.mean(axis=0))) / start
            state = self.matrix(t).T @ state  # Column j of W holds what rank j receives with.
