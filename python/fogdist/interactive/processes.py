"""The processes of a cluster: an ipyparallel engine for each rank, a controller, and a guard that ends them all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed as dist

from fogdist.interactive import engine, guard

# Suspended engines do not answer heartbeats but are not lost, so the heartbeats are off. A separate process watches
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
_ENGINE = [engine.__file__, "--Engine.max_heartbeat_misses=0"]
_LOG_TAIL = 3000
_POLL_SECONDS = 0.05


class Processes:
    """Starts all processes of a job of `size` ranks on this host, and connects to them.

    Args:
        size: The number of ranks. The engine with ID i is rank i.
        environment: Variables of the ranks, in addition to those of this process.
        timeout: Seconds until all ranks must have started.

    Attributes:
        ranks: The process of each rank.
        client: ipyparallel's `Client`.

    Raises:
        ImportError: ipyparallel is not installed.
        RuntimeError: A process ended; the message has its last output.
        TimeoutError: Ranks are missing after `timeout`.
    """

    def __init__(self, size: int, environment: Mapping[str, str], timeout: float) -> None:
        parallel = import_ipyparallel()
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._folder = tempfile.mkdtemp(prefix="fogdist-interactive-")
        self._store: dist.TCPStore | None = None
        self._controller: subprocess.Popen[bytes] | None = None
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.client: Any = None
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._guard.wait()  # it has forked; the guard continues as a separate process
        try:
            self._controller = self._spawn("controller", _CONTROLLER, {})
            # The store is in this process and not in rank 0, so that ranks can make a destroyed group again at any
            # time.
            self._store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
            )
            self._connection("engine")
            for rank in range(size):
                arguments = [*_ENGINE, f"--Engine.id={rank}", f"--Engine.timeout={timeout}"]
                variables = {**environment, **self._variables(rank, size, environment)}
                self.ranks.append(self._spawn(f"rank {rank}", arguments, variables))
            self.client = parallel.Client(self._connection("client"), timeout=timeout)
            while len(self.client.ids) < size:
                self._pause(f"{size - len(self.client.ids)} of {size} ranks to register")
        except BaseException:
            self.end()
            raise

    def end_of(self, rank: int) -> str | None:
        """Returns how a rank's process ended; None while it runs."""
        return _end_of(self.ranks[rank])

    def end(self) -> None:
        """Ends all processes, by force after some seconds, and removes their files."""
        if self.client is not None:
            with contextlib.suppress(Exception):  # the controller may have ended
                self.client.close(linger=0)
        cast("BinaryIO", self._guard.stdin).close()
        cast("BinaryIO", self._guard.stdout).read()  # returns when the guard has ended
        cast("BinaryIO", self._guard.stdout).close()
        for process in self.ranks if self._controller is None else [*self.ranks, self._controller]:
            if process.poll() is None:
                with contextlib.suppress(OSError):  # nothing is left to do if the guard was killed
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._store = None

    def _variables(self, rank: int, size: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment variables that torchrun sets for its workers."""
        assert self._store is not None
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": Path(self._folder).name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if size > 1 and "OMP_NUM_THREADS" not in {**os.environ, **environment}:
            variables["OMP_NUM_THREADS"] = "1"
        return variables

    def _spawn(
        self, name: str, arguments: list[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with open(Path(self._folder, f"{name}.log"), "wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments, f"--profile-dir={self._folder}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "IPYTHONDIR": self._folder, **variables},
                start_new_session=True,  # so that an interrupt of the notebook does not reach it
            )
        with contextlib.suppress(BrokenPipeError):
            cast("BinaryIO", self._guard.stdin).write(f"{process.pid}\n".encode())
        return process

    def _connection(self, kind: str) -> dict[str, Any]:
        """Waits for the controller's connection file of an engine or a client, and returns its contents."""
        path = Path(self._folder, "security", f"ipcontroller-{kind}.json")
        while True:
            with contextlib.suppress(
                FileNotFoundError, json.JSONDecodeError
            ):  # not written yet, or not completely
                return cast("dict[str, Any]", json.loads(path.read_text()))
            self._pause("ipyparallel's controller")

    def _pause(self, what: str) -> None:
        """Sleeps a little. Raises if a process has ended or the timeout has passed."""
        names = ["controller", *(f"rank {rank}" for rank in range(len(self.ranks)))]
        for name, process in zip(names, [cast("Any", self._controller), *self.ranks], strict=True):
            if (how := _end_of(process)) is not None:
                log = Path(self._folder, f"{name}.log").read_text(errors="replace")[-_LOG_TAIL:]
                raise RuntimeError(f"{name} {how} while the cluster started; its last output:\n{log}")
        if time.monotonic() >= self._deadline:
            raise TimeoutError(f"timed out after {self._timeout:g} s: waiting for {what}")
        time.sleep(_POLL_SECONDS)


def import_ipyparallel() -> Any:
    """Returns ipyparallel. Raises ImportError with the command to install it if it is missing."""
    try:
        import ipyparallel
    except ImportError as error:
        raise ImportError(
            "fogdist.interactive needs ipyparallel, which is not installed: pip install 'fogdist[notebook]'"
        ) from error
    return ipyparallel


def _end_of(process: subprocess.Popen[bytes]) -> str | None:
    status = process.poll()
    if status is None:
        return None
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
