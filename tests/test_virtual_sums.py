"""Tests of sums on virtual ranks, over all kinds of layouts: equal bits on all ranks, and messages and bytes counted.

tests/test_arithmetic.py and tests/test_collectives.py check the bits of the few ranks that sum directly. These tests
check the algorithms for many ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import sizes
from operations import OF_BACKEND, PREMUL_FACTOR, reduce_op, reductions
from reference import DTYPES, HALVES, make_input, reduce
from test_virtual_ranks import run
from torch import Tensor

from fog_pg._C import ProcessGroupFog, VirtualWorld

# Numbers of float32 elements: sent whole, cut into few parts, and large enough that every rank has a part.
NUMELS = (3, 2_500, 20_000, 120_000)
FLOAT = 4


def layouts(size: int) -> dict[str, list[int]]:
    """Returns the host of each rank, numbered by first appearance."""
    random = np.random.default_rng(size)
    return {
        "one host": [0] * size,
        "a host each": list(range(size)),
        "three a host": [rank // 3 for rank in range(size)],
        "in turn on two": [rank % 2 for rank in range(size)],
        "anywhere": by_appearance(random.integers(0, max(1, size // 4), size).tolist()),
        "one alone": [0] * (size - 1) + [1],
    }


def by_appearance(hosts: Sequence[int]) -> list[int]:
    numbers: dict[int, int] = {}
    return [numbers.setdefault(host, len(numbers)) for host in hosts]


def allreduce(world: VirtualWorld, inputs: list[Tensor], op: dist.ReduceOp) -> list[Tensor]:
    outputs = [tensor.clone() for tensor in inputs]
    run(world, lambda rank, group: OF_BACKEND.all_reduce(outputs[rank], op, group))
    return outputs


def reduce_to(world: VirtualWorld, root: int, inputs: list[Tensor], op: dist.ReduceOp) -> Tensor:
    outputs = [tensor.clone() for tensor in inputs]
    run(world, lambda rank, group: OF_BACKEND.reduce(outputs[rank], op, group, root))
    for rank, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
        assert rank == root or same_bits(output, given), f"rank {rank}'s tensor has changed"
    return outputs[root]


def scatter(world: VirtualWorld, inputs: list[Tensor], numels: list[int], op: dist.ReduceOp) -> Tensor:
    """Runs reduce_scatter with unequal parts; returns the results, joined."""
    outputs = [inputs[0].new_zeros(numel) for numel in numels]
    given = [tensor.clone() for tensor in inputs]
    parts = [list(tensor.split(numels)) for tensor in given]
    run(world, lambda rank, group: OF_BACKEND.reduce_scatter(outputs[rank], parts[rank], op, group))
    assert all(same_bits(*pair) for pair in zip(inputs, given, strict=True)), "an input has changed"
    return torch.cat(outputs)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check_all_alike(outputs: list[Tensor], label: str) -> Tensor:
    for rank, output in enumerate(outputs):
        assert same_bits(output, outputs[0]), f"{label}: rank {rank} has other bits than rank 0"
    return outputs[0]


def check(label: str, actual: Tensor, inputs: list[Tensor], name: str, factor: float = 1.0) -> None:
    """Checks exactly if the order does not matter, otherwise within the roundings of log2(n) sums."""
    expected = reduce(inputs, name, factor)
    dtype = inputs[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex) or name in ("MIN", "MAX"):
        assert torch.equal(actual, expected.to(dtype)), f"{label}: wrong"
        return
    wide = actual.to(expected.dtype)
    if name == "PRODUCT":
        size = expected.abs()
    else:
        size = torch.stack([tensor.to(expected.dtype).abs() for tensor in inputs]).sum(0) * factor
        size = size / len(inputs) if name == "AVG" else size
    parts = torch.finfo(dtype).eps * (len(inputs) if dtype not in HALVES else math.log2(len(inputs)) + 2)
    worst = ((wide - expected).abs() - parts * size).max()
    assert worst <= 0, f"{label}: off by {worst} more than rounding explains"


COUNTS = [2, 3, 5, 8, 9, 13, 17, 24, 32, 39]


@pytest.mark.parametrize("size", sizes(COUNTS, [count for count in range(2, 41) if count not in COUNTS]))
def test_equal_bits_on_every_layout(size: int) -> None:
    """A second run, in which messages come in another order, gives the same bits."""
    for name, hosts in layouts(size).items():
        worlds = [VirtualWorld(size, hosts=hosts), VirtualWorld(size, hosts=hosts, seed=size, most_delay=5)]
        for numel in NUMELS if size in (5, 9, 39) else NUMELS[:3]:
            label = f"{size} ranks, {name}, {numel}"
            inputs = [make_input(rank, torch.float32, (numel,), seed=numel) for rank in range(size)]
            first, second = (
                check_all_alike(allreduce(world, inputs, dist.ReduceOp.SUM), label) for world in worlds
            )
            assert same_bits(first, second), f"{label}: another run gave other bits"
            check(label, first, inputs, "SUM")

            root = numel % size
            first, second = (reduce_to(world, root, inputs, dist.ReduceOp.SUM) for world in worlds)
            assert same_bits(first, second), f"reduce, {label}: another run gave other bits"
            check(f"reduce to {root}, {label}", first, inputs, "SUM")

            cuts = np.sort(np.random.default_rng(size).integers(0, numel + 1, size - 1))
            numels = np.diff([0, *cuts, numel]).tolist()
            first, second = (scatter(world, inputs, numels, dist.ReduceOp.SUM) for world in worlds)
            assert same_bits(first, second), f"reduce_scatter, {label}: another run gave other bits"
            check(f"reduce_scatter, {label}", first, inputs, "SUM")


@pytest.mark.parametrize("hosts", [[0, 1, 1, 0, 1, 2], [*range(11), 0, 3, 0]], ids=len)
@pytest.mark.parametrize("seed", [1, 2])
def test_parts_side_by_side(hosts: list[int], seed: int) -> None:
    """A tensor goes in three parts, whose messages overtake each other."""
    size, numel = len(hosts), 1_700_001
    plain, late = VirtualWorld(size, hosts=hosts), VirtualWorld(size, hosts=hosts, seed=seed, most_delay=7)
    inputs = [make_input(rank, torch.float32, (numel,), seed=seed) for rank in range(size)]
    first, second = (
        check_all_alike(allreduce(world, inputs, dist.ReduceOp.SUM), str(size)) for world in (plain, late)
    )
    assert same_bits(first, second)
    check(f"{size} ranks", first, inputs, "SUM")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hosts", [12 * [0], 2 * list(range(11)) + [3, 5], 3 * [0] + 2 * [1] + [2]], ids=len)
def test_every_reduction(hosts: list[int], dtype: torch.dtype) -> None:
    """On one host, on many hosts of two or three ranks, and on three hosts of one to three ranks."""
    size = len(hosts)
    world = VirtualWorld(size, hosts=hosts)
    for name in reductions(dtype):
        op, factor = reduce_op(name), PREMUL_FACTOR if name == "PREMUL_SUM" else 1.0
        for numel in (5, 30_000):
            label = f"{name} of {numel}"
            inputs = [make_input(rank, dtype, (numel,), seed=3) for rank in range(size)]
            check(label, check_all_alike(allreduce(world, inputs, op), label), inputs, name, factor)
            check(f"reduce, {label}", reduce_to(world, size - 1, inputs, op), inputs, name, factor)
            numels = [numel // size + (rank < numel % size) for rank in range(size)]
            check(f"reduce_scatter, {label}", scatter(world, inputs, numels, op), inputs, name, factor)


def test_halves_of_few_bytes_are_rounded_once() -> None:
    """Sums 1 + 2^-12 + 2^-12 + ...: float16 loses each small term, float32 loses none."""
    hosts = [rank // 2 for rank in range(24)]
    world = VirtualWorld(24, hosts=hosts)
    for numel in (1, 4096):
        inputs = [torch.full((numel,), 1.0 if rank == 0 else 2.0**-12).half() for rank in range(24)]
        result = check_all_alike(allreduce(world, inputs, dist.ReduceOp.SUM), str(numel))
        assert torch.equal(result, torch.full((numel,), 1 + 23 * 2.0**-12).half())


@pytest.mark.parametrize("numel", [100, 100_000])
def test_means_of_float16_do_not_overflow(numel: int) -> None:
    world = VirtualWorld(24, ranks_per_host=2)
    inputs = [torch.full((numel,), 40_000.0).half() for _ in range(24)]
    assert torch.equal(allreduce(world, inputs, dist.ReduceOp.AVG)[7], inputs[0])


def test_parts_of_a_group() -> None:
    """Even and odd ranks sum separately; both have ranks on all hosts."""
    size = 30
    world = VirtualWorld(size, hosts=[rank // 3 for rank in range(size)])
    machines = [list(range(first, size, 2)) for first in (0, 1)]
    for numel in NUMELS:
        inputs = [make_input(rank, torch.float32, (numel,), seed=1) for rank in range(size)]
        outputs = [tensor.clone() for tensor in inputs]
        run(world, lambda rank, group: group.local_allreduce(outputs[rank], machines, dist.ReduceOp.SUM))
        for members in machines:
            result = check_all_alike([outputs[rank] for rank in members], f"{members} of {numel}")
            check(f"{members} of {numel}", result, [inputs[rank] for rank in members], "SUM")


# --- failures ---

FAILING = {"one host": [0] * 20, "many hosts": [*range(11), *range(9)], "uneven": [0] * 9 + [1] * 3 + [2]}


@pytest.mark.parametrize("hosts", FAILING.values(), ids=FAILING)
@pytest.mark.parametrize(
    ("numel", "other"), [(5, 6), (5, 300_000), (300_000, 5), (3_000, 4_000), (20_000, 0)]
)
def test_ranks_that_disagree_end(hosts: list[int], numel: int, other: int) -> None:
    """Ranks that disagree get an error, also if sums of the two sizes use different algorithms."""
    size = len(hosts)
    for different in (0, size // 2, size - 1):
        for call in ("allreduce", "reduce"):
            world = VirtualWorld(size, hosts=hosts, confirm=True)
            works = [
                getattr(group, call)([torch.ones(other if rank == different else numel)])
                for rank, group in enumerate(world.groups)
            ]
            world.progress()
            for rank, work in enumerate(works):
                where = f"{call}, rank {different} is different: rank {rank}"
                assert work.is_completed(), f"{where} waits"
                # A rank that only sends learns of the root's call only, and need not wait for more.
                if call == "reduce" and different != 0 and rank not in (0, different):
                    continue
                with pytest.raises(dist.DistBackendError, match="ranks disagree") as error:
                    work.wait()
                assert all(f"float32[{count}]" in str(error.value) for count in (numel, other)), where


@pytest.mark.parametrize("hosts", [[0] * 16, list(range(16)), [rank // 4 for rank in range(16)]], ids=str)
def test_inputs_divided_otherwise_are_refused(hosts: list[int]) -> None:
    """The error also comes if the messages have the same size, because parts of several ranks go together."""
    world = VirtualWorld(16, hosts=hosts)
    works = []
    for rank, group in enumerate(world.groups):
        numels = [2, 2, 1, 3, *[2] * 12] if rank == 5 else [2] * 16
        inputs = [torch.ones(numel) for numel in numels]
        works.append(group.reduce_scatter([torch.ones(numels[rank])], [inputs], dist.ReduceScatterOptions()))
    world.progress()
    for work in works:
        assert work.is_completed()
        with pytest.raises(dist.DistBackendError, match="ranks disagree"):
            work.wait()


@pytest.mark.parametrize("hosts", FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("numel", [3, 20_000])
def test_a_lost_rank_ends_a_sum(hosts: list[int], numel: int) -> None:
    size = len(hosts)
    for lost in (0, 1, size // 2, size - 1):
        world = VirtualWorld(size, hosts=hosts, seed=lost, most_delay=3)
        works = [
            group.allreduce([torch.ones(numel)]) for rank, group in enumerate(world.groups) if rank != lost
        ]
        world.progress()
        assert not any(work.is_completed() for work in works)
        world.lose(lost)
        world.progress()
        for work in works:
            with pytest.raises(dist.DistBackendError, match=rf"rank {lost} .*was lost"):
                work.wait()


# --- messages and bytes


def counted(
    world: VirtualWorld, start: Callable[[int, ProcessGroupFog], Any]
) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns the messages and bytes between each pair of ranks for one operation."""
    before = world.sent
    run(world, start)
    return {
        pair: (messages - before.get(pair, (0, 0))[0], count - before.get(pair, (0, 0))[1])
        for pair, (messages, count) in world.sent.items()
        if messages > before.get(pair, (0, 0))[0]
    }


