"""Reads which operations the ranks of this host have in flight, which ranks they wait for, and how they get on.

Each process with a fog group records 256 operations, those in flight first, then the latest others, in an anonymous
file that processes of the same user can read. Another process can read it at any time, also while the ranks hang or are
stopped, and does not disturb them. `fog dump` prints `report`, and `fog top` shows it live.

Beside the operations the file has a few numbers: steps, and for each other rank the time for which only its message was
missing, how old its values are, and whether it was lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fog_pg import _extension

# A younger operation may still complete normally, and the engine records the ranks that it waits for only after a
# second.
_SECONDS = 1.0
# The number of completed operations that a report shows.
_LAST = 3
# The states of /proc/PID/stat that are no ordinary running or sleeping.
_STATES = {"T": "stopped", "t": "traced", "Z": "ended", "X": "ended", "D": "in a system call"}


@dataclass(frozen=True)
class Operation:
    """An operation of a process.

    Attributes:
        what: The call, such as "allreduce(SUM, float32[3])".
        group: Name of its group.
        rank: This process's rank in the group.
        number: Its number among the group's operations on this rank.
        key: A number that is the same on all ranks of the group. All operations of the same name have the same key.
        state: "in flight", "done" or "failed".
        age: Seconds since it began.
        seconds: Its duration, so far if it is in flight.
        awaited: The first ranks of the group that it waits for, each with its pid, or 0 if the rank is on another host;
            empty in the operation's first second.
        awaited_count: The number of ranks that it waits for.
    """

    what: str
    group: str
    rank: int
    number: int
    key: int
    state: str
    age: float
    seconds: float
    awaited: list[tuple[int, int]]
    awaited_count: int

    def __str__(self) -> str:
        return f"#{self.number} {self.what} of group '{self.group}'"


@dataclass(frozen=True)
class Peer:
    """Another rank, as a process sees it.

    Attributes:
        rank: Its rank in the job.
        waited: The seconds in which an operation waited only for its message, since the start.
        staleness: How many exchanges old its values are, where ranks go at their own pace; -1 if unknown.
        lost: Whether it was lost.
    """

    rank: int
    waited: float
    staleness: int
    lost: bool


@dataclass(frozen=True)
class Process:
    """A process and its operations.

    Attributes:
        pid: Its process ID.
        rank: Its rank in the job.
        size: The number of ranks in the job.
        host: Name of its host.
        job: What tells its job from others; 0 if that has not come about.
        script: The name of its program.
        started: When the process started, in seconds since 1970; 0 if unknown.
        state: "runs", "stopped", "traced", "in a system call" or "ended".
        operations: Its recorded operations, the oldest first.
        unrecorded: The number of operations that began while 256 others were in flight and so are not recorded.
        begun: The number of operations that it has begun.
        failed: The number of operations that have failed.
        steps: The steps of its training, see `count_step`.
        step_age: Seconds since the last step ended; -1 if there was none.
        epoch: The epoch of its membership; -1 if unknown.
        peers: The ranks that it has numbers of.
    """

    pid: int
    rank: int
    size: int
    host: str
    operations: list[Operation]
    unrecorded: int
    job: int = 0
    script: str = ""
    started: float = 0.0
    state: str = "runs"
    begun: int = 0
    failed: int = 0
    steps: int = 0
    step_age: float = -1.0
    epoch: int = -1
    peers: list[Peer] = field(default_factory=list)

    @property
    def job_key(self) -> str:
        """A text that is the same for all processes of a job."""
        return f"{self.job:x}" if self.job else f"{self.script} of {self.size}"

    @property
    def in_flight(self) -> list[Operation]:
        """The operations in flight."""
        return [operation for operation in self.operations if operation.state == "in flight"]


def read(pid: int) -> Process:
    """Reads the record of a process of this host.

    Raises:
        TypeError: `pid` is not an int.
        ValueError: There is no such process, it belongs to another user, or it has no group of this version of fog.
    """
    if not isinstance(pid, int) or isinstance(pid, bool):
        raise TypeError(f"pid must be an int, got {type(pid).__name__}")
    found: dict[str, Any] = _extension.load().read_flight_record(pid)
    found["operations"] = [Operation(**each) for each in found["operations"]]
    found["peers"] = [Peer(**each) for each in found["peers"]]
    started, state = _start_and_state(pid)
    return Process(**found, started=started, state=state)


def _start_and_state(pid: int) -> tuple[float, str]:
    with contextlib.suppress(OSError):  # it has just ended
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return booted + int(fields[19]) / os.sysconf("SC_CLK_TCK"), _STATES.get(fields[0], "runs")
    return 0.0, "ended"


def count_step() -> None:
    """Counts a step of this process, for `fog top`; optimizers and wrappers of fog do so themselves.

    It writes two words of memory, and does nothing before the first group.
    """
    if (extension := sys.modules.get("fog_pg._C")) is not None:
        extension.note_step()


def read_all() -> list[Process]:
    """Reads the records of all processes of this host that this user may read, in the order of their pids."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError):  # it has ended, belongs to another user, or is a fork
            if any(_is_record(link) for link in (entry / "fd").iterdir()):
                found.append(read(int(entry.name)))
    return sorted(found, key=lambda process: process.pid)


