"""Runs many operations of all kinds in random order, several in flight: none is lost or wrong, and no memory leaks.

FOG_SOAK_OPERATIONS sets the number; `make soak` runs 20,000. All ranks draw the same operations from one seed
(FOG_SOAK_SEED), and each draws the order in which it waits for its operations. All results are exact: sums that fog
promises to add in rank order, extrema, integers, copies, and mixing of values with few bits.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import World
from operations import COLLECTIVES, REDUCING, ROOTED, prepare, reductions
from reference import DTYPES, FLOATS, Checks, forget_inputs, make_input, sum_in_rank_order
from torch import Tensor

OPERATIONS = int(os.environ.get("FOG_SOAK_OPERATIONS", "2000"))
SEED = int(os.environ.get("FOG_SOAK_SEED", "1"))
RANKS = 4
GROUPS = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1], [2, 3], [1, 2, 3], [0, 2], [0, 1, 3], [1, 3]]
MOST_IN_FLIGHT = 8
# Empty, below and above the size that a message carries inline, with and without an even split.
SHAPES = [(0,), (1,), (3, 5), (64,), (257,), (1000,), (33, 31), (2048,), (9001,), (70_001,)]
# The relative frequencies of the kinds.
KINDS = {
    "collective": 10,
    "message": 4,
    "barrier": 1,
    "mix": 3,
    "hierarchical": 2,
    "local": 1,
    "neighbor_allgather": 1,
    "concat": 1,
}
# Of what is allocated, and of what is resident: blocks of many sizes leave gaps, which grow for some 30,000 operations.
ALLOWED_GROWTH, ALLOWED_GAPS = 0.005, 0.04
SAMPLES = 10


@dataclasses.dataclass(frozen=True)
class Started:
    """An operation in flight on this rank, with functions that wait for it and then check it."""

    label: str
    wait: Callable[[], object]
    verify: Callable[[Checks, str], None]


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of a rank.

    Attributes:
        operations: Number of operations in which it took part.
        kinds: Number of operations of each kind.
        resident: Bytes resident in memory, after the warm-up and then at even distances to the end.
        allocated: Bytes that are allocated by malloc and not freed, at the same times.
        seconds: Duration of all operations.
    """

    operations: int
    kinds: dict[str, int]
    resident: list[int]
    allocated: list[int]
    seconds: float


