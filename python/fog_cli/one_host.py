"""`fog run` on one host: torchrun's machinery starts the ranks, passes signals on, and ends all ranks when one fails.

torchrun itself calls `torch.distributed.launcher`. Calling it directly also tells which rank failed first, whose exit
status is that of `fog run`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import uuid
from types import FrameType

from fog_cli import processes
from fog_cli.launchers import Job
from fog_cli.programs.rank import STATUS_OF_VICTIM


def run(job: Job) -> int:
    """Runs the ranks of a job; returns the exit status of the rank that failed first, or 0.

    The environment of this process becomes that of the ranks.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.clear()
    # Torch sets no handlers for the signals that this function handles.
    os.environ.update(job.environment, TORCHELASTIC_SIGNALS_TO_HANDLE="SIGQUIT")
    if os.isatty(0):  # ranks are in sessions of their own and cannot read from a terminal
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    processes.adopt_orphans()
    received: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        """Has torch pass on the first signal; the second one kills the ranks, because they may hang."""
        received.append(number)
        if len(received) == 1:
            raise SignalException("", signal.Signals(number))
        processes.kill_with_descendants(processes.descendants_of(os.getpid()))

    # An ignored signal, as under nohup, stays ignored.
    handled = [each for each in processes.SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    for each in handled:
        signal.signal(each, on_signal)
    status, words = 0, ""
    try:
        with tempfile.TemporaryDirectory(prefix="fog-run-") as folder:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=job.ranks,
                run_id=str(uuid.uuid4()),
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",  # the name of the host may not resolve
                max_restarts=0,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            elastic_launch(config, job.rank[0])(*job.rank[1:])
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda each: each[1].timestamp)
        # The one that others have lost is the cause, though its process may have taken longer to end.
        causes = [each for each in failures if each[1].exitcode != STATUS_OF_VICTIM]
        rank, failure = (causes or failures)[0]
        status = int(failure.exitcode)
        words = f"fog run: rank {rank} (process {failure.pid}) ended {processes.describe(status)}"
        status = status if status >= 0 else 128 - status
    except SignalException as error:
        status = 128 + int(error.sigval)
    # What is left are the processes that copy the ranks' output, and those that ranks have started.
    for each in handled:
        signal.signal(each, signal.SIG_IGN)
    processes.end_descendants()
    if words:
        print(words, file=sys.stderr, flush=True)
    return status
