"""Codecs: forms of a tensor in fewer bytes, for exchanges with neighbors.

A codec is an argument of an exchange, as in ``fogdist.neighbor_allreduce(x, compression=Int8())``, or of the mixing of
an algorithm, as in ``Neighbors(compression=Int8())``. All ranks of an exchange must use the same one.
docs/compression.md compares the codecs, and says when which one pays.

Codecs take float16, bfloat16, float32 and float64, of any shape and size, on any device. All except `TopK` with its 32
bits compute in float32; a float64 is rounded to float32 first. No codec turns a NaN or an infinity into a finite number,
except for elements that `TopK` does not send.
"""

from __future__ import annotations

import abc
import functools
import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from fogdist.arguments import dense, plain
from fogdist.removed import missing

if TYPE_CHECKING:
    from fog_pg import _C

__all__ = [
    "BFloat16",
    "Codec",
    "Float16",
    "Int8",
    "TopK",
]


@dataclass(frozen=True)
class Codec(abc.ABC):
    """Base of the codecs, which are constants: equal arguments make equal codecs.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of its range.
    """

    def __post_init__(self) -> None:
        _ = self.backend  # checks the arguments

    @property
    def backend(self) -> _C.Codec:
        """The codec as the backend takes it."""
        return _made(self)

    @abc.abstractmethod
    def _make(self) -> _C.Codec:
        """Makes the backend's object."""

    def bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Returns the number of bytes of a message.

        Args:
            numel: The number of elements.
            dtype: Their dtype.

        Raises:
            TypeError: `numel` is no integer, or `dtype` no torch.dtype.
            ValueError: The codec does not take the dtype; a negative number, or 2^56 and more.
        """
        return self.backend.bytes(dtype, _within("numel", numel, 1 << 56))

    def encode(self, tensor: Tensor) -> Tensor:
        """Returns the message for a tensor, of dtype uint8.

        Args:
            tensor: On any device; the message has the same bytes on all of them, and is on the tensor's.

        Raises:
            TypeError: `tensor` is no dense torch.Tensor.
            ValueError: The codec does not take its dtype.
        """
        source = plain(dense(tensor))
        size = self.bytes(source.numel(), source.dtype)
        message = torch.empty(size, dtype=torch.uint8, device=source.device)
        self.backend.encode(source, message)
        return message

    def decode(
        self,
        message: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Returns the tensor that a receiver gets.

        Args:
            message: The result of `encode`.
            shape: The shape of the encoded tensor.
            dtype: Its dtype.

        Raises:
            TypeError: `message` is no dense torch.Tensor, `shape` no sequence of integers, or `dtype` no torch.dtype.
            ValueError: The message does not have the size of such a tensor's, or is not valid; a negative size; the
                codec does not take the dtype.
        """
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(f"shape must be a sequence of integers, got {shape!r}")
        sizes = [_within(f"shape[{place}]", size, 1 << 56) for place, size in enumerate(shape)]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        message = dense(message, "message")
        output = torch.empty(sizes, dtype=dtype, device=message.device)
        self.backend.decode(message, output)
        return output


