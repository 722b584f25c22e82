"""Trains every entry on a device: the numbers are those of the CPU, and the host never waits.

The fake device and its delegate work on streams of their own, so a missing wait shows as wrong numbers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import Any
from unittest import mock

import device_double
import device_worlds
import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import test_fsdp_gossip
import torch
import torch.distributed as dist
import training_cases
from device_worlds import DEVICE, HostReads, no_waits, on_gpus_only, place
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.compression import Int8, TopK
from harness import on_ranks
from torch import Tensor, nn
from training_cases import BLUEFOGS, EXACT, IN_STEP, WINDOWS, batch, make_net, snapshot, start

WORLDS = device_worlds.DeviceWorlds
pytestmark = device_worlds.MARKS


def compressed(base: torch.optim.Optimizer, model: nn.Module, codec: Any) -> Any:
    mixing = algorithms.Neighbors(topologies.ring(fogdist.size()), compression=codec)
    return algorithms.DecentralizedSGD(base, model, topology=mixing, broadcast=False)


COMPRESSED: dict[str, Any] = {
    "ChocoSGD": partial(algorithms.ChocoSGD, compression=TopK(0.3, bits=2), gamma=0.3),
    **{f"neighbors {codec}": partial(compressed, codec=codec) for codec in (Int8(), TopK(0.1))},
}
ENTRIES = [*BLUEFOGS, "wrapper", *IN_STEP, *WINDOWS, *COMPRESSED]
# Codecs work on the host.
WITH_CODECS = (*COMPRESSED, "SparseLoCo")
# The step finds out whether parameters without a gradient must move.
READS_ONCE = ("GradientTracking",)


def distribute(kind: str, base: torch.optim.Optimizer, net: nn.Module) -> tuple[Any, Any]:
    with mock.patch.dict(training_cases.VIEWS, COMPRESSED):
        return training_cases.distribute(kind, base, net)


def train(kind: str, device: str, scaled: bool = False) -> tuple[Tensor, list[str]]:
    """Returns a rank's parameters after each step, and the operations of later steps that read the device.

    Args:
        kind: Of the entry.
        device: Type of device.
        scaled: Whether a gradient scaler steps; the gradients of rank 0 overflow in step 2.
    """
    rank, _ = start(topologies.ring)
    there = place(device)
    net = make_net(rank).to(there)
    net.decoder.weight = net.encoder.weight  # `to` leaves them tied on torch's own devices only
    if kind in (*BLUEFOGS, "wrapper"):
        base: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    else:
        base = torch.optim.SGD(net.parameters(), lr=0.05)
    called, optimizer = distribute(kind, base, net)
    scaler = torch.amp.GradScaler(there.type, init_scale=1024.0, growth_interval=3, enabled=scaled)
    batches = [tuple(part.to(there) for part in batch(rank, number)) for number in range(6)]
    found, reads = [], HostReads()
    for number, (x, y) in enumerate(batches):

        def step(x: Tensor = x, y: Tensor = y, factor: float = 1.0) -> None:
            optimizer.zero_grad()
            scaler.scale((called(x) - y).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()

        if scaled and number == 2:
            step(factor=float("inf") if rank == 0 else 1.0)
        elif number < 2 or scaled or kind in (*READS_ONCE, *WINDOWS, *WITH_CODECS):
            with reads:
                step()
        else:
            with reads, no_waits():
                step()
        if number < 2:
            reads.names.clear()
        found.append(snapshot(net).nan_to_num().cpu())
    training_cases.end(called, optimizer)
    return torch.stack(found), reads.names


@pytest.mark.parametrize("size", device_worlds.sizes(3))
@pytest.mark.parametrize("kind", ENTRIES)
def test_numbers_and_waits(worlds, kind, size):
    found, expected = (worlds(size).run(train, kind, device) for device in (DEVICE, "cpu"))
    for (got, reads), (wanted, _) in zip(found, expected):
        torch.testing.assert_close(got, wanted, **EXACT)
        if kind not in (*WINDOWS, *WITH_CODECS):  # their operations wait
            assert len(reads) == (4 if kind in READS_ONCE else 0), reads


@pytest.mark.parametrize("size", device_worlds.sizes(3))
@pytest.mark.parametrize("kind", ["awc", "atc", "gradient", "wrapper"])
def test_a_scaled_step_reads_once_whether_gradients_overflowed(worlds, kind, size):
    found, expected = (worlds(size).run(train, kind, device, True) for device in (DEVICE, "cpu"))
    for (got, reads), (wanted, _) in zip(found, expected):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)  # torch unscales by a float32
        assert reads == ["aten._local_scalar_dense.default"] * 3


def train_sharded(kind: str, device: str) -> list[Tensor]:
    place()
    return test_fsdp_gossip.train(kind, "2 x 2", True, device)


@on_gpus_only
@pytest.mark.parametrize("kind", test_fsdp_gossip.KINDS)
def test_groups_of_fsdp_gossip(worlds, kind):
    found, expected = (worlds(4).run(train_sharded, kind, device) for device in (DEVICE, "cpu"))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


def train_past_a_loss() -> list[float]:
    """Rank 1 dies while the others' exchange waits for it on the device; returns the values after that."""
    there, made = place(), []
    if device_worlds.ON_GPUS:
        dist.init_process_group("fog")
    else:
        device_double.serve_groups(made)
        dist.init_process_group(f"cpu:fog,{DEVICE}:fog")
    fogdist.init()
    rank = fogdist.rank()
    model = nn.Linear(4, 1, bias=False).to(there)
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = algorithms.DecentralizedSGD(base, model, on_loss="continue")
    for number in range(6):
        if number == 3:
            with torch.no_grad():
                model.weight.fill_(10.0 * (rank + 1))
            torch.accelerator.synchronize()
            dist.barrier()
            if rank == 1:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
                if device_worlds.ON_GPUS:
                    torch.cuda._sleep(10**10)
                else:
                    holding = device_double.held(made[0].stream)
                    holding.__enter__()
                    # Gloo of the double would fail by a closed socket; NCCL waits until it is aborted, and this child
                    # keeps the sockets open.
                    if os.fork() == 0:
                        time.sleep(3)
                        os._exit(0)
        optimizer.zero_grad()
        model(torch.ones(1, 4, device=there)).sum().backward()
        optimizer.step()
    return [float(value) for value in model.weight.flatten()]


