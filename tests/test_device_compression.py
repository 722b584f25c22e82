"""Compressed exchanges of tensors of a device: codecs by torch's operations, and the delegate's messages.

The device is the fake one of tests/device_double; tests/gpu runs the same functions on CUDA.
"""

from __future__ import annotations

import warnings
from typing import Any

import device_double
import device_operations
import device_training
import pytest
import test_optimizers
import torch
import torch.distributed as dist
from device_double import DEVICE
from fogdist.compression import Int8, RandomK, TopK
from harness import error_of
from reference import Checks, make_input
from test_compressed_exchanges import DIFFERENT, ring

from fog_pg._C import NeighborPlan

pytestmark = pytest.mark.usefixtures("compiled_double")


@pytest.fixture(scope="module", autouse=True)
def compiled(compiled_double: None) -> None:
    """Compiles the fake CUDA runtime too, because ranks would take too long to compile it."""
    device_double.compile_runtime()


def test_messages_are_those_of_the_cpu(worlds):
    worlds(1).run(device_operations.codecs, DEVICE, timeout=200.0)


@pytest.mark.parametrize("size", [1, 3])
def test_exchanges(worlds, size):
    worlds(size).run(device_operations.compressed_exchanges, DEVICE, timeout=200.0)


@pytest.mark.parametrize(
    "function",
    [
        device_operations.compressed_lists,
        device_operations.compressed_machines,
    ],
    ids=lambda function: function.__name__,
)
def test_forms(worlds, function):
    worlds(4).run(function, DEVICE, timeout=100.0)


def backend_of(made: list[Any]) -> Any:
    device_double.load()
    device_double.serve_groups(made)
    return dist.new_group()._get_backend(torch.device("cpu"))


def messages() -> None:
    """A peer gets the bytes of the codec, and one message for each dtype."""
    made: list[Any] = []
    fog, rank, size = backend_of(made), dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    x = [make_input(rank, torch.float32, 1000), make_input(rank, torch.float64, 77)]
    for codec in (Int8(), TopK(0.1), RandomK(k=5)):
        fog.neighbor_allreduce(
            [each.to(DEVICE) for each in x],
            ring(dist.get_rank(), dist.get_world_size()),
            compression=codec.backend,
        ).wait()
        (delegate,) = made
        (group,) = [call["calls"] for call in delegate.calls if call["name"] == "coalesced"]
        found = [(part["name"], part["peer"], part["tensors"][0][0]) for part in group]
        sizes = [(codec.bytes(1000),), (codec.bytes(77, torch.float64),)]
        assert found == [("send", after, s) for s in sizes] + [("recv", before, s) for s in sizes], found
        delegate.clear()


def test_messages_have_the_bytes_of_the_codec(worlds):
    worlds(2).run(messages)


def disagreements(confirm: bool) -> None:
    rank = dist.get_rank()
    with Checks() as checks:
        for pair in DIFFERENT[:4]:
            if None in pair and not confirm:
                continue  # a rank without a codec then compares nothing
            for machines in (False, True):
                made: list[Any] = []
                fog, codec, x = backend_of(made), pair[rank], torch.ones(1000, device=DEVICE)
                options = {"confirm": confirm, "compression": None if codec is None else codec.backend}

                def call(
                    fog: Any = fog, x: Any = x, options: Any = options, machines: bool = machines
                ) -> None:
                    if machines:
                        fog.hierarchical_neighbor_allreduce(
                            x, [[0], [1]], ring(dist.get_rank(), dist.get_world_size()), **options
                        )
                    else:
                        fog.neighbor_allreduce(x, ring(dist.get_rank(), dist.get_world_size()), **options)

                message = error_of(call)
                for each in pair:
                    text = "float32[1000]" if each is None else each.backend.text
                    checks.true(f"{pair}: {message}", text in message and "ranks disagree" in message)
                checks.equal("nothing was sent", [call["name"] for each in made for call in each.calls], [])


@pytest.mark.parametrize("confirm", [False, True])
def test_ranks_with_different_codecs_hear_of_it_before_anything_is_sent(new_world, confirm):
    new_world(2).run(disagreements, confirm)


