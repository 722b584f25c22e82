"""Trains on 4 ranks while faults happen, one every second or two, and counts what they did: `make soak-faults`.

    python tests/soak_faults.py --minutes 30 --json soak-faults.json

Ranks are forked, and compute by sleep, on one host or, with --hosts, each on a host of its own: network namespaces whose
links are also cut, slow and lossy (as root). A world of ranks trains until its faults are over or only two ranks are
left, and the next one follows, in another mode. A lost rank is not replaced. What is counted and must be 0:

- hangs: ranks that make no step after a loss, or do not end in time;
- crashes: ranks that ended or raised without a fault of their own;
- wrong: sums and averages that are not what they must be;
- orphans and leftovers: processes of ended ranks, and names in /dev/shm.

Throughput is that of the ranks that live and are not stopped, relative to what all make before the first fault. The
time to the next step is that from a kill to the end of the first step that a survivor began after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosts
import leftovers
import numpy as np
from fogdist.testing.faults import Fault, Schedule, cut_link, lossy_link, slow_link
from fogdist.testing.faults.schedule import Kind
from harness import Outcome, RankFailures, World
from soak_modes import (
    COMPUTE_SECONDS,
    GROUP_TIMEOUT,
    MODES,
    OWN,
    RANKS,
    Board,
    Mode,
    Report,
    keep_store,
    train,
)

# With fewer there is nothing to exchange.
LEAST_LIVING = 2
# Steps that each rank makes before its own pace is measured, and the seconds of that, before the first fault.
WARM_STEPS, OWN_SECONDS = 10, 1.5
# Steps that ranks make once they are told to end, so that all hear it before.
OVER_STEPS = 20
# In which ranks make their first steps, at most.
START_SECONDS = 60.0
# Frequencies of faults on several hosts. The link of a rank that is cut stays so, and the rank counts as lost.
HOST_KINDS: dict[Kind, float] = {"kill": 2.0, "cut": 2.0, "stop": 1.0, "slow": 1.0, "lossy": 1.0}
LOST_BY: tuple[Kind, ...] = ("kill", "segfault", "cut")
# Of links, while they last.
SLOW_RATE, LOSS = "20mbit", 0.05
# Seconds in which the system removes what ended ranks had.
SETTLE_SECONDS = leftovers.SETTLE_SECONDS
# Seconds after which a host counts as lost.
HOST_TIMEOUT = 4
# How long a rank is stopped or hangs, in seconds: less than a timeout.
PAUSES = (0.1, 0.8)


@dataclass
class Pace:
    """Steps of ranks, and the seconds in which they could make them."""

    steps: int = 0
    seconds: float = 0.0

    def add(
        self, ends: np.ndarray, begin: float, until: float, pauses: Sequence[tuple[float, float]]
    ) -> None:
        """Adds what a rank has made between two times, of which pauses are left out."""
        self.steps += int(((ends > begin) & (ends <= until)).sum())
        self.seconds += until - begin - _covered(pauses, begin, until)

    @property
    def rate(self) -> float:
        """Steps of a rank in a second."""
        return self.steps / self.seconds if self.seconds else 0.0


@dataclass
class Totals:
    """What was counted in some worlds of a mode.

    Attributes:
        worlds: How many.
        faults: How many of each kind.
        hangs: Of ranks.
        crashes: Of ranks.
        wrong: Sums and averages.
        orphans: Processes that were left.
        leftovers: Names in /dev/shm that were left.
        raised: Operations that raised on survivors because a rank was lost.
        steps: That were made while faults happened, and the seconds in which ranks could make them.
        own_steps: The same of the time before the first fault.
        next_step: Seconds from each kill to the next step of each survivor.
        losses: The loss of a survivor at its end, relative to that at its start.
        problems: In words.
    """

    worlds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    crashes: int = 0
    wrong: int = 0
    orphans: int = 0
    leftovers: int = 0
    raised: int = 0
    steps: Pace = field(default_factory=Pace)
    own_steps: Pace = field(default_factory=Pace)
    next_step: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def failures(self) -> int:
        """What must be 0."""
        return self.hangs + self.crashes + self.wrong + self.orphans + self.leftovers


class Soak:
    """Worlds of ranks, one after the other, in each of which faults happen.

    Args:
        modes: By name.
        seed: Of all schedules.
        every: Least and greatest time from one fault to the next, in seconds.
        seconds: Of a world, at most.
        on_hosts: Whether each rank is on a host of its own.

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
    ) -> None:
        self._modes, self._seed, self._every, self._seconds = modes, seed, every, seconds
        self._on_hosts = on_hosts
        self.totals = {mode: Totals() for mode in modes}

    def run(self, number: int) -> None:
        """Runs the world of this number."""
        mode = list(self._modes)[number % len(self._modes)]
        schedule = Schedule.random(
            self._seed * 1_000_000 + number,
            RANKS,
            until=self._seconds,
            every=self._every,
            kinds=HOST_KINDS if self._on_hosts else self._modes[mode].kinds,
            seconds=PAUSES,
            least_living=LEAST_LIVING,
            lost_by=LOST_BY,
        )
        # Once two ranks are left, what follows says little about the loss of a rank.
        ends = [fault.when for fault in schedule.faults if fault.kind in LOST_BY]
        last = ends[RANKS - LEAST_LIVING - 1] if len(ends) >= RANKS - LEAST_LIVING else self._seconds
        chosen = Schedule(fault for fault in schedule.faults if fault.when <= last)
        tail = self._modes[mode].tail + (2 * HOST_TIMEOUT if self._on_hosts else 0)
        self._run_world(mode, chosen, last + tail, self.totals[mode])

    def _run_world(self, mode: str, schedule: Schedule, seconds: float, totals: Totals) -> None:
        before = leftovers.shared_memory_entries()
        totals.worlds += 1
        kind = self._modes[mode]
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fog-soak-"))
            environment = stack.enter_context(kind.around())
            names: list[str] | None = None
            if self._on_hosts:
                names = stack.enter_context(hosts.unskipped_hosts(RANKS + 1))  # the last one has the Store
                environment |= hosts.ACROSS["UCX"] | {"FOG_HOST_TIMEOUT": str(HOST_TIMEOUT)}
            board = Board(Path(folder, "board"))
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
                return
            if names is not None:  # the end of the hosts ends it
                multiprocessing.get_context("forkserver").Process(
                    target=keep_store, args=(names[RANKS],), daemon=True
                ).start()
            faults = _Faults(world, board, schedule, seconds, names)
            faults.start()
            outcomes = world.run_by_rank(
                train,
                [(kind, str(Path(folder, "board")), names and names[rank]) for rank in range(RANKS)],
                timeout=START_SECONDS + OWN_SECONDS + seconds + kind.patience,
            )
            faults.finish()
            self._judge(mode, outcomes, faults, board, totals)
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

    def _judge(
        self, mode: str, outcomes: Sequence[Outcome], faults: _Faults, board: Board, totals: Totals
    ) -> None:
        """Adds up what ranks report, and their steps."""
        totals.faults.update(fault.kind for _, fault in faults.happened)
        for outcome in outcomes:
            if outcome.state == "returned":
                report: Report = outcome.value
                totals.wrong += len(report.wrong)
                totals.problems += [f"rank {outcome.rank}, {what}" for what in report.wrong[:3]]
                totals.raised += report.raised
                if report.first_loss:
                    totals.losses.append(report.last_loss / report.first_loss)
            elif outcome.state == "stuck":
                totals.hangs += 1
                totals.problems.append(str(outcome))
            elif outcome.rank not in faults.ended:
                totals.crashes += 1
                totals.problems.append(str(outcome))
        if faults.began is None:
            return
        all_pauses = [pause for pauses in faults.pauses.values() for pause in pauses]
        for rank in range(RANKS):
            ends = board.ends[rank, : int(board.steps[rank])]
            until = faults.ended.get(rank, faults.over)
            pauses = all_pauses if self._modes[mode].all_wait else faults.pauses.get(rank, [])
            totals.own_steps.add(ends, faults.warm, faults.began, ())
            totals.steps.add(ends, faults.began, until, pauses)
            if rank in faults.ended:
                continue
            for when in faults.ended.values():
                after = np.flatnonzero(ends > when)
                if len(after) > 1:  # the first one may have begun before
                    totals.next_step.append(float(ends[after[1]] - when))
                else:
                    totals.hangs += 1
                    totals.problems.append(
                        f"rank {rank} made no step in {faults.over - when:.1f} s after a loss"
                    )


