"""The messages of an exchange: recorded from fog's own code, which runs on virtual ranks, and written by hand for Gloo.

A `Schedule` has for each message what its sender must have received before. The in-process transport records in which
order messages leave and come; several runs with different delays have different orders, and what stands in all of them
is what the operation needs.

Where hosts are alike up to a rotation (rings, exponential graphs, fog's sums by place) one host stands for all:
`rotated` makes a schedule of one host, whose messages go to itself, and `spread` one of many hosts from that. So 16,384
ranks cost as much as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fog_cli.advice import near_first
from loggops import Graph

if TYPE_CHECKING:
    from fog_pg._C import ProcessGroupFog, VirtualWorld

SEEDS = 8
# By how many looks for news a message may be late in a recording.
DELAY = 40
# Gloo's allreduce: the largest piece of a ring's chunk.
GLOO_SEGMENT = 1 << 20
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Message:
    """One of an exchange.

    Attributes:
        rank: The sender.
        to: The receiver.
        size: Bytes.
        requires: Places of messages to the sender.
        leaves: Whether it leaves its host.
        rounds: How many it stands for, as in `loggops.Task`.
        hop: Of one that stands for those of all hosts: how many hosts further the receiver's is.
    """

    rank: int
    to: int
    size: float
    requires: tuple[int, ...]
    leaves: bool
    rounds: float = 1.0
    hop: int = 0


@dataclass(frozen=True)
class Schedule:
    """Messages, each after those that it requires.

    Attributes:
        hosts: Of each rank.
        messages: All.
    """

    hosts: tuple[int, ...]
    messages: tuple[Message, ...]

    def scaled(self, factor: float) -> Schedule:
        """The same with other sizes; those without bytes keep none."""
        return Schedule(self.hosts, tuple(replace(m, size=factor * m.size) for m in self.messages))

    def append_to(self, graph: Graph, begins: Sequence[Sequence[int]]) -> list[list[int]]:
        """Adds the exchange to a graph.

        Args:
            graph: Of the same ranks.
            begins: What each rank must have done before it sends anything.

        Returns:
            For each rank, what it must wait for to have the result.
        """
        waits: list[list[int]] = [list(begin) for begin in begins]
        places: list[int] = []
        for message in self.messages:
            requires = [*begins[message.rank], *(places[place] for place in message.requires)]
            places.append(
                graph.send(message.rank, message.to, message.size, requires, message.leaves, message.rounds)
            )
            waits[message.to].append(places[-1])
        return waits


Start = Callable[[int, "ProcessGroupFog"], Any]


def recorded(size: int, start: Start, *, ranks_per_host: int = 1, seeds: int = SEEDS) -> Schedule:
    """Runs one operation on virtual ranks, and returns what it sends.

    Args:
        size: Ranks.
        start: Starts the operation on a rank, given its group; returns the Work.
        ranks_per_host: Consecutive ranks that share a host.
        seeds: How many runs, with different delays.
    """
    from fog_pg._C import VirtualWorld

    sizes: dict[tuple[int, ...], int] = {}
    needs: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    order: list[tuple[int, ...]] = []
    for seed in range(seeds):
        world = VirtualWorld(
            size, ranks_per_host=ranks_per_host, seed=seed, most_delay=DELAY if seed < seeds - 1 else 0
        )
        run = _record(world, start)
        order = []
        for key, (count, before) in run.items():
            order.append(key)
            if seed == 0:
                sizes[key], needs[key] = count, before
            elif sizes.get(key) != count:
                raise RuntimeError(
                    f"message {key} has {sizes.get(key)} bytes in one run, and {count} in another"
                )
            else:
                needs[key] &= before
        if len(order) != len(sizes):
            raise RuntimeError(f"{len(sizes)} messages in one run, {len(order)} in another")
    places = {key: place for place, key in enumerate(order)}
    messages = [
        Message(
            key[0],
            key[1],
            sizes[key],
            tuple(sorted(places[need] for need in needs[key])),
            key[0] // ranks_per_host != key[1] // ranks_per_host,
        )
        for key in order
    ]
    return _joined(Schedule(tuple(rank // ranks_per_host for rank in range(size)), tuple(messages)))


def _joined(schedule: Schedule) -> Schedule:
    """Makes one message of those that go the same way and require the same: the pieces of a slice around the end."""
    joined: dict[tuple[int, int, tuple[int, ...]], int] = {}
    new: list[int] = []
    messages: list[Message] = []
    for m in schedule.messages:
        requires = tuple(sorted({new[place] for place in m.requires}))
        place = joined.setdefault((m.rank, m.to, requires), len(messages))
        if place == len(messages):
            messages.append(Message(m.rank, m.to, m.size, requires, m.leaves))
        else:
            messages[place] = Message(m.rank, m.to, messages[place].size + m.size, requires, m.leaves)
        new.append(place)
    return Schedule(schedule.hosts, tuple(messages))


def _record(world: VirtualWorld, start: Start) -> dict[tuple[int, ...], tuple[int, set[tuple[int, ...]]]]:
    """For each message, by sender, receiver, operation and step: its bytes, and what had come to the sender."""
    world.record()
    works = [start(rank, group) for rank, group in enumerate(world.groups)]
    world.progress()
    for rank, work in enumerate(works):
        if not work.is_completed():
            raise RuntimeError(f"rank {rank} of {len(works)} waits for something")
    messages, arrivals = world.recorded()
    keys = [(sender, to, operation, step) for sender, to, _, operation, step, _ in messages]
    if len(set(keys)) != len(keys):
        raise RuntimeError("two messages of an operation have one number")
    return {
        key: (count, {keys[place] for place in arrivals[sender][:before]})
        for key, (sender, _, count, _, _, before) in zip(keys, messages, strict=True)
    }


def rotated(schedule: Schedule) -> Schedule | None:
    """One host that stands for all, if they are alike up to a rotation; else None."""
    hosts = schedule.hosts
    count, size = max(hosts) + 1, len(hosts)
    if size % count or any(hosts[rank] != rank // (size // count) for rank in range(size)):
        return None
    local = size // count
    classes: dict[tuple[int, ...], list[int]] = {}
    keys: list[tuple[int, ...]] = []
    seen: dict[tuple[int, int], int] = {}
    for message in schedule.messages:
        hop = (hosts[message.to] - hosts[message.rank]) % count
        pair = (message.rank, message.to)
        seen[pair] = seen.get(pair, 0) + 1
        keys.append((message.rank % local, hop, message.to % local, seen[pair]))
    for place, key in enumerate(keys):
        classes.setdefault(key, []).append(place)
    order: list[tuple[int, ...]] = []
    for key, message in zip(keys, schedule.messages, strict=True):
        if hosts[message.rank] == 0:
            order.append(key)
    made: dict[tuple[int, ...], int] = {}
    messages: list[Message] = []
    waiting = order
    while waiting:
        later = []
        for key in waiting:
            members = [schedule.messages[place] for place in classes[key]]
            # What one of the hosts could do without, all can.
            need = set.intersection(*({keys[place] for place in member.requires} for member in members))
            mean = sum(member.size for member in members) / count
            if len(members) != count or any(abs(m.size - mean) > max(64, 0.01 * mean) for m in members):
                return None
            if any(k not in made for k in need):
                later.append(key)
                continue
            made[key] = len(messages)
            messages.append(
                Message(
                    key[0], key[2], mean, tuple(sorted(made[k] for k in need)), members[0].leaves, hop=key[1]
                )
            )
        if len(later) == len(waiting):
            return None
        waiting = later
    return Schedule((0,) * local, tuple(messages))


def spread(schedule: Schedule, hosts: int) -> Schedule:
    """What `rotated` or a formula says of one host, of all."""
    local = len(schedule.hosts)
    messages = tuple(
        replace(
            message,
            rank=host * local + message.rank,
            to=(host + message.hop) % hosts * local + message.to,
            # The host that sent it is as far behind.
            requires=tuple(
                place * hosts + (host - schedule.messages[place].hop) % hosts for place in message.requires
            ),
        )
        for message in schedule.messages
        for host in range(hosts)
    )
    return Schedule(tuple(rank // local for rank in range(hosts * local)), messages)


def renumbered(schedule: Schedule, numbers: Sequence[int]) -> Schedule:
    """The same messages of ranks with other numbers, on hosts with one rank each."""
    messages = (replace(m, rank=numbers[m.rank], to=numbers[m.to]) for m in schedule.messages)
    return Schedule(schedule.hosts, tuple(messages))


def by_place(schedule: Schedule) -> Schedule:
    """A schedule of fog's sums with hosts without a ring, numbered by their places in `near_first`, where they are alike."""
    places = {host: place for place, host in enumerate(near_first(len(schedule.hosts)))}
    return renumbered(schedule, [places[host] for host in range(len(places))])


