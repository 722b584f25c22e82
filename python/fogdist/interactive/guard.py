"""Ends the processes of a cluster when its notebook closes a pipe, on purpose or because the notebook has ended.

This is a script that does not import fogdist. `fogdist.interactive` starts it with a folder as its argument and sends
it one process ID per line. At the end of the input it sends SIGTERM to the processes and their children, including
stopped ones, kills those that do not end, and removes the folder. It is not a child of the notebook's kernel, because a
kernel that shuts down kills its children.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

# The seconds that processes have to end after SIGTERM, and again after SIGKILL.
GRACE = 5.0


def children(pid: int) -> list[int]:
    """Returns the process IDs of a process's children; none if the process has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def is_alive(handle: int) -> bool:
    """Returns whether the process of a pidfd is running. A zombie counts as ended."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return not poll.poll(0)


def end(handles: list[int], how: signal.Signals) -> None:
    """Sends a signal to the processes of pidfds, and waits for them.

    Args:
        handles: The pidfds.
        how: The signal.
    """
    for handle in handles:
        with contextlib.suppress(OSError):  # the process has ended
            signal.pidfd_send_signal(handle, how)
            signal.pidfd_send_signal(
                handle, signal.SIGCONT
            )  # a stopped process handles SIGTERM only after SIGCONT
    deadline = time.monotonic() + GRACE
    while any(map(is_alive, handles)) and time.monotonic() < deadline:
        time.sleep(0.02)


def main() -> None:
    """Runs the guard; see the module."""
    if os.fork() > 0:
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handles: dict[int, int] = {}

    def hold(pid: int) -> None:
        with contextlib.suppress(OSError):
            handles[pid] = os.pidfd_open(pid)

    for line in sys.stdin:
        hold(int(line))
    for pid in [pid for pid, handle in handles.items() if is_alive(handle)]:
        for child in children(pid):
            hold(child)
    end(list(handles.values()), signal.SIGTERM)
    end(list(handles.values()), signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
