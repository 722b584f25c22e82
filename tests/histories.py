"""Histories of jobs: many machines of `fogdist.elastic.protocol` in one process, through losses, pauses, cuts and joins.

A seed gives a `History`: how many ranks, how they train, and what happens to them when. A `World` runs it: time is a number,
delays are random, and each process does what its machine says, a few actions at a time, so that others come between
them. The carrier loses, repeats, delays and reorders messages, and answers with the last decision; joiners have tickets. Each
process has a clock of its own, which goes at most 2 % wrong. A `World` raises `Violation` as soon as a promise is broken, or
if somebody has not been told what became of it in bounded time.

    python tests/histories.py --seeds 100000   # reports coverage; shrinks the first history that fails
    python tests/histories.py --replay TEXT    # one history, as a failure has printed it, with what its processes do
"""

from __future__ import annotations

import argparse
import collections
import heapq
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from fogdist.elastic import protocol as real_protocol

# The times of ranks and joiners, in seconds: a group's timeout, after which silence counts as a loss, by when it is known.
TIMEOUT = 40.0
SILENCE = 4.0
DOUBT = 6.0
PATIENCE = 0.6
# How long a joiner may take to reach all ranks, and the pause between two of its samples.
REACH = 12.0
LIFE_PAUSE = 1.0
# Within this time after its last fault, everybody in a history goes on, or has been told why not.
SETTLED = 120.0
# More messages of one process in a round are without end.
MOST_MESSAGES = 4000
MOST_EPOCHS = 30
# With these delays of messages, in seconds, an agreement round may take longer than a joiner waits.
SLOWEST_DELAYS = (3.0,)
# After so many rounds that let nobody in, the next one is so far away that a joiner's time may be over before.
MOST_POSTPONED = 4


class Violation(AssertionError):
    """A promise of the protocol is broken."""


@dataclass(frozen=True)
class Fault:
    """What happens at a time.

    Attributes:
        at: The time.
        kind: "kill", "hang" (it does nothing any more, and nobody notices), "pause", "cut" (it and the others take each
            other for lost), "cut-here" (only it takes the others for lost), "part" (it and another one take each other for
            lost), "fall" (it ends while it does what follows from the next decision that it knows), "split" (ranks below
            this one and the others do not hear each other), "split-up" (the lower ranks do not hear the others),
            "split-down" (the others do not hear the lower ranks), "join", "join-badly" (it must be refused),
            "join-cut-off" (it does not reach a rank of another host) or "break" (a rank takes a joiner for ended).
        rank: Whose; the last process that has this number.
        value: For how long a pause or a split lasts; at which object a process joins (0 or 1); after how many actions a rank
            falls; the rank of the other one.
    """

    at: float
    kind: str
    rank: int
    value: float = 0.0


@dataclass(frozen=True)
class History:
    """What happens to a job.

    Attributes:
        seed: Of all delays.
        size: The number of ranks at the start.
        pace: "in-step": exchanges need all ranks. "patience": a rank goes on without late ones. "own": each rank goes at its
            own pace, and a loss is no reason to agree.
        one_host: Whether processes see each other's end at once.
        faults: In the order of their times.
    """

    seed: int
    size: int
    pace: str
    one_host: bool
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        """Returns it as a word of a command."""
        faults = [f"{each.at:g}/{each.kind}/{each.rank}/{each.value:g}" for each in self.faults]
        return ":".join([f"{self.seed}", f"{self.size}", self.pace, f"{self.one_host:d}", *faults])

    @classmethod
    def of_text(cls, text: str) -> History:
        """Returns what `str` has described."""
        seed, size, pace, one_host, *words = text.split(":")
        faults = tuple(
            Fault(float(at), kind, int(rank), float(value))
            for at, kind, rank, value in (word.split("/") for word in words)
        )
        return cls(int(seed), int(size), pace, one_host == "1", faults)

    @classmethod
    def of_seed(cls, seed: int) -> History:
        random = Random(seed)
        size = random.choice((2, 3, 3, 4, 4, 5, 7))
        pace, one_host = (
            random.choice(("in-step", "in-step", "patience", "own", "own")),
            random.random() < 0.5,
        )
        kinds = random.choices(
            (
                "kill",
                "fall",
                "join",
                "join-badly",
                "join-cut-off",
                "break",
                "pause",
                "cut",
                "cut-here",
                "hang",
            ),
            (30, 15, 45, 3, 3, 3, 10, 4, 3, 1),
            k=random.choice((1, 2, 2, 3, 3, 4, 5, 6)),
        )
        faults: list[Fault] = []
        at = random.uniform(0.0, 3.0)
        for kind in kinds:
            rank = random.randrange(size + 1 if kind.startswith("join") and one_host else size)
            if faults and kind.startswith("join") and random.random() < 0.5:
                rank = random.choice(faults).rank
            value = float(random.random() < 0.2)
            if kind == "pause":
                value = random.choice((1.0, 1.0, 7.0, 15.0))
            elif kind == "fall":
                value = float(random.randrange(6))
            faults.append(Fault(round(at, 3), kind, rank, value))
            at += random.choice((0.02, 0.3, 0.3, 3.0, 8.0)) * random.random()
        if not one_host and random.random() < 0.3:
            size = random.choice((size, 8))
            kind, edge = (
                random.choice(("split", "split", "split-up", "split-down")),
                random.randrange(1, size),
            )
            begin, lasts = round(random.uniform(0.0, at), 3), random.choice((2.0, 4.2, 4.5, 10.0, 60.0))
            faults = [*faults[: random.randrange(len(faults) + 1)], Fault(begin, kind, edge, lasts)]
            for _ in range(random.choice((0, 0, 1, 3, 5))):  # while the ranks notice it
                kind, noticed = random.choice(("kill", "kill", "join")), begin + SILENCE + random.random()
                faults.append(Fault(round(noticed, 3), kind, random.randrange(size)))
        if random.random() < 0.1:
            for _ in range(random.choice((1, 1, 2, 3))):
                ranks = random.randrange(size), float(random.randrange(size))
                faults.append(Fault(round(random.uniform(0.0, at), 3), "part", *ranks))
        faults.sort(key=lambda fault: fault.at)
        return cls(seed, size, pace, one_host, tuple(faults))


