"""Tests of the backend's one-sided windows: their contents, no torn or lost values, and how they end.

The tests of their contents use shared memory, as on one host, and messages, as between hosts; ``make test-all`` adds
RMA.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ALL, BACKEND, World, WorldPool
from hosts import run_on_hosts
from reference import COMPLEX, FLOATS, INTEGERS, Checks, make_input
from torch import Tensor

pytestmark = pytest.mark.skipif(BACKEND != "fog", reason="windows of backend fog")

KIB, MIB = 1 << 10, 1 << 20
# The ways in which ranks reach each other, with the environment that selects each.
WAYS = {
    "memory": {},
    "messages": {"FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "messages"},
    "rma": {"FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "rma"},
    "tcp": {"FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "tcp"},
}
# How long writers and readers race.
RACE_SECONDS = 0.5 if ALL else 0.1
# Wide types, in which a small multiple of a float16 or bfloat16 is exact, so that it is rounded only once.
WIDE = {dtype: torch.float64 for dtype in FLOATS} | {dtype: torch.complex128 for dtype in COMPLEX}
SOON = timedelta(seconds=10)
SHORT = timedelta(milliseconds=100)


def worlds_by_way() -> Iterator[Callable[[int, str], World]]:
    """Yields a function that returns a world for a size and a way, and closes the worlds afterwards."""
    pools = {way: WorldPool(environment=environment) for way, environment in WAYS.items()}
    yield lambda size, way: pools[way](size)
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def world_of() -> Iterator[Callable[[int, str], World]]:
    yield from worlds_by_way()


# test_window_rma.py has a sample of these tests over RMA.
@pytest.fixture(
    params=["memory", "messages", *(pytest.param(way, marks=pytest.mark.long) for way in ("rma", "tcp"))]
)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def others() -> list[int]:
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def create(tensor: Tensor, name: str = "w", **options: Any) -> Any:
    """Creates a window in which all ranks are neighbors of each other."""
    return backend().create_window(tensor, name, others(), others(), **options)


def slot(window: Any, rank: int) -> Tensor:
    """Returns the contents of this rank's slot for `rank`, and resets its version."""
    return window.update(0.0, [(rank, 1.0)], clone=True)


