"""Many small tensors in few messages: tensors of one dtype and device, side by side in flat buffers.

Every operation here works on elements, so the result is that of one operation a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Large enough that a message's start-up does not count, small enough that the first messages travel while the
# next are packed. A larger tensor is a bucket by itself.
BUCKET_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Places in a list of tensors whose elements travel together."""

    places: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def make_buckets(
    tensors: Sequence[Tensor], max_bytes: int = BUCKET_BYTES, alignment: int = 1
) -> list[Bucket]:
    """Returns the buckets of `tensors`: each tensor in exactly one, those of a bucket in the order given.

    The same shapes and dtypes in the same order give the same buckets on every rank.

    Args:
        tensors: Any tensors.
        max_bytes: A bucket takes no further tensor that would make it larger.
        alignment: Bytes of which each tensor takes a multiple.
    """
    buckets: list[Bucket] = []
    open_places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for place, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        count = -(-tensor.numel() * tensor.element_size() // alignment) * alignment
        if open_places.get(kind) and open_bytes[kind] + count > max_bytes:
            buckets.append(Bucket(tuple(open_places.pop(kind)), *kind))
        open_places.setdefault(kind, []).append(place)
        open_bytes[kind] = count + (open_bytes[kind] if len(open_places[kind]) > 1 else 0)
    buckets += [Bucket(tuple(places), *kind) for kind, places in open_places.items()]
    return buckets


def flatten(bucket: Bucket, tensors: Sequence[Tensor]) -> Tensor:
    """Returns a new one-dimensional tensor with the elements of a bucket's tensors."""
    return torch.cat([tensors[place].detach().reshape(-1) for place in bucket.places])


def unflatten(bucket: Bucket, flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies the elements of `flat` into a bucket's tensors, in place."""
    pieces = torch.split(flat, [tensors[place].numel() for place in bucket.places])
    with torch.no_grad():
        for place, piece in zip(bucket.places, pieces, strict=True):
            tensors[place].copy_(piece.view(tensors[place].shape))


class BucketCache:
    """The buckets of a list of tensors, made anew only when a tensor in it, a size or a dtype has changed."""

    def __init__(self) -> None:
        self._key: tuple[tuple[int, int, torch.dtype, torch.device], ...] | None = None
        self._buckets: list[Bucket] = []

    def of(self, tensors: Sequence[Tensor]) -> list[Bucket]:
        """Returns `make_buckets(tensors)`."""
        key = tuple((id(tensor), tensor.numel(), tensor.dtype, tensor.device) for tensor in tensors)
        if key != self._key:
            self._key, self._buckets = key, make_buckets(tensors)
        return self._buckets
