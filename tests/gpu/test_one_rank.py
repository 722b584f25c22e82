"""Tests on one rank with a GPU, for functions that need no other rank."""

from __future__ import annotations

import device_double
import device_operations
import device_training
import fogdist
import pytest
import test_algorithms
import test_decentralized_ddp
import test_optimizers
import torch
import torch.distributed as dist
from test_random_exchanges import check_random, run_cases
from torch import nn

DEVICE = device_training.GPU
EXACT = {"rtol": 1e-9, "atol": 1e-10}

needs_cuda = pytest.mark.skipif(
    DEVICE == device_double.DEVICE,
    reason="the double has no graphs, and fog's default group does not know it",
)


def cuda_and_cpu_in_one_group() -> tuple[int, str]:
    """Returns the world's size and the name of the backend that serves CUDA tensors."""
    there = device_training.place(DEVICE)
    for where in (there, torch.device("cpu"), there):
        x = torch.arange(5.0, device=where)
        dist.all_reduce(x)
        assert x.device == where and x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    dist.barrier()
    backend = dist.group.WORLD._get_backend(there)  # type: ignore[union-attr]
    return dist.get_world_size(), backend.name()


@needs_cuda
def test_dispatch(gpu_worlds):
    assert gpu_worlds(1).run(cuda_and_cpu_in_one_group) == [(1, "fog")]


@pytest.mark.parametrize("name", device_operations.COLLECTIVES)
def test_collectives(gpu_worlds, name):
    gpu_worlds(1).run(device_operations.collectives, name, DEVICE)


def test_neighbor_exchanges(gpu_worlds):
    check_random(gpu_worlds, 1, 12, run_cases, DEVICE, True)


@pytest.mark.parametrize("function", [device_operations.codecs, device_operations.compressed_exchanges])
def test_compression(gpu_worlds, function):
    gpu_worlds(1).run(function, DEVICE, timeout=200.0)


@pytest.mark.parametrize("function", [device_operations.many_in_flight, device_operations.on_other_streams])
def test_order(gpu_worlds, function):
    gpu_worlds(1).run(function, DEVICE)


def test_autograd(gpu_worlds):
    gpu_worlds(1).run(device_operations.gradients, DEVICE)


@needs_cuda
def test_compile(gpu_worlds):
    pytest.importorskip("triton", reason="torch.compile for GPUs needs it")
    gpu_worlds(1).run(device_operations.compiled, DEVICE, timeout=240)


# The other algorithms read once per step whether parameters without a gradient must move.
ALGORITHMS = [
    name for name in test_algorithms.IN_STEP if name not in ("GradientTracking", "QuasiGlobalMomentum")
]


@pytest.mark.parametrize("kind", ["awc", "atc", "atc in backward", "gradient", "wrapper", *ALGORITHMS])
def test_no_step_reads_the_device(gpu_worlds, kind):
    assert gpu_worlds(1).run(device_training.reads_of_steps, kind, DEVICE) == [[]]


def captured() -> None:
    there = device_training.place(DEVICE)
    fogdist.init()
    x = torch.ones(1000, device=there)
    y = torch.empty_like(x)

    def work() -> None:
        y.copy_(torch.ops.fog.neighbor_allreduce_along_topology(x))
        dist.all_reduce(y)
        y.add_(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch requires, objects that are made once are made before the capture
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for value in (2.0, 5.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert y.eq(value + 1).all()


@needs_cuda
def test_graph_capture(gpu_worlds):
    gpu_worlds(1).run(captured)


@pytest.mark.parametrize("kind", ["awc", "atc", "gradient"])
def test_steps_of_optimizers(gpu_worlds, kind):
    run = test_optimizers.Run(kind, "adamw")
    world = gpu_worlds(1)
    (found,), (expected,) = (world.run(device_training.of_optimizer, run, d) for d in (DEVICE, "cpu"))
    torch.testing.assert_close(found, expected, **EXACT)


def test_wrapper(gpu_worlds):
    run = test_decentralized_ddp.Run("adamw", "group")
    world = gpu_worlds(1)
    (found,), (expected,) = (world.run(device_training.of_wrapper, run, d) for d in (DEVICE, "cpu"))
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("name", test_algorithms.IN_STEP)
def test_algorithms(gpu_worlds, name):
    world = gpu_worlds(1)
    (found,), (expected,) = (world.run(device_training.of_algorithm, name, d) for d in (DEVICE, "cpu"))
    torch.testing.assert_close(found, expected, **EXACT)


def through_ddp() -> None:
    there = device_training.place(DEVICE)
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(there)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp(torch.ones(2, 8, device=there)).sum().backward()
    assert model.weight.grad is not None and torch.equal(
        model.weight.grad, torch.full_like(model.weight, 2.0)
    )


@needs_cuda
def test_torch_s_own_ddp(gpu_worlds):
    gpu_worlds(1).run(through_ddp)
