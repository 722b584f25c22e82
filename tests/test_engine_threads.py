"""Tests of threads that make progress on operations: which threads they block, and which memory they leave alone.

test_refusals tests them if the system refuses memory or threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import WorldPool

from fog_pg._C import NeighborPlan, emulate

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


def drive_while_python_is_locked(folder: str, waiter: str) -> None:
    """Rank 1's engine has to move data while one of its threads holds Python's lock, until the peer has all of them."""
    held, done = (os.open(Path(folder, name), os.O_RDWR) for name in ("held", "done"))
    numel = 1 << 20
    if dist.get_rank() == 0:
        os.read(held, 1)
        time.sleep(0.2)  # longer than a waiting thread goes without a look for signals
        for _ in range(2):
            dist.all_reduce(torch.ones(numel))
        os.write(done, b"x")
        dist.send(torch.ones(1), 1)
        return
    # Whoever completes it has the last reference to its tensor but Python's, whose release takes Python's lock.
    dist.all_reduce(torch.ones(numel), async_op=True)
    second = dist.all_reduce(torch.ones(numel), async_op=True)
    received = dist.irecv(torch.zeros(1), 0)
    assert second is not None and received is not None
    about_to_wait = threading.Event()

    def wait() -> None:
        about_to_wait.set()
        received.wait()

    def hold() -> None:
        about_to_wait.wait()
        time.sleep(0.05)  # does not hold the lock; by then the other thread waits
        os.write(held, b"x")
        ctypes.PyDLL(None).read(done, ctypes.create_string_buffer(1), ctypes.c_size_t(1))  # holds it

    if waiter == "nobody":
        about_to_wait.set()
        hold()
    else:
        in_main, beside = (wait, hold) if waiter == "main" else (hold, wait)
        thread = threading.Thread(target=beside)
        thread.start()
        in_main()
        thread.join()
    received.wait()
    second.wait()


@pytest.mark.parametrize("waiter", ["main", "thread", "nobody"])
def test_no_thread_that_drives_waits_for_python(worlds: WorldPool, tmp_path: Path, waiter: str) -> None:
    """Regression: while an extension held Python's lock, a thread that waited for it left the neighbors waiting."""
    for name in ("held", "done"):
        os.mkfifo(tmp_path / name)
    worlds(2).run(drive_while_python_is_locked, str(tmp_path), waiter)


def poll_beside_another_thread(numel: int) -> None:
    """Polls until another Python thread has run within a computing call of is_completed(), on each rank.

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
    seen = torch.zeros(1)
    x = fogdist.share_(torch.ones(numel))
    while not seen:
        work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
        done = False
        while not done:
            before, begin = turns, time.thread_time()
            done = work.is_completed()
            computed = time.thread_time() - begin > COMPUTED_SECONDS
            if computed and turns - before > 3:  # one of these may come before the call
                seen.fill_(1.0)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    over = True
    helper.join()


def test_polling_keeps_no_thread_from_python(worlds: WorldPool) -> None:
    worlds(2).run(poll_beside_another_thread, 1 << 24)


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


def add_sparse_tensors_up(rounds: int) -> None:
    """Each time the rank that ends first sends nothing that would wake the other, before that has ended too."""
    emulate(longest_sleep=timedelta(hours=1))
    entries = 5_000  # adding them up takes a pool's thread so long that the waiting thread sleeps
    sparse = torch.sparse_coo_tensor(torch.arange(entries)[None], torch.ones(entries), (entries,)).coalesce()
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for number in range(rounds):
        x = sparse.clone()
        dist.barrier()
        if rank == 1:
            time.sleep(0.005)
        dist.all_reduce(x)
        store.set(f"ended {number} {rank}", "")
        store.get(f"ended {number} {1 - rank}")
        assert (x.to_dense() == 2.0).all()
    emulate()


def test_waiting_for_a_sparse_allreduce_ends_with_it(worlds: WorldPool) -> None:
    """Regression: the waiting thread was not woken when a thread of the pool had completed its operation."""
    worlds(2).run(add_sparse_tensors_up, 12)


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
