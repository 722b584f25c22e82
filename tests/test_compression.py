"""Tests of the codecs by themselves: forms, bounds, NaN and infinity, bad arguments."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from codec_bounds import bound_of
from codec_lists import BLOCKS, CODECS, DTYPES, normal
from fogdist.compression import BFloat16, Codec, Float16, Int8, TopK
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import top_k
from torch import Tensor

import fog_pg  # noqa: F401  loads the extension

SIZES = [0, 1, 7, 8, 9, 255, 256, 257, 1023, 1025, 4099]


def through(codec: Codec, tensor: Tensor) -> Tensor:
    """Returns the decoded tensor, after a check of the message's size."""
    message = codec.encode(tensor)
    assert message.dtype == torch.uint8
    assert message.numel() == codec.bytes(tensor.numel(), tensor.dtype)
    return codec.decode(message, tensor.shape, tensor.dtype)


def check_bound(codec: Codec, tensor: Tensor, decoded: Tensor) -> None:
    """Checks the error of each element. A number that is not finite may be anything but another number."""
    bound = bound_of(codec, tensor)
    error = (decoded.double() - tensor.double()).abs()
    wrong = (error > bound) & bound.isfinite()
    worst = torch.where(wrong, error - bound, 0.0)
    place = int(worst.argmax()) if worst.numel() else 0
    assert not wrong.any(), (codec, tensor.dtype, place, tensor[place], decoded[place], bound[place])
    assert not (decoded.isnan() & bound.isfinite()).any()


# --- values ---------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn, finite: bool = True) -> Tensor:
    """Draws one of three kinds of tensors.

    They are several blocks of usual numbers; or few numbers of all sizes, subnormal ones and the largest too, with many
    equal ones and zeros of both signs; or, unless all must be finite, random bits.
    """
    dtype = draw(st.sampled_from(DTYPES))
    info = torch.finfo(dtype)
    kind = draw(st.sampled_from(["usual", "few"] if finite else ["usual", "few", "bits"]))
    if kind != "few":
        numel, seed = draw(st.sampled_from(SIZES)), draw(st.integers(0, 1 << 32))
        if kind == "usual":
            scales = [1.0, 1e-3, 1e-7, 1e-38, 3e4 if dtype == torch.float16 else 1e30]
            return normal(numel, dtype, seed, draw(st.sampled_from(scales)))
        generator = torch.Generator().manual_seed(seed)
        size = numel * dtype.itemsize
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype)
    special = [0.0, 1.0, info.max, info.tiny, info.smallest_normal * info.eps]
    if not finite:
        special += [math.nan, math.inf]
    special += [-each for each in special]
    width = {8: 64, 4: 32, 2: 16}[dtype.itemsize]
    floats = st.floats(allow_nan=False, allow_infinity=False, width=width)
    values = draw(st.lists(st.one_of(floats, st.sampled_from(special)), max_size=40))
    wide = torch.tensor(values, dtype=torch.float64)
    return (
        (wide.clamp(-info.max, info.max) if finite else wide).to(dtype).repeat(draw(st.sampled_from([1, 20])))
    )


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(tensor=tensors())
def test_any_numbers_are_within_the_bound(codec: Codec, tensor: Tensor) -> None:
    decoded = through(codec, tensor)
    check_bound(codec, tensor, decoded)
    if tensor.dtype != torch.float64 and not isinstance(codec, (Float16, BFloat16)):
        # float64 may exceed float32's range, and the largest float32 numbers are rounded to infinite half ones;
        # everything else that is finite stays finite
        assert decoded.isfinite().all(), (codec, tensor, decoded)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_messages_and_tensors_may_lie_anywhere(codec: Codec) -> None:
    strided = normal(2000, seed=2).view(2, 1000).t()
    message = codec.encode(strided)
    assert torch.equal(message, codec.encode(strided.contiguous()))
    memory = torch.zeros(message.numel() + 1, dtype=torch.uint8)
    memory[1:] = message
    assert torch.equal(codec.decode(memory[1:], (1000, 2)), codec.decode(message, (1000, 2)))


