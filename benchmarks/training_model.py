"""Training steps as graphs for loggops.py: when each way computes, sends and waits.

What a way sends comes from schedules.py, when it sends from what the code does:

    ddp_gloo, ddp_fog       a bucket's allreduce begins when its last gradient is there; the step ends with the last one.
                            Gloo works on two at a time
    one_peer_exp, static_exp, base_k, hierarchical   all buckets leave when the forward pass begins; the step ends when
                            the gradients and the neighbors' buckets are there
    async_win, win_put, async_gossip  buckets leave at the end of a step (of the forward pass), and nobody waits for them
                            but the sender: before it sends the next ones these must have left
    local_sgd, gossip_diloco   every so many steps an exchange, between two steps: an allreduce, or one peer's buckets

A rank's main thread works `host_s` a step in addition, and `bucket_s` for each exchange of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import schedules
from fog_cli.advice import in_ring, near_first
from loggops import NOWHERE, Graph, Parameters, replay, step_seconds
from schedules import Schedule

if TYPE_CHECKING:
    from fogdist.topology import Topology

ALLREDUCED = ("ddp_gloo", "ddp_fog", "local_sgd")
AT_BEGIN = ("one_peer_exp", "static_exp", "base_k", "hierarchical")
ASYNCHRONOUS = ("async_win", "win_put", "async_gossip")
WAYS = ("none", *ALLREDUCED, *AT_BEGIN, *ASYNCHRONOUS, "gossip_diloco")
GLOO_THREADS = 2
BASE_DEGREE = 2
# Up to so many ranks fog's own code is run to see what it sends; beyond, hosts are alike and formulas say it.
MOST_RECORDED = 64
# Of a tensor on these. Others are sent in the same messages, but for the parts into which fog cuts those of 4 MiB or more,
# so that sums and links work at the same time. That is left out.
RECORDED_BYTES = 1 << 20
# Of tensors that fog does not cut, see collectives/cutovers.hpp.
WHOLE_BYTES = 8192
# With several data centers hosts are not alike: up to so many are replayed, and of more the line is counted apart.
MOST_WHOLE = 32
# Beyond this share of the cores' time the model of a shared queue has no steady state.
MOST_BUSY = 0.9


@dataclass(frozen=True)
class Workload:
    """What a rank does in a step.

    Attributes:
        compute: Seconds.
        forward: Seconds, of these.
        buckets: Bytes, in the order in which they leave.
        ready: When the gradients of each bucket are there, as a part of the backward pass.
        local_steps: Of the ways that have them.
        host_s: Seconds of the main thread in a step, beside.
        bucket_s: Of the main thread, for an exchange of a bucket.
    """

    compute: float
    forward: float
    buckets: tuple[float, ...]
    ready: tuple[float, ...]
    local_steps: int = 8
    host_s: float = 0.0
    bucket_s: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Hosts.

    Attributes:
        hosts: How many.
        ranks_per_host: Of each.
        centers: Data centers with equally many of them.
    """

    hosts: int
    ranks_per_host: int = 1
    centers: int = 1

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks_per_host


@lru_cache(maxsize=64)
def _recorded(ranks: int) -> Schedule:
    """fog's allreduce of RECORDED_BYTES around a ring; one host that stands for all."""
    one = schedules.rotated(schedules.allreduce(ranks, RECORDED_BYTES))
    if one is None:
        raise RuntimeError(f"allreduce by {ranks} ranks: hosts are not alike")
    return one


def _allreduce(ranks: int, size: float, alike: bool) -> Schedule:
    if size > WHOLE_BYTES and in_ring(ranks, size):
        one = _recorded(ranks).scaled(size / RECORDED_BYTES)
        return one if alike else schedules.spread(one, ranks)
    one = (schedules.doubling if size <= WHOLE_BYTES else schedules.circulant)(ranks, round(size))
    return one if alike else schedules.renumbered(schedules.spread(one, ranks), near_first(ranks))


@lru_cache(maxsize=64)
def _hierarchical(hosts: int, local: int, turn: int | None) -> Schedule:
    """Of RECORDED_BYTES, of all hosts in a round; without a round of one that stands for all."""
    if turn is not None:
        hops = _hops(hosts)
        return schedules.hierarchical(hosts, local, RECORDED_BYTES, hops[turn % len(hops)])
    # Where hosts are alike neither the hop matters, nor that there are more of them.
    alike = schedules.rotated(schedules.hierarchical(min(hosts, 4), local, RECORDED_BYTES, 1))
    if alike is None:
        raise RuntimeError("hierarchical_neighbor_allreduce: hosts are not alike")
    return alike


def _hops(ranks: int) -> list[int]:
    return [1 << k for k in range(max(1, (ranks - 1).bit_length()))]


