"""Compressed exchanges of tensors of a device, by copies on the host."""

from __future__ import annotations

import itertools
import math
from typing import Any

import device_double
import device_worlds
import fogdist
import pytest
import torch
import torch.distributed as dist
from codec_lists import CODECS, IN_EXCHANGES
from codec_lists import DTYPES as DTYPES_OF_CODECS
from device_worlds import DEVICE, on_the_double_only, place
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.compression import Codec, Int8, TopK
from harness import error_of, on_ranks
from reference import Checks, make_input
from test_compressed_exchanges import DIFFERENT, expected_at, ring
from torch import Tensor

from fog_pg._C import NeighborPlan

WORLDS = device_worlds.DeviceWorlds
pytestmark = device_worlds.MARKS


def _with_dtypes(codecs: list[Codec]) -> list[tuple[Codec, torch.dtype]]:
    """Returns a dtype for each codec, in turn, because tests on the CPU cover all pairs."""
    return list(zip(codecs, itertools.cycle(DTYPES_OF_CODECS), strict=False))


@on_ranks(1)
def test_codecs() -> None:
    """Compares messages and decoded values on a device with those of the CPU."""
    there = place()
    with Checks() as checks:
        for (codec, dtype), numel in itertools.product(_with_dtypes(CODECS), (0, 1, 1000, 70_001)):
            label = f"{codec} {dtype} {numel}"
            x = make_input(0, dtype, numel, 1)
            if numel == 1000:
                x[::100] = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0] * 2, dtype=dtype)
            expected = codec.encode(x)
            message = codec.encode(x.to(there))
            checks.equal(f"{label}: device", message.device, there)
            checks.equal(label, message.cpu(), expected)
            values, found = (codec.decode(each, x.shape, dtype) for each in (expected, message))
            checks.equal(f"{label}: decoded", found.cpu().nan_to_num(nan=77.0), values.nan_to_num(nan=77.0))


@on_ranks(device_worlds.sizes(4))
def test_exchanges() -> None:
    """Compares compressed exchanges on a device with the sums of the decoded tensors."""
    there = place()
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fog: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    hops = sorted({hop % size for hop in (1, 2)} - {0})
    weight_of = [0.5 + each / 8 for each in range(size)]  # that a rank gives all its destinations
    sources = [((rank - hop) % size, weight) for hop, weight in zip(hops, (0.3, -0.25), strict=False)]
    destinations = [((rank + hop) % size, weight_of[rank]) for hop in hops]
    plan = NeighborPlan(rank, size, 0.45, sources, destinations)
    applied = NeighborPlan(rank, size, 0.45, [(s, w * weight_of[s]) for s, w in sources], [])
    ones = [(s, 1.0) for s, _ in sources], [(d, 1.0) for d, _ in destinations]
    mean = NeighborPlan(rank, size, 1.0, *ones, mean=True)
    share = 1 / (len(sources) + 1)
    of_mean = NeighborPlan(rank, size, share, [(s, share) for s, _ in sources], [])
    with Checks() as checks:
        forms = (
            ("exact", plan, applied),
            ("exact", mean, of_mean),
            ("decoded", plan, applied),
            ("conserve", plan, applied),
            ("conserve", mean, of_mean),
        )
        for codec, dtype in _with_dtypes([*IN_EXCHANGES, Int8(block=64)]):
            numel = 0 if codec == Int8(block=64) else 3000
            x = [make_input(r, dtype, numel) for r in range(size)]
            for how, used, expected_plan in forms:
                label = f"{codec} {dtype} {numel} {how} {'mean' if used is mean else ''}"
                expected, mine = expected_at(codec, expected_plan, x, how)
                given = x[rank].to(there)
                own = torch.full_like(given, math.nan)
                work = fog.neighbor_allreduce(
                    given,
                    used,
                    output=given if how == "conserve" else None,
                    compression=codec.backend,
                    decoded=own if how == "decoded" else None,
                    conserve=how == "conserve",
                )
                work.wait()
                (found,) = work.result()
                checks.equal(f"{label}: device", found.device, there)
                checks.close(label, found.cpu(), expected)
                if how == "decoded":
                    checks.equal(f"{label}: decoded", own.cpu(), mine)
                if how != "conserve":
                    checks.equal(f"{label}: input", given.cpu(), x[rank])


@on_ranks(4)
def test_lists() -> None:
    """A list is one message for each dtype; tensors may have strides."""
    there = place()
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.set_topology(topologies.ring(size))
    codec, kinds = TopK(0.3), ((torch.float32, 70), (torch.float16, 31), (torch.float32, 9))
    fog: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    other = (rank + 1) % size
    plan = NeighborPlan(
        rank, size, 0.5, [((rank - 1) % size, 0.5)] if size > 1 else [], [(other, 1.0)] if size > 1 else []
    )
    with Checks() as checks:
        for how in ("conserve", "decoded"):
            x = [[make_input(r, dtype, n) for dtype, n in kinds] for r in range(size)]
            given = [torch.stack([each, each], 1).to(there)[:, 0] for each in x[rank]]
            own = [torch.empty_like(each) for each in given]
            work = fog.neighbor_allreduce(
                given,
                plan,
                compression=codec.backend,
                decoded=own if how == "decoded" else None,
                conserve=how == "conserve",
            )
            work.wait()
            found = [each.cpu() for each in work.result()]
            joined = [torch.cat([each[0], each[2]]) for each in x]
            expected, mine = expected_at(codec, plan, joined, how)
            checks.close(f"{how} float32", torch.cat([found[0], found[2]]), expected)
            if how == "decoded":
                checks.equal(how, torch.cat([own[0].cpu(), own[2].cpu()]), mine)
            expected, mine = expected_at(codec, plan, [each[1] for each in x], how)
            checks.close(f"{how} float16", found[1], expected)


