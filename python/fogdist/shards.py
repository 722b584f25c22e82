"""Tensors of which each rank has a shard, such as the parameters of FSDP2: DTensors."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this rank has a shard."""
    # To import the module takes a second, and who has not imported it has no DTensor.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, in its own memory, and other tensors as they are."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # or else to_local() is differentiated, and returns a view
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local


def sharded_as(tensor: Tensor, local: Tensor) -> Tensor:
    """Returns a DTensor with the shard `local`, placed as `tensor` is if that is one, else `local` itself."""
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