@pytest.mark.parametrize(
    "hosts",
    [
        [0, 1],
        [0, 0, 1, 1],
        [0, 0, 0, 1],
        [0, 1, 2],
        [0, 1, 2, 0, 1, 2],
        [0, 0, 0, 1, 1, 2],
        [*range(12), *range(9)],
    ],
    ids=str,
)
def test_a_link_carries_no_more_than_the_least(hosts: list[int]) -> None:
    """A host sends 2 (H - 1)/H tensors for an allreduce, and (H - 1)/H for a reduce_scatter."""
    size, count = len(hosts), max(hosts) + 1
    world = VirtualWorld(size, hosts=hosts)
    numel = size * (1 << 20) // FLOAT // 4
    inputs = [torch.ones(numel) for _ in range(size)]

    def from_hosts(sent: dict[tuple[int, int], tuple[int, int]]) -> list[float]:
        bytes_of = [0.0] * count
        for (source, to), (_, sent_bytes) in sent.items():
            if hosts[source] != hosts[to]:
                bytes_of[hosts[source]] += sent_bytes / (numel * FLOAT)
        return bytes_of

    least = (count - 1) / count
    for tensors in from_hosts(counted(world, lambda rank, group: group.allreduce([inputs[rank]]))):
        assert tensors == pytest.approx(2 * least, rel=1e-4)
    outputs = [torch.ones(numel // size) for _ in range(size)]
    total = dist.ReduceOp.SUM
    scattered = from_hosts(
        counted(
            world,
            lambda rank, group: OF_BACKEND.reduce_scatter_tensor(outputs[rank], inputs[rank], total, group),
        )
    )
    # The parts of a host's own ranks do not leave it.
    assert sum(scattered) == pytest.approx(count - 1, rel=1e-4)
