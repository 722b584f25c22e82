"""A mode of `soak_faults` in which ranks are killed at every moment of every operation.

In each step all ranks call the next of `OPERATIONS`, whose result each of them checks. The parent names the operation
and the moment at which a rank ends its process:

- before: the others have called the operation, the rank has not.
- within: a timer of the system ends the process while it calls the operation or waits for it, a few microseconds or some
  milliseconds after the call.
- begun: the operation is in flight, and the rank does not wait for it yet.
- after: the rank's part is complete, and perhaps not that of the others.

The ranks that are left go on with `fogdist.reconfigure`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from operations import prepare
from reference import Checks
from soak_modes import RANKS, Board, Reconfigured
from torch import Tensor

MOMENTS = ("before", "within", "begun", "after")
# More than a message carries inline, and more than MPI sends before the receiver has agreed.
SMALL, LARGE = 100, 300_000
# In which the others come to the operation that this rank does not call.
OTHERS_COME = 0.02
# Of the timer, least and greatest: from a part of a small operation to longer than a large one.
TIMER = (20e-6, 5e-3)

# An operation in flight, and whether its result is right.
Begun = tuple[list[dist.Work], Callable[[], bool]]


class Operations(Reconfigured):
    """All operations in turn."""

    def __init__(self, rank: int, board: Board) -> None:
        super().__init__(rank, board)
        self.generation = 0
        self.says_over = False
        self.draw = random.Random(RANKS * int(board.seed[0]) + rank)
        self.begin_again()

    def begin_again(self) -> None:
        from fog_pg import _C

        self.place, self.size = self.members.index(self.rank), len(self.members)
        self.values = [float(2**member) for member in self.members]
        self.before, self.next = (self.place - 1) % self.size, (self.place + 1) % self.size
        self.backend = self.group._get_backend(torch.device("cpu"))
        sources, destinations = [(self.before, 0.5)], [(self.next, 1.0)]
        self.ring = _C.NeighborPlan(self.place, self.size, 0.5, sources, destinations)
        self.generation += 1
        self.windows = {
            name: self.backend.create_window(
                self.own(LARGE), f"{name} {self.generation}", [self.before], [self.next], zero_init=True
            )
            for name in ("put", "accumulate", "get")
        }

    def own(self, *shape: int) -> Tensor:
        """Returns this rank's tensor: the numbers of ranks can be told from any sum of them."""
        return torch.full(shape, self.values[self.place])

    @property
    def root(self) -> int:
        """Another rank in each round of operations."""
        return self.number // len(OPERATIONS) % self.size

    def _step(self) -> bool:
        index = self.number % len(OPERATIONS)
        name, begin = list(OPERATIONS.items())[index]
        try:
            self._come_to(index, "before")
            self._come_to(index, "within")
            works, is_right = begin(self)
            within = self.board.doing[self.rank]
            self._come_to(index, "begun")
            self.board.doing[self.rank] = within
            for work in works:
                work.wait()
            self._come_to(index, "after")
        except dist.DistError:
            if name.startswith("window"):
                # It fails for the neighbors of the lost rank only. So the others learn of it.
                self.backend.abort()
            raise
        self.expect(f"{name} among {self.members}", is_right())
        self.number += 1
        return self.says_over

    def _come_to(self, index: int, moment: str) -> None:
        """Tells that the rank is at this moment, and ends its process if it is to do so here."""
        place = 1 + index * len(MOMENTS) + MOMENTS.index(moment)
        board, rank = self.board, self.rank
        board.doing[rank] = place
        if board.moment[rank] != place:
            return
        if moment == "within":
            least, most = TIMER
            seconds = least * (most / least) ** self.draw.random()
            board.died[rank] = time.monotonic() + seconds
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return
        if moment == "before":
            time.sleep(OTHERS_COME)
        board.died[rank] = time.monotonic()
        os.kill(os.getpid(), signal.SIGKILL)


def _allreduce_and_over(on: Operations) -> Begun:
    """Begins the sum by which the ranks also agree on the end of the training, and on the number of the step."""
    tensor = on.own(SMALL)
    tensor[0], tensor[1] = float(on.board.over[0]), float(on.number)

    def is_right() -> bool:
        on.says_over = tensor[0].item() > 0.0
        return tensor[1].item() == on.size * on.number and _all(tensor[2:], sum(on.values))

    return [_work(dist.all_reduce(tensor, group=on.group, async_op=True))], is_right


def _collective(on: Operations, name: str, numel: int) -> Begun:
    ready = prepare(name, torch.float32, (numel,), seed=on.number % 5, root=on.root, group=on.group)
    work = _work(ready.start(True))

    def is_right() -> bool:
        with Checks() as checks:  # an AssertionError shows which elements are wrong
            ready.verify(checks, name)
        return True

    return [work], is_right


