"""Compressed exchanges equal the weighted sums of the decoded tensors, bit for bit, however their messages arrive."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from codec_lists import DTYPES, IN_EXCHANGES
from fogdist import topology
from fogdist.algorithms import (
    DecentralizedAdamW,
    DecentralizedSGD,
    GradientTracking,
    Machines,
    Neighbors,
    PushSumSGD,
)
from fogdist.compression import Codec, Float16, Int8, TopK
from harness import error_of, on_ranks
from hosts import run_on_hosts
from reference import HALVES, Checks, make_input
from torch import Tensor

from fog_pg._C import NeighborPlan, VirtualWorld

# No element, one, fewer than a block, what comes with the header, and what comes in several parts.
SIZES = [0, 1, 100, 5000, 300_001]
HOW = ["exact", "decoded", "conserve", "in place"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else torch.float64


def weighted(terms: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Returns the sum as fog promises it: in this order, in the wider type, rounded once."""
    dtype = terms[0][1].dtype
    wide = accumulator(dtype)
    products = [
        value.to(wide) * torch.full((), weight, dtype=torch.float64).to(wide) for weight, value in terms
    ]
    return functools.reduce(torch.add, products).to(dtype)


def decoded_of(codec: Codec, tensor: Tensor) -> Tensor:
    """Returns what others get of the tensor."""
    return codec.decode(codec.encode(tensor), tensor.shape, tensor.dtype)


def expected_at(codec: Codec, plan: NeighborPlan, x: list[Tensor], how: str) -> tuple[Tensor, Tensor]:
    """Returns the result of an exchange at the plan's rank, and its own decoded message."""
    rank = plan.rank
    terms = [(weight, decoded_of(codec, x[source])) for source, weight in plan.sources if weight != 0]
    mine = decoded_of(codec, x[rank])
    if how == "conserve":
        terms += [(plan.self_weight - 1, mine), (1.0, x[rank])]
    else:
        terms.append((plan.self_weight, mine if how == "decoded" else x[rank]))
    return weighted(terms), mine


def plan_at(rank: int, size: int) -> NeighborPlan:
    """Each rank receives from the two before it, and, with weight 0, from the third."""
    sources = [((rank - 1) % size, 0.3), ((rank - 2) % size, -0.25), ((rank - 3) % size, 0.0)]
    return NeighborPlan(rank, size, 0.45, sources, [((rank + hop) % size, 1.0) for hop in (1, 2, 3)])


def ring(rank: int, size: int) -> NeighborPlan:
    """Each rank receives from the one before it."""
    return NeighborPlan(rank, size, 0.5, [((rank - 1) % size, 0.5)], [((rank + 1) % size, 1.0)])


def exchange(
    world: VirtualWorld, x: Sequence[Any], codecs: Sequence[Codec | None], **options: Any
) -> list[Any]:
    """Runs an exchange along the ring, with one tensor or list and one codec of each rank, to its end."""
    works = [
        group.neighbor_allreduce(
            x[r], ring(r, len(x)), compression=None if codecs[r] is None else codecs[r].backend, **options
        )
        for r, group in enumerate(world.groups)
    ]
    world.progress()
    return works


# --- with messages that are late and come in parts ------------------------------------------------------------


@pytest.mark.parametrize("codec", IN_EXCHANGES, ids=repr)
@pytest.mark.parametrize("how", HOW)
def test_the_result_is_the_sum_of_the_decoded_tensors(codec: Codec, how: str) -> None:
    check_sums(codec, how, 5, DTYPES if how == "exact" else [torch.float32], SIZES)


LARGE = list(zip([Int8(), Float16(), Int8(block=1024), TopK(0.3)], HOW, strict=True))


@pytest.mark.parametrize(("codec", "how"), LARGE, ids=str)
def test_large_tensors_go_in_pieces(codec: Codec, how: str) -> None:
    """The result is the same as in one piece, and a peer gets a message for each MiB, or one if it cannot be cut."""
    world = check_sums(codec, how, 4, [torch.float32], [2_700_001])
    bytes_each = codec.bytes(2_700_001)
    pieces = 1 if isinstance(codec, TopK) else max(1, bytes_each >> 20)
    for (sender, receiver), (messages, sent) in world.sent.items():
        if sender != receiver and how != "in place":  # there, receivers confirm by messages too
            assert (messages, sent) == (pieces, bytes_each)


