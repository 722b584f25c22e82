"""DTensors, of which each rank has a shard, such as the parameters of FSDP2."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
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


def copies_of(tensor: Tensor) -> Hashable:
    """Returns what is the same for two tensors if the same ranks have copies of this rank's part of them.

    It is None for an ordinary tensor, of which any rank may have a copy.
    """
    if not is_sharded(tensor):
        return None
    like: Any = tensor
    copied = [dim for dim, placement in enumerate(like.placements) if placement.is_replicate()]
    return (like.device_mesh, *copied) if copied else ()


def check_apart(tensor: Tensor, label: str, group: dist.ProcessGroup, *, may_be_copied: bool = False) -> None:
    """Raises ValueError for a DTensor that is spread over ranks of a group, which are to have different values of it.

    Args:
        tensor: Any tensor.
        label: Its name, for the message.
        group: The ranks that are to exchange their values.
        may_be_copied: Whether they may have copies of one value.
    """
    if not is_sharded(tensor):
        return
    like: Any = tensor
    others = {*dist.get_process_group_ranks(group)} - {dist.get_rank()}
    names = like.device_mesh.mesh_dim_names
    for dim, placement in enumerate(like.placements):
        ranks = dist.get_process_group_ranks(like.device_mesh.get_group(dim))
        if others.isdisjoint(ranks) or (may_be_copied and placement.is_replicate()):
            continue
        raise ValueError(
            f"{label} must not be spread over ranks that exchange it, got a DTensor with the placement {placement!r} over "
            f"mesh dimension {names[dim] if names else dim!r} of ranks {ranks}; give the group of another dimension, as in "
            'group=mesh["replica"].get_group(), and shard the model over the other dimensions only'
        )
