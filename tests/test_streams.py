"""Tests of large data between processes of one host, in chunks of shared memory, with slow and late ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from harness import on_ranks

from fog_pg._C import NeighborPlan

MIB = 1 << 20


def backend() -> dist.Backend:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def store_of(test: str) -> dist.Store:
    """Returns a Store by which the late rank waits for the punctual one: it is not held up, or both time out."""
    return dist.PrefixStore(test, dist.distributed_c10d._get_default_store())


@on_ranks(3)
def test_a_late_reader_holds_up_no_other() -> None:
    """Rank 0 sends the same tensor to both others; rank 2 begins to read when rank 1 has all of it."""
    rank, store = dist.get_rank(), store_of("late")
    x = torch.full((8 * MIB,), float(rank + 1))
    if rank == 2:
        store.wait(["punctual"])
    sources = [] if rank == 0 else [(0, 1.0)]
    destinations = [(1, 1.0), (2, 1.0)] if rank == 0 else []
    work = backend().neighbor_allreduce(x, NeighborPlan(rank, 3, 1.0, sources, destinations))
    work.wait()
    if rank == 1:
        store.set("punctual", "")
    assert work.result()[0].eq(float(rank + 1) + (1.0 if rank > 0 else 0.0)).all()


@on_ranks(3)
def test_what_waits_for_a_late_reader_leaves_chunks_to_the_others() -> None:
    """Rank 0 sends more data to rank 2, which is late, than there are chunks, and then sends to rank 1."""
    rank, store = dist.get_rank(), store_of("much")
    x = torch.arange(MIB, dtype=torch.float32)
    y = torch.empty_like(x)
    if rank == 0:
        works = [dist.isend(x + tag, 2, tag=tag) for tag in range(40)]
        dist.send(x, 1, tag=99)
        for work in works:
            work.wait()
    elif rank == 1:
        dist.recv(y, 0, tag=99)
        store.set("punctual", "")
        assert y.equal(x)
    else:
        store.wait(["punctual"])
        for tag in reversed(range(40)):  # the last message first
            dist.recv(y, 0, tag=tag)
            assert y.equal(x + tag), tag


@on_ranks(3)
def test_readers_of_different_speed_get_the_same() -> None:
    """Another rank is slow in each round; the sizes are around those of a chunk, and of the limits of a stream."""
    rank = dist.get_rank()
    for round_, bytes_ in enumerate([33 << 10, 256 << 10, MIB, MIB + 64, 4 * MIB, 4 * MIB + 4, 9 * MIB + 4]):
        x = torch.full((bytes_ // 4,), float(rank + round_))
        others = [((rank + 1) % 3, 1.0), ((rank + 2) % 3, 1.0)]
        plan = NeighborPlan(rank, 3, 1.0, others, others)
        works = [backend().neighbor_allreduce(x, plan) for _ in range(3)]
        in_place = x.clone()  # no part of it may be overwritten before it was sent
        works.append(backend().neighbor_allreduce(in_place, plan, output=in_place))
        if rank == round_ % 3:
            time.sleep(0.02)
        for work in works:
            work.wait()
            assert work.result()[0].eq(3.0 + 3 * round_).all()