def check_sums(
    codec: Codec, how: str, size: int, dtypes: Sequence[torch.dtype], numels: Sequence[int]
) -> VirtualWorld:
    """Compares exchanges of tensors of all these dtypes and sizes with the sums of the decoded tensors."""
    world = VirtualWorld(size, ranks_per_host=2, seed=3, most_delay=4, confirm=how == "in place")
    for dtype in dtypes:
        for numel in numels:
            x = [make_input(rank, dtype, numel) for rank in range(size)]
            given = [tensor.clone() for tensor in x]
            own = [torch.full_like(tensor, math.nan) for tensor in x]
            works = [
                group.neighbor_allreduce(
                    given[rank],
                    plan_at(rank, size),
                    output=given[rank] if how == "in place" else None,
                    compression=codec.backend,
                    decoded=own[rank] if how == "decoded" else None,
                    conserve=how == "conserve",
                )
                for rank, group in enumerate(world.groups)
            ]
            world.progress()
            for rank, work in enumerate(works):
                assert work.is_completed()
                (result,) = work.result()
                expected, mine = expected_at(codec, plan_at(rank, size), x, how)
                torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
                if how == "decoded":
                    torch.testing.assert_close(own[rank], mine, rtol=0, atol=0)
                if how == "in place":
                    assert result.data_ptr() == given[rank].data_ptr()
                else:
                    assert torch.equal(given[rank], x[rank])
    return world


@pytest.mark.parametrize("codec", [Int8(), TopK(0.02)], ids=repr)
def test_the_mean_is_conserved(codec: Codec) -> None:
    size, numel = 8, 20_000
    world = VirtualWorld(size, seed=1, most_delay=3)
    x = [make_input(rank, torch.float64, numel) for rank in range(size)]
    mean = torch.stack(x).mean(0)
    for _ in range(20):
        plans = [
            NeighborPlan(r, size, 1.0, [((r - 1) % size, 1.0)], [((r + 1) % size, 1.0)], mean=True)
            for r in range(size)
        ]
        works = [
            group.neighbor_allreduce(x[r], plans[r], compression=codec.backend, conserve=True)
            for r, group in enumerate(world.groups)
        ]
        world.progress()
        x = [work.result()[0] for work in works]
        torch.testing.assert_close(torch.stack(x).mean(0), mean, rtol=0, atol=1e-12)


def test_lists_are_one_message_of_each_dtype() -> None:
    size = 3
    world = VirtualWorld(size, ranks_per_host=3)
    codec = Int8(block=8)
    x = [
        [make_input(r, d, n) for d, n in ((torch.float32, 50), (torch.float16, 7), (torch.float32, 9))]
        for r in range(size)
    ]
    for r, work in enumerate(exchange(world, x, [codec] * size)):
        outputs = work.result()
        floats = [torch.cat([x[s][0], x[s][2]]) for s in range(size)]
        expected, _ = expected_at(codec, ring(r, size), floats, "exact")
        assert torch.equal(torch.cat([outputs[0], outputs[2]]), expected)
        expected, _ = expected_at(codec, ring(r, size), [x[s][1] for s in range(size)], "exact")
        assert torch.equal(outputs[1], expected)