def wrong_arguments() -> None:
    fog, plan = backend_of([]), NeighborPlan(dist.get_rank(), dist.get_world_size(), 1.0, [], [])
    x = torch.ones(10, device=DEVICE)
    codec = Int8().backend
    for wrong, words in (
        ({"compression": codec, "decoded": torch.ones(10)}, "decoded.*cpu"),
        ({"compression": codec, "decoded": x}, "decoded"),
        ({"compression": codec, "decoded": x.clone(), "conserve": True}, "conserve.*decoded"),
        ({"decoded": x.clone()}, "decoded.*without compression"),
    ):
        with pytest.raises(ValueError, match=words):
            fog.neighbor_allreduce(x, plan, **wrong)
    with pytest.raises(ValueError, match="Int8.*complex64"):
        fog.neighbor_allreduce(x.to(torch.complex64), plan, compression=codec)
    message = Int8().encode(x)
    with pytest.raises(ValueError, match="message"):
        Int8().decode(message[1:], (10,))
    with pytest.raises(ValueError, match="output.*gpudouble|gpudouble.*cpu"):
        codec.decode(message, torch.empty(10))
    with pytest.raises(ValueError, match="message"):
        codec.encode(x, message.cpu())
    with pytest.raises(ValueError, match="places"):
        TopK(k=3).decode(torch.zeros_like(TopK(k=3).encode(x)), (10,))
    assert Int8().bound(x).device == x.device


def test_wrong_arguments(worlds):
    worlds(1).run(wrong_arguments)


def on_two_devices(name: str) -> list[torch.Tensor]:
    """Returns the parameters of a model that is in part on the CPU and in part on the device."""
    import fogdist
    from fogdist import algorithms, topology

    fogdist.init()
    fogdist.set_topology(topology.RingGraph(fogdist.size()))
    model = torch.nn.Module()
    values = [make_input(fogdist.rank(), torch.float64, 50, seed) for seed in range(4)]
    places = ["cpu", DEVICE, DEVICE, "cpu"]
    there = [each.to(device_training.place(place)) for each, place in zip(values, places, strict=True)]
    model.each = torch.nn.ParameterList(there)
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ranks start from")
        optimizer = getattr(algorithms, name)(base, model, compression=Int8(), gamma=0.5)
    for _ in range(100):
        for parameter in model.each:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return [each.detach().cpu() for each in model.each]


def test_parameters_on_two_devices(worlds):
    found = worlds(3).run(on_two_devices, "ChocoSGD")
    for seed in range(4):
        mean = torch.stack([make_input(rank, torch.float64, 50, seed) for rank in range(3)]).mean(0)
        for parameters in found:
            torch.testing.assert_close(parameters[seed], mean, rtol=0, atol=1e-9)


def refused_power_gossip() -> None:
    with pytest.raises(ValueError, match=f"must be on the CPU for PowerGossip, got parameters on {DEVICE}"):
        device_training.of_algorithm("PowerGossip", DEVICE)


def test_power_gossip_refuses_a_device(worlds):
    worlds(2).run(refused_power_gossip)


def reads() -> list[str]:
    """Returns the operations of a compressed training step that read the device on the host."""
    import fogdist
    from fogdist import topology
    from fogdist.algorithms import DecentralizedSGD, Neighbors
    from host_reads import HostReads

    fogdist.init()
    found = HostReads()
    with device_training.moved(DEVICE) as there:
        model = test_optimizers.make_net(0)
        for codec in (Int8(), TopK(0.1), RandomK(0.1)):
            mixing = Neighbors(topology.RingGraph(fogdist.size()), compression=codec)
            optimizer = DecentralizedSGD(torch.optim.SGD(model.parameters(), lr=0.05), model, mixing=mixing)
            x, y = (part.to(there) for part in test_optimizers.batch(fogdist.rank(), 0))
            for number in range(4):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                if number < 2:
                    optimizer.step()
                else:
                    with found:
                        optimizer.step()
    return found.names


def test_no_step_reads_the_device(worlds):
    assert worlds(2).run(reads) == [[], []]
