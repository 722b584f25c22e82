"""The operations of a whole group, and the handles of operations in flight.

Every operation has a nonblocking form that returns an int handle; `wait` of the handle returns the output. The
input tensors must not change before that. Operations are matched in the order in which ranks call them, or by
`name` if all ranks give one: named operations may be called in different orders. For tensors on a GPU the order
counts in any case, and `wait` orders the current stream after the operation without waiting for the device.

Every operation takes the keyword `group`: by default the group of `init`, else any group with a fog backend
that this rank is in. Ranks in arguments and results are those of the group. Operations work on detached data;
only `broadcast` and the operators of `fogdist.ops` are differentiable. Tensors need not be contiguous.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fogdist.arguments import deliver, dense, has_dimensions, key, only_result, own_copy, plain, writable
from fogdist.context import PreconditionError, current, handles
from fogdist.topology.validation import check_flags, check_rank


def allreduce(
    tensor: Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Returns the average, or the sum, of the tensors of all ranks. The input is not changed.

    Args:
        tensor: Of the same shape and dtype on all ranks.
        average: True for the mean, False for the sum.
        is_hierarchical_local: True for the mean or sum over the ranks of this rank's machine only. No other
            machine is waited for, but unless it has a name the operation counts in the order of all ranks.
        name: Matches the operation among ranks in place of its order.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor, `average` or `is_hierarchical_local` not a bool, `name`
            not a string, or `group` not a process group.
        PreconditionError: The average of integers or bools is asked for.
        ValueError: `name` is in flight already, `group` has no fog backend, or before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    result: Tensor = wait(allreduce_nonblocking(tensor, average, is_hierarchical_local, name, group=group))
    return result


def allreduce_nonblocking(
    tensor: Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Starts `allreduce` and returns its handle."""
    source = dense(tensor)
    _check_average(source, average)
    output = own_copy(source)
    return _start_allreduce(output, average, is_hierarchical_local, name, output, group)


