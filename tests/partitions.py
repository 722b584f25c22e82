"""Cuts the network between ranks on 8 emulated hosts while they train: who goes on? `make partitions`, as root.

    python tests/partitions.py --json partitions.json

A rank is on each host, with a Store beside it, as `fog run --keep-going` has them. The hosts are in two data centers,
and what drops packets is the line between these, in both directions or in one. When the line is back and those that
stop have stopped, a new process takes the number of each. What must hold:

- one side goes on, as a whole: no two decisions of one epoch, and the ranks that live are those of the last one;
- the other ranks raise, and say why (`REASONS`);
- the new processes join, and all ranks train on together;
- after a cut that is shorter than FOG_HOST_TIMEOUT nobody raises, and nobody is left out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import leftovers
import test_joining
from emulated_hosts import Unavailable, cut_between
from hosts import INTERFACE, address, lossy_link, unskipped_hosts

HOSTS = 8
HOST_TIMEOUT = 4
# Of groups: ranks that do not agree raise after it.
TIMEOUT = 30.0
# The time that a rank sleeps in a step, so that eight of them leave the cores to what is measured.
PAUSE = 0.05
# Which packets are dropped: of both sides, those that the side of rank 0 sends, or those that it receives; or those
# that rank 0 would receive from one host, which all others hear.
WAYS = {"both": ("egress", "ingress"), "sent": ("egress",), "received": ("ingress",), "pair": ()}
KINDS = ("DecentralizedSGD", "DecentralizedSGD/patience", "AsynchronousGossip")
# Why a rank stops, in the words of docs/membership.md and protocol.py.
REASONS = {
    "too few": r"this rank \d+ does not hear the ranks \[.*\], which may go on without it: .* too few to go on",
    "left out": r"this rank \d+ was declared lost in epoch \d+, and takes no part any more",
}
# In which a rank that stops has stopped: the silence, the pause before the first proposal, and those that do not come.
STOPPED_WITHIN = TIMEOUT + 3 * HOST_TIMEOUT


@dataclass(frozen=True)
class Cut:
    """What is cut.

    Attributes:
        kind: How the ranks train, as of `test_joining`.
        first: How many hosts are on the side of rank 0; of "pair" the rank that rank 0 does not hear.
        way: One of `WAYS`.
        seconds: For how long.
        host_timeout: FOG_HOST_TIMEOUT.
    """

    kind: str
    first: int
    way: str
    seconds: float
    host_timeout: int = HOST_TIMEOUT

    @property
    def is_short(self) -> bool:
        """Whether nobody may raise because of it."""
        return self.seconds < self.host_timeout

    def begin(self, names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
        """Drops what is to be dropped in a block."""
        if self.way == "pair":
            peer = address(self.first)
            return lossy_link(INTERFACE, 1.0, namespace=names[0], peer=peer, directions=("ingress",))
        return cut_between(names, WAYS[self.way])

    def sides(self) -> list[set[int]]:
        """Returns the sets of ranks of which one is to go on."""
        everybody = {*range(HOSTS)}
        if self.is_short:
            return [everybody]
        if self.way == "pair":  # ranks in step that are no neighbors need not hear each other
            return [everybody, everybody - {0}, everybody - {self.first}]
        return [{*range(self.first)}, {*range(self.first, HOSTS)}]

    def __str__(self) -> str:
        return f"{self.kind.replace('/', '-')}-{self.first}-{self.way}-{self.seconds:g}"


@dataclass
class Outcome:
    """What became of a job.

    Attributes:
        cut: The cut.
        go_on: The ranks that live after it.
        stopped: When the others raised, in seconds from the cut, by rank.
        ended: When the last of their processes had ended.
        reasons: How many said which of `REASONS`.
        longest: The longest step of those that go on, in seconds.
        joined: Seconds from the start of the new processes until all ranks were in one epoch.
        problems: What must not be.
    """

    cut: Cut
    go_on: list[int] = field(default_factory=list)
    stopped: dict[int, float] = field(default_factory=dict)
    ended: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    longest: float = 0.0
    joined: float | None = None
    problems: list[str] = field(default_factory=list)


class Divided(test_joining.Job):
    """A job with a rank and a Store on each host.

    Args:
        folder, names, options: As of `Job`.
        host_timeout: FOG_HOST_TIMEOUT.
    """

    def __init__(self, folder: Path, names: Sequence[str], host_timeout: int, **options: object) -> None:
        own = {"WORLD_SIZE": str(HOSTS), "FOG_HOST_TIMEOUT": str(host_timeout), "TORCHELASTIC_RUN_ID": "cut"}
        super().__init__(folder, names, own, timeout=TIMEOUT, pause=PAUSE, steps=True, **options)
        self._stores = [self._store]
        for host in range(1, HOSTS):
            with concurrent.futures.ThreadPoolExecutor(1) as another:
                self._stores.append(
                    another.submit(test_joining.open_store, address(host), names[host]).result()
                )
        listed = [f"{address(host)}:{store.port}" for host, store in enumerate(self._stores)]
        self.environment = {**own, "FOG_STORES": ",".join(listed), "FOG_JOB_SECRET": "the secret of a job"}

    def start_all(self, environment: Mapping[str, str] | None = None) -> None:
        """Starts a rank on each host."""
        self.members = {rank: self.start(rank, host=rank) for rank in range(HOSTS)}
        self.agree()

    def join_again(self, rank: int) -> int:
        """Starts a process that joins, with the Store of its own host."""
        begins_at = {"MASTER_ADDR": address(rank), "MASTER_PORT": str(self._stores[rank].port)}
        return self.join(rank, environment=begins_at)

    def steps(self) -> list[int]:
        """Returns how many steps each member has made."""
        return [each or 0 for each in self.last("step", "step")]

    def decisions(self) -> dict[int, set[tuple[int, ...]]]:
        """Returns the members that ranks have told for each epoch."""
        found: dict[int, set[tuple[int, ...]]] = {}
        for number in range(len(self._processes)):
            for event in self.events(number, "epoch"):
                found.setdefault(event["epoch"], set()).add(tuple(event["living"]))
        return found


def run(cut: Cut, folder: Path) -> Outcome:
    """Runs a job through a cut."""
    outcome = Outcome(cut)
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(unskipped_hosts(HOSTS, centers=(cut.first, HOSTS - cut.first)))
        job = Divided(folder, names, cut.host_timeout, kind=cut.kind)
        stack.callback(job.close)
        try:
            job.start_all()
            _make_steps(job)
            begin = time.monotonic()
            with cut.begin(names):
                _watch(job, outcome, begin, lambda: time.monotonic() >= begin + cut.seconds)
            end = time.monotonic() + (2 * cut.host_timeout if cut.is_short else STOPPED_WITHIN)
            _watch(job, outcome, begin, lambda: time.monotonic() >= end or _is_settled(job))
            outcome.go_on = sorted(job.members)
            _judge(job, outcome)
            if job.members:
                _make_steps(job)
                started = time.monotonic()
                job.members |= {rank: job.join_again(rank) for rank in outcome.stopped}
                job.agree()
                outcome.joined = round(time.monotonic() - started, 1)
                _make_steps(job)
                job.end()
        except AssertionError as error:
            outcome.problems.append(str(error))
        (folder / "report").write_text(job.report())
    return outcome


def _make_steps(job: Divided, number: int = 10) -> None:
    """Waits until all members have made some steps."""
    before = job.steps()
    job.until(
        lambda: all(now >= then + number for now, then in zip(job.steps(), before, strict=True)), "no steps"
    )


def _watch(job: Divided, outcome: Outcome, begin: float, is_over: Callable[[], bool]) -> None:
    """Notes which members end, until it is over."""
    while not is_over():
        for rank, number in list(job.members.items()):
            if not job.is_alive(number):
                del job.members[rank]
                outcome.ended = round(time.monotonic() - begin, 1)
                raised = job.events(number, "raised")
                outcome.stopped[rank] = round(raised[0]["at"] - begin, 1) if raised else outcome.ended
                reason = _reason(job.log(number))
                outcome.reasons[reason] = outcome.reasons.get(reason, 0) + 1
        time.sleep(0.02)


def _reason(log: str) -> str:
    """Returns which of `REASONS` a process has raised; its last line if none."""
    for name, words in REASONS.items():
        if re.search(rf"DistBackendError: {words}", log):
            return name
    return log.strip().splitlines()[-1][:300] if log.strip() else "no word"


def _is_settled(job: Divided) -> bool:
    """Whether the members are those of one epoch, which is not the first one."""
    living = sorted(job.members)
    return all(each == living for each in job.last("epoch", "living")) and len(living) < HOSTS


def _judge(job: Divided, outcome: Outcome) -> None:
    """Notes what must not be after the cut."""
    if set(outcome.go_on) not in outcome.cut.sides():
        outcome.problems.append(f"these ranks go on, which must not be: {outcome.go_on}")
    if wrong := {epoch: living for epoch, living in job.decisions().items() if len(living) > 1}:
        outcome.problems.append(f"decisions differ: {wrong}")
    if others := outcome.reasons.keys() - REASONS.keys():
        outcome.problems += sorted(others)
    for number in job.members.values():
        ends = [event["at"] for event in job.events(number, "step")]
        outcome.longest = max([outcome.longest, *(b - a for a, b in itertools.pairwise(ends))])
    outcome.longest = round(outcome.longest, 1)


def cuts(
    kinds: Sequence[str],
    times: Sequence[float],
    firsts: Sequence[int],
    ways: Sequence[str],
    host_timeout: int = HOST_TIMEOUT,
) -> Iterator[Cut]:
    """Returns all of these cuts."""
    for seconds, way, first, kind in itertools.product(times, ways, firsts, kinds):
        yield Cut(kind, first, way, seconds, host_timeout)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns a row for each cut."""
    names = ["training", "sides", "dropped", "for, s", "go on", "stop after, s", "ended after, s", "because"]
    names += ["longest step, s", "joined, s", ""]
    rows = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for each in outcomes:
        cut, times = each.cut, sorted(each.stopped.values())
        cells = [
            cut.kind,
            f"{cut.first} + {HOSTS - cut.first}",
            cut.way,
            f"{cut.seconds:g}",
            _range(each.go_on),
        ]
        cells += [f"{times[0]:g} to {times[-1]:g}" if times else ""]
        cells += [f"{each.ended:g}" if times else ""]
        cells += [", ".join(f"{name} ({ranks})" for name, ranks in each.reasons.items())]
        cells += [f"{each.longest:g}", "" if each.joined is None else f"{each.joined:g}"]
        rows.append("| " + " | ".join([*cells, "; ".join(each.problems)[:200]]) + " |")
    return "\n".join(rows)


