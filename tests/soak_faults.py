"""Trains on 4 ranks while faults happen, one every second or so, and counts what they did: `make soak-faults`.

    python tests/soak_faults.py --minutes 30 --json soak-faults.json

Ranks are forked, and compute by sleep, on one host or, with --hosts, each on a host of its own: network namespaces whose
links are also cut, slow and lossy (as root). A world of ranks trains until its faults are over or only two ranks are
left, and the next one follows, in another mode. In every third world the second loss comes while the ranks still
handle the first one. A lost rank is not replaced. What is counted and must be 0:

- hangs: ranks that make no step after a loss, or do not end in time;
- crashes: ranks that ended or raised without a fault of their own;
- wrong: sums and averages that are not what they must be;
- orphans and leftovers: processes of ended ranks, and names in /dev/shm.

Every so many worlds of a mode (--twins) run a second time without faults, right before or after, with the same seed and
for as long. The loss of survivors is compared with that of the same ranks without faults after as many steps.
Throughput is that of the ranks that live and are not stopped, relative to that of as many ranks in times without
faults: in the twins, and from some time after one fault to the next one. The time to the next step is that from a loss
to the end of the first step that a survivor began after it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import hosts
import leftovers
import numpy as np
from harness import Outcome, RankFailures, World
from hosts import cut_link, lossy_link, slow_link
from injected_faults import Fault, Kind, Schedule
from soak_modes import (
    COMPUTE_SECONDS,
    GROUP_TIMEOUT,
    OWN,
    RANKS,
    Asynchronous,
    AsynchronousOnLoss,
    Board,
    Collectives,
    Mode,
    Neighbors,
    Reconfigured,
    Report,
    keep_store,
    train,
)
from soak_operations import Operations
from soak_totals import ENDS, Pace, Totals, append, loss_ratio, result, table

MODES: dict[str, type[Mode]] = {
    "asynchronous": Asynchronous,
    "asynchronous-on-loss": AsynchronousOnLoss,
    "collectives": Collectives,
    "neighbors": Neighbors,
    "operations": Operations,
    "reconfigured": Reconfigured,
}
# With fewer there is nothing to exchange.
LEAST_LIVING = 2
# Steps that each rank makes before the first fault.
WARM_STEPS = 10
# Steps that ranks make once they are told to end, so that all hear it before.
OVER_STEPS = 20
# In which ranks make their first steps, at most.
START_SECONDS = 60.0
# In which a rank comes to the moment at which it is to end, at most.
MOMENT_SECONDS = 10.0
# Frequencies of faults on several hosts. The link of a rank that is cut stays so, and the rank counts as lost.
HOST_KINDS: dict[Kind, float] = {"kill": 2.0, "cut": 1.0, "stop": 1.5, "slow": 1.5, "lossy": 1.5}
LOST_BY: tuple[Kind, ...] = ("kill", "segfault", "cut")
# Of links, while they last.
SLOW_RATE, LOSS = "20mbit", 0.05
# Seconds in which the system removes what ended ranks had.
SETTLE_SECONDS = leftovers.SETTLE_SECONDS
# Seconds after which a host counts as lost.
HOST_TIMEOUT = 4
# Seconds for which a fault disturbs the others after its end: a second, and for a link the time until it counts as lost.
DISTURBED, DISTURBED_BY_CUT = 1.0, 1.5 * HOST_TIMEOUT + 1.0
# How long a rank is stopped or hangs, in seconds: less than a timeout.
PAUSES = (0.1, 0.8)
# Of every so many worlds of a mode, one has its second loss so many seconds after the first, at most.
CLOSE, CLOSE_SECONDS = 3, 0.3


class Soak:
    """Worlds of ranks, one after the other, in each of which faults happen.

    Args:
        modes: By name.
        seed: Of all schedules, and of the data.
        every: Least and greatest time from one fault to the next, in seconds.
        seconds: Of a world, at most.
        on_hosts: Whether each rank is on a host of its own.
        twins: Of every so many worlds of a mode, one runs without faults as well; 0 for none.

    Attributes:
        totals: By mode.
    """

    def __init__(
        self,
        modes: Mapping[str, type[Mode]],
        seed: int,
        every: tuple[float, float] = (0.5, 2.0),
        seconds: float = 12.0,
        on_hosts: bool = False,
        twins: int = 0,
    ) -> None:
        self._modes, self._seed, self._every, self._seconds = modes, seed, every, seconds
        self._on_hosts, self._twins = on_hosts, twins
        self.totals = {mode: Totals() for mode in modes}
        self._moments: dict[str, Moments] = {}
        for mode, kind in modes.items():
            self.totals[mode].possible_moments = kind.moments
            if kind.moments:
                self._moments[mode] = Moments(kind.moments, seed)

    def run(self, number: int) -> None:
        """Runs the world of this number, and its twin."""
        mode, rounds = list(self._modes)[number % len(self._modes)], number // len(self._modes)
        seed = self._seed * 1_000_000 + number
        schedule = Schedule.random(
            seed,
            RANKS,
            until=self._seconds,
            every=self._every,
            kinds=HOST_KINDS if self._on_hosts else self._modes[mode].kinds,
            seconds=PAUSES,
            least_living=LEAST_LIVING,
            lost_by=LOST_BY,
        )
        # Once two ranks are left, what follows says little about the loss of a rank.
        losses = [fault for fault in schedule.faults if fault.kind in LOST_BY]
        last = self._seconds
        if len(losses) >= RANKS - LEAST_LIVING:
            losses = losses[: RANKS - LEAST_LIVING]
            if rounds % CLOSE == CLOSE - 1:
                *before, end = losses
                when = before[-1].when + random.Random(seed).uniform(0.0, CLOSE_SECONDS)
                losses = [*before, replace(end, when=round(when, 3))]
            last = losses[-1].when
        others = [fault for fault in schedule.faults if fault.kind not in LOST_BY and fault.when <= last]
        faults = Schedule([*losses, *others])
        has_twin = self._twins > 0 and rounds % self._twins == 0
        # What else runs on the machine changes slowly, so it must not favour one of the two.
        twin_first = has_twin and rounds // self._twins % 2 == 1
        totals = self.totals[mode]
        if twin_first:
            others_losses = self._run_world(mode, Schedule([]), last, seed, totals, is_twin=True)
        own_losses = self._run_world(mode, faults, last, seed, totals)
        if has_twin and not twin_first:
            others_losses = self._run_world(mode, Schedule([]), last, seed, totals, is_twin=True)
        if has_twin:
            totals.twins += 1
            ranks = sorted(set(own_losses) & set(others_losses))
            ratio = loss_ratio([own_losses[r] for r in ranks], [others_losses[r] for r in ranks])
            if ratio is not None:
                totals.loss_ratios.append(ratio)

    def _run_world(
        self, mode: str, schedule: Schedule, last: float, seed: int, totals: Totals, is_twin: bool = False
    ) -> dict[int, list[float]]:
        """Runs a world, and adds up what happens; returns the losses of its survivors.

        Args:
            mode: Its name.
            schedule: The faults.
            last: When the last of them may come, in seconds from the first steps.
            seed: Of the data.
            totals: To add to.
            is_twin: Whether the world shows what ranks do without faults.
        """
        before = leftovers.shared_memory_entries()
        totals.worlds += not is_twin
        kind = self._modes[mode]
        # A rank that is cut off is noticed late; then it notices itself that the Store is silent.
        is_cut = any(fault.kind == "cut" for fault in schedule.faults)
        tail = kind.tail + (2 * HOST_TIMEOUT if is_cut else 0)
        losses: dict[int, list[float]] = {}
        begin = time.monotonic()
        marks = [begin]
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fog-soak-"))
            environment = stack.enter_context(kind.around())
            names: list[str] | None = None
            if self._on_hosts:
                names = stack.enter_context(hosts.unskipped_hosts(RANKS + 1))  # the last one has the Store
                environment |= {"FOG_HOST_TIMEOUT": str(HOST_TIMEOUT)}
            board = Board(Path(folder, "board"))
            board.seed[0] = seed
            try:
                world = World(
                    RANKS,
                    timeout=GROUP_TIMEOUT,
                    environment=environment,
                    initialize=kind.initialize and names is None,
                )
            except RankFailures as failures:
                totals.hangs += 1
                totals.problems.append(str(failures))
                return losses
            stack.callback(world.abandon)
            if names is not None:  # the end of the hosts ends it
                multiprocessing.get_context("forkserver").Process(
                    target=keep_store, args=(names[RANKS],), daemon=True
                ).start()
            faults = _Faults(
                world, board, schedule, last, tail, kind.patience, names, self._moments.get(mode)
            )
            faults.start()
            outcomes = world.run_by_rank(
                train,
                [(kind, str(Path(folder, "board")), names and names[rank]) for rank in range(RANKS)],
                timeout=START_SECONDS + last + tail + 2 * kind.patience,
            )
            faults.finish()
            marks += [faults.began or time.monotonic(), time.monotonic()]
            losses = self._judge(mode, outcomes, faults, board, totals, is_twin)
            if not world.broken:
                try:
                    world.close()
                except RankFailures as failures:
                    stuck = [o for o in failures.outcomes if o.state == "stuck"]
                    totals.hangs += len(stuck)
                    totals.crashes += sum(o.state != "returned" for o in failures.outcomes) - len(stuck)
                    totals.problems.append(f"{mode}, end: {failures}")
        if left := leftovers.left_behind(before, settle=SETTLE_SECONDS):
            totals.orphans += len(leftovers.leftover_processes())
            totals.leftovers += len(leftovers.shared_memory_entries() - before)
            totals.problems.append(left)
        marks.append(time.monotonic())
        spent = dict(zip(("start", "training", "end"), np.diff(marks), strict=True))
        totals.seconds.update({name: float(seconds) for name, seconds in spent.items()})
        what = "no faults" if is_twin else ", ".join(fault.kind for _, fault in faults.happened)
        text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items())
        print(f"{time.strftime('%H:%M:%S')} {mode}: {what}; {text}; {totals.failures} failures", flush=True)
        return losses

    def _judge(
        self,
        mode: str,
        outcomes: Sequence[Outcome],
        faults: _Faults,
        board: Board,
        totals: Totals,
        is_twin: bool,
    ) -> dict[int, list[float]]:
        """Adds up what ranks report, and their steps; returns the losses of survivors."""
        totals.faults.update(fault.kind for _, fault in faults.happened)
        losses: dict[int, list[float]] = {}
        for outcome in outcomes:
            if outcome.state == "returned":
                report: Report = outcome.value
                totals.wrong += len(report.wrong)
                totals.problems += [f"{mode}, rank {outcome.rank}, {what}" for what in report.wrong[:3]]
                totals.raised += report.raised
                if report.losses and outcome.rank not in faults.ended:
                    losses[outcome.rank] = report.losses
                    totals.last_losses += [report.losses[-1] / report.losses[0]] * (not is_twin)
            elif outcome.state == "stuck":
                totals.hangs += 1
                totals.problems.append(f"{mode}: {outcome}")
            elif outcome.rank not in faults.ended:
                totals.crashes += 1
                totals.problems.append(f"{mode}: {outcome}")
        if faults.began is None:
            return losses
        if mode in self._moments:
            totals.moments.update(self._moments[mode].hit(place) for place in faults.moments_hit)
        all_pauses = [pause for pauses in faults.pauses.values() for pause in pauses]
        disturbed = [
            (begin, begin + fault.seconds + (DISTURBED_BY_CUT if fault.kind == "cut" else DISTURBED))
            for begin, fault in faults.happened
        ]
        # A rank may be killed later than its fault began.
        disturbed += [(when, when + DISTURBED) for when in faults.ended.values()]
        marks = [faults.began, *sorted(faults.ended.values()), faults.over]
        for rank in range(RANKS):
            ends = board.ends[rank, : int(board.steps[rank])]
            pauses = all_pauses if self._modes[mode].all_wait else faults.pauses.get(rank, [])
            for fewer, (begin, until) in enumerate(itertools.pairwise(marks)):
                pace = totals.paces.setdefault(RANKS - fewer, Pace())
                if is_twin:
                    pace.add_own(ends, begin, until)
                elif faults.ended.get(rank, until) >= until:
                    pace.add(ends, begin, until, pauses, disturbed)
            if is_twin:
                continue
            if rank in faults.ended:
                continue
            for lost, when in faults.ended.items():
                after = np.flatnonzero(ends > when)
                if len(after) > 1:  # the first one may have begun before
                    seconds = totals.next_step.setdefault(faults.ended_by[lost], [])
                    seconds.append(float(ends[after[1]] - when))
                else:
                    totals.hangs += 1
                    totals.problems.append(
                        f"{mode}: rank {rank} made no step in {faults.over - when:.1f} s after a loss"
                    )
        return losses


class Moments:
    """Chooses the moments of work at which ranks are killed: those that were hit least.

    A moment may be missed, for example if an operation is over before the timer that is to end the rank within it. So it is
    tried again, but after some times no more often than others are hit.

    Args:
        names: Of the moments; their numbers count from 1.
        seed: Of the moment to begin with.
    """

    TRIES = 4

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._names = names
        self._hits, self._tries = Counter[str](), Counter[str]()
        self._first = random.Random(seed).randrange(len(names))

    def next(self) -> int:
        """Returns the number of the moment to try now."""
        order = (1 + (self._first + place) % len(self._names) for place in range(len(self._names)))
        place = min(order, key=self._cost)
        self._tries[self._names[place - 1]] += 1
        return place

    def hit(self, place: int) -> str:
        """Counts a moment at which a rank was killed; returns its name."""
        name = self._names[place - 1]
        self._hits[name] += 1
        return name

    def _cost(self, place: int) -> tuple[int, int]:
        name = self._names[place - 1]
        return max(self._hits[name], self._tries[name] // self.TRIES), self._tries[name]


class _Faults(threading.Thread):
    """Injects the faults of a world while its ranks train, and says when the training is over.

    Args:
        world: The ranks.
        board: Theirs.
        schedule: The faults.
        last: When the last of them may come, in seconds from the first steps.
        tail: Seconds from the last one to the end.
        patience: For so many seconds more, living ranks may not have made a step since the last loss.
        names: Of hosts, if each rank is on one of its own.
        moments: At which ranks are to be killed, if the mode knows them.

    Attributes:
        began: When all ranks had made some steps, and the first fault could happen; None before.
        over: When the ranks were told to end.
        ended: When ranks were killed, crashed or were cut off, by rank.
        ended_by: By which kind of fault.
        moments_hit: Moments at which ranks were killed.
        pauses: From when to when ranks were stopped or hung, by rank.
        happened: The faults, each with its time.
    """

    def __init__(
        self,
        world: World,
        board: Board,
        schedule: Schedule,
        last: float,
        tail: float,
        patience: float,
        names: list[str] | None,
        moments: Moments | None,
    ) -> None:
        super().__init__(daemon=True)
        self._names, self._moments = names, moments
        self._world, self._board, self._schedule, self._last, self._tail = world, board, schedule, last, tail
        self._patience = patience
        self._no_more = threading.Event()
        self._cuts = contextlib.ExitStack()
        # A link has one fault at a time.
        self._links = [threading.Lock() for _ in range(RANKS)]
        self._error: BaseException | None = None
        self.began: float | None = None
        self.over = 0.0
        self.ended: dict[int, float] = {}
        self.ended_by: dict[int, Kind] = {}
        self.moments_hit: list[int] = []
        self.pauses: dict[int, list[tuple[float, float]]] = {}
        self.happened: list[tuple[float, Fault]] = []

    def run(self) -> None:
        while self._board.steps.min() < WARM_STEPS:
            if self._no_more.wait(0.01):
                return
        self.began = time.monotonic()
        try:
            self._schedule.run(self._inject, until=self._no_more)
        except BaseException as error:  # the ranks are to end all the same
            self._error = error
        last = max([self.began + self._last, *self.ended.values()])
        self._no_more.wait(max(0.0, last + self._tail - time.monotonic()))
        # On a busy machine, ranks may take longer than that.
        while not self._have_stepped_since(last) and time.monotonic() < last + self._tail + self._patience:
            if self._no_more.wait(0.01):
                break
        self.over = time.monotonic()
        # Ranks that exchange in step end after the same one, which none has reached yet.
        self._board.over[0] = self._board.steps.max() + OVER_STEPS

    def _have_stepped_since(self, when: float) -> bool:
        """Whether all living ranks have begun and ended a step since then."""
        board = self._board
        made = {rank: int(board.steps[rank]) for rank in range(RANKS) if rank not in self.ended}
        return all(steps > 1 and board.ends[rank, steps - 2] > when for rank, steps in made.items())

    def finish(self) -> None:
        """Returns when no fault will happen any more; raises if one could not happen."""
        self._no_more.set()
        self.join()
        self._cuts.close()
        if self._error is not None:
            raise self._error

    def _inject(self, fault: Fault) -> None:
        if fault.rank in self.ended:  # since the schedule was drawn with other times
            return
        begin = time.monotonic()
        self.happened.append((begin, fault))
        if fault.kind in LOST_BY:
            self.ended_by[fault.rank] = fault.kind
        if fault.kind in ENDS and self._moments is not None:
            self._kill_at(self._moments.next(), fault)
            return
        if fault.kind in LOST_BY:
            self._board.lost[fault.rank] = 1.0
            self.ended[fault.rank] = begin
        if fault.kind in OWN:
            self._board.seconds[fault.rank] = fault.seconds
            self._board.order[fault.rank] = 1.0 + OWN.index(fault.kind)
            time.sleep(fault.seconds)
        elif self._names is not None and fault.kind in ("cut", "slow", "lossy"):
            with self._links[fault.rank]:
                self._disturb(fault, self._names[fault.rank])
        else:
            fault.inject(self._world.pid(fault.rank))
        if fault.kind in ("stop", "deadlock"):
            self.pauses.setdefault(fault.rank, []).append((begin, time.monotonic() + COMPUTE_SECONDS))

    def _kill_at(self, moment: int, fault: Fault) -> None:
        """Lets a rank end its process at a moment of its work; kills it if it does not come there."""
        rank, pid = fault.rank, self._world.pid(fault.rank)
        self._board.moment[rank] = moment
        deadline = time.monotonic() + MOMENT_SECONDS
        while not has_ended(pid) and time.monotonic() < deadline and not self._no_more.wait(0.002):
            pass
        came = has_ended(pid)
        self.ended[rank] = float(self._board.died[rank]) if came else time.monotonic()
        if not came:
            fault.inject(pid)
        self._board.lost[rank] = 1.0
        if self._board.doing[rank]:
            self.moments_hit.append(int(self._board.doing[rank]))

    def _disturb(self, fault: Fault, host: str) -> None:
        """Lets a fault of a link happen; one that is cut stays so until its host ends."""
        if fault.kind == "cut":
            self._cuts.enter_context(cut_link(hosts.INTERFACE, namespace=host))
            self.ended[fault.rank] = time.monotonic()  # from now on; steps went on until here
        elif fault.kind == "slow":
            with slow_link(hosts.INTERFACE, SLOW_RATE, namespace=host):
                time.sleep(fault.seconds)
        else:
            with lossy_link(hosts.INTERFACE, LOSS, namespace=host):
                time.sleep(fault.seconds)


def has_ended(pid: int) -> bool:
    """Whether a process has ended; it may not have been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the soak of the command line; returns 1 if something failed."""
    parser = argparse.ArgumentParser(description="Trains on 4 ranks while faults happen.")
    parser.add_argument("--minutes", type=float, default=3.0, help="of all worlds together (default: 3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=sorted(MODES))
    parser.add_argument(
        "--every", nargs=2, type=float, default=(0.5, 2.0), metavar="SECONDS", help="from fault to fault"
    )
    parser.add_argument("--hosts", action="store_true", help="a host for each rank, as root")
    parser.add_argument(
        "--twins",
        type=int,
        default=4,
        metavar="N",
        help="of N worlds, one runs without faults too; 0: none (default: 4)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="file to whose runs the result is added",
    )
    options = parser.parse_args(arguments)
    leftovers.isolate()
    modes = {name: MODES[name] for name in options.modes}
    soak = Soak(modes, options.seed, tuple(options.every), on_hosts=options.hosts, twins=options.twins)
    begin = time.monotonic()
    number = 0
    while time.monotonic() < begin + 60 * options.minutes:
        soak.run(number)
        number += 1
        if number % (5 * len(modes)) == 0:
            print(
                f"{(time.monotonic() - begin) / 60:.1f} minutes\n{table(result(soak.totals, RANKS))}",
                flush=True,
            )
    minutes = (time.monotonic() - begin) / 60
    place = "hosts" if options.hosts else "one host"
    found = {"place": place, "seed": options.seed, "minutes": round(minutes, 2)} | result(soak.totals, RANKS)
    print(f"{found['faults']} faults in {minutes:.1f} minutes\n{table(found)}")
    for totals in soak.totals.values():
        for problem in totals.problems[:20]:
            print(problem)
    if options.json is not None:
        append(options.json, found)
    return int(found["failures"] > 0)


if __name__ == "__main__":
    import soak_faults  # ranks find its functions by this name

    sys.exit(soak_faults.main())
