"""DTensors, of which each rank has a shard, such as the parameters of FSDP2."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor."""
    # Importing the module takes a second. If it has not been imported, there is no DTensor.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, in its own memory, and other tensors as they are."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # otherwise autograd records to_local(), which returns a view then
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local


def sharded_as(tensor: Tensor, local: Tensor) -> Tensor:
    """Returns a DTensor with the shard `local` and the placement of `tensor`; `local` if `tensor` is no DTensor."""
    if not is_sharded(tensor):
        return local
    like: Any = tensor
    result: Tensor = type(like.detach()).from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return result
