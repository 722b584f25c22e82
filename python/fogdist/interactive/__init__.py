"""Ranks for a notebook: each is a process that runs the cells that begin with ``%%px``.

::

    import fogdist.interactive

    cluster = fogdist.interactive.start(4)

Then, in other cells::

    %%px
    import fogdist

    fogdist.init()
    print(fogdist.rank(), fogdist.in_neighbor_ranks())

The ranks are engines of ipyparallel on this host, with the environment that torchrun gives its workers: engine i is
rank i. docs/notebooks.md says more.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from fogdist.interactive.processes import Processes
from fogdist.topology.validation import check_int

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Cluster", "running", "start"]

# The time for all ranks to start: each imports torch, on a machine that may be busy.
START_TIMEOUT = 120.0

_running: WeakSet[Cluster] = WeakSet()


class Cluster:
    """Ranks on this host that run a notebook's cells that begin with ``%%px``; `start` is another name for it.

    Each rank is a process with the environment that torchrun gives its workers (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
    `MASTER_ADDR`, `MASTER_PORT` and others), so that ``fogdist.init()`` in such a cell works. Its output is shown with its
    number. The processes live until `stop`, the end of a ``with`` block or the end of this process, however it ends, or until
    the object is garbage-collected, as when the cell that made it is run again.

    Args:
        size: The number of ranks.
        environment: Variables for the ranks, in addition to those of this process.
        timeout: Seconds until all ranks must have started.

    Raises:
        ImportError: ipyparallel is not installed: ``pip install 'fogdist[notebook]'``.
        TypeError: An argument has a wrong type.
        ValueError: `size` is below 1 or `timeout` not above 0.
        RuntimeError: A process ended while it was starting.
        TimeoutError: Ranks are missing after `timeout`.
    """

    def __init__(
        self, size: int, *, environment: Mapping[str, str] | None = None, timeout: float = START_TIMEOUT
    ) -> None:
        _check(size, environment, timeout)
        self._size = size
        self._environment = dict(environment or {})
        self._timeout = timeout
        # A list of one Processes, empty after stop(). The finalizer ends it and must not refer to this object.
        self._processes: list[Processes] = []
        self._finalizer = weakref.finalize(self, _end, self._processes)
        self._start()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def is_running(self) -> bool:
        """Whether there are processes; False after `stop`."""
        return bool(self._processes)

    @property
    def client(self) -> Any:
        """ipyparallel's `Client`; another one after `restart`."""
        return self._open().client

    @property
    def view(self) -> Any:
        """ipyparallel's `DirectView` of all ranks, which ``%%px`` uses; another one after `restart`."""
        self._open()
        return self._view

    @property
    def pids(self) -> list[int]:
        """The process ID of each rank."""
        return list(self._open().pids)

    def check(self) -> None:
        """Raises RuntimeError if a rank has ended; called before each cell runs."""
        processes = self._open()
        ended = [f"rank {rank} {how}" for rank in range(self._size) if (how := processes.end_of(rank))]
        if ended:
            raise RuntimeError(f"{'; '.join(ended)}. cluster.restart() starts all ranks anew")

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in the cell that the ranks are running, as the notebook's stop button does.

        An operation of fog that waits for other ranks ends by it too. The group may not know then which
        operation is next: `restart`, or ``fogdist.shutdown()`` and ``fogdist.init()`` in a cell. A rank that runs no cell goes on.

        Raises:
            RuntimeError: After `stop`.
        """
        processes = self._open()
        for rank, pid in enumerate(processes.pids):
            if processes.end_of(rank) is None:
                os.kill(pid, signal.SIGINT)

    def restart(self) -> None:
        """Ends the ranks and starts the same number of new ones, as a new job; ``%%px`` then runs on these.

        Raises:
            RuntimeError: As the class. There are no ranks then.
            TimeoutError: As the class.
        """
        self.stop()
        self._start()

    def stop(self) -> None:
        """Ends the ranks, by force after some seconds. Does nothing if there are none."""
        _end(self._processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self._processes else "stopped"
        return f"<fogdist.interactive.Cluster of {self._size} ranks, {state}>"

    def _start(self) -> None:
        processes = Processes(self._size, self._environment, self._timeout)
        self._processes.append(processes)
        self._view = _view_of(processes.client, weakref.ref(self))
        _running.add(self)

    def _open(self) -> Processes:
        if not self._processes:
            raise RuntimeError("the cluster was stopped. cluster.restart() starts its ranks anew")
        return self._processes[0]


start = Cluster


def running() -> list[Cluster]:
    """Returns the clusters of this process whose ranks have not been stopped."""
    return [cluster for cluster in _running if cluster.is_running]


def _check(size: object, environment: object, timeout: object) -> None:
    check_int(size, "size", minimum=1)  # type: ignore[arg-type]
    given = {} if environment is None else environment
    if not isinstance(given, Mapping) or not all(
        isinstance(text, str) for each in given.items() for text in each
    ):
        raise TypeError(f"environment must be a dict of strings to strings, got {environment!r}")
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise TypeError(f"timeout must be a number of seconds, got {type(timeout).__name__}")
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds, got {timeout}")


def _view_of(client: Any, reference: weakref.ref[Cluster]) -> Any:
    """Returns a view of all ranks that reports why a cell cannot run; in a notebook, it is the view of ``%%px``."""
    from IPython import get_ipython

    view = client[:]
    view.block = True
    execute = view.execute

    def checked(*arguments: Any, **options: Any) -> Any:
        cluster = reference()
        if cluster is None:
            raise RuntimeError("the cluster is gone: keep what fogdist.interactive.start() returns")
        cluster.check()
        return execute(*arguments, **options)

    view.execute = checked
    if get_ipython() is not None:
        view.activate()
    return view


def _end(processes: list[Processes]) -> None:
    while processes:
        processes.pop().end()