def allreduce_(
    tensor: Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """As `allreduce`, in place; returns `tensor`."""
    result: Tensor = wait(allreduce_nonblocking_(tensor, average, is_hierarchical_local, name, group=group))
    return result


def allreduce_nonblocking_(
    tensor: Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Starts `allreduce_` and returns its handle. The tensor holds the result after `wait`, not earlier."""
    target = writable(dense(tensor))
    _check_average(target, average)
    return _start_allreduce(plain(target), average, is_hierarchical_local, name, tensor, group)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Returns the tensor of one rank. The input is not changed.

    It is differentiable: the gradient of the root's tensor is the sum of all ranks' gradients of the output, that
    of the others' is zero. Backward is an exchange too: if the tensor requires a gradient on one rank, it has to
    on all, and all run backward in the same order, else they wait until the group's timeout.

    Args:
        tensor: Of the same shape and dtype on all ranks; its values count on the root only.
        root_rank: The rank whose tensor all ranks receive.
        name: Matches the operation among ranks in place of its order.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor, `root_rank` not an integer, `name` not a string, or
            `group` not a process group.
        ValueError: `root_rank` is not a rank, `name` is in flight already, `group` has no fog backend, or
            before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        differentiable: Tensor = _Broadcast.apply(tensor, root_rank, name, group)  # type: ignore[no-untyped-call]
        return differentiable
    result: Tensor = wait(broadcast_nonblocking(tensor, root_rank, name, group=group))
    return result


def broadcast_nonblocking(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> int:
    """Starts `broadcast` and returns its handle. Nothing is differentiated through it."""
    output = own_copy(dense(tensor))
    return _start_broadcast(output, root_rank, name, output, group)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """As `broadcast`, in place; returns `tensor`."""
    result: Tensor = wait(broadcast_nonblocking_(tensor, root_rank, name, group=group))
    return result


def broadcast_nonblocking_(
    tensor: Tensor, root_rank: int, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> int:
    """Starts `broadcast_` and returns its handle. The tensor holds the result after `wait`, not earlier."""
    return _start_broadcast(plain(writable(dense(tensor))), root_rank, name, tensor, group)


def allgather(tensor: Tensor, name: str | None = None, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns the tensors of all ranks, concatenated on dimension 0 in order of ranks.

    Args:
        tensor: Of one dimension or more; the first may differ among ranks, the others and the dtype not.
        name: Matches the operation among ranks in place of its order.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor, `name` not a string, or `group` not a process group.
        ValueError: `tensor` has no dimension, `name` is in flight already, `group` has no fog backend, or
            before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    result: Tensor = wait(allgather_nonblocking(tensor, name, group=group))
    return result


def allgather_nonblocking(
    tensor: Tensor, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> int:
    """Starts `allgather` and returns its handle."""
    context = current(group)
    source = has_dimensions(plain(dense(tensor)))
    work = context.backend.allgather_concat(source, name=key(name))
    return handles().add(work, only_result, source)


def poll(handle: int) -> bool:
    """Returns whether an operation is complete, whether well or not; `wait` tells which.

    Args:
        handle: From a nonblocking operation, on any group.

    Raises:
        TypeError: `handle` is not an integer.
        ValueError: `handle` is unknown or was waited for already.
        RuntimeError: After `shutdown`.
    """
    return handles().poll(handle)


def wait(handle: int) -> Any:
    """Waits for an operation, frees its handle and returns its output.

    Args:
        handle: From a nonblocking operation, on any group.

    Returns:
        The output: a tensor, or a list of tensors where the operation was given a list.

    Raises:
        TypeError: `handle` is not an integer.
        ValueError: `handle` is unknown or was waited for already.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation failed.
    """
    return handles().wait(handle)


def synchronize(handle: int) -> Any:
    """The same as `wait`."""
    return wait(handle)


def barrier(*, group: dist.ProcessGroup | None = None) -> None:
    """Returns when all ranks of a group have called it.

    Args:
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: `group` has no fog backend, or before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if a rank does not come.
    """
    current(group).group.barrier().wait()


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.root_rank, ctx.group = root_rank, group
        result: Tensor = wait(broadcast_nonblocking(tensor, root_rank, name, group=group))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        total = allreduce(gradient, average=False, group=ctx.group)
        is_root = current(ctx.group).rank == ctx.root_rank
        return total if is_root else torch.zeros_like(total), None, None, None


def _start_allreduce(
    buffer: Tensor,
    average: bool,
    is_hierarchical_local: bool,
    name: str | None,
    target: Tensor,
    group: dist.ProcessGroup | None,
) -> int:
    if type(is_hierarchical_local) is not bool:
        if isinstance(is_hierarchical_local, str):  # BlueFog 0.1 had the name in this position
            raise TypeError(
                f"is_hierarchical_local must be True or False, got {is_hierarchical_local!r}: is it the name? "
                "Give that as name="
            )
        check_flags(is_hierarchical_local=is_hierarchical_local)
    context = current(group)
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    if is_hierarchical_local:
        work = context.backend.local_allreduce(buffer, context.machines, op, name=key(name))
    else:
        work = context.backend.allreduce_named(buffer, op, name=key(name))
    return handles().add(work, lambda _: deliver(buffer, target), buffer)


def _start_broadcast(
    buffer: Tensor,
    root_rank: SupportsIndex,
    name: str | None,
    target: Tensor,
    group: dist.ProcessGroup | None,
) -> int:
    context = current(group)
    root = check_rank(root_rank, context.size, "root_rank")
    work = context.backend.broadcast_named(buffer, root, name=key(name))
    return handles().add(work, lambda _: deliver(buffer, target), buffer)


def _check_average(tensor: Tensor, average: bool) -> None:
    if type(average) is not bool:
        check_flags(average=average)
    if average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise PreconditionError(
            f"average must be False for a tensor of integers or bools, got {average!r} with {tensor.dtype}"
        )
