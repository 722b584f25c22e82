"""Runs every collective and exchange on hundreds of ranks of one process, over the in-process transport.

Processes, shared memory and MPI have their own tests. These tests check the algorithms, with more ranks than the
machine could have processes, and with messages that are late, overtake each other, or stop.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist.compression import Int8, TopK
from operations import COLLECTIVES, OF_BACKEND, ROOTED, prepare
from reference import Checks
from torch import Tensor

from fog_pg._C import NeighborPlan, ProcessGroupFog, VirtualWorld
from fog_pg._extension import load

RANKS_PER_HOST = 8

Start = Callable[[int, ProcessGroupFog], Any]


@dataclasses.dataclass
class Threads:
    """The ranks of a world when each is a thread, which waits for its own operations."""

    groups: list[ProcessGroupFog]
    pool: ThreadPoolExecutor


def run(world: VirtualWorld | Threads, start: Start) -> list[dist.Work]:
    """Starts an operation on every rank, and drives all of them until they are complete."""

    def run_one(rank: int) -> dist.Work | None:
        work = start(rank, world.groups[rank])
        if work is not None:
            work.wait()
        return work

    if isinstance(world, Threads):
        return list(world.pool.map(run_one, range(len(world.groups))))
    works = [start(rank, group) for rank, group in enumerate(world.groups)]
    world.progress()
    for rank, work in enumerate(works):
        assert work is None or work.is_completed(), f"rank {rank} waits for something"
    for work in works:
        if work is not None:
            work.wait()
    return works


def inputs(size: int, numel: int) -> list[Tensor]:
    """Returns whole numbers, so sums are exact in any order."""
    generator = torch.Generator().manual_seed(size + numel)
    return [torch.randint(-8, 9, (numel,), generator=generator).double() for _ in range(size)]


def machines_of(size: int) -> list[list[int]]:
    ranks = min(RANKS_PER_HOST, size // 2)
    return [list(range(first, first + ranks)) for first in range(0, size, ranks)]


def equal(outputs: list[Tensor], expected: list[Tensor] | Tensor) -> None:
    for rank, output in enumerate(outputs):
        torch.testing.assert_close(
            output, expected[rank], rtol=0, atol=0, msg=lambda text, r=rank: f"rank {r}: {text}"
        )


def collective(world: VirtualWorld | Threads, operation: str, numel: int, root: int) -> None:
    """Runs and checks one collective of integers, whose sums are the same in any order."""
    ready = [
        prepare(operation, torch.int64, (numel,), seed=numel, root=root, group=group, c10d=OF_BACKEND)
        for group in world.groups
    ]
    run(world, lambda rank, group: ready[rank].start(True))
    with Checks() as checks:
        for rank, each in enumerate(ready):
            each.verify(checks, f"{operation} of {numel} root {root} on rank {rank}")


def collectives(world: VirtualWorld | Threads, numel: int) -> None:
    size = len(world.groups)
    for operation in COLLECTIVES:
        collective(world, operation, numel, size // 3)
    x, machines = inputs(size, numel), machines_of(size)
    outputs = [tensor.clone() for tensor in x]
    run(world, lambda rank, group: group.local_allreduce(outputs[rank], machines, dist.ReduceOp.SUM))
    whole, local = torch.stack(x), len(machines[0])
    equal(outputs, [whole[machines[rank // local]].sum(0) for rank in range(size)])

    run(world, lambda rank, group: group.barrier())

    receives = [group.recv([outputs[rank]], (rank - 1) % size, 5) for rank, group in enumerate(world.groups)]
    run(world, lambda rank, group: group.send([x[rank]], (rank + 1) % size, 5))
    for work in receives:
        work.wait()
    equal(outputs, [x[rank - 1] for rank in range(size)])


def exchange(world: VirtualWorld | Threads, x: list[Tensor], weights: np.ndarray) -> list[Tensor]:
    """Runs neighbor_allreduce by a mixing matrix, whose rows send and whose columns receive."""
    size = len(x)

    def plan(rank: int) -> NeighborPlan:
        peers = [(j, float(weights[j, rank])) for j in range(size) if j != rank and weights[j, rank] != 0]
        sends = [(i, 1.0) for i in range(size) if i != rank and weights[rank, i] != 0]
        return NeighborPlan(rank, size, float(weights[rank, rank]), peers, sends)

    works = run(world, lambda rank, group: group.neighbor_allreduce(x[rank], plan(rank)))
    return [work.result()[0] for work in works]


def exchanges(world: VirtualWorld | Threads, numel: int) -> None:
    size = len(world.groups)
    x = inputs(size, numel)
    whole = torch.stack(x).numpy()
    random = np.random.default_rng(size)
    exponential = np.zeros((size, size))
    hops = [2**k for k in range((size - 1).bit_length())]
    for rank in range(size):
        exponential[rank, [rank, *((rank + hop) % size for hop in hops)]] = 1 / (len(hops) + 1)
    graph = nx.gnp_random_graph(size, min(1.0, 6 / size), seed=3, directed=True)
    arbitrary = nx.to_numpy_array(graph) * random.standard_normal((size, size)) + np.diag(random.random(size))
    for weights in (exponential, arbitrary):
        outputs = torch.stack(exchange(world, x, weights)).numpy()
        np.testing.assert_allclose(outputs, weights.T @ whole, rtol=1e-12, atol=1e-12)

    plans = [
        NeighborPlan(
            rank,
            size,
            1.0,
            [((rank - 1) % size, 1.0), ((rank - 3) % size, 1.0)],
            [((rank + 1) % size, 1.0), ((rank + 3) % size, 1.0)],
        )
        for rank in range(size)
    ]
    works = run(world, lambda rank, group: group.neighbor_allgather(x[rank], plans[rank]))
    equal(
        [work.result()[0] for work in works], [torch.cat([x[rank - 1], x[rank - 3]]) for rank in range(size)]
    )

    machines = machines_of(size)
    count = len(machines)
    ring = [
        NeighborPlan(m, count, 0.5, [((m - 1) % count, 0.5)], [((m + 1) % count, 1.0)]) for m in range(count)
    ]
    local = size // count
    works = run(
        world,
        lambda rank, group: group.hierarchical_neighbor_allreduce(x[rank], machines, ring[rank // local]),
    )
    means = whole.reshape(count, local, -1).mean(1)
    expected = torch.from_numpy(np.repeat(0.5 * (means + np.roll(means, 1, 0)), local, 0))
    equal([work.result()[0] for work in works], expected)

    pairs = [
        NeighborPlan(rank, size, 1.0, [((rank - 1) % size, 1.0)], [((rank + 1) % size, 1.0)], mean=True)
        for rank in range(size)
    ]
    for codec in (Int8(), TopK(0.1)):
        works = run(
            world,
            lambda rank, group, c=codec: group.neighbor_allreduce(
                x[rank], pairs[rank], compression=c.backend, conserve=True
            ),
        )
        mean = torch.stack([work.result()[0] for work in works]).mean(0)
        torch.testing.assert_close(mean, torch.stack(x).mean(0), rtol=0, atol=1e-9)


def test_collectives_of_96_ranks() -> None:
    collectives(VirtualWorld(96, ranks_per_host=RANKS_PER_HOST), 3)


@pytest.mark.parametrize("numel", [5, 20_000])
def test_exchanges_of_256_ranks(numel: int) -> None:
    exchanges(VirtualWorld(256, ranks_per_host=RANKS_PER_HOST), numel)


@pytest.mark.parametrize("seed", range(4))
def test_late_messages_change_nothing(seed: int) -> None:
    """Uses small messages, messages in chunks and messages that are read in place, with and without confirmations."""
    world = VirtualWorld(
        16, ranks_per_host=RANKS_PER_HOST, seed=seed, most_delay=1 + 3 * seed, confirm=seed % 2 == 1
    )
    for numel in (3, 2_000, 12_345):
        collectives(world, numel)
        exchanges(world, numel)


def windows(world: Threads, numel: int) -> None:
    """Every rank writes to both neighbors of a ring while they read; nothing is torn, and no mass is lost."""
    size = len(world.groups)
    x = inputs(size, numel)

    def use(rank: int, group: ProcessGroupFog) -> None:
        left, right = (rank - 1) % size, (rank + 1) % size
        tensor = x[rank].clone()
        window = group.create_window(tensor, "ring", [left, right], [left, right], zero_init=True)
        for turn in range(20):
            window.accumulate(
                tensor, [(left, 0.25), (right, 0.25)], self_weight=0.5, with_p=True, mutex=turn < 10
            ).wait()
            window.update(1.0, [(left, 1.0), (right, 1.0)], reset=True, with_p=True, mutex=turn < 10)
        group.barrier().wait()
        window.update(1.0, [(left, 1.0), (right, 1.0)], reset=True, with_p=True)
        whole[rank], shares[rank] = tensor.clone(), window.p
        group.barrier().wait()
        for turn in range(20):
            window.put(torch.full_like(tensor, turn), [(left, 1.0), (right, 1.0)]).wait()
            seen = window.update(0.0, [(left, 1.0)], clone=True)
            assert (seen == seen[0]).all()
            window.get([(right, 1.0)]).wait()
        window.free()

    whole, shares = list(x), [0.0] * size
    run(world, use)
    torch.testing.assert_close(torch.stack(whole).sum(0), torch.stack(x).sum(0))
    assert sum(shares) == pytest.approx(size)


def fail(rank: int, group: ProcessGroupFog) -> None:
    """Rank 0 gives up while the others are in a sum, or are about to begin it."""
    if rank == 0:
        group.abort()
    else:
        with pytest.raises(dist.DistBackendError, match="rank 0 aborted|rank 0 reports"):
            group.allreduce([torch.ones(70_001)]).wait()


@pytest.mark.parametrize("wire", ["in process", "memory", "tcp"])
def test_ranks_that_are_threads(wire: str) -> None:
    """ThreadSanitizer sees all that the ranks share, see tests/sanitized.py."""
    world = load().VirtualWorld(4, ranks_per_host=4, wire=wire)  # connections need the settings
    with ThreadPoolExecutor(4) as pool:
        threads = Threads(world.groups, pool)
        for numel in (3, 2_000, 70_001):
            collectives(threads, numel)
            exchanges(threads, numel)
            windows(threads, numel)
        run(threads, fail)
    world.close()


@pytest.mark.parametrize(
    ("size", "per_host"),
    [(2, 1), (3, 1), (3, 2), (5, 2), (7, 7), (13, 4), (16, 16), (20, 8), (24, 3), (41, 7)],
)
def test_tensors_reach_all_ranks_whatever_their_hosts(size: int, per_host: int) -> None:
    """Broadcasts go by trees, in steps, in slices and pieces, and directly, between hosts of different sizes."""
    world = VirtualWorld(size, ranks_per_host=per_host, seed=size, most_delay=2, confirm=size % 2 == 1)
    for operation, numels in (
        ("broadcast", (0, 1, 700, 6_000, 70_001)),
        *(
            (name, (0, 1, 30, 700, 9_001))
            for name in ("all_gather", "all_gather_into_tensor", "gather", "scatter")
        ),
    ):
        for numel in numels:
            for root in {0, 1, size // 2, size - 1} if operation in ROOTED else {0}:
                collective(world, operation, numel, root)


def test_operations_overtake_each_other() -> None:
    """Twenty operations are in flight at once; each rank calls the named ones in another order."""
    size = 32
    world = VirtualWorld(size, seed=1, most_delay=9)
    x = [inputs(size, 10 + k) for k in range(20)]
    outputs = [[tensor.clone() for tensor in same] for same in x]
    works = []
    for rank, group in enumerate(world.groups):
        for k in np.random.default_rng(rank).permutation(20):
            works.append(group.allreduce_named(outputs[k][rank], dist.ReduceOp.SUM, name=f"name {k}"))
    world.progress()
    assert all(work.is_completed() for work in works)
    for k in range(20):
        equal(outputs[k], [torch.stack(x[k]).sum(0)] * size)


def test_a_rank_that_does_not_come_is_named_at_the_time_out() -> None:
    world = VirtualWorld(32, timeout=timedelta(seconds=1.5))
    works = [group.barrier() for rank, group in enumerate(world.groups) if rank != 30]
    while not all(work.is_completed() for work in works):
        world.progress()
    for work in works:  # including ranks that wait for a rank that waits for it
        with pytest.raises(dist.DistBackendError, match=r"timed out.*not there: rank 30"):
            work.wait()


THOUSAND = 1000
# The number of members that each rank tells when its group fails.
STEPS = (THOUSAND - 1).bit_length()


def failed_barriers(world: VirtualWorld, dead: set[int], origin: int) -> dict[int, str]:
    """Returns the errors on the living ranks, all of them in a barrier, when `origin` fails its group."""
    world.progress()
    living = [rank for rank in range(THOUSAND) if rank not in dead]
    works = {rank: world.groups[rank].barrier() for rank in living if rank != origin}
    world.groups[origin].abort()
    world.progress()
    errors = {}
    for rank, work in works.items():
        if work.is_completed():
            with pytest.raises(dist.DistBackendError) as caught:
                work.wait()
            errors[rank] = str(caught.value)
    return errors


def some(share: float) -> set[int]:
    return {int(rank) for rank in np.random.default_rng(5).permutation(THOUSAND)[: int(share * THOUSAND)]}


@pytest.mark.parametrize(
    ("dead", "noticed"),
    [
        *((some(share), False) for share in (0.0, 0.1, 0.3)),
        # All ranks that are 1, 2, 4, ... behind rank 0 are known to be dead, and so are those between 600 and 700.
        ({2**k for k in range(STEPS)} | set(range(601, 700)), True),
    ],
    ids=["none", "a tenth", "a third", "known"],
)
def test_a_failure_reaches_a_thousand_ranks_past_dead_ones(dead: set[int], noticed: bool) -> None:
    """Ranks that are known to be dead are left out, and the next ones are told instead, all around the group."""
    world = VirtualWorld(THOUSAND, ranks_per_host=RANKS_PER_HOST, seed=4, most_delay=2)
    origin = next(rank for rank in range(THOUSAND) if rank not in dead)
    for rank in dead:
        world.lose(rank, noticed=noticed)
    errors = failed_barriers(world, dead, origin)
    assert set(errors) == set(range(THOUSAND)) - dead - {origin}
    expected = "reports: |was lost" if noticed else f"rank {origin} reports: "
    assert all(re.search(expected, error) for error in errors.values())
    told = world.failures_told
    assert 0 < max(told) <= STEPS
    assert sum(told) <= (THOUSAND - len(dead)) * STEPS


def test_those_of_a_thousand_who_die_with_the_news_do_not_keep_it() -> None:
    """If a rank that was told turns out to be dead, the next rank is told instead."""
    world = VirtualWorld(THOUSAND, seed=7)
    behind = {2**k for k in range(STEPS)}
    for rank in behind:
        world.lose(rank, noticed=False)
    works = {rank: world.groups[rank].barrier() for rank in range(1, THOUSAND) if rank not in behind}
    world.groups[0].abort()
    world.progress()
    assert not any(work.is_completed() for work in works.values())
    for rank in behind:
        world.lose(rank)
    world.progress()
    assert all(work.is_completed() for work in works.values())
    assert max(world.failures_told) <= 2 * STEPS


@pytest.mark.parametrize("size", [2, 3, 16, 17])
def test_a_failure_reaches_groups_of_any_size(size: int) -> None:
    """In a small group all ranks are told directly; from 17 ranks on, ranks that learn of a failure pass it on."""
    world = VirtualWorld(size)
    works = [world.groups[rank].barrier() for rank in range(size - 1)]
    world.groups[size - 1].abort()
    world.progress()
    assert all(work.is_completed() for work in works)
    told = world.failures_told
    if size <= 16:
        assert told == [0] * (size - 1) + [size - 1]
    else:
        assert max(told) <= 5
    for group in world.groups:
        with pytest.raises(dist.DistBackendError):
            group.barrier()
    world.progress()
    assert world.failures_told == told


def test_members_of_a_thousand_that_have_closed_their_group_do_not_keep_a_failure_from_others() -> None:
    world = VirtualWorld(THOUSAND, seed=8)
    left = [0, 300, 999]
    for rank in set(range(THOUSAND)) - set(left):
        world.groups[rank].shutdown()
    waiting = [world.groups[300].recv([torch.ones(1)], 0, 1), world.groups[999].recv([torch.ones(1)], 300, 1)]
    world.groups[0].abort()
    world.progress()
    for work in waiting:
        assert work.is_completed()


@pytest.mark.parametrize("confirm", [False, True])
def test_ranks_that_wait_for_each_other_in_two_operations_say_so(confirm: bool) -> None:
    """In a tree, a rank may wait for others before it sends anything that shows which operation it has called."""
    world = VirtualWorld(10, ranks_per_host=10, timeout=timedelta(minutes=30), confirm=confirm)
    works = [
        group.broadcast([torch.ones(65)]) if rank == 6 else group.allreduce([torch.ones(65)])
        for rank, group in enumerate(world.groups)
    ]
    while not all(work.is_completed() for work in works):
        world.progress()
    for work in works:
        with pytest.raises(dist.DistBackendError, match="ranks disagree") as error:
            work.wait()
        assert all(
            call in str(error.value) for call in ("broadcast(float32[65]", "allreduce(SUM, float32[65])")
        )