class Process:
    """One process: a machine, and what its driver knows."""

    def __init__(self, pid: int, rank: int) -> None:
        self.pid, self.rank = pid, rank
        self.member: Any = None
        self.joiner: Any = None
        self.phase = "computes"
        self.is_alive, self.died, self.told = True, 0.0, ""
        self.paused, self.hangs, self.falls_after = 0.0, False, -1
        self.next, self.token = 0.0, 0
        self.actions: deque[Any] = deque()
        # As a member: the processes of its group, those that it takes for gone or watches, exchanges by object.
        self.pids: dict[int, int] = {}
        self.ended: set[int] = set()
        self.silent: set[int] = set()
        self.expelled_by: set[int] = set()
        self.declared: set[int] = set()
        self.watched: set[int] = set()
        self.name, self.has_failed, self.is_new = "", False, False
        self.completed = {"a": 0, "b": 0}
        self.taken = {"a": 0, "b": 0}
        self.exchanges = 0
        self.mailbox: list[tuple[int, Any]] = []
        self.sent = 0
        # What the carrier answers to messages up to an epoch, and the decisions that led to the present group.
        self.answer: tuple[int, Any] = (0, None)
        self.lineage: dict[int, Any] = {}
        self.rate, self.offset = 1.0, 0.0
        self.announced = self.seen = 0
        self.polled_epoch = 0
        self.copies: set[int] = set()
        # As a joiner.
        self.ticket, self.asked, self.at, self.is_bad = 0, (0, 0), "a", False
        self.begins_at, self.began_at = "", 0  # the object, and the epoch when it came
        self.form: Any = None
        self.is_anyone_left = True
        self.is_cut_off = self.is_broken = False
        self.is_suspected = self.is_doubted = self.was_cut = False

    @property
    def gone(self) -> set[int]:
        return self.ended | self.silent

    def ranks_of(self, pids: set[int]) -> list[int]:
        """Returns the ranks of its group that these processes have."""
        return [rank for rank, pid in self.pids.items() if pid in pids]