class _Faults(threading.Thread):
    """Injects the faults of a world while its ranks train, and says when the training is over.

    Attributes:
        warm: When all ranks had made some steps.
        began: When the first fault could happen; None before.
        over: When the ranks were told to end.
        ended: When ranks were killed or crashed, by rank.
        pauses: From when to when ranks were stopped or hung, by rank.
        happened: The faults, each with its time.
    """

    def __init__(
        self, world: World, board: Board, schedule: Schedule, seconds: float, names: list[str] | None
    ) -> None:
        super().__init__(daemon=True)
        self._names = names
        self._world, self._board, self._schedule, self._seconds = world, board, schedule, seconds
        self._no_more = threading.Event()
        self._cuts = contextlib.ExitStack()
        self.warm = 0.0
        self.began: float | None = None
        self.over = 0.0
        self.ended: dict[int, float] = {}
        self.pauses: dict[int, list[tuple[float, float]]] = {}
        self.happened: list[tuple[float, Fault]] = []

    def run(self) -> None:
        while self._board.steps.min() < WARM_STEPS:
            if self._no_more.wait(0.01):
                return
        self.warm = time.monotonic()
        if self._no_more.wait(OWN_SECONDS):
            return
        self.began = time.monotonic()
        self._schedule.run(self._inject, until=self._no_more)
        self._no_more.wait(max(0.0, self.began + self._seconds - time.monotonic()))
        self.over = time.monotonic()
        # Ranks that exchange in step end after the same one, which none has reached yet.
        self._board.over[0] = self._board.steps.max() + OVER_STEPS

    def finish(self) -> None:
        """Returns when no fault will happen any more."""
        self._no_more.set()
        self.join()
        self._cuts.close()

    def _inject(self, fault: Fault) -> None:
        if self._board.lost[fault.rank]:  # since the schedule was drawn with other times
            return
        begin = time.monotonic()
        self.happened.append((begin, fault))
        if fault.kind in LOST_BY:
            self._board.lost[fault.rank] = 1.0
            self.ended[fault.rank] = begin
        if fault.kind in OWN:
            self._board.seconds[fault.rank] = fault.seconds
            self._board.order[fault.rank] = 1.0 + OWN.index(fault.kind)
            time.sleep(fault.seconds)
        elif self._names is not None and fault.kind in ("cut", "slow", "lossy"):
            self._disturb(fault, self._names[fault.rank])
        else:
            fault.inject(self._world.pid(fault.rank))
        if fault.kind in ("stop", "deadlock"):
            self.pauses.setdefault(fault.rank, []).append((begin, time.monotonic() + COMPUTE_SECONDS))

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


