"""A model of time in the manner of LogGOPS: replays a graph of computations and messages, event by event.

A message of k bytes between two hosts takes

    o + O k    of the sender's processor, one message after the other
    G k        of the link out of its host, which the ranks of the host share, one message after the other
    W k        of the line between two data centers, if it goes there
    L          on its way
    G k        of the link into the receiver's host, at the same time as the link out where both are free
    o + O k    of the receiver's processor

and the receiver has it. Two ranks alone therefore need o + L + G k + o where O is 0, as in LogGP up to its k - 1. Between
ranks of one host it takes l + M k in place of what links take. From S bytes on, sender and receiver agree first, which
takes 2 L more. The gap g between messages is not a parameter of its own: messages of one rank are o apart.

T. Hoefler, T. Schneider and A. Lumsdaine, "LogGOPSim", 2010, doi:10.1145/1851476.1851564, is the model's source, and the
graphs are as those of its language GOAL: what a task requires happens on its own rank.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NOWHERE = -1


@dataclass(frozen=True)
class Parameters:
    """Seconds, and seconds a byte; see the module.

    Attributes:
        L: Of a message between hosts.
        o: Of a processor, for a message.
        O: Of a processor, for a byte.
        G: Of a host's link, for a byte.
        S: Bytes from which on both sides agree first.
        W: Of the line between data centers, for a byte.
        l: Of a message within a host.
        M: Of memory, for a byte.
        cores: How many messages are worked on at a time by all ranks together, as on a machine that emulates hosts; None
            where each rank has a processor for its messages.
    """

    L: float = 0.0
    o: float = 0.0
    O: float = 0.0  # noqa: E741
    G: float = 0.0
    S: float = float("inf")
    W: float = 0.0
    l: float = 0.0  # noqa: E741
    M: float = 0.0
    cores: int | None = None


@dataclass(frozen=True)
class Task:
    """A computation, or a message.

    Attributes:
        rank: Who computes, or sends.
        to: Who receives; NOWHERE for a computation.
        amount: Seconds of the computation, bytes of the message.
        requires: Earlier tasks: computations of this rank, messages to it, or from it (then until they have come).
        leaves: Whether the message leaves its host. Where a rank stands for many alike it may go to itself, and leave.
        rounds: How many messages it stands for, each after the one before; `amount` is of all of them.
    """

    rank: int
    to: int
    amount: float
    requires: tuple[int, ...] = ()
    leaves: bool = True
    rounds: float = 1.0


@dataclass
class Graph:
    """Tasks, in an order in which each comes after those that it requires.

    Attributes:
        hosts: Of each rank.
        centers: The data center of each host.
        tasks: All.
        ends: What marks the end of each step: by step, a task of each rank.
        period: After so many steps all begins again.
    """

    hosts: list[int]
    centers: list[int] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)
    period: int = 1

    def __post_init__(self) -> None:
        if not self.centers:
            self.centers = [0] * (max(self.hosts) + 1)

    def compute(self, rank: int, seconds: float, requires: Sequence[int] = ()) -> int:
        """Adds a computation; returns its place."""
        self.tasks.append(Task(rank, NOWHERE, seconds, tuple(requires)))
        return len(self.tasks) - 1

    def send(
        self,
        rank: int,
        to: int,
        size: float,
        requires: Sequence[int] = (),
        leaves: bool | None = None,
        rounds: float = 1.0,
    ) -> int:
        """Adds a message; returns its place."""
        if leaves is None:
            leaves = self.hosts[rank] != self.hosts[to]
        self.tasks.append(Task(rank, to, size, tuple(requires), leaves, rounds))
        return len(self.tasks) - 1


def replay(graph: Graph, parameters: Parameters) -> list[float]:
    """Returns when each task is done: a computation has ended, the receiver has the message."""
    p, tasks = parameters, graph.tasks
    missing = [len(task.requires) for task in tasks]
    needed_by: dict[int, list[int]] = defaultdict(list)
    for place, task in enumerate(tasks):
        for required in task.requires:
            needed_by[required].append(place)
    done = [0.0] * len(tasks)
    # What is used by one at a time, and when it is free again.
    free: dict[tuple[str, int], float] = defaultdict(float)
    cores = [0.0] * p.cores if p.cores else None
    events: list[tuple[float, int, Callable[[int, float], None], int]] = []
    number = 0

    def at(time: float, what: Callable[[int, float], None], place: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (time, number, what, place))

    def occupy(what: tuple[str, int], now: float, seconds: float) -> float:
        """Returns when the use begins."""
        begin = max(now, free[what])
        free[what] = begin + seconds
        return begin

    def work(rank: int, now: float, seconds: float) -> float:
        """Of a rank's processor; returns when it is done."""
        if seconds == 0:
            return max(now, free["processor", rank])
        if cores is not None:
            now = max(now, heapq.heappop(cores))
        end = occupy(("processor", rank), now, seconds) + seconds
        if cores is not None:
            heapq.heappush(cores, end)
        return end

    def begin(place: int, now: float) -> None:
        task = tasks[place]
        if task.to == NOWHERE:
            at(now + task.amount, finish, place)
            return
        end = work(task.rank, now, task.rounds * p.o + p.O * task.amount)
        agreed = 2 * p.L * task.rounds if task.leaves and task.amount >= p.S * task.rounds else 0.0
        at(end + agreed, leave, place)

    def leave(place: int, now: float) -> None:
        task = tasks[place]
        if not task.leaves:
            at(now + p.l * task.rounds + p.M * task.amount, receive, place)
            return
        home, there = graph.hosts[task.rank], graph.hosts[task.to]
        start = occupy(("out", home), now, p.G * task.amount)
        if graph.centers[home] != graph.centers[there]:
            at(start, cross, place)
        else:
            at(start + p.L * task.rounds, enter, place)

    def cross(place: int, now: float) -> None:
        task = tasks[place]
        home = graph.centers[graph.hosts[task.rank]]
        slower = max(p.W, p.G) * task.amount
        start = occupy(("line", home), now, p.W * task.amount)
        # Its last byte comes no earlier than the line lets it through.
        at(start + p.L * task.rounds + slower - p.G * task.amount, enter, place)

    def enter(place: int, now: float) -> None:
        task = tasks[place]
        seconds = p.G * task.amount
        at(occupy(("in", graph.hosts[task.to]), now, seconds) + seconds, receive, place)

    def receive(place: int, now: float) -> None:
        task = tasks[place]
        at(work(task.to, now, task.rounds * p.o + p.O * task.amount), finish, place)

    def finish(place: int, now: float) -> None:
        done[place] = now
        for other in needed_by[place]:
            missing[other] -= 1
            if missing[other] == 0:
                begin(other, now)

    for place, count in enumerate(missing):
        if count == 0:
            at(0.0, begin, place)
    while events:
        now, _, what, place = heapq.heappop(events)
        what(place, now)
    if any(missing):
        raise ValueError(
            f"graph: task {next(place for place, count in enumerate(missing) if count)} requires itself"
        )
    return done


def step_seconds(graph: Graph, done: Sequence[float]) -> float:
    """Seconds of a step once steps follow each other: the mean of those after the first period, of the slowest rank."""
    ends = [max(done[place] for place in step) for step in graph.ends]
    if len(ends) <= graph.period:
        return ends[-1] / len(ends)
    return (ends[-1] - ends[graph.period - 1]) / (len(ends) - graph.period)
