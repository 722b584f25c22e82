"""Trains models on a device, to be compared step by step with the same training on the CPU.

Ranks call these functions with the type of device: ``cpu``, the fake device or ``cuda``. The functions run the training
loops of other tests with models and data moved to the device, and return trajectories on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import device_double
import fogdist
import test_decentralized_ddp
import test_optimizers
import test_window_optimizers
import torch
import training_cases
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.compression import TopK
from fogdist.streams import wait_until_complete
from host_reads import HostReads
from torch import Tensor, nn

# The type of device for tests/gpu: GPUs, or the fake device, which checks these tests themselves on any machine.
GPU = os.environ.get("FOG_TEST_GPU", "cuda")

_served: list[bool] = []


def place(device: str) -> torch.device:
    """Returns this rank's device of a type, ready to be used by groups of fog."""
    if device == device_double.DEVICE:
        device_double.load()
        device_double.load_runtime()
        if not _served:
            device_double.serve_groups()
            _served.append(True)
        return torch.device(device, 0)
    if device == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
        return chosen
    return torch.device(device)


@contextlib.contextmanager
def moved(device: str) -> Iterator[torch.device]:
    """In this block, models of the optimizers' tests are on a device, and their snapshots on the CPU."""
    there = place(device)
    with contextlib.ExitStack() as stack:
        for module in (test_optimizers, test_window_optimizers, test_decentralized_ddp):
            stack.enter_context(mock.patch.multiple(module, **_replaced(module, there)))
        yield there


def _replaced(module: ModuleType, there: torch.device) -> dict[str, Any]:
    make_net, snapshot = module.make_net, module.snapshot
    return {
        "make_net": lambda *args, **options: move(make_net(*args, **options), there),
        "snapshot": lambda model: snapshot(model).cpu(),
    }


