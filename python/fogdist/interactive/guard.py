"""Ends the processes of a cluster when its notebook closes a pipe, on purpose or because it is gone.

A script by itself, without an import of fogdist: `fogdist.interactive` starts it with a folder as its argument and sends it a
process ID per line. At the end of the input it asks the processes and their children to end, kills those that do not, also
those that are stopped, and removes the folder. It is no child of the notebook's kernel: a kernel that shuts down kills its children.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

# Seconds to end after SIGTERM, and then after SIGKILL.
GRACE = 5.0


def children(pid: int) -> list[int]:
    """The process IDs of a process's children; none where it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def is_alive(handle: int) -> bool:
    """Whether the process of a pidfd has not ended; one that nobody has reaped has ended."""
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
        with contextlib.suppress(OSError):  # it has ended
            signal.pidfd_send_signal(handle, how)
            signal.pidfd_send_signal(handle, signal.SIGCONT)  # one that is stopped does not end
    deadline = time.monotonic() + GRACE
    while any(map(is_alive, handles)) and time.monotonic() < deadline:
        time.sleep(0.02)


def main() -> None:
    """See the module."""
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
