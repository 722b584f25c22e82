"""Schedule and statistics: several ways to do one thing take turns on all ranks.

In each iteration every way has its turn, in an order drawn anew, and a barrier stands before each turn. So
whatever else the machine does, and what one leaves in the caches and to its threads for the next, meets all
alike.
The time of a turn is the longest of all ranks; kept are the median and the quartiles over the iterations.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

WARM_UP = 3
FEWEST_ITERATIONS = 7
MOST_ITERATIONS = 301
# Seconds between the looks of a rank that sleeps; and of one that sleeps while others measure what takes less time.
NAP = 2e-4
LONG_NAP = 1e-3


@dataclass(frozen=True)
class Times:
    """Milliseconds of one way: median and quartiles over the iterations of the longest time of all ranks."""

    median: float
    lower: float
    upper: float


def sleep_until_all_come(mpi: MPI.Intracomm, nap: float) -> None:
    """A barrier that leaves the cores to those who still work.

    Args:
        mpi: Whose ranks meet.
        nap: Seconds between two looks.
    """
    request = mpi.Ibarrier()
    while not request.Test():
        time.sleep(nap)


def take_turns(
    ways: Mapping[str, Callable[[], object]],
    mpi: MPI.Intracomm,
    *,
    seconds: float,
    iterations: int | None = None,
    back_to_back: int = 1,
    pause: float = 0.0,
    are_long: bool = False,
    apart: Mapping[str, MPI.Intracomm | None] | None = None,
    before: Callable[[str], object] = lambda name: None,
) -> tuple[dict[str, Times], int]:
    """Times each way; all ranks call this together, with the same names.

    Args:
        ways: What is called, by name.
        mpi: Serves the barriers and collects the times.
        seconds: About how long to measure; sets the number of iterations.
        iterations: Their number, instead.
        back_to_back: Calls in one turn.
        pause: Seconds that all ranks sleep after the barrier, as if they computed. They wake at different times, so a
            turn then lasts from when the last rank begins until the last one ends, on one host.
        are_long: Whether turns are so long that ranks share the cores within one, though they need not wait for
            each other. A turn then lasts from when the first rank begins until the last one ends, on one host: a
            rank that gets no core after the barrier begins late, and would seem fast by its own clock. And ranks
            sleep before the barrier, as those that poll would take the core from those that still work.
        apart: For ways that only some ranks go: their communicator, None on the other ranks. Before each turn all ranks
            sleep until everyone has come; then those whose turn it is meet at a barrier of their own, and the others
            sleep until the next turn. These do not count. Give all ways or none.
        before: Called with the name of the way before the barrier of each turn; its time does not count.

    Returns:
        The times of one call of each way, on all ranks, and the number of iterations.
    """
    names = list(ways)

    def turn(name: str) -> tuple[float, float]:
        before(name)
        if apart:
            sleep_until_all_come(mpi, LONG_NAP)
            those = apart[name]
            if those is None:
                return 0.0, 0.0
            those.Barrier()
        elif are_long:
            sleep_until_all_come(mpi, NAP)
        else:
            mpi.Barrier()
        if pause:
            time.sleep(pause)
        way = ways[name]
        begin = time.perf_counter()
        for _ in range(back_to_back):
            way()
        return begin, time.perf_counter()

    for _ in range(WARM_UP - 1):
        for name in names:
            turn(name)
    if iterations is None:
        mpi.Barrier()
        begin = time.perf_counter()
        for name in names:
            turn(name)
        one = mpi.bcast(time.perf_counter() - begin)
        iterations = min(max(int(seconds / one), FEWEST_ITERATIONS), MOST_ITERATIONS)

    begins, ends = np.empty((2, iterations, len(names)))
    gc.collect()
    gc.disable()
    try:
        order = list(range(len(names)))
        draw = random.Random(0)  # the same on all ranks
        for iteration in range(iterations):
            draw.shuffle(order)
            for index in order:
                begins[iteration, index], ends[iteration, index] = turn(names[index])
    finally:
        gc.enable()
    from mpi4py import MPI  # here, as importing it starts MPI

    if are_long:
        mpi.Allreduce(MPI.IN_PLACE, begins, MPI.MIN)
    if pause:
        mpi.Allreduce(MPI.IN_PLACE, begins, MPI.MAX)
    longest = (ends - begins) / back_to_back
    mpi.Allreduce(MPI.IN_PLACE, longest, MPI.MAX)
    lower, median, upper = 1e3 * np.percentile(longest, [25, 50, 75], axis=0)
    times = {name: Times(float(median[i]), float(lower[i]), float(upper[i])) for i, name in enumerate(names)}
    return times, iterations
