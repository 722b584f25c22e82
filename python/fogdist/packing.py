"""Packs many small tensors into few messages: flat buffers of tensors with one dtype and device.

All operations on the buffers are elementwise, so the results are those of separate operations on the tensors.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Large enough that the start-up time of a message does not matter, and small enough that the first messages travel
# while the next ones are packed or their gradients are computed. On a GPU each bucket costs the host several launches,
# which bound the step of a small model: docs/gpu.md. A larger tensor is a bucket by itself.
_CPU_BYTES, _DEVICE_BYTES = 4 * 2**20, 25 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Indices of tensors in a list whose elements are sent together."""

    places: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def make_buckets(
    tensors: Sequence[Tensor],
    max_bytes: int | None = None,
    groups: Sequence[Hashable] | None = None,
) -> list[Bucket]:
    """Returns the buckets of `tensors`. Each tensor is in exactly one bucket, and buckets keep the given order.

    The same shapes and dtypes in the same order give the same buckets on every rank.

    Args:
        tensors: Any tensors.
        max_bytes: The largest size of a bucket with more than one tensor; None for 4 MiB on the CPU, else 25 MiB.
        groups: A key for each tensor; a bucket has tensors of one key only. By default all have the same.
    """
    buckets: list[Bucket] = []
    open_places: dict[tuple[torch.dtype, torch.device, Hashable], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device, Hashable], int] = {}
    for place, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device, 0 if groups is None else groups[place])
        count = tensor.numel() * tensor.element_size()
        most = max_bytes or (_CPU_BYTES if tensor.device.type == "cpu" else _DEVICE_BYTES)
        if open_places.get(kind) and open_bytes[kind] + count > most:
            buckets.append(Bucket(tuple(open_places.pop(kind)), *kind[:2]))
        open_places.setdefault(kind, []).append(place)
        open_bytes[kind] = count + (open_bytes[kind] if len(open_places[kind]) > 1 else 0)
    buckets += [Bucket(tuple(places), *kind[:2]) for kind, places in open_places.items()]
    return buckets


def on_device(tensor: Tensor) -> str:
    """Returns " on cuda" or similar, "" for the CPU. Ranks compare it, as transports depend on the type of device."""
    return "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"


def signature_of(tensor: Tensor) -> str:
    """Returns the properties of an exchanged tensor that ranks compare: dtype, shape and kind of device."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}{on_device(tensor)}"


def cap_bytes(bucket_cap_mb: float | None) -> int | None:
    """Converts the size of buckets from MiB, as in torch's DistributedDataParallel, to bytes; None stays None.

    Raises:
        TypeError: Not a number.
        ValueError: Not above 0, or not finite.
    """
    if bucket_cap_mb is None:
        return None
    if not isinstance(bucket_cap_mb, numbers.Real) or isinstance(bucket_cap_mb, bool):
        raise TypeError(f"bucket_cap_mb must be a number, got {type(bucket_cap_mb).__name__}")
    if not 0 < bucket_cap_mb < math.inf:
        raise ValueError(f"bucket_cap_mb must be above 0 and finite, got {bucket_cap_mb}")
    return max(1, int(bucket_cap_mb * 2**20))


def flatten(bucket: Bucket, tensors: Sequence[Tensor]) -> Tensor:
    """Returns a new one-dimensional tensor with the elements of a bucket's tensors."""
    return torch.cat([tensors[place].detach().reshape(-1) for place in bucket.places])


def unflatten(bucket: Bucket, flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies the elements of `flat` into a bucket's tensors, in place."""
    pieces = torch.split(flat, [tensors[place].numel() for place in bucket.places])
    with torch.no_grad():
        for place, piece in zip(bucket.places, pieces, strict=True):
            tensors[place].copy_(piece.view(tensors[place].shape))