def _range(ranks: Sequence[int]) -> str:
    whole = [*range(ranks[0], ranks[-1] + 1)] if ranks else []
    return (
        f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 and whole == [*ranks] else ", ".join(map(str, ranks))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cuts of the command line; returns 1 if something must not be."""
    parser = argparse.ArgumentParser(description="Cuts the network between ranks on 8 emulated hosts.")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--seconds", nargs="+", type=float, default=(10.0, 60.0))
    parser.add_argument("--host-timeout", type=int, default=HOST_TIMEOUT, help="FOG_HOST_TIMEOUT")
    parser.add_argument("--first", nargs="+", type=int, default=(4, 5, 7), help="hosts on the side of rank 0")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["both", "sent", "received"])
    parser.add_argument("--keep", type=Path, help="folder for what the ranks say")
    parser.add_argument("--json", type=Path, help="file for the result; rows are added")
    options = parser.parse_args(arguments)
    leftovers.isolate()
    outcomes = []
    chosen = options.kinds, options.seconds, options.first, options.ways, options.host_timeout
    for number, cut in enumerate(cuts(*chosen)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if options.keep:
                folder = options.keep / f"{number}-{cut}"
                folder.mkdir(parents=True)
            try:
                outcomes.append(run(cut, folder))
            except Unavailable as reason:
                print(f"several hosts: {reason}")
                return 2
        print(table(outcomes[-1:]).splitlines()[-1], flush=True)
        if options.json is not None:
            before = json.loads(options.json.read_text()) if options.json.exists() else []
            options.json.write_text(json.dumps([*before, asdict(outcomes[-1])], indent=1) + "\n")
    print(table(outcomes))
    return int(any(each.problems for each in outcomes))


if __name__ == "__main__":
    import partitions  # ranks find its functions by this name

    sys.exit(partitions.main())
