"""What `fog top` shows: two samples of the records of the ranks of a host, and what has changed between them.

A sample reads files in memory that ranks write in any case (`fogdist.flight_record`), and the state of processes in /proc.
No rank takes part in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
        rank: Its rank in the job.
        pid: Its process.
        host: The name of its host.
        state: "runs", "stopped", "ended", "traced" or "in a system call".
        membership: The epoch of its membership; None if unknown.
        steps: The steps of its training.
        rate: Steps per second since the last look; None if unknown.
        step_age: Seconds since its last step; None if there was none.
        failed: The number of operations that have failed.
        operation: Its oldest operation in flight, or else the last one; "" if there was none.
        number: The number of that operation.
        operation_state: "in flight", "done" or "failed".
        operation_age: Seconds since it began, if it is in flight, and otherwise since it ended.
        waits_for: Ranks that it waits for now, for more than a second.
        waits: By rank, the share of the time since the last look in which only that rank's message was missing, or for
            which an operation in flight has waited for it.
        staleness: By rank, how many exchanges old its values are, where ranks go at their own pace.
        lost: The ranks that it has lost.
    """

    rank: int
    pid: int
    host: str
    state: str
    membership: int | None
    steps: int
    rate: float | None
    step_age: float | None
    failed: int
    operation: str
    number: int
    operation_state: str
    operation_age: float
    waits_for: list[int]
    waits: dict[int, float]
    staleness: dict[int, int]
    lost: list[int]


@dataclass(frozen=True)
class Job:
    """The ranks of a job on this host.

    Attributes:
        key: What tells it from other jobs.
        script: The name of its program.
        started: When its first process here started, in seconds since 1970.
        size: The number of its ranks on all hosts.
        rows: Its ranks on this host, in order; several if a rank has been started again.
        late: Sentences about the ranks that hold others up.
    """

    key: str
    script: str
    started: float
    size: int
    rows: list[Row]
    late: list[str] = field(default_factory=list)


def row_of(now: Process, before: Process | None, seconds: float, state: str) -> Row:
    """Returns what to show of a process.

    Args:
        now: What was read.
        before: What was read of it `seconds` before; None if nothing was.
        seconds: The time between the two.
        state: As in `Row`.
    """
    earlier = {peer.rank: peer.waited for peer in before.peers} if before else {}
    waits = {
        peer.rank: min((peer.waited - earlier.get(peer.rank, 0.0)) / seconds, 1.0)
        for peer in now.peers
        if before and seconds > 0 and peer.waited > earlier.get(peer.rank, 0.0)
    }
    in_flight = now.in_flight
    if seconds > 0:
        for operation in in_flight:  # its wait is counted when it ends
            for rank, _ in operation.awaited:
                waits[rank] = max(waits.get(rank, 0.0), min(operation.age / seconds, 1.0))
    shown: Operation | None = in_flight[0] if in_flight else now.operations[-1] if now.operations else None
    age = 0.0
    if shown is not None:
        age = shown.age if shown.state == "in flight" else shown.age - shown.seconds
    return Row(
        rank=now.rank,
        pid=now.pid,
        host=now.host,
        state=state,
        membership=now.epoch if now.epoch >= 0 else None,
        steps=now.steps,
        rate=(now.steps - before.steps) / seconds if before and seconds > 0 else None,
        step_age=now.step_age if now.step_age >= 0 else None,
        failed=now.failed,
        operation=shown.what if shown else "",
        number=shown.number if shown else 0,
        operation_state=shown.state if shown else "",
        operation_age=age,
        waits_for=sorted({rank for operation in in_flight for rank, _ in operation.awaited}),
        waits=waits,
        staleness={peer.rank: peer.staleness for peer in now.peers if peer.staleness >= 0 and not peer.lost},
        lost=[peer.rank for peer in now.peers if peer.lost],
    )


class Watch:
    """Looks again and again; a process that has ended keeps its row.

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
        self._rows: dict[int, tuple[Process, Row]] = {}  # by process ID

    def second_look(self, interval: float) -> list[Job]:
        """Returns the jobs after a first look, if there has been none, and an interval; at once if there are none."""
        if not self._before:
            self.look()
        if self._before:
            time.sleep(interval)
        return self.look()

    def look(self, now: float | None = None) -> list[Job]:
        """Returns the jobs as they are now.

        Args:
            now: The time of `time.monotonic`; by default now.
        """
        at = time.monotonic() if now is None else now
        found = {process.pid: process for process in self._read()}
        for pid, process in found.items():
            row = row_of(process, self._before.get(pid), at - self._at, self._state_of(pid))
            self._rows[pid] = process, row
        for pid in self._rows.keys() - found.keys():
            process, row = self._rows[pid]
            self._rows[pid] = process, replace(row, state="ended", rate=None, waits_for=[], waits={})
        self._before, self._at = found, at
        jobs: dict[str, Job] = {}
        # The first process of a job is the one that started first.
        for process, row in sorted(self._rows.values(), key=lambda each: each[0].started):
            job = Job(process.job_key, process.script, process.started, process.size, [])
            jobs.setdefault(job.key, job).rows.append(row)
        for job in jobs.values():
            job.rows.sort(key=lambda row: (row.rank, row.pid))
            job.late.extend(self._late([found[row.pid] for row in job.rows if row.pid in found]))
        return list(jobs.values())


def process_state(pid: int) -> str:
    """Returns the state of a process as in `Row`."""
    with contextlib.suppress(OSError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return _STATES.get(letter, "runs")
    return "ended"


# --- texts of the table ---

COLUMNS = (
    "rank",
    "process",
    "host",
    "state",
    "membership",
    "steps",
    "steps/s",
    "last step",
    "stale",
    "waits most for",
    "operation",
    "age",
    "failed",
    "lost",
)
"""The columns of the table of ranks."""


def cells(row: Row) -> list[str]:
    """Returns the texts of a row, one for each of `COLUMNS`."""
    operation = f"#{row.number} {row.operation}" if row.operation else ""
    if row.operation_state == "in flight":
        operation += " …" + (f" waits for {_listed(row.waits_for)}" if row.waits_for else "")
    elif row.operation_state == "failed":
        operation += " failed"
    return [
        str(row.rank),
        str(row.pid),
        row.host,
        row.state,
        "" if row.membership is None else str(row.membership),
        str(row.steps),
        "" if row.rate is None else f"{row.rate:.3g}",
        "" if row.step_age is None else duration(row.step_age),
        ", ".join(f"{rank}: {count}" for rank, count in top(row.staleness)),
        ", ".join(f"{rank}: {share:.0%}" for rank, share in top(row.waits) if share >= 0.005),
        operation,
        duration(row.operation_age) if row.operation else "",
        str(row.failed) if row.failed else "",
        _listed(row.lost),
    ]


def is_bad(row: Row) -> bool:
    """Whether a row is to be seen first."""
    return row.state in ("stopped", "traced", "ended") or row.failed > 0


def top(numbers: dict[int, Any], most: int = 3) -> list[tuple[int, Any]]:
    """Returns the ranks with the largest positive numbers, the largest first."""
    positive = [(rank, number) for rank, number in numbers.items() if number > 0]
    return sorted(positive, key=lambda entry: (-entry[1], entry[0]))[:most]


def title(job: Job) -> str:
    """Returns the heading of a job."""
    living = len({row.rank for row in job.rows if row.state != "ended"})
    most = max(living, job.size)  # a job can have grown
    when = time.strftime("%F %T", time.localtime(job.started))
    return f"{job.script or 'a program'}, started {when}: {living} of {most} ranks are on this host"


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
