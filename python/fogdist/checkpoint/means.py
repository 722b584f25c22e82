"""Means of saved states over all ranks that saved them, which the ranks of now compute together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fogdist.checkpoint.pieces import Shape
from fogdist.collectives import allreduce_
from fogdist.context import Context
from fogdist.packing import make_buckets

# The bytes of the sums, in double, that are exchanged at a time.
_BYTES = 64 << 20


@dataclass(frozen=True)
class Source:
    """One state that counts in the means.

    Attributes:
        weight: Of its model; all else in it has the weight 1.
        names: Of its tensors.
        read: Returns some of them.
        weights: Of tensors that have others, by name.
    """

    weight: float
    names: Collection[str]
    read: Callable[[Collection[str]], Mapping[str, Tensor]]
    weights: Mapping[str, float] = field(default_factory=dict)

    def weight_of(self, name: str) -> float:
        """Returns the weight of a tensor."""
        return self.weights.get(name, self.weight if name.startswith("model.") else 1.0)


def has_mean(shape: Shape) -> bool:
    """Returns whether a tensor has a mean; counts do not."""
    return shape.dtype.is_floating_point or shape.dtype.is_complex


def means(
    context: Context, shapes: Mapping[str, Shape], sources: Sequence[Source]
) -> tuple[dict[str, Tensor], Exception | None]:
    """Returns the means over the states of all ranks, and this rank's first error. Collective.

    Sums are in double, so the mean of equal numbers of a smaller type is that number. A state without a tensor does not
    count in the mean of that tensor. A rank whose states cannot be read still takes part in the sums, so that no rank
    waits for it: check the error on all ranks before you use a mean.

    Args:
        context: The group.
        shapes: Of the tensors, the same on all ranks; only those of dtypes that have means count.
        sources: This rank's part of the states.
    """
    names = [name for name, shape in shapes.items() if has_mean(shape)]
    numels = [math.prod(shapes[name].size) * (1 + shapes[name].dtype.is_complex) for name in names]
    found: dict[str, Tensor] = {}
    failure: Exception | None = None
    buckets = make_buckets([torch.empty(n, dtype=torch.float64, device="meta") for n in numels], _BYTES)
    for bucket in buckets:
        mine = [names[place] for place in bucket.places]
        lengths = [numels[place] for place in bucket.places]
        flat = torch.zeros(sum(lengths) + len(mine), dtype=torch.float64, device="cpu")
        *sums, weights = torch.split(flat, [*lengths, len(mine)])
        if failure is None:
            try:
                _add(sources, mine, sums, weights)
            except Exception as error:
                failure = error
        allreduce_(flat, average=False, group=context.group)
        for name, total, weight in zip(mine, sums, weights, strict=True):
            found[name] = _as(total.div_(weight), shapes[name])
    return found, failure


def _add(sources: Sequence[Source], names: Sequence[str], sums: Sequence[Tensor], weights: Tensor) -> None:
    """Adds what the sources have of some tensors to their sums."""
    for source in sources:
        read = source.read([name for name in names if name in source.names])
        for place, name in enumerate(names):
            if name in source.names:
                weight = source.weight_of(name)
                sums[place].add_(_reals(read[name]), alpha=weight)
                weights[place] += weight


def _reals(tensor: Tensor) -> Tensor:
    """Returns the elements of a tensor as one vector of doubles."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return plain.reshape(-1).to("cpu", torch.float64)


def _as(reals: Tensor, shape: Shape) -> Tensor:
    if not shape.dtype.is_complex:
        return reals.to(shape.dtype).view(shape.size)
    return torch.view_as_complex(reals.view(*shape.size, 2)).to(shape.dtype)