@lru_cache(maxsize=256)
def _topology(way: str, ranks: int, centers: int) -> Topology:
    """Of fog's: the neighbors of a way."""
    from fogdist import topology

    if way == "static_exp":
        return topology.Topology.from_graph("exp2", topology.by_name("exp2", ranks))
    if way == "base_k":
        return topology.base_graph(ranks, BASE_DEGREE)
    if way == "gossip_diloco" and centers > 1 and ranks >= 3 * centers:  # it needs three ranks of a center
        return topology.inner_outer_exponential(ranks, ranks // centers)
    # Of random pairs any hop is an example.
    return topology.one_peer_exponential(ranks)


@lru_cache(maxsize=4096)
def _neighbors(way: str, ranks: int, turn: int, centers: int) -> tuple[tuple[int, ...], ...]:
    """The ranks that each rank sends to in a round, the next ones first."""
    graph = _topology(way, ranks, centers)
    return tuple(
        tuple(sorted(graph.peers(rank, turn)["dst_weights"], key=lambda to: (to - rank) % ranks))
        for rank in range(ranks)
    )


def _fan_out(way: str, ranks: int) -> list[int]:
    """How many each rank sends to, by round; the most where that differs."""
    if way == "static_exp":
        return [len(_hops(ranks))]
    if way == "base_k":
        if ranks <= 4 * MOST_RECORDED:
            rounds = _topology(way, ranks, 1).period or 1
            return [max(map(len, _neighbors(way, ranks, turn, 1))) for turn in range(rounds)]
        return [BASE_DEGREE]
    return [1]


def _sends(way: str, cluster: Cluster, turn: int, size: float, alike: bool) -> Schedule:
    """The exchange of a bucket with the neighbors of a round."""
    ranks = cluster.ranks
    if alike:
        fans = _fan_out(way, ranks)
        return schedules.peers(ranks, round(size), fans[turn % len(fans)])
    destinations = _neighbors(way, ranks, turn, cluster.centers)
    messages = tuple(
        schedules.Message(rank, to, size, (), leaves=True)
        for rank in range(ranks)
        for to in destinations[rank]
    )
    return Schedule(tuple(range(ranks)), messages)


def is_alike(way: str, cluster: Cluster) -> bool:
    """Whether one host stands for all."""
    if cluster.centers > 1:
        return cluster.hosts > MOST_WHOLE
    return not (way == "base_k" and cluster.hosts <= MOST_RECORDED)


def period(way: str, cluster: Cluster, alike: bool) -> int:
    """Steps, or rounds of ways with local steps, until all begins again."""
    if way == "base_k":
        return max(1, len(_fan_out(way, cluster.ranks)))
    if way in (*AT_BEGIN, *ASYNCHRONOUS, "gossip_diloco") and not alike:
        return len(_hops(cluster.ranks))
    return 1


@lru_cache(maxsize=512)
def graph_of(way: str, cluster: Cluster, workload: Workload, whole: bool = False) -> Graph:
    """Returns the graph of steps that follow each other, of two periods.

    Args:
        way: One of WAYS.
        cluster: Where.
        workload: What.
        whole: Has all hosts, also where one can stand for all.

    Returns:
        The graph; it is kept and must not be changed.
    """
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
    w, alike = workload, is_alike(way, cluster) and not whole
    per_host = cluster.ranks_per_host
    if alike:
        graph = Graph([0] * per_host)
    else:
        hosts = [rank // per_host for rank in range(cluster.ranks)]
        graph = Graph(hosts, [host * cluster.centers // cluster.hosts for host in range(cluster.hosts)])
    ranks = range(len(graph.hosts))
    before: list[list[int]] = [[] for _ in ranks]  # by rank, the end of its last step
    flying: list[list[int]] = [[] for _ in ranks]  # messages that it has sent and not waited for

    def alone(rank: int, seconds: float, requires: Sequence[int]) -> list[int]:
        return [graph.compute(rank, seconds, requires)]

    def allreduce(size: float) -> Schedule:
        if way == "ddp_gloo":
            return schedules.gloo_ring(cluster.ranks, round(size), 1 if alike else None)
        if per_host > 1:
            raise ValueError(f"ranks_per_host must be 1 for an allreduce, got {per_host}")
        return _allreduce(cluster.ranks, size, alike)

    graph.period = period(way, cluster, alike)
    for step in range(2 * graph.period):
        lonely = cluster.ranks == 1 or way == "none"
        exchanges = 0 if lonely else len(w.buckets)
        local = w.local_steps if way in ("local_sgd", "gossip_diloco") else 1
        work = w.host_s * local + w.bucket_s * exchanges
        backward = w.compute - w.forward
        start = [alone(rank, work, before[rank]) for rank in ranks]
        forward = [alone(rank, w.forward, start[rank]) for rank in ranks]
        ends = [alone(rank, backward + (local - 1) * w.compute, forward[rank]) for rank in ranks]
        if lonely:
            waits = ends
        elif way in ("ddp_gloo", "ddp_fog"):
            waits = [list(end) for end in ends]
            rounds: list[list[list[int]]] = []
            for place, (size, share) in enumerate(zip(w.buckets, w.ready, strict=True)):
                begins = [alone(rank, backward * share, forward[rank]) for rank in ranks]
                if way == "ddp_gloo" and place >= GLOO_THREADS:  # a thread takes up the next one
                    earlier = rounds[place - GLOO_THREADS]
                    begins = [[*begins[rank], *earlier[rank]] for rank in ranks]
                rounds.append(allreduce(size).append_to(graph, begins))
                waits = [[*waits[rank], *rounds[-1][rank]] for rank in ranks]
        elif way in AT_BEGIN:
            waits = [list(end) for end in ends]
            for size in w.buckets:
                if way == "hierarchical":
                    turn = None if alike else step
                    schedule = _hierarchical(cluster.hosts, per_host, turn).scaled(size / RECORDED_BYTES)
                else:
                    schedule = _sends(way, cluster, step, size, alike)
                came = schedule.append_to(graph, start)
                waits = [[*waits[rank], *came[rank]] for rank in ranks]
        elif way in ASYNCHRONOUS:
            waits = [[*end, *sent] for end, sent in zip(ends, flying, strict=True)]
            leave = ends if way == "async_win" else forward
            ready = [[*leave[rank], *flying[rank]] for rank in ranks]
            flying = [[] for _ in ranks]
            for size in w.buckets:
                first = len(graph.tasks)
                _sends(way, cluster, step, size, alike).append_to(graph, ready)
                for place in range(first, len(graph.tasks)):
                    flying[graph.tasks[place].rank].append(place)
        else:  # local_sgd, gossip_diloco
            waits = [[*end, *sent] for end, sent in zip(ends, flying, strict=True)]
            flying = [[] for _ in ranks]
            for size in w.buckets:
                if way == "gossip_diloco":
                    schedule = _sends(way, cluster, step, size, alike)
                else:
                    schedule = allreduce(size)
                came = schedule.append_to(graph, ends)
                waits = [[*waits[rank], *came[rank]] for rank in ranks]
        before = [alone(rank, 0.0, waits[rank]) for rank in ranks]
        graph.ends.append([end[0] for end in before])
    return graph


def line_seconds(way: str, cluster: Cluster, workload: Workload, parameters: Parameters) -> float:
    """What the line between two data centers needs for the bytes of a step, each way; 0 in one center.

    Of many hosts only one is simulated, so the line is counted apart. A ring crosses it once each way, with 2 (n - 1)/n
    tensors; of fog's allreduce of many hosts the messages between places of different centers cross it. Of an exchange with the rank
    that is `hop` further `hop` messages cross it, at most those of half of the ranks.
    """
    n = cluster.ranks
    if cluster.centers == 1 or way == "none":
        return 0.0
    size = sum(workload.buckets)
    local = workload.local_steps if way in ("local_sgd", "gossip_diloco") else 1
    if way == "ddp_gloo" or (way in ("ddp_fog", "local_sgd") and in_ring(n, size / len(workload.buckets))):
        crossing = 2 * (n - 1) / n
    elif way in ("ddp_fog", "local_sgd"):
        center = [host * cluster.centers // n for host in near_first(n)]
        crossing, left = 0.0, n
        while left > 1:
            hop = (left + 1) // 2
            across = sum(one == 0 and center[(place + hop) % n] == 1 for place, one in enumerate(center))
            # The sums one way, and the results the other.
            back = sum(one == 1 and center[(place + hop) % n] == 0 for place, one in enumerate(center))
            crossing += (across + back) * (left - hop) / n
            left = hop
    elif way == "gossip_diloco":  # of a center's ranks one talks to the next center in a round
        crossing = 1.0
    else:
        crossings = [min(hop, n - hop) for hop in _hops(n)]
        crossing = sum(crossings) if way == "static_exp" else sum(crossings) / len(crossings)
    return crossing * size * parameters.W / local


def work_seconds(way: str, cluster: Cluster, workload: Workload, parameters: Parameters) -> float:
    """Returns what a rank's processor takes for the messages of a step, those that it sends and those that come."""
    graph = graph_of(way, cluster, workload)
    p, messages = parameters, [task for task in graph.tasks if task.to != NOWHERE]
    seconds = 2 * sum(task.rounds * p.o + p.O * task.amount for task in messages)
    if way in ("local_sgd", "gossip_diloco"):
        seconds /= workload.local_steps
    return seconds / len(graph.ends) / len(graph.hosts)


def seconds_of(way: str, cluster: Cluster, workload: Workload, parameters: Parameters) -> float:
    """Returns the modelled seconds of a step."""
    graph = graph_of(way, cluster, workload)
    p = parameters
    if is_alike(way, cluster) and p.cores:
        # One that stands for all finds the cores busy with the others for a part of the time, as in a queue whose server
        # is shared by all who wait.
        busy = cluster.ranks / p.cores * work_seconds(way, cluster, workload, p) / workload.compute
        slowness = 1 / (1 - min(MOST_BUSY, busy))
        p = replace(p, o=p.o * slowness, O=p.O * slowness, cores=None)
    seconds = step_seconds(graph, replay(graph, p))
    if way in ("local_sgd", "gossip_diloco"):
        seconds /= workload.local_steps
    if is_alike(way, cluster):
        busy = line_seconds(way, cluster, workload, p)
        if way in ("local_sgd", "gossip_diloco"):  # it waits for the line between two steps
            return max(seconds, workload.compute + workload.host_s + busy)
        return max(seconds, busy)
    return seconds