def _integer(name: str, value: SupportsIndex, allowed: str = "an integer") -> int:
    """Returns an argument as Python's integer."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be {allowed}, got {value!r} of type {type(value).__name__}")
    number = operator.index(value)
    if abs(number) >= 1 << 63:  # the backend could not name it
        raise ValueError(f"{name} must be less than 2^63 in magnitude, got {number}")
    return number


def _within(name: str, value: SupportsIndex, limit: int) -> int:
    """Returns an argument that must be an integer from 0 to below `limit`."""
    number = _integer(name, value)
    if not 0 <= number < limit:
        raise ValueError(f"{name} must be from 0 to {limit - 1}, got {number}")
    return number


@functools.lru_cache(maxsize=256)
def _made(codec: Codec) -> _C.Codec:
    return codec._make()


def _backend() -> type[_C.Codec]:
    # Imported here because it loads the extension.
    from fog_pg._C import Codec

    return Codec


def encoding_of(compression: Codec | None, *, conserve: bool = False) -> dict[str, Any]:
    """Returns the arguments of the backend's exchanges for a user's argument `compression`.

    Args:
        compression: The argument.
        conserve: Whether the exchange is to conserve the sum over all ranks.

    Raises:
        TypeError: It is no codec and not None.
    """
    if compression is None:
        return {}
    if not isinstance(compression, Codec):
        raise TypeError(f"compression must be a codec of fogdist.compression or None, got {compression!r}")
    return {"compression": compression.backend, "conserve": conserve}


@dataclass(frozen=True)
class Float16(Codec):
    """Rounds to float16: 2 bytes an element.

    The error is at most ``2^-11 |x|``, and 2^-25 for subnormals. 65,520 and more become infinity.
    """

    def _make(self) -> _C.Codec:
        return _backend().float16()


@dataclass(frozen=True)
class BFloat16(Codec):
    """Rounds to bfloat16: 2 bytes an element. The error is at most ``2^-8 |x|``, and 2^-134 for subnormals.

    The largest numbers become infinity where the rounded number does not fit into the dtype of the tensor.
    """

    def _make(self) -> _C.Codec:
        return _backend().bfloat16()


@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """Whole multiples of a scale of the block, from -127 to 127: 1 byte an element, and 4 bytes a block.

    The scale s is the largest magnitude of the block divided by 127. The error is at most ``s / 2``. A block with a NaN
    or an infinity becomes NaN.

    Args:
        block: The number of elements of a block: a multiple of 8, from 8 to 8192.
    """

    block: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", _integer("block", self.block))
        super().__post_init__()

    def _make(self) -> _C.Codec:
        return _backend().int8(self.block)


@dataclass(frozen=True)
class TopK(Codec):
    """The elements of largest magnitude, exactly or in 2 bits, and their places; the others become 0.

    The squared error is at most ``1 - k / numel`` of the tensor's squared norm (Stich et al., "Sparsified SGD with
    memory", NeurIPS 2018). Places take about ``2 + log2(numel / k)`` bits each. NaN and infinity count as larger than
    numbers, so up to k of them arrive. Of a list of tensors, the elements of all tensors of one dtype are one message.

    In 2 bits, the values are cut into blocks of 512 in the order of their places, with 8 bytes more a block. A block has
    2 magnitudes: the mean of those up to the mean m of all, or 0 if there is a zero, and the mean of those above m. The
    error of a value is then at most the larger of ``m - low`` and ``high - m``, where low and high are the least and the
    largest magnitude of the block. Zeros stay zeros, and the norm of the error is at most that of the tensor. A block
    with a NaN or an infinity becomes NaN. (Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo",
    2025, arXiv 2508.15706, sends 1 to 3% in 2 bits.)

    Args:
        fraction: The share of the elements to send: more than 0, at most 1.
        k: Or their number.
        bits: Of a value: 2; or 32, for exact values, in the tensor's dtype.
    """

    fraction: float | None = None
    k: int | None = None
    bits: int = 32

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.k is None):
            raise ValueError(
                f"exactly one of fraction and k must be given, got fraction={self.fraction}, k={self.k}"
            )
        if self.k is not None:
            object.__setattr__(self, "k", _integer("k", self.k, "an integer or None"))
        elif not isinstance(self.fraction, numbers.Real) or isinstance(self.fraction, bool):
            raise TypeError(f"fraction must be a real number or None, got {self.fraction!r}")
        object.__setattr__(self, "bits", _integer("bits", self.bits))
        super().__post_init__()

    def _which(self) -> tuple[float, int]:
        if self.k is None:
            assert self.fraction is not None
            if not 0 < self.fraction <= 1:
                raise ValueError(f"fraction must be more than 0 and at most 1, got {self.fraction}")
            return float(self.fraction), 0
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")
        return 0.0, self.k

    def count(self, numel: int) -> int:
        """Returns how many of `numel` elements are sent: at least one, if there are any."""
        fraction, k = self._which()
        return min(numel, k or math.ceil(fraction * numel))

    def _make(self) -> _C.Codec:
        if self.bits not in (2, 32):
            raise ValueError(f"bits must be 2 or 32, got {self.bits}")
        return _backend().top_k(*self._which(), self.bits)


if not TYPE_CHECKING:  # a type checker is to find misspelt names

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)
