"""Codecs by torch's operations, as tensors on a GPU use them: the bytes of the CPU's loops, and the values."""

from __future__ import annotations

import math

import pytest
import torch
from fogdist.compression import (
    BFloat16,
    Codec,
    Float8,
    Float16,
    Int4,
    Int8,
    Moniqua,
    RandomK,
    Sign,
    TopK,
)
from harness import case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fog_pg  # noqa: F401  loads the extension

INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
SIZES = [0, 1, 7, 15, 17, 255, 256, 257, 1025, 4099]
CODECS: list[Codec] = [
    Float16(),
    BFloat16(),
    *(
        Float8(format, block=b, stochastic=s)
        for format in ("e4m3", "e5m2")
        for b, s in ((256, False), (40, True))
    ),
    Int8(),
    Int8(block=8),
    Int8(block=1000, stochastic=True, seed=3),
    Int4(block=64),
    Int4(block=8192, stochastic=True, seed=(1 << 32) - 1),
    Sign(),
    Sign(block=8),
    Sign(block=2056),
    Sign(block=128, stochastic=True),
    *(Moniqua(2.0, bits) for bits in (1, 2, 4, 8)),
    TopK(0.01),
    TopK(k=5),
    TopK(0.3),
    TopK(1.0),
    *(TopK(fraction, bits=bits) for fraction in (0.3, 1.0) for bits in (2, 4, 8)),
    RandomK(0.1, seed=9),
    RandomK(k=3),
    RandomK(1.0),
]
# Zeros, subnormal numbers, the largest ones, infinity, and NaN with both signs.
SPECIAL = [0.0, -0.0, 1e-40, -1e-45, 1e-300, 2.0**-24, -65519.0, 65520.0, 3.4e38, -1e300, math.inf, -math.inf]


def by_operations(codec: Codec, tensor: Tensor, counter: int = 0, rank: int = 0) -> Tensor:
    message = torch.full((codec.bytes(tensor.numel(), tensor.dtype),), 0xA5, dtype=torch.uint8)
    codec.backend.encode(tensor, message, counter, rank, by_operations=True)
    return message


def check_same(codec: Codec, tensor: Tensor, near: Tensor, counter: int = 0, rank: int = 0) -> None:
    """Compares the message with that of the loops, and then what both decode of it."""
    expected = codec.encode(tensor, counter=counter, rank=rank)
    before = [each.clone().view(INTEGERS[tensor.dtype]) for each in (tensor, near)]
    message = by_operations(codec, tensor, counter, rank)
    different = (message != expected).nonzero().flatten().tolist()
    assert different == [], (codec, tensor.dtype, tensor.numel(), different[:5])
    beside = near if isinstance(codec, Moniqua) else None
    values = codec.decode(expected, tensor.shape, tensor.dtype, near=beside)
    found = torch.full_like(values, 7)
    codec.backend.decode(expected, found, beside, by_operations=True)
    torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)
    for each, bits in zip((tensor, near), before, strict=True):
        assert torch.equal(each.view(bits.dtype), bits)  # is not changed
    signs = [
        torch.signbit(each.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)) for each in (found, values)
    ]
    assert torch.equal(*signs)  # of zeros too


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_bytes_and_values_are_those_of_the_loops(codec: Codec) -> None:
    for dtype in INTEGERS:
        for numel in SIZES:
            for scale in (1.0, 1e-7, 1e-39, 1e30):
                with case(dtype=dtype, numel=numel, scale=scale):
                    generator = torch.Generator().manual_seed(numel)
                    wide = torch.randn(2, numel, dtype=torch.float64, generator=generator)
                    tensor, near = (wide * scale).to(dtype).unbind()
                    check_same(codec, tensor, near + tensor.sign(), counter=numel << 31, rank=numel << 7)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_is_not_an_ordinary_number(codec: Codec) -> None:
    for dtype in INTEGERS:
        special = torch.tensor([*SPECIAL, math.nan], dtype=torch.float64).to(dtype)
        special = torch.cat([special, -special[-1:]])
        for each in special:
            with case(dtype=dtype, value=each.item()):
                tensor = torch.linspace(-1, 1, 700, dtype=torch.float64).to(dtype)
                tensor[300] = each
                check_same(codec, tensor, torch.zeros_like(tensor))
                check_same(codec, each.expand(300).clone(), torch.zeros(300, dtype=dtype))
                check_same(codec, torch.zeros_like(tensor), tensor)
        check_same(codec, special.repeat(20), special.repeat(20).flip(0))


@pytest.mark.parametrize("codec", [TopK(k=40), TopK(0.7)], ids=repr)
def test_of_equal_magnitudes_the_first_are_sent(codec: Codec) -> None:
    for dtype in INTEGERS:
        tensor = torch.tensor([1.0, -2.0, 2.0, 0.5], dtype=dtype).repeat(500)
        check_same(codec, tensor, tensor)


@pytest.mark.parametrize("numel", [70_000, 300_001])
def test_large_tensors(numel: int) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    for codec in (
        Int8(stochastic=True),
        Int4(),
        Sign(block=8192),
        TopK(0.001),
        TopK(0.1, bits=2),
        RandomK(0.01),
        Float16(),
    ):
        with case(codec=codec):
            check_same(codec, tensor, tensor, counter=(1 << 44) - 1, rank=(1 << 20) - 1)


@settings(max_examples=300, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(list(INTEGERS)),
    numel=st.integers(0, 3000),
    seed=st.integers(0, 1 << 32),
    counter=st.integers(0, (1 << 44) - 1),
    rank=st.integers(0, (1 << 20) - 1),
    plain=st.booleans(),
)
def test_any_bits(
    codec: Codec, dtype: torch.dtype, numel: int, seed: int, counter: int, rank: int, plain: bool
) -> None:
    """Tensors of random bits, with NaN and infinity or without them."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    drawn = torch.randint(0, 256, (2, numel * size), dtype=torch.uint8, generator=generator)
    tensor, near = (part.clone().view(dtype) for part in drawn)
    if plain:
        tensor, near = (torch.where(each.isfinite(), each, 0.0).to(dtype) for each in (tensor, near))
    check_same(codec, tensor, near, counter, rank)


def test_messages_at_odd_places_are_read() -> None:
    """A message may begin anywhere in its memory, and a tensor may have strides."""
    tensor = torch.randn(2, 1000, generator=torch.Generator().manual_seed(2)).t()
    for codec in (Int8(), Float16(), TopK(0.1), RandomK(0.1)):
        expected = codec.encode(tensor)
        assert torch.equal(by_operations(codec, tensor), expected), codec
        memory = torch.zeros(expected.numel() + 1, dtype=torch.uint8)
        memory[1:] = expected
        found = torch.empty(1000, 2)
        codec.backend.decode(memory[1:], found, by_operations=True)
        assert torch.equal(found, codec.decode(expected, (1000, 2))), codec


def test_a_message_that_is_not_valid_raises() -> None:
    codec = TopK(0.1)
    message = codec.encode(torch.randn(1000))
    message[-100:] = 0
    with pytest.raises(ValueError, match="message"):
        codec.backend.decode(message, torch.empty(1000), by_operations=True)