@pytest.mark.parametrize("codec", [Int8(), TopK(0.1)], ids=repr)
@pytest.mark.parametrize("conserve", [False, True])
def test_machines_encode_the_slices_of_their_means(codec: Codec, conserve: bool) -> None:
    size, local, numel = 6, 2, 20_001
    machines = [[0, 1], [2, 3], [4, 5]]
    world = VirtualWorld(size, ranks_per_host=local, seed=5, most_delay=3)
    x = [make_input(r, torch.float32, numel) for r in range(size)]
    means = [((x[a].double() + x[b].double()) / 2).float() for a, b in machines]
    count = len(machines)
    plans = [
        NeighborPlan(m, count, 0.5, [((m - 1) % count, 0.5)], [((m + 1) % count, 1.0)]) for m in range(count)
    ]
    works = [
        group.hierarchical_neighbor_allreduce(
            x[r], machines, plans[r // local], compression=codec.backend, conserve=conserve
        )
        for r, group in enumerate(world.groups)
    ]
    world.progress()
    cut = numel // local
    for r, work in enumerate(works):
        machine = r // local
        (result,) = work.result()
        for begin, end in ((0, cut), (cut, numel)):
            slices = [mean[begin:end] for mean in means]
            expected, _ = expected_at(codec, plans[machine], slices, "conserve" if conserve else "exact")
            torch.testing.assert_close(result[begin:end], expected, rtol=0, atol=0)


DIFFERENT: list[list[Codec | None]] = [
    [Int8(), Int8(block=64)],
    [Int8(), None],
    [TopK(0.01), TopK(0.02)],
    # The text in a header is short, but ends with a hash of all of it.
    [TopK(fraction) for fraction in (0.12345678901234567, 0.12345678901234569)],
]


@pytest.mark.parametrize("confirm", [False, True])
@pytest.mark.parametrize("codecs", DIFFERENT, ids=str)
def test_ranks_with_different_codecs_all_hear_of_it(codecs: list[Codec | None], confirm: bool) -> None:
    world = VirtualWorld(2, confirm=confirm, timeout=timedelta(seconds=30))
    for rank, work in enumerate(exchange(world, [torch.ones(1000)] * 2, codecs)):
        message = error_of(work.wait)
        assert "ranks disagree" in message
        for codec in codecs:
            assert codec is None or codec.backend.text[:20] in message, (rank, message)


# --- the functions of fogdist ---------------------------------------------------------------------------------


@on_ranks(3)
def test_every_form_takes_a_codec() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    codec = Int8(block=64)
    with Checks() as checks:
        for numel in (0, 10, 100_000, 600_001):
            x = [make_input(r, torch.float32, numel) for r in range(size)]
            others = [(rank - 1) % size, (rank + 1) % size]
            plan = NeighborPlan(rank, size, 0.5, sorted((o, 0.25) for o in others), [])
            expected, _ = expected_at(codec, plan, x, "exact")
            weights: dict[str, Any] = {
                "self_weight": 0.5,
                "src_weights": dict.fromkeys(others, 0.25),
                "dst_weights": others,
                "compression": codec,
            }
            for given in (x[rank].clone(), fogdist.share_(x[rank].clone())):
                checks.equal(f"{numel}", fogdist.neighbor_allreduce(given, **weights), expected)
                work = fogdist.neighbor_allreduce([given], async_op=True, **weights)
                work.wait()
                checks.equal(f"{numel} list", work.get_future().value(), [expected])
                fogdist.neighbor_allreduce(given, out=given, async_op=True, **weights).wait()
                checks.equal(f"{numel} in place", given, expected)
            strided = torch.stack([x[rank], x[rank]], 1)[:, 0]
            checks.equal(f"{numel} strided", fogdist.neighbor_allreduce(strided, **weights), expected)


@on_ranks(2)
def test_wrong_arguments_raise_before_anything_is_sent() -> None:
    fogdist.init()
    fogdist.set_topology(topology.ring(2))
    x = torch.ones(10)
    calls: list[tuple[Any, Any, type[Exception], str]] = [
        (x, "int8", TypeError, "compression must be a codec.*int8"),
        (x, Int8, TypeError, "compression must be a codec.*Int8"),
        (x.to(torch.complex64), Int8(), ValueError, "Int8.*complex64"),
        ([x, x.to(torch.complex128)], TopK(0.1), ValueError, "TopK.*complex128"),
        (x.to("meta"), Int8(), ValueError, "meta"),
    ]
    for tensor, codec, error, words in calls:
        for is_async in (False, True):
            with pytest.raises(error, match=words):
                fogdist.neighbor_allreduce(tensor, compression=codec, async_op=is_async)  # type: ignore[call-overload]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    plan = NeighborPlan(dist.get_rank(), 2, 1.0, [], [])
    codec = Int8().backend
    for wrong, words in (
        ({"decoded": x.clone()}, "decoded.*without compression"),
        ({"conserve": True}, "conserve.*without compression"),
        ({"compression": codec, "decoded": x}, "decoded"),
        ({"compression": codec, "decoded": torch.ones(9)}, "decoded.*shape"),
        ({"compression": codec, "decoded": x.double()}, "decoded.*dtype"),
        ({"compression": codec, "decoded": x.clone(), "conserve": True}, "conserve.*decoded"),
    ):
        with pytest.raises(ValueError, match=words):
            backend.neighbor_allreduce(x, plan, **wrong)
    torch.testing.assert_close(fogdist.neighbor_allreduce(x, compression=Int8()), x, rtol=1e-4, atol=0)


# --- algorithms -----------------------------------------------------------------------------------------------


def at_rest(values: Tensor) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a model with these parameters, and an optimizer that does not move them: its steps only mix."""
    model = torch.nn.Linear(len(values), 1, bias=False)
    model.weight.data = values[None].clone()
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, numel: int) -> None:
    model(torch.ones(1, numel)).sum().backward()
    optimizer.step()


@on_ranks(4)
def test_algorithms_mix_compressed_values() -> None:
    fogdist.init(topology.ring)
    rank, size = fogdist.rank(), fogdist.size()
    x = [make_input(r, torch.float32, 300) for r in range(size)]
    sources = [((rank + hop) % size, 1 / 3) for hop in (1, 3)]
    plan = NeighborPlan(rank, size, 1 / 3, sources, [])
    with Checks() as checks:
        for codec in (Int8(), Float16()):
            expected, _ = expected_at(codec, plan, x, "conserve")
            for algorithm in (DecentralizedSGD, GradientTracking):
                model, plain = at_rest(x[rank])
                step(
                    model,
                    algorithm(plain, model, topology=Neighbors(compression=codec), broadcast=False),
                    300,
                )
                checks.close(f"{algorithm} {codec}", model.weight.detach()[0], expected)
            model, plain = at_rest(x[rank])
            wrapped = fogdist.DecentralizedDataParallel(model, plain, compression=codec, broadcast=False)
            step(wrapped, wrapped.optimizer, 300)
            wrapped.close()
            checks.close(f"wrapper {codec}", model.weight.detach()[0], expected)


@on_ranks(2)
def test_ranks_compare_the_codecs_of_algorithms() -> None:
    fogdist.init()
    rank = fogdist.rank()
    model, plain = at_rest(torch.ones(300))
    mixing = Neighbors(topology.ring(2), compression=Int8(block=64 * (1 + rank)))
    with pytest.raises(ValueError, match="compression"):
        DecentralizedSGD(plain, model, topology=mixing)
    fogdist.set_topology(topology.ring(2))
    with pytest.raises(ValueError, match="compression must be None with patience"):
        fogdist.DecentralizedDataParallel(model, plain, compression=Int8(), patience=1.0)
    with pytest.raises(ValueError, match="compression must be None with patience"):
        DecentralizedSGD(plain, model, topology=Neighbors(compression=Int8()), patience=1.0)
    for refusing, optimizer in ((DecentralizedAdamW, torch.optim.AdamW), (PushSumSGD, torch.optim.SGD)):
        with pytest.raises(ValueError, match="compression.*Int8"):
            refusing(optimizer(model.parameters(), lr=0.1), model, topology=Neighbors(compression=Int8()))
    with pytest.raises(TypeError, match="compression must be a codec"):
        Machines(compression=8)  # type: ignore[arg-type]
    assert repr(Machines(compression=Int8())) == "Machines(compression=Int8(block=256))"


# --- between hosts --------------------------------------------------------------------------------------------


def exchange_between_hosts(numel: int) -> None:
    """Messages that come in several parts, which end within blocks."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    x = [make_input(r, torch.float32, numel) for r in range(size)]
    fogdist.set_topology(topology.fully_connected(size))
    others = [r for r in range(size) if r != rank]
    plan = NeighborPlan(rank, size, 0.4, [(r, 0.6 / len(others)) for r in others], [])
    with Checks() as checks:
        for codec in (Int8(), Float16(), TopK(0.3)):
            expected, _ = expected_at(codec, plan, x, "exact")
            for given in (x[rank], [x[rank]]):
                found = fogdist.neighbor_allreduce(
                    given,
                    self_weight=0.4,
                    src_weights=dict.fromkeys(others, 0.6 / len(others)),
                    compression=codec,
                )
                found = found[0] if isinstance(found, list) else found
                checks.equal(repr(codec), found, expected)


def test_messages_between_hosts_come_in_parts(tmp_path: Path) -> None:
    run_on_hosts(tmp_path, [0, 1, 1], __name__, [("exchange_between_hosts", [9_000_001])])


def exchange_between_machines(numel: int) -> None:
    """The slices of means are encoded, and an algorithm mixes so."""
    fogdist.init()
    rank = fogdist.rank()
    x = [make_input(r, torch.float32, numel) for r in range(4)]
    fogdist.set_machine_topology(topology.ring(2))
    machine, cut = rank // 2, numel // 2
    means = [((x[2 * m].double() + x[2 * m + 1].double()) / 2).float() for m in range(2)]
    found = fogdist.hierarchical_neighbor_allreduce(x[rank], compression=Int8())
    model, plain = at_rest(x[rank])
    step(model, DecentralizedSGD(plain, model, topology=Machines(compression=Int8()), broadcast=False), numel)
    plan = NeighborPlan(machine, 2, 0.5, [(1 - machine, 0.5)], [])
    for begin, end in ((0, cut), (cut, numel)):
        slices = [mean[begin:end] for mean in means]
        assert torch.equal(found[begin:end], expected_at(Int8(), plan, slices, "exact")[0])
        conserved, _ = expected_at(Int8(), plan, slices, "conserve")
        torch.testing.assert_close(model.weight.detach()[0, begin:end], conserved, rtol=1e-6, atol=1e-6)


def test_machines_exchange_compressed_means(tmp_path: Path) -> None:
    run_on_hosts(tmp_path, [0, 0, 1, 1], __name__, [("exchange_between_machines", [100_001])])
