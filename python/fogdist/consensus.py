"""The distance of the ranks from their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from fogdist.agreement import check_same_everywhere
from fogdist.context import PreconditionError, current
from fogdist.packing import flatten, make_buckets
from fogdist.shards import check_apart, local_of

# The last distance that this process has computed, for `fogdist.metrics.Exporter`.
latest: float | None = None


def consensus_distance(
    model: Module | Tensor | Sequence[Tensor], *, group: dist.ProcessGroup | None = None
) -> float:
    """Returns the consensus distance: how far the ranks' parameters are from their mean. Collective.

    ``sqrt(1/n sum_i ||x_i - mean||^2)`` is 0.0 if all ranks have the same parameters. Decentralized training keeps it
    small, and its size affects the quality of the mean of all models (Kong, Lin, Koloskova, Jaggi and Stich,
    "Consensus Control for Decentralized Deep Learning", ICML 2021, arXiv 2102.04828). Sums are in double, and the
    function sends twice the parameters in double.

    Args:
        model: A module: all its parameters count, including frozen ones, and its buffers do not. Or a tensor or a list
            of tensors, floating-point or complex, of the same shapes and dtypes on all ranks. For a DTensor, this
            rank's shard counts. The function does not change them.
        group: The group of ranks; by default that of `init`.

    Returns:
        The same number on all ranks; 0.0 for one rank.

    Raises:
        TypeError: `model` is none of these.
        ValueError: A tensor of integers or bools, or sharded over ranks of the group; ranks disagree on shapes or dtypes
            (on all ranks alike); before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    global latest
    context = current(group)
    if isinstance(model, Module):
        tensors: list[Tensor] = [*model.parameters()]
    elif isinstance(model, Tensor):
        tensors = [model]
    elif isinstance(model, (list, tuple)) and all(isinstance(each, Tensor) for each in model):
        tensors = list(model)
    else:
        raise TypeError(
            f"model must be a torch.nn.Module, a tensor or a list of them, got {type(model).__name__}"
        )
    for place, tensor in enumerate(tensors):
        check_apart(tensor, f"parameter {place}", context.group, may_be_copied=True)
    tensors = [local_of(tensor) for tensor in tensors]
    for place, tensor in enumerate(tensors):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise PreconditionError(
                f"model must have floating-point or complex parameters, got {tensor.dtype} at place {place}"
            )
    if context.size == 1:
        return 0.0
    items = [f"parameter {place}: {t.dtype} of shape {tuple(t.shape)}" for place, t in enumerate(tensors)]
    check_same_everywhere(context.backend, "model", items)
    square = torch.zeros(1, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for bucket in make_buckets(tensors):
            flat = flatten(bucket, tensors)
            mine = (torch.view_as_real(flat) if flat.is_complex() else flat).to(torch.float64)
            mean = mine.clone()
            context.backend.allreduce_named(mean, dist.ReduceOp.AVG).wait()
            square += mine.sub_(mean).square_().sum().cpu()
    context.backend.allreduce_named(square, dist.ReduceOp.AVG).wait()
    latest = math.sqrt(float(square))
    return latest
