"""EquiTopo: graphs of random distances around the circle, whose mixing does not slow down with the size.

Song, Li, Jin, Shi, Yan, Yin and Yuan, "Communication-Efficient Topologies for Decentralized Learning with
O(1) Consensus Rate", NeurIPS 2022, arXiv 2210.07881. All are made of the basis graphs of the distances a = 1
... n-1: rank i sends to i + a (mod n) with weight 1 - 1/n, and keeps 1/n. Their mean over all distances is
the exact average, and that of a few random distances is near it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import SupportsIndex

import numpy as np

from fogdist.lazy import nx
from fogdist.topology.draws import choice, permutation
from fogdist.topology.errors import TopologyError
from fogdist.topology.topology import Matrix, Topology
from fogdist.topology.validation import check_int
from fogdist.topology.weights import build_topology


def EquiStaticGraph(
    size: SupportsIndex,
    distances: SupportsIndex | None = None,
    *,
    directed: bool = True,
    seed: SupportsIndex = 0,
) -> nx.DiGraph:
    """Returns D-EquiStatic, the mean of the basis graphs of a few random distances, or U-EquiStatic.

    With about ln(n) distances, the second singular value of W stays below a bound that does not depend on n,
    with a probability as near to 1 as the constant before ln(n) is large (arXiv 2210.07881). A draw may still
    be a poor one, even disconnected; `spectral_gap` tells. W is doubly stochastic. Distances are drawn
    without repetition, where the paper repeats: its bounds hold all the more (Gross and Nesme, arXiv
    1001.2738), and size - 1 distances are the complete graph.

    Args:
        size: Number of ranks, at least 1.
        distances: How many distances, in [1, size - 1]; by default ceil(2 ln(size)), at most size - 1.
        directed: True for D-EquiStatic, where a rank sends to as many ranks as there are distances. False for
            U-EquiStatic, (W + W^T) / 2, where it sends to up to twice as many.
        seed: The same on all ranks.

    Raises:
        TypeError: `size`, `distances` or `seed` is not an integer.
        TopologyError: `size` is below 1, or `distances` out of range.
    """
    size = check_int(size, "size", minimum=1)
    drawn = _draw(size, distances, seed)
    share = Fraction(size - 1, size * max(len(drawn), 1))
    weights = {0: Fraction(1, size) if drawn else Fraction(1)}
    for distance in drawn:
        for hop in (distance,) if directed else (distance, size - distance):
            weights[hop] = weights.get(hop, Fraction(0)) + (share if directed else share / 2)
    edges = ((i, (i + hop) % size, weight) for i in range(size) for hop, weight in weights.items())
    return build_topology(size, edges)


def equi_dynamic(
    size: SupportsIndex,
    distances: SupportsIndex | Iterable[SupportsIndex] | None = None,
    *,
    directed: bool = True,
    eta: float = 0.5,
    seed: SupportsIndex = 0,
) -> Topology:
    """Returns OD-EquiDyn or OU-EquiDyn: each round one basis graph at random, one peer a rank, endless.

    A round of OD-EquiDyn is ``(1 - eta) I + eta A``, A being the basis graph of a distance drawn from the
    given ones. A round of OU-EquiDyn pairs ranks at that distance, beginning at a random rank, and a rank
    that finds its partner taken keeps its value. The mean square of the consensus distance is expected to
    become at most 1 - 2 eta (1 - eta) (1 - rho) of itself a round, with OU-EquiDyn 1 - 4/3 eta (1 - eta) (1 -
    rho), rho being the second singular value of the static graph of the distances: 0 for all distances,
    whatever the size (arXiv 2210.07881).

    Args:
        size: Number of ranks, at least 1.
        distances: How many distances are drawn, in [1, size - 1], as by `EquiStaticGraph` of the same seed,
            or the distances themselves. By default all: 1 ... size - 1.
        directed: True for OD-EquiDyn, False for OU-EquiDyn.
        eta: Weight of the exchange, in (0, 1]; 0.5 mixes fastest.
        seed: The same on all ranks.

    Raises:
        TypeError: `size`, a distance or `seed` is not an integer.
        TopologyError: `size` is below 1, `distances` out of range, or `eta` outside (0, 1].
    """
    size = check_int(size, "size", minimum=1)
    seed = check_int(seed, "seed")
    if not 0.0 < eta <= 1.0:
        raise TopologyError(f"eta must be in (0, 1], got {eta!r}")
    if isinstance(distances, Iterable):
        basis = [check_int(a, f"distances[{place}]") for place, a in enumerate(distances)]
        if size > 1 and not (basis and all(1 <= a < size for a in basis)):
            raise TopologyError(f"distances must be in [1, {size - 1}], at least one, got {basis}")
    else:
        basis = _draw(size, size - 1 if distances is None and size > 1 else distances, seed)
    exchange = eta * (size - 1) / size

    def directed_round(t: int) -> Matrix:
        distance = basis[choice(len(basis), "equi-dynamic", seed, t)]
        W = np.eye(size) * (1.0 - exchange)
        ranks = np.arange(size)
        W[ranks, (ranks + distance) % size] = exchange
        return W

    def undirected_round(t: int) -> Matrix:
        distance = basis[choice(len(basis), "equi-dynamic", seed, t)]
        first = choice(size, "equi-dynamic-start", seed, t)
        W = np.eye(size)
        free = [True] * size
        for i in (*range(first, size), *range(first)):
            j = (i + distance) % size
            if free[i] and free[j]:
                free[i] = free[j] = False
                W[i, i] = W[j, j] = 1.0 - exchange
                W[i, j] = W[j, i] = exchange
        return W

    def resized(ranks: int) -> Topology:
        fewer: SupportsIndex | list[int] | None = None
        if isinstance(distances, Iterable):
            left = {a % ranks for a in basis} - {0}
            # The old distances connect fewer ranks if they have a divisor in common with their number.
            fewer = sorted(left if math.gcd(ranks, *left) == 1 else {*left, 1}) if ranks > 1 else None
        elif distances is not None and ranks > 1:
            fewer = min(len(basis), ranks - 1)
            drawn = _draw(ranks, fewer, seed)
            if math.gcd(size, *basis) == 1 != math.gcd(ranks, *drawn):
                fewer = sorted({1, *drawn[1:]})
        return equi_dynamic(ranks, fewer, directed=directed, eta=eta, seed=seed)

    name = "od-equidyn" if directed else "ou-equidyn"
    if size == 1:
        return Topology(name, [np.eye(1)], resized=resized)
    return Topology.endless(name, size, directed_round if directed else undirected_round, resized=resized)


def _draw(size: int, distances: SupportsIndex | None, seed: SupportsIndex) -> list[int]:
    """Some of the distances 1 ... size - 1, ascending; none for a single rank."""
    seed = check_int(seed, "seed")
    if size == 1:
        return []
    if distances is None:
        count = min(math.ceil(2.0 * math.log(size)), size - 1)
    else:
        count = check_int(distances, "distances")
        if not 1 <= count < size:
            raise TopologyError(f"distances must be in [1, {size - 1}] for {size} ranks, got {count}")
    return sorted(1 + place for place in permutation(size - 1, "equi-static", seed)[:count])
