"""How far each element of a decoded tensor can be from the given one, by the codecs' documentation."""

from __future__ import annotations

import math

import torch
from fogdist.compression import BFloat16, Codec, Float16, Int8, TopK
from torch import Tensor

# Codecs compute scales with 16 significant bits, and everything else with 24. Bounds are larger by this factor.
ROUNDING = 1 + 2.0**-13


def bound_of(codec: Codec, tensor: Tensor) -> Tensor:
    """Returns the bound of each element, in float64; infinite where the decoded element may be NaN or infinite."""
    values = tensor.double().flatten()
    if not (isinstance(codec, TopK) and codec.bits == 32):
        values = torch.where(values.abs() > torch.finfo(torch.float32).max, math.inf, values)
    errors = _errors(codec, values, tensor.dtype)
    if tensor.dtype in (torch.float16, torch.bfloat16):  # the decoded value is rounded to the dtype
        info = torch.finfo(tensor.dtype)
        errors = errors + info.eps * (values.abs() + errors) + info.smallest_normal * info.eps
    elif tensor.dtype == torch.float64:
        errors = errors + 2.0**-24 * values.abs() + 2.0**-149
    return torch.nan_to_num(errors, nan=math.inf, posinf=math.inf).view(tensor.shape)


def _errors(codec: Codec, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bound without the rounding to the dtype of the tensor; NaN and infinities stay."""
    sizes = values.abs()
    if isinstance(codec, Float16):
        return torch.where(sizes < 65519, 2.0**-11 * sizes + 2.0**-25, math.inf)
    if isinstance(codec, BFloat16):
        errors = 2.0**-8 * sizes + 2.0**-134
        most = min(torch.finfo(torch.bfloat16).max, torch.finfo(dtype).max)
        return torch.where(sizes + errors < most, errors, math.inf)
    if isinstance(codec, Int8):
        return _scale(values, codec.block) * 0.5
    assert isinstance(codec, TopK)
    return _errors_of_top_k(codec, values)


def _errors_of_top_k(codec: TopK, values: Tensor) -> Tensor:
    count = codec.count(values.numel())
    sizes = values.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    if count == 0:
        return sizes
    if codec.bits == 32:
        return torch.where(sizes > sizes.topk(count).values[-1], 0.0, sizes)
    # Which of equal magnitudes are sent decides on the blocks.
    ranks = values.abs().nan_to_num(nan=math.inf, posinf=torch.finfo(torch.float64).max)
    sent = torch.argsort(ranks, descending=True, stable=True)[:count].sort().values
    errors = sizes.clone()
    for begin in range(0, count, 512):
        block = sizes[sent[begin : begin + 512]]
        low, high, mean = block.min(), block.max(), block.mean()
        error = torch.maximum(mean - low, high - mean)
        errors[sent[begin : begin + 512]] = error * ROUNDING + 2.0**-23 * high + 2.0**-149
    return errors


def _scale(values: Tensor, block: int) -> Tensor:
    """Returns for each element the scale of its block, or slightly more."""
    numel = values.numel()
    count = -(-numel // block)
    magnitudes = values.new_zeros(count * block)
    magnitudes[:numel] = values.abs()
    largest = magnitudes.view(count, block).amax(1, keepdim=True).expand(count, block).reshape(-1)[:numel]
    return (largest / 127).clamp_min(2.0**-126) * ROUNDING