def full(value: float, numel: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((numel,), value, dtype=dtype)


# --- contents of windows ------------------------------------------------------------------------------------


def operations(numel: int) -> None:
    """Each rank sends its number; all values are small integers, so sums are exact."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = full(rank, numel)
    window = create(mine, zero_init=True)
    assert window.tensor is mine
    assert window.in_neighbors == window.out_neighbors == others()
    everyone = [(other, 1.0) for other in others()]
    with Checks() as checks:
        for other in others():
            checks.equal("zeros at first", slot(window, other), full(0, numel))
        dist.barrier()
        window.put(mine, [(other, 10.0 + other) for other in others()]).wait()
        dist.barrier()
        versions = [window.version(other) for other in others()]
        checks.true("a put is a version", versions == [1] * (size - 1))
        for other in others():
            checks.equal("put", slot(window, other), full(other * (10 + rank), numel))
            checks.true("reading starts versions anew", window.version(other) == 0)
            checks.equal("what was read stays", slot(window, other), full(other * (10 + rank), numel))
        dist.barrier()
        window.accumulate(mine, everyone).wait()
        window.accumulate(full(100, numel), everyone).wait()
        dist.barrier()
        for other in others():
            checks.true("accumulate is no version", window.version(other) == 0)
            checks.equal("accumulate after put", slot(window, other), full(other * (11 + rank) + 100, numel))
        dist.barrier()
        window.put(full(7, numel), everyone).wait()
        dist.barrier()
        for other in others():
            checks.equal("put after accumulate", slot(window, other), full(7, numel))
        taken = window.update(2.0, everyone, reset=True, clone=True)
        checks.equal("a clone", taken, full(2 * rank + 7 * (size - 1), numel))
        checks.equal("leaves the tensor", mine, full(rank, numel))
        for other in others():
            checks.equal("taken", slot(window, other), full(0, numel))
        dist.barrier()
        window.accumulate(mine, everyone).wait()
        dist.barrier()
        for other in others():
            checks.equal("accumulate into a slot that was taken", slot(window, other), full(other, numel))
        dist.barrier()
        window.get([(other, 3.0) for other in others()]).wait()
        versions = [window.version(other) for other in others()]
        checks.true("a get is a version", versions == [1] * (size - 1))
        for other in others():
            checks.equal("get", slot(window, other), full(3 * other, numel))
        dist.barrier()
        window.accumulate(full(1, numel), everyone).wait()
        dist.barrier()
        window.put(full(float("nan"), numel), [(other, 0.0) for other in others()[:1]]).wait()
        dist.barrier()
        for other in others():
            zeroed = rank == (1 if other == 0 else 0)
            expected = full(0, numel) if zeroed else full(3 * other + 1, numel)
            checks.equal("accumulate after get", slot(window, other), expected)
        mine.fill_(float("nan"))
        result = window.update(0.0, [(other, 0.5) for other in others()])
        checks.true("in place", result is mine)
        checks.true("whatever it was", not result.isnan().any().item())
        dist.barrier()
    window.free()


# Sizes around the limits at which another algorithm is used, in float64 elements.
NUMELS = [0, 1, 1000, 4096, 4097, 300_001]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_put_accumulate_get_update(world_of, way, size):
    for numel in NUMELS:
        world_of(size, way).run(operations, numel)


def starts_as_a_copy() -> None:
    rank = dist.get_rank()
    window = create(full(rank))
    for other in others():
        assert slot(window, other).eq(rank).all()
    dist.barrier()
    window.accumulate(full(0.5), [(other, 1.0) for other in others()]).wait()
    dist.barrier()
    for other in others():
        assert slot(window, other).eq(rank + 0.5).all()
    dist.barrier()
    window.free()


def test_slots_start_as_copies_of_the_owners_tensor(world_of, way):
    world_of(2, way).run(starts_as_a_copy)


def all_dtypes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        for dtype in INTEGERS + FLOATS + COMPLEX:
            inputs = [make_input(r, dtype, (1037,)) for r in range(size)]
            window = create(inputs[rank].clone(), zero_init=True)
            everyone = [(other, 1.0) for other in others()]
            expected: dict[int, Tensor] = {}
            window.put(inputs[rank], everyone).wait()
            window.accumulate(inputs[rank], everyone).wait()
            dist.barrier()
            for other in others():
                if dtype in INTEGERS:  # torch has no arithmetic for unsigned integers
                    twice, thrice = (torch.from_numpy(inputs[other].numpy() * weight) for weight in (2, 3))
                else:
                    twice, thrice = ((inputs[other].to(WIDE[dtype]) * weight).to(dtype) for weight in (2, 3))
                checks.equal(f"{dtype} sum", slot(window, other), twice)
                expected[other] = thrice
            dist.barrier()
            window.put(inputs[rank], [(other, 3.0) for other in others()]).wait()
            dist.barrier()
            for other in others():
                checks.equal(f"{dtype} whole weight", slot(window, other), expected[other])
            dist.barrier()
            window.free()
        small = torch.tensor([-7, -5, -2, 0, 1, 2, 3, 5], dtype=torch.int32)
        window = create(small.clone(), zero_init=True)
        window.put(small, [(other, 0.5) for other in others()]).wait()
        dist.barrier()
        for other in others():
            halves = torch.tensor([-4, -2, -1, 0, 0, 1, 2, 2], dtype=torch.int32)
            checks.equal("halves are rounded to even", slot(window, other), halves)
        dist.barrier()
        window.put(small, [(other, 1e30) for other in others()]).wait()
        dist.barrier()
        for other in others():
            limits = torch.iinfo(torch.int32)
            found = slot(window, other)
            checks.equal("out of range", found.sign(), small.sign())
            checks.true("the largest", (found.min().item(), found.max().item()) == (limits.min, limits.max))
        dist.barrier()
        window.free()


def test_every_dtype(world_of, way):
    world_of(2, way).run(all_dtypes)


def with_p() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    window = create(full(0), zero_init=True)
    everyone = [(other, 1.0) for other in others()]
    assert window.p == 1.0
    window.p = 2.0 + rank
    window.accumulate(full(1), [(other, 0.25) for other in others()], with_p=True).wait()
    window.accumulate(full(1), [(other, 0.5) for other in others()], with_p=True).wait()
    window.accumulate(full(1), everyone).wait()
    dist.barrier()
    window.update(0.5, [(other, 2.0) for other in others()], reset=True, with_p=True)
    assert window.p == 0.5 * (2 + rank) + sum(2 * 0.75 * (2 + other) for other in others())
    dist.barrier()
    before = window.p
    window.update(1.0, everyone, reset=True, with_p=True)
    assert window.p == before  # the slots were taken before
    window.p = 1.0
    dist.barrier()
    window.put(full(1), [(other, 0.5) for other in others()], with_p=True).wait()
    window.put(full(1), everyone).wait()  # leaves p unchanged
    dist.barrier()
    window.get(everyone).wait()  # leaves p unchanged too
    window.update(1.0, everyone, reset=True)  # leaves p unchanged too
    assert window.p == 1.0
    window.update(1.0, everyone, reset=True, with_p=True)
    assert window.p == 1.0 + 0.5 * (size - 1)
    dist.barrier()
    window.free()


def test_p_goes_with_the_value(world_of, way):
    world_of(3, way).run(with_p)


def kept_share() -> None:
    """When the Work is complete, the tensor and p hold the share that `self_weight` gives."""
    mine = full(8, 20_000)
    window = create(mine, zero_init=True)
    everyone = [(other, 1.0) for other in others()]
    with Checks() as checks:
        work = window.accumulate(mine, everyone, self_weight=0.5, with_p=True)
        while not work.is_completed():
            time.sleep(0.0001)
        checks.equal("by the time it is complete", mine, full(4, 20_000))
        checks.true("and p", window.p == 0.5)
        work.wait()
        work.wait()
        checks.equal("once", mine, full(4, 20_000))
        checks.true("p once", window.p == 0.5)
        dist.barrier()
        for other in others():
            checks.equal("it was sent before", slot(window, other), full(8, 20_000))
        table = torch.arange(40_000, dtype=torch.float64).view(20_000, 2)
        column = table[:, 1]
        expected = table * torch.tensor([1.0, 0.25])
        dist.barrier()
        window.put(column, everyone, self_weight=0.25).wait()
        checks.equal("of a column", table, expected)
        checks.true("p is not sent", window.p == 0.5)
        dist.barrier()
        for other in others():
            checks.equal("a column", slot(window, other), expected[:, 1] * 4)
        dist.barrier()
        window.lock(others(), own=True)
        dist.barrier()
        given = full(8, 20_000)
        with pytest.raises(dist.DistBackendError, match="timed out"):
            window.put(given, everyone, self_weight=0.5, mutex=True, with_p=True, timeout=SHORT).wait()
        work = window.put(given, everyone, self_weight=0.5, mutex=True, with_p=True)
        time.sleep(0.05)
        checks.equal("not of what fails, nor before", given, full(8, 20_000))
        checks.true("p neither", window.p == 0.5)
        dist.barrier()
        window.unlock(others(), own=True)
        work.wait()
        checks.equal("then", given, full(4, 20_000))
        checks.true("and p then", window.p == 0.25)
        with pytest.raises(ValueError, match="self_weight: got nan"):
            window.put(given, everyone, self_weight=float("nan"))
        with pytest.raises(ValueError, match="tensor: got a tensor whose elements share memory"):
            window.put(full(1, 1).expand(20_000), everyone, self_weight=0.5)
        dist.barrier()
        window.free()


def test_what_the_sender_keeps(world_of, way):
    world_of(2, way).run(kept_share)


def directed() -> None:
    """A ring in one direction, on a subgroup whose ranks have other numbers than in the world."""
    ranks = [2, 0, 3]
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return
    sub = group._get_backend(torch.device("cpu"))
    rank, size = group.rank(), group.size()
    before, after = (rank - 1) % size, (rank + 1) % size
    window = sub.create_window(full(rank), "ring", [before], [after], zero_init=True)
    window.put(full(rank), [(after, 1.0)]).wait()
    dist.barrier(group)
    assert slot(window, before).eq(before).all()
    window.get([(before, 2.0)]).wait()
    assert slot(window, before).eq(2 * before).all()
    with pytest.raises(
        ValueError,
        match=rf"win_put: destinations: got rank {before}; .* rank {after} among the out-neighbors",
    ):
        window.put(full(1), [(before, 1.0)])
    with pytest.raises(
        ValueError, match=rf"win_get: sources: got rank {after}; .* rank {before} among the in-neighbors"
    ):
        window.get([(after, 1.0)])
    dist.barrier(group)
    window.free()
    dist.destroy_process_group(group)


def test_a_directed_graph_on_some_ranks(world_of, way):
    world_of(4, way).run(directed)


def parameter() -> None:
    layer = torch.nn.Linear(3, 2)
    weight = layer.weight
    view = weight.detach()[1:]
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = weight.detach().clone()
    window = create(weight)
    assert layer.weight is weight
    assert torch.equal(weight, before)
    dist.barrier()
    everyone = [(other, 1.0) for other in others()]
    window.put(torch.ones_like(weight), everyone).wait()
    dist.barrier()
    assert window.update(0.0, everyone) is weight
    assert view.eq(len(others())).all()
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert weight.eq(len(others()) - 1).all()
    dist.barrier()
    window.get(everyone).wait()
    assert slot(window, others()[0]).eq(len(others()) - 1).all()
    weight.data = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="has other memory than when the window was made"):
        window.update(1.0, everyone)
    dist.barrier()
    window.free()


def test_a_parameter_stays_that_parameter(world_of, way):
    world_of(2, way).run(parameter)


def many_in_flight() -> None:
    """The operations of one rank on one slot take place in the order of the calls."""
    rank = dist.get_rank()
    window = create(full(0, 20_000), zero_init=True)
    works = []
    amounts = [full(100 * rank + number, 20_000) for number in range(50)]
    for number, amount in enumerate(amounts):
        call = window.put if number % 10 == 0 else window.accumulate
        works.append(call(amount, [(other, 1.0) for other in others()]))
    for work in works:
        work.wait()
    dist.barrier()
    for other in others():
        assert slot(window, other).eq(sum(100 * other + number for number in range(40, 50))).all()
        assert (
            window.update(0.0, [(other, 1.0)], reset=True, clone=True)
            .eq(sum(100 * other + n for n in range(40, 50)))
            .all()
        )
    dist.barrier()
    window.free()


def test_operations_in_flight_keep_their_order(world_of, way):
    world_of(2, way).run(many_in_flight)


def several_windows() -> None:
    rank = dist.get_rank()
    windows = [create(full(rank), f"w{number}", zero_init=True) for number in range(5)]
    for number, window in enumerate(windows):
        window.put(full(10 * number + rank), [(other, 1.0) for other in others()]).wait()
    dist.barrier()
    for number, window in enumerate(windows):
        for other in others():
            assert slot(window, other).eq(10 * number + other).all()
    dist.barrier()
    for window in reversed(windows):
        window.free()
    create(full(rank), "w0").free()


def test_several_windows(world_of, way):
    world_of(2, way).run(several_windows)


# --- arguments ----------------------------------------------------------------------------------------------


def disagreements() -> None:
    rank = dist.get_rank()
    group = backend()
    other = 1 - rank
    with pytest.raises(ValueError, match=r"disagree on the name .* rank 0 has 'a0', rank 1 has 'a1'"):
        group.create_window(full(1), f"a{rank}", [other], [other])
    with pytest.raises(
        ValueError, match=r"disagree on the tensor .* rank 0 has float64\[1\], rank 1 has float64\[2\]"
    ):
        group.create_window(full(1, rank + 1), "a", [other], [other])
    dtype = [torch.float32, torch.int64][rank]
    with pytest.raises(ValueError, match=r"rank 0 has float32\[5\], rank 1 has int64\[5\]"):
        group.create_window(full(1, dtype=dtype), "a", [other], [other])
    with pytest.raises(
        ValueError, match=r"rank 1 is among the out_neighbors of rank 0, but rank 0 is not among the in_"
    ):
        group.create_window(full(1), "a", [1] if rank == 0 else [], [other])
    with pytest.raises(
        ValueError, match=r"rank 1 is not among the out_neighbors of rank 0, but rank 0 is among the in_"
    ):
        group.create_window(full(1), "a", [other], [0] if rank == 1 else [])
    window = group.create_window(full(1), "a", [other], [other])  # nothing of the refused window is left
    window.free()
    dist.all_reduce(torch.ones(3))


def test_ranks_that_disagree_all_raise(world_of, way):
    world_of(2, way).run(disagreements)


def bad_arguments() -> None:
    rank = dist.get_rank()
    other = 1 - rank
    group = backend()
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tensor": torch.ones(2, 2).t()}, ValueError, "not contiguous"),
        ({"tensor": torch.ones(2, dtype=torch.bool)}, ValueError, "tensor: got dtype bool; windows allow"),
        ({"tensor": torch.ones(2).to_sparse()}, ValueError, "tensor"),
        ({"in_neighbors": [rank]}, ValueError, f"in_neighbors: got rank {rank}; .* except {rank}"),
        ({"in_neighbors": [2]}, ValueError, "in_neighbors: got rank 2; allowed are ranks 0 to 1"),
        ({"out_neighbors": [other, other]}, ValueError, f"out_neighbors: got rank {other} more than once"),
        ({"timeout": timedelta(0)}, ValueError, "timeout: got 0 ms; allowed is more than 0"),
    ]
    good = {"tensor": full(1), "name": "w", "in_neighbors": [other], "out_neighbors": [other]}
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            group.create_window(**(good | change))
    window = group.create_window(**good)
    for destinations, message in [
        (
            [(rank, 1.0)],
            f"destinations: got rank {rank}; window 'w' has rank {other} among the out-neighbors",
        ),
        ([(other, 1.0), (other, 1.0)], "more than once"),
        ([(other, float("inf"))], "got weight inf for rank"),
    ]:
        for call in (window.put, window.accumulate):
            with pytest.raises(ValueError, match=message):
                call(full(1), destinations)
    with pytest.raises(
        ValueError, match=r"tensor: got float64\[4\]; allowed is float64\[5\] as window 'w' has it"
    ):
        window.put(full(1, 4), [(other, 1.0)])
    with pytest.raises(ValueError, match=r"tensor: got float32\[5\]"):
        window.put(full(1, dtype=torch.float32), [(other, 1.0)])
    with pytest.raises(ValueError, match="self_weight: got nan"):
        window.update(float("nan"), [])
    with pytest.raises(ValueError, match="rank: got rank 5"):
        window.version(5)
    with pytest.raises(ValueError, match="whose mutex of window 'w' this thread has not locked"):
        window.unlock([other])
    assert window.update(1.0, []).eq(1).all()
    window.put(
        torch.ones(10, dtype=torch.float64)[::2], [(other, 1.0)]
    ).wait()  # the tensor of a put may be non-contiguous
    dist.barrier()
    assert slot(window, other).eq(1).all()
    window.free()
    for call in (
        lambda: window.put(full(1), []),
        lambda: window.update(1.0, []),
        lambda: window.version(other),
    ):
        with pytest.raises(
            dist.DistBackendError, match="of window 'w' of group .* on rank .: the window was freed"
        ):
            call()
    window.free()  # a second call does nothing


def test_bad_arguments(world_of):
    world_of(2, "memory").run(bad_arguments)


def alone() -> None:
    window = backend().create_window(full(3), "alone", [], [])
    window.put(full(1), []).wait()
    assert window.update(2.0, [], with_p=True).eq(6).all()
    assert window.p == 2.0
    window.free()


def test_a_group_of_one(world_of):
    world_of(1, "memory").run(alone)


# --- nothing is torn ----------------------------------------------------------------------------------------


def is_one_value(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)
    return bool(low == high)


def race(numel: int, dtype: torch.dtype, kind: str, mutex: bool) -> tuple[int, int]:
    """Rank 0 changes all elements of a value at once, repeatedly; rank 1 checks that they are equal.

    Returns:
        The number of reads, and the number of different values read.
    """
    rank = dist.get_rank()
    neighbors: tuple[list[int], list[int]] = ([], [1]) if rank == 0 else ([0], [])
    tensor = torch.ones(numel, dtype=dtype)
    window = backend().create_window(tensor, "race", *neighbors, zero_init=True)
    values = [torch.full((numel,), value, dtype=dtype) for value in range(1, 6)]
    looks, seen = 0, set()
    dist.barrier()
    end = time.monotonic() + RACE_SECONDS
    latest = end + 20  # on a machine that is busy with other work
    over = dist.barrier(async_op=True) if rank == 0 else None  # rank 1 joins once it has read enough values
    while True:
        if over is not None:
            if over.is_completed():
                break
            for value in values:
                if kind == "put":
                    window.put(value, [(1, 1.0)], mutex=mutex).wait()
                elif kind == "get and scaling":
                    window.put(tensor, [], self_weight=3.0).wait()
                elif kind != "get":
                    window.accumulate(value, [(1, 1.0)], mutex=mutex).wait()
                else:
                    if mutex:
                        window.lock([1], own=True)
                        tensor.mul_(3)  # arithmetic of the owner itself
                        window.unlock([1], own=True)
                    else:
                        window.update(3.0, [])
        else:
            now = time.monotonic()
            if now > latest or (now > end and looks > 3 and len(seen) > 2):
                dist.barrier()
                break
            if kind in ("get", "get and scaling"):
                window.get([(0, 1.0)], mutex=mutex).wait()
            elif kind == "get and accumulate":  # accumulates into the same slot
                for weight in (looks % 50, looks % 50 + 50):
                    window.get([(0, float(weight))], mutex=mutex).wait()
            reset = not kind.startswith("get") and looks % 3 == 0
            found = window.update(0.0, [(0, 1.0)], clone=True, mutex=mutex, reset=reset)
            low, high = (int(value) for value in torch.aminmax(found))
            assert low == high, f"torn after {looks} looks: {low} and {high}"
            seen.add(low)
            looks += 1
    window.free()
    return looks, len(seen)


@pytest.mark.parametrize("kind", ["put", "accumulate", "get", "get and accumulate", "get and scaling"])
def test_nothing_is_torn(world_of, way, kind):
    every = [(nbytes, mutex) for nbytes in (1, 4 * KIB, 100_000, MIB, 16 * MIB) for mutex in (False, True)]
    for nbytes, mutex in every if ALL else [(1, False), (100_000, False), (100_000, True), (MIB, False)]:
        dtype = torch.uint8 if nbytes < 8 else torch.int64
        _, (looks, seen) = world_of(2, way).run(race, nbytes // dtype.itemsize, dtype, kind, mutex)
        assert looks > 3 and seen > 2, f"{nbytes} bytes, mutex {mutex}: too little was seen to say anything"


# --- nothing is lost ----------------------------------------------------------------------------------------


def move_mass(
    numel: int, dtype: torch.dtype, seconds: float, mutex: bool
) -> tuple[int, Tensor, float, float]:
    """Ranks give parts of their values to random neighbors, and collect, at random times.

    All values and p are whole numbers, so sums are exact in any order.

    Returns:
        The sum that this rank collected, its value and p at the end, and its p at the start.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(rank)
    out = sorted({(rank + 1) % size, (rank + 2) % size} - {rank})
    into = sorted({(rank - 1) % size, (rank - 2) % size} - {rank})
    mine = torch.arange(numel, dtype=dtype) % 1000 + rank * 1000 + 1
    window = backend().create_window(mine, "mass", into, out, zero_init=True)
    window.p = first = float(2**40 * (rank + 1))
    part = torch.empty_like(mine)
    collected = 0
    dist.barrier()
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end or (not collected and now < end + 20):
        for other in out:
            if chance.random() < 0.7:
                torch.div(
                    mine, 3, rounding_mode="trunc", out=part
                ) if not dtype.is_floating_point else torch.trunc(mine / 3, out=part)
                mine -= part
                given = float(window.p // 3)
                rest = window.p - given
                window.p = given  # the p that goes with the part
                window.accumulate(part, [(other, 1.0)], with_p=True, mutex=mutex).wait()
                window.p = rest
        if chance.random() < 0.6:
            some = [(other, 1.0) for other in into if chance.random() < 0.8]
            window.update(1.0, some, reset=True, with_p=True, mutex=mutex)
            collected += len(some)
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.003)
    dist.barrier()
    window.update(1.0, [(other, 1.0) for other in into], reset=True, with_p=True)
    dist.barrier()
    window.free()
    return collected, mine, window.p, first


@pytest.mark.parametrize("mutex", [False, True], ids=["free", "mutex"])
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_mass_is_conserved(world_of, way, size, mutex):
    for numel, dtype in (
        (1, torch.float64),
        (100, torch.int64),
        (20_000, torch.float32),
        (300_000, torch.int64),
    ):
        outcomes = world_of(size, way).run(move_mass, numel, dtype, RACE_SECONDS, mutex)
        assert all(collected > 0 for collected, *_ in outcomes), (numel, dtype)
        before = sum(torch.arange(numel, dtype=torch.int64) % 1000 + rank * 1000 + 1 for rank in range(size))
        after = sum(mine.to(torch.int64) for _, mine, _, _ in outcomes)
        assert torch.equal(after, before), (numel, dtype)
        assert sum(p for *_, p, _ in outcomes) == sum(first for *_, first in outcomes), (numel, dtype)


def collect_meanwhile(numel: int) -> int:
    """Rank 0 adds ones while rank 1 collects as fast as it can, so the value that rank 0 adds to may be taken
    meanwhile.

    Returns:
        The number of ones that were added or collected.
    """
    rank = dist.get_rank()
    neighbors: tuple[list[int], list[int]] = ([], [1]) if rank == 0 else ([0], [])
    mine = torch.zeros(numel, dtype=torch.int64)
    window = backend().create_window(mine, "collect", *neighbors, zero_init=True)
    ones = torch.ones_like(mine)
    count = 0
    dist.barrier()
    end = time.monotonic() + RACE_SECONDS
    while (now := time.monotonic()) < end or (rank == 0 and count < 5 and now < end + 20):
        if rank == 0:
            window.accumulate(ones, [(1, 1.0)]).wait()
            count += 1
        else:
            window.update(1.0, [(0, 1.0)], reset=True)
    dist.barrier()
    if rank == 1:
        window.update(1.0, [(0, 1.0)], reset=True)
        low, high = (int(value) for value in torch.aminmax(mine))
        assert low == high
        count = low
    window.free()
    return count


def test_every_addition_is_collected_once(world_of, way):
    for numel in (1, 1000, 130_000, 1_000_000):
        added, collected = world_of(2, way).run(collect_meanwhile, numel)
        assert added == collected > 3, numel


def from_several_threads() -> None:
    """Several threads of one rank put, add and read at the same time."""
    rank = dist.get_rank()
    window = create(full(0, 1000, torch.int64), zero_init=True)
    everyone = [(other, 1.0) for other in others()]
    ones = full(1, 1000, torch.int64)
    torn = []

    def add() -> None:
        for _ in range(200):
            window.accumulate(ones, everyone).wait()

    def read() -> None:
        for _ in range(100):
            found = window.update(0.0, everyone, clone=True)
            if found.min() != found.max():
                torn.append(found)

    threads = [threading.Thread(target=target) for target in (add, add, add, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    assert not torn
    assert slot(window, 1 - rank).eq(600).all()
    dist.barrier()
    window.free()


def test_threads_of_one_rank(world_of, way):
    world_of(2, way).run(from_several_threads)


# --- the target does not take part --------------------------------------------------------------------------


def busy_target(flag: str) -> bool:
    """Rank 1 holds the GIL in a Python loop, while rank 0 calls all operations and then writes a flag to a file.

    Returns:
        Whether rank 0 was done while the loop ran.
    """
    rank = dist.get_rank()
    if rank == 0:
        Path(flag).write_bytes(b"0")
    dist.barrier()
    with open(flag, "r+b") as file:
        done = mmap.mmap(file.fileno(), 1)  # reading a byte of it does not release the GIL
    window = create(full(rank, 2 * MIB))  # 16 MiB
    amount = full(5, 2 * MIB)
    window.put(amount, [(other, 1.0) for other in others()]).wait()
    dist.barrier()
    if rank == 1:
        sys.setswitchinterval(100.0)
        end = time.monotonic() + SOON.total_seconds()
        while done[0] == ord("0") and time.monotonic() < end:
            pass
        sys.setswitchinterval(0.005)
        was_done = done[0] == ord("1")
    else:
        window.put(amount, [(1, 1.0)]).wait()
        window.accumulate(amount, [(1, 1.0)]).wait()
        window.get([(1, 1.0)]).wait()
        window.lock([1])
        window.unlock([1])
        done[0] = ord("1")
        assert slot(window, 1).eq(1).all()
    dist.barrier()
    if rank == 1:
        assert slot(window, 0).eq(10).all()
    dist.barrier()
    window.free()
    return rank == 0 or was_done


def test_a_target_that_keeps_the_gil(world_of, way, tmp_path):
    assert world_of(2, way).run(busy_target, str(tmp_path / "done")) == [True, True]


# --- mutexes ------------------------------------------------------------------------------------------------


def exclusion(rounds: int, marks: str) -> int:
    """The rank that has the mutex, which rank 0 owns with rank 1, makes a file that must not exist yet.

    Returns:
        The number of times that this rank had the mutex twice in a row.
    """
    rank = dist.get_rank()
    window = create(full(0))
    own = rank == 0
    previous = os.path.join(marks, "previous")
    unfair = 0
    dist.barrier()
    for _ in range(rounds):
        window.lock([1 - rank], own=own)
        with open(os.path.join(marks, "held"), "x"):
            pass
        with open(previous, "a+") as file:
            file.seek(0)
            unfair += file.read()[-1:] == str(rank)
            file.write(str(rank))
        time.sleep(0.001)  # meanwhile the other rank queues again
        os.unlink(os.path.join(marks, "held"))
        window.unlock([1 - rank], own=own)
    dist.barrier()
    window.free()
    return unfair


def test_mutexes_exclude_and_are_fair(world_of, way, tmp_path):
    rounds = 100
    unfair = world_of(2, way).run(exclusion, rounds, str(tmp_path))
    # The first and the last turns may have no competition, and a rank may be late now and then.
    assert sum(unfair) < rounds / 2, unfair


def mutex_of_operations() -> None:
    """An operation with the mutex waits without blocking its caller; the thread that has the mutex may proceed."""
    rank = dist.get_rank()
    window = create(full(rank), zero_init=True)
    if rank == 1:
        window.lock([0], own=True)
    dist.barrier()
    if rank == 0:
        value = full(7)
        waiting = window.put(value, [(1, 1.0)], mutex=True)
        behind = window.accumulate(value, [(1, 1.0)])
        assert not waiting.is_completed()
    dist.barrier()
    if rank == 1:
        assert slot(window, 0).eq(0).all()
        window.update(0.0, [(0, 1.0)], clone=True, mutex=True)  # this thread holds the mutex
        window.unlock([0], own=True)
    else:
        waiting.wait()
        behind.wait()
    dist.barrier()
    if rank == 1:
        assert slot(window, 0).eq(14).all()
    dist.barrier()
    if rank == 0:
        window.lock([1])
        window.lock([1])
        window.put(full(1), [(1, 1.0)], mutex=True).wait()
        window.unlock([1])
    dist.barrier()
    if rank == 1:
        with pytest.raises(
            dist.DistBackendError, match=r"win_mutex of window 'w' .* timed out .* owner 1 and rank 0"
        ):
            window.lock([0], own=True, timeout=timedelta(milliseconds=100))
        with pytest.raises(dist.DistBackendError, match="timed out"):
            window.update(1.0, [(0, 1.0)], mutex=True, timeout=timedelta(milliseconds=100))
    dist.barrier()
    if rank == 0:
        window.unlock([1])
    else:
        window.lock([0], own=True)
    dist.barrier()
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="timed out"):
            window.lock([1], timeout=timedelta(milliseconds=100))
        with pytest.raises(dist.DistBackendError, match="timed out"):
            window.put(full(9), [(1, 1.0)], mutex=True, timeout=timedelta(milliseconds=100)).wait()
    dist.barrier()
    if rank == 1:
        window.unlock([0], own=True)
    dist.barrier()
    if rank == 0:  # the calls that timed out no longer wait
        window.lock([1])
        window.unlock([1])
    window.free()


def test_operations_with_the_mutex(world_of, way):
    world_of(2, way).run(mutex_of_operations)


def many_mutexes() -> None:
    """All ranks take all mutexes of both kinds, again and again, without a deadlock."""
    window = create(full(0))
    dist.barrier()
    for turn in range(20):
        window.lock(others()[::-1] if turn % 2 else others(), own=(turn + dist.get_rank()) % 2 == 0)
        window.put(full(1), [(other, 1.0) for other in others()]).wait()
        window.unlock(others(), own=(turn + dist.get_rank()) % 2 == 0)
    dist.barrier()
    window.free()


def test_many_mutexes_at_a_time(world_of, way):
    world_of(4, way).run(many_mutexes)


def die_with_a_mutex(own: bool) -> None:
    rank = dist.get_rank()
    window = create(full(rank))
    if rank == 1:
        window.lock([0], own=own)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if own and os.environ.get("FOG_LOCAL_LINKS") == "0":
        with pytest.raises(dist.DistBackendError, match="rank 1"):  # the mutex was lost with its owner
            window.lock([1], timeout=SOON)
    else:
        window.lock([1], own=not own, timeout=SOON)
        window.unlock([1], own=not own)
    window.free(SOON)


@pytest.mark.parametrize("own", [False, True], ids=["neighbor", "owner"])
def test_the_mutex_of_a_dead_rank_is_free(new_world, way, own):
    outcomes = new_world(2, environment=WAYS[way]).run_raw(die_with_a_mutex, own)
    assert [outcome.state for outcome in outcomes] == ["returned", "died"], outcomes[0]


# --- primitives for torch's own windows ---------------------------------------------------------------------


def write_and_signal(rounds: int) -> None:
    """On a ring, each rank writes its part to the next one, and goes on when it has the part of the previous one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    mine = torch.zeros(size, 10_000, dtype=torch.int64)
    window = create(mine, zero_init=True)
    mine[rank] = rank + 1
    dist.barrier()
    for turn in range(rounds):
        for step in range(size - 1):
            part = (rank - step) % size
            window.write(mine[part] + turn * (step == 0), after, part * 10_000)
            window.signal(after)
            window.wait_signal(before).wait()
            assert mine[(before - step) % size].eq((before - step) % size + 1 + turn).all()
        mine[rank] = rank + 1
        dist.barrier()
    waiting = window.wait_signal(before)
    assert not waiting.is_completed()
    dist.barrier()
    window.signal(after).wait()
    waiting.wait()
    with pytest.raises(
        dist.DistBackendError, match=f"wait_signal of window 'w' .* waiting for a signal of rank {before}"
    ):
        window.wait_signal(before, timeout=timedelta(milliseconds=50)).wait()
    with pytest.raises(
        ValueError, match=r"put: tensor: got int64\[2\] for element .*; window 'w' is int64\[3, 10000\]"
    ):
        window.write(torch.zeros(2, dtype=torch.int64), after, size * 10_000 - 1)
    mapped = window.map_remote(before)
    assert (mapped is None) == (os.environ.get("FOG_LOCAL_LINKS") == "0")
    if mapped is not None:
        assert mapped[before].eq(before + 1).all()
    dist.barrier()
    window.free()


def test_writes_and_signals(world_of, way):
    world_of(3, way).run(write_and_signal, 5)


# --- between hosts ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.parametrize("placement", [[0, 1], [0, 0, 1, 1]], ids=["1+1", "2+2"])
def test_between_hosts(tmp_path, monkeypatch, placement):
    """Each rank has neighbors on its own host and on the other one."""
    monkeypatch.setenv("FOG_CONFIRM", "1")
    run_on_hosts(tmp_path, placement, "window_hosts", [("everything", [])])


# --- the end ------------------------------------------------------------------------------------------------


def lose_a_neighbor(kind: str) -> None:
    """Rank 2 is killed; the others notice it in operations of this kind."""
    rank = dist.get_rank()
    window = create(full(rank, 10_000), zero_init=True)
    window.put(full(rank, 10_000), [(other, 1.0) for other in others()]).wait()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    alive = 1 - rank
    value = full(10 + rank, 10_000)
    both = [(2, 1.0), (alive, 1.0)]
    end = time.monotonic() + SOON.total_seconds()
    while time.monotonic() < end:
        try:
            getattr(window, kind)(value, both).wait()
        except dist.DistBackendError as error:
            message = str(error)
            break
    else:
        pytest.fail("the loss was not noticed")
    assert f"win_{kind} of window 'w' of group" in message
    assert "rank 2 (pid" in message and "was lost" in message
    for call in (window.put, window.accumulate):
        with pytest.raises(dist.DistBackendError, match="rank 2 .* was lost"):
            call(value, both).wait()
        call(value, both, skip_lost=True).wait()
    # The group has not failed. After this exchange of messages, neither remaining rank puts any more.
    got = torch.zeros(3)
    exchange = [dist.P2POp(dist.isend, torch.ones(3), alive), dist.P2POp(dist.irecv, got, alive)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    assert got.eq(1).all()
    with pytest.raises(dist.DistBackendError, match="rank 2 .* was lost"):
        window.get([(2, 1.0), (alive, 1.0)]).wait()
    window.get([(2, 1.0), (alive, 1.0)], skip_lost=True).wait()
    assert slot(window, alive).eq(alive).all()
    assert slot(window, 2).eq(2).all()  # the last value that it put
    window.free(SOON)


def test_a_lost_neighbor(new_world, way):
    # UCX terminates a process that writes by RMA to a process of this machine that has just been killed; see
    # tests/test_rma_failures.py.
    kind = "accumulate" if way == "rma" else "put"
    outcomes = new_world(3, environment=WAYS[way]).run_raw(lose_a_neighbor, kind)
    assert [outcome.state for outcome in outcomes] == ["returned", "returned", "died"], "\n".join(
        map(str, outcomes)
    )


def free_late() -> None:
    """One rank frees the window while its operations wait for a mutex; the other one goes on meanwhile."""
    rank = dist.get_rank()
    window = create(full(rank), zero_init=True)
    if rank == 0:
        window.lock([1], own=True)
    dist.barrier()
    if rank == 1:
        works = [window.put(full(number), [(0, 1.0)], mutex=True) for number in range(5)]
        window.free()  # waits for the operations
        for work in works:
            work.wait()
    else:
        time.sleep(0.2)
        window.unlock([1], own=True)
        deadline = time.monotonic() + SOON.total_seconds()
        while not slot(window, 1).eq(4).all():
            assert time.monotonic() < deadline
        window.get([(1, 1.0)]).wait()  # rank 1 is in free(), but its memory is still there
        window.put(full(1), [(1, 1.0)]).wait()
        window.accumulate(slot(window, 1), [(1, 1.0)], mutex=True).wait()
        window.free()


def test_free_waits_for_what_is_in_flight(world_of, way):
    world_of(2, way).run(free_late)


def free_without_the_others() -> None:
    window = create(full(0))
    if dist.get_rank() == 0:
        with pytest.raises(
            dist.DistBackendError, match="win_free of window 'w' .* timed out.*not there: rank 1"
        ):
            window.free(timedelta(milliseconds=200))
    dist.barrier()
    if dist.get_rank() == 1:
        window.free()
    dist.barrier()


def test_free_without_the_others(world_of, way):
    world_of(2, way).run(free_without_the_others)


def free_in_different_orders() -> None:
    """Each rank waits in the end of another window: an error names the missing rank, and no other window ends."""
    rank = dist.get_rank()
    windows = [create(full(0), name) for name in ("a", "b")]
    dist.barrier()
    first, second = windows if rank == 0 else windows[::-1]
    with pytest.raises(
        dist.DistBackendError,
        match=rf"win_free of window '{'ab'[rank]}' .* timed out.*not there: rank {1 - rank} .*same order",
    ):
        first.free(timedelta(milliseconds=300))
    # otherwise the first rank to time out would free the window that the other one still waits for
    dist.barrier()
    second.free(SOON)  # the other rank has left this window
    dist.barrier()
    create(full(0), "a").free()


def test_free_in_different_orders(world_of, way):
    world_of(2, way).run(free_in_different_orders)


def unlock_late() -> None:
    """A thread that holds a mutex when its window is freed may unlock it afterwards, or not at all."""
    rank = dist.get_rank()
    for turn in range(20):
        window = create(full(rank, 1000))
        fresh = []
        window.lock(others(), own=True)
        dist.barrier()
        window.free()
        for number in range(3):  # they take the memory of the freed window
            fresh.append(create(full(turn, 1000), f"fresh {number}", zero_init=True))
        window.unlock(others(), own=True)
        with pytest.raises(ValueError, match="has not locked"):
            window.unlock(others(), own=True)
        for each in fresh:
            each.lock(others(), own=True, timeout=SOON)
            each.unlock(others(), own=True)
            assert slot(each, 1 - rank).eq(0).all()
        dist.barrier()
        for each in fresh:
            each.free()


def test_unlocking_after_the_end(world_of, way):
    world_of(2, way).run(unlock_late)


def drop_windows() -> None:
    """If windows are dropped without free(), their memory waits until the neighbors have dropped theirs."""
    rank = dist.get_rank()
    for turn in range(10):
        window = create(full(turn, 1000), f"w{turn}")
        dist.barrier()
        if rank == 0:
            del window
            gc.collect()
        dist.barrier()
        if rank == 1:
            # The memory still belongs to the slot, even if other windows ask for memory.
            with_luck = window.put(full(99, 1000), [(0, 1.0)])
            try:
                with_luck.wait()
            except dist.DistBackendError as error:
                assert "no such window" in str(error)
            del window
        fresh = create(full(0, 1000), f"fresh{turn}")
        for other in others():
            assert slot(fresh, other).eq(0).all()
        dist.barrier()
        fresh.free()


def test_windows_that_are_dropped(world_of, way):
    world_of(2, way).run(drop_windows)


def end_in_disorder(how: str) -> None:
    """Leaves operations in flight at the end of the group and of the process."""
    rank = dist.get_rank()
    window = create(full(rank, 300_000))
    everyone = [(other, 1.0) for other in others()]
    if rank == 0:
        window.lock(others(), own=True)
    dist.barrier()
    globals()["kept"] = [window]  # keeps them until the interpreter ends
    for number in range(5):
        globals()["kept"].append(window.put(full(number, 300_000), everyone, mutex=number % 2 == 0))
        globals()["kept"].append(window.get(everyone))
    if how == "destroy" or (how == "one destroys" and rank == 1):
        dist.destroy_process_group()
        with pytest.raises(dist.DistBackendError, match="of window 'w' .* group that was destroyed"):
            window.put(full(1, 300_000), everyone)
    elif how == "drop":
        del window
        globals().pop("kept")
        gc.collect()
    elif how == "free on one" and rank == 2:
        with pytest.raises(dist.DistBackendError):
            window.free(timedelta(milliseconds=300))


@pytest.mark.usefixtures("no_shared_memory_left")
@pytest.mark.parametrize("how", ["exit", "destroy", "one destroys", "drop", "free on one"])
def test_the_end_in_any_order(new_world, way, how):
    new_world(3, environment=WAYS[way], finalizing=None).run(end_in_disorder, how)


def destroy_while_waiting() -> None:
    rank = dist.get_rank()
    globals()["kept"] = window = create(full(rank))
    if rank == 0:
        window.lock([1], own=True)
    dist.barrier()
    if rank == 1:
        work = window.put(full(1), [(0, 1.0)], mutex=True)
        dist.destroy_process_group()
        with pytest.raises(dist.DistBackendError, match="win_put|win_mutex"):
            work.wait()


def test_destroying_the_group_ends_what_waits(new_world, way):
    new_world(2, environment=WAYS[way], finalizing=None).run(destroy_while_waiting)
