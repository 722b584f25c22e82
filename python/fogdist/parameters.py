"""Broadcasts of parameters and optimizer state, and averages of parameters over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.agreement import check_same_everywhere
from fogdist.collectives import allreduce_nonblocking_, broadcast_nonblocking_, wait
from fogdist.context import Context, PreconditionError, current
from fogdist.packing import flatten, make_buckets, signature_of, unflatten
from fogdist.shards import local_of
from fogdist.topology.validation import check_rank

Parameters = Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


def broadcast_parameters(
    params: Parameters, root_rank: int, *, group: dist.ProcessGroup | None = None
) -> None:
    """Overwrites parameters with those of one rank, in place. Collective.

    A process that joins a running job (docs/membership.md) gets the state of the others later, and does nothing here.

    Args:
        params: A dict of names to tensors, such as ``model.state_dict()``; or tensors or (name, tensor) pairs,
            such as ``model.named_parameters()``. Names, shapes and dtypes must be the same on all ranks; a
            dict's order does not count. For a DTensor, this rank's shard counts.
        root_rank: The rank whose values all ranks receive.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: `root_rank` is not an integer.
        ValueError: `params` is none of these; ranks disagree on a name, shape or dtype (on all ranks alike);
            `root_rank` is not a rank; before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    context = current(group)
    root = check_rank(root_rank, context.size, "root_rank")
    named = _named(params)
    if context.is_joining:
        return
    _check_same_signatures(context, named)
    _broadcast_tensors(context, [tensor for _, tensor in named], root)


def allreduce_parameters(params: Parameters, *, group: dist.ProcessGroup | None = None) -> None:
    """Overwrites parameters with their average over all ranks, in place. Collective.

    Args:
        params: As in `broadcast_parameters`, of floating-point or complex dtypes.
        group: The group of ranks; by default that of `init`.

    Raises:
        PreconditionError: A tensor of integers or bools, which has no average.
        ValueError: As `broadcast_parameters`.
        RuntimeError: As `broadcast_parameters`.
    """
    context = current(group)
    named = _named(params)
    for name, tensor in named:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise PreconditionError(
                f"params must have floating-point or complex dtypes, got {name!r} of {tensor.dtype}"
            )
    _check_same_signatures(context, named)
    tensors = [tensor for _, tensor in named]
    with torch.no_grad():
        flats = [(bucket, flatten(bucket, tensors)) for bucket in make_buckets(tensors)]
        handles = [allreduce_nonblocking_(flat, group=context.group) for _, flat in flats]
        for (bucket, flat), handle in zip(flats, handles, strict=True):
            wait(handle)
            unflatten(bucket, flat, tensors)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, *, group: dist.ProcessGroup | None = None
) -> None:
    """Overwrites an optimizer's state and options with those of one rank. Collective.

    The function sends all contents of ``state_dict()``: tensors, numbers, None, and the options of the parameter groups.
    An optimizer does not need to have made a step; if the root has no state, no rank has state afterwards. A process
    that joins does nothing here, as in `broadcast_parameters`.

    Args:
        optimizer: With the same parameter groups, by number of parameters, on all ranks.
        root_rank: The rank whose state all ranks receive.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: `optimizer` is not a torch.optim.Optimizer, or `root_rank` not an integer.
        ValueError: `optimizer` is an LBFGS, whose history is of one trajectory; ranks disagree on the
            parameter groups (on all ranks alike); `root_rank` is not a rank; before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    context = current(group)
    root = check_rank(root_rank, context.size, "root_rank")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer must not be an LBFGS: its state cannot be broadcast")
    if context.is_joining:
        return
    check_same_everywhere(
        context.backend,
        "optimizer",
        [
            f"parameter group {i} of {len(group['params'])} parameters"
            for i, group in enumerate(optimizer.param_groups)
        ],
    )
    tensors: list[Tensor] = []
    message: list[Any] = [None]
    if context.rank == root:
        message[0] = _take_tensors(optimizer.state_dict(), tensors)
    dist.broadcast_object_list(message, group_src=root, group=context.group)
    if context.rank == root:
        _broadcast_tensors(context, tensors, root)
    else:
        state = _make_tensors(message[0], tensors)
        _broadcast_tensors(context, tensors, root)
        optimizer.load_state_dict(state)


@dataclass(frozen=True)
class _TensorSlot:
    """A placeholder in a state dict for a tensor that is broadcast separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _take_tensors(state: Any, tensors: list[Tensor]) -> Any:
    """Returns `state` with slots for its tensors, which are appended to `tensors`."""
    if isinstance(state, Tensor):
        tensors.append(state.detach().cpu())
        return _TensorSlot(tuple(state.shape), state.dtype)
    return _map_containers(state, lambda value: _take_tensors(value, tensors))


def _make_tensors(state: Any, tensors: list[Tensor]) -> Any:
    """Returns `state` with new tensors in its slots, which are appended to `tensors` in `_take_tensors`' order."""
    if isinstance(state, _TensorSlot):
        tensors.append(torch.empty(state.shape, dtype=state.dtype, device="cpu"))
        return tensors[-1]
    return _map_containers(state, lambda value: _make_tensors(value, tensors))


def _map_containers(value: Any, function: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _broadcast_tensors(context: Context, tensors: list[Tensor], root: int) -> None:
    with torch.no_grad():
        flats = [(bucket, flatten(bucket, tensors)) for bucket in make_buckets(tensors)]
        handles = [broadcast_nonblocking_(flat, root, group=context.group) for _, flat in flats]
        for (bucket, flat), handle in zip(flats, handles, strict=True):
            wait(handle)
            if context.rank != root:
                unflatten(bucket, flat, tensors)


def _named(params: Parameters) -> list[tuple[str, Tensor]]:
    if isinstance(params, Mapping):
        pairs: Iterable[Any] = sorted(params.items(), key=lambda pair: pair[0])
    elif isinstance(params, Iterable) and not isinstance(params, (Tensor, str)):
        pairs = [(str(i), item) if isinstance(item, Tensor) else item for i, item in enumerate(params)]
    else:
        raise ValueError(
            "params must be a dict of tensors, or an iterable of tensors or of (name, tensor), got "
            f"{type(params).__name__}"
        )
    named = []
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise ValueError(f"params must hold tensors only, or (name, tensor) pairs, got {pair!r}")
        named.append((str(pair[0]), local_of(pair[1])))
    return named


def _check_same_signatures(context: Context, named: list[tuple[str, Tensor]]) -> None:
    check_same_everywhere(
        context.backend,
        "params",
        [f"item {place} {name!r}: {signature_of(tensor)}" for place, (name, tensor) in enumerate(named)],
    )