def move(net: nn.Module, there: torch.device) -> nn.Module:
    """Moves a model. Tied parameters stay tied; `net.to` does this only on torch's own devices."""
    moved_to: dict[Tensor, nn.Parameter] = {}
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in moved_to:
                    moved_to[parameter] = nn.Parameter(parameter.detach().to(there), parameter.requires_grad)
                module._parameters[name] = moved_to[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(there)
    return net


# --- trajectories -------------------------------------------------------------------------------------------


def of_optimizer(run: test_optimizers.Run, device: str) -> Tensor:
    """Returns the parameters after each step of an optimizer of `fogdist`, trained as in tests/test_optimizers.py."""
    with moved(device):
        return test_optimizers.train(run)


def of_windows(kind: str, run: test_optimizers.Run, device: str, bucket_cap_mb: float = 8) -> Tensor:
    """Does the same for an optimizer on windows, with ranks in step."""
    with moved(device):
        return test_window_optimizers.train(kind, run, bucket_cap_mb)


def of_wrapper(run: test_decentralized_ddp.Run, device: str) -> Tensor:
    """Does the same for `DecentralizedDataParallel`, trained as in tests/test_decentralized_ddp.py."""
    with moved(device):
        return test_decentralized_ddp.train(run)


def of_algorithm(name: str, device: str, options: dict[str, Any] | None = None) -> Tensor:
    """Does the same for a class of `fogdist.algorithms` whose ranks go in step."""
    fogdist.init()
    rank = fogdist.rank()
    fogdist.set_topology(topologies.RingGraph(fogdist.size()))
    with moved(device):
        model = test_optimizers.make_net(0)
        base = torch.optim.SGD(model.parameters(), lr=0.05)
        chosen = training_cases.IN_STEP[name] if options is None else options
        optimizer = getattr(algorithms, name)(base, model, **chosen)
        found = []
        for number in range(5):
            optimizer.zero_grad()
            test_optimizers.loss_of(model, rank, number).backward()
            optimizer.step()
            found.append(snapshot(model))
        return torch.stack(found)


def of_compressed(name: str, device: str) -> Tensor:
    """Does the same for a class that compresses what it sends."""
    return of_algorithm(name, device, {"compression": TopK(0.3, bits=2), "gamma": 0.3})


def gossip(device: str) -> Tensor:
    """Returns the trained parameters before and after steps of `AsynchronousGossip` that only gossip."""
    fogdist.init()
    rank = fogdist.rank()
    fogdist.set_topology(topologies.RingGraph(fogdist.size()))
    with moved(device):
        model = test_optimizers.make_net(rank)
        trained = [p for p in model.parameters() if p.requires_grad]
        begin = nn.utils.parameters_to_vector(trained).detach().cpu()
        base = torch.optim.SGD(model.parameters(), lr=0.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ranks start from")
            optimizer = algorithms.AsynchronousGossip(base, model)
        for number in range(40):
            optimizer.zero_grad()
            test_optimizers.loss_of(model, rank, number).backward()
            optimizer.step()
            if number % 4 == 0:  # between these barriers, each rank has its own pace
                fogdist.barrier()
        optimizer.finish()
        return torch.stack([begin, nn.utils.parameters_to_vector(trained).detach().cpu()])


def check_gossip(results: list[Tensor]) -> None:
    """Raises AssertionError if ranks that only gossiped lost a part of their sum, or did not come closer.

    Args:
        results: The results of `gossip` from all ranks.
    """
    begin, end = torch.stack(results).unbind(1)
    # One rank gains what another one loses, independent of the time at which they learn of it.
    torch.testing.assert_close(end.sum(0), begin.sum(0), rtol=0.0, atol=1e-12)
    spread = [float((values - values.mean(0)).norm()) for values in (begin, end)]
    assert 0.0 < spread[1] < 0.5 * spread[0], spread


class Branches(nn.Module):
    """Parallel layers, whose gradients become complete in a different order on each rank."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.order = list(range(5))[:: -1 if turned else 1]

    def forward(self, x: Tensor) -> Tensor:
        parts = {number: torch.tanh(self.layers[number](x)) for number in self.order}
        return torch.stack([parts[number] for number in range(5)]).sum(0)


def in_another_order(kind: str, device: str) -> Tensor:
    """Returns parameters after steps that send buckets in the backward pass; odd ranks compute in another order."""
    fogdist.init()
    rank = fogdist.rank()
    fogdist.set_topology(topologies.ExponentialGraph(fogdist.size()))
    there = place(device)
    torch.manual_seed(rank)
    model = move(Branches(rank % 2 == 1).double(), there)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "atc":
        make: Any = fogdist.DistributedAdaptThenCombineOptimizer
        optimizer = make(base, model, step_in_backward=True, bucket_cap_mb=1e-4)
    else:
        optimizer = fogdist.DistributedGradientAllreduceOptimizer(base, model, bucket_cap_mb=1e-4)
    generator = torch.Generator().manual_seed(rank)
    for number in range(6):
        optimizer.zero_grad()
        if number != 3 or rank != 0:  # rank 0 has no gradient in one step
            x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
            model(x.to(there)).square().mean().backward()
        optimizer.step()
    return snapshot(model)


def asynchronously(device: str) -> Tensor:
    """Returns final parameters of `DecentralizedDataParallel` in mode "async"; ranks take turns, so they are unique."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    with moved(device):
        model = test_decentralized_ddp.make_net(rank)
        base = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapper = fogdist.DecentralizedDataParallel(
            model, base, topologies.RingGraph(size), "async", broadcast=False
        )
        for number in range(12):
            base.zero_grad()
            test_decentralized_ddp.loss_of(wrapper, rank, number).backward()
            for turn in range(size):
                if turn == rank:
                    base.step()
                wait_until_complete(wrapper._mixing._puts)
                wrapper._mixing.discard()
                fogdist.barrier()
        trained = [p for p in model.parameters() if p.requires_grad]
        found = torch.cat([p.detach().reshape(-1).cpu() for p in trained])
        wrapper.global_average()
        mean = torch.cat([p.detach().reshape(-1).cpu() for p in trained])
        wrapper.close()
    return torch.stack([found, mean])


def ranks_on_other_devices(device: str) -> str:
    """Returns the error of an optimizer if the model of one rank is on a device and those of others are not."""
    fogdist.init()
    model = test_optimizers.make_net(0)
    if fogdist.rank() == 1:
        move(model, place(device))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        fogdist.DistributedAdaptWithCombineOptimizer(base, model)
    except ValueError as error:
        return str(error)
    return ""


def of_scaler(kind: str, device: str) -> Tensor:
    """Returns parameters and scale after each step with a gradient scaler; one rank's gradients overflow in a step."""
    fogdist.init()
    rank = fogdist.rank()
    with moved(device) as there:
        model = test_optimizers.make_net(rank)
        base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler(there.type, init_scale=1024.0, growth_interval=3)
        wrapper = None
        if kind == "wrapper":
            wrapper = fogdist.DecentralizedDataParallel(model, base, broadcast=False)
            optimizer: Any = base
        else:
            optimizer = test_optimizers.FACTORIES[kind](base, model)
        found = []
        for number in range(6):
            optimizer.zero_grad()
            loss = test_optimizers.loss_of(wrapper or model, rank, number)
            if number == 2 and rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scale = torch.tensor([scaler.get_scale()], dtype=torch.float64)
            found.append(torch.cat([snapshot(model).nan_to_num(), scale]))
        return torch.stack(found)


def reads_of_scaled_steps(kind: str, device: str) -> list[str]:
    """Does the same as `reads_of_steps`, with a gradient scaler."""
    fogdist.init()
    with moved(device) as there:
        model = test_optimizers.make_net(fogdist.rank())
        base = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler(there.type, init_scale=64.0)
        called: nn.Module = model
        optimizer: Any = base
        if kind == "wrapper":
            called = fogdist.DecentralizedDataParallel(model, base, broadcast=False)
        else:
            optimizer = test_optimizers.FACTORIES[kind](base, model)
        x, y = (part.to(there) for part in test_optimizers.batch(fogdist.rank(), 0))
        reads = HostReads()
        for number in range(5):
            with reads if number >= 2 else contextlib.nullcontext():
                optimizer.zero_grad()
                scaler.scale((called(x) - y).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        return reads.names


def snapshot(model: nn.Module) -> Tensor:
    """Returns all parameters of a model, on the CPU."""
    return torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()])


# --- waits of the host --------------------------------------------------------------------------------------


def reads_of_steps(kind: str, device: str) -> list[str]:
    """Returns the operations that read the device on the host in training steps, after the first two steps.

    On CUDA, torch itself checks this too.

    Args:
        kind: Kind of an optimizer, "wrapper" for `DecentralizedDataParallel`, or the name of an algorithm.
        device: Type of device.

    Raises:
        RuntimeError: Torch saw the host wait for CUDA in one of these steps.
    """
    fogdist.init()
    fogdist.set_topology(topologies.RingGraph(fogdist.size()))
    rank = fogdist.rank()
    with moved(device) as there:
        model = test_optimizers.make_net(rank if kind in ("wrapper", *test_optimizers.FACTORIES) else 0)
        base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0)
        called: nn.Module = model
        optimizer: Any = base
        if kind == "wrapper":
            called = fogdist.DecentralizedDataParallel(model, base, broadcast=False)
        elif kind in test_optimizers.FACTORIES:
            optimizer = test_optimizers.FACTORIES[kind](base, model)
        elif kind == "atc in backward":
            make = fogdist.DistributedAdaptThenCombineOptimizer
            optimizer = make(base, model, step_in_backward=True, bucket_cap_mb=1e-4)
        else:
            optimizer = getattr(algorithms, kind)(base, model, **training_cases.IN_STEP[kind])
        batches = [
            tuple(part.to(there) for part in test_optimizers.batch(rank, number)) for number in range(6)
        ]
        reads = HostReads()
        for number, (x, y) in enumerate(batches):
            with contextlib.ExitStack() as watches:
                if number >= 2:
                    watches.enter_context(reads)
                    watches.enter_context(no_waits(there))
                optimizer.zero_grad()
                (called(x) - y).square().mean().backward()
                optimizer.step()
        return reads.names


@contextlib.contextmanager
def no_waits(there: torch.device) -> Iterator[None]:
    """On CUDA, torch raises RuntimeError in this block if the host waits for the device."""
    if there.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
