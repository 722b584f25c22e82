"""Operations on tensors of a device, the fake one or a GPU: collectives, exchanges, streams, gradients, graphs, DDP."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from typing import Any

import device_worlds
import fogdist
import fogdist.bluefog.torch as bf
import operations
import pytest
import test_ops
import torch
import torch.distributed as dist
from device_worlds import DEVICE, ON_GPUS, on_gpus_only, place
from fogdist import topology as topologies
from harness import on_ranks
from reference import Checks, make_input
from test_random_exchanges import check_random, run_cases
from torch import Tensor, nn

WORLDS = device_worlds.DeviceWorlds
pytestmark = device_worlds.MARKS

# NCCL's dtypes; the fake device's operations are the CPU's, so one is enough there.
DTYPES = [torch.float32]
if ON_GPUS:
    DTYPES += [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
NUMELS = (8, 1000, 70_000) if ON_GPUS else (1000,)


@functools.cache
def group() -> dist.ProcessGroup | None:
    """Returns the default group, or a group of the same ranks in which fog is registered for the fake device."""
    return None if ON_GPUS else dist.new_group(backend=f"cpu:fog,{DEVICE}:fog")


# The delegate of CUDA tensors, ProcessGroupNCCL, has no all_gather_coalesced.
@on_ranks(
    device_worlds.sizes(4), name=[name for name in operations.COLLECTIVES if name != "all_gather_coalesced"]
)
def test_collectives(name: str) -> None:
    there = place()

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(there)

    with Checks() as checks:
        for dtype, numel in itertools.product(DTYPES, NUMELS):
            ready = operations.prepare(name, dtype, (numel,), group=group(), source=moved, destination=moved)
            ready.start(False)
            checks.equal("device", {output.device for output in ready.outputs} - {there}, set())
            ready.verify(checks, f"{name} {dtype} of {numel}")


@pytest.mark.parametrize("size", device_worlds.sizes(4))
def test_random_exchanges(worlds, size):
    check_random(worlds, size, 24 if ON_GPUS else 12, run_cases, DEVICE)


@on_ranks(device_worlds.sizes(2))
def test_many_in_flight() -> None:
    """Exchanges are in flight whose tensors are dropped at once; their memory must not be used again too early."""
    there = place()
    fogdist.init(topologies.ring)
    rank = fogdist.rank()
    with Checks() as checks:
        for turn in range(20):
            inputs = [make_input(rank, torch.float32, 50_000, seed=8 * turn + i) for i in range(8)]
            handles = [bf.neighbor_allreduce_nonblocking(x.to(there) * 1.0) for x in inputs]
            waste = [torch.full((50_000,), float("nan"), device=there) for _ in range(8)]
            results = [bf.wait(handle) for handle in handles]
            del waste
            for i, (x, result) in enumerate(zip(inputs, results)):
                checks.close(f"turn {turn}, {i}", result.cpu(), fogdist.neighbor_allreduce(x))


@on_ranks(device_worlds.sizes(2))
def test_other_streams() -> None:
    """An operation waits for the earlier work of its stream, and later work of the stream waits for the operation."""
    there = place()
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    side = torch.Stream(device=there)
    main = torch.accelerator.current_stream(there)
    with Checks() as checks:
        for turn in range(10):
            x = torch.zeros(1_000_000, device=there)
            side.wait_stream(main)
            with side:
                for _ in range(20):  # takes some time
                    x.add_(0.05 * (rank + 1))
                bf.wait(bf.allreduce_nonblocking_(x, average=False))
                x.mul_(2)
            main.wait_stream(side)
            expected = 2 * sum(range(1, size + 1))
            checks.true(f"turn {turn}", bool((x - expected).abs().max() < 1e-5 * expected))


@on_ranks(device_worlds.sizes(3))
def test_gradients() -> None:
    """Derivatives of exchanges, also of a compiled function, are those of the CPU."""
    import torch._dynamo

    there = place()
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    arguments = test_ops.arguments_of(test_ops.random_matrix(size, 5), rank)

    def step(x: Tensor) -> Tensor:
        return (torch.ops.fog.neighbor_allreduce(torch.sin(x), *arguments) * 2).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if ON_GPUS else "aot_eager")
    mine, found = make_input(rank, torch.float64, (3, 2)), []
    for device, function in (("cpu", step), (there, step), (there, compiled)):
        x = mine.to(device).requires_grad_()
        (gradient,) = torch.autograd.grad(function(x), x)
        assert gradient.device == x.device
        found.append(gradient.cpu())
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], rtol=1e-14, atol=1e-14)


@on_ranks(device_worlds.sizes(3))
def test_ddp() -> None:
    there, rank, found = place(), dist.get_rank(), []
    for device in (torch.device("cpu"), there):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        if rank > 0:
            nn.init.zeros_(net[0].weight)  # the values of rank 0 are sent to all ranks
        model = nn.parallel.DistributedDataParallel(net, process_group=group())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(10 + rank)
        inputs, targets = torch.randn(6, 4).to(device), torch.randn(6, 1).to(device)
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        found.append([parameter.detach().cpu() for parameter in net.parameters()])
    torch.testing.assert_close(*found)


@on_gpus_only
@on_ranks(1)
def test_cpu_and_cuda_in_the_default_group() -> None:
    there = place()
    for where in (there, torch.device("cpu"), there):
        x = torch.arange(5.0, device=where)
        dist.all_reduce(x)
        assert x.device == where and x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    dist.barrier()
    default: Any = dist.group.WORLD
    assert default._get_backend(there).name() == "fog"


def lose_a_rank() -> None:
    there = place()
    x = torch.ones(1000, device=there)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    torch.cuda.synchronize()  # waits in the driver until the operation is aborted
    with pytest.raises(dist.DistBackendError, match=r"allreduce: rank 1 \(pid .* lost"):
        dist.all_reduce(x)


@on_gpus_only
def test_a_lost_rank_ends_the_wait_for_the_device(new_world):
    outcomes = new_world(2, environment=device_worlds.environment(2)).run_raw(lose_a_rank)
    assert [each.state for each in outcomes] == ["returned", "died"], [*map(str, outcomes)]


@on_gpus_only
@on_ranks([1, 2])
def test_graph_capture() -> None:
    there = place()
    fogdist.init()
    x = torch.ones(1000, device=there)
    total = sum(range(1, fogdist.size() + 1))
    topology = fogdist.context.current().topology
    (own, sources), peers = topology.mean_weights, topology.out_neighbors
    arguments = own, list(sources), list(sources.values()), peers, [1.0] * len(peers)
    y = torch.empty_like(x)

    def work() -> None:
        y.copy_(torch.ops.fog.neighbor_allreduce(x, *arguments))
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
        x.fill_(value * (fogdist.rank() + 1))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert y.eq(value * total + 1).all()
