"""Tests every reduction and weighted sum, bit for bit, with each set of CPU instructions that fog has code for.

The references add in rank order with plain torch operations, in the type that the documentation names. Random bits in
the inputs give subnormal numbers, infinities, NaN and results that overflow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from harness import WorldPool, sizes
from operations import reductions
from reference import COMPLEX, DTYPES, FLOATS, HALVES, Checks, make_input
from torch import Tensor

SIZES = [0, 1, 7, 8, 9, 1023, 1025, 100_003]
# None is exact in any type, so rounding a product at another place gives other bits.
FACTORS = [0.3, -1.7, 0.9]


def any_bits(rank: int, dtype: torch.dtype, numel: int) -> Tensor:
    """Returns integers of any bits; of floating numbers, every third has any bits and the others have usual sizes."""
    values = make_input(rank, dtype, numel)
    if dtype.is_floating_point or dtype.is_complex:
        generator = torch.Generator().manual_seed(rank + 31 * numel)
        size = (numel * dtype.itemsize,)
        bits = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)
        values[rank::3] = bits[rank::3]
    return values


def parts(tensor: Tensor) -> Tensor:
    """Returns complex numbers as twice as many real ones."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor


def nan_alike(tensor: Tensor) -> Tensor:
    """Replaces every NaN by the same one, because sign and payload are not part of a result; complex becomes real."""
    numbers = parts(tensor)
    if not numbers.is_floating_point():
        return numbers
    return torch.where(numbers.isnan(), torch.full((), torch.nan, dtype=numbers.dtype), numbers)


def smaller(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a != a) | (a < b), a, b)


def larger(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a != a) | (a > b), a, b)


def mean_of(total: Tensor, count: int) -> Tensor:
    """Divides by a tensor, because some torch versions turn another division into a product with 1/count."""
    return total / torch.full_like(total, count)


def reduced(inputs: Sequence[Tensor], op: str) -> Tensor:
    """Returns the bits that fog promises; complex numbers become real ones, as torch.distributed passes them on.

    Values are added in rank order in the dtype; 16-bit floats are added in float32 and rounded once.
    """
    dtype = inputs[0].dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        return reference.reduce(inputs, op)
    values = [parts(v) for v in inputs]
    dtype = values[0].dtype
    values = [v.to(torch.float32 if dtype in HALVES else dtype) for v in values]
    if op == "PREMUL_SUM":
        values = [v * torch.full_like(v, factor) for v, factor in zip(values, FACTORS, strict=False)]
    combine = {"PRODUCT": torch.mul, "MIN": smaller, "MAX": larger}.get(op, torch.add)
    total = functools.reduce(combine, values)
    return (mean_of(total, len(inputs)) if op == "AVG" else total).to(dtype)


def sweep_reductions(capability: str | None) -> None:
    assert capability is None or torch.backends.cpu.get_cpu_capability() == capability
    rank, size = dist.get_rank(), dist.get_world_size()
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    with Checks() as checks:
        for dtype in DTYPES:
            for name in reductions(dtype):
                op = getattr(dist.ReduceOp, name)
                if name == "PREMUL_SUM":
                    op = dist._make_nccl_premul_sum(FACTORS[rank])
                for numel in SIZES:
                    inputs = [any_bits(r, dtype, numel) for r in range(size)]
                    tensor = inputs[rank].clone()
                    if (
                        dtype.is_complex
                    ):  # dist.all_reduce would pass the parts, which are sums of real numbers
                        backend.allreduce_named(tensor, op).wait()
                    else:
                        dist.all_reduce(tensor, op)
                    expected = nan_alike(reduced(inputs, name))
                    checks.equal(f"{name} {dtype} of {numel}", nan_alike(tensor), expected)


def sweep_weighted_sums(capability: str | None) -> None:
    import fogdist

    assert capability is None or torch.backends.cpu.get_cpu_capability() == capability
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    # There are at most two others, so their order does not matter. The own tensor comes last.
    others = [r for r in range(size) if r != rank]
    with Checks() as checks:
        for dtype in [*FLOATS, *COMPLEX]:
            between = torch.float32 if dtype in HALVES else torch.float64
            for numel in SIZES:
                inputs = [any_bits(r, dtype, numel) for r in range(size)]
                values = [parts(v).to(between) for v in inputs]
                scaled = [v * torch.full_like(v, f) for v, f in zip(values, FACTORS, strict=False)]
                total = functools.reduce(torch.add, [scaled[r] for r in [*others, rank]])
                output = fogdist.neighbor_allreduce(
                    inputs[rank],
                    self_weight=FACTORS[rank],
                    src_weights={r: FACTORS[r] for r in others},
                    dst_weights=others,
                )
                expected = nan_alike(total.to(parts(output).dtype))
                checks.equal(f"weighted {dtype} of {numel}", nan_alike(output), expected)

                total = functools.reduce(torch.add, [values[r] for r in [*others, rank]])
                fogdist.set_topology(fogdist.topology.fully_connected(size))
                output = fogdist.neighbor_allreduce(inputs[rank])
                expected = nan_alike(mean_of(total, size).to(parts(output).dtype))
                checks.equal(f"mean {dtype} of {numel}", nan_alike(output), expected)


@pytest.fixture(scope="module", params=["native", "portable"])
def instructions(request: pytest.FixtureRequest) -> Iterator[tuple[WorldPool, str | None]]:
    """Makes worlds for one set of instructions, with the capability that torch must report in their ranks."""
    portable = request.param == "portable"
    pool = WorldPool(environment={"ATEN_CPU_CAPABILITY": "default"} if portable else None)
    yield pool, "DEFAULT" if portable else None
    pool.close()


@pytest.mark.parametrize("size", sizes([3], [2]))
@pytest.mark.parametrize("sweep", [sweep_reductions, sweep_weighted_sums], ids=lambda sweep: sweep.__name__)
def test_every_bit(
    instructions: tuple[WorldPool, str | None], size: int, sweep: Callable[[str | None], None]
) -> None:
    pool, capability = instructions
    pool(size).run(sweep, capability)