class World:
    """Runs one history.

    Args:
        history: The history.
        protocol: The module of the machines; that of a mutant, for example.
        coverage: Counts transitions of machines: (class, state, event, next state, actions).
        report: Called with what happens.
    """

    def __init__(
        self, history: History, protocol: Any = real_protocol, coverage: Any = None, report: Any = None
    ) -> None:
        self.history, self.protocol, self.coverage, self.report = history, protocol, coverage, report
        self.random = Random(history.seed ^ 0x5EED)
        self.now = 0.0
        self._events: list[tuple[float, int, Any, Any]] = []
        self._count = 0
        self.processes: list[Process] = []
        self.loss = self.random.choice((0.0, 0.0, 0.05, 0.3))
        self.delays = self.random.choice(((0.01,), (0.01, 0.01, 0.01, 0.1), (0.01, 1.0), SLOWEST_DELAYS))
        # Who does not hear whom: for a time, and for ever.
        self.walls: list[tuple[float, set[int], str]] = []
        self.unreported: dict[int, float] = {}  # until when an end was not reported, because of a cut
        self.cuts: set[tuple[int, int]] = set()
        self.tickets: dict[int, dict[str, Any]] = {}
        self.nonce = -1
        self.entries: dict[int, int] = {}
        self.failed: set[str] = set()
        # The epoch of each name, and who has begun which exchange of each group: that is a name and processes, because a group
        # may have ended with all its processes, and the others have decided anew.
        self.names: dict[str, int] = {}
        self.postponed: set[int] = set()
        self.silenced: dict[tuple[int, tuple[int, ...]], float] = {}  # when an epoch left out silent ranks
        self.first: dict[str, tuple[str, int]] = {}
        self.begun: dict[str, dict[int, tuple[str, int]]] = collections.defaultdict(dict)
        for rank in range(history.size):
            process = self._add(rank)
            process.member = protocol.Member(rank, history.size, TIMEOUT, DOUBT)
            process.pids = {each: each for each in range(history.size)}
            process.name = "epoch 0"
            self.entries[rank] = process.pid
            self._wake(process, self.random.random())
        for fault in history.faults:
            self._at(fault.at, self._happen, fault)
        self._quiet_since: dict[int, int] | None = None

    # --- time ---

    def _at(self, when: float, what: Any, argument: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what, argument))

    def _wake(self, process: Process, delay: float) -> None:
        """Makes a process do its next step after a delay, unless it does one earlier."""
        when = self.now + delay
        if process.next <= self.now or when < process.next:
            process.next = when
            process.token += 1
            self._at(when, self._step, (process, process.token))

    def run(self) -> None:
        """Runs the history to its end; raises Violation."""
        last = max((fault.at for fault in self.history.faults), default=0.0)
        check = last + SILENCE + 1.0  # by then, all faults show
        while True:
            when, _, what, argument = heapq.heappop(self._events)
            while when >= check:
                if self._is_settled():
                    return
                check += 1.0
            if when > last + SETTLED:
                raise Violation(f"somebody is not told in bounded time: {self._described()}")
            self.now = when
            what(argument)
            if not self._events:
                if not self._is_settled() and not self._is_settled():
                    raise Violation(f"nobody does anything any more: {self._described()}")
                return

    def _described(self) -> str:
        return "; ".join(
            f"rank {each.rank} (process {each.pid}) {each.phase}"
            f" in {each.name or 'no group'}{' hangs' if each.hangs else ''}"
            for each in self.processes
            if each.is_alive
        )

    def _say(self, process: Process, text: object) -> None:
        if self.report is not None:
            self.report(f"{self.now:8.3f}  process {process.pid} rank {process.rank}: {text}")

    def _call(self, process: Process, machine: Any, event: str, *arguments: Any, **options: Any) -> list[Any]:
        """Gives an event to a machine; returns its actions."""
        before = machine.state
        actions = getattr(machine, event)(*arguments, **options) or []
        if self.coverage is not None:
            if event == "receive":
                event = "receive decided" if "decided" in arguments[1] else "receive"
            kinds = tuple(dict.fromkeys(type(each).__name__ for each in actions))
            self.coverage[type(machine).__name__, before, event, machine.state, kinds] += 1
        if self.report is not None and (actions or machine.state != before):
            self._say(process, f"{event} {arguments[:2]} -> {machine.state} {actions}")
        return actions  # type: ignore[no-any-return]

    def _time(self, process: Process) -> float:
        """Returns the time by the clock of a process."""
        return process.offset + process.rate * self.now

    # --- messages ---

    def _is_blocked(self, source: Process, target: Process) -> bool:
        """Returns whether the network drops what one process sends to another."""
        if (source.pid, target.pid) in self.cuts:
            return True
        for end, lower, kind in self.walls:
            is_up = source.pid in lower
            is_across = self.now < end and is_up != (target.pid in lower)
            if is_across and (kind == "split" or is_up == (kind == "split-down")):
                return True
        return False

    def _hears(self, one: Process, other: Process) -> bool:
        """Returns whether a process has an answer from another one."""
        return other.is_alive and not self._is_blocked(one, other) and not self._is_blocked(other, one)

    def _send(self, source: Process, target: Process, message: Any, is_answer: bool = False) -> None:
        if not self._is_blocked(source, target) and self.random.random() >= self.loss:
            for _ in range(1 + (self.random.random() < 0.1)):
                delay = 0.001 + self.random.choice(self.delays) * self.random.random()
                self._at(self.now + delay, self._deliver, (source, target, message, is_answer))

    def _deliver(self, argument: tuple[Process, Process, Any, bool]) -> None:
        source, target, message, is_answer = argument
        if not target.is_alive or (source.pid, target.pid) in self.cuts:
            return
        if target.paused > self.now:
            self._at(target.paused, self._deliver, argument)
            return
        target.mailbox = [*target.mailbox[-1000:], (source.rank, message)]
        if target.phase in ("agrees", "confirms"):
            self._wake(target, 0.001)
        epoch, answer = target.answer
        if not is_answer and message["epoch"] <= epoch:
            self._send(target, source, answer, is_answer=True)

    # --- what happens to processes ---

    def _add(self, rank: int) -> Process:
        process = Process(len(self.processes), rank)
        process.rate, process.offset = self.random.uniform(0.98, 1.02), self.random.uniform(0.0, 1000.0)
        self.processes.append(process)
        return process

    def _holder(self, rank: int) -> Process | None:
        return next((each for each in reversed(self.processes) if each.rank == rank and each.is_alive), None)

    def _happen(self, fault: Fault) -> None:
        if fault.kind.startswith("join"):
            process = self._add(fault.rank)
            process.joiner = self.protocol.Joiner(fault.rank, TIMEOUT, REACH)
            process.is_bad = fault.kind == "join-badly"
            process.at = "b" if fault.value and self.history.pace != "own" else "a"
            process.is_cut_off = fault.kind == "join-cut-off" and not self.history.one_host
            process.phase, process.began_at = "asks", self._epoch()
            self._say(process, fault.kind)
            process.actions.extend(self._call(process, process.joiner, "start", self._time(process)))
            self._wake(process, 0.01)
            return
        if fault.kind.startswith("split"):
            lower = {each.pid for each in self.processes if each.rank < fault.rank}
            self.walls.append((self.now + fault.value, lower, fault.kind))
            self._at(self.now + fault.value, self._retry, None)
            if fault.value > SILENCE:
                self._at(self.now + SILENCE, self._split, lower)
            return
        target = self._holder(fault.rank)
        if target is None:
            return
        self._say(target, fault.kind)
        if fault.kind == "kill":
            self._die(target)
        elif fault.kind == "fall":
            target.falls_after = int(fault.value)
        elif fault.kind == "hang":
            target.hangs = True
            for each in self.processes:
                self._fail_late(each)
        elif fault.kind == "break":
            target.is_broken = target.member is None and not self.history.one_host
        elif fault.kind == "pause":
            target.paused = max(target.paused, self.now + fault.value)
            if fault.value > SILENCE:
                self._at(self.now + SILENCE, self._suspect, (target, False))
        elif fault.kind == "part":
            other = self._holder(int(fault.value))
            if other is not None and other is not target:
                target.is_suspected = other.is_suspected = True
                self._at(self.now + SILENCE, self._declare_lost, (target, other))
        else:
            self._at(self.now + SILENCE, self._suspect, (target, True))
            if fault.kind == "cut":
                self._at(self.now + SILENCE, self._suspect, (target, False))

    def _suspect(self, argument: tuple[Process, bool]) -> None:
        """A process and the others take each other for lost, in one direction: it takes the others so if `here`."""
        target, here = argument
        target.was_cut |= here
        target.is_suspected = True
        for other in self.processes:
            if other is not target and other.is_alive and target.is_alive:
                at, whom = (target, other) if here else (other, target)
                self._at(self.now + 0.1 * self.random.random(), self._declare_lost, (at, whom))

    def _split(self, lower: set[int]) -> None:
        """Processes on both sides of a split have not heard each other for so long that they take each other for lost."""
        for one in self.processes:
            for other in self.processes:
                if (one.pid in lower) != (other.pid in lower):
                    self._at(self.now + 0.5 * self.random.random(), self._declare_lost, (one, other))
                    other.is_suspected = True

    def _declare_lost(self, argument: tuple[Process, Process]) -> None:
        """A process takes another one for lost that may go on."""
        one, lost = argument
        is_cut = (one.pid, lost.pid) in self.cuts  # a joiner notices that when it is in
        if not one.is_alive or (one.member is None and not is_cut) or lost.pid in one.gone | one.expelled_by:
            return
        knows = not self.history.one_host or lost.pid in one.pids.values()
        # On one host, a member looks after its group.
        if not knows and one.member is not None and (lost.member is not None or not lost.is_alive):
            return
        if one.member is None or not knows or (one.paused > self.now and one.phase == "agrees"):
            # Of a pause, it sees first who has ended meanwhile.
            later = max(one.paused, self.now) + 0.5 * self.random.random()
            self._at(later, self._declare_lost, argument)
            return
        self._say(one, f"takes process {lost.pid} for lost")
        self.cuts |= {(one.pid, lost.pid), (lost.pid, one.pid)}
        if (
            self.history.one_host
        ):  # that one learns of it before it does anything else: it is as good as ended
            lost.expelled_by.add(one.pid)
            one.declared.add(lost.pid)
            if one.pid in lost.pids.values():  # its group is one after that of the other, or the same
                self._at(self.now + 0.1, self._hear_of_failure, (lost, lost.name))
        else:
            one.silent.add(lost.pid)
            lost.is_doubted = True  # a third rank that hears both may go on with either
            self._at(self.now + 0.5 * self.random.random(), self._declare_lost, (lost, one))
        self._learn((one, lost))

    def _retry(self, _: None) -> None:
        """A split is over: what was on its way arrives."""
        for process in self.processes:
            if process.is_alive and process.phase == "exchanges":
                self._complete_together(process)

    def _die(self, process: Process) -> None:
        """A process ends. Who waits for it or watches it notices that; at their own pace, ranks may not exchange with it."""
        process.is_alive, process.died = False, self.now
        process.phase = "ended"
        for other in self.processes:
            if other.is_alive and (process.pid in other.watched or self._exchanges_with(other, process)):
                self._notice(other, process)

    def _exchanges_with(self, one: Process, other: Process) -> bool:
        """Whether a process notices the end of another one by its exchanges: they are neighbors in a ring of those left."""
        if self.history.pace == "own" and other.pid % 2:
            return False
        if one.phase == "agrees" or other.pid not in one.pids.values() or one.pid not in one.pids.values():
            return False
        ring = [pid for _, pid in sorted(one.pids.items()) if pid not in one.gone]
        if other.pid not in ring:
            return False
        distance = ring.index(one.pid) - ring.index(other.pid)
        return distance % len(ring) in (1, len(ring) - 1)

    def _notice(self, other: Process, process: Process) -> None:
        """A process notices the end of another one, after some time."""
        most = 0.05 if self.history.one_host or self.random.random() < 0.7 else SILENCE
        self._at(self.now + most * self.random.random(), self._learn, (other, process))

    def _learn(self, argument: tuple[Process, Process]) -> None:
        process, lost = argument
        if not process.is_alive or lost.pid in process.ended:
            return
        if lost.pid not in process.silent:
            if not lost.is_alive and not self.history.one_host and self._is_blocked(lost, process):
                self._at(self.now + 0.5, self._learn, argument)
                self.unreported[lost.pid] = self.now + 0.5
                return
            process.ended.add(lost.pid)
        if lost.pid in process.pids.values():
            if self.history.pace != "own":
                self._fail_group(process.name, process)
            for each in self.processes:  # they are neighbors now
                if not each.is_alive and each.pid not in process.gone and self._exchanges_with(process, each):
                    self._notice(process, each)
            if not lost.is_alive:  # news of it go to all ranks of the group
                for pid in process.pids.values():
                    if self.processes[pid].name == process.name and lost.pid in process.ended:
                        when = self.now + 0.05 * self.random.random()
                        self._at(when, self._learn, (self.processes[pid], lost))
            if lost.is_alive and not self._is_blocked(process, lost):  # it is told that it takes part no more
                self._at(self.now + 0.1, self._hear_of_failure, (lost, process.name))
        if process.phase == "agrees":
            self._wake(process, 0.01 * self.random.random())

    def _fail_group(self, name: str, by: Process) -> None:
        """A group has failed on one of its ranks; all its ranks hear of it."""
        if name in self.failed:
            return
        self.failed.add(name)
        for pid in by.pids.values():
            self._at(
                self.now + 0.05 * self.random.random(), self._hear_of_failure, (self.processes[pid], name)
            )

    def _fail_late(self, process: Process) -> None:
        """A group with a rank that hangs fails, but nobody is known to be gone."""
        if self.history.pace != "own" and any(self.processes[pid].hangs for pid in process.pids.values()):
            self._at(self.now + SILENCE, lambda name: self._fail_group(name, process), process.name)

    def _hear_of_failure(self, argument: tuple[Process, str]) -> None:
        process, name = argument
        if process.name == name and process.is_alive and process.member is not None:
            process.has_failed = True
            if process.phase == "exchanges":
                self._wake(process, 0.0)

    def _end(self, process: Process, reason: str) -> None:
        """A process ends with an error; checks whether that is right."""
        process.told = reason
        self._say(process, f"ends: {reason}")
        self._check_reason(process, reason)
        self._die(process)

    def _check_reason(self, process: Process, reason: str) -> None:
        if self._goes_on(process):
            raise Violation(f"rank {process.rank} of the side that goes on ends: {reason}")
        if "declared lost" in reason:
            if not (process.is_suspected or process.is_doubted or self._has_cut):
                raise Violation(f"rank {process.rank}, which is well, is expelled: {reason}")
        elif "too few to go on" in reason:
            if not any(each.is_suspected for each in self.processes):
                raise Violation(f"rank {process.rank} stops, although nobody is silent: {reason}")
        elif "do not hear" in reason or "does not hear" in reason or "gone on without it" in reason:
            # If ranks that have let it in have ended, the others may have decided anew.
            has_ended = any(not self.processes[pid].is_alive for pid in process.pids.values())
            is_late = (has_ended and "gone on without it" in reason) or self.delays == SLOWEST_DELAYS
            if not is_late and not any(
                each.is_suspected or each.hangs or each.paused for each in self.processes
            ):
                raise Violation(f"a joiner is left alone after its admission: {reason}")
        elif "that let it in have ended" in reason:
            if any(self.processes[pid].is_alive for pid in process.pids.values()):
                raise Violation(f"a joiner is left alone: {reason}")
        elif "did not come" in reason or "did not agree" in reason:
            # Who is cut off says that too few are left.
            if not any(each.hangs for each in self.processes):
                raise Violation(f"rank {process.rank} waits in vain: {reason}")
        elif "still runs" in reason:
            holders = [each for each in self.processes if each.rank == process.rank and each is not process]
            ticket = self.tickets[process.ticket]
            then, age = ticket["refused at"], ticket["refused at"] - ticket["at"]
            runs = [
                each
                for each in holders
                if each.is_alive
                or each.died >= then
                or then < self.unreported.get(each.pid, 0.0) + DOUBT
                or (then - each.died < DOUBT and (age >= DOUBT or self.history.one_host))
            ]
            if not runs:
                raise Violation(f"the number of a lost rank is refused: {reason}")
        elif "is refused" in reason:
            if not process.is_bad:
                raise Violation(f"a joiner is refused: {reason}")
        elif "no rank of the job is left" in reason:
            if any(not each.is_suspected for each in self._members()):  # the others may have been left out
                raise Violation(f"a joiner believes that nobody is left: {reason}")
        elif "has taken it for ended" in reason:
            if not process.is_broken:
                raise Violation(f"a joiner is forgotten: {reason}")
        elif "does not reach" in reason and process.is_cut_off:
            pass
        elif "had no answer" in reason and (
            len(self.postponed) >= MOST_POSTPONED
            or (self.delays == SLOWEST_DELAYS and (self._epoch() > process.began_at + 1 or self._agree_now()))
        ):
            pass  # known limits: ranks were in exchanges of other objects each time; or messages take so long
        elif (
            "had no answer" in reason
            and not self._members()
            # One that hangs may have been let in.
            and not any(each.hangs and each.member is None for each in self.processes)
            and self.now > TIMEOUT / 2 + max(each.died for each in self.processes if each.member is not None)
        ):
            raise Violation(f"a joiner waits although nobody is left: {reason}")
        elif "does not reach" in reason or "no state came" in reason or "had no answer" in reason:
            # They hold if nobody exchanges.
            if any(not each.hangs for each in self._members()) and not any(
                each.is_suspected or each.hangs for each in self.processes
            ):
                raise Violation(f"a joiner is left alone by ranks that exchange: {reason}")
        else:
            raise Violation(f"rank {process.rank} ends: {reason}")

    @property
    def _has_cut(self) -> bool:
        return any(each.was_cut for each in self.processes)

    def _members(self) -> list[Process]:
        return [each for each in self.processes if each.is_alive and each.member is not None]

    def _epoch(self) -> int:
        """Returns the last epoch."""
        return max((each.member.membership.epoch for each in self._members()), default=0)

    def _agree_now(self) -> bool:
        return any(each.phase == "agrees" for each in self._members())

    def _is_settled(self) -> bool:
        """Whether all that live are members of one group and have made an exchange since the last call."""
        members = self._members()
        if any(each.is_alive and each.member is None and not each.hangs for each in self.processes):
            self._quiet_since = None
            return False
        members = [each for each in members if not each.hangs]  # the others may wait for it, or have ended
        before = self._quiet_since
        self._quiet_since = {each.pid: each.exchanges for each in members}
        if (
            len({each.name for each in members}) > 1
            or before is None
            or before.keys() != self._quiet_since.keys()
        ):
            return False
        return all(count > before[pid] for pid, count in self._quiet_since.items())

    def _goes_on(self, process: Process) -> bool:
        """Whether all that happens is one split at most, and this rank is on the larger side, of two halves the lower one."""
        kinds = [fault.kind.partition("-")[0] for fault in self.history.faults]
        if {*kinds} - {"join", "split"} or kinds.count("split") > 1 or process.pid >= self.history.size:
            return False
        lower = self.walls[0][1] & {*range(self.history.size)} if self.walls else set[int]()
        return (2 * len(lower) >= self.history.size) == (process.pid in lower)

    # --- what processes do ---

    def _step(self, argument: tuple[Process, int]) -> None:
        process, token = argument
        if token != process.token or not process.is_alive or process.hangs:
            return
        if process.paused > self.now:
            process.next = 0.0
            self._wake(process, process.paused - self.now)
            return
        process.next = 0.0
        if not process.actions:
            getattr(self, f"_{process.phase}")(process)
        if process.actions:  # only some of them, and then others come between
            for _ in range(int(1 + 4 * self.random.random())):
                if process.actions and process.is_alive:
                    self._perform(process, process.actions.popleft())
        if process.is_alive and (process.actions or (not process.next and process.phase != "exchanges")):
            self._wake(process, 0.02 * self.random.random())

    def _tell_losses(self, process: Process) -> list[Any]:
        ended, silent = process.ranks_of(process.ended), process.ranks_of(process.silent)
        return self._call(process, process.member, "lost", ended, silent)

    def _tell_expulsions(self, process: Process) -> list[Any]:
        actions: list[Any] = []
        for by in process.ranks_of(process.expelled_by):
            is_mutual = process.pids[by] in process.declared
            actions += self._call(process, process.member, "expelled", by, is_mutual)
        return actions

    def _object(self, process: Process) -> str:
        """Returns the object of the next exchange: they take turns, but at the ranks' own pace there is one."""
        return "b" if self.history.pace != "own" and process.completed["a"] > process.completed["b"] else "a"

    def _computes(self, process: Process) -> None:
        """It comes to its next exchange."""
        member = process.member
        is_quiet = process.announced == process.seen and member.membership.epoch == process.polled_epoch
        process.phase = "begins"
        if is_quiet and not member.waits:
            self._begins(process)
            return
        self._tell_losses(process)
        process.actions.extend(self._call(process, member, "exchange", self._time(process)))
        self._wake(process, 0.0)

    def _begins(self, process: Process) -> None:
        name = self._object(process)
        number = process.completed[name]
        process.taken[name] = number + 1
        if process.begins_at not in ("", name):
            raise Violation(f"rank {process.rank} begins at {process.begins_at}, the others are at {name}")
        process.begins_at = ""
        is_out = self.history.one_host and process.ranks_of(process.expelled_by)
        if process.has_failed or is_out or (self.history.pace == "own" and process.ranks_of(process.silent)):
            self._agree(process, ())
            return
        process.phase = "exchanges"
        if self.history.pace == "own":
            self._complete(process)
            return
        if process.is_new:  # all that follows has the same order on all ranks
            process.is_new = False
            if self.first.setdefault(process.name, (name, number)) != (name, number):
                raise Violation(
                    f"the ranks of {process.name} begin at {self.first[process.name]} and {(name, number)}"
                )
        if self.history.pace == "patience":
            self._at(self.now + PATIENCE, self._finish, (process, process.name, name, number))
        self.begun[process.name][process.rank] = (name, number)
        self._complete_together(process)

    def _complete_together(self, process: Process) -> None:
        """Completes an exchange if all ranks of a group have begun it, and hear each other."""
        begun = self.begun[process.name]
        group = [self.processes[pid] for pid in process.pids.values()]
        if any(self._is_blocked(one, other) for one in group for other in group if one is not other):
            return
        if len(begun) == len(process.pids):
            if len(set(begun.values())) > 1 and self.history.pace == "in-step":
                raise Violation(f"the ranks of {process.name} are in different exchanges: {begun}")
            for rank, exchange in begun.items():
                when = self.now + 0.05 * self.random.random()
                self._at(when, self._finish, (self.processes[process.pids[rank]], process.name, *exchange))
            begun.clear()

    def _finish(self, argument: tuple[Process, str, str, int]) -> None:
        process, group, name, number = argument
        if (
            process.is_alive
            and (process.name, self._object(process), process.completed[name]) == (group, name, number)
            and process.phase == "exchanges"
            and not process.has_failed
        ):
            if process.paused > self.now:
                self._at(process.paused, self._finish, argument)
            elif not process.hangs:
                self._complete(process)

    def _complete(self, process: Process) -> None:
        name = self._object(process)
        process.completed[name] += 1
        process.exchanges += 1
        process.phase = "computes"
        process.next = 0.0
        self._wake(process, 0.05 + 0.8 * self.random.random())

    def _exchanges(self, process: Process) -> None:
        if process.has_failed:
            self._agree(process, ())

    def _agree(self, process: Process, joins: Any) -> None:
        self._fail_group(process.name, process)
        process.phase, process.sent = "agrees", 0
        objects = {
            name: {
                "completed": process.completed[name],
                "taken": process.taken[name],
                "first": 0,
                "counts": {},
            }
            for name in "ab"
        }
        process.actions.clear()
        self._tell_losses(process)
        process.actions.extend(
            self._call(process, process.member, "agree", self._time(process), objects, "a loss", joins)
        )
        self._wake(process, 0.01)

    def _agrees(self, process: Process) -> None:
        member = process.member
        self._wake(process, 0.1 + 0.2 * self.random.random())
        process.actions.extend(self._tell_expulsions(process))
        process.actions.extend(self._tell_losses(process))
        mailbox, process.mailbox = process.mailbox, []
        for sender, message in mailbox:
            process.actions.extend(self._call(process, member, "receive", sender, message))
        process.actions.extend(self._call(process, member, "tick", self._time(process)))
        if sum(type(each).__name__ == "Form" for each in process.actions) > 1:
            raise Violation(f"rank {process.rank} forms two groups after one round")

    def _perform(self, process: Process, action: Any) -> None:
        if process.falls_after >= 0 and process.member is not None and process.member.state == "decided":
            process.falls_after -= 1
            if process.falls_after < 0:
                self._say(process, "falls")
                self._die(process)
                return
        getattr(self, f"_do_{type(action).__name__}")(process, action)

    def _do_Send(self, process: Process, action: Any) -> None:
        process.sent += 1
        if process.sent > MOST_MESSAGES:
            raise Violation("the messages of a round have no end")
        self._send(process, self.processes[process.pids[action.to]], action.message)

    def _do_Watch(self, process: Process, action: Any) -> None:
        for rank in action.ranks:
            watched = self.processes[process.pids[rank]]
            if watched.pid not in process.watched:
                process.watched.add(watched.pid)
                if not watched.is_alive:
                    self._notice(process, watched)

    def _do_Fail(self, process: Process, action: Any) -> None:
        if action.reason is None:
            raise Violation(f"rank {process.rank} ends although the others go on, or a rank is lost")
        self._end(process, action.reason)

    def _do_Form(self, process: Process, form: Any) -> None:
        if process.phase == "agrees" and (fails := self._tell_expulsions(process)):
            process.actions.clear()  # it has stood still since it decided
            process.actions.extend(fails)
            return
        decision, epoch = form.decision, form.epoch
        for other in self.processes:  # if all that have decided otherwise have ended, nobody knows
            knows = other.is_alive and other.member is not None and not other.expelled_by
            if knows and other.lineage.get(epoch, decision) != decision:
                raise Violation(
                    f"two decisions of epoch {epoch}: {other.lineage[epoch]} of process {other.pid}, and {decision}"
                )
        if self.names.setdefault(form.name, epoch) != epoch:
            raise Violation(f"epochs {self.names[form.name]} and {epoch} have one name, {form.name!r}")
        if not decision.members:
            raise Violation("a decision without ranks")
        if process.rank not in decision.members or (
            process.joiner is None and process.rank not in decision.living
        ):
            raise Violation(f"rank {process.rank} goes on, outside of the decision {decision.members}")
        for join in decision.joins.values():
            joiner, last = (
                self.processes[int(join.entry)],
                self.processes[self.entries.get(join.rank, int(join.entry))],
            )
            if joiner.is_bad or joiner.is_cut_off:
                raise Violation(f"process {joiner.pid} joins, which must not")
            if self.history.one_host and last.is_alive and last is not joiner:
                raise Violation(f"a process joins as rank {join.rank}, whose last process runs")
        if not decision.joins and decision.living.keys() == process.pids.keys():
            self.postponed.add(epoch)
        if epoch > MOST_EPOCHS:
            raise Violation("the epochs have no end")
        for rank, pid in process.pids.items():
            old = self.processes[pid]
            is_doubted = old.is_suspected or old.is_doubted or old.hangs or self._has_cut
            if old.is_alive and not is_doubted and rank not in decision.living:
                raise Violation(f"rank {rank}, which is well, is expelled by epoch {epoch}")
            stay = [self.processes[process.pids[each]] for each in decision.living]
            # Where several pairs do not hear each other, more than necessary may be left out.
            has_pairs = sum(fault.kind == "part" for fault in self.history.faults) > 1
            if rank in decision.silent and not has_pairs and not any(pid in each.gone for each in stay):
                raise Violation(f"epoch {epoch} leaves out rank {rank}, which all hear that stay")
        if both := decision.living.keys() & decision.joins.keys():
            raise Violation(f"two processes have the numbers {sorted(both)}")
        process.answer = epoch, {"epoch": epoch, "decided": decision.to_values()}
        process.lineage = {**process.lineage, epoch: decision}
        for each, earlier in process.lineage.items():
            begin = self.silenced.setdefault((each, earlier.members), self.now) if earlier.silent else -DOUBT
            if decision.joins and self.now < begin + 0.97 * DOUBT:
                raise Violation(f"a process joins too early after epoch {each} has left out silent ranks")
        process.actions.clear()
        process.actions.extend(
            _Admit(join, form, process.lineage, process.pids) for join in decision.joins.values()
        )
        process.actions.append(_Adopt(form))

    def _do__Admit(self, process: Process, action: _Admit) -> None:
        join = action.join
        self.entries[join.rank] = int(join.entry)
        ticket = self.tickets[join.ticket]
        ticket["admitted"] = action.form, action.lineage, action.pids
        self._end_ticket(process, join.ticket)

    def _do__Adopt(self, process: Process, action: _Adopt) -> None:
        form = action.form
        decision = form.decision
        for name, number in decision.numbers.items():
            if number < process.completed[name]:
                raise Violation(
                    f"the number of exchanges of {name} goes back to {number} on rank {process.rank}"
                )
            process.completed[name] = process.taken[name] = number
        self._call(process, process.member, "formed", self._time(process), form)
        process.is_new = True
        process.pids = {rank: process.pids[rank] for rank in decision.living} | {
            rank: int(join.entry) for rank, join in decision.joins.items()
        }
        process.name = f"{form.name} of {sorted(process.pids.items())}"
        process.has_failed = process.name in self.failed
        process.watched &= set(process.pids.values())
        for rank in decision.joins:
            self._do_Watch(process, self.protocol.Watch((rank,)))
        if process.ranks_of(process.gone) and self.history.pace != "own":
            self._fail_group(process.name, process)
        process.phase = "computes"
        self._fail_late(process)
        for pid in process.pids.values():
            if not self.processes[pid].is_alive and self._exchanges_with(process, self.processes[pid]):
                self._notice(process, self.processes[pid])
        self._say(process, f"is in {process.name}")
        self._wake(process, 0.1 * self.random.random())

    # --- answers to joiners ---

    def _do_LeaveToAnother(self, process: Process, action: Any) -> None:
        process.seen, process.polled_epoch = process.announced, process.member.membership.epoch
        process.copies.clear()

    def _do_Poll(self, process: Process, action: Any) -> None:
        process.seen, process.polled_epoch = process.announced, process.member.membership.epoch
        self.nonce = process.pid
        for number, ticket in self.tickets.items():
            request = ticket.get("request")
            if request is None or "refused" in ticket:
                continue
            joiner = self.processes[int(request.entry)]
            if "admitted" in ticket or (
                (not joiner.is_alive or joiner.is_broken)
                and (self.history.one_host or number in process.copies)
            ):
                self._end_ticket(process, number)
                continue
            if request.challenge != str(process.pid):
                continue
            runs = False
            last = self.entries.get(request.rank)
            if self.history.one_host and last is not None and last != joiner.pid:
                runs = self.processes[last].is_alive
            actions = self._call(
                process,
                process.member,
                "asked",
                self._time(process),
                request,
                "an obstacle" if joiner.is_bad else "",
                runs=runs,
                is_ready="ready" in ticket,
                is_answered="answer" in ticket,
            )
            for each in actions:
                self._perform(process, each)
        process.actions.extend(self._call(process, process.member, "polled", self._object(process)))

    def _do_Give(self, process: Process, action: Any) -> None:
        ticket = self.tickets[action.request.ticket]
        ticket["answer"] = (process.pid, [process.pids[rank] for rank in process.member.living])
        process.copies.add(action.request.ticket)
        self._wake(self.processes[int(action.request.entry)], 0.02)

    def _do_Refuse(self, process: Process, action: Any) -> None:
        ticket = self.tickets[action.ticket]
        joiner = self.processes[int(ticket["request"].entry)]
        ticket["refused"], ticket["refused at"] = action.reason, self.now
        self._end_ticket(process, action.ticket)
        self._wake(joiner, 0.02)

    def _end_ticket(self, process: Process, number: int) -> None:
        for what in ("request", "answer", "ready"):
            self.tickets[number].pop(what, None)
        process.copies.discard(number)

    def _do_Meet(self, process: Process, action: Any) -> None:
        self._agree(process, action.joins)

    # --- joiners ---

    def _do_TakeTicket(self, process: Process, action: Any) -> None:
        if process.ticket:
            for what in ("request", "answer"):
                self.tickets[process.ticket].pop(what, None)
        process.ticket = len(self.tickets) + 1
        self.tickets[process.ticket] = {"at": self.now}
        process.phase = "asks"

    def _do_Ask(self, process: Process, action: Any) -> None:
        if process.asked != (process.ticket, self.nonce):
            process.asked = process.ticket, self.nonce
            self.tickets[process.ticket]["request"] = self.protocol.Request(
                process.ticket,
                process.rank,
                str(process.pid),
                ("a", "b"),
                process.at,
                "",
                str(self.nonce),
            )
        self._announce(process)
        self._wake(process, LIFE_PAUSE)

    def _announce(self, process: Process) -> None:
        others = [self.processes[pid] for rank, pid in self.entries.items() if pid != process.pid]
        process.is_anyone_left = any(each.is_alive for each in others)
        for other in others:
            if self.history.one_host:
                other.announced += 1
            elif other.is_alive and self.random.random() < 0.9:
                self._at(self.now + 0.2 * self.random.random(), self._hear, other)

    def _hear(self, process: Process) -> None:
        process.announced += 1

    def _awaits(self, process: Process, what: str) -> bool:
        ticket = self.tickets[process.ticket]
        if what in ticket:
            return True
        if "refused" in ticket:
            process.actions.extend(self._call(process, process.joiner, "refused", ticket["refused"]))
        else:
            process.actions.extend(
                self._call(
                    process,
                    process.joiner,
                    "sampled",
                    self._time(process),
                    is_anyone_left=process.is_anyone_left,
                    is_forgotten="request" not in ticket,
                )
            )
            self._wake(process, LIFE_PAUSE)
        return False

    def _asks(self, process: Process) -> None:
        if self._awaits(process, "answer"):
            process.phase = "loads"
            self._wake(process, 0.02 + self.random.choice((0.1, 0.1, 1.5)) * self.random.random())

    def _loads(self, process: Process) -> None:
        ticket = self.tickets[process.ticket]
        giver, living = ticket.get("answer", (None, []))
        has_state = (
            giver is not None
            and self.processes[giver].is_alive
            and process.ticket in self.processes[giver].copies
        )
        left = [pid for pid in living if not self._hears(process, self.processes[pid])]
        if process.is_cut_off:
            left += living[:1]
        unreached = "" if self.history.one_host else ", ".join(f"process {pid}" for pid in left)
        actions = self._call(
            process,
            process.joiner,
            "loaded",
            self._time(process),
            has_state,
            unreached,
            "the rank that gave it has ended",
        )
        process.actions.extend(actions)
        if not actions:
            if not has_state:
                raise Violation("a joiner goes on without a state")
            ticket["ready"] = True
            process.phase = "waits"
            self._announce(process)
        self._wake(process, 0.05)

    def _waits(self, process: Process) -> None:
        if not self._awaits(process, "admitted"):
            return
        process.form, process.lineage, pids = self.tickets[process.ticket]["admitted"]
        process.pids, process.mailbox = {rank: pids[rank] for rank in process.form.decision.living}, []
        process.phase = "confirms"
        epoch, decision = process.form.epoch, process.form.decision
        process.actions.extend(
            self._call(process, process.joiner, "admitted", self._time(process), epoch, decision)
        )
        for pid in process.pids.values():
            process.watched.add(pid)
            if not self.processes[pid].is_alive:
                self._notice(process, self.processes[pid])

    def _confirms(self, process: Process) -> None:
        joiner, form = process.joiner, process.form
        self._wake(process, 0.1 + 0.2 * self.random.random())
        process.actions.extend(self._call(process, joiner, "lost", process.ranks_of(process.ended)))
        mailbox, process.mailbox = process.mailbox, []
        for sender, message in mailbox:
            process.actions.extend(self._call(process, joiner, "receive", sender, message))
        process.actions.extend(self._call(process, joiner, "tick", self._time(process)))
        if joiner.state != "in":
            return
        member = process.member = self.protocol.Member(process.rank, self.history.size, TIMEOUT, DOUBT)
        member.membership = self.protocol.Membership(form.epoch - 1, (), frozenset(range(self.history.size)))
        process.seen, process.polled_epoch, process.begins_at = process.announced, form.epoch, process.at
        self._do_Form(process, form)
        process.actions = deque(each for each in process.actions if isinstance(each, _Adopt))


