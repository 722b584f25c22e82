"""Dynamic topologies: endless generators of the peers that one rank sends to and receives from, step by step.

Each generator yields ``(send_ranks, recv_ranks)``, two new lists of Python ints. All ranks that step their
generators together agree: j is in the send ranks of i exactly if i is in the recv ranks of j. Generators
carry no weights; the usual choice for a receiver is 1 / (len(recv_ranks) + 1) for itself and for each source.
Arguments are checked when a generator is made, not when it is first stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import SupportsIndex

from fogdist.lazy import nx
from fogdist.topology.errors import TopologyError
from fogdist.topology.graphs import exponential
from fogdist.topology.neighbor_lists import in_neighbors, out_neighbors
from fogdist.topology.validation import check_int, check_rank, check_topology


def one_peer_ranks(topo: nx.DiGraph, self_rank: SupportsIndex) -> Iterator[tuple[list[int], list[int]]]:
    """Returns a generator that walks a static topology one out-neighbor a step.

    A rank sorts its out-neighbors by clockwise distance and at step t sends to entry t modulo their number;
    it receives from every rank whose entry at step t it is. On an exponential graph that is one peer each way
    a step, at distance 1, 2, 4, ... in turn (the one-peer exponential graph, Ying et al., NeurIPS 2021, arXiv
    2110.13363), and for sizes that are powers of two log2(size) steps give the exact average. On irregular
    graphs a rank may receive from several ranks in a step, or from none.

    Args:
        topo: A graph on the ranks 0 ... n-1; weights and self loops are not looked at. It is read now: later
            changes to it have no effect.
        self_rank: The rank whose peers are yielded.

    Returns:
        An endless iterator of (send_ranks, recv_ranks): at most one rank to send to, and the ranks to receive
        from, ascending.

    Raises:
        TypeError: `topo` is not a networkx.DiGraph, or `self_rank` not an integer.
        TopologyError: The nodes are not 0 ... n-1, or `self_rank` is none of them.
    """
    size = check_topology(topo, "topo")
    rank = check_rank(self_rank, size, "self_rank")

    def clockwise(sender: int) -> list[int]:
        return sorted(out_neighbors(topo, sender), key=lambda peer: (peer - sender) % size)

    own = clockwise(rank)
    senders = {source: clockwise(source) for source in in_neighbors(topo, rank)}

    def steps() -> Iterator[tuple[list[int], list[int]]]:
        for step in count():
            send = [own[step % len(own)]] if own else []
            yield send, [source for source, peers in senders.items() if peers[step % len(peers)] == rank]

    return steps()


def _doubling_distance(step: int, size: int) -> int:
    """1, 2, 4, ... in turn, up to the largest power of two below `size` (at least 2)."""
    return 1 << (step % (size - 1).bit_length())


def exp2_machine_ranks(
    world_size: SupportsIndex, local_size: SupportsIndex, self_rank: SupportsIndex, local_rank: SupportsIndex
) -> Iterator[tuple[list[int], list[int]]]:
    """Returns a generator of one-peer exponential exchanges between machines.

    At step t, machine m sends to machine m + d and receives from m - d (mod machines) with d = 1, 2, 4, ...
    in turn: the peers of `hierarchical_neighbor_allreduce`.

    Args:
        world_size: Number of ranks, a multiple of `local_size` and at least twice it (two machines).
        local_size: Number of ranks on each machine.
        self_rank: The rank whose machine's peers are yielded.
        local_rank: Its place on its machine: self_rank % local_size.

    Returns:
        An endless iterator of (send_machines, recv_machines): one machine id each, rank // local_size.

    Raises:
        TypeError: An argument is not an integer.
        TopologyError: `world_size` is not a multiple of `local_size`, there is only one machine, a rank is
            out of range, or `local_rank` is not self_rank % local_size.
    """
    machines, local_size, rank = _check_machines(world_size, local_size, self_rank)
    if check_rank(local_rank, local_size, "local_rank") != rank % local_size:
        raise TopologyError(
            f"local_rank must be self_rank % local_size = {rank % local_size}, got {local_rank} "
            f"for self_rank {rank} and local_size {local_size}"
        )
    if machines < 2:
        raise TopologyError(
            f"world_size must be at least 2 * local_size = {2 * local_size} (two machines), "
            f"got world_size {machines * local_size}"
        )
    return one_peer_ranks(exponential(machines), rank // local_size)


def inner_outer_ring_ranks(
    world_size: SupportsIndex, local_size: SupportsIndex, self_rank: SupportsIndex
) -> Iterator[tuple[list[int], list[int]]]:
    """Returns a generator that joins a ring on every machine with a ring of machines.

    At step t, the local rank t % local_size of every machine goes outside: it sends to the same local rank of
    the next machine and receives from that of the previous one. The other ranks of a machine form a ring without
    it and pass on along this ring. With a single machine no rank goes outside, and all ranks form the ring.

    Args:
        world_size: Number of ranks, a multiple of `local_size`.
        local_size: Number of ranks on each machine, at least 3; ranks of a machine are consecutive.
        self_rank: The rank whose peers are yielded.

    Returns:
        An endless iterator of (send_ranks, recv_ranks): one rank each.

    Raises:
        TypeError: An argument is not an integer.
        TopologyError: `world_size` is not a multiple of `local_size`, `local_size` is below 3, or `self_rank`
            is out of range.
    """
    return _inner_outer(world_size, local_size, self_rank, lambda step, size: 1)


def inner_outer_exponential_ranks(
    world_size: SupportsIndex, local_size: SupportsIndex, self_rank: SupportsIndex
) -> Iterator[tuple[list[int], list[int]]]:
    """Returns a generator that joins one-peer exponential graphs on every machine with one among machines.

    At step t, the local rank t % local_size of every machine goes outside: it sends to the same local rank of
    the machine d further and receives from that of the machine d before, d = 1, 2, 4, ... in turn below the
    number of machines. The other ranks of a machine do the same among themselves, d counted without the rank
    that is outside and below their number. With a single machine no rank goes outside, and all ranks exchange
    inside it.

    Args:
        world_size: Number of ranks, a multiple of `local_size`.
        local_size: Number of ranks on each machine, at least 3; ranks of a machine are consecutive.
        self_rank: The rank whose peers are yielded.

    Returns:
        An endless iterator of (send_ranks, recv_ranks): one rank each.

    Raises:
        TypeError: An argument is not an integer.
        TopologyError: `world_size` is not a multiple of `local_size`, `local_size` is below 3, or `self_rank`
            is out of range.
    """
    return _inner_outer(world_size, local_size, self_rank, _doubling_distance)


def _check_machines(
    world_size: SupportsIndex, local_size: SupportsIndex, self_rank: SupportsIndex
) -> tuple[int, int, int]:
    """Returns (number of machines, local size, rank) of a group laid out evenly over machines."""
    world_size = check_int(world_size, "world_size", minimum=1)
    local_size = check_int(local_size, "local_size", minimum=1)
    rank = check_rank(self_rank, world_size, "self_rank")
    if world_size % local_size:
        raise TopologyError(
            f"world_size must be a multiple of local_size (as many ranks on every machine), "
            f"got world_size {world_size} and local_size {local_size}"
        )
    return world_size // local_size, local_size, rank


def _inner_outer(
    world_size: SupportsIndex,
    local_size: SupportsIndex,
    self_rank: SupportsIndex,
    distance: Callable[[int, int], int],
) -> Iterator[tuple[list[int], list[int]]]:
    """One local rank in turn exchanges between machines, the others inside.

    `distance(step, n)` is the hop, in [1, n), that a circle of n machines or of n ranks makes at a step.
    """
    machines, local_size, rank = _check_machines(world_size, local_size, self_rank)
    if local_size < 3:
        raise TopologyError(
            f"local_size must be at least 3 (two ranks stay inside while one goes outside), got {local_size}"
        )
    machine, local_rank = divmod(rank, local_size)
    size = machines * local_size

    def steps() -> Iterator[tuple[list[int], list[int]]]:
        for step in count():
            outgoing = step % local_size if machines > 1 else None
            if local_rank == outgoing:
                hop = distance(step, machines) * local_size
                yield [(rank + hop) % size], [(rank - hop) % size]
            else:
                inside = [machine * local_size + local for local in range(local_size) if local != outgoing]
                place = inside.index(rank)
                hop = distance(step, len(inside))
                yield [inside[(place + hop) % len(inside)]], [inside[(place - hop) % len(inside)]]

    return steps()
