"""Finds and ends processes with all their descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The seconds that an agent has to end its ranks after a signal; it gives the ranks 30 of them, as torchrun does.
STOP_TIMEOUT = 40.0
# The seconds to wait for more output after a process has ended: one that it left behind may keep the output open.
OUTPUT_TIMEOUT = 5.0
# The seconds that what ranks leave behind has to end after SIGTERM.
GRACE = 5.0
# The pauses between two samples of what is left.
INTERVAL = 0.05
# The process ID and the time at which the process started, because the system reuses IDs.
Process = tuple[int, int]


# The most walks over the tree of processes before it is killed: one walk can miss a process that starts during it.
_WALKS = 10
# The value in <sys/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36


def describe(status: int) -> str:
    """Returns how a process ended, as text: its exit status, or the negative number of the signal."""
    if status >= 0:
        return f"with exit status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"by signal {-status}"


def adopt_orphans() -> None:
    """Makes this process the parent of what its descendants leave behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Ends all descendants of this process, by SIGTERM, and after `GRACE` seconds by SIGKILL.

    Processes that copy output ignore SIGTERM, and end with the ranks.
    """
    deadline = time.monotonic() + GRACE
    told: set[Process] = set()
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = descendants_of(os.getpid())
        if not left:
            return
        for process in left - told:
            send(process, signal.SIGTERM)
        told |= left
        if time.monotonic() >= deadline:
            kill_with_descendants(left)
        time.sleep(INTERVAL)


def identified(pids: Iterable[int]) -> set[Process]:
    """Returns the process IDs, each with the start time of its process, without processes that have ended."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            # The program's name, in parentheses, may contain parentheses and spaces.
            fields = file.read().rpartition(b")")[2].split()
            if fields[0] != b"Z":  # it has ended, and waits for its parent to notice
                found.add((pid, int(fields[19])))
    return found


def living(found: Iterable[Process]) -> set[Process]:
    """Returns those of these processes that have not ended."""
    return identified(pid for pid, _ in found) & set(found)


def _children(pid: int) -> list[int]:
    """Returns the process IDs of the children of a process; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _with_descendants(processes: Iterable[Process]) -> set[Process]:
    """Returns these processes, without those that have ended, and all their descendants."""
    found: set[Process] = set()
    fresh = living(processes)
    while fresh:
        found |= fresh
        fresh = identified(child for pid, _ in fresh for child in _children(pid)) - found
    return found


def of_session(leader: int) -> set[Process]:
    """Returns the processes of a session, which has the process ID of the process that made it."""
    pids = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.getsid(int(name)) == leader:
                pids.append(int(name))
    return identified(pids)


def descendants_of(pid: int) -> set[Process]:
    """Returns all processes below a process."""
    return _with_descendants(identified(_children(pid)))


def kill_with_descendants(started: Iterable[Process]) -> None:
    """Kills processes and all their descendants, in any session."""
    found, stopped = set(started), set[Process]()
    for _ in range(_WALKS):
        found = _with_descendants(found)
        if found == stopped:
            break
        for process in found - stopped:
            send(process, signal.SIGSTOP)  # so that it starts no more processes
        stopped = found
    for process in found:
        send(process, signal.SIGKILL)


def send(process: Process, number: signal.Signals) -> None:
    """Sends a signal to a process, but not to another process that has reused its ID."""
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        handle = os.pidfd_open(process[0])
        try:
            if identified([process[0]]) == {process}:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
