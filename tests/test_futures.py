"""Tests of Futures and callbacks that wait for operations, and of the threads that complete operations."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import WorldPool, on_ranks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

SHORT = timedelta(seconds=10)


@on_ranks(3)
def test_callbacks_may_wait() -> None:
    """Regressions: for another Future, which the thread that ran callbacks had to drive; and for their own Work."""
    group = dist.new_group(timeout=SHORT)
    second = torch.ones(3)

    def average(future: torch.futures.Future) -> torch.Tensor:
        other = dist.all_reduce(second, group=group, async_op=True)
        return future.value()[0] + other.get_future().wait()[0]

    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert work.get_future().then(average).wait()[0].item() == 6.0
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert work.get_future().then(lambda _: work.wait() and work.is_completed()).wait()


@on_ranks(2)
def test_future_taken_after_wait_is_complete() -> None:
    """Regression: a Work was complete shortly before its Future, which a caller could take in between."""
    tensor = torch.ones(3)
    for _ in range(3000):
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
        waiter = threading.Thread(target=work.wait)
        waiter.start()
        work.wait()
        assert work.get_future().value()[0][0].item() == 1.0
        waiter.join()


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


@on_ranks(2)
def test_a_name_is_counted_for_each_kind_of_operation() -> None:
    """The ranks call them in another order."""
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
    assert (summed[0].item(), sent[0].item()) == (2.0, 1.0)


@on_ranks(2)
def test_results_are_no_inference_tensors() -> None:
    """The result must be an ordinary tensor, independent of the mode of the thread that completes it."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    work = backend.allgather_concat(torch.ones(3))
    with torch.inference_mode():
        dist.barrier()
        work.wait()
    assert not work.get_future().value()[0].is_inference()


@on_ranks(2)
def test_lazy_clones_are_copied_before_they_are_written() -> None:
    original = torch.ones(3)
    clone = torch._lazy_clone(original)
    dist.all_reduce(clone)
    assert (original.tolist(), clone.tolist()) == ([1.0] * 3, [2.0] * 3)


@on_ranks(2)
def test_coalesced_operations_are_checked_before_the_first_is_sent() -> None:
    good = [torch.full((2,), float(dist.get_rank())), torch.zeros(2)]
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="output"):
            dist.group.WORLD.allgather_into_tensor_coalesced([torch.zeros(4), torch.zeros(5)], good)
    x = torch.ones(1)
    dist.all_reduce(x)  # this would be out of step if the first item had been sent
    assert x.item() == 2.0
