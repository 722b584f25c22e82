"""Runs a script on several ranks through a real launcher, as a user does."""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness import WorldPool

ROOT = Path(__file__).resolve().parent.parent
# torchrun gives its workers 30 s to leave after SIGTERM before it kills them.
STOP_TIMEOUT = 40.0
# A variable that marks the processes of a job.
MARK = "MARK_OF_A_TEST"
SETTLE_SECONDS = 10.0


def launcher_command(launcher: str, ranks: int) -> list[str]:
    """Returns the words of a command before the script's path.

    Args:
        launcher: "torchrun" or "mpiexec" (that of the mpich package of this interpreter).
        ranks: Number of processes on this host.
    """
    if launcher == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run"]
        return [*run, "--standalone", f"--nproc_per_node={ranks}"]
    mpiexec = Path(sys.executable).parent / "mpiexec"
    return [str(mpiexec if mpiexec.exists() else shutil.which("mpiexec")), "-n", str(ranks), sys.executable]


class Job:
    """A script that runs on several ranks; its output goes to a file.

    Args:
        script: The script with its arguments.
        ranks: Number of processes.
        log: File for the output of the launcher and the ranks.
        launcher: As in `launcher_command`, or the words themselves.
        environment: More environment variables.
    """

    def __init__(
        self,
        script: Sequence[str | Path],
        ranks: int,
        log: Path,
        launcher: str | Sequence[str] = "torchrun",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        # All processes of the job inherit the mark, even if a launcher starts them in other sessions.
        self._mark = f"{MARK}={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        variables = os.environ | {"OMP_NUM_THREADS": "1", name: value} | dict(environment or {})
        command = launcher_command(launcher, ranks) if isinstance(launcher, str) else launcher
        log.write_bytes(b"")  # processes append to it
        self._process = self._start([*command, *map(str, script)], variables)

    def _start(self, words: list[str], variables: dict[str, str]) -> Any:
        with self._log.open("ab") as file:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=self._log.parent,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Returns the process id of the launcher."""
        return self._process.pid

    @property
    def output(self) -> str:
        """Returns the output so far; each state of a progress bar is a line."""
        return self._log.read_text(errors="replace").replace("\r", "\n")

    def processes(self) -> list[int]:
        """Returns the process ids of the launcher and of all its living descendants."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
                    if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def wait_for(self, condition: Callable[[str], bool], timeout: float) -> None:
        """Returns once the output fulfils the condition; raises AssertionError if that takes too long."""
        deadline = time.monotonic() + timeout
        while not condition(self.output):
            assert self._process.poll() is None, f"the job ended early:\n{self.output}"
            if time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"not seen within {timeout} s in the output:\n{self.output}")
            time.sleep(0.05)

    def wait(self, timeout: float) -> int:
        """Returns the launcher's exit status; after the timeout, stops the job and raises AssertionError."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"the job did not end within {timeout} s:\n{self.output}") from None

    def stop(self) -> None:
        """Ends the launcher and its ranks, if they still run."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


@contextlib.contextmanager
def started(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    """Stops the jobs at the end, and checks that none of their processes is left."""
    try:
        yield jobs
    finally:
        for job in jobs:
            job.stop()
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := [pid for job in jobs for pid in job.processes()]:
        assert time.monotonic() < deadline, f"processes left: {left}"
        time.sleep(0.1)


def run_script(
    script: Sequence[str | Path],
    ranks: int,
    log: Path,
    launcher: str | Sequence[str] | WorldPool = "torchrun",
    timeout: float = 120.0,
) -> str:
    """Runs a script on several ranks to its end and returns the output.

    Args:
        script: The script with its arguments.
        ranks: Number of processes.
        log: File for the output; the ranks run in its folder.
        launcher: As in `Job`; or worlds whose ranks run scripts one after the other, as `python script`
            would, in the environment of torchrun, so that no interpreter has to start and import torch.
        timeout: The timeout in seconds.

    Raises:
        AssertionError: The script did not end in time, or not with status 0.
    """
    if isinstance(launcher, WorldPool):
        log.touch()
        statuses = launcher(ranks).run(_as_main, [str(word) for word in script], str(log), timeout=timeout)
        output = log.read_text(errors="replace").replace("\r", "\n")
        assert statuses == [0] * ranks, f"exit statuses {statuses}:\n{output}"
        return output
    job = Job(script, ranks, log, launcher)
    try:
        status = job.wait(timeout)
    finally:
        job.stop()
    assert status == 0, f"exit status {status}:\n{job.output}"
    return job.output


def _as_main(words: list[str], log: str) -> int:
    """Runs a script as `python script` does; returns its exit status."""
    printed = [os.dup(number) for number in (1, 2)]
    folder, path, arguments = os.getcwd(), list(sys.path), sys.argv
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    try:
        for number in (1, 2):
            os.dup2(file, number)
        os.chdir(Path(log).parent)
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as exit_:
            if exit_.code is None or isinstance(exit_.code, int):
                return exit_.code or 0
            print(exit_.code, file=sys.stderr)
            return 1
        return 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # What the next script's ranks write into the store has names of its own, as after a restart by torchrun.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), printed, strict=True):
            os.dup2(before, number)
        for descriptor in (file, *printed):
            os.close(descriptor)
        os.chdir(folder)
        sys.path[:], sys.argv = path, arguments


# Says when it is ready, and which signal stops it.
WAITING = """
import os, signal, sys, time

def stop(number, frame):
    os.write(1, f"stopped by {signal.Signals(number).name}\\n".encode())  # print() may be interrupted in print()
    sys.exit(3)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
time.sleep(600)
"""

# Does not stop, and starts a process in a session of its own.
STUBBORN = """
import signal, subprocess, sys, time

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""
