"""Collectives and neighbor collectives in the call forms of every BlueFog version; objects as asyncddp sends them.

An operation has up to four forms, made by `forms` of one function that begins it: the plain one, which waits; one that ends
in "nonblocking" and returns a handle for `wait`; and both with a "_" at the end, which write their results into their
input, also if it is not contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fogdist
from fogdist.arguments import dense, has_dimensions, key, plain, writable
from fogdist.bluefog import handles
from fogdist.bluefog.deprecation import warn_once
from fogdist.bluefog.handles import Begun, Function, forms
from fogdist.context import PreconditionError, current
from fogdist.topology.validation import check_flags, check_rank


def _target(tensor: Any, in_place: bool) -> tuple[Tensor, Callable[[dist.Work], Tensor]]:
    """Returns memory for a result that begins as a tensor's values, and what returns the result for the caller."""
    source = dense(tensor)
    if not in_place:
        buffer = torch.empty_like(source, memory_format=torch.contiguous_format).copy_(source)
        return buffer, lambda _: buffer
    inside = plain(writable(source))

    def finish(_: dist.Work) -> Tensor:
        if inside.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(inside)
        result: Tensor = tensor
        return result

    return inside, finish


def _begin_allreduce(
    in_place: bool,
    tensor: Tensor,
    average: bool = True,
    is_hierarchical_local: bool | str | None = False,
    name: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Begun:
    """Returns the mean, or the sum, of the tensors of all ranks, or of the ranks of this machine.

    No other machine is waited for with `is_hierarchical_local`, but unless it has a name the operation counts in the
    order of all ranks. A string there is the name, as in BlueFog up to 0.2.1. `name` matches the operation among
    ranks in place of its order. The mean of integers or bools is a PreconditionError; a `name` that is in flight
    already is a ValueError.
    """
    if is_hierarchical_local is None or isinstance(is_hierarchical_local, str):
        name, is_hierarchical_local = is_hierarchical_local or name, False
    check_flags(average=average, is_hierarchical_local=is_hierarchical_local)
    buffer, finish = _target(tensor, in_place)
    if average and not (buffer.is_floating_point() or buffer.is_complex()):
        raise PreconditionError(
            f"average must be False for a tensor of integers or bools, got {average!r} with {buffer.dtype}"
        )
    context, op = current(group), dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    if is_hierarchical_local:
        return context.backend.local_allreduce(buffer, context.machines, op, name=key(name)), finish
    return context.backend.allreduce_named(buffer, op, name=key(name)), finish


def _begin_broadcast(
    in_place: bool,
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Begun:
    """Returns the tensor of one rank; `name` and errors as of `allreduce`.

    The plain form is differentiable: the gradient of the root's tensor is the sum of all ranks' gradients of the output,
    that of the others' is zero. Backward is an exchange too: if the tensor requires a gradient on one rank, it has to
    on all, and all run backward in the same order, else they wait until the group's timeout.
    """
    buffer, finish = _target(tensor, in_place)
    context = current(group)
    root = check_rank(root_rank, context.size, "root_rank")
    return context.backend.broadcast_named(buffer, root, name=key(name)), finish


def _begin_allgather(
    tensor: Tensor, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Begun:
    """Returns all tensors, concatenated on dimension 0, whose size may differ; otherwise as `allreduce`."""
    source = has_dimensions(plain(dense(tensor)))
    return current(group).backend.allgather_concat(source, name=key(name)), _one


def _one(work: dist.Work) -> Tensor:
    result: Tensor = work.get_future().value()[0]
    return result


def _begin(operation: Function, tensor: Any, *arguments: Any, **options: Any) -> Begun:
    """Begins an operation of fogdist between neighbors, of a tensor or a list of tensors."""
    work = operation(tensor, *arguments, async_op=True, **options)
    return work, _one if isinstance(tensor, Tensor) else lambda done: done.get_future().value()


def _with_weights(operation: Function, **renamed: str) -> Callable[..., Begun]:
    """BlueFog up to 0.2.4 took weights and name by position, and its keywords had other names; the first had `average`.

    `renamed` has the old keywords of sources and destinations, in this order, and what they are called now.
    """
    sources, destinations = renamed.values()
    order = ("self_weight", sources, destinations, "enable_topo_check", "name")

    @functools.wraps(operation, ("__name__", "__doc__"))
    def begin(tensor: Any, *positional: Any, **options: Any) -> Begun:
        if positional and isinstance(positional[0], bool):
            options["average"], *rest = positional
            positional = (None, None, *rest)
        if not options.pop("average", True):
            options |= {"self_weight": 1.0, sources: dict.fromkeys(fogdist.in_neighbor_ranks(), 1.0)}
            positional = (None, None, *positional[2:])
        if len(positional) > len(order):
            raise TypeError(f"{operation.__name__}() takes at most {1 + len(order)} arguments by position")
        given = {name: value for name, value in zip(order, positional, strict=False) if value is not None}
        if isinstance(given.get(destinations), str):  # of BlueFog up to 0.2.1, which had no destinations
            given["name"] = given.pop(destinations)
        for old, new in renamed.items():
            if old in options:
                warn_once(f"{operation.__name__}: {old!r} is called {new!r} now; the old name will go")
                if new in options or new in given:
                    raise TypeError(f"{old} and {new} must not both be given: they are the same")
                given[new] = options.pop(old)
        return _begin(operation, tensor, **given, **options)

    return begin


def _begin_neighbor_allgather(tensor: Any, name: str | None = None, **options: Any) -> Begun:
    """As `fogdist.neighbor_allgather`; BlueFog up to 0.2 took the name by position."""
    return _begin(fogdist.neighbor_allgather, tensor, name=name, **options)


def _begin_pair_gossip(
    tensor: Any,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
    **options: Any,
) -> Begun:
    """As `fogdist.pair_gossip`, also by position."""
    options |= {"self_weight": self_weight, "pair_weight": pair_weight, "name": name}
    return _begin(fogdist.pair_gossip, tensor, target_rank, **options)


allreduce, allreduce_nonblocking = forms(_begin_allreduce, "allreduce", False)
allreduce_, allreduce_nonblocking_ = forms(_begin_allreduce, "allreduce_", True)
_broadcast, broadcast_nonblocking = forms(_begin_broadcast, "broadcast", False)
broadcast_, broadcast_nonblocking_ = forms(_begin_broadcast, "broadcast_", True)
allgather, allgather_nonblocking = forms(_begin_allgather, "allgather")
neighbor_allgather, neighbor_allgather_nonblocking = forms(_begin_neighbor_allgather, "neighbor_allgather")
pair_gossip, pair_gossip_nonblocking = forms(_begin_pair_gossip, "pair_gossip")
neighbor_allreduce, neighbor_allreduce_nonblocking = forms(
    _with_weights(fogdist.neighbor_allreduce, neighbor_weights="src_weights", send_neighbors="dst_weights"),
    "neighbor_allreduce",
)
hierarchical_neighbor_allreduce, hierarchical_neighbor_allreduce_nonblocking = forms(
    _with_weights(
        fogdist.hierarchical_neighbor_allreduce,
        neighbor_machine_weights="src_machine_weights",
        send_neighbor_machines="dst_machine_weights",
    ),
    "hierarchical_neighbor_allreduce",
)


def broadcast(tensor: Tensor, root_rank: int, *arguments: Any, **options: Any) -> Any:
    if not (isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()):
        return _broadcast(tensor, root_rank, *arguments, **options)
    from torch.distributed.nn.functional import broadcast as differentiable

    group = current(options.get("group")).group
    root = check_rank(root_rank, group.size(), "root_rank")
    return differentiable(tensor, dist.get_global_rank(group, root), group)  # type: ignore[no-untyped-call]


broadcast.__doc__ = _broadcast.__doc__


def barrier(*, group: dist.ProcessGroup | None = None) -> None:
    """Returns when all ranks of a group have called it, after it has waited for this rank's operations in flight.

    Operations of all groups are waited for. What was sent before it has arrived after it. Handles stay, and what went
    wrong `wait` tells. So a rank must not hold a mutex that an operation of another rank waits for.
    """
    handles.settle()
    current(group).group.barrier().wait()


def broadcast_object(obj: Any, src: int = 0, device: Any = None, name: str | None = None) -> Any:
    """Returns one rank's object, pickled on the way. Collective.

    Unpickling runs what the root has put in: all ranks must trust each other, as in torch.distributed. `device` and
    `name` are not used: objects travel in host memory, and calls are matched in their order.
    """
    objects = [obj]
    broadcast_object_list(objects, src)
    return objects[0]


def broadcast_object_list(
    object_list: list[Any], src: int | None = 0, device: Any = None, name: str | None = None
) -> None:
    """As `broadcast_object`, in place, of the objects of lists of one length; of empty ones nothing is sent."""
    src = check_rank(0 if src is None else src, fogdist.size(), "src")
    if object_list:
        dist.broadcast_object_list(object_list, src=src)
