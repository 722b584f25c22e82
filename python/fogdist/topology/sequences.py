"""Time-varying topologies of one peer a rank and round; a receiver takes the plain mean.

Base-(k+1) graphs are in `base_graph`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import SupportsIndex

import numpy as np

from fogdist.lazy import nx
from fogdist.topology.graphs import exponential
from fogdist.topology.topology import Topology
from fogdist.topology.validation import TopologyError, check_int, check_topology
from fogdist.topology.weights import Matrix, out_neighbors

# The rounds after which random pairs repeat.
_MATCHINGS = 256


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
    return walk_of(exponential(size), "one-peer-exp2", one_peer_exponential)


def one_peer(graph: nx.DiGraph, name: str = "one-peer") -> Topology:
    """Returns the walk along a graph, one out-neighbor a round.

    A rank goes through its out-neighbors in the order of their clockwise distance. Each receiver computes the plain mean of
    its own value and the received ones: of one or several, or none. The average of all ranks does not change if each rank
    receives from one rank, as on circulant graphs (exponential, ring).

    Args:
        graph: A graph on the ranks 0 ... n-1; its weights are not looked at.
        name: A short name.

    Raises:
        TypeError: `graph` is not a networkx.DiGraph, or `name` not a string.
        TopologyError: Its nodes are not 0 ... n-1, or the degrees make the period longer than 1,000 rounds.
    """
    walk = walk_of(graph, name)
    if walk.period > 1000:
        raise TopologyError(
            f"graph must have out-degrees whose least common multiple is at most 1000, got {walk.period}"
        )
    return walk


def walk_of(graph: nx.DiGraph, name: str, resized: Callable[[int], Topology] | None = None) -> Topology:
    """Returns `one_peer` of any period."""
    size = check_topology(graph, "graph")

    def clockwise(rank: int) -> list[int]:
        return sorted(out_neighbors(graph, rank), key=lambda peer: (peer - rank) % size)

    peers = [clockwise(rank) for rank in range(size)]
    period = math.lcm(*(max(len(each), 1) for each in peers))
    return _of_destinations(
        name, size, period, lambda t: [each[t % len(each)] if each else None for each in peers], resized
    )


def random_matching(size: SupportsIndex, *, seed: SupportsIndex = 0) -> Topology:
    """Returns random pairs, drawn anew in each of 256 rounds, which then repeat: partners take their mean.

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

    period = _MATCHINGS if size > 1 else 1
    return Topology.of_rounds(
        "random-matching", size, period, matching, resized=partial(random_matching, seed=seed)
    )


def inner_outer_exponential(size: SupportsIndex, local_size: SupportsIndex) -> Topology:
    """Returns one-peer exponential graphs inside each machine joined with one among machines.

    In round t, the local rank t % local_size of every machine goes outside: it sends to the same local rank of the machine d
    further, d = 1, 2, 4, ... in turn below the number of machines. The other ranks of a machine do the same among
    themselves, d counted without the rank that is outside and below their number. With a single machine no rank goes
    outside. Weights are 1/2; the average of all ranks stays.

    Args:
        size: Number of ranks, a multiple of `local_size`.
        local_size: Number of ranks on each machine, at least 3; ranks of a machine are consecutive.

    Raises:
        TypeError: An argument is not an integer.
        TopologyError: `size` is not a multiple of `local_size`, or `local_size` below 3.
    """
    return inner_outer("inner-outer-exp2", size, local_size, lambda t, n: 1 << t % (n - 1).bit_length())


