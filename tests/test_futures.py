"""Tests of Futures and callbacks that wait for operations, and of the threads that complete operations."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import WorldPool
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

SHORT = timedelta(seconds=10)


def callback_waits_for_another_future() -> float:
    """Regression: this hung, because the thread that ran callbacks also had to drive the other operation."""
    group = dist.new_group(timeout=SHORT)
    second = torch.ones(3)

    def average(future: torch.futures.Future) -> torch.Tensor:
        other = dist.all_reduce(second, group=group, async_op=True)
        return future.value()[0] + other.get_future().wait()[0]

    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    return work.get_future().then(average).wait()[0].item()


def test_callback_may_wait_for_another_future(worlds: WorldPool) -> None:
    assert worlds(3).run(callback_waits_for_another_future, timeout=20) == [6.0] * 3


def callback_waits_for_its_own_work() -> bool:
    """Regression: this hung, because the Work was complete only after the callbacks of its Future."""
    group = dist.new_group(timeout=SHORT)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    return work.get_future().then(lambda _: work.wait() and work.is_completed()).wait()


def test_callback_may_wait_for_its_own_work(worlds: WorldPool) -> None:
    assert worlds(2).run(callback_waits_for_its_own_work, timeout=20) == [True, True]


def future_after_wait() -> list[float]:
    values = []
    for step in range(200):
        work = dist.all_reduce(torch.full((3,), float(step)), async_op=True)
        future = work.get_future()
        work.wait()
        assert future.done(), step
        values.append(future.value()[0][0].item())
    return values


def test_future_is_complete_when_wait_returns(worlds: WorldPool) -> None:
    assert worlds(2).run(future_after_wait) == [[2.0 * step for step in range(200)]] * 2


def futures_taken_while_another_thread_completes() -> int:
    """Regression: a Work was complete shortly before its Future, which a caller could take in between."""
    rounds = 3000
    tensor = torch.ones(3)
    for _ in range(rounds):
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
        waiter = threading.Thread(target=work.wait)
        waiter.start()
        work.wait()
        assert work.get_future().value()[0][0].item() == 1.0
        waiter.join()
    return rounds


def test_future_taken_after_wait_is_complete(worlds: WorldPool) -> None:
    assert worlds(2).run(futures_taken_while_another_thread_completes) == [3000, 3000]


def train_with_power_sgd() -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 2)))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        model.zero_grad()
        model(torch.full((4, 20), float(step + dist.get_rank()))).square().mean().backward()
    return [parameter.grad.sum().item() for parameter in model.parameters()]


def test_power_sgd_hook(worlds: WorldPool) -> None:
    first, second = worlds(2).run(train_with_power_sgd, timeout=40)
    assert first == second


def named_in_another_order() -> list[float]:
    backend = dist.new_group(timeout=SHORT)._get_backend(torch.device("cpu"))
    summed, sent = torch.ones(2), torch.full((2,), float(dist.get_rank()))
    start = [
        lambda: backend.allreduce_named(summed, dist.ReduceOp.SUM, name="x"),
        lambda: backend.broadcast_named(sent, 1, name="x"),
    ]
    if dist.get_rank() == 1:
        start.reverse()
    for work in [begin() for begin in start]:
        work.wait()
    return [summed[0].item(), sent[0].item()]


def test_a_name_is_counted_for_each_kind_of_operation(worlds: WorldPool) -> None:
    assert worlds(2).run(named_in_another_order, timeout=20) == [[2.0, 1.0]] * 2


def wait_in_inference_mode() -> bool:
    """The result must be an ordinary tensor, independent of the mode of the thread that completes it."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    work = backend.allgather_concat(torch.ones(3))
    with torch.inference_mode():
        dist.barrier()
        work.wait()
    return work.get_future().value()[0].is_inference()


def test_results_are_no_inference_tensors(worlds: WorldPool) -> None:
    assert worlds(2).run(wait_in_inference_mode) == [False, False]


def reduce_a_lazy_clone() -> tuple[list[float], list[float]]:
    original = torch.ones(3)
    clone = torch._lazy_clone(original)
    dist.all_reduce(clone)
    return original.tolist(), clone.tolist()


def test_lazy_clones_are_copied_before_they_are_written(worlds: WorldPool) -> None:
    assert worlds(2).run(reduce_a_lazy_clone) == [([1.0] * 3, [2.0] * 3)] * 2


def bad_item_in_coalesced() -> float:
    rank = dist.get_rank()
    good = [torch.full((2,), float(rank)), torch.zeros(2)]
    if rank == 0:
        with pytest.raises(ValueError, match="output"):
            dist.group.WORLD.allgather_into_tensor_coalesced([torch.zeros(4), torch.zeros(5)], good)
    x = torch.ones(1)
    dist.all_reduce(x)  # this would be out of step if the first item had been sent
    return x.item()


def test_coalesced_operations_are_checked_before_the_first_is_sent(worlds: WorldPool) -> None:
    assert worlds(2).run(bad_item_in_coalesced) == [2.0, 2.0]