def allreduce(size: int, count: int, *, ranks_per_host: int = 1) -> Schedule:
    """fog's allreduce of so many bytes of float32, recorded."""
    import torch

    tensors = [torch.zeros(max(1, count // FLOAT_BYTES)) for _ in range(size)]
    return recorded(size, lambda rank, group: group.allreduce([tensors[rank]]), ranks_per_host=ranks_per_host)


def exchange(
    size: int, count: int, sources: Sequence[Sequence[int]], destinations: Sequence[Sequence[int]]
) -> Schedule:
    """fog's neighbor_allreduce of so many bytes of float32, recorded."""
    import torch

    from fog_pg._C import NeighborPlan

    tensors = [torch.zeros(max(1, count // FLOAT_BYTES)) for _ in range(size)]

    def start(rank: int, group: ProcessGroupFog) -> Any:
        weight = 1.0 / (len(sources[rank]) + 1)
        plan = NeighborPlan(
            rank,
            size,
            weight,
            [(peer, weight) for peer in sources[rank]],
            [(peer, 1.0) for peer in destinations[rank]],
        )
        return group.neighbor_allreduce(tensors[rank], plan)

    return recorded(size, start)


def hierarchical(machines: int, local: int, count: int, hop: int) -> Schedule:
    """fog's hierarchical_neighbor_allreduce, each machine with the one `hop` further, recorded."""
    import torch

    from fog_pg._C import NeighborPlan

    size = machines * local
    groups = [list(range(first, first + local)) for first in range(0, size, local)]
    tensors = [torch.zeros(max(1, count // FLOAT_BYTES)) for _ in range(size)]

    def start(rank: int, group: ProcessGroupFog) -> Any:
        machine = rank // local
        plan = NeighborPlan(
            machine,
            machines,
            0.5,
            [((machine - hop) % machines, 0.5)],
            [((machine + hop) % machines, 1.0)],
        )
        return group.hierarchical_neighbor_allreduce(tensors[rank], groups, plan)

    return recorded(size, start, ranks_per_host=local)


def gloo_ring(size: int, count: int, ranks: int | None = None, most_rounds: int = 256) -> Schedule:
    """Gloo's allreduce, as gloo/allreduce.cc has it by default: a ring, reduce-scatter and then allgather.

    Each of `size` parts of the tensor is cut into two segments or more, of at most 1 MiB; a rank sends a segment on as
    soon as it has added its own.

    Args:
        size: Ranks of the ring.
        count: Bytes.
        ranks: How many ranks of the ring there are in the schedule: all of them, or 1 that stands for all.
        most_rounds: In a longer ring a message stands for several rounds, so that there are about so many.
    """
    ranks = size if ranks is None else ranks
    if size == 1:
        return Schedule((0,) * ranks, ())
    segments = max(2, -(-count // (size * GLOO_SEGMENT)))
    rounds = 2 * (size - 1)
    merged = min(rounds, most_rounds)
    each = rounds / merged
    part = each * count / (size * segments)
    messages: list[Message] = []
    last: dict[tuple[int, int], int] = {}
    for _ in range(merged):
        sent: dict[tuple[int, int], int] = {}
        for segment in range(segments):
            for rank in range(ranks):
                need = (last[rank, segment],) if (rank, segment) in last else ()
                to = (rank + 1) % ranks
                messages.append(Message(rank, to, part, need, leaves=True, rounds=each))
                sent[to, segment] = len(messages) - 1
        last = sent
    return Schedule(tuple(range(ranks)) if ranks > 1 else (0,), tuple(messages))


def circulant(size: int, count: int) -> Schedule:
    """fog's allreduce of large tensors between many hosts, without a ring, by its formula; one place that stands for all.

    Of collectives/circulant.cpp, in rounds: with `left` slices left a rank sends those from half of them on. A test
    compares it with recordings.
    """
    if size == 1:
        return Schedule((0,), ())
    rounds: list[tuple[float, int]] = []
    left = size
    while left > 1:
        hop = (left + 1) // 2
        rounds.append(((left - hop) * count / size, hop))
        left = hop
    messages: list[Message] = []
    for part, hop in [*rounds, *((part, size - hop) for part, hop in reversed(rounds))]:
        messages.append(Message(0, 0, part, tuple(range(len(messages))), leaves=True, hop=hop))
    return Schedule((0,), tuple(messages))


def doubling(size: int, count: int) -> Schedule:
    """fog's allreduce of a few kilobytes, about: whole tensors in log2(n) rounds; one host that stands for all."""
    messages: list[Message] = []
    for turn in range((size - 1).bit_length()):
        messages.append(Message(0, 0, count, tuple(range(turn)), leaves=True, hop=1 << turn))
    return Schedule((0,), tuple(messages))


def peers(size: int, count: int, fan_out: int) -> Schedule:
    """An exchange with so many neighbors each; one rank that stands for all."""
    return Schedule((0,), tuple(Message(0, 0, count, (), leaves=size > 1) for _ in range(fan_out)))
