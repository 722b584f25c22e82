"""Faults of a process: it ends, crashes, is stopped for a while, or hangs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time

# More than a mutex of any C library takes. Zeros are a free mutex.
_MUTEX_BYTES = 256


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def kill(pid: int | None = None) -> None:
    """Ends a process by SIGKILL: it runs no code of its own any more.

    Args:
        pid: The process; by default this one.

    Raises:
        ProcessLookupError: There is no such process.
        TypeError: `pid` is no int.
        ValueError: `pid` is no number of a single process, or that of the init process.
    """
    os.kill(process_id(pid), signal.SIGKILL)


def segfault(pid: int | None = None) -> None:
    """Crashes a process by a segmentation fault; handlers of SIGSEGV, such as faulthandler's, run.

    Args:
        pid: A process to which SIGSEGV is sent. By default this one, which reads memory that it does not have.

    Raises:
        ProcessLookupError: There is no such process.
        TypeError: `pid` is no int.
        ValueError: As `kill`.
    """
    number = process_id(pid)
    if number != os.getpid():
        os.kill(number, signal.SIGSEGV)
        return
    ctypes.string_at(1, 1)


def stop(pid: int | None = None, seconds: float = 1.0) -> None:
    """Stops a process for a while by SIGSTOP, and continues it by SIGCONT; returns when it runs again.

    None of its threads runs in between. It is continued also if this process ends before that.

    Args:
        pid: The process; by default this one.
        seconds: For how long.

    Raises:
        ProcessLookupError: There is no such process.
        TypeError: An argument has a wrong type.
        ValueError: As `kill`; `seconds` is not positive.
    """
    number = process_id(pid)
    duration = positive_seconds(seconds)
    os.kill(number, 0)  # raises if there is no such process
    # A stopped process cannot continue itself, and a process that stops another one may be killed: a shell does it, in a
    # session of its own, where Ctrl-C does not reach it.
    script = 'sleep "$1"; kill -CONT "$2"'
    continuing = subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", f"{duration:.3f}", str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        os.kill(number, signal.SIGSTOP)
        continuing.wait()
    finally:
        if continuing.poll() is None:  # interrupted
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)
            os.killpg(continuing.pid, signal.SIGKILL)
            continuing.wait()


def deadlock_with_gil(seconds: float | None = None) -> None:
    """Hangs in C with Python's global lock held, as a deadlock in an extension or a driver does.

    No Python code of this process runs meanwhile, in any thread, and no handler of signals that is written in Python.
    Threads that need no Python, such as those that drive operations of fog, go on.

    Args:
        seconds: For how long; by default until the process is killed.

    Raises:
        TypeError: `seconds` is no number.
        ValueError: `seconds` is not positive.
    """
    duration = None if seconds is None else positive_seconds(seconds)
    library = ctypes.PyDLL(None)  # unlike CDLL, it keeps the lock during a call
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    library.pthread_mutex_lock(mutex)
    # A mutex that this thread holds already. Unlike a sleep, no signal ends it.
    if duration is None:
        library.pthread_mutex_lock(mutex)
    else:
        whole, part = divmod(time.time() + duration, 1.0)
        until = _Timespec(int(whole), int(1e9 * part))
        library.pthread_mutex_timedlock(mutex, ctypes.byref(until))


def process_id(pid: int | None) -> int:
    """Returns a pid, this process's for None, after checking that it means one process."""
    if pid is None:
        return os.getpid()
    if not isinstance(pid, int) or isinstance(pid, bool):
        raise TypeError(f"pid must be an int or None, got {type(pid).__name__}")
    if pid <= 1:  # the kernel takes these for groups of processes, or for all
        raise ValueError(f"pid must be the number of one process, greater than 1, got {pid}")
    return pid


def positive_seconds(seconds: float, argument: str = "seconds") -> float:
    """Returns a number of seconds as a float, after checking it."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        raise TypeError(f"{argument} must be a number, got {type(seconds).__name__}")
    if not 0.0 < seconds < float("inf"):
        raise ValueError(f"{argument} must be positive and finite, got {seconds!r}")
    return float(seconds)