def test_a_loss_leaves_nothing_undefined(new_world, worlds):
    world = new_world(3, initialize=False, environment=device_worlds.environment(3))
    outcomes = world.run_raw(train_past_a_loss)
    assert [each.state for each in outcomes] == ["returned", "died", "returned"], [*map(str, outcomes)]
    found = np.array([outcomes[rank].value for rank in (0, 2)])
    np.testing.assert_allclose(
        found.mean(0), 20.0, rtol=1e-6
    )  # of 10 and 30, which the ranks that are left have had
    assert np.abs(found - 20.0).max() < 1.0


class Branches(nn.Module):
    """Parallel layers, whose gradients become complete in a different order on each rank."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.order = list(range(5))[:: -1 if turned else 1]

    def forward(self, x: Tensor) -> Tensor:
        parts = {number: torch.tanh(self.layers[number](x)) for number in self.order}
        return torch.stack([parts[number] for number in range(5)]).sum(0)


def in_another_order(device: str) -> Tensor:
    """Returns parameters after steps with averages of gradients; odd ranks compute these in another order."""
    rank, _ = start()
    there = place(device)
    torch.manual_seed(rank)
    model = Branches(rank % 2 == 1).double().to(there)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer = training_cases.distribute("gradient", base, model)
    generator = torch.Generator().manual_seed(rank)
    for number in range(6):
        optimizer.zero_grad()
        if number != 3 or rank != 0:  # rank 0 has no gradient in one step
            x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
            model(x.to(there)).square().mean().backward()
        optimizer.step()
    return snapshot(model).cpu()


def test_gradients_in_another_order(worlds):
    """On a device, operations match by order, so buckets are sent in one order, whichever is complete first."""
    found, expected = (worlds(4).run(in_another_order, device) for device in (DEVICE, "cpu"))
    torch.testing.assert_close(found, expected, **EXACT)


def gossip(kind: str) -> Tensor:
    """Returns the trained parameters before and after steps of an asynchronous entry that only gossip."""
    rank, size = start(topologies.ring)
    net = make_net(rank).to(place())
    net.decoder.weight = net.encoder.weight
    base = torch.optim.SGD(net.parameters(), lr=0.0)
    called: nn.Module = net
    optimizer: Any = base
    begin = nn.utils.parameters_to_vector(training_cases.trained(net)).detach().cpu()
    if kind == "wrapper":
        called = fogdist.DecentralizedDataParallel(net, base, topologies.ring(size), "async", broadcast=False)
    else:
        optimizer = algorithms.AsynchronousGossip(base, net, broadcast=False)
    for number in range(40):
        training_cases.train_step(called, optimizer, rank, number)
        if number % 4 == 0:  # between these barriers, each rank has its own pace
            dist.barrier()
    if kind == "wrapper":
        called.average()
        called.close()
    else:
        optimizer.close()
    return torch.stack([begin, nn.utils.parameters_to_vector(training_cases.trained(net)).detach().cpu()])


@pytest.mark.parametrize("kind", ["AsynchronousGossip", "wrapper"])
def test_asynchronous(worlds, kind):
    begin, end = torch.stack(worlds(3).run(gossip, kind)).unbind(1)
    before, after = (float((values - values.mean(0)).norm()) for values in (begin, end))
    if kind == "wrapper":  # whose means are not the ranks' own, and which ends with the mean of all
        assert after < 1e-12 < before
        low, high = torch.aminmax(begin, dim=0)
        assert ((end >= low - 1e-12) & (end <= high + 1e-12)).all()
        return
    # One rank gains what another one loses, independent of the time at which they learn of it.
    torch.testing.assert_close(end.sum(0), begin.sum(0), rtol=0.0, atol=1e-12)
    assert 0.0 < after < 0.5 * before


@on_ranks(3)
def test_ranks_with_models_on_different_devices() -> None:
    rank, _ = start()
    model = nn.Linear(2, 2).to(place() if rank == 1 else "cpu")
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"(?s)ranks \[0, 2\].*on ranks \[1\].*on {DEVICE}"):
        bf.DistributedAdaptWithCombineOptimizer(base, model)
