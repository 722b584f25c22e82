"""Sequences of few rounds and small degree that end in the exact average, for any number of ranks.

Takezawa, Sato, Bao, Niwa and Yamada, "Beyond Exponential Graph: Communication-Efficient Topologies for
Decentralized Learning via Finite-time Convergence", NeurIPS 2023, arXiv 2305.11420. A round is held as the
exact weights of its undirected edges; what they leave of 1 is a rank's self weight, so that each matrix is
symmetric and doubly stochastic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import combinations
from typing import SupportsIndex

import numpy as np

from fogdist.topology.topology import Topology
from fogdist.topology.validation import check_int
from fogdist.topology.weights import Matrix

# The weights of a round's undirected edges, by their ends.
_Round = dict[tuple[int, int], Fraction]


def base_graph(size: SupportsIndex, degree: SupportsIndex = 1) -> Topology:
    """Returns the Base-(k+1) graph: the exact average for any size, in few rounds of up to k peers.

    With size = p * q, p being the largest divisor without prime factors above k + 1: p simple Base-(k+1)
    graphs on q ranks side by side, then q hyper-hypercubes on p ranks across them; the simple Base-(k+1)
    graph on all ranks if that takes fewer rounds. At most 2 log(size)/log(k + 1) + 2 rounds (algorithm 3 of
    arXiv 2305.11420, made of its algorithms 1 and 2); log2(size) for powers of two with k = 1.

    Args:
        size: Number of ranks, at least 1.
        degree: k, at least 1: the most peers of a rank in a round. With k >= size - 1 one round does.

    Raises:
        TypeError: An argument is not an integer.
        TopologyError: `size` or `degree` is below 1.
    """
    size, k = check_int(size, "size", minimum=1), check_int(degree, "degree", minimum=1)
    smooth = max(p for p in range(1, size + 1) if size % p == 0 and _factors(p, k + 1) is not None)
    rough = size // smooth
    groups = [range(start, start + rough) for start in range(0, size, rough)]
    across = [range(start, size, rough) for start in range(rough)]
    rounds = _side_by_side([_simple_base(group, k) for group in groups])
    rounds += _side_by_side([_hyper_hypercube(ranks, k) for ranks in across])
    simple = _simple_base(range(size), k)
    shorter = simple if len(simple) < len(rounds) else rounds
    # A single rank has the average at once, but a topology needs at least one round.
    matrices = [_matrix(size, edges) for edges in shorter or [{}]]
    return Topology(f"base-{k + 1}", matrices, resized=partial(base_graph, degree=k))


def _matrix(size: int, edges: _Round) -> Matrix:
    W = np.zeros((size, size))
    rest = [Fraction(1)] * size
    for (i, j), weight in edges.items():
        W[i, j] = W[j, i] = float(weight)
        rest[i] -= weight
        rest[j] -= weight
    np.fill_diagonal(W, [float(weight) for weight in rest])
    return W


@cache
def _factors(number: int, largest: int) -> tuple[int, ...] | None:
    """The fewest factors, each in [2, largest], whose product is `number`; None if there are none."""
    if number == 1:
        return ()
    best: tuple[int, ...] | None = None
    for factor in range(min(number, largest), 1, -1):
        if number % factor == 0:
            rest = _factors(number // factor, largest)
            if rest is not None and (best is None or len(rest) + 1 < len(best)):
                best = (factor, *rest)
    return best


def _mean(ranks: Sequence[int]) -> _Round:
    """The plain mean of some ranks: a complete graph on them."""
    return {(i, j): Fraction(1, len(ranks)) for i, j in combinations(ranks, 2)}


def _hyper_hypercube(ranks: Sequence[int], k: int) -> list[_Round]:
    """Numbers of several digits, of which each round averages one: complete graphs on as many ranks as its factor."""
    factors = _factors(len(ranks), k + 1)
    assert factors is not None, "the caller chose a number of ranks that has factors"
    rounds = []
    stride = 1
    for factor in factors:
        edges: _Round = {}
        for start in range(len(ranks)):
            if start // stride % factor == 0:
                edges |= _mean(ranks[start : start + stride * factor : stride])
        rounds.append(edges)
        stride *= factor
    return rounds


def _parts(ranks: Sequence[int], base: int) -> list[list[Sequence[int]]]:
    """Cuts ranks by the digits of their number: a digit a of place value v makes a part of a blocks of v
    ranks. Largest first.
    """
    place = 1
    while place * base <= len(ranks):
        place *= base
    parts = []
    start = 0
    while start < len(ranks):
        digit = (len(ranks) - start) // place
        if digit:
            parts.append([ranks[start + a * place : start + (a + 1) * place] for a in range(digit)])
            start += digit * place
        place //= base
    return parts


def _simple_base(ranks: Sequence[int], k: int) -> list[_Round]:
    """The digits of the number of ranks in base k + 1 split them into parts, which average, share, and even out."""
    if _factors(len(ranks), k + 1) is not None:
        return _hyper_hypercube(ranks, k)
    parts = _parts(ranks, k + 1)
    members = [[rank for block in part for rank in block] for part in parts]

    # First each part averages. A part that is done early continues mixing, which does not change an exact average, but
    # helps in training, where ranks drift in the meantime.
    cubes = [_hyper_hypercube(part, k) for part in members]
    rounds = [_merge(cube[t % len(cube)] for cube in cubes if cube) for t in range(len(cubes[0]))]

    # Then part 0, 1, ... in turn hands its share to the smaller parts, up to the last, which has none below.
    # From the round after that a block has its final total and takes its own average, while others go on.
    blocks = [[_hyper_hypercube(block, k) for block in part] for part in parts]
    last = len(parts) - 1
    if len(parts[last][0]) == 1:
        blocks[last] = [cubes[last]]  # Single ranks are done; these too mix on.
    for step in range(1 + len(blocks[0][0])):
        edges = [_hand_over(parts[step], members[step + 1 :], k)] if step < last else []
        for place, sequences in enumerate(blocks):
            t = step - min(place + 1, last)
            edges += [cube[t % len(cube)] for cube in sequences if cube and t >= 0]
        rounds.append(_merge(edges))
    return rounds


def _hand_over(blocks: list[Sequence[int]], smaller: list[list[int]], k: int) -> _Round:
    """Each rank of the smaller parts exchanges with one rank of each block of this part.

    This part and the smaller ones hold an average each. The weight leaves the smaller parts together, and
    each block by itself, with the average over all of them.
    """
    below = [rank for part in smaller for rank in part]
    size = sum(map(len, blocks))
    weight = Fraction(size, len(blocks) * (size + len(below)))
    edges = {(rank, block[place]): weight for place, rank in enumerate(below) for block in blocks}
    # The other ranks of the block have no peer. They average among themselves, which exact consensus does not
    # need but training profits from.
    idle = [rank for block in blocks for rank in block[len(below) :]]
    for start in range(0, len(idle), k + 1):
        edges |= _mean(idle[start : start + k + 1])
    return edges


def _merge(rounds: Iterable[_Round]) -> _Round:
    """Rounds on ranks that do not overlap, as one round."""
    return {edge: weight for edges in rounds for edge, weight in edges.items()}


def _side_by_side(sequences: list[list[_Round]]) -> list[_Round]:
    """Sequences of one length, on ranks that do not overlap, as one sequence."""
    return [_merge(rounds) for rounds in zip(*sequences, strict=True)]