def inner_outer(
    name: str, size: SupportsIndex, local_size: SupportsIndex, distance: Callable[[int, int], int]
) -> Topology:
    """As `inner_outer_exponential`, with any distance in round t on a circle of n machines or n ranks."""
    size, local_size = check_int(size, "size", minimum=1), check_int(local_size, "local_size", minimum=1)
    if size % local_size:
        raise TopologyError(
            f"size must be a multiple of local_size (as many ranks on every machine), got {size} and {local_size}"
        )
    if local_size < 3:
        raise TopologyError(
            f"local_size must be at least 3 (two ranks stay inside while one goes outside), got {local_size}"
        )
    machines = size // local_size
    # Of the turn outside, of the distances between machines, and of those inside without the rank outside.
    turns = local_size if machines > 1 else 1
    period = math.lcm(turns, *(max((n - 1).bit_length(), 1) for n in (machines, local_size - (machines > 1))))

    def destinations(t: int) -> list[int | None]:
        outgoing = t % local_size if machines > 1 else None
        inside = [local for local in range(local_size) if local != outgoing]
        hop = distance(t, len(inside))
        following = {local: inside[(place + hop) % len(inside)] for place, local in enumerate(inside)}
        outer = distance(t, machines) * local_size if machines > 1 else 0
        return [
            (rank + outer) % size
            if rank % local_size == outgoing
            else rank - rank % local_size + following[rank % local_size]
            for rank in range(size)
        ]

    return _of_destinations(name, size, period, destinations)


def by_sites(site_of: Sequence[SupportsIndex], *, every: SupportsIndex = 4) -> Topology:
    """Returns one-peer exponential graphs inside each site; in every `every`-th round one rank of each site goes outside.

    The ranks of a site take turns in going outside, where they send to one of another site, at the distances 1, 2, 4, ...
    on a circle of the sites. So a line between two sites carries at most one tensor each way in a round, and none in
    most rounds. All other ranks exchange with one rank of their own site in each round. Weights are 1/2; the average of all
    ranks stays.

    Args:
        site_of: The site of each rank: any integers, in any order.
        every: At least 1.

    Raises:
        TypeError: An argument is not an integer, or `site_of` no sequence of them.
        TopologyError: `site_of` is empty, or `every` below 1.
    """
    every = check_int(every, "every", minimum=1)
    numbers = [check_int(site, f"site_of[{rank}]") for rank, site in enumerate(site_of)]
    if not numbers:
        raise TopologyError("site_of must hold the site of at least one rank, got none")
    sites = [[rank for rank, site in enumerate(numbers) if site == each] for each in dict.fromkeys(numbers)]

    def distances(count: int) -> int:
        return max((count - 1).bit_length(), 1)

    outside = [distances(len(sites)), *map(len, sites)] if len(sites) > 1 else []
    inside = [distances(len(site) - gone) for site in sites for gone in (0, 1)]
    period = math.lcm(*outside, *inside) * (every if outside else 1)

    def destinations(t: int) -> list[int | None]:
        found: list[int | None] = [None] * len(numbers)

        def walk(ranks: Sequence[int], step: int) -> None:
            hop = 1 << step % distances(len(ranks))
            for place, rank in enumerate(ranks if len(ranks) > 1 else ()):
                found[rank] = ranks[(place + hop) % len(ranks)]

        turn = t // every
        goes_out = bool(outside) and t % every == every - 1
        gone = [site[turn % len(site)] for site in sites] if goes_out else []
        walk(gone, turn)
        for site in sites:
            walk([rank for rank in site if rank not in gone], turn if goes_out or not outside else t - turn)
        return found

    return _of_destinations("by-sites", len(numbers), period, destinations)


def _of_destinations(
    name: str,
    size: int,
    period: int,
    destinations: Callable[[int], list[int | None]],
    resized: Callable[[int], Topology] | None = None,
) -> Topology:
    """The topology of what each rank sends to in a round, with the plain mean at each receiver."""

    def matrix(t: int) -> Matrix:
        W = np.eye(size)
        for rank, peer in enumerate(destinations(t)):
            if peer is not None:
                W[rank, peer] = 1.0
        return np.asarray(W / W.sum(axis=0))

    return Topology.of_rounds(name, size, period, matrix, resized=resized)


def _shuffled(count: int, key: str) -> list[int]:
    """Returns 0 ... count-1 in a random order, the same on all ranks for the same key, independent between keys.

    Ranks may run different versions of Python and NumPy. Only `random.Random.random` after seeding with a string is
    promised to give the same numbers in all of them.
    """
    uniform = random.Random(key).random
    keys = [uniform() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)
