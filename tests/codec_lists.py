"""The codecs with which tests of codecs, of exchanges and of devices run."""

from __future__ import annotations

import torch
from fogdist.compression import BFloat16, Codec, Float16, Int8, TopK
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

BLOCKS: list[Codec] = [
    Int8(),
    Int8(block=8),
    Int8(block=1000),
]
SPARSE: list[Codec] = [
    TopK(0.01),
    TopK(k=5),
    TopK(0.4),
    TopK(1.0),
    TopK(0.01, bits=2),
    TopK(k=5, bits=2),
    TopK(0.4, bits=2),
    TopK(1.0, bits=2),
]
CODECS: list[Codec] = [Float16(), BFloat16(), *BLOCKS, *SPARSE]

# One of each kind, for exchanges.
IN_EXCHANGES: list[Codec] = [
    Float16(),
    BFloat16(),
    Int8(),
    Int8(block=8192),
    TopK(0.02),
    TopK(0.7),
    TopK(0.3, bits=2),
]


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Returns normally distributed numbers, with no infinity."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, dtype=torch.float64, generator=generator) * scale
    return values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
