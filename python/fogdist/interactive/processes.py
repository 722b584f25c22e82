"""The processes of a cluster: an agent of `fog run`, which starts an ipyparallel engine for each rank and ends them all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from fog_cli.launchers import AGENT, RANK, of_host
from fog_cli.processes import GRACE, describe

from fogdist.interactive import engine

# The first word of the agent's own lines.
_TOKEN = "fogdist-interactive"
_POLL_SECONDS = 0.05


class Processes:
    """Starts all processes of a job of `size` ranks on this host, and connects to them.

    Args:
        size: The number of ranks. The engine with ID i is rank i.
        environment: Variables of the ranks, in addition to those of this process.
        timeout: Seconds until all ranks must have started.

    Attributes:
        pids: The process ID of each rank.
        client: ipyparallel's `Client`.
        folder: Of their files, which ends with them.

    Raises:
        ImportError: ipyparallel is not installed.
        RuntimeError: A process ended; the message has its last output.
        TimeoutError: Ranks are missing after `timeout`.
    """

    def __init__(self, size: int, environment: Mapping[str, str], timeout: float) -> None:
        try:
            import ipyparallel
        except ImportError as error:
            raise ImportError(
                "fogdist.interactive needs ipyparallel, which is not installed: pip install 'fogdist[notebook]'"
            ) from error
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        folder = self.folder = Path(tempfile.mkdtemp(prefix="fogdist-interactive-"))
        variables = {"OMP_NUM_THREADS": "1"} if size > 1 else {}
        variables |= {**os.environ, "IPYTHONDIR": str(folder), **environment}
        task = {
            "token": _TOKEN,
            "command": [*RANK, sys.executable, engine.__file__, str(folder), str(timeout)],
            "environment": of_host(variables, size, size, 0, folder.name),
            "folder": os.getcwd(),
            "size": size,
            "count": size,
            "first": 0,  # the Store is in the agent, so ranks can make a destroyed group again at any time
        }
        self.pids: list[int] = []
        self.client: Any = None
        self._ends: dict[int, str] = {}  # how ranks have ended
        self._has_ended = threading.Condition()
        self._last_output: deque[str] = deque(maxlen=100)
        self._agent = subprocess.Popen(
            [*AGENT, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that an interrupt of the notebook does not reach it
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._agent.wait()  # it has forked
        self._write(task)
        try:
            while (found := engine.connection(folder, "client")) is None:
                self._pause("ipyparallel's controller")
            self.client = ipyparallel.Client(found, timeout=timeout)
            while len(self.client.ids) < size:
                self._pause(f"{size - len(self.client.ids)} of {size} ranks to register")
            self.pids = self.client[:].apply_sync(os.getpid)
        except BaseException:
            self.end()
            raise

    def end_of(self, rank: int) -> str | None:
        """Returns how a rank's process ended; None while it runs."""
        with self._has_ended:
            if not os.path.exists(f"/proc/{self.pids[rank]}"):  # the agent is about to say how
                self._has_ended.wait_for(lambda: rank in self._ends, GRACE)
            return self._ends.get(rank)

    def end(self) -> None:
        """Ends all processes, by force after some seconds, and removes their files."""
        if self.client is not None:
            with contextlib.suppress(Exception):  # the controller may have ended
                self.client.close(linger=0)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._write({"signal": int(number)})
            self._reader.join(GRACE)  # until all have closed the agent's output
        with contextlib.suppress(OSError):
            cast("IO[str]", self._agent.stdin).close()

    def _write(self, value: object) -> None:
        stdin = cast("IO[str]", self._agent.stdin)
        with contextlib.suppress(OSError):  # it has ended
            stdin.write(json.dumps(value) + "\n")
            stdin.flush()

    def _read(self) -> None:
        """Reads what the agent tells and what ranks print outside of cells, to the end of all."""
        with cast("IO[str]", self._agent.stdout) as lines:
            for line in lines:
                token, _, text = line.partition(" ")
                if token != _TOKEN:
                    self._last_output.append(line)
                elif (told := json.loads(text))["event"] == "ended":
                    with self._has_ended:
                        self._ends[told["rank"]] = f"ended {describe(told['status'])}"
                        self._has_ended.notify_all()

    def _pause(self, what: str) -> None:
        """Sleeps a little. Raises if a process has ended or the timeout has passed."""
        for rank, how in self._ends.items():
            output = "".join(self._last_output)
            raise RuntimeError(f"rank {rank} {how} while the cluster started; its last output:\n{output}")
        if time.monotonic() >= self._deadline:
            raise TimeoutError(f"timed out after {self._timeout:g} s: waiting for {what}")
        time.sleep(_POLL_SECONDS)
