"""Creates the NCCL backend that serves a group's CUDA tensors: the one that torch itself would use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fog_pg import environment

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# torch 2.15's default NCCL backend connects all ranks of a group when it is given a device. This variant of torch
# waits for the first operation, and connects only two ranks for messages between them, like the NCCL backends of
# earlier versions.
_LAZY = "nccl-lazy"


def create(store: dist.Store, rank: int, size: int, options: Any, device: torch.device, eager: bool) -> Any:
    """Returns a backend for CUDA tensors.

    Args:
        store: The group's store.
        rank: This rank in the group.
        size: Number of ranks.
        options: The group's options; timeout, name and global ranks also apply to the new backend.
        device: The first tensor's device. torch 2.15's backend stays on that device.
        eager: All ranks of the group make this call now, so it may connect them. Otherwise it does not communicate:
            the backend connects ranks in the first operation.

    Raises:
        RuntimeError: This torch has no NCCL.
    """
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise RuntimeError("fog: CUDA tensors need a torch with NCCL, which this one is built without")
    own = dist.PrefixStore("fog.cuda", store)
    # The list is empty in the default group, but NCCL backends before torch 2.15 need it to split a group, unless they
    # are the first of the process.
    ranks = list(options.global_ranks_in_group) or list(range(size))
    given = dist.ProcessGroupNCCL.Options()
    given._timeout = options._timeout
    lazy = not eager and hasattr(given, "lazy_init")
    plugin = _plugin(dist, lazy)
    if plugin is not None:
        if lazy:
            setattr(given, "lazy_init", True)  # noqa: B010  older versions lack the attribute
        return plugin.creator_fn(
            SimpleNamespace(
                store=own,
                group_rank=rank,
                group_size=size,
                timeout=options._timeout,
                group_id=options.group_name,
                global_ranks_in_group=ranks,
                split_from=None,
                enable_reconfigure=False,
                process_group=SimpleNamespace(bound_device_id=device),
            ),
            given,
        )
    given.is_high_priority_stream = False
    given.global_ranks_in_group = ranks
    given.group_name = options.group_name
    backend = dist.ProcessGroupNCCL(own, rank, size, given)
    backend._set_sequence_number_for_group()
    return backend


def _plugin(dist: Any, lazy: bool) -> Any:
    """The registered plugin for NCCL in torch 2.14 and later; None for earlier versions, where NCCL is built in."""
    ensure = getattr(dist.Backend, "_ensure_backend_registered", None)
    if ensure is None:
        return None
    wanted = ["nccl"]
    if lazy and environment.USE_NCCL2.get() != "0":  # with 0, torch uses the backend of earlier versions
        wanted.insert(0, _LAZY)
    for name in wanted:
        ensure(name)
        if (plugin := dist.Backend._plugins.get(name.upper())) is not None:
            return plugin
    return None
