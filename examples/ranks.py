"""What the examples ask all ranks for, by torch.distributed: means and tables of results."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def mean(x: Tensor) -> Tensor:
    """Returns the mean of the tensors of all ranks."""
    result = x.detach().clone()
    dist.all_reduce(result, dist.ReduceOp.AVG)
    return result


def total(x: Tensor) -> Tensor:
    """Returns the sum of the tensors of all ranks."""
    result = x.detach().clone()
    dist.all_reduce(result)
    return result


def gathered(x: Tensor) -> Tensor:
    """Returns the tensors of all ranks, which have one shape, concatenated on dimension 0."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)