# --- references -----------------------------------------------------------------------------------------------


def scale_of(block: np.ndarray) -> np.float32:
    """The scale, with 16 significant bits, rounded up."""
    largest = np.abs(block).max() / np.float32(127)
    bits = np.maximum(largest, np.finfo(np.float32).tiny).view(np.uint32)
    return np.uint32((int(bits) + 0xFF) & ~0xFF).view(np.float32)


def blocks_of(tensor: Tensor, size: int) -> list[np.ndarray]:
    values = tensor.numpy()
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


@pytest.mark.parametrize("numel", SIZES)
def test_integers_are_multiples_of_a_scale(numel: int) -> None:
    tensor = normal(numel, seed=numel)
    expected = []
    for block in blocks_of(tensor, 64):
        scale = scale_of(block)
        expected.append(np.rint(block * (np.float32(1) / scale)) * scale)
    decoded = through(Int8(block=64), tensor).numpy()
    np.testing.assert_array_equal(decoded, np.concatenate(expected) if expected else [])


def test_half_floats_are_those_of_torch() -> None:
    """All bit patterns of the upper half, and of random lower halves, so all kinds of rounding and NaN."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.random.default_rng(0).integers(0, 1 << 16, (3, 1 << 16), dtype=np.uint32)
    lower[0], lower[1] = 0, 0x8000
    tensor = torch.from_numpy((upper | lower).reshape(-1).view(np.float32))
    for codec, dtype in ((Float16(), torch.float16), (BFloat16(), torch.bfloat16)):
        expected = tensor.to(dtype).float()
        decoded = through(codec, tensor)
        assert torch.equal(decoded.isnan(), expected.isnan())
        assert torch.equal(decoded.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def test_the_largest_are_sent() -> None:
    for dtype, (numel, k) in itertools.product(
        DTYPES, ((1, 1), (10, 3), (5000, 50), (5000, 1900), (5000, 5000), (100_003, 1))
    ):
        tensor = normal(numel, dtype, seed=k)
        tensor[::7] = tensor[0]  # equal ones: the first are sent
        expected = torch.from_numpy(top_k(tensor.double().numpy(), k)).to(dtype)
        assert torch.equal(through(TopK(k=k), tensor), expected), (dtype, numel, k)


def test_the_largest_are_sent_in_few_bits() -> None:
    for numel, k in ((1, 1), (10, 3), (5000, 511), (5000, 512), (5000, 1900), (300, 300)):
        tensor = normal(numel, seed=k) * torch.logspace(-3, 3, numel)
        tensor[::9] = 0.0  # with 300 of 300, zeros are sent too
        decoded = through(TopK(k=k, bits=2), tensor)
        np.testing.assert_allclose(decoded.numpy(), top_k(tensor.numpy(), k, 2), rtol=2.0**-22, atol=0)
        assert ((decoded == 0) | (tensor != 0)).all()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(tensor=tensors(), fraction=st.sampled_from([0.05, 0.3, 1.0]))
def test_few_bits_add_nothing_to_the_norm(tensor: Tensor, fraction: float) -> None:
    """What error feedback needs: the error is not larger than the tensor, whatever the values are."""
    if tensor.dtype == torch.float64:
        tensor = tensor.clamp(-1e30, 1e30)
    codec = TopK(fraction, bits=2)
    decoded = through(codec, tensor)
    check_bound(codec, tensor, decoded)
    values = tensor.double()
    # A power of two takes numbers to where squares neither overflow nor vanish.
    unit = 2.0 ** math.floor(math.log2(float(values.abs().max()) or 1.0)) if values.numel() else 1.0
    error = (decoded.double() - values) / unit
    slack = 1e-2 if tensor.dtype in (torch.float16, torch.bfloat16) else 1e-6
    tiny = tensor.numel() * (float(torch.finfo(tensor.dtype).tiny) / unit) ** 2
    assert float(error.square().sum()) <= (1 + slack) * float((values / unit).square().sum()) + tiny


def test_places_take_few_bytes() -> None:
    """Never more than a bitmap, nor more than 2 + ceil(log2(numel / k)) bits each, up to whole bytes."""
    for numel in (1, 100, 4096, 1 << 20):
        for k in {1, max(1, numel // 1000), max(1, numel // 100), max(1, numel // 3), numel}:
            places = TopK(k=k).bytes(numel) - 4 * k
            bits = k * (2 + math.ceil(math.log2(numel / k)))
            assert places <= min(math.ceil(numel / 8), math.ceil(bits / 8) + 2), (numel, k)


def test_bytes_are_as_documented() -> None:
    numel = 1 << 20
    expected = {
        Float16(): 2.0,
        Int8(): 1 + 4 / 256,
        Int8(block=1024): 1 + 4 / 1024,
    }
    for codec, each in expected.items():
        assert codec.bytes(numel) == each * numel, codec
    for dtype in DTYPES:
        exact, few = TopK(k=1000), TopK(k=1000, bits=2)
        saved = 1000 * dtype.itemsize - (2 * 8 + 1000 * 2 // 8)
        assert exact.bytes(numel, dtype) - few.bytes(numel, dtype) == saved
    assert all(codec.bytes(0) == 0 for codec in CODECS)


# --- NaN and infinity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", BLOCKS, ids=repr)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_non_finite_number_becomes_nan(codec: Codec, value: float) -> None:
    size = codec.block  # type: ignore[attr-defined]  # of all codecs with blocks
    for dtype in DTYPES:
        tensor = normal(3 * size + 5, dtype)
        tensor[size + 3] = value
        decoded = through(codec, tensor)
        assert decoded[size : 2 * size].isnan().all()
        assert decoded[:size].isfinite().all() and decoded[2 * size :].isfinite().all()


@pytest.mark.parametrize("codec", [Float16(), BFloat16(), TopK(k=4)], ids=repr)
def test_other_codecs_carry_non_finite_numbers(codec: Codec) -> None:
    for dtype in DTYPES:
        tensor = normal(100, dtype)
        tensor[[3, 50, 99]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
        decoded = through(codec, tensor)
        assert decoded[3].isnan() and decoded[50] == math.inf and decoded[99] == -math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_few_bits_of_a_non_finite_number_become_nan_with_their_block(value: float) -> None:
    for dtype in DTYPES:
        tensor = normal(3000, dtype)
        tensor[2000] = value
        decoded = through(TopK(k=1000, bits=2), tensor)
        sent = through(TopK(k=1000), tensor) != 0
        blocks = sent.nonzero().flatten().split(512)
        wrong = next(block for block in blocks if 2000 in block)
        assert decoded[wrong].isnan().all() and decoded.isnan().sum() == len(wrong)


def test_numbers_beyond_the_range_do_not_become_finite() -> None:
    assert through(Float16(), torch.tensor([65519.0, 65520.0, -1e30])).tolist() == [
        65504.0,
        math.inf,
        -math.inf,
    ]
    huge = torch.full((10,), 1e300, dtype=torch.float64)
    for codec in (Int8(), BFloat16()):
        assert not through(codec, huge).isfinite().any()
    assert (through(TopK(0.5), huge) == 1e300).any()


# --- the same everywhere --------------------------------------------------------------------------------------


def digest() -> str:
    """Returns a hash of the messages and the decoded tensors of all codecs."""
    found = hashlib.sha256()
    for codec in CODECS:
        for dtype in DTYPES:
            for numel in SIZES:
                tensor = normal(numel, dtype, seed=numel)
                tensor[100:101] = math.nan
                message = codec.encode(tensor)
                decoded = codec.decode(message, tensor.shape, dtype)
                found.update(message.numpy().tobytes())
                found.update(decoded.nan_to_num(nan=-3.0).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_every_cpu_gives_the_same_bits() -> None:
    """The loops for AVX2, and those for every CPU."""
    command = "import fog_pg, test_compression; print(test_compression.digest())"
    found = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout.strip() == digest()


# --- bad arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Int8(block=7), ValueError, "block.*7.*multiples of 8"),
        (lambda: Int8(block=1 << 63), ValueError, "block must be.*9223372036854775808"),
        (lambda: TopK(10**400), ValueError, "fraction must be"),
        (lambda: Int8(block=2.0), TypeError, "block must be an integer.*2.0"),
        (lambda: TopK("1"), TypeError, "fraction must be a real number"),
        (lambda: TopK(), ValueError, "exactly one of fraction and k"),
        (lambda: TopK(0.0), ValueError, "fraction.*0"),
        (lambda: TopK(k=0), ValueError, "k must be at least 1"),
        (lambda: TopK(0.1, bits=3), ValueError, "bits must be 2 or 32, got 3"),
        (lambda: TopK(0.1, bits=2.0), TypeError, "bits must be an integer.*2.0"),
        (lambda: TopK(k=True), TypeError, "k must be an integer"),
    ],
)
def test_bad_parameters_are_named(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"(?s){words}"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_other_dtypes_are_refused(codec: Codec) -> None:
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=rf"{type(codec).__name__}.*{str(dtype).removeprefix('torch.')}"):
            codec.encode(torch.zeros(3, dtype=dtype))
        with pytest.raises(ValueError, match=type(codec).__name__):
            codec.bytes(3, dtype)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda codec, m: codec.decode(m[:-1], (1000,)), ValueError, "message"),
        (lambda codec, m: codec.decode(m, (1000,), torch.float64), ValueError, "message"),
        (lambda codec, m: codec.decode(torch.full_like(m, 255), (1000,)), ValueError, "places"),
        (lambda codec, m: codec.decode(torch.zeros_like(m), (1000,)), ValueError, "places"),
        (lambda codec, m: codec.decode([1], (3,)), TypeError, "message must be a torch.Tensor"),
        (lambda codec, m: codec.decode(m, (-1,)), ValueError, r"shape\[0\] must be.*-1"),
        (lambda codec, m: codec.decode(m, ("a",)), TypeError, r"shape\[0\] must be an integer.*'a'"),
        (lambda codec, m: codec.decode(m, 3), TypeError, "shape must be a sequence of integers.*3"),
        (
            lambda codec, m: codec.decode(m, (3,), "float32"),
            TypeError,
            "dtype must be a torch.dtype.*'float32'",
        ),
        (lambda codec, _: codec.encode([1.0]), TypeError, "torch.Tensor"),
        (lambda codec, _: codec.bytes(1.5), TypeError, "numel must be an integer.*1.5"),
        (lambda codec, _: codec.bytes(1 << 64), ValueError, "numel must be.*18446744073709551616"),
        (lambda codec, _: codec.bytes(-1), ValueError, "numel must be.*-1"),
    ],
)
def test_bad_arguments_are_named(
    call: Callable[[Codec, Tensor], object], error: type[Exception], words: str
) -> None:
    codec = TopK(k=3)
    with pytest.raises(error, match=words):
        call(codec, codec.encode(normal(1000)))


def test_integers_of_other_libraries_are_taken() -> None:
    codec = Int8(block=np.int64(128))
    assert codec == Int8(block=128) and repr(codec) == repr(Int8(block=128))
    message = codec.encode(torch.ones(3))
    assert codec.decode(message, [np.int64(3)]).shape == (3,)
    assert codec.bytes(np.int32(3)) == message.numel()


def test_codecs_are_constants() -> None:
    assert Int8() == Int8(block=256) and hash(Int8()) == hash(Int8(block=256)) and Int8() != Int8(block=8)
    assert Int8().backend is Int8().backend
    with pytest.raises(dataclasses.FrozenInstanceError):
        Int8().block = 8  # type: ignore[misc]
    strided = normal(1000)[::2]
    assert torch.equal(Int8().encode(strided), Int8().encode(strided.contiguous()))
