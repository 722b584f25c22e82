"""Tests of tables that a program could fill forever: each test exceeds a table's limit and counts the entries."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, WorldPool, on_ranks
from test_memory import resident_bytes
from torch import Tensor

# The number of names that a group remembers; NameTable::kMost.
NAMES = 4096
SOON = 20.0


def extension() -> Any:
    from fog_pg import _C

    return _C


def backend_of(group: dist.ProcessGroup | None = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def soon(condition: Callable[[], bool]) -> bool:
    """Returns whether the condition becomes true within the time limit."""
    end = time.monotonic() + SOON
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


# Names of operations


def exchange(backend: Any, name: str, edges: list[tuple[int, int]], value: float) -> tuple[dist.Work, Tensor]:
    """Starts an exchange that sums the received values and a quarter of this rank's value."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sources = [(i, 1.0) for i, j in edges if j == rank]
    destinations = [(j, 1.0) for i, j in edges if i == rank]
    plan = extension().NeighborPlan(rank, size, 0.25, sources, destinations)
    tensor = torch.full((3,), value, dtype=torch.float64)
    return backend.neighbor_allreduce([tensor], plan, output=[tensor], name=name, confirm=False), tensor


def forget_names(backend: Any, seed: int) -> None:
    """Uses so many other names on this rank that it forgets all earlier names."""
    for number in range(NAMES):
        exchange(backend, f"other {dist.get_rank()} {seed} {number}", [], 0.0)[0].wait()


@on_ranks(3)
def test_names_are_forgotten() -> None:
    group = dist.new_group()
    before = extension().bookkeeping()["names"]
    works = []
    for number in range(NAMES + 500):
        edges = [(0, 1)] if number % 50 == 0 else []
        works.append(exchange(backend_of(group), f"step {number}", edges, 1.0)[0])
    for work in works:
        work.wait()
    assert extension().bookkeeping()["names"] - before == NAMES


def use_forgotten_names(seed: int, steps: int) -> int:
    """Ranks use the same names in different orders, run ahead and forget; no use may take another use's message."""
    group = dist.new_group()
    backend, rank, size = backend_of(group), dist.get_rank(), dist.get_world_size()
    common, own = random.Random(seed), random.Random(seed + 1 + rank)
    names = [f"name {number}" for number in range(3)]
    pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
    in_flight: dict[str, tuple[dist.Work, Tensor, float]] = {}
    checked = 0

    def finish(name: str) -> None:
        work, tensor, expected = in_flight.pop(name)
        work.wait()
        assert tensor.tolist() == [expected] * 3, f"{name}: {tensor.tolist()} instead of {expected}"

    for first in range(0, steps, len(names)):
        # Each name is used once, on the same edges everywhere.
        round_ = [
            (name, common.sample(pairs, common.randint(0, 3)), first + k) for k, name in enumerate(names)
        ]
        own.shuffle(round_)
        for name, edges, step in round_:
            if own.random() < 0.05:
                for other in list(in_flight):
                    finish(other)
                forget_names(backend, step)
            if name in in_flight:
                finish(name)
            value = float(step * size + rank)
            sources = [i for i, j in edges if j == rank]
            expected = 0.25 * value + sum(float(step * size + i) for i in sources)
            in_flight[name] = (*exchange(backend, name, edges, value), expected)
            checked += len(sources)
    for name in list(in_flight):
        finish(name)
    return checked


def test_forgotten_names_are_used_again(worlds: WorldPool) -> None:
    assert min(worlds(3).run(use_forgotten_names, 7, 150)) > 20


# Groups


@on_ranks(3)
def test_closed_groups_are_forgotten() -> None:
    """Ranks destroy their groups in different orders; one of the groups has failed."""
    rank = dist.get_rank()
    groups = [dist.new_group() for _ in range(4)]
    groups += [group for group in [dist.new_group([0, 1]), dist.new_group([1, 2])] if group is not None]
    dist.barrier()
    if rank == 1:
        backend_of(groups[0]).abort()
    members = [group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER]
    for group in members[rank:] + members[:rank]:
        dist.destroy_process_group(group)
    dist.barrier()
    assert soon(lambda: extension().bookkeeping()["closed_groups"] == 0), extension().bookkeeping()


# A rank that runs ahead

COUNT = 8000
NUMEL = 2048  # in float32 elements: 8 KiB each, so 64 MiB in all
LIMIT = 16 << 20
# Headers, and data that may be on its way when the receiver asks for less: by TCP also what the sockets hold (4 MiB, the
# system's limit for a sender).
ROOM = {"1": (5 << 20) + COUNT * 512, "0": (9 << 20) + COUNT * 512}


