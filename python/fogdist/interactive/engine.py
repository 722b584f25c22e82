"""A script that runs an ipyparallel engine which SIGINT interrupts only while it runs a cell; rank 0 starts the controller.

ipyparallel's own engine can be interrupted from reading a request until it has answered. The cells of some ranks end
before those of others, so a SIGINT may arrive just before or after a cell. It would then interrupt the answer, for
which the notebook would wait forever.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

# Engines that are stopped do not answer heartbeats but are not lost, so the heartbeats are off. A separate process watches
# each engine and reports its end.
_CONTROLLER = [
    "-m",
    "ipyparallel.controller",
    "--ip=127.0.0.1",
    "--nodb",
    "--usethreads",
    "--IPController.broadcast_scheduler_depth=0",
    "--HeartMonitor.period=1000",
    "--HeartMonitor.max_heartmonitor_misses=1000000000",
]


def connection(folder: Path, kind: str) -> Any:
    """Returns what the controller has written for an engine or a client, None if it has not yet."""
    try:
        return json.loads((folder / "security" / f"ipcontroller-{kind}.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # or not completely
        return None


def main() -> None:
    """Runs the engine; the arguments are the folder of the cluster, and the seconds in which the controller must start."""
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # the folder of a script, which is a package here
    from fog_pg import environment

    folder, timeout, rank = Path(sys.argv[1]), float(sys.argv[2]), environment.RANK.get()
    if rank == 0:
        # In a session of its own it outlives this rank. It ends with the job, as all that ranks leave behind.
        command = [sys.executable, *_CONTROLLER, f"--profile-dir={folder}"]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while connection(folder, "engine") is None:
        time.sleep(0.05)
    from ipyparallel.engine.app import IPEngine

    class Engine(IPEngine):  # type: ignore[misc]
        def init_signal(self) -> None:
            super().init_signal()
            # The hooks would turn SIGINT into a KeyboardInterrupt during the whole request.
            self.kernel.pre_handler_hook = self.kernel.post_handler_hook = lambda: None
            cells: dict[str, Any] = self.kernel.shell.user_global_ns

            def interrupt(number: int, frame: FrameType | None) -> None:
                while frame is not None:
                    if frame.f_globals is cells:  # the frame of a cell, or of a function defined in a cell
                        raise KeyboardInterrupt
                    frame = frame.f_back

            signal.signal(signal.SIGINT, interrupt)

    options = {"max_heartbeat_misses": 0, "id": rank, "timeout": timeout}
    words = [f"--Engine.{name}={value}" for name, value in options.items()]
    Engine.launch_instance([f"--profile-dir={folder}", *words])


if __name__ == "__main__":
    main()
