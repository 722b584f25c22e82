"""Runs every collective and exchange on hundreds of ranks of one process, over the in-process transport.

Processes, shared memory and MPI have their own tests. These tests check the algorithms, with more ranks than the
machine could have processes, and with messages that are late, overtake each other, or stop.
"""

from __future__ import annotations

import dataclasses
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
from torch import Tensor

from fog_pg._C import NeighborPlan, ProcessGroupFog, VirtualWorld

MANY = 256
RANKS_PER_HOST = 8

Start = Callable[[int, ProcessGroupFog], Any]


@pytest.fixture(scope="module")
def many() -> VirtualWorld:
    return VirtualWorld(MANY, ranks_per_host=RANKS_PER_HOST)


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


def collectives(world: VirtualWorld | Threads, numel: int) -> None:
    size = len(world.groups)
    x = inputs(size, numel)
    whole = torch.stack(x)
    root = size // 3

    outputs = [tensor.clone() for tensor in x]
    run(world, lambda rank, group: group.allreduce([outputs[rank]]))
    equal(outputs, [whole.sum(0)] * size)

    largest = dist.AllreduceOptions()
    largest.reduceOp = dist.ReduceOp.MAX
    outputs = [tensor.clone() for tensor in x]
    run(world, lambda rank, group: group.allreduce([outputs[rank]], largest))
    equal(outputs, [whole.amax(0)] * size)

    outputs = [tensor.clone() for tensor in x]
    machines = machines_of(size)
    run(world, lambda rank, group: group.local_allreduce(outputs[rank], machines, dist.ReduceOp.SUM))
    equal(outputs, [whole[machines[rank // len(machines[0])]].sum(0) for rank in range(size)])

    to_root = dist.BroadcastOptions()
    to_root.rootRank = root
    outputs = [tensor.clone() for tensor in x]
    run(world, lambda rank, group: group.broadcast([outputs[rank]], to_root))
    equal(outputs, [x[root]] * size)

    at_root = dist.ReduceOptions()
    at_root.rootRank = root
    outputs = [tensor.clone() for tensor in x]
    run(world, lambda rank, group: group.reduce([outputs[rank]], at_root))
    equal([outputs[root]], [whole.sum(0)])

    lists = [[torch.empty(numel, dtype=torch.double) for _ in range(size)] for _ in range(size)]
    run(world, lambda rank, group: group.allgather([lists[rank]], [x[rank]]))
    for gathered in lists:
        equal(gathered, x)

    gathering = dist.GatherOptions()
    gathering.rootRank = root
    run(world, lambda rank, group: group.gather([lists[0]] if rank == root else [], [x[rank]], gathering))
    equal(lists[0], x)

    scattering = dist.ScatterOptions()
    scattering.rootRank = root
    outputs = [torch.empty(numel, dtype=torch.double) for _ in range(size)]
    run(world, lambda rank, group: group.scatter([outputs[rank]], [x] if rank == root else [], scattering))
    equal(outputs, x)

    parts = inputs(size, size * numel)
    run(
        world,
        lambda rank, group: group._reduce_scatter_base(
            outputs[rank], parts[rank], dist.ReduceScatterOptions()
        ),
    )
    equal(outputs, torch.stack(parts).sum(0).view(size, numel))

    received = [torch.empty(size * numel, dtype=torch.double) for _ in range(size)]
    run(
        world,
        lambda rank, group: group.alltoall_base(received[rank], parts[rank], [], [], dist.AllToAllOptions()),
    )
    equal(received, torch.stack(parts).view(size, size, numel).transpose(0, 1).reshape(size, -1))

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

    # With one peer per round, all ranks have the mean after log2(n) rounds.
    mixed = x
    for hop in hops:
        one_peer = np.eye(size) / 2
        one_peer[np.arange(size), (np.arange(size) + hop) % size] += 1 / 2
        mixed = exchange(world, mixed, one_peer)
    if size & (size - 1) == 0:
        equal(mixed, [torch.from_numpy(whole.mean(0))] * size)

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


def test_collectives_of_256_ranks(many: VirtualWorld) -> None:
    collectives(many, 3)


@pytest.mark.parametrize("numel", [5, 20_000])
def test_exchanges_of_256_ranks(many: VirtualWorld, numel: int) -> None:
    exchanges(many, numel)


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
            codec = Int8().backend if turn % 2 else None
            window.put(torch.full_like(tensor, turn), [(left, 1.0), (right, 1.0)], compression=codec).wait()
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
    world = VirtualWorld(4, ranks_per_host=4, wire=wire)
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
    for numel in (0, 1, 700, 6_000, 70_001):
        for root in {0, 1, size // 2, size - 1}:
            x = inputs(size, numel)
            to_root = dist.BroadcastOptions()
            to_root.rootRank = root
            outputs = [tensor.clone() for tensor in x]
            run(world, lambda rank, group, o=outputs, to=to_root: group.broadcast([o[rank]], to))
            equal(outputs, [x[root]] * size)
    for numel in (0, 1, 30, 700, 9_001):
        x = inputs(size, numel)
        lists = [[torch.empty(numel, dtype=torch.double) for _ in range(size)] for _ in range(size)]
        run(world, lambda rank, group, o=lists, x=x: group.allgather([o[rank]], [x[rank]]))
        for gathered in lists:
            equal(gathered, x)
        flat = [torch.empty(size * numel, dtype=torch.double) for _ in range(size)]
        own = [flat[rank][rank * numel : (rank + 1) * numel].copy_(x[rank]) for rank in range(size)]
        run(world, lambda rank, group, o=flat, x=own: group._allgather_base(o[rank], x[rank]))
        equal(flat, [torch.cat(x)] * size)
        for root in {0, size // 2, size - 1}:
            gathering, scattering = dist.GatherOptions(), dist.ScatterOptions()
            gathering.rootRank = scattering.rootRank = root
            gathered = [torch.empty(numel, dtype=torch.double) for _ in range(size)]
            run(
                world,
                lambda rank, group, x=x, o=gathered, to=gathering: group.gather(
                    [o] if rank == to.rootRank else [], [x[rank]], to
                ),
            )
            equal(gathered, x)
            scattered = [torch.empty(numel, dtype=torch.double) for _ in range(size)]
            run(
                world,
                lambda rank, group, x=x, o=scattered, to=scattering: group.scatter(
                    [o[rank]], [x] if rank == to.rootRank else [], to
                ),
            )
            equal(scattered, x)


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


def test_a_lost_rank_is_named_by_all_that_wait_for_it() -> None:
    world = VirtualWorld(64, seed=2, most_delay=3)
    lost = 17
    outputs = [torch.ones(5) for _ in range(64)]
    works = [group.allreduce([outputs[rank]]) for rank, group in enumerate(world.groups) if rank != lost]
    world.progress()
    assert not any(work.is_completed() for work in works)
    world.lose(lost)
    world.progress()
    for work in works:
        with pytest.raises(dist.DistBackendError, match=rf"rank {lost} .*was lost"):
            work.wait()


def test_ranks_that_disagree_all_hear_of_it() -> None:
    world = VirtualWorld(64, seed=3, most_delay=3)
    works = [group.allreduce([torch.ones(5 if rank != 9 else 6)]) for rank, group in enumerate(world.groups)]
    world.progress()
    for work in works:
        with pytest.raises(dist.DistBackendError, match=r"ranks disagree|reports"):
            work.wait()


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


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_a_failure_reaches_a_thousand_ranks_past_dead_ones_that_nobody_knows_of(share: float) -> None:
    world = VirtualWorld(THOUSAND, ranks_per_host=RANKS_PER_HOST, seed=4, most_delay=2)
    random = np.random.default_rng(5)
    dead = {int(rank) for rank in random.permutation(THOUSAND)[: int(share * THOUSAND)]}
    origin = next(rank for rank in range(THOUSAND) if rank not in dead)
    for rank in dead:
        world.lose(rank, noticed=False)
    errors = failed_barriers(world, dead, origin)
    assert set(errors) == set(range(THOUSAND)) - dead - {origin}
    assert all(f"rank {origin} reports: " in error for error in errors.values())
    told = world.failures_told
    assert 0 < max(told) <= STEPS
    assert sum(told) <= (THOUSAND - len(dead)) * STEPS


def test_a_failure_reaches_a_thousand_ranks_past_dead_ones() -> None:
    """Ranks that are known to be dead are left out, and the next ones are told instead, all around the group."""
    world = VirtualWorld(THOUSAND, ranks_per_host=RANKS_PER_HOST, seed=6, most_delay=2)
    # All ranks that are 1, 2, 4, ... behind rank 0 are dead, and so are those between rank 600 and rank 700.
    dead = {2**k for k in range(STEPS)} | set(range(601, 700))
    for rank in dead:
        world.lose(rank)
    errors = failed_barriers(world, dead, 0)
    assert set(errors) == set(range(1, THOUSAND)) - dead
    assert all("reports: " in error or "was lost" in error for error in errors.values())
    assert max(world.failures_told) <= STEPS


def test_those_who_die_with_the_news_do_not_keep_it() -> None:
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


def test_members_that_have_closed_their_group_do_not_keep_a_failure_from_others() -> None:
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
