"""Time-varying topologies of one peer a rank and round; a receiver takes the plain mean.

Base-(k+1) graphs are in `base_graph`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import SupportsIndex

import numpy as np

from fogdist.lazy import nx
from fogdist.topology.dynamic import inner_outer_exponential_ranks, one_peer_ranks
from fogdist.topology.errors import TopologyError
from fogdist.topology.graphs import exponential
from fogdist.topology.neighbor_lists import matrix_from_destinations, out_neighbors
from fogdist.topology.topology import Matrix, Topology
from fogdist.topology.validation import check_int, check_topology


def one_peer_exponential(size: SupportsIndex) -> Topology:
    """Returns the one-peer exponential graph: round t goes to i + 2^t (mod n), t < log2(n), then again.

    A power of two of ranks has the exact average after log2(n) rounds, begun at any round; other sizes only
    approach it (Ying, Yuan, Chen, Hu, Pan and Yin, "Exponential Graph is Provably Efficient for Decentralized
    Deep Training", NeurIPS 2021, arXiv 2110.13363).

    Args:
        size: Number of ranks, at least 1.

    Raises:
        TypeError: `size` is not an integer.
        TopologyError: `size` is below 1.
    """
    return _one_peer(exponential(size), "one-peer-exp2", one_peer_exponential)


def one_peer(graph: nx.DiGraph, name: str = "one-peer") -> Topology:
    """Returns the walk along a graph, one out-neighbor a round: all ranks' `one_peer_ranks`.

    Each receiver computes the plain mean of its own value and the received ones. The average of all ranks does not
    change if each rank receives from one rank, as on circulant graphs (exponential, ring).

    Args:
        graph: A graph on the ranks 0 ... n-1; its weights are not looked at.
        name: A short name.

    Raises:
        TypeError: `graph` is not a networkx.DiGraph, or `name` not a string.
        TopologyError: Its nodes are not 0 ... n-1, or the degrees make the period longer than 1,000 rounds.
    """
    return _one_peer(graph, name, None)


def _one_peer(graph: nx.DiGraph, name: str, resized: Callable[[int], Topology] | None) -> Topology:
    size = check_topology(graph, "graph")
    period = math.lcm(*(max(len(out_neighbors(graph, rank)), 1) for rank in range(size)))
    if period > 1000:
        raise TopologyError(
            f"graph must have out-degrees whose least common multiple is at most 1000, got {period}"
        )
    return _walk(name, size, period, lambda rank: one_peer_ranks(graph, rank), resized)


def random_matching(size: SupportsIndex, *, seed: SupportsIndex = 0) -> Topology:
    """Returns random pairs, drawn anew each round: partners take their mean. Endless.

    All perfect matchings are equally likely; of an odd number of ranks, one sits out each round. The mean
    square of the consensus distance is expected to become (n - 2) / (2 (n - 1)) of itself a round for even n
    and 1/2 for odd n: randomized gossip (Boyd, Ghosh, Prabhakar and Shah, IEEE Transactions on Information
    Theory 52, 2006) with as many pairs at a time as fit.

    Args:
        size: Number of ranks, at least 1.
        seed: The same on all ranks; rounds and seeds are independent of each other.

    Raises:
        TypeError: An argument is not an integer.
        TopologyError: `size` is below 1.
    """
    size = check_int(size, "size", minimum=1)
    seed = check_int(seed, "seed")

    def matching(t: int) -> Matrix:
        ranks = _shuffled(size, f"random-matching/{seed}/{t}")
        W = np.eye(size)
        for i, j in zip(ranks[0::2], ranks[1::2], strict=False):
            W[i, i] = W[j, j] = W[i, j] = W[j, i] = 0.5
        return W

    resized = partial(random_matching, seed=seed)
    if size == 1:
        return Topology("random-matching", [np.eye(1)], resized=resized)
    return Topology.endless("random-matching", size, matching, resized=resized)


def inner_outer_exponential(size: SupportsIndex, local_size: SupportsIndex) -> Topology:
    """Returns one-peer exponential graphs inside each machine joined with one among machines.

    The rounds of `inner_outer_exponential_ranks`, weights 1/2; the average of all ranks stays. Each
    local rank in turn goes outside.

    Args:
        size: Number of ranks, a multiple of `local_size`.
        local_size: Number of ranks on each machine, at least 3; ranks of a machine are consecutive.

    Raises:
        TypeError: An argument is not an integer.
        TopologyError: `size` is not a multiple of `local_size`, or `local_size` below 3.
    """
    size, local_size = check_int(size, "size", minimum=1), check_int(local_size, "local_size", minimum=1)
    machines = size // local_size
    # Of the turn outside, of the distances between machines, and of those inside without the rank outside.
    inside = local_size - (machines > 1)
    period = math.lcm(
        local_size if machines > 1 else 1, *(max((n - 1).bit_length(), 1) for n in (machines, inside))
    )

    def peers(rank: int) -> Iterator[tuple[list[int], list[int]]]:
        return inner_outer_exponential_ranks(size, local_size, rank)

    return _walk("inner-outer-exp2", size, period, peers)


def _walk(
    name: str,
    size: int,
    period: int,
    peers: Callable[[int], Iterator[tuple[list[int], list[int]]]],
    resized: Callable[[int], Topology] | None = None,
) -> Topology:
    """The first `period` steps of the ranks' generators, with the plain mean at each receiver."""
    sends = [[send for send, _ in islice(peers(rank), period)] for rank in range(size)]
    rounds = [matrix_from_destinations(step) for step in zip(*sends, strict=True)]
    return Topology(name, rounds, resized=resized)


def _shuffled(count: int, key: str) -> list[int]:
    """Returns 0 ... count-1 in a random order, the same on all ranks for the same key, independent between keys.

    Ranks may run different versions of Python and NumPy. Only `random.Random.random` after seeding with a string is
    promised to give the same numbers in all of them.
    """
    uniform = random.Random(key).random
    keys = [uniform() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)
