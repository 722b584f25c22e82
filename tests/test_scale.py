"""Compares the messages and requests of a rank with formulas in the number of ranks.

The same operations run on real ranks, and on more virtual ranks than the machine could have processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from test_bootstrap import join, launcher_store
from window_interfaces import WAYS

from fog_pg._C import NeighborPlan, ProcessGroupFog, Rendezvous, VirtualWorld

MANY = 1024
REAL = harness.sizes([4, 8], [16, 32, 64])
NUMEL = 64 * MANY  # elements of the larger tensor; all ranks have slices of the same size
DEGREE = 3


def ring(rank: int, size: int) -> NeighborPlan:
    """Returns a plan with the next and the previous ranks as neighbors."""
    sources = [((rank - hop) % size, 0.25) for hop in range(1, DEGREE + 1)]
    return NeighborPlan(
        rank, size, 0.25, sources, [((rank + hop) % size, 1.0) for hop in range(1, DEGREE + 1)]
    )


@dataclass(frozen=True)
class Cost:
    """The messages of an operation on n ranks, distributed evenly over h hosts.

    Attributes:
        start: Starts the operation.
        most: Messages of the rank that sends the most.
        total: Messages of all ranks.
        bytes: Bytes of data of all ranks.
    """

    start: Callable[[ProcessGroupFog], dist.Work]
    most: Callable[[int, int], int]
    total: Callable[[int, int], int]
    bytes: Callable[[int, int], float]


def alike(
    start: Callable[[ProcessGroupFog], dist.Work],
    messages: Callable[[int, int], int],
    bytes: Callable[[int, int], float],
) -> Cost:
    """Returns the cost of an operation in which each rank sends the same."""
    return Cost(start, messages, lambda n, h: n * messages(n, h), lambda n, h: n * bytes(n, h))


def log2(n: int) -> int:
    return math.ceil(math.log2(n))


# Limits of the algorithms for sums; see collectives/cutovers.hpp.
FEW_ON_HOST, FEW_APART, FEW_HOSTS, MOST_IN_RING, FAN = 8, 4, 8, 30, 8


def is_direct(n: int, h: int) -> bool:
    return n <= (FEW_ON_HOST if h == 1 else FEW_APART)


def between(h: int) -> int:
    """Returns a rank's messages for a sum between hosts, at most: to each other host, or down a tree."""
    return h - 1 if h <= FEW_HOSTS else children(h)


def children(n: int) -> int:
    """Returns the number of children of the root of a tree with fan-out 8."""
    return sum(min(FAN - 1, math.ceil(n / FAN**k) - 1) for k in range(n.bit_length()) if FAN**k < n)