@dataclass(frozen=True)
class _Admit:
    join: Any
    form: Any
    lineage: Any
    pids: Any


@dataclass(frozen=True)
class _Adopt:
    form: Any


class Round:
    """One agreement round in an order without any sense of time: each message may come after any other one, or never.

    Ranks end, and fall silent for each other, while they agree; who lives hears of it late. No two that live at the end may have
    decided otherwise. A `World` has few such orders, because its ranks wait for each other.

    Args:
        seed: Of the order.
        protocol: The module of the machines.
    """

    def __init__(self, seed: int, protocol: Any = real_protocol) -> None:
        self.random = Random(seed)
        size = self.random.choice((2, 3, 3, 3, 4, 4, 5, 5, 5))
        self.times = [0.0] * size  # by the clock of each
        self.members = {rank: protocol.Member(rank, size, 1e9, DOUBT) for rank in range(size)}
        self.mail: list[tuple[int, int, Any]] = []
        self.reports: list[tuple[int, int, bool]] = []  # who is told of whom, and whether that one is silent
        self.ended: set[int] = set()
        self.cuts: set[tuple[int, int]] = set()
        self.decided: dict[int, Any] = {}
        self.is_calm = self.random.random() < 0.5
        self.proposals = 0
        self.held = -1  # messages of this rank are slow just now
        if self.random.random() < 0.5:
            self._end(size - 1)
        for rank in sorted(self.members.keys() - self.ended):
            member, report = self.members[rank], {"completed": rank, "taken": rank, "first": 0, "counts": {}}
            self._do(rank, member.agree(0.0, {"a": report}, "a loss"))
            member._proposal = partial(self._proposed, member._proposal)
        for number in reversed(range(len(self.mail))):
            if self.random.random() < 0.9:
                self._deliver(number, keeps=False)

    def run(self) -> None:
        """Runs it to its end; raises Violation."""
        for _ in range(self.random.choice((100, 200, 400))):
            chance, living = self.random.random(), sorted(self.members.keys() - self.ended)
            if not living:
                return
            rank = self.random.choice(living)
            if self.random.random() < 0.05:
                self.held = self.random.choice((-1, *living))
            if chance < 0.6 and self.mail:
                number = self.random.randrange(len(self.mail))
                if self.mail[number][0] != self.held:
                    self._deliver(number, keeps=self.random.random() < 0.1)
            elif chance < 0.85:
                self.times[rank] += self.random.choice((0.1, 0.1, 0.1, 5.0))
                self._do(rank, self.members[rank].tick(self.times[rank]))
            elif chance < 0.93 and self.reports:
                self._report(self.random.randrange(len(self.reports)))
            elif chance < 0.96 and len(self.ended) + 1 < len(self.members):
                self._end(rank)
            elif chance < 0.97 and not self.is_calm:
                other = self.random.choice(sorted(self.members.keys() - {rank}))
                self.cuts |= {(rank, other), (other, rank)}
                self.reports += [(rank, other, True), (other, rank, True)]

    def _proposed(self, proposal: Any) -> Any:
        """Returns what a rank proposes, which is never the same twice."""
        values = proposal() or {"living": self.members, "joins": {}, "silent": ()}
        self.proposals += 1
        values["living"] = {rank: {"a": {"completed": self.proposals}} for rank in values["living"]}
        return values

    def _end(self, rank: int) -> None:
        self.ended.add(rank)
        self.reports += [(other, rank, False) for other in self.members.keys() - self.ended]

    def _report(self, number: int) -> None:
        rank, other, is_silent = self.reports.pop(number)
        if rank not in self.ended:
            self._do(rank, self.members[rank].lost(*(([], [other]) if is_silent else ([other], []))))

    def _deliver(self, number: int, keeps: bool) -> None:
        sender, rank, message = self.mail[number] if keeps else self.mail.pop(number)
        if rank not in self.ended and (sender, rank) not in self.cuts:
            self._do(rank, self.members[rank].receive(sender, message))

    def _do(self, rank: int, actions: list[Any]) -> None:
        for action in actions:
            kind = type(action).__name__
            if kind == "Send" and self.random.random() < 0.9:
                same = [each for each in self.mail if each[:2] == (rank, action.to)]
                if len(same) > 2:  # most only repeat what others tell
                    self.mail.remove(self.random.choice(same))
                self.mail.append((rank, action.to, action.message))
            elif kind == "Form":
                self.decided[rank] = action.decision
                others = [each for each in self.decided if each not in self.ended]
                if any(self.decided[each] != action.decision for each in others):
                    raise Violation(
                        f"two decisions: {[(each, self.decided[each].members) for each in others]}"
                    )
            elif kind == "Fail":
                self._end(rank)