def _is_record(link: Path) -> bool:
    try:
        return "fog_flight_record" in os.readlink(link)
    except OSError:  # it was closed after it was listed
        return False


def report(found: Sequence[Process]) -> str:
    """Returns a text, by job, about the operations in flight, and the ranks that delay the others."""
    jobs: dict[str, list[Process]] = defaultdict(list)
    for process in found:
        jobs[process.job_key].append(process)
    ordered = sorted(jobs.values(), key=lambda job: (min(each.started for each in job), job[0].pid))
    return "\n\n".join(_report_of_job(job) for job in ordered)


def title(found: Sequence[Process]) -> str:
    """Returns what a job is called: its program, and when the first of these processes of it started."""
    first = min(found, key=lambda process: process.started)
    when = time.strftime("%F %T", time.localtime(first.started))
    return f"{first.script or 'a program'}, started {when}"


def _report_of_job(found: Sequence[Process]) -> str:
    lines = [f"{title(found)}:"]
    for process in sorted(found, key=lambda each: (each.rank, each.pid)):
        lines.append(f"process {process.pid}: rank {process.rank} of {process.size} on {process.host}")
        for operation in process.in_flight:
            lines.append(f"  in flight for {operation.age:.1f} s: {operation}{_waits(operation)}")
        if not process.in_flight:
            lines.append("  nothing in flight")
        ended = [operation for operation in process.operations if operation.state != "in flight"]
        for operation in ended[-_LAST:]:
            ago = operation.age - operation.seconds
            lines.append(
                f"  {operation.state} {ago:.1f} s ago, after {operation.seconds * 1e3:.3g} ms: {operation}"
            )
        if process.unrecorded:
            lines.append(f"  not recorded, as too many others were in flight: {process.unrecorded}")
    late = blamed(found)
    return "\n".join([*lines, *([""] if late else []), *late])


def _waits(operation: Operation) -> str:
    if not operation.awaited:
        return ""
    more = operation.awaited_count - len(operation.awaited)
    named = [
        f"{rank} (process {pid})" if pid else f"{rank} (another host)" for rank, pid in operation.awaited
    ]
    return f", waits for {_ranks(named, more)}" + (f" and {more} more" if more > 0 else "")


def _ranks(ranks: Sequence[object], more: int = 0) -> str:
    return f"rank{'s' if len(ranks) + more > 1 else ''} {', '.join(map(str, ranks))}"


def blamed(found: Sequence[Process]) -> list[str]:
    """Returns a line for each process that others wait for in an operation that it has not begun."""
    by_pid = {process.pid: process for process in found}
    waiting: dict[tuple[int, str, int], list[tuple[Process, Operation]]] = defaultdict(list)
    for process in found:
        for operation in process.in_flight:
            if operation.age >= _SECONDS:
                for _, pid in operation.awaited:
                    if pid:
                        waiting[pid, operation.group, operation.key].append((process, operation))
    lines = []
    for (pid, group, key), waiters in sorted(waiting.items()):
        operation = waiters[0][1]
        who = f"{_ranks(sorted(waiter.rank for waiter, _ in waiters))} wait{'s' if len(waiters) == 1 else ''} for it"
        if (late := by_pid.get(pid)) is None:
            lines.append(f"process {pid} is not shown here: {who} in {operation}.")
            continue
        own = [each for each in late.operations if each.group == group]
        if any(each.key == key for each in own):
            continue
        last = max(own, key=lambda each: each.number, default=None)
        done = (
            f"the last that it began there is {last}, {last.age:.1f} s ago"
            if last
            else "it has begun nothing there"
        )
        lines.append(f"rank {late.rank} (process {pid}) has not begun {operation}: {who}; {done}.")
    return lines