def whole(size: int, start: Callable[[ProcessGroupFog], dist.Work]) -> Cost:
    """Returns the cost of a sum that is not cut: to each other rank, or up a host's tree, between hosts, and down."""

    def total(n: int, h: int) -> int:
        if is_direct(n, h):
            return n * (n - 1)
        return 2 * (n - h) + (h * (h - 1) if h <= FEW_HOSTS else 2 * (h - 1))

    return Cost(
        start,
        lambda n, h: n - 1 if is_direct(n, h) else children(n // h) + between(h),
        total,
        lambda n, h: size * total(n, h),
    )


# A change of an algorithm has to change its line here.
COSTS = {
    "barrier": alike(lambda group: group.barrier(), lambda n, h: log2(n), lambda n, h: 0),
    "allreduce of 8 bytes": whole(8, lambda group: group.allreduce([torch.ones(2)])),
    "agreement": whole(16, lambda group: group.agree(torch.ones(2, dtype=torch.uint64))),
    # Each rank of a host sends its slices to the others and gets theirs, before and after the exchange between hosts, which
    # goes around a ring. With many hosts, the data of one round lies in two places for some ranks; then these are limits.
    "allreduce in slices": alike(
        lambda group: group.allreduce([torch.ones(NUMEL)]),
        lambda n, h: 2 * (n // h - 1) + (2 * (h - 1) if h <= MOST_IN_RING else 4 * log2(h)),
        lambda n, h: (2 * (n // h - 1) + 2 * (h - 1) / h) * 4 * NUMEL / (n // h),
    ),
    "neighbor_allreduce": alike(
        lambda group: group.neighbor_allreduce(torch.ones(5), ring(group.rank(), group.size())),
        lambda n, h: DEGREE,
        lambda n, h: DEGREE * 20,
    ),
    "neighbor_allgather": alike(
        lambda group: group.neighbor_allgather(torch.ones(5), ring(group.rank(), group.size())),
        lambda n, h: DEGREE,
        lambda n, h: DEGREE * 20,
    ),
}


def check(cost: Cost, size: int, hosts: int, sent: list[tuple[int, int]]) -> None:
    """Compares the messages of the ranks with the formulas."""
    messages, data = zip(*sent, strict=True)
    assert sum(data) == cost.bytes(size, hosts), (size, hosts)
    expected = cost.most(size, hosts), cost.total(size, hosts)
    if cost is COSTS["allreduce in slices"] and hosts > MOST_IN_RING:
        assert max(messages) <= expected[0] and sum(messages) <= expected[1], (size, hosts)
    else:
        assert (max(messages), sum(messages)) == expected, (size, hosts)


@pytest.mark.parametrize("name", COSTS)
def test_messages_of_virtual_ranks(name: str) -> None:
    cost = COSTS[name]
    for size, hosts in ((4, 1), (8, 1), (16, 1), (64, 1), (16, 2), (64, 8), (128, 16), (MANY, MANY // 8)):
        world = VirtualWorld(size, ranks_per_host=size // hosts)
        works = [cost.start(group) for group in world.groups]
        world.progress()
        assert all(work.is_completed() for work in works)
        check(cost, size, hosts, [group.sent for group in world.groups])


def count_messages(name: str) -> tuple[int, int]:
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = backend.sent
    COSTS[name].start(backend).wait()
    return backend.sent[0] - before[0], backend.sent[1] - before[1]


@pytest.mark.parametrize("size", REAL)
def test_messages_of_real_ranks(new_world: Callable[..., harness.World], size: int) -> None:
    world = new_world(size, environment={"_FOG_CONFIRM": "0"})
    for name, cost in COSTS.items():
        check(cost, size, 1, world.run(count_messages, name))


# --- the Store ----------------------------------------------------------------------------------------------

# A rank's requests in a step of the rendezvous: append, count, wait and get. The last rank also tells that all are
# there.
STEP = 4
# A rank's other requests for a group: its number in the Store, and its end. The last rank deletes the keys.
AROUND = 2


def counted(method: str) -> Callable[..., Any]:
    def ask(self: CountedStore, *arguments: Any) -> Any:
        self.requests += 1
        return getattr(self.store, method)(*arguments)

    return ask


class CountedStore(dist.Store):
    """Wraps a store and counts the requests; apart from them those that ask whether keys are there."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.requests, self.looks = store, 0, 0

    def has_extended_api(self) -> bool:
        return True

    def check(self, *arguments: Any) -> Any:
        self.looks += 1
        return self.store.check(*arguments)

    set, get, add, append, wait = map(counted, ["set", "get", "add", "append", "wait"])
    deleteKey = counted("delete_key")


@pytest.mark.parametrize("size", [4, 64, 256])
def test_store_requests_of_virtual_ranks(size: int) -> None:
    """Runs the steps of a group on a Store that counts."""
    table, steps = dist.HashStore(), 3
    stores = [CountedStore(table) for _ in range(size)]

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
    # The last rank of each step tells the others; the last rank of all deletes the keys. With few ranks each may be one.
    assert requests[0] == usual or size <= steps + 1
    assert sum(requests) == size * usual + steps + keys
    # Each rank's count of its groups is left.
    assert table.num_keys() == size


# A rank's requests for its first group and for a later one, including torch's own; with the start of MPI below.
MOST_REQUESTS = (25, 8)
MOST_REQUESTS_WITH_MPI = (55, 8)


def count_requests() -> tuple[int, int]:
    """Returns a rank's requests for its first group and for a second one, where it looks for the others as they come."""
    store = CountedStore(launcher_store())
    join(store)
    first, looks = store.requests, store.looks
    dist.new_group(backend="fog")
    assert store.looks > looks
    dist.barrier()
    return first, store.requests - first


@pytest.mark.parametrize(
    ("way", "limits"), [("memory", MOST_REQUESTS), ("tcp", MOST_REQUESTS), ("rma", MOST_REQUESTS_WITH_MPI)]
)
def test_store_requests_of_real_ranks(
    new_world: Callable[..., harness.World], way: str, limits: tuple[int, int]
) -> None:
    """The requests of all ranks grow by the same number with each rank."""
    totals = {}
    for size in (3, 5, 9):
        world = new_world(size, initialize=False, environment=WAYS[way])
        totals[size] = [sum(each) for each in zip(*world.run(count_requests), strict=True)]
    for few, more, many, most in zip(*totals.values(), limits, strict=True):
        a_rank = (many - more) / 4
        assert (more - few) / 2 == a_rank <= most, totals
