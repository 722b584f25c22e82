"""Faults that the soaks and tests inject into a process, by its pid or the calling one, and when they happen."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch.distributed as dist

from fog_pg._store import connections

# "deadlock" is a hang with Python's lock held; "cut", "slow" and "lossy" are of the link of a rank's host.
Kind: TypeAlias = Literal["kill", "segfault", "stop", "deadlock", "lose_store", "cut", "slow", "lossy"]
# After these the rank is gone.
_ENDS: tuple[Kind, ...] = ("kill", "segfault")
# These take a time.
_LASTS: tuple[Kind, ...] = ("stop", "deadlock", "cut", "slow", "lossy")

# More than a mutex of any C library takes. Zeros are a free mutex.
_MUTEX_BYTES = 256


# --- processes, and their Store -----------------------------------------------------------------------------


def stop(pid: int, seconds: float) -> None:
    """Stops a process for a while; returns when it runs again, which it does also if this process ends before that."""
    os.kill(pid, 0)  # raises if there is no such process
    # A stopped process cannot continue itself, and a process that stops another one may be killed: a shell does it, in a
    # session of its own, where Ctrl-C does not reach it.
    script = 'sleep "$1"; kill -CONT "$2"'
    words = ["/bin/sh", "-c", script, "sh", f"{seconds:.3f}", str(pid)]
    continuing = subprocess.Popen(words, start_new_session=True)
    try:
        os.kill(pid, signal.SIGSTOP)
    finally:
        continuing.wait()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def deadlock_with_gil(seconds: float) -> None:
    """Hangs in C with Python's global lock held, as a deadlock in an extension or a driver does.

    No Python code of this process runs meanwhile, in any thread. Threads that need no Python, such as those that drive
    operations of fog, go on.
    """
    library = ctypes.PyDLL(None)  # unlike CDLL, it keeps the lock during a call
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    library.pthread_mutex_lock(mutex)
    # A mutex that this thread holds already. Unlike a sleep, no signal ends it.
    whole, part = divmod(time.time() + seconds, 1.0)
    until = _Timespec(int(whole), int(1e9 * part))
    library.pthread_mutex_timedlock(mutex, ctypes.byref(until))


def lose_store() -> int:
    """Breaks this process's connections to the job's TCPStore, as if its host had gone; returns how many."""
    broken = 0
    for connection in connections(dist.distributed_c10d._get_default_store()):
        with contextlib.suppress(OSError):  # the other side was faster
            connection.shutdown(socket.SHUT_RDWR)
            broken += 1
    return broken


# --- schedules ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Fault:
    """One fault of one rank.

    Attributes:
        when: Seconds since the start.
        rank: The rank that it happens to.
        kind: What happens.
        seconds: How long, if it lasts.
    """

    when: float
    rank: int
    kind: Kind
    seconds: float = 0.0

    def inject(self, pid: int | None = None) -> None:
        """Lets the fault happen now, to the process of the rank, or if none is given, to this one; returns at its end."""
        if pid is None:
            assert self.kind in ("deadlock", "lose_store"), "it happens to another process, or to a link"
            deadlock_with_gil(self.seconds) if self.kind == "deadlock" else lose_store()
        elif self.kind == "stop":
            stop(pid, self.seconds)
        else:
            os.kill(pid, {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV}[self.kind])


class Schedule:
    """Faults in the order of their times."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(sorted(faults))

    @classmethod
    def random(
        cls,
        seed: int,
        ranks: int,
        *,
        until: float,
        every: tuple[float, float],
        kinds: Mapping[Kind, float],
        seconds: tuple[float, float],
        least_living: int,
        lost_by: Collection[Kind] = _ENDS,
    ) -> Schedule:
        """Draws a schedule; the same arguments give the same one everywhere.

        Args:
            seed: Any number.
            ranks: The number of ranks.
            until: The end, in seconds.
            every: The least and the greatest time from one fault to the next.
            kinds: What happens, with relative frequencies.
            seconds: The least and the greatest duration of a fault that lasts.
            least_living: So many ranks are not lost; when only they are left, only the other kinds happen.
            lost_by: The kinds after which a rank is lost, so that nothing more happens to it.
        """
        draw = random.Random(seed)
        living = list(range(ranks))
        faults: list[Fault] = []
        when = draw.uniform(*every)
        while when < until:
            # Each fault takes the same number of draws, so that it does not depend on what became of others.
            place, duration, choice = draw.random(), draw.uniform(*seconds), draw.random()
            possible = {k: f for k, f in kinds.items() if k not in lost_by or len(living) > least_living}
            if possible:
                rank = living[int(place * len(living))]
                (kind,) = random.Random(choice).choices(list(possible), list(possible.values()))
                faults.append(
                    Fault(round(when, 3), rank, kind, round(duration, 3) if kind in _LASTS else 0.0)
                )
                if kind in lost_by:
                    living.remove(rank)
            when += draw.uniform(*every)
        return cls(faults)

    def run(self, inject: Callable[[Fault], object], *, until: threading.Event) -> None:
        """Calls a function for each fault at its time, counted in seconds from now; returns when all are over.

        Each call is made in a thread of its own, so a fault that lasts does not delay the next one. A ProcessLookupError
        means that the rank is gone already.

        Args:
            inject: What lets a fault happen.
            until: When it is set, no more faults begin.

        Raises:
            BaseException: The first one of `inject`, after the faults that had begun are over.
        """
        errors: list[BaseException] = []

        def call(fault: Fault) -> None:
            try:
                with contextlib.suppress(ProcessLookupError):
                    inject(fault)
            except BaseException as error:
                errors.append(error)

        threads: list[threading.Thread] = []
        begin = time.monotonic()
        for fault in self.faults:
            if until.wait(max(0.0, begin + fault.when - time.monotonic())) or errors:
                break
            threads.append(threading.Thread(target=call, args=(fault,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
