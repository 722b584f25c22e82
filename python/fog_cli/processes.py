"""Runs a launcher: forwards its output in whole lines, sends it this process's signals, returns its exit status.

Its functions also find and end processes with all their descendants; the agent of `fog run --keep-going` uses them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import IO

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The seconds that the launcher has to end its ranks after a signal; torchrun gives the ranks 30 of them.
STOP_TIMEOUT = 40.0
# The seconds to wait for more output after the launcher has ended: a process that a rank left behind may keep the
# output open.
OUTPUT_TIMEOUT = 5.0
# The process ID and the time at which the process started, because the system reuses IDs.
Process = tuple[int, int]


# The most walks over the tree of processes before it is killed: one walk can miss a process that starts during it.
_WALKS = 10


class _Launcher:
    def __init__(self, output: int) -> None:
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._started: set[Process] = set()  # the launcher and its descendants that are known so far
        self._signal: int | None = None
        self._is_passed_on = False
        self._timer = threading.Timer(STOP_TIMEOUT, self.kill)
        self._timer.daemon = True
        self._copies: list[threading.Thread] = []

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the launcher and sends it the signal that this process has already received, if any."""
        # In a session of its own, the launcher gets a Ctrl-C of the terminal only once, from this process. Without a
        # terminal it cannot read from one, so its standard input is empty then.
        self._process = process = subprocess.Popen(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._started |= identified([process.pid])
        for source, target in ((process.stdout, self._output), (process.stderr, 2)):
            self._copies.append(threading.Thread(target=copy_lines, args=(source, target), daemon=True))
            self._copies[-1].start()
        self._pass_on()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Sends the first signal to the launcher. Kills the launcher at the second one, because it may hang."""
        if self._signal is None:
            self._signal = number
            self._pass_on()
        else:
            self.kill()

    def _pass_on(self) -> None:
        """Sends the signal once, as soon as there are both a signal and a launcher."""
        if self._signal is None or self._process is None or self._is_passed_on:
            return
        self._is_passed_on = True
        self._started = _with_descendants(self._started)  # the signal may end the parents of some
        self._timer.start()
        self._process.send_signal(self._signal)

    def kill(self) -> None:
        """Kills the launcher and all its descendants on this host, in any session."""
        if self._process is None:
            return
        self._started = kill_with_descendants(self._started)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Waits for the launcher to end, and returns the exit status as `run` does."""
        assert self._process is not None
        status = self._process.wait()
        self._timer.cancel()
        for copy in self._copies:
            copy.join(OUTPUT_TIMEOUT)
        if self._signal is not None:
            return 128 + self._signal
        return status if status >= 0 else 128 - status


def identified(pids: Iterable[int]) -> set[Process]:
    """Returns the process IDs, each with the start time of its process, without processes that have ended."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            # The program's name, in parentheses, may contain parentheses and spaces.
            found.add((pid, int(file.read().rpartition(b")")[2].split()[19])))
    return found


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
    fresh = identified(pid for pid, _ in processes) & set(processes)
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
    """Returns all processes below a process, without those that have ended and wait for their parent to notice."""
    return {
        process for process in _with_descendants(identified(_children(pid))) if not _is_zombie(process[0])
    }


def living(found: Iterable[Process]) -> set[Process]:
    """Returns those of these processes that have not ended."""
    return {
        process for process in identified(pid for pid, _ in found) & set(found) if not _is_zombie(process[0])
    }


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"Z"
    return True


def kill_with_descendants(started: Iterable[Process]) -> set[Process]:
    """Kills processes and all their descendants, in any session; returns those that it has killed."""
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
    return found


def send(process: Process, number: signal.Signals) -> None:
    """Sends a signal to a process, but not to another process that has reused its ID."""
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        handle = os.pidfd_open(process[0])
        try:
            if identified([process[0]]) == {process}:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def copy_lines(source: IO[bytes], target: int, take: Callable[[bytes], bool] = lambda _line: False) -> None:
    """Copies whole lines, so that streams do not mix within a line, except those that `take` takes."""
    for line in source:
        rest = b"" if take(line) else line
        with contextlib.suppress(OSError):  # the reader has closed the output; the ranks continue
            while rest:
                rest = rest[os.write(target, rest) :]


def run(words: Sequence[str], environment: Mapping[str, str], output: int = 1) -> int:
    """Runs a launcher to its end.

    Args:
        words: The launcher's command.
        environment: The launcher's environment.
        output: The descriptor to which the launcher's standard output is copied.

    Returns:
        The launcher's exit status; 128 plus the signal's number if a signal ended it or this process received one.

    Raises:
        OSError: The launcher cannot be started.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    launcher = _Launcher(output)
    try:
        for number in SIGNALS:
            if before[number] is not signal.SIG_IGN:  # an ignored signal, as under nohup, stays ignored
                signal.signal(number, launcher.on_signal)
        launcher.start(words, environment)
        return launcher.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
