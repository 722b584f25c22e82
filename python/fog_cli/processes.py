"""Runs a launcher: passes its output on in whole lines, signals to it, and its exit status back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After a signal the launcher has this time, in seconds, to end its ranks: torchrun's machinery gives them 30.
_STOP_TIMEOUT = 40.0
# After the launcher's end. A process that a rank has left behind may hold its output open.
_OUTPUT_TIMEOUT = 5.0


class _Launcher:
    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        # A session of its own: a terminal's Ctrl-C comes to this process only, which passes it on, once.
        # A session without a terminal cannot read from one.
        self._process = subprocess.Popen(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._signal: int | None = None
        self._copies = [
            threading.Thread(target=_copy, args=(source, target), daemon=True)
            for source, target in ((self._process.stdout, 1), (self._process.stderr, 2))
        ]
        for copy in self._copies:
            copy.start()

    def pass_on(self, number: int, _frame: FrameType | None) -> None:
        """Sends a signal to the launcher; to the second one it has no answer, as it may hang."""
        if self._signal is not None:
            self.kill()
            return
        self._signal = number
        self._process.send_signal(number)
        timer = threading.Timer(_STOP_TIMEOUT, self.kill)
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        """Ends the launcher; the system tells the ranks of this host."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        status = self._process.wait()
        for copy in self._copies:
            copy.join(_OUTPUT_TIMEOUT)
        if self._signal is not None:
            return 128 + self._signal
        return status if status >= 0 else 128 - status


def _copy(source: IO[bytes], target: int) -> None:
    """Copies whole lines, so that the two streams do not mix within one."""
    for line in source:
        rest = line
        with contextlib.suppress(OSError):  # nobody reads it any more; the ranks go on
            while rest:
                rest = rest[os.write(target, rest) :]


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a launcher to its end.

    Args:
        words: Its command.
        environment: Its variables.

    Returns:
        Its exit status; 128 and the signal's number if a signal ended it, or this process got one.

    Raises:
        OSError: It cannot be started.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    launcher = _Launcher(words, environment)
    try:
        for number in _SIGNALS:
            if before[number] is not signal.SIG_IGN:  # nohup's, say
                signal.signal(number, launcher.pass_on)
        return launcher.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
