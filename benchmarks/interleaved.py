"""Schedule and statistics of measurements: several ways to do one thing take turns on all ranks.

In each iteration every way has its turn, in a new random order, with a barrier before each turn. So the machine's other
work, and the state of caches and threads that one way leaves to the next, affect all ways alike. The time of a turn is
the longest of all ranks. Results are the median and the quartiles over the iterations.
"""

from __future__ import annotations

import gc
import random
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

WARM_UP = 3
FEWEST_ITERATIONS = 7
MOST_ITERATIONS = 301
# Seconds between the checks of a sleeping rank, and of one that sleeps while others measure short operations.
NAP = 2e-4
LONG_NAP = 1e-3


@dataclass(frozen=True)
class Times:
    """Milliseconds of one way: median and quartiles, over the iterations, of the longest time of all ranks."""

    median: float
    lower: float
    upper: float

    def divided(self, number: float) -> Times:
        """Returns so many parts of them."""
        return Times(self.median / number, self.lower / number, self.upper / number)


def sleep_until_all_come(mpi: MPI.Intracomm, nap: float) -> None:
    """A barrier that leaves the cores to ranks that still work.

    Args:
        mpi: Communicator of the ranks.
        nap: Seconds between two checks.
    """
    request = mpi.Ibarrier()
    while not request.Test():
        time.sleep(nap)


def take_turns(
    ways: Mapping[str, Callable[[], object]],
    mpi: MPI.Intracomm,
    options: Namespace,
    *,
    are_long: bool = False,
    apart: Mapping[str, MPI.Intracomm | None] | None = None,
    before: Callable[[str], object] = lambda name: None,
    after: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Times], int]:
    """Times each way; all ranks call this together, with the same names.

    Args:
        ways: The functions to call, by name.
        mpi: Communicator for the barriers and the collection of times.
        options: The program's: `seconds` of the measurement, about, or the number of `iterations` instead; the calls of
            a turn, `back_to_back`; and where the program has it the `pause`, for whose milliseconds all ranks sleep
            after the barrier, as if they computed. They wake at different times, so a turn then lasts from when the
            last rank begins until the last one ends, on one host.
        are_long: Whether turns are so long that ranks share the cores within one, although they need not wait for each
            other. A turn then lasts from when the first rank begins until the last one ends, on one host: a rank that
            gets no core after the barrier begins late, and would seem fast by its own clock. Ranks also sleep before
            the barrier, because polling ranks would take the core from ranks that still work.
        apart: The communicator of each way that only some ranks use, None on the other ranks. Before each turn all
            ranks sleep until all have come; then the ranks of the turn meet at their own barrier, and the others sleep
            until the next turn, without effect on the times. Must be given for all ways or for none.
        before: Called with the name of the way before the barrier of each turn. Its time does not count.
        after: Called after the last call of a turn, within its time.

    Returns:
        The times of one call of each way, on all ranks, and the number of iterations.
    """
    names = list(ways)
    iterations, pause = options.iterations, getattr(options, "pause", 0.0) / 1e3
    back_to_back = options.back_to_back

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
        after()
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
        iterations = min(max(int(options.seconds / one), FEWEST_ITERATIONS), MOST_ITERATIONS)

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
    from mpi4py import MPI  # imported here, because the import starts MPI

    if are_long:
        mpi.Allreduce(MPI.IN_PLACE, begins, MPI.MIN)
    if pause:
        mpi.Allreduce(MPI.IN_PLACE, begins, MPI.MAX)
    longest = (ends - begins) / back_to_back
    mpi.Allreduce(MPI.IN_PLACE, longest, MPI.MAX)
    lower, median, upper = 1e3 * np.percentile(longest, [25, 50, 75], axis=0)
    times = {name: Times(float(median[i]), float(lower[i]), float(upper[i])) for i, name in enumerate(names)}
    return times, iterations
