"""What `fog top` shows: two samples of the records of the ranks of a host, and what has changed between them.

A sample reads files in memory that ranks write in any case (`fogdist.flight_record`), and the state of processes in /proc.
No rank takes part in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fogdist.observe.flight_record import Operation, Process

# The states of /proc/PID/stat that are no ordinary running or sleeping.
_STATES = {"T": "stopped", "t": "traced", "Z": "ended", "X": "ended", "D": "in a system call"}


@dataclass(frozen=True)
class Row:
    """One rank.

    Attributes:
        process: What was read of it.
        state: "runs", "stopped", "ended", "traced" or "in a system call".
        rate: Steps per second since the last sample; None if unknown.
        waits: By rank, the share of the time since the last sample in which only that rank's message was missing, or for
            which an operation in flight has waited for it.
    """

    process: Process
    state: str
    rate: float | None = None
    waits: dict[int, float] = field(default_factory=dict)

    @property
    def operation(self) -> Operation | None:
        """The oldest operation in flight, or else the last one; None if there was none."""
        recorded = self.process.operations
        return next(iter(self.process.in_flight), recorded[-1] if recorded else None)


@dataclass(frozen=True)
class Job:
    """The ranks of a job on this host.

    Attributes:
        rows: Its ranks on this host, in order; several if a rank has been started again.
        late: Sentences about the ranks that hold others up.
    """

    rows: list[Row]
    late: list[str]

    @property
    def title(self) -> str:
        """The heading: its program, when the first process here started, and how many of its ranks are here."""
        first = min((row.process for row in self.rows), key=lambda process: process.started)
        living = len({row.process.rank for row in self.rows if row.state != "ended"})
        most = max(living, first.size)  # a job can have grown
        when = time.strftime("%F %T", time.localtime(first.started))
        return f"{first.script or 'a program'}, started {when}: {living} of {most} ranks are on this host"

    def as_json(self) -> dict[str, Any]:
        """Returns the same for programs, with all that the records say."""
        rows = [
            {**asdict(row.process), "state": row.state, "rate": row.rate, "waits": row.waits}
            for row in self.rows
        ]
        return {"title": self.title, "rows": rows, "late": self.late}


def row_of(now: Process, before: Process | None, seconds: float, state: str) -> Row:
    """Returns what to show of a process.

    Args:
        now: What was read.
        before: What was read of it `seconds` before; None if nothing was.
        seconds: The time between the two.
        state: As in `Row`.
    """
    waits: dict[int, float] = {}
    if before:
        earlier = {peer.rank: peer.waited for peer in before.peers}
        gone = {peer.rank: peer.waited - earlier.get(peer.rank, 0.0) for peer in now.peers}
        waits = {rank: min(waited / seconds, 1.0) for rank, waited in gone.items() if waited > 0.0}
    for operation in now.in_flight:  # its wait is counted when it ends
        for rank, _ in operation.awaited:
            waits[rank] = max(waits.get(rank, 0.0), min(operation.age / seconds, 1.0))
    return Row(now, state, (now.steps - before.steps) / seconds if before else None, waits)


class Watch:
    """Takes samples; a process that has ended keeps its row.

    Args:
        read: Reads the records of the processes to show.
        late: Returns sentences about the ranks that hold others up, `fogdist.flight_record.blamed`.
        state_of: Returns the state of a process.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Process]],
        late: Callable[[Sequence[Process]], list[str]],
        state_of: Callable[[int], str] | None = None,
    ) -> None:
        self._read, self._late = read, late
        self._state_of = state_of or process_state
        self._before: dict[int, Process] = {}
        self._at = 0.0
        self._rows: dict[int, Row] = {}  # by process ID

    def second_sample(self, interval: float) -> list[Job]:
        """Returns the jobs after a first sample and an interval; at once if there are none."""
        if self.sample():
            time.sleep(interval)
        return self.sample()

    def sample(self, now: float | None = None) -> list[Job]:
        """Returns the jobs as they are now.

        Args:
            now: The time of `time.monotonic`; by default now.
        """
        at = time.monotonic() if now is None else now
        found = {process.pid: process for process in self._read()}
        for pid, process in found.items():
            self._rows[pid] = row_of(process, self._before.get(pid), at - self._at, self._state_of(pid))
        for pid in self._rows.keys() - found.keys():
            self._rows[pid] = replace(self._rows[pid], state="ended", rate=None, waits={})
        self._before, self._at = found, at
        jobs: dict[str, list[Row]] = {}
        for row in sorted(self._rows.values(), key=lambda row: row.process.started):
            jobs.setdefault(row.process.job_key, []).append(row)
        return [
            Job(
                sorted(rows, key=lambda row: (row.process.rank, row.process.pid)),
                self._late([found[row.process.pid] for row in rows if row.process.pid in found]),
            )
            for rows in jobs.values()
        ]


def process_state(pid: int) -> str:
    """Returns the state of a process as in `Row`."""
    with contextlib.suppress(OSError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return _STATES.get(letter, "runs")
    return "ended"


def cells(row: Row) -> dict[str, str]:
    """Returns the texts of a row by the names of the columns."""
    process, operation = row.process, row.operation
    what, age = "", ""
    if operation is not None:
        living = process.in_flight if row.state != "ended" else []
        awaited = _listed(sorted({rank for each in living for rank, _ in each.awaited}))
        endings = {"in flight": f" …{awaited and f' waits for {awaited}'}", "failed": " failed"}
        what = f"#{operation.number} {operation.what}{endings.get(operation.state, '')}"
        age = duration(operation.age - (0.0 if operation.state == "in flight" else operation.seconds))
    staleness = {peer.rank: peer.staleness for peer in process.peers if not peer.lost}
    return {
        "rank": str(process.rank),
        "process": str(process.pid),
        "host": process.host,
        "state": row.state,
        "membership": str(process.epoch) if process.epoch >= 0 else "",
        "steps": str(process.steps),
        "steps/s": "" if row.rate is None else f"{row.rate:.3g}",
        "last step": duration(process.step_age) if process.step_age >= 0 else "",
        "stale": ", ".join(f"{rank}: {count}" for rank, count in top(staleness)),
        "waits most for": ", ".join(
            f"{rank}: {share:.0%}" for rank, share in top(row.waits) if share >= 0.005
        ),
        "operation": what,
        "age": age,
        "failed": str(process.failed or ""),
        "lost": _listed([peer.rank for peer in process.peers if peer.lost]),
    }


def top(numbers: dict[int, Any], most: int = 3) -> list[tuple[int, Any]]:
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
