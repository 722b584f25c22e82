"""Plain single-process references for distributed results.

Inputs are a function of (rank, dtype, shape, seed), so any process can compute the contribution of every rank. Integer
reductions wrap around as in C. Floating ones are computed in float64 or complex128, and sums also as the backend
promises to add them: in rank order, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]

# Relative and absolute error of a reduction over up to 8 ranks, for values of about 1, in each type.
_TOLERANCES = {
    torch.float16: (2e-3, 4e-3),
    torch.bfloat16: (1.6e-2, 3e-2),
    torch.float32: (2e-6, 2e-6),
    torch.float64: (4e-15, 4e-15),
    torch.complex64: (2e-6, 2e-6),
    torch.complex128: (4e-15, 4e-15),
}

_INTEGER_REDUCTIONS = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_BOOL_REDUCTIONS = {
    "SUM": np.logical_or,
    "MAX": np.logical_or,
    "BOR": np.logical_or,
    "PRODUCT": np.logical_and,
    "MIN": np.logical_and,
    "BAND": np.logical_and,
    "BXOR": np.logical_xor,
}


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Returns the relative and absolute tolerance of reductions in ``dtype``; zeros for exact types."""
    return _TOLERANCES.get(dtype, (0.0, 0.0))


def make_input(rank: int, dtype: torch.dtype, shape: int | Sequence[int], seed: int = 0) -> Tensor:
    """Returns the tensor of ``rank``: any bits for integers, magnitudes in [0.5, 1.5] for floats."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    return _flat_input(rank, dtype, math.prod(sizes), seed).clone().reshape(sizes)


def forget_inputs() -> None:
    """Frees the cached inputs."""
    _flat_input.cache_clear()


@functools.lru_cache(maxsize=256)
def _flat_input(rank: int, dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * rank + 104729 * seed + numel)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).to(torch.bool)
    if not dtype.is_floating_point and not dtype.is_complex:
        bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return bits.view(dtype)
    parts = 2 if dtype.is_complex else 1
    values = torch.rand(parts * numel, dtype=torch.float64, generator=generator)
    signs = torch.randint(0, 2, (parts * numel,), generator=generator) * 2 - 1
    values = (values + 0.5) * signs
    return torch.view_as_complex(values.view(-1, 2)).to(dtype) if dtype.is_complex else values.to(dtype)


def wide(tensor: Tensor) -> Tensor:
    """Returns the tensor in the type of references: complex128 or float64."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def reduce(inputs: Sequence[Tensor], op: str, factor: float = 1.0) -> Tensor:
    """Reduces one tensor of each rank.

    Args:
        inputs: Tensors of one shape and dtype, in rank order.
        op: Name of a ``ReduceOp``.
        factor: Factor of the inputs for PREMUL_SUM.

    Returns:
        The result, in the inputs' dtype for integers and bool, otherwise in float64 or complex128 without rounding.
    """
    dtype = inputs[0].dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        table = _BOOL_REDUCTIONS if dtype == torch.bool else _INTEGER_REDUCTIONS
        if op == "AVG":
            return torch.from_numpy(_truncated(reduce(inputs, "SUM").numpy(), len(inputs)))
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.asarray(functools.reduce(table[op], [t.numpy() for t in inputs])))
    values = [wide(t) for t in inputs]
    if op == "PREMUL_SUM":
        values = [v * factor for v in values]
    if op in ("SUM", "AVG", "PREMUL_SUM"):
        total = functools.reduce(torch.add, values)
        return total / len(values) if op == "AVG" else total
    return functools.reduce({"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}[op], values)


def _truncated(total: np.ndarray, count: int) -> np.ndarray:
    """Returns the quotient as C divides: towards zero, while NumPy rounds down."""
    quotient, rest = np.divmod(total, total.dtype.type(count))
    return np.asarray(quotient + ((rest != 0) & (quotient < 0)).astype(total.dtype))


def sum_in_rank_order(inputs: Sequence[Tensor]) -> Tensor:
    """Returns the exact bits of a SUM: added in rank order in the dtype; 16-bit floats in float32, rounded once."""
    dtype = inputs[0].dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        return reduce(inputs, "SUM")
    between = torch.float32 if dtype in HALVES else dtype
    return functools.reduce(torch.add, [t.to(between) for t in inputs]).to(dtype)


def mix(inputs: Sequence[Tensor], weights: np.ndarray) -> list[Tensor]:
    """Applies a mixing matrix in float64.

    Args:
        inputs: One tensor of each rank, all of one shape.
        weights: ``weights[i, j]`` is the weight of edge i -> j, so rank j receives column j.

    Returns:
        For each rank j the sum over i of ``weights[i, j] * inputs[i]``, in float64 or complex128.
    """
    stacked = torch.stack([wide(t) for t in inputs])
    matrix = torch.from_numpy(np.asarray(weights, dtype=np.float64)).to(stacked.dtype)
    return list(torch.tensordot(matrix.T, stacked, dims=1))


class Checks:
    """Compares many tensors inside one rank function and raises once, at the end.

    If a rank stopped at its first difference, the others would wait for it in the next operation.
    """

    _SHOWN = 8

    def __init__(self) -> None:
        self._failures: list[str] = []
        self._count = 0

    def __enter__(self) -> Checks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._failures:
            shown = "\n".join(self._failures[: self._SHOWN])
            raise AssertionError(f"{len(self._failures)} of {self._count} checks failed:\n{shown}")

    def true(self, label: str, condition: bool) -> None:
        """Checks a condition."""
        self._check(label, condition, "false")

    def equal(self, label: str, actual: object, expected: object) -> None:
        """Checks that two values are equal; tensors, also in lists, must have the same dtype, shape and bits."""
        if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
            problem = f"length {len(actual)} instead of {len(expected)}"
            self._check(label, len(actual) == len(expected), problem)
            for index, (got, want) in enumerate(zip(actual, expected, strict=False)):
                self.equal(f"{label}[{index}]", got, want)
        elif isinstance(expected, Tensor) and isinstance(actual, Tensor):
            if actual.dtype != expected.dtype:
                self._check(label, False, f"{actual.dtype} instead of {expected.dtype}")
            else:
                self._compare(label, actual, expected, _bits_differ)
        else:
            self._check(label, actual == expected, f"got {actual!r} instead of {expected!r}")

    def close(
        self, label: str, actual: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor]
    ) -> None:
        """Checks a reduction, or a list of them, against its reference with its dtype's tolerance (integers: none)."""
        if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
            problem = f"length {len(actual)} instead of {len(expected)}"
            self._check(label, len(actual) == len(expected), problem)
            for index, (got, want) in enumerate(zip(actual, expected, strict=False)):
                self.close(f"{label}[{index}]", got, want)
            return
        if not actual.is_floating_point() and not actual.is_complex():
            self.equal(label, actual, expected)
            return
        rtol, atol = tolerance(actual.dtype)

        def differ(got: Tensor, want: Tensor) -> Tensor:
            return ~torch.isclose(wide(got), wide(want), rtol, atol, equal_nan=True)

        self._compare(label, actual, expected, differ)

    def _compare(
        self, label: str, actual: Tensor, expected: Tensor, differ: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        if actual.shape != expected.shape:
            self._check(label, False, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
            return
        got, want = (each.detach().cpu().reshape(-1) for each in (actual, expected))
        wrong = differ(got, want).nonzero().flatten().tolist()
        shown = ", ".join(f"[{i}] {got[i].item()} instead of {want[i].item()}" for i in wrong[:3])
        self._check(label, not wrong, f"{len(wrong)} of {got.numel()} elements differ: {shown}")

    def _check(self, label: str, condition: bool, problem: str) -> None:
        self._count += 1
        if not condition:
            self._failures.append(f"{label}: {problem}")


def _bits_differ(got: Tensor, want: Tensor) -> Tensor:
    return (_bytes(got) != _bytes(want)).any(-1)


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a flat tensor, one row per element."""
    dense = tensor.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8).view(tensor.numel(), tensor.element_size())


def top_k(values: np.ndarray, k: int, bits: int = 32) -> np.ndarray:
    """Returns what `fogdist.compression.TopK` decodes to, for numbers that float32 holds."""
    decoded = np.zeros_like(values)
    chosen = np.sort(np.argsort(-np.abs(values), kind="stable")[:k])
    if bits == 32:
        decoded[chosen] = values[chosen]
        return decoded
    for begin in range(0, len(chosen), 512):
        places = chosen[begin : begin + 512]
        decoded[places] = _in_two_bits(values[places].astype(np.float32))
    return decoded


def _in_two_bits(values: np.ndarray) -> np.ndarray:
    sizes = np.abs(values).astype(np.float64)
    above = sizes > sizes.mean()
    low = 0.0 if sizes.min() == 0 else np.float32(sizes[~above].mean())
    high = np.float32(sizes[above].mean()) if above.any() else low
    return np.copysign(np.where(above, high, low).astype(np.float32), values)
