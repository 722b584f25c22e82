"""Tests of torch's own one-sided windows, ``ProcessGroup.new_window``, of CPU tensors, from torch 2.14 on."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, WorldPool
from reference import Checks
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "new_window"),
        reason=f"torch {torch.__version__} has no windows of its own; torch 2.14 and later have",
    ),
]

LIMIT = 20.0


def new_window(tensor: Tensor | None = None) -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group.new_window(tensor)


def refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def options(kind: str, milliseconds: int) -> Any:
    made = getattr(torch._C._distributed_c10d, kind)()
    made.timeout = timedelta(milliseconds=milliseconds)
    return made


def ring(checks: Checks, dtype: torch.dtype, late: bool, async_op: bool) -> None:
    """Each rank writes its row to the next one's tensor, and goes on when it has the row of the previous one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    numel = 1000
    label = f"{dtype} late={late} async={async_op}"
    memory = torch.zeros(size * numel + 8, dtype=dtype)
    mine = memory[5:-3].view(size, numel)  # the window is a part of a storage
    if late:
        window = new_window()
        window.tensor_register(mine)
    else:
        window = new_window(mine)
    for turn in range(1, 4):
        mine[rank] = turn * 10 + rank
        dist.barrier()
        works = []
        for step in range(size - 1):
            part = (rank - step) % size
            works.append(window.put(mine[part], after, part * numel, async_op))
            works.append(window.signal(after, async_op))
            works.append(window.wait_signal(before, async_op))
            works[-1].wait()
            got = (before - step) % size
            expected = torch.full((numel,), turn * 10 + got).to(dtype)
            checks.equal(f"{label} row {got} in turn {turn}", mine[got], expected)
        for work in works:
            work.wait()
            checks.true(f"{label}: complete", work.is_completed())
        dist.barrier()
    outside = torch.cat([memory[:5], memory[-3:]])
    checks.equal(f"{label}: around it", outside, torch.zeros_like(outside))

    # Rank 0 writes a part of a row, from memory with gaps, to rank 1.
    if rank == 0:
        window.put(torch.arange(14).to(dtype)[::2], 1, numel + 3, async_op).wait()
        window.signal(1, async_op).wait()
    if rank == 1:
        window.wait_signal(0, async_op).wait()
        expected = torch.full((numel,), 31).to(dtype)
        expected[3:10] = torch.arange(0, 14, 2).to(dtype)
        checks.equal(f"{label}: a part", mine[1], expected)
    dist.barrier()
    window.tensor_deregister()
    checks.equal(
        f"{label}: kept", mine[(rank + 2) % size][-1], torch.tensor(30 + (rank + 2) % size).to(dtype)
    )


def rings() -> None:
    with Checks() as checks:
        checks.true("supports_window", dist.group.WORLD.supports_window)
        for dtype, late, async_op in (
            (torch.float32, False, False),
            (torch.int64, True, True),
            (torch.bfloat16, True, False),
            (torch.uint8, False, True),
        ):
            ring(checks, dtype, late, async_op)


def test_put_and_signal(worlds: WorldPool) -> None:
    worlds(3).run(rings)


