"""Starts ranks on this host as torchrun does: `python -m fog_cli.programs.local_ranks N COMMAND ...`.

torchrun itself calls `torch.distributed.launcher`. Calling it directly also tells which rank failed first, whose exit
status this program returns.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import uuid

from fog_cli.programs.rank import STATUS_OF_VICTIM, die_with_parent


def main() -> int:
    """Runs the command of the command line on each rank; returns the exit status."""
    die_with_parent()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ranks, (program, *words) = int(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory(prefix="fog-run-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # the name of the host may not resolve
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, program)(*words)
        except ChildFailedError as error:
            failures = sorted(error.failures.items(), key=lambda each: each[1].timestamp)
            # The one that others have lost is the cause, though its process may have taken longer to end.
            causes = [each for each in failures if each[1].exitcode != STATUS_OF_VICTIM]
            rank, failure = (causes or failures)[0]
            status = int(failure.exitcode)
            how = f"with exit status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
            print(f"fog run: rank {rank} (process {failure.pid}) ended {how}", file=sys.stderr)
            return status if status >= 0 else 128 - status
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