def run_ahead(kind: str) -> tuple[int, int]:
    """Rank 0 sends all its messages while rank 1 receives none.

    Returns:
        The number of operations that rank 0 has seen complete by then, and the bytes of early messages on rank 1.
    """
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()

    def start(number: int) -> tuple[dist.Work, Tensor]:
        tensor = torch.full((NUMEL,), float(number) if rank == 0 else -1.0)
        if kind == "broadcast":
            return dist.broadcast(tensor, 0, async_op=True), tensor  # type: ignore[return-value]
        return (dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)), tensor  # type: ignore[return-value]

    seen = 0
    if rank == 0:
        started = [start(number) for number in range(COUNT)]
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            seen = sum(work.is_completed() for work, _ in started)
        store.set(f"ahead {kind}", "1")
        for work, _ in started:
            work.wait()
    else:
        store.wait([f"ahead {kind}"])
        seen = extension().bookkeeping()["early_bytes"]
        for number in range(COUNT):
            work, tensor = start(number)
            work.wait()
            assert tensor.eq(number).all(), f"{kind} {number}: {tensor[0]}"
    dist.barrier()
    assert soon(lambda: extension().bookkeeping()["early_bytes"] < 8 * NUMEL)  # the next message may be there
    # From now on nothing is held back.
    work, tensor = start(7)
    work.wait()
    assert tensor.eq(7).all()
    dist.barrier()
    return seen, dist.get_rank()


@pytest.mark.parametrize("links", ["1", "0"], ids=["shared memory", "TCP"])
def test_a_rank_that_runs_ahead_waits(new_world: Callable[..., World], links: str) -> None:
    """This includes the root of a broadcast and senders of small messages, which otherwise never wait."""
    environment = {"_FOG_CONFIRM": "0", "_FOG_LOCAL_LINKS": links}
    world = new_world(2, environment=environment)
    for kind in ("broadcast", "send"):
        (completed, _), (early, _) = world.run(run_ahead, kind)
        assert completed < 0.75 * COUNT, f"{kind}: rank 0 has completed {completed}"
        assert early < LIMIT + ROOM[links], f"{kind}: rank 1 has {early} bytes of early messages"


def large_over_tcp(rounds: int) -> int:
    """Returns the growth of memory while data comes in parts, as results, for reductions, and through windows."""
    other = 1 - dist.get_rank()
    x, y = torch.ones(1 << 18), torch.empty(1 << 18)
    window = backend_of().create_window(torch.zeros(1 << 16), "growth", [other], [other])

    def once() -> None:
        dist.all_reduce(x, dist.ReduceOp.MAX)
        receive = dist.irecv(y, other)
        dist.send(x, other)
        receive.wait()
        window.put(window.tensor, [(other, 1.0)]).wait()
        window.get([(other, 1.0)]).wait()

    for _ in range(10):
        once()
    before = resident_bytes()
    for _ in range(rounds):
        once()
    grown = resident_bytes() - before
    window.free()
    return grown


def test_data_that_came_over_tcp_is_released(new_world: Callable[..., World]) -> None:
    """Regression: the receiver and the transfer kept each other alive."""
    world = new_world(2, environment={"_FOG_LOCAL_LINKS": "0"})
    assert max(world.run(large_over_tcp, 150)) < 30 << 20  # before, more than one MiB per round was kept


# Windows


def drop_windows(victim: int) -> bool:
    """Windows are dropped while the victim may still use them; then the victim dies."""
    count, rank = 3, dist.get_rank()
    others = [other for other in range(dist.get_world_size()) if other != rank]
    windows = [backend_of().create_window(torch.ones(1000), f"w{i}", others, others) for i in range(count)]
    dist.barrier()
    if rank != victim:
        del windows
    dist.barrier()
    deferred = extension().bookkeeping()["deferred_windows"]
    assert deferred == (0 if rank == victim else count), deferred
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return soon(lambda: extension().bookkeeping()["deferred_windows"] == 0)


def test_windows_of_a_dead_neighbor_are_released(new_world: Callable[..., World]) -> None:
    outcomes = new_world(3).run_raw(drop_windows, 1)
    assert [o.state for o in outcomes] == ["returned", "died", "returned"], "\n".join(map(str, outcomes))
    assert outcomes[0].value and outcomes[2].value
