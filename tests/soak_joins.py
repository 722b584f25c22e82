"""Kills ranks and hosts of jobs that other processes join meanwhile, and counts what that did: `make soak-joins`.

    python tests/soak_joins.py --minutes 30 --json soak-joins.json

Each world is a job of `fog run --keep-going` whose four ranks train (`joining_ranks`) on emulated hosts: all on one, or
on three, each with an agent and a Store of its own, as root. A kill ends one of

- a rank, which its agent starts again, so that it joins the others;
- a host: all of its ranks, the agent and the Store; a new part of the job starts there. The host of the Store in use
  is taken most often, also when the lowest rank is on it;
- a silent host: all packets of its link are dropped before it ends, so that nobody is told of the end;
- a process that joins.

They come while ranks train, and every second time the next one comes while others still handle the first. Where a
process cannot join, ranks are killed until two are left. What is counted and must be 0:

- hangs: ranks that make no step after a loss, that do not end, and processes that do not come in; such a job is lost;
- crashes: members that raised, or ended without a kill;
- wrong: averages that are not what they must be (`check_averages`);
- orphans and leftovers: processes and names in /dev/shm.

The time to the next step is that from a kill to the end of the first step that a survivor began after it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hosts
import joining_ranks
import leftovers
import numpy as np
from forked_programs import ForkedJob
from hosts import INTERFACE, address, cut_link, move_to_host
from joining_ranks import ADMITS, COOL_STEPS, FIRST_TARGET, JOINS, LOSES, MOMENTS, RATE, TRAINS, JoinBoard
from soak_faults import Moments, has_ended
from soak_modes import RANKS
from soak_totals import FAILURES, Pace, Totals, append, percentile, result, throughput

# Kinds of training that processes can join, and those that refuse them.
JOINED = ["wrapper", "wrapper/patience", "wrapper/async"]
JOINED += [
    f"DecentralizedSGD{words}" for words in ("", "/ring/awc", "/cta", "/patience", "+tune", "/ring+average")
]
JOINED += ["LocalSGD", "LocalSGD/streaming", "DiLoCo", "DiLoCo/streaming", "GASLoC", "PushSumSGD/ring"]
JOINED += ["DecentralizedAdamW", "ChocoSGD/ring", "AsynchronousGossip"]
REFUSED = ["WinPut", "GradientTracking/ring", "ExactDiffusion/ring", "SparseLoCo/ring"]
# In which every step moves the mean of the ranks by the mean of their gradients, and by nothing else.
KEEPS_MEAN = {"wrapper", "DecentralizedSGD", "DecentralizedSGD/ring/awc", "DecentralizedSGD/cta", "LocalSGD"}
KEEPS_MEAN |= {"PushSumSGD/ring", "ChocoSGD/ring", "GradientTracking/ring", "ExactDiffusion/ring"}
# Where all ranks have the same parameters after every so many steps.
ALIKE_AFTER = {"LocalSGD": 2, "DecentralizedSGD/ring+average": joining_ranks.AVERAGE_STEPS}
# By which values may be outside of the ranks' numbers, because of momentum or of an inexact codec.
MARGIN = {"DiLoCo": 1.5, "SparseLoCo": 1.5, "GradientTracking": 0.5, "ExactDiffusion": 0.5}
# How far ranks may be apart at the end, when they have only mixed for some time.
APART = {"DiLoCo": 0.5, "SparseLoCo": 0.5, "DecentralizedSGD+tune": 0.1}

# The host of each rank, and how many there are.
ON_HOSTS, ON_ONE = (0, 1, 2, 2), (0, 0, 0, 0)
HOST_TIMEOUT = 4
# Which of them: the agents start what is lost again so often.
RESTARTS = 10_000
PORT = 29600
# Seconds: for ranks to begin; for a step after a loss; for all to be in again; for a moment to come; for all to end.
START, PATIENCE, REJOIN, MOMENT, END = 60.0, 20.0, 60.0, 4.0, 60.0
JOBS_OF_REFUSED = 5
# A time to the next step whose reason is of interest, in seconds.
SLOW = 2.0
# Steps before the first kill, and before the end of a training, that all ranks hear of it.
WARM_STEPS, OVER_STEPS = 40, 25
# Seconds without a kill, after all are in; and after which a join disturbs nobody any more.
CALM, SETTLED = (0.4, 1.2), 0.3
# Of a kill in an exchange, after its begin.
WITHIN = 3e-3


@dataclass
class Kill:
    """What has ended.

    Attributes:
        kind: "rank", "host", "silent host" or "joining process".
        when: On the clock of the host.
        ranks: The members that ended with it.
        special: Whether the host had the lowest rank, the Store in use and its agent; "rank 0" if this was rank 0.
    """

    kind: str
    when: float
    ranks: tuple[int, ...]
    special: str = ""


@dataclass
class JoinTotals(Totals):
    """As `Totals`; beside them, kills of hosts with the lowest rank and the Store in use, and what joined.

    Attributes:
        special: Kills of such hosts, and of those with rank 0.
        joins: Processes that came in.
        repeated: Why processes that joined have raised, and how often; others came in their place.
        checked: Averages that were compared.
    """

    special: Counter[str] = field(default_factory=Counter)
    joins: int = 0
    repeated: Counter[str] = field(default_factory=Counter)
    checked: int = 0


class JobLost(Exception):
    """The job did not go on; says why."""


def check_averages(board: JoinBoard, kind: str) -> tuple[int, list[str]]:
    """Compares what the ranks have written down with what averages must be; returns how many, and what is wrong.

    All values lie between the numbers to which ranks pull. In kinds that go in step, all members of an epoch make the same
    steps: the mean over them after a step is that before it, less the learning rate times the mean gradient, for each
    bucket; and after an average of all they have the same values. Steps in which the epoch changes are left out, because
    ranks may keep their own values in them.
    """
    wrong: list[str] = []
    name = kind.partition("/")[0].partition("+")[0]
    margin = MARGIN.get(name, 0.05)
    least, most = FIRST_TARGET - margin, FIRST_TARGET + RANKS - 1 + margin
    by_step: dict[tuple[int, int], dict[int, np.void]] = {}
    for rank in range(RANKS):
        records = board.records[rank, : int(board.steps[rank])]
        outside = (records["after"] < least) | (records["after"] > most) | ~np.isfinite(records["after"])
        for record in records[outside.any(axis=1)][:3]:
            wrong.append(f"rank {rank}, step {record['step']:.0f}: {record['after']} is no average")
        for record in records:
            if record["epochs"][0] == record["epochs"][1]:
                by_step.setdefault((int(record["epochs"][1]), int(record["step"])), {})[rank] = record
    checked, every = 0, ALIKE_AFTER.get(kind, 0)
    if not every and kind not in KEEPS_MEAN:
        return int(board.steps.sum()), wrong
    over = board.over[0] or np.inf
    for (epoch, step), found in by_step.items():
        living = int(next(iter(found.values()))["living"])
        if any(not living >> rank & 1 for rank in found) or living.bit_count() != len(found):
            continue
        checked += 1
        before = np.array([record["before"] for record in found.values()])
        after = np.array([record["after"] for record in found.values()])
        where = f"epoch {epoch}, step {step}, ranks {sorted(found)}"
        targets = np.array([[FIRST_TARGET + rank] for rank in found])
        rate = RATE if step <= over - COOL_STEPS else 0.0
        if kind in KEEPS_MEAN:
            expected = (before - rate * (before - targets)).mean(axis=0)
            if not np.allclose(after.mean(axis=0), expected, rtol=0.0, atol=1e-6):
                wrong.append(f"{where}: mean {after.mean(axis=0)}, must be {expected}")
        if every and step % every == 0 and not np.allclose(after, after[:1], rtol=0.0, atol=1e-9):
            wrong.append(f"{where}: values {after[:, 0]} after an average of all")
    return checked, wrong


class Job:
    """One job, its ranks and hosts, and what is killed of it.

    Args:
        kind: Of training.
        names: Of the emulated hosts.
        placement: The host of each rank.
        folder: For its files.
        moments: What ranks are to do when they are killed; shared by all jobs.
        draw: Of random numbers.
        silence: Of kills of hosts, the share of silent ones.
        calm: Least and greatest number of seconds without a kill, after all are in.

    Attributes:
        kills: So far.
        joined: When processes came in, with their ranks.
        hit: The moments at which something was killed.
        silent: From when to when silent hosts were not replaced yet.
        disturbed: From when to when kills and joins disturbed the others.
    """

    def __init__(
        self,
        kind: str,
        names: Sequence[str],
        placement: Sequence[int],
        folder: Path,
        moments: Mapping[tuple[str, ...], Moments],
        draw: random.Random,
        silence: float,
        calm: tuple[float, float],
    ) -> None:
        self._kind, self._names, self._placement, self._folder = kind, names, placement, folder
        self._moments, self._draw, self._silence, self._calm = moments, draw, silence, calm
        self._is_joined = kind in JOINED
        self.board = JoinBoard(folder / "board")
        self._hosts = sorted(set(placement))
        self._parts: dict[int, ForkedJob] = {}
        self._made: dict[int, int] = {}  # the steps of each number until its last process ended
        self._away: set[int] = set()  # hosts that were lost, and not replaced yet
        self._count = itertools.count()
        self.kills: list[Kill] = []
        self.joined: list[tuple[float, int]] = []
        self.hit: Counter[str] = Counter()
        self.silent: list[tuple[float, float]] = []
        self.disturbed: list[tuple[float, float]] = []
        self.lives: dict[int, list[list[float]]] = {}

    # --- processes ---

    def start(self) -> None:
        """Starts all ranks, and waits until they train."""
        for host in self._hosts:
            self._start_part(host)
        self._until(lambda: self.board.steps.min() >= WARM_STEPS, START, "the ranks do not begin")
        now = time.monotonic()
        self.lives = {rank: [[now, np.inf]] for rank in range(RANKS)}
        self.began = now

    def _start_part(self, host: int) -> None:
        program = Path(joining_ranks.__file__)
        words: list[str | Path] = ["-m", "fog_cli", "run", "--keep-going", "-np", str(RANKS)]
        if self._is_joined:
            words += ["--max-restarts", str(RESTARTS)]
        if len(self._hosts) > 1:
            slots = Counter(self._placement)
            listed = ",".join(f"{address(host)}:{slots[host]}" for host in self._hosts)
            words += ["-H", listed, "--only-host", str(host)]
        own = {
            "MASTER_PORT": str(PORT),
            "FOG_JOB_SECRET": "the secret of a soak",
            "TORCHELASTIC_RUN_ID": "soak",
        }
        own |= {"FOG_HOST_TIMEOUT": str(HOST_TIMEOUT), "_FOG_CONFIRM": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        words += [program, self._folder / "board", self._kind]
        self._away.discard(host)
        log = self._folder / f"part-{host}-{next(self._count)}"
        self._parts[host] = ForkedJob(words, log, own, partial(move_to_host, self._names[host]))

    def _processes_of(self, host: int) -> list[int]:
        """Returns what runs on a host, the agent and its guard first."""
        network = os.stat(f"/run/netns/{self._names[host]}").st_ino
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has just ended
                    if os.stat(entry / "ns/net").st_ino == network:
                        found.append(int(entry.name))
        ranks = set(map(int, self.board.process))
        return sorted(found, key=lambda pid: pid in ranks)

    # --- what is known ---

    def living(self) -> list[int]:
        """The ranks that take part, as the parent knows."""
        return [rank for rank in range(RANKS) if self.board.process[rank]]

    def _last(self, rank: int) -> np.void:
        return self.board.records[rank, int(self.board.steps[rank]) - 1]

    def _are_in(self) -> bool:
        """Whether all ranks take part in one epoch that knows all of them."""
        if len(self.living()) < RANKS:
            return False
        last = [self._last(rank) for rank in range(RANKS)]
        return len({float(each["epochs"][1]) for each in last}) == 1 and all(
            each["living"] == 2**RANKS - 1 for each in last
        )

    def _until(self, condition: Callable[[], bool], seconds: float, what: str, pause: float = 0.01) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.failures():
                raise JobLost(f"{what}: {self.failures()[0]}")
            if time.monotonic() > deadline:
                raise JobLost(f"{what} within {seconds:.0f} s; {self._described()}")
            time.sleep(pause)

    def _described(self) -> str:
        steps = [
            f"{self._last(rank)['step']:.0f} in epoch {self._last(rank)['epochs'][1]:.0f}"
            for rank in self.living()
        ]
        return f"ranks {self.living()} at steps {', '.join(steps)}; kills {self.kills[-3:]}"

    def told(self, name: str) -> list[dict[str, Any]]:
        """Returns the lines of a file of the ranks."""
        path = self._folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def failures(self) -> list[str]:
        """Returns the errors of members that were not killed, nor on a silent host."""
        found = []
        for told in self.told("failed"):
            was_killed = any(
                told["rank"] in kill.ranks and kill.when <= told["at"] < kill.when + 1 for kill in self.kills
            )
            if told["member"] and not was_killed:
                found.append(f"rank {told['rank']} raised: {told['error']}")
        return found

    # --- kills ---

    def episode(self) -> None:
        """Kills something, and perhaps something more while that is handled; returns when all are in again."""
        draw = self._draw
        time.sleep(draw.uniform(*self._calm))
        begin = time.monotonic()
        hosts_left = [host for host in self._hosts if self._ranks_on(host)]
        wants_host = len(hosts_left) > 1 and draw.random() < 0.6
        is_silent = wants_host and self._is_quorate and draw.random() < self._silence
        second = draw.random() < 0.5
        store = int(self.board.store[self.living()[0]])
        if wants_host:
            # The Store moves from host to host, so that each in turn is that of the Store.
            host = store if store in hosts_left and draw.random() < 0.8 else draw.choice(hosts_left)
            victims = self._ranks_on(host)
        else:
            victims = [draw.choice(self.living())]
        if len(self.living()) - len(victims) < (1 if self._is_joined else 2):
            return
        others = [rank for rank in self.living() if rank not in victims]
        follow = self._followed(victims, others, wants_host, is_silent) if second else None
        if follow is not None and MOMENTS[follow[1] - 1] in LOSES:
            self.board.moment[follow[0]] = follow[1]
        with contextlib.ExitStack() as stack:
            self._come_to(victims[0], self._moments[TRAINS].next())
            if wants_host:
                if is_silent:
                    stack.enter_context(
                        cut_link(INTERFACE, namespace=self._names[self._placement[victims[0]]])
                    )
                self._kill_host(self._placement[victims[0]], "silent host" if is_silent else "host")
            else:
                self._kill_rank(victims[0])
            if follow is not None and MOMENTS[follow[1] - 1] not in LOSES:
                self.board.moment[follow[0]] = follow[1]
            if is_silent:
                self._until_stepped()
        # The host is away while the next kill waits for a moment for which no process has to join.
        if wants_host and self._is_joined and (follow is None or MOMENTS[follow[1] - 1] not in LOSES):
            self._start_part(self._placement[victims[0]])
        if follow is not None:
            self._kill_again(*follow, wants_host)
        self._until_stepped()
        if self._is_joined:
            for host in sorted(self._away):
                self._start_part(host)
            self._until(self._are_in, REJOIN, "not all ranks come in")
        now = time.monotonic()
        self.disturbed.append((begin, now + SETTLED))
        if is_silent:
            self.silent.append((begin, now + SETTLED))
        for rank in range(RANKS):
            if self.board.process[rank] and self.lives[rank][-1][1] < np.inf:
                came = float(self.board.ends[rank, self._made[rank]])
                self.lives[rank].append([came, np.inf])
                self.joined.append((came, rank))

    @property
    def _is_quorate(self) -> bool:
        """Whether a silent host leaves enough ranks."""
        return len(self.living()) == RANKS

    def _ranks_on(self, host: int) -> list[int]:
        return [rank for rank in self.living() if self._placement[rank] == host]

    def _followed(
        self, victims: Sequence[int], others: Sequence[int], host: bool, silent: bool
    ) -> tuple[int, int] | None:
        """Returns the rank that is killed while others handle the loss of the first, and the moment."""
        draw = self._draw
        least = 1 if self._is_joined else 2
        kinds: list[tuple[str, ...]] = []
        if len(others) > least and not silent:
            kinds.append(LOSES[: 4 if host and self._is_joined else 3])
        if self._is_joined:
            kinds += [JOINS] + [ADMITS] * (len(others) > 1)
        if not kinds:
            return None
        names = draw.choice(kinds)
        place = self._moments[names].next()
        moment = MOMENTS[place - 1]
        if names is JOINS:
            return victims[0], place
        if moment in ADMITS[:2]:
            return min(others), place
        return draw.choice(list(others)), place

    def _come_to(self, rank: int, place: int) -> None:
        """Waits until a rank stands at a moment."""
        self.board.moment[rank] = place
        self._wait_for(rank, place, MOMENT)

    def _wait_for(self, rank: int, place: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.board.doing[rank] != place and time.monotonic() < deadline:
            time.sleep(0.0005)
        came = self.board.doing[rank] == place
        if came and MOMENTS[place - 1] == "in an exchange":
            time.sleep(self._draw.uniform(0.0, WITHIN))
        if came:
            self.hit[MOMENTS[place - 1]] += 1
        return came

    def _kill_again(self, rank: int, place: int, after_host: bool) -> None:
        """Kills a rank, or its host, or a process that joins, at a moment; none if that does not come."""
        moment, board = MOMENTS[place - 1], self.board
        joins = moment in JOINS
        seconds = REJOIN / 2 if joins or moment in ADMITS else MOMENT
        if not self._wait_for(rank, place, seconds):
            board.moment[rank] = 0.0
            return
        host = self._placement[rank]
        if (
            not joins
            and len(self._hosts) > 1
            and after_host
            and self._others_live(host)
            and self._draw.random() < 0.7
        ):
            self._kill_host(host, "host")
        elif joins:
            pid = self._joining(rank)
            if pid:
                os.kill(pid, signal.SIGKILL)
                self.kills.append(Kill("joining process", time.monotonic(), ()))
            board.moment[rank] = board.doing[rank] = 0.0
        else:
            self._kill_rank(rank)

    def _others_live(self, host: int) -> bool:
        return len(self.living()) - len(self._ranks_on(host)) >= (1 if self._is_joined else 2)

    def _joining(self, rank: int) -> int:
        """Returns the process that joins with this number; 0 if there is none any more."""
        part = self._parts[self._placement[rank]]
        return max(part.named(f"rank-{rank}"), default=0)

    def _kill_rank(self, rank: int) -> None:
        pid, now = int(self.board.process[rank]), time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._lose("rank", now, [rank])

    def _kill_host(self, host: int, kind: str) -> None:
        ranks, found = self._ranks_on(host), self._processes_of(host)
        living = self.living()
        special = ""
        if ranks and min(living) in ranks and int(self.board.store[min(living)]) == host:
            special = "rank 0" if 0 in ranks else "lowest rank"
        now = time.monotonic()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._away.add(host)
        self._lose(kind, now, ranks, special)

    def _lose(self, kind: str, when: float, ranks: Sequence[int], special: str = "") -> None:
        self.kills.append(Kill(kind, when, tuple(ranks), special))
        for rank in ranks:
            while not has_ended(int(self.board.process[rank])):
                time.sleep(0.001)
            self.lives[rank][-1][1] = when
            self._made[rank] = int(self.board.steps[rank])
            self.board.process[rank] = self.board.moment[rank] = self.board.doing[rank] = 0.0

    def _until_stepped(self) -> None:
        """Waits until all that live have begun and ended a step since the last kill."""
        last = self.kills[-1].when

        def have_stepped() -> bool:
            board = self.board
            made = {rank: int(board.steps[rank]) for rank in self.living()}
            return all(steps > 1 and board.ends[rank, steps - 2] > last for rank, steps in made.items())

        self._until(have_stepped, PATIENCE + HOST_TIMEOUT, "no step after a loss", 0.002)

    # --- the end ---

    def end(self) -> None:
        """Ends the training; the ranks that live have ended well afterwards."""
        board, living = self.board, self.living()
        self.over = time.monotonic()
        board.over[0] = max(self._last(rank)["step"] for rank in living) + OVER_STEPS + COOL_STEPS
        self._until(lambda: len(self.told("ended")) >= len(living), END, "ranks do not end")
        parts = [part for host, part in self._parts.items() if self._ranks_on(host)]
        self._until(lambda: all(part._process.poll() is not None for part in parts), END, "agents do not end")
        ends = [told["values"] for told in self.told("ended")]
        apart = float(np.ptp(ends, axis=0).max())
        name = self._kind.partition("/")[0]
        if apart > APART.get(name, 1e-3):
            raise JobLost(f"after some steps without learning, the ranks are {apart:.3g} apart: {ends}")

    def logs(self) -> str:
        """Returns the last words of all processes."""
        for host in self._hosts:
            for rank in range(RANKS):
                for pid in self._parts[host].named(f"rank-{rank}"):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        files = sorted(self._folder.glob("rank-*")) + sorted(self._folder.glob("part-*"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-12000:]}" for file in files)


class Soak:
    """Jobs, one after the other.

    Args:
        kinds: Of training.
        seed: Of all that is random.
        kills: Of each job with processes that join.
        keep: A folder for the last words of jobs that failed; none if it is not given.
        silence: Of the kills of hosts, the share of silent ones.
        calm: As of `Job`.

    Attributes:
        totals: By kind.
        paces: Of the living, by place, without the times of silent hosts.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        seed: int,
        kills: int = 12,
        keep: Path | None = None,
        silence: float = 0.12,
        calm: tuple[float, float] = CALM,
    ) -> None:
        self._calm = calm
        self._kinds, self._seed, self._kills, self._keep, self._silence = kinds, seed, kills, keep, silence
        self.totals = {kind: JoinTotals(possible_moments=MOMENTS) for kind in kinds}
        self.paces: dict[str, Pace] = {}
        self._moments = {names: _Numbered(names, seed) for names in (TRAINS, LOSES, LOSES[:3], ADMITS, JOINS)}

    def run(self, number: int) -> None:
        """Runs the job of this number."""
        kind = self._kinds[number % len(self._kinds)]
        place = "one host" if number % 4 == 3 else "hosts"
        totals, before = self.totals[kind], leftovers.shared_memory_entries()
        totals.worlds += 1
        placement = ON_ONE if place == "one host" else ON_HOSTS
        draw = random.Random(self._seed * 1_000_000 + number)
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fog-soak-")))
            names = stack.enter_context(hosts.unskipped_hosts(max(placement) + 1))
            job = Job(kind, names, placement, folder, self._moments, draw, self._silence, self._calm)
            problem = ""
            try:
                job.start()
                while len(job.kills) < self._kills:
                    if kind in REFUSED and len(job.living()) <= 2:
                        break
                    job.episode()
                job.end()
            except JobLost as lost:
                problem = str(lost)
                totals.hangs += not job.failures()
                totals.problems.append(f"{kind}, {place}, job {number}: {problem}")
            if failures := job.failures():
                totals.crashes += len(failures)
                totals.problems += [f"{kind}, {place}, job {number}: {each}" for each in failures]
            if not problem:
                self._count_left(job, totals, before)
            checked, wrong = check_averages(job.board, kind)
            totals.checked += checked
            totals.wrong += len(wrong)
            totals.problems += [f"{kind}, {place}, job {number}: {each}" for each in wrong[:3]]
            slow = self._judge(job, totals, place)
            if (problem or wrong or failures or slow) and self._keep is not None:
                self._keep.mkdir(exist_ok=True)
                path = self._keep / f"{self._seed}-{number}.txt"
                path.write_text(f"{totals.problems[-1:]}\n{slow}\n{job.kills}\n{job.hit}\n{job.logs()}")
        what = ", ".join(kill.kind + (f" ({kill.special})" if kill.special else "") for kill in job.kills)
        seconds = time.monotonic() - begin
        failed = f"; {totals.failures} failures" if totals.failures else ""
        print(
            f"{time.strftime('%H:%M:%S')} {kind}, {place}, {seconds:.0f} s: {what}{failed} {problem}",
            flush=True,
        )

    def _count_left(self, job: Job, totals: JoinTotals, before: set[str]) -> None:
        """Counts what a job has left behind."""
        deadline = time.monotonic() + leftovers.SETTLE_SECONDS
        left: list[int] = []
        while left := [pid for host in job._hosts for pid in job._processes_of(host)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        totals.orphans += len(left)
        names = leftovers.shared_memory_entries() - before
        names -= leftovers.in_use(names) if names else set()
        totals.leftovers += len(names)
        if left or names:
            totals.problems.append(f"left: processes {left}, names {names}")

    def _judge(self, job: Job, totals: JoinTotals, place: str) -> list[str]:
        """Adds up kills, times and steps; returns the times that are longer than `SLOW`, though the system tells the end."""
        board, slow = job.board, []
        totals.faults.update(kill.kind for kill in job.kills)
        totals.special.update(kill.special for kill in job.kills if kill.special)
        totals.moments.update(job.hit)
        totals.joins += len(job.joined)
        for told in job.told("failed"):
            if not told["member"]:
                totals.repeated[told["error"].partition("\n")[0][:120]] += 1
        whens = [kill.when for kill in job.kills] + [np.inf]
        for kill, following in zip(job.kills, whens[1:], strict=True):
            for rank, lives in job.lives.items():
                ends = board.ends[rank, : int(board.steps[rank])]
                for begin, until in lives:
                    after = ends[(ends > kill.when) & (ends < until)]
                    if begin <= kill.when < until and len(after) > 1:
                        second = float(after[1])
                        name = f"{place}: {kill.kind}"
                        if second > following:
                            name = f"{place}: {kill.kind}, and another before the next step"
                        elif kill.kind == "rank" and place == "hosts":
                            name = f"{place}: host"  # what tells them is the same
                        if second - kill.when > SLOW and "silent" not in name:
                            slow.append(f"{kill}: rank {rank} after {second - kill.when:.2f} s")
                        totals.next_step.setdefault(name, []).append(second - kill.when)
        if not job.lives:
            return slow
        over = getattr(job, "over", time.monotonic())
        for rank, lives in job.lives.items():
            ends = board.ends[rank, : int(board.steps[rank])]
            for begin, death in lives:
                until = min(death, over)
                own = ends[(ends >= begin) & (ends <= until)]
                for index in np.flatnonzero(np.diff(own) > SLOW):
                    if not any(own[index] < kill.when < own[index + 1] for kill in job.kills):
                        slow.append(f"rank {rank} stood still from {own[index]:.2f} to {own[index + 1]:.2f}")
                for name, pauses in ((place, job.silent), (f"{place}, with silent hosts", [])):
                    pace = self.paces.setdefault(name, Pace())
                    kept = ends
                    for first, last in pauses:
                        kept = kept[(kept <= first) | (kept > last)]
                    if begin < until:
                        pace.add(kept, begin, until, pauses, [*job.disturbed, *pauses])
        return slow


class _Numbered(Moments):
    """Chooses among some of `MOMENTS`; the numbers are those of all."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        super().__init__(names, seed)
        self._places = [1 + MOMENTS.index(name) for name in names]

    def next(self) -> int:
        return self._places[super().next() - 1]


def summary(soak: Soak) -> dict[str, Any]:
    """Returns what a soak has shown, for JSON."""
    found = result(soak.totals, RANKS)
    for kind, totals in soak.totals.items():
        found["modes"][kind] |= {
            "special": dict(totals.special),
            "joins": totals.joins,
            "joins_repeated": dict(totals.repeated),
            "averages_checked": totals.checked,
        }
    found["paces"] = {name: dataclasses.asdict(pace) for name, pace in soak.paces.items()}
    return found


def together(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what some soaks have shown together, for JSON."""
    sums = {name: Counter[str]() for name in ("kills", "special", "failures", "joins_repeated", "moments")}
    kinds: dict[str, Counter[str]] = {}
    times: dict[str, list[float]] = {}
    for kind, values in ((kind, values) for run in runs for kind, values in run["modes"].items()):
        for name, of in (("kills", "faults"), ("special", "special"), ("moments", "moments")):
            sums[name].update(values[of])
        failures = {name: values[name] for name in FAILURES}
        sums["failures"].update(failures)
        sums["joins_repeated"].update(values["joins_repeated"])
        kinds.setdefault(kind, Counter()).update(
            {
                "jobs": values["worlds"],
                "kills": sum(values["faults"].values()),
                "special": sum(values["special"].values()),
                "joins": values["joins"],
                "averages_checked": values["averages_checked"],
                "failures": sum(failures.values()),
            }
        )
        for name, seconds in values["next_step_seconds"].items():
            times.setdefault(name, []).extend(seconds)
    load = [each for run in runs for each in run["load"]]
    shares = {
        name: throughput([{"paces": {"": run["paces"][name]}} for run in runs if name in run["paces"]])
        for name in sorted({name for run in runs for name in run["paces"]})
    }
    return {
        "seeds": [run["seed"] for run in runs],
        "minutes": round(sum(run["minutes"] for run in runs), 1),
        "load": [min(load, default=0.0), max(load, default=0.0)],
        **{name: dict(counted) for name, counted in sums.items()},
        "next_step_seconds": {
            name: {"count": len(seconds), "p50": percentile(seconds, 50), "p99": percentile(seconds, 99)}
            for name, seconds in sorted(times.items())
        },
        "throughput": {name: share and round(share, 4) for name, share in shares.items()},
        "kinds": {kind: dict(counted) for kind, counted in kinds.items()},
    }


def table(found: Mapping[str, Any]) -> str:
    """The result of `together` as text."""
    lines = [f"{sum(found['kills'].values())} kills in {found['minutes']} minutes, load {found['load']}"]
    lines += [f"{name}: {found[name]}" for name in ("kills", "special", "failures", "moments")]
    lines.append(f"joins: {sum(each['joins'] for each in found['kinds'].values())}")
    for name, times in found["next_step_seconds"].items():
        lines.append(
            f"next step, {name}: {times['count']} times, p50 {times['p50']:.3f} s, p99 {times['p99']:.3f} s"
        )
    lines += [f"throughput, {name}: {share}" for name, share in found["throughput"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the soak of the command line; returns 1 if something failed."""
    parser = argparse.ArgumentParser(description="Kills ranks and hosts of jobs that others join.")
    parser.add_argument("--minutes", type=float, default=3.0, help="of all jobs together (default: 3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first job (default: 0)")
    parser.add_argument("--kinds", nargs="+", choices=[*JOINED, *REFUSED], default=[*JOINED, *REFUSED])
    parser.add_argument("--kills", type=int, default=12, help="of each job (default: 12)")
    parser.add_argument(
        "--silence", type=float, default=0.12, help="share of hosts that say nothing (default: 0.12)"
    )
    parser.add_argument(
        "--calm", nargs=2, type=float, default=CALM, metavar="SECONDS", help="without a kill, after joins"
    )
    parser.add_argument("--keep", type=Path, help="folder for the last words of jobs that failed")
    parser.add_argument("--json", type=Path, help="file to whose runs the result is added")
    parser.add_argument(
        "--total", type=Path, help="file for what all runs of the other file have shown together"
    )
    options = parser.parse_args(arguments)
    leftovers.isolate()
    soak = Soak(
        options.kinds, options.seed, options.kills, options.keep, options.silence, tuple(options.calm)
    )
    begin, load = time.monotonic(), []
    for number in itertools.count(options.first):
        # Few can be killed in a job that no process joins.
        for part in range(JOBS_OF_REFUSED if options.kinds[number % len(options.kinds)] in REFUSED else 1):
            if time.monotonic() > begin + 60 * options.minutes:
                break
            soak.run(number + part * len(options.kinds))
            load.append(round(os.getloadavg()[0], 1))
        else:
            continue
        break
    found = {
        "seed": options.seed,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "load": load,
    } | summary(soak)
    print(table(together([found])))
    for totals in soak.totals.values():
        for problem in totals.problems[:20]:
            print(problem)
    if options.json is not None:
        append(options.json, found)
        if options.total is not None:
            runs = json.loads(options.json.read_text())["runs"]
            options.total.write_text(json.dumps(together(runs), indent=1) + "\n")
    return int(found["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