def _barrier(on: Operations) -> Begun:
    return [_work(dist.barrier(on.group, async_op=True))], lambda: True


def _messages(on: Operations, numel: int) -> Begun:
    into = torch.zeros(numel)
    works = [
        _work(dist.isend(on.own(numel), group=on.group, group_dst=on.next)),
        _work(dist.irecv(into, group=on.group, group_src=on.before)),
    ]
    return works, lambda: _all(into, on.values[on.before])


def _neighbor_allreduce(on: Operations, numel: int) -> Begun:
    work = on.backend.neighbor_allreduce(on.own(numel), on.ring)
    mean = 0.5 * on.values[on.place] + 0.5 * on.values[on.before]
    return [work], lambda: _all(_output(work), mean)


def _neighbor_allgather(on: Operations) -> Begun:
    work = on.backend.neighbor_allgather(on.own(LARGE, 1), on.ring)
    return [work], lambda: _output(work).numel() == LARGE and _all(_output(work), on.values[on.before])


def _hierarchical(on: Operations) -> Begun:
    apart = [[place] for place in range(on.size)]
    work = on.backend.hierarchical_neighbor_allreduce(on.own(LARGE), apart, on.ring)
    mean = 0.5 * on.values[on.place] + 0.5 * on.values[on.before]
    return [work], lambda: _all(_output(work), mean)


def _allgather_concat(on: Operations) -> Begun:
    work = on.backend.allgather_concat(on.own(SMALL + on.place, 1))
    rows = [SMALL + place for place in range(on.size)]
    return [work], lambda: all(map(_all, _output(work).split(rows), on.values))


def _window_put(on: Operations) -> Begun:
    window = on.windows["put"]
    work = window.put(on.own(LARGE), [(on.next, 1.0)])

    def is_right() -> bool:  # the neighbor's put may have come, or not
        slot = window.update(0.0, [(on.before, 1.0)], clone=True)
        return _all(slot, 0.0) or _all(slot, on.values[on.before])

    return [work], is_right


def _window_accumulate(on: Operations) -> Begun:
    window = on.windows["accumulate"]
    work = window.accumulate(on.own(LARGE), [(on.next, 1.0)])

    def is_right() -> bool:
        times = window.update(0.0, [(on.before, 1.0)], reset=True, clone=True) / on.values[on.before]
        return _all(times, times[0].item()) and times[0].item() in (0.0, 1.0, 2.0)

    return [work], is_right


def _window_get(on: Operations) -> Begun:
    window = on.windows["get"]
    work = window.get([(on.before, 1.0)])
    return [work], lambda: _all(window.update(0.0, [(on.before, 1.0)], clone=True), on.values[on.before])


OPERATIONS: dict[str, Callable[[Operations], Begun]] = {
    "allreduce": _allreduce_and_over,
    "large allreduce": lambda on: _collective(on, "all_reduce", LARGE),
    "broadcast": lambda on: _collective(on, "broadcast", SMALL),
    "large broadcast": lambda on: _collective(on, "broadcast", LARGE),
    "reduce": lambda on: _collective(on, "reduce", SMALL),
    "large reduce": lambda on: _collective(on, "reduce", LARGE),
    "allgather": lambda on: _collective(on, "all_gather", SMALL),
    "large allgather": lambda on: _collective(on, "all_gather", LARGE),
    "gather": lambda on: _collective(on, "gather", LARGE),
    "scatter": lambda on: _collective(on, "scatter", LARGE),
    "reduce_scatter": lambda on: _collective(on, "reduce_scatter", LARGE),
    "alltoall": lambda on: _collective(on, "all_to_all", SMALL),
    "large alltoall": lambda on: _collective(on, "all_to_all", LARGE),
    "barrier": _barrier,
    "send and recv": lambda on: _messages(on, SMALL),
    "large send and recv": lambda on: _messages(on, LARGE),
    "neighbor_allreduce": lambda on: _neighbor_allreduce(on, SMALL),
    "large neighbor_allreduce": lambda on: _neighbor_allreduce(on, LARGE),
    "hierarchical_neighbor_allreduce": _hierarchical,
    "neighbor_allgather": _neighbor_allgather,
    "allgather_concat": _allgather_concat,
    "window put": _window_put,
    "window accumulate": _window_accumulate,
    "window get": _window_get,
}
Operations.moments = [f"{name}, {moment}" for name in OPERATIONS for moment in MOMENTS]


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank takes part
    return work


def _output(work: dist.Work) -> Tensor:
    output: Tensor = work.get_future().value()[0]
    return output


def _all(tensor: Tensor, value: float) -> bool:
    return bool((tensor == value).all())
