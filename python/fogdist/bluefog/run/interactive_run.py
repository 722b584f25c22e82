"""`bluefog.run.interactive_run`: notebooks, whose ranks are engines of ipyparallel."""

from __future__ import annotations

from fogdist import interactive


def interrupt_hanged_processes(profile: str = "bluefog") -> None:
    """Interrupts the ranks of this notebook, as `fogdist.interactive.Cluster.interrupt` does.

    `ibfrun start -np 4` is `fogdist.interactive.start` here.

    Args:
        profile: Not used: they are all ranks that this process has started.

    Raises:
        RuntimeError: This process has started no ranks.
    """
    clusters = interactive.running()
    if not clusters:
        raise RuntimeError(
            "this process has started no ranks to interrupt: fogdist.interactive.start(4) does what `ibfrun start -np 4` did"
        )
    for cluster in clusters:
        cluster.interrupt()
