"""Starts the programs of `fog_cli.programs` on this host, alone or as ranks, with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fog_cli import launchers
from fog_cli.processes import describe


@dataclass(frozen=True)
class Ended:
    """The result of a process.

    Attributes:
        status: Its exit status, or the negative number of the signal that ended it; None if it exceeded its time.
        lines: The objects that it printed on standard output, one line of JSON each.
        errors: Its output on standard error.
    """

    status: int | None
    lines: list[dict[str, Any]]
    errors: str

    def why(self) -> str:
        """Returns the reason for a failure as text; "" if the process succeeded."""
        if self.status == 0:
            return ""
        if self.status is None:
            return "it did not end in time and was killed"
        last = self.errors.strip().splitlines()[-1:]
        how = f"it ended {describe(self.status)}"
        return f"{how}: {last[0]}" if last else how


def run_program(name: str, words: Sequence[str] = (), *, limit: float) -> Ended:
    """Runs one program of `fog_cli.programs`; `limit` is in seconds."""
    (ended,) = _run([(name, list(words), {})], limit)
    return ended


def run_ranks(
    name: str,
    ranks: int,
    words: Sequence[str] = (),
    *,
    limit: float,
    variables: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Runs a program on `ranks` processes, in the environment of torchrun.

    Args:
        name: The name of a module of `fog_cli.programs`.
        ranks: The number of ranks.
        words: The arguments of the program.
        limit: The time limit in seconds.
        variables: Additional environment variables.

    Returns:
        The result of each rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    starts = []
    for rank in range(ranks):
        own = {key: str(value) for key, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        starts.append((name, list(words), own | dict(variables or {})))
    return _run(starts, limit)


def _run(starts: Sequence[tuple[str, list[str], dict[str, str]]], limit: float) -> list[Ended]:
    inherited = launchers.without_ranks(os.environ)
    deadline = time.monotonic() + limit
    # Output goes to files: a full pipe would block a process, and a pipe that a left-over process keeps open would
    # block this one.
    with tempfile.TemporaryDirectory(prefix="fog-") as folder:
        outputs = [
            (Path(folder, f"{number}.out"), Path(folder, f"{number}.err")) for number in range(len(starts))
        ]
        processes = []
        try:
            for (name, words, variables), (out, err) in zip(starts, outputs, strict=True):
                with out.open("wb") as stdout, err.open("wb") as stderr:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", f"fog_cli.programs.{name}", *words],
                            env=inherited | variables,
                            stdin=subprocess.DEVNULL,
                            stdout=stdout,
                            stderr=stderr,
                            start_new_session=True,
                        )
                    )
            statuses = [_wait(process, deadline) for process in processes]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [
            Ended(status, _objects(out), err.read_text(errors="replace"))
            for status, (out, err) in zip(statuses, outputs, strict=True)
        ]


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return None


def _objects(path: Path) -> list[dict[str, Any]]:
    """Returns the lines that are JSON objects. Libraries may print other lines."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found