def violation_of_round(seed: int, protocol: Any = real_protocol) -> str:
    """Runs a round; returns which promise it breaks, "" if none."""
    try:
        Round(seed, protocol).run()
    except Violation as error:
        return str(error)
    except Exception as error:  # of the machine
        return f"{type(error).__name__}: {error}"
    return ""


def violation_of(history: History, protocol: Any = real_protocol, coverage: Any = None) -> str:
    """Runs a history; returns which promise it breaks, "" if none."""
    try:
        World(history, protocol, coverage).run()
    except Violation as error:
        return str(error)
    except Exception as error:  # of the machine
        return f"{type(error).__name__}: {error}"
    return ""


def shrunk(history: History, protocol: Any = real_protocol) -> History:
    """Returns a history with as few faults and ranks as possible that breaks a promise too."""

    def kind(text: str) -> str:
        return re.sub(r"[0-9]+", "0", text).partition(":")[0]

    wanted = kind(violation_of(history, protocol))

    def smaller() -> Iterator[History]:
        for number in range(len(history.faults)):
            yield replace(history, faults=history.faults[:number] + history.faults[number + 1 :])
        if history.size > 2:
            yield replace(history, size=history.size - 1)

    while True:
        for candidate in smaller():
            # With fewer faults, the delays are others.
            seeds = (replace(candidate, seed=seed) for seed in (history.seed, *range(30)))
            found = next((each for each in seeds if kind(violation_of(each, protocol)) == wanted), None)
            if found is not None:
                history = found
                break
        else:
            return history


