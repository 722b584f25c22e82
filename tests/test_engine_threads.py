"""Tests of threads that make progress on operations: which threads they block, and which memory they leave alone.

test_refusals tests them if the system refuses memory or threads.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, WorldPool
from injection import mpi_buffers

from fog_pg._C import NeighborPlan

pytestmark = pytest.mark.skipif(BACKEND != "fog", reason="about fog's engine")

SHORT = timedelta(seconds=10)
COMPUTED_SECONDS = 0.002


# The GIL


def synchronize_while_another_thread_is_needed() -> float:
    """Regression: synchronize() waited with the GIL, so the thread for which the other rank waited could not run."""
    group = dist.new_group(timeout=SHORT)
    store = dist.distributed_c10d._get_default_store()
    key = f"go-{dist.get_world_size()}"
    x = torch.ones(2)
    if dist.get_rank() == 1:
        store.get(key)
        dist.all_reduce(x, group=group)
        return x[0].item()
    about_to_wait = threading.Event()

    def let_the_other_rank_go() -> None:
        about_to_wait.wait()
        time.sleep(0.05)  # does not hold the GIL; by then the waiting thread has it
        store.set(key, "1")

    helper = threading.Thread(target=let_the_other_rank_go)
    helper.start()
    work = dist.all_reduce(x, group=group, async_op=True)
    about_to_wait.set()
    work.synchronize()
    helper.join()
    return x[0].item()


def test_synchronize_lets_other_threads_run(worlds: WorldPool) -> None:
    assert worlds(2).run(synchronize_while_another_thread_is_needed, timeout=30) == [2.0, 2.0]


def poll_beside_another_thread(numel: int, rounds: int) -> list[int]:
    """Returns, for each computing call of is_completed(), how often another Python thread ran meanwhile.

    Regression: none could run, which was a deadlock. That thread may be in a window's update, which checks for
    interrupts while it waits for a reader, and the work of is_completed() may wait for that update.
    """
    turns = 0
    over = False

    def take_turns() -> None:
        nonlocal turns
        while not over:
            turns += 1
            time.sleep(0)

    helper = threading.Thread(target=take_turns)
    helper.start()
    meanwhile = []
    x = fogdist.share_(torch.ones(numel))
    for _ in range(rounds):
        work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
        done = False
        while not done:
            before, begin = turns, time.thread_time()
            done = work.is_completed()
            if time.thread_time() - begin > COMPUTED_SECONDS:
                meanwhile.append(turns - before)
        dist.barrier()
    over = True
    helper.join()
    return meanwhile


def test_polling_keeps_no_thread_from_python(worlds: WorldPool) -> None:
    # On a busy machine the other thread may have had no core, but hardly three times in a row.
    tries = []
    for _ in range(3):
        first, second = worlds(2).run(poll_beside_another_thread, 1 << 22, 24)
        tries.append(first + second)
        if not tries[-1] or max(tries[-1]) > 3:  # one of these may come before the call
            return
    raise AssertionError(tries)


def poll_only(rounds: int) -> list[float]:
    values = []
    for step in range(rounds):
        work = dist.all_reduce(torch.full((3,), float(step)), async_op=True)
        while not work.is_completed():
            pass
        values.append(work.result()[0][0].item())
    return values


@pytest.mark.parametrize("size", [2, 4])
def test_polling_alone_brings_operations_to_their_end(worlds: WorldPool, size: int) -> None:
    rounds = 50
    assert worlds(size).run(poll_only, rounds) == [[float(size * step) for step in range(rounds)]] * size


# Waiting threads are woken


def times_of_sparse_allreduces(rounds: int) -> list[float]:
    """Returns when each of them ended. Afterwards the rank that ends first sends nothing that would wake the other."""
    entries = 5_000  # adding them up takes a pool's thread so long that the waiting thread sleeps
    sparse = torch.sparse_coo_tensor(torch.arange(entries)[None], torch.ones(entries), (entries,)).coalesce()
    ends = []
    for _ in range(rounds):
        x = sparse.clone()
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.005)
        dist.all_reduce(x)
        ends.append(time.monotonic())
        time.sleep(0.03)
        assert (x.to_dense() == 2.0).all()
    return ends


def test_waiting_for_a_sparse_allreduce_ends_with_it(worlds: WorldPool) -> None:
    """Regression: the waiting thread was not woken, and looked only after 20 ms."""
    first, second = worlds(2).run(times_of_sparse_allreduces, 12)
    late = [abs(one - other) for one, other in zip(first, second, strict=True)]  # either of them may be late
    assert statistics.median(late) < 0.012, late  # a busy machine delays some of them, but not most


# Memory


def memory_after_a_failure(numel: int, delays: list[float]) -> list[bool]:
    """Returns for each failed exchange whether its memory was written to after wait() had raised."""
    rank = dist.get_rank()
    written = []
    for delay in delays:
        group = dist.new_group(timeout=SHORT)
        backend = group._get_backend(torch.device("cpu"))
        x = fogdist.share_(torch.full((numel,), 1.0))
        result = fogdist.share_(torch.full((numel,), 2.0))
        plan = NeighborPlan(rank, 2, 0.5, [(1 - rank, 0.5)], [(1 - rank, 1.0)])
        failed = False
        try:
            if rank == 0:
                work = backend.neighbor_allreduce(x, plan, output=result)
                dist.barrier()
                time.sleep(delay)  # by now the background thread computes it
                backend.abort()
            else:
                dist.barrier()
                work = backend.neighbor_allreduce(x, plan, output=result)
            work.wait()
        except dist.DistBackendError as error:
            assert "abort" in str(error) or "given up" in str(error)
            failed = True
        result.fill_(3.0)
        dist.barrier()
        time.sleep(0.05)
        if failed:
            written.append(bool((result != 3.0).any()))
    return written


def test_a_failed_operation_leaves_its_memory_alone(worlds: WorldPool) -> None:
    """Regression: wait() raised while another thread still computed the result."""
    first, second = worlds(2).run(
        memory_after_a_failure, 1 << 23, [0.0, 0.001, 0.002, 0.004, 0.008], timeout=40
    )
    assert first and not any(first + second)


def reduce_in_place(library: str) -> tuple[int, int]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    size = dist.get_world_size()
    plan = NeighborPlan(0, 1, 1.0, [], [])
    for _ in range(10):
        x = torch.ones(1 << 17)
        dist.all_reduce(x)
        assert x[0] == size and x[-1] == size
        x = torch.ones(1 << 17)
        dist.reduce(x, 1)
        assert dist.get_rank() != 1 or (x[0] == size and x[-1] == size)
        x = torch.full((1 << 17,), float(dist.get_rank()))
        backend.hierarchical_neighbor_allreduce(x, [list(range(size))], plan, output=x).wait()
        assert x[0] == (size - 1) / 2 and x[-1] == (size - 1) / 2
    watched = ctypes.CDLL(library)
    return watched.all_receives(), watched.forbidden_receives()


def test_nothing_is_received_into_memory_that_mpi_still_sends(new_world: Callable[..., World]) -> None:
    library = mpi_buffers()
    if library is None:
        pytest.skip("needs the PyPI package mpich")
    environment = {"FOG_LOCAL_LINKS": "0", "FOG_MPI_LIBRARY": str(library)}
    counts = new_world(3, environment=environment).run(reduce_in_place, str(library))
    assert all(received > 0 for received, _ in counts)
    assert [forbidden for _, forbidden in counts] == [0, 0, 0]