def signals() -> None:
    """Signals are counted for each pair of ranks, and each wait takes one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    window = new_window(torch.zeros(4))
    waiting = [window.wait_signal(before, True) for _ in range(3)]
    dist.barrier()
    assert not any(work.is_completed() for work in waiting)
    window.signal(before, False)  # signals of the other side do not complete these waits
    dist.barrier()
    assert not any(work.is_completed() for work in waiting)
    dist.barrier()  # no rank signals before all have checked
    for _ in range(2):
        window.signal(after, False)
    deadline = time.monotonic() + LIMIT
    while sum(work.is_completed() for work in waiting) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    dist.barrier()
    assert sum(work.is_completed() for work in waiting) == 2
    dist.barrier()
    window.signal(after, False)
    for work in waiting:
        work.wait()
    window.wait_signal(after, False)  # the signal of the other side
    # No signal is left; the group and the window still work after the timeout.
    refused(
        lambda: window.wait_signal(before, True, options("WaitSignalOptions", 50)).wait(),
        dist.DistBackendError,
        f"timed out waiting for a signal of rank {before}",
    )
    refused(
        lambda: window.wait_signal(after, False, options("WaitSignalOptions", 50)),
        dist.DistBackendError,
        f"timed out waiting for a signal of rank {after}",
    )
    window.signal(after, False, options("SignalOptions", 1000))
    window.wait_signal(before, False)
    dist.barrier()
    window.tensor_deregister()


def test_signals(worlds: WorldPool) -> None:
    worlds(3).run(signals)


def mapped() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((2, 3), float(rank))
    window = new_window(mine)
    dist.barrier()
    assert window.map_remote_tensor(rank).data_ptr() == mine.data_ptr()
    views = [window.map_remote_tensor(other) for other in range(size)]
    for other, view in enumerate(views):
        assert (view.shape, view.dtype) == (mine.shape, mine.dtype)
        assert view.eq(other).all()
        assert window.get_attr(other).access_type.name == "UNIFIED"
    dist.barrier()
    # The owner sees values that are written to the view, and the view shows values that are put.
    views[(rank + 1) % size][0, 0] = 10.0 + rank
    window.put(torch.tensor([20.0 + rank]), (rank + 1) % size, 5, False)
    dist.barrier()
    for other, view in enumerate(views):
        last = (other - 1) % size
        assert view.flatten().tolist() == [10.0 + last, *[float(other)] * 4, 20.0 + last]
    assert mine.flatten().tolist() == views[rank].flatten().tolist()
    dist.barrier()
    window.tensor_deregister()
    # A view keeps its memory alive.
    del window
    gc.collect()
    assert views[(rank + 1) % size][0, 0] == 10.0 + rank
    dist.barrier()


def test_map_remote_tensor(worlds: WorldPool) -> None:
    worlds(3).run(mapped)


def life() -> None:
    """Several windows at a time, one of which gets a new tensor, and errors that send nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    other = (rank + 1) % size
    empty = new_window()
    for call in (
        lambda: empty.put(torch.zeros(1), other, 0, False),
        lambda: empty.signal(other, False),
        lambda: empty.wait_signal(other, False),
        lambda: empty.map_remote_tensor(other),
        lambda: empty.get_attr(other),
        empty.tensor_deregister,
    ):
        refused(call, ValueError, "this window has no tensor")

    first, second = torch.zeros(6), torch.zeros(2, 2, dtype=torch.int32)
    windows = [new_window(first), empty]
    empty.tensor_register(second, owning=False)
    refused(lambda: empty.tensor_register(torch.zeros(1)), ValueError, r"tensor_deregister\(\) comes first")
    windows[0].put(torch.full((6,), 1.0 + rank), other, 0, False)
    windows[1].put(torch.full((2, 2), 5 + rank, dtype=torch.int32), other, 0, False)
    window = windows[0]
    for call, message in (
        (lambda: window.put(torch.zeros(2), other, 5, False), r"tensor: got float32\[2\] for element 5"),
        (lambda: window.put(torch.zeros(2), other, 2**63 - 1, False), "element 9223372036854775807"),
        (lambda: window.put(torch.zeros(2), other + 2**32, 0, False), f"rank {other + 2**32}"),
        (lambda: window.signal(other + 2**32, False), f"rank {other + 2**32}"),
        (lambda: window.wait_signal(size, False), f"rank {size}"),
        (lambda: window.map_remote_tensor(size), f"rank {size}"),
        (lambda: window.get_attr(-(2**32)), f"rank -{2**32}"),
    ):
        refused(call, ValueError, message)
    dist.barrier()
    before = (rank - 1) % size
    assert first.tolist() == [1.0 + before] * 6
    assert second.flatten().tolist() == [5 + before] * 4
    dist.barrier()
    windows[0].tensor_deregister()
    refused(lambda: windows[0].signal(other, False), ValueError, "this window has no tensor")
    third = torch.zeros(3, dtype=torch.float64)
    windows[0].tensor_register(third)  # with another shape and dtype
    windows[0].put(torch.ones(3, dtype=torch.float64), other, 0, False)
    windows[1].signal(other, False)
    windows[1].wait_signal(before, False)
    assert third.tolist() == [1.0] * 3
    dist.barrier()
    assert first.tolist() == [1.0 + before] * 6
    for window in windows:
        window.tensor_deregister()

    # Tensors that cannot be registered raise an error on all ranks, and the group still works.
    refused(lambda: new_window(torch.zeros(2 + rank)), ValueError, "Window: .*float32")
    refused(lambda: new_window(torch.zeros(1).expand(4)), ValueError, "Window: .*share memory")
    refused(lambda: new_window(torch.zeros(4, 4)[:, :2]), ValueError, "Window: .*contiguous")
    dropped = new_window(torch.zeros(2))  # it is dropped without telling the others
    dropped.put(torch.ones(2), other, 0, False)
    dist.barrier()
    del dropped
    gc.collect()
    dist.barrier()


def test_registration_and_errors(worlds: WorldPool) -> None:
    worlds(3).run(life)


def lose_rank_one() -> None:
    window = new_window(torch.zeros(4))
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    refused(lambda: window.wait_signal(1, False), dist.DistBackendError, "wait_signal .*rank 1 .*lost")
    window.put(torch.ones(2), 2 - dist.get_rank(), 1, False)  # to the other survivor
    window.signal(2 - dist.get_rank(), False)
    window.wait_signal(2 - dist.get_rank(), False)
    assert window.map_remote_tensor(dist.get_rank()).tolist() == [0.0, 1.0, 1.0, 0.0]


def test_a_lost_rank(new_world: Callable[..., World]) -> None:
    outcomes = new_world(3).run_raw(lose_rank_one, timeout=30)
    assert [outcome.state for outcome in outcomes] == ["returned", "died", "returned"], outcomes
