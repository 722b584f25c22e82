"""Memory that the ranks of a host share: exchanges read tensors in place, without a copy.

An operation is complete only after its neighbors have read the tensor, so the tensor may be changed then. The result of
a neighbor exchange is in shared memory again if it has more than 32 KiB; smaller tensors travel with their message.
Results of 1 MiB or more are in shared memory in any case. Between hosts nothing changes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

_LARGEST = 2**63 - 1


def empty(
    *size: SupportsIndex | tuple[SupportsIndex, ...] | list[SupportsIndex], dtype: torch.dtype | None = None
) -> Tensor:
    """Returns an uninitialised CPU tensor in memory that the other ranks of this host can read.

    The memory belongs to this process: it is freed with the tensor, and nothing is left of it after the process ends in
    any way. Freed memory is kept for later tensors of that size, up to the amount in use or 256 MiB. After a fork,
    parent and child see each other's changes of it.

    Args:
        *size: The shape, as for `torch.empty`: integers, or one tuple or list of them.
        dtype: By default `torch.get_default_dtype()`.

    Raises:
        TypeError: A size is not an integer, or `dtype` not a torch.dtype.
        ValueError: A size is negative, or above 2^63 - 1.
    """
    from fog_pg._C import empty_shared

    sizes: Sequence[Any] = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    shape = [_length(length, f"size[{place}]") for place, length in enumerate(sizes)]
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
    return empty_shared(shape, dtype or torch.get_default_dtype())


def empty_flat(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialized vector, on the CPU in memory of `empty`, on other devices in ordinary memory."""
    if device.type == "cpu":
        return empty(length, dtype=dtype)
    return torch.empty(length, dtype=dtype, device=device)


def is_shared(tensor: Tensor) -> bool:
    """Returns whether a tensor is in shared memory: from `empty`, `share_` or the result of an exchange."""
    from fog_pg import _C

    return _C.is_shared(tensor)


def share_(tensor: Tensor) -> Tensor:
    """Moves a tensor into memory that the other ranks of this host can read; returns the tensor.

    It stays the same tensor. Its views and all other tensors of the same storage move with it. NumPy arrays that
    shared its memory keep the old memory and no longer see its changes. Other objects with the old address must not be
    used any more, such as tensors created through DLPack or an operation in flight on the tensor. The function does
    nothing if the tensor is there already, or if the system has no such memory.

    Args:
        tensor: A dense CPU tensor of any dtype, such as a parameter.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor.
        ValueError: It is on another device, or in `torch.multiprocessing`'s shared memory, where others would
            no longer see it change.
    """
    from fog_pg._C import share

    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"tensor must be dense (layout torch.strided), got layout {tensor.layout}")
    if tensor.device.type != "cpu":
        raise ValueError(f"tensor must be on the CPU, got device {tensor.device}")
    if not is_shared(tensor):
        if tensor.is_shared():  # type: ignore[no-untyped-call]
            raise ValueError("tensor must not be in the shared memory of torch.multiprocessing already")
        share(tensor)
    return tensor


def _length(length: SupportsIndex, argument: str) -> int:
    try:
        number = operator.index(length)
    except TypeError:
        raise TypeError(
            f"{argument} must be an integer, got {length!r} of type {type(length).__name__}"
        ) from None
    if number < 0:
        raise ValueError(f"{argument} must be 0 or more, got {number}")
    if number > _LARGEST:
        raise ValueError(f"{argument} must be at most {_LARGEST}, got {number}")
    return number