def _covered(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` that at least one span covers."""
    covered, reached = 0.0, begin
    for first, last in sorted(spans):
        until = min(last, end)
        if until > max(first, reached):
            covered += until - max(first, reached)
            reached = until
    return covered


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The least of the values that so many percent of them do not exceed; None if there are none."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(percent * len(ordered)) // 100) - 1)] if ordered else None


def result(soak: Soak) -> dict[str, Any]:
    """What a soak has shown, for JSON."""
    modes = {}
    for mode, totals in soak.totals.items():
        own = totals.own_steps.rate
        modes[mode] = {
            "worlds": totals.worlds,
            "faults": dict(totals.faults),
            "hangs": totals.hangs,
            "crashes": totals.crashes,
            "wrong": totals.wrong,
            "orphans": totals.orphans,
            "leftovers": totals.leftovers,
            "operations_raised": totals.raised,
            "steps": totals.steps.steps,
            "steps_per_second": totals.steps.rate,
            "throughput": totals.steps.rate / own if own else None,
            "next_step_seconds": {
                "samples": len(totals.next_step),
                "p50": percentile(totals.next_step, 50),
                "p99": percentile(totals.next_step, 99),
                "max": max(totals.next_step, default=None),
            },
            "relative_loss": {
                "median": percentile(totals.losses, 50),
                "max": max(totals.losses, default=None),
            },
            "problems": totals.problems[:20],
        }
    return {
        "ranks": RANKS,
        "faults": sum(sum(totals.faults.values()) for totals in soak.totals.values()),
        "failures": sum(totals.failures for totals in soak.totals.values()),
        "modes": modes,
    }


def table(found: Mapping[str, Any]) -> str:
    """The result as text."""
    columns = [
        "worlds",
        "faults",
        "hangs",
        "crashes",
        "wrong",
        "orphans",
        "leftovers",
        "throughput",
        "next step p50",
        "p99",
    ]
    rows = [["mode", *columns]]
    for mode, values in found["modes"].items():
        next_step = values["next_step_seconds"]
        rows.append(
            [
                mode,
                str(values["worlds"]),
                str(sum(values["faults"].values())),
                *(str(values[name]) for name in ("hangs", "crashes", "wrong", "orphans", "leftovers")),
                "-" if values["throughput"] is None else f"{100 * values['throughput']:.1f} %",
                *("-" if next_step[p] is None else f"{1e3 * next_step[p]:.0f} ms" for p in ("p50", "p99")),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)


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
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    leftovers.isolate()
    modes = {name: MODES[name] for name in options.modes}
    soak = Soak(modes, options.seed, tuple(options.every), on_hosts=options.hosts)
    begin = time.monotonic()
    number = 0
    while time.monotonic() < begin + 60 * options.minutes:
        soak.run(number)
        number += 1
        if number % 10 == 0:
            print(f"{(time.monotonic() - begin) / 60:.1f} minutes\n{table(result(soak))}", flush=True)
    found = result(soak) | {"seed": options.seed, "minutes": (time.monotonic() - begin) / 60}
    print(f"{found['faults']} faults in {found['minutes']:.1f} minutes\n{table(found)}")
    for values in found["modes"].values():
        for problem in values["problems"]:
            print(problem)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(found["failures"] > 0)


if __name__ == "__main__":
    import soak_faults  # ranks find its functions by this name

    sys.exit(soak_faults.main())
