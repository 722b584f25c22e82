"""Broadcasts of parameters and optimizer state, and averages of parameters over all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.agreement import check_same_everywhere
from fogdist.context import Context, current
from fogdist.nested import replaced
from fogdist.packing import flatten, make_buckets, signature_of, unflatten
from fogdist.shards import check_apart, local_of
from fogdist.topology.validation import check_rank

Parameters = Mapping[str, Any] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


def broadcast_parameters(
    params: Parameters, root_rank: int, *, group: dist.ProcessGroup | None = None
) -> None:
    """Overwrites parameters with those of one rank, in place. Collective.

    A process that joins a running job (docs/membership.md) gets the state of the others later, and does nothing here.

    Args:
        params: A dict of names to tensors, such as ``model.state_dict()``; or tensors or (name, tensor) pairs,
            such as ``model.named_parameters()``. Names, shapes and dtypes must be the same on all ranks; a
            dict's order does not count. For a DTensor, this rank's shard counts. A dict's entries that are no tensors, such
            as those of `get_extra_state`, are replaced in the dict: ``model.load_state_dict`` gives them to the model.
        root_rank: The rank whose values all ranks receive.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: `root_rank` is not an integer; an entry cannot be pickled (on all ranks alike).
        ValueError: `params` is none of these, or a DTensor is sharded over ranks of the group; ranks disagree on a name,
            shape or dtype (on all ranks alike); `root_rank` is not a rank; before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    context = current(group)
    root = check_rank(root_rank, context.size, "root_rank")
    named = _named(params, context.group)
    if context.is_joining:
        return
    _check_same_signatures(context, named)
    _broadcast_named(context, params, named, root)


def broadcast_module(module: torch.nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Gives a module the parameters, buffers and extra state of rank 0. Collective; see `broadcast_parameters`."""
    state = module.state_dict()
    has_others = any(not isinstance(value, Tensor) for value in state.values())
    broadcast_parameters(state, 0, group=group)
    if has_others:
        module.load_state_dict(state)


def allreduce_parameters(params: Parameters, *, group: dist.ProcessGroup | None = None) -> None:
    """Overwrites parameters with their average over all ranks, in place. Collective.

    What has no average gets the values of rank 0: counts, such as `num_batches_tracked`, flags, and what is no tensor.

    Args:
        params: As in `broadcast_parameters`.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: As `broadcast_parameters`.
        ValueError: As `broadcast_parameters`.
        RuntimeError: As `broadcast_parameters`.
    """
    context = current(group)
    named = _named(params, context.group)
    _check_same_signatures(context, named)
    tensors = [value for _, value in named if _has_average(value)]
    with torch.no_grad():
        flats = [(bucket, flatten(bucket, tensors)) for bucket in make_buckets(tensors)]
        works = [context.backend.allreduce_named(flat, dist.ReduceOp.AVG) for _, flat in flats]
        for (bucket, flat), work in zip(flats, works, strict=True):
            work.wait()
            unflatten(bucket, flat, tensors)
    _broadcast_named(context, params, [pair for pair in named if not _has_average(pair[1])], 0)


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
    state = _broadcast_state(context, "optimizer", optimizer.state_dict(), root)
    if context.rank != root:
        optimizer.load_state_dict(state)


@dataclass(frozen=True)
class _TensorSlot:
    """A placeholder in a state for a tensor that is broadcast separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _broadcast_named(
    context: Context, params: Parameters, named: Sequence[tuple[Any, Any]], root: int
) -> None:
    """Broadcasts entries of `params`: tensors in place, others into the dict."""
    _broadcast_tensors(context, [value for _, value in named if isinstance(value, Tensor)], root)
    others = {key: value for key, value in named if not isinstance(value, Tensor)}
    if others:
        assert isinstance(params, MutableMapping)  # as `_named` has checked
        params.update(_broadcast_state(context, "params", others, root))


def _broadcast_state(context: Context, argument: str, state: Any, root: int) -> Any:
    """Returns the state of the root, as of `replaced`. Raises TypeError on all ranks if it cannot be pickled."""
    tensors: list[Tensor] = []

    def take(value: Any, _: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value.detach().cpu())
        return _TensorSlot(tuple(value.shape), value.dtype)

    def make(value: Any, _: str) -> Any:
        if not isinstance(value, _TensorSlot):
            return value
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device="cpu"))
        return tensors[-1]

    message: list[Any] = [None]
    if context.rank == root:
        try:
            message[0] = pickle.dumps(replaced(state, take))
        except Exception as error:  # whatever a class raises
            message[0] = f"{argument} must be of types that can be pickled, got one that cannot: {error}"
    dist.broadcast_object_list(message, group_src=root, group=context.group)
    if isinstance(message[0], str):
        raise TypeError(message[0])
    if context.rank != root:
        state = replaced(pickle.loads(message[0]), make)
    _broadcast_tensors(context, tensors, root)
    return state


def _broadcast_tensors(context: Context, tensors: list[Tensor], root: int) -> None:
    with torch.no_grad():
        flats = [(bucket, flatten(bucket, tensors)) for bucket in make_buckets(tensors)]
        works = [context.backend.broadcast_named(flat, root) for _, flat in flats]
        for (bucket, flat), work in zip(flats, works, strict=True):
            work.wait()
            if context.rank != root:
                unflatten(bucket, flat, tensors)


def _named(params: Parameters, group: dist.ProcessGroup) -> list[tuple[Any, Any]]:
    """Returns names and values, in the same order on all ranks; values that are no tensors only of a dict."""
    if isinstance(params, Mapping):
        pairs: Iterable[Any] = sorted(params.items(), key=lambda pair: pair[0])
    elif isinstance(params, Iterable) and not isinstance(params, (Tensor, str)):
        pairs = [(str(i), item) if isinstance(item, Tensor) else item for i, item in enumerate(params)]
    else:
        raise ValueError(
            "params must be a dict, or an iterable of tensors or of (name, tensor), got "
            f"{type(params).__name__}"
        )
    named = []
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ValueError(f"params must hold tensors only, or (name, tensor) pairs, got {pair!r}")
        if not isinstance(pair[1], Tensor) and not isinstance(params, MutableMapping):
            raise ValueError(f"params must be a dict for entries that are no tensors, got {pair!r}")
        name, value = pair
        if isinstance(value, Tensor):
            check_apart(value, repr(name), group, may_be_copied=True)
            value = local_of(value)
        named.append((name, value))
    return named


def _has_average(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _check_same_signatures(context: Context, named: Sequence[tuple[Any, Any]]) -> None:
    signatures = [signature_of(value) if isinstance(value, Tensor) else "no tensor" for _, value in named]
    check_same_everywhere(
        context.backend,
        "params",
        [
            f"item {place} {str(name)!r}: {signature}"
            for place, ((name, _), signature) in enumerate(zip(named, signatures, strict=True))
        ],
    )