def first_failure(
    seeds: Iterable[int], protocol: Any = real_protocol, coverage: Any = None
) -> History | None:
    """Returns the first history of these seeds that breaks a promise; None if none does."""
    histories = map(History.of_seed, seeds)
    return next((each for each in histories if violation_of(each, protocol, coverage)), None)


def command(history: History) -> str:
    """Returns the command that replays a history."""
    return f'make histories ARGS="--replay {history}"'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=1_000_000, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=600.0, help="at most for so long")
    parser.add_argument("--replay", help="one history, as a failure has printed it")
    options = parser.parse_args()
    if options.replay:
        try:
            World(History.of_text(options.replay), report=print).run()
        except Violation as error:
            print(f"violation: {error}")
            return 1
        return 0
    coverage: Counter[Any] = Counter()
    end, count = time.monotonic() + options.seconds, 0
    for count in range(options.seeds):
        if time.monotonic() >= end:
            break
        seed = options.first + count
        if violation := violation_of_round(seed):
            print(f'round {seed}: {violation}\nmake histories ARGS="--first {seed} --seeds 1"')
            return 1
        history = History.of_seed(seed)
        if violation_of(history, coverage=coverage):
            small = shrunk(history)
            print(f"seed {history.seed}: {violation_of(history)}")
            print(f"shrunk: {violation_of(small)}\n{command(small)}")
            return 1
    for (machine, before, event, after, kinds), times in sorted(coverage.items()):
        print(f"{times:10}  {machine:6} {before:10} {event:16} -> {after:10} {' '.join(kinds)}")
    print(f"{count + 1} histories and rounds, {len(coverage)} transitions, no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
