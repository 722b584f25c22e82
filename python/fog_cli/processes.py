"""Runs a launcher: passes its output on in whole lines, signals to it, and its exit status back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import IO

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After a signal the launcher has this time, in seconds, to end its ranks: torchrun's machinery gives them 30.
_STOP_TIMEOUT = 40.0
# After the launcher's end. A process that a rank has left behind may hold its output open.
_OUTPUT_TIMEOUT = 5.0
# The process ID, and the time at which the process started: an ID may be given out anew.
_Process = tuple[int, int]


# The number of walks over the tree of processes before it is killed: one is not enough if a process starts another just
# then.
_WALKS = 10


class _Launcher:
    def __init__(self, output: int) -> None:
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._started: set[_Process] = set()  # known so far: the launcher and what it has started
        self._signal: int | None = None
        self._is_passed_on = False
        self._timer = threading.Timer(_STOP_TIMEOUT, self.kill)
        self._timer.daemon = True
        self._copies: list[threading.Thread] = []

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts it; a signal that has come meanwhile is passed on."""
        # A session of its own: a terminal's Ctrl-C comes to this process only, which passes it on, once.
        # A session without a terminal cannot read from one.
        self._process = process = subprocess.Popen(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._started |= _identified([process.pid])
        for source, target in ((process.stdout, self._output), (process.stderr, 2)):
            self._copies.append(threading.Thread(target=_copy, args=(source, target), daemon=True))
            self._copies[-1].start()
        self._pass_on()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Sends a signal to the launcher; to the second one it has no answer, as it may hang."""
        if self._signal is None:
            self._signal = number
            self._pass_on()
        else:
            self.kill()

    def _pass_on(self) -> None:
        """Sends the signal, once there are a signal and a launcher."""
        if self._signal is None or self._process is None or self._is_passed_on:
            return
        self._is_passed_on = True
        self._started = _with_descendants(self._started)  # some may lose their parent by the signal
        self._timer.start()
        self._process.send_signal(self._signal)

    def kill(self) -> None:
        """Ends the launcher and all processes of this host that it has started, in whatever session they are."""
        if self._process is None:
            return
        stopped: set[_Process] = set()
        for _ in range(_WALKS):
            self._started = _with_descendants(self._started)
            if self._started == stopped:
                break
            for process in self._started - stopped:
                _send(process, signal.SIGSTOP)  # so that it starts no others
            stopped = self._started
        for process in self._started:
            _send(process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Waits for its end, and returns the exit status as `run` does."""
        assert self._process is not None
        status = self._process.wait()
        self._timer.cancel()
        for copy in self._copies:
            copy.join(_OUTPUT_TIMEOUT)
        if self._signal is not None:
            return 128 + self._signal
        return status if status >= 0 else 128 - status


def _identified(pids: Iterable[int]) -> set[_Process]:
    """Process IDs, each with the time at which its process started; without those that are gone."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the program, in brackets, may have brackets and spaces in it.
            found.add((pid, int(file.read().rpartition(b")")[2].split()[19])))
    return found


def _children(pid: int) -> list[int]:
    """The process IDs of a process's children; none if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _with_descendants(processes: Iterable[_Process]) -> set[_Process]:
    """These processes, as far as they are there, and all that they and their children have started."""
    found: set[_Process] = set()
    fresh = _identified(pid for pid, _ in processes) & set(processes)
    while fresh:
        found |= fresh
        fresh = _identified(child for pid, _ in fresh for child in _children(pid)) - found
    return found


def _send(process: _Process, number: signal.Signals) -> None:
    """Sends a signal to a process, and never to another one that has got its process ID since."""
    with contextlib.suppress(OSError):  # it is gone, or another user's
        handle = os.pidfd_open(process[0])
        try:
            if _identified([process[0]]) == {process}:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _copy(source: IO[bytes], target: int) -> None:
    """Copies whole lines, so that the two streams do not mix within one."""
    for line in source:
        rest = line
        with contextlib.suppress(OSError):  # nobody reads it any more; the ranks go on
            while rest:
                rest = rest[os.write(target, rest) :]


def run(words: Sequence[str], environment: Mapping[str, str], output: int = 1) -> int:
    """Runs a launcher to its end.

    Args:
        words: Its command.
        environment: Its variables.
        output: Descriptor to which its standard output is copied.

    Returns:
        Its exit status; 128 and the signal's number if a signal ended it, or this process got one.

    Raises:
        OSError: It cannot be started.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    launcher = _Launcher(output)
    try:
        for number in _SIGNALS:
            if before[number] is not signal.SIG_IGN:  # nohup's, say
                signal.signal(number, launcher.on_signal)
        launcher.start(words, environment)
        return launcher.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