class AllocatorInformation(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated_bytes() -> int:
    """Returns the bytes that malloc has given and not got back; after `resident_bytes`, which frees what is unused."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = AllocatorInformation
    information = ask()
    return int(information.uordblks + information.hblkhd)


def resident_bytes() -> int:
    """Returns this process's resident memory after the test and the allocator have freed unused memory.

    Pages of other ranks' arenas count there, not in each rank that has read them.
    """
    forget_inputs()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident, counts = 0, True
    with open("/proc/self/smaps") as file:
        for words in map(str.split, file):
            if words[0] == "Rss:":
                resident += int(words[1]) * 1024 if counts else 0
            elif not words[0].endswith(":"):  # the first line of a mapping: addresses, permissions, ..., name
                counts = not (words[1] == "r--s" and words[-2].endswith("fog_arena"))
    return resident


def whole_numbers(rank: int, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns values from -8 to 7: sums of a few of them, times quarters, are exact in every floating dtype."""
    start = torch.arange(math.prod(shape)).reshape(shape)
    return ((start * 5 + rank * 3 + seed) % 16 - 8).to(dtype)


class Soak:
    """Draws and runs the operations on one rank."""

    def __init__(self, seed: int) -> None:
        from fog_pg import _C

        self.rank = dist.get_rank()
        self.seed = seed
        self.own = random.Random(seed * RANKS + self.rank)
        self.groups = [dist.group.WORLD, *(dist.new_group(members) for members in GROUPS[1:])]
        self.in_flight: list[Started] = []
        self.kinds: dict[str, int] = {}
        self.plan = _C.NeighborPlan

    def step(self, number: int) -> bool:
        """Runs or starts one operation; returns False if this rank takes no part in it."""
        draw = random.Random(f"{self.seed} {number}")  # all ranks draw the same
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        index = draw.randrange(len(GROUPS))
        self.members, self.group = GROUPS[index], self.groups[index]
        if self.rank not in self.members:
            return False
        self.place = self.members.index(self.rank)
        self.backend: Any = self.group._get_backend(torch.device("cpu"))
        started = getattr(self, f"_{kind}")(f"#{number} {kind} of {self.members}", draw, number)
        if started is None:
            return False
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.in_flight.append(started)
        if self.own.random() < 0.4 or len(self.in_flight) > MOST_IN_FLIGHT:
            self.finish(self.own.randrange(len(self.in_flight)))
        return True

    def finish(self, place: int) -> None:
        """Waits for one of the operations in flight and checks its result."""
        started = self.in_flight.pop(place)
        started.wait()
        with Checks() as checks:
            started.verify(checks, started.label)

    def drain(self) -> None:
        """Finishes all operations in flight."""
        while self.in_flight:
            self.finish(self.own.randrange(len(self.in_flight)))

    def _collective(self, label: str, draw: random.Random, number: int) -> Started | None:
        name, dtype, shape = draw.choice(COLLECTIVES), draw.choice(DTYPES), draw.choice(SHAPES)
        root = draw.randrange(len(self.members)) if name in ROOTED else 0
        exact = [r for r in reductions(dtype) if r in ("SUM", "MIN", "MAX") or not _is_inexact(dtype)]
        reduction = draw.choice(exact) if name in REDUCING else "SUM"
        blocking = draw.random() < 0.3
        ready = prepare(name, dtype, shape, seed=number % 5, root=root, reduction=reduction, group=self.group)
        work = ready.start(not blocking)
        label = f"{label} {name} {reduction} {dtype} {shape} root {root}"
        return Started(label, _wait_of(work), ready.verify)

    def _message(self, label: str, draw: random.Random, number: int) -> Started | None:
        """Sends one message, which may be received from any source, because no other message has its tag."""
        source, target = draw.sample(self.members, 2)
        dtype, shape = draw.choice(DTYPES), draw.choice(SHAPES)
        blocking, anybody = draw.random() < 0.2, draw.random() < 0.3
        group = self.group
        values = make_input(source, dtype, shape, number % 5)
        label = f"{label} {dtype} {shape} from {source} to {target}"
        if self.rank == source:
            if blocking:
                work = dist.send(values, target, group=group, tag=number)
            else:
                work = dist.isend(values, target, group=group, tag=number)
            return Started(label, _wait_of(work), lambda checks, label: None)
        if self.rank != target:
            return None
        output, origin = torch.zeros(shape, dtype=dtype), None if anybody else source
        if blocking:
            dist.recv(output, origin, group=group, tag=number)
            work = None
        else:
            work = dist.irecv(output, origin, group=group, tag=number)
        return Started(label, _wait_of(work), lambda checks, label: checks.equal(label, output, values))

    def _barrier(self, label: str, draw: random.Random, number: int) -> Started | None:
        blocking = draw.random() < 0.3
        work = dist.barrier(self.group, async_op=not blocking)
        return Started(label, _wait_of(work), lambda checks, label: None)

    def _edges(self, draw: random.Random, size: int) -> list[tuple[int, int]]:
        pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
        return draw.sample(pairs, draw.randint(1, len(pairs)))

    def _neighbors(self, draw: random.Random, size: int, me: int) -> tuple[Any, list[int]]:
        """Returns the backend's plan of `me` of so many nodes on a random graph, and its sources in order."""
        edges = self._edges(draw, size) if size > 1 else []
        sources = [i for i, j in edges if j == me]
        destinations = [(j, 0.5) for i, j in edges if i == me]
        return self.plan(me, size, 0.25, [(i, 0.5) for i in sources], destinations), sources

    def _mix(self, label: str, draw: random.Random, number: int) -> Started | None:
        """Mixes a quarter of the own tensor and a quarter of each source's, as one half on either side."""
        # A list has tensors of other shapes and of another dtype in addition to this one; all are mixed in place.
        dtype, shape, named = draw.choice(FLOATS), draw.choice(SHAPES), draw.random() < 0.5
        kinds = [(dtype, shape)]
        if draw.random() < 0.3:
            kinds += [(draw.choice([dtype, torch.float32]), draw.choice(SHAPES)) for _ in range(3)]
        plan, sources = self._neighbors(draw, len(self.members), self.place)
        mine = [whole_numbers(self.rank, d, s, number) for d, s in kinds]
        output = mine if len(mine) > 1 else None
        work = self.backend.neighbor_allreduce(
            mine, plan, output=output, name=f"soak {number}" if named else ""
        )
        mixed = [self.rank, *(self.members[i] for i in sources)]
        expected = [
            (0.25 * sum(whole_numbers(r, torch.float64, s, number) for r in mixed)).to(d) for d, s in kinds
        ]
        return Started(
            f"{label} {kinds} {plan}",
            work.wait,
            lambda checks, label: checks.equal(label, work.result(), expected),
        )

    def _machines(self, draw: random.Random) -> tuple[list[list[int]], list[int]]:
        """Deals the ranks to machines of 1, 2 or 4, whose means are exact; returns all, and this rank's machine."""
        ranks = list(range(len(self.members)))
        local = draw.choice([n for n in (1, 2, 4) if len(ranks) % n == 0])
        draw.shuffle(ranks)
        machines = [ranks[first : first + local] for first in range(0, len(ranks), local)]
        return machines, next(machine for machine in machines if self.place in machine)

    def _hierarchical(self, label: str, draw: random.Random, number: int) -> Started | None:
        """Mixes a quarter of the mean of this rank's machine and a quarter of that of each machine that sends."""
        dtype, shape, in_place = draw.choice(FLOATS), draw.choice(SHAPES), draw.random() < 0.5
        machines, mine = self._machines(draw)
        plan, sources = self._neighbors(draw, len(machines), machines.index(mine))
        tensor = whole_numbers(self.rank, dtype, shape, number)
        work = self.backend.hierarchical_neighbor_allreduce(
            tensor, machines, plan, output=tensor if in_place else None
        )
        mixed = [self.members[r] for machine in (machines.index(mine), *sources) for r in machines[machine]]
        total = sum(whole_numbers(r, torch.float64, shape, number) for r in mixed)
        expected = (0.25 / len(mine) * total).to(dtype)
        return Started(
            f"{label} {dtype} {shape} {machines} {plan}",
            work.wait,
            lambda checks, label: checks.equal(label, work.result(), [expected]),
        )

    def _local(self, label: str, draw: random.Random, number: int) -> Started | None:
        dtype, shape = draw.choice(DTYPES), draw.choice(SHAPES)
        machines, mine = self._machines(draw)
        inputs = [make_input(self.members[r], dtype, shape, number % 5) for r in mine]
        tensor = make_input(self.rank, dtype, shape, number % 5)
        work = self.backend.local_allreduce(tensor, machines, dist.ReduceOp.SUM)
        return Started(
            f"{label} {dtype} {shape} {machines}",
            work.wait,
            lambda checks, label: checks.equal(label, tensor, sum_in_rank_order(inputs)),
        )

    def _neighbor_allgather(self, label: str, draw: random.Random, number: int) -> Started | None:
        dtype, rows = draw.choice(DTYPES), [draw.choice([0, 1, 5, 700]) for _ in range(RANKS)]
        plan, sources = self._neighbors(draw, len(self.members), self.place)
        parts = [make_input(self.members[i], dtype, (rows[i], 7), number % 5) for i in sources]
        work = self.backend.neighbor_allgather(
            make_input(self.rank, dtype, (rows[self.place], 7), number % 5), plan
        )
        expected = torch.cat(parts) if parts else torch.empty((0, 7), dtype=dtype)
        return Started(
            f"{label} {dtype} {rows} {plan}",
            work.wait,
            lambda checks, label: checks.equal(label, work.result(), [expected]),
        )

    def _concat(self, label: str, draw: random.Random, number: int) -> Started | None:
        dtype, rows = draw.choice(DTYPES), [draw.choice([0, 1, 5, 700]) for _ in range(RANKS)]
        parts = [make_input(r, dtype, (rows[i], 7), number % 5) for i, r in enumerate(self.members)]
        work = self.backend.allgather_concat(parts[self.place])
        return Started(
            f"{label} {dtype} {rows}",
            work.wait,
            lambda checks, label: checks.equal(label, work.result(), [torch.cat(parts)]),
        )


def _wait_of(work: dist.Work | torch.futures.Future | None) -> Callable[[], object]:
    """Returns a function that waits for an operation; a blocking operation gives None, and needs no wait."""
    return (lambda: None) if work is None else work.wait


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def use_all_shared_memory() -> None:
    """Lets every shared chunk be used once, because its pages count as resident only from then on.

    Before any rank receives, each one sends more to all others than there are chunks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    message = torch.zeros(1 << 18)
    others = [(rank + distance) % size for distance in range(1, size)]
    sends = [dist.isend(message, other) for _ in range(40) for other in others]
    dist.barrier()
    for other in others:
        for _ in range(40):
            dist.recv(torch.empty_like(message), other)
    for send in sends:
        send.wait()


def soak(seed: int, operations: int) -> Report:
    """Runs on each rank."""
    begin = time.monotonic()
    use_all_shared_memory()
    run = Soak(seed)
    warm_up = max(min(operations // 2, 4000), operations // 5)
    marks = {warm_up + (operations - warm_up) * i // SAMPLES for i in range(SAMPLES + 1)}
    resident, allocated, done = [], [], 0
    for number in range(operations + 1):
        if number in marks:
            run.drain()
            resident.append(resident_bytes())
            allocated.append(allocated_bytes())
        if number < operations:
            done += run.step(number)
    return Report(done, run.kinds, resident, allocated, time.monotonic() - begin)


def test_soak(new_world: Callable[..., World]) -> None:
    """`pytest tests/test_soak.py -rP` shows the numbers of the run."""
    # As users run it: without the confirmations that other tests ask for.
    world = new_world(RANKS, timeout=60.0, environment={"_FOG_CONFIRM": "0"})
    reports: list[Report] = world.run(soak, SEED, OPERATIONS, timeout=60 + 0.2 * OPERATIONS)
    for rank, report in enumerate(reports):
        mebibytes = [round(r / 2**20, 1) for r in report.resident]
        print(f"rank {rank}: {report.operations} operations in {report.seconds:.1f} s {report.kinds}")
        print(f"rank {rank}: resident MiB after warm-up and then {mebibytes}")
        assert set(report.kinds) == set(KINDS)
    for rank, report in enumerate(reports):
        for limit, name, sizes in (
            (ALLOWED_GROWTH, "allocated", report.allocated),
            (ALLOWED_GAPS, "resident", report.resident),
        ):
            growth = sizes[-1] / sizes[0] - 1
            assert growth < limit, f"rank {rank}: {name} memory grew by {growth:.2%}: {sizes}"