@on_ranks(4)
def test_machines() -> None:
    """Between machines, the slices of their means are encoded; and what one machine gains another one loses."""
    there = place()
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fog: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    half = size // 2
    machines = [list(range(half)), list(range(half, size))]
    machine, place_in = divmod(rank, half)
    plan = NeighborPlan(machine, 2, 0.5, [(1 - machine, 0.5)], [(1 - machine, 1.0)])
    with Checks() as checks:
        for codec, conserve in itertools.product((Int8(block=64), TopK(0.1)), (False, True)):
            numel = 64 * half
            x = [make_input(r, torch.float64, numel) for r in range(size)]
            work = fog.hierarchical_neighbor_allreduce(
                x[rank].to(there), machines, plan, compression=codec.backend, conserve=conserve
            )
            work.wait()
            (found,) = work.result()
            means = [torch.stack([x[r] for r in members]).mean(0) for members in machines]
            for number in range(half):
                part = slice(64 * number, 64 * (number + 1))
                expected, _ = expected_at(
                    codec, plan, [mean[part] for mean in means], "conserve" if conserve else "exact"
                )
                checks.close(f"{codec} {conserve} {number} at {place_in}", found.cpu()[part], expected)


# --- the delegate's messages ----------------------------------------------------------------------------------


def backend_of(made: list[Any]) -> Any:
    device_double.load()
    device_double.serve_groups(made)
    return dist.new_group()._get_backend(torch.device("cpu"))


@on_the_double_only
@on_ranks(2)
def test_ranks_with_different_codecs_hear_of_it() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        for pair, confirm, machines in itertools.product(DIFFERENT[:4], (False, True), (False, True)):
            codecs = [codec for codec in pair if codec is not None]
            if len(codecs) < 2:
                continue  # a rank without a codec uses the delegate
            fog, x = backend_of([]), torch.ones(1000, device=DEVICE)
            options = {"confirm": confirm, "compression": codecs[rank].backend}
            if machines:
                call = fog.hierarchical_neighbor_allreduce
                message = error_of(lambda: call(x, [[0], [1]], ring(rank, size), **options).wait())
            else:
                message = error_of(lambda: fog.neighbor_allreduce(x, ring(rank, size), **options).wait())
            for codec in codecs:
                told = codec.backend.text[:20] in message and "ranks disagree" in message
                checks.true(f"{pair}: {message}", told)


@on_ranks(1)
def test_wrong_arguments() -> None:
    there = place()
    fogdist.init()
    fog: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    x, codec, plan = torch.ones(10, device=there), Int8(), NeighborPlan(0, 1, 1.0, [], [])
    message = codec.encode(x)

    def exchange(given: Tensor = x, **wrong: Any) -> None:
        fog.neighbor_allreduce(given, plan, **wrong)

    for words, call in (
        ("decoded.*cpu", lambda: exchange(compression=codec.backend, decoded=torch.ones(10))),
        ("decoded", lambda: exchange(compression=codec.backend, decoded=x)),
        (
            "conserve.*decoded",
            lambda: exchange(compression=codec.backend, decoded=x.clone(), conserve=True),
        ),
        ("decoded.*without compression", lambda: exchange(decoded=x.clone())),
        ("Int8.*complex64", lambda: exchange(x.to(torch.complex64), compression=codec.backend)),
        ("message", lambda: codec.decode(message[1:], (10,))),
        (f"output.*{DEVICE}|{DEVICE}.*cpu", lambda: codec.backend.decode(message, torch.empty(10))),
        ("message", lambda: codec.backend.encode(x, message.cpu())),
        ("places", lambda: TopK(k=3).decode(torch.zeros_like(TopK(k=3).encode(x)), (10,))),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@on_ranks(3)
def test_parameters_on_two_devices() -> None:
    """The model is in part on the CPU and in part on the device."""
    there = place()
    fogdist.init(topologies.ring)
    rank, size = fogdist.rank(), fogdist.size()
    x = [[make_input(r, torch.float64, 50, seed) for r in range(size)] for seed in range(4)]
    means = [torch.stack(each).mean(0) for each in x]
    model = torch.nn.ParameterList(
        each[rank].to(where) for each, where in zip(x, ("cpu", there, there, "cpu"))
    )
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = algorithms.ChocoSGD(base, model, compression=Int8(), gamma=0.5, broadcast=False)
    for _ in range(100):
        for parameter in model:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for parameter, mean in zip(model, means):
        torch.testing.assert_close(parameter.detach().cpu(), mean, rtol=0, atol=1e-9)
