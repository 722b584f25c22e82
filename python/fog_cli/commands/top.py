"""`fog top`: shows the ranks of this host, live in a terminal, or once.

It takes samples of files in memory that ranks write in any case (`fogdist.flight_record`). No rank takes part in it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fog_cli import number
from fog_cli import table as columns
from fog_cli.commands import dump

if TYPE_CHECKING:
    from fogdist.observe.flight_record import Process

EXAMPLES = """\
examples:
  fog top                       all processes of yours on this host that have a group of fog, until Ctrl-C
  fog top --once                the same, printed once
  fog top 4711 4712             these processes
  ssh HOST fog top --once       those of another host

It reads memory that the ranks write to in any case, so it disturbs none of them, and works on ranks that hang.
"""
# Moves the cursor of a terminal to its first line, and clears what follows.
_CLEAR = "\033[H\033[J"


def add(parser: argparse.ArgumentParser) -> None:
    """Describes the arguments."""
    dump.add(parser)
    parser.add_argument(
        "--interval",
        type=number(float, 0.1, 3600),
        default=1.0,
        metavar="SECONDS",
        help="time between two samples (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one table and end")


def run(arguments: argparse.Namespace) -> int:
    """Shows the ranks."""
    watch = _watch(arguments.pids)
    if not arguments.once and sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                print(_CLEAR + table(watch.sample()), flush=True)
                time.sleep(arguments.interval)
        return 0
    if watch.sample():
        time.sleep(arguments.interval)
    jobs = watch.sample()
    if not jobs:
        print(f"fog top: {dump.NOTHING}", file=sys.stderr)
        return 1
    print(table(jobs))
    return 0


@dataclass(frozen=True)
class Row:
    """One rank.

    Attributes:
        process: What was read of it.
        rate: Steps per second since the last sample; None if unknown.
        waits: By rank, the share of the time since the last sample in which only that rank's message was missing, or for
            which an operation in flight has waited for it.
    """

    process: Process
    rate: float | None = None
    waits: dict[int, float] = field(default_factory=dict)


def row_of(now: Process, before: Process | None, seconds: float) -> Row:
    """Returns what to show of a process, of which another sample was taken so many seconds before, or none."""
    waits: dict[int, float] = {}
    if before:
        earlier = {peer.rank: peer.waited for peer in before.peers}
        gone = {peer.rank: peer.waited - earlier.get(peer.rank, 0.0) for peer in now.peers}
        waits = {rank: min(waited / seconds, 1.0) for rank, waited in gone.items() if waited > 0.0}
    for operation in now.in_flight:  # its wait is counted when it ends
        for rank, _ in operation.awaited:
            waits[rank] = max(waits.get(rank, 0.0), min(operation.age / seconds, 1.0))
    return Row(now, (now.steps - before.steps) / seconds if before else None, waits)


class Watch:
    """Takes samples by a function that reads the records to show; a process that has ended keeps its row."""

    def __init__(self, read: Callable[[], Sequence[Process]]) -> None:
        self._read = read
        self._rows: dict[int, Row] = {}  # by process ID
        self._at = 0.0

    def sample(self) -> list[list[Row]]:
        """Returns the ranks of each job as they are now, the oldest job first."""
        at = time.monotonic()
        found = {process.pid: process for process in self._read()}
        for pid, row in self._rows.items():
            if pid not in found:
                self._rows[pid] = Row(replace(row.process, state="ended"))
        for pid, process in found.items():
            before = self._rows.get(pid)
            self._rows[pid] = row_of(process, before.process if before else None, at - self._at)
        self._at = at
        jobs: dict[str, list[Row]] = {}
        for row in sorted(self._rows.values(), key=lambda row: row.process.started):
            jobs.setdefault(row.process.job_key, []).append(row)
        return [sorted(rows, key=lambda row: (row.process.rank, row.process.pid)) for rows in jobs.values()]


def _watch(pids: list[int]) -> Watch:
    from fogdist.observe import flight_record

    dump.read_records(pids)  # raises if there is no such process
    return Watch(lambda: [each for each in flight_record.read_all() if not pids or each.pid in pids])


def table(jobs: Sequence[Sequence[Row]]) -> str:
    """Returns what the terminal shows: of each job its title, its ranks, and which of them hold others up."""
    from fogdist.observe import flight_record

    parts = []
    for rows in jobs:
        living = [row.process for row in rows if row.process.state != "ended"]
        most = max(len({process.rank for process in living}), rows[0].process.size)  # a job can have grown
        title = f"{flight_record.title([row.process for row in rows])}: "
        title += f"{len({process.rank for process in living})} of {most} ranks are on this host"
        shown = [tuple(cells(row).values()) for row in rows]
        lines = columns([tuple(cells(rows[0])), *shown])
        parts.append("\n".join([title, *lines, *flight_record.blamed(living)]))
    return "\n\n".join(parts) or dump.NOTHING


def cells(row: Row) -> dict[str, str]:
    """Returns the texts of a row by the names of the columns."""
    process = row.process
    # The oldest operation in flight, or else the last one.
    operation = next(iter([*process.in_flight, *reversed(process.operations)]), None)
    what, age = "", ""
    if operation is not None:
        living = process.in_flight if process.state != "ended" else []
        awaited = _listed(sorted({rank for each in living for rank, _ in each.awaited}))
        endings = {"in flight": f" …{awaited and f' waits for {awaited}'}", "failed": " failed"}
        what = f"#{operation.number} {operation.what}{endings.get(operation.state, '')}"
        age = duration(operation.age - (0.0 if operation.state == "in flight" else operation.seconds))
    staleness = {peer.rank: peer.staleness for peer in process.peers if not peer.lost}
    return {
        "rank": str(process.rank),
        "process": str(process.pid),
        "host": process.host,
        "state": process.state,
        "membership": str(process.epoch) if process.epoch >= 0 else "",
        "steps": str(process.steps),
        "steps/s": "" if row.rate is None else f"{row.rate:.3g}",
        "last step": duration(process.step_age) if process.step_age >= 0 else "",
        "stale": ", ".join(f"{rank}: {count}" for rank, count in largest(staleness)),
        "waits most for": ", ".join(
            f"{rank}: {share:.0%}" for rank, share in largest(row.waits) if share >= 0.005
        ),
        "operation": what,
        "age": age,
        "failed": str(process.failed or ""),
        "lost": _listed([peer.rank for peer in process.peers if peer.lost]),
    }


def largest(numbers: dict[int, Any], most: int = 3) -> list[tuple[int, Any]]:
    """Returns the ranks with the largest positive numbers, the largest first."""
    positive = [(rank, number) for rank, number in numbers.items() if number > 0]
    return sorted(positive, key=lambda entry: (-entry[1], entry[0]))[:most]


def duration(seconds: float) -> str:
    """Returns a time in a short form."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
