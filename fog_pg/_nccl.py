"""Makes the NCCL backend that serves a group's CUDA tensors: the one that torch itself would take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fog_pg import environment

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# torch 2.15's NCCL backend connects all ranks of a group when it is given a device. This one of torch's waits for a first
# operation, and connects two ranks alone for messages between them, as NCCL backends of earlier versions do.
_LAZY = "nccl-lazy"


def create(store: dist.Store, rank: int, size: int, options: Any, device: torch.device, eager: bool) -> Any:
    """Returns a backend for CUDA tensors.

    Args:
        store: The group's.
        rank: This rank in the group.
        size: Number of ranks.
        options: The group's, of which time-out, name and global ranks hold for the new backend too.
        device: Where the first tensor is. torch 2.15's backend stays on that device.
        eager: All ranks of the group call this now, so it may connect them. Otherwise it does not communicate: the
            backend connects ranks when a first operation comes.

    Raises:
        RuntimeError: This torch has no NCCL.
    """
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise RuntimeError("fog: CUDA tensors need a torch with NCCL, which this one is built without")
    own = dist.PrefixStore("fog.cuda", store)
    # Empty in the default group, for which NCCL backends before torch 2.15 have the ranks only if they are the first
    # of the process; to split they need them.
    ranks = list(options.global_ranks_in_group) or list(range(size))
    given = dist.ProcessGroupNCCL.Options()
    given._timeout = options._timeout
    lazy = not eager and hasattr(given, "lazy_init")
    plugin = _plugin(dist, lazy)
    if plugin is not None:
        if lazy:
            setattr(given, "lazy_init", True)  # noqa: B010  which older ones have not
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
    """What makes NCCL backends in torch 2.14 and later, where they are registered as anybody's; else None."""
    ensure = getattr(dist.Backend, "_ensure_backend_registered", None)
    if ensure is None:
        return None
    wanted = ["nccl"]
    if lazy and environment.USE_NCCL2.get() != "0":  # which takes the backend of earlier versions
        wanted.insert(0, _LAZY)
    for name in wanted:
        ensure(name)
        if (plugin := dist.Backend._plugins.get(name.upper())) is not None:
            return plugin
    return None
