"""What a rank sends and asks for, by the number of ranks: each count against its formula.

The same operations run on real ranks and on as many virtual ones as no machine of these tests has processes for.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from test_bootstrap import CountedStore, join, launcher_store

from fog_pg._C import NeighborPlan, ProcessGroupFog, Rendezvous, VirtualWorld

MANY = 1024
REAL = harness.sizes([4, 8], [16, 32, 64])
NUMEL = 32 * MANY  # of the larger tensor: slices of all ranks are of one size
DEGREE = 3


def ring(rank: int, size: int) -> NeighborPlan:
    """The next ranks, and the ones before."""
    sources = [((rank - hop) % size, 0.25) for hop in range(1, DEGREE + 1)]
    return NeighborPlan(
        rank, size, 0.25, sources, [((rank + hop) % size, 1.0) for hop in range(1, DEGREE + 1)]
    )


@dataclass(frozen=True)
class Cost:
    """What a rank sends in an operation of n ranks.

    Attributes:
        start: The operation.
        messages: Their number.
        bytes: Of data, in all of them.
        most: So many virtual ranks are tried: what sends to all others is not for more.
    """

    start: Callable[[ProcessGroupFog], dist.Work]
    messages: Callable[[int], int]
    bytes: Callable[[int], float]
    most: int = MANY


# By algorithm. Whoever changes one changes its line.
COSTS = {
    "barrier": Cost(lambda group: group.barrier(), lambda n: math.ceil(math.log2(n)), lambda n: 0),
    "allreduce of 8 bytes, each to all": Cost(
        lambda group: group.allreduce([torch.ones(2)]), lambda n: n - 1, lambda n: 8 * (n - 1), most=256
    ),
    "allreduce of slices, each to all": Cost(
        lambda group: group.allreduce([torch.ones(NUMEL)]),
        lambda n: 2 * (n - 1),
        lambda n: 2 * (n - 1) / n * 4 * NUMEL,
        most=128,
    ),
    "agreement, as the first": Cost(
        lambda group: group.agree(torch.ones(2, dtype=torch.uint64)),
        lambda n: n - 1,
        lambda n: 16 * (n - 1),
        most=256,
    ),
    "neighbor_allreduce": Cost(
        lambda group: group.neighbor_allreduce(torch.ones(5), ring(group.rank(), group.size())),
        lambda n: DEGREE,
        lambda n: DEGREE * 20,
    ),
    "neighbor_allgather": Cost(
        lambda group: group.neighbor_allgather(torch.ones(5), ring(group.rank(), group.size())),
        lambda n: DEGREE,
        lambda n: DEGREE * 20,
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_messages_of_virtual_ranks(name: str) -> None:
    cost = COSTS[name]
    for size in (size for size in (4, 16, 64, 128, 256, MANY) if size <= cost.most):
        world = VirtualWorld(size, ranks_per_host=8)
        works = [cost.start(group) for group in world.groups]
        world.progress()
        assert all(work.is_completed() for work in works)
        assert {group.sent for group in world.groups} == {(cost.messages(size), cost.bytes(size))}, size


def count_messages(name: str) -> tuple[int, int]:
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = backend.sent
    COSTS[name].start(backend).wait()
    return backend.sent[0] - before[0], backend.sent[1] - before[1]


@pytest.mark.parametrize("size", REAL)
def test_messages_of_real_ranks(new_world: Callable[..., harness.World], size: int) -> None:
    world = new_world(size, environment={"FOG_CONFIRM": "0"})
    for name, cost in COSTS.items():
        assert set(world.run(count_messages, name)) == {(cost.messages(size), cost.bytes(size))}, name


# --- the Store ----------------------------------------------------------------------------------------------

# Of a rank in a step of meeting: it appends, counts, waits and gets; the last one says that all are there.
STEP = 4
# Of a rank for a group beside its steps: which group of the Store it is; that it is done; the last one deletes.
AROUND = 2


class SharedTable:
    """What a Store holds, for ranks that are threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Lock()
        self.there: dict[str, threading.Event] = {}

    def event(self, key: str) -> threading.Event:
        with self.changed:
            return self.there.setdefault(key, threading.Event())


class ThreadStore(dist.Store):
    """A rank's door to it: threads that wait for a key wake when it is set, and no others."""

    def __init__(self, table: SharedTable) -> None:
        super().__init__()
        self.table = table

    def set(self, key: str, value: Any) -> None:
        self.table.values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self.table.event(key).set()

    def get(self, key: str) -> bytes:
        return self.table.values[key]

    def add(self, key: str, amount: int) -> int:
        with self.table.changed:
            total = int(self.table.values.get(key, b"0")) + amount
            self.table.values[key] = str(total).encode()
        return total

    def append(self, key: str, value: Any) -> None:
        with self.table.changed:
            self.table.values[key] = self.table.values.get(key, b"") + bytes(value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        for key in keys:
            assert self.table.event(key).wait(timeout.total_seconds()), key

    def delete_key(self, key: str) -> bool:
        return self.table.values.pop(key, None) is not None


@pytest.mark.parametrize("size", [4, 64, MANY])
def test_store_requests_of_virtual_ranks(size: int) -> None:
    """The steps of a group, on a Store that counts."""
    table, steps = SharedTable(), 3
    stores = [CountedStore(ThreadStore(table)) for _ in range(size)]

    def meet(rank: int) -> None:
        rendezvous = Rendezvous(stores[rank], rank, size, timedelta(seconds=60))
        for step in range(steps):
            values = rendezvous.allgather(f"step {step}", f"{rank} at {step}")
            assert values == [f"{each} at {step}" for each in range(size)]
        rendezvous.finish()

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(meet, range(size)))
    requests = sorted(store.requests for store in stores)
    usual, keys = steps * STEP + AROUND, 3 * steps + 1
    assert requests[0] == usual
    # The last one at a step says so; the last one of all deletes what was exchanged.
    assert sum(requests) == size * usual + steps + keys
    # What is left is each rank's count of its groups.
    assert len(table.values) == size


# Of a rank for the first group, with MPI's start, and for a later one, those that torch makes included.
MOST_REQUESTS = (25, 8)


def count_requests() -> tuple[int, int]:
    """Of a rank, for its first group and for a second one."""
    store = CountedStore(launcher_store())
    join(store)
    first = store.requests
    dist.new_group(backend="fog")
    dist.barrier()
    return first, store.requests - first


def test_store_requests_of_real_ranks(new_world: Callable[..., harness.World]) -> None:
    """Those of all ranks together grow by the same number with each rank."""
    totals = {}
    for size in (3, 5, 9):
        counts = new_world(size, initialize=False).run(count_requests)
        totals[size] = [sum(each) for each in zip(*counts, strict=True)]
    for few, more, many, most in zip(*totals.values(), MOST_REQUESTS, strict=True):
        a_rank = (many - more) / 4
        assert (more - few) / 2 == a_rank <= most, totals
