"""The operations a user calls: collectives of the whole group and exchanges with neighbors, with handles.

Every operation has a nonblocking form that returns an int handle; `wait` of the handle gives the output. The
tensors it was called with must not be changed before that. Operations are matched in the order in which ranks
call them, or, where all ranks give the same `name`, by that name: named operations may be called in different
orders.

All operations work on detached data: nothing is differentiated through them. Tensors need not be contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.context import PreconditionError, current
from fogdist.exchange import gathering_exchange, reject_unknown_arguments, verify, weighted_exchange
from fogdist.topology.validation import check_rank

_WEIGHTED_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def allreduce(tensor: Tensor, average: bool = True, *, name: str | None = None) -> Tensor:
    """Returns the average, or the sum, of the tensors of all ranks. The input is not changed.

    Args:
        tensor: Of the same shape and dtype on all ranks.
        average: True for the mean, False for the sum.
        name: Matches the operation among ranks in place of its order.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor, or `name` not a string.
        PreconditionError: The average of integers or bools is asked for.
        ValueError: `name` is in flight already, or before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    return wait(allreduce_nonblocking(tensor, average, name=name))


def allreduce_nonblocking(tensor: Tensor, average: bool = True, *, name: str | None = None) -> int:
    """Starts `allreduce` and returns its handle."""
    source = _dense(tensor)
    _check_average(source, average)
    output = _own_copy(source)
    return _start_allreduce(output, average, name, output)


def allreduce_(tensor: Tensor, average: bool = True, *, name: str | None = None) -> Tensor:
    """As `allreduce`, in place; returns `tensor`."""
    return wait(allreduce_nonblocking_(tensor, average, name=name))


def allreduce_nonblocking_(tensor: Tensor, average: bool = True, *, name: str | None = None) -> int:
    """Starts `allreduce_` and returns its handle. The tensor holds the result after `wait`, not earlier."""
    target = _dense(tensor)
    _check_average(target, average)
    return _start_allreduce(_plain(target), average, name, tensor)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Returns the tensor of one rank. The input is not changed.

    Args:
        tensor: Of the same shape and dtype on all ranks; its values count on the root only.
        root_rank: The rank whose tensor all get.
        name: Matches the operation among ranks in place of its order.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor, `root_rank` not an integer, or `name` not a string.
        ValueError: `root_rank` is not a rank, `name` is in flight already, or before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    return wait(broadcast_nonblocking(tensor, root_rank, name))


def broadcast_nonblocking(tensor: Tensor, root_rank: int, name: str | None = None) -> int:
    """Starts `broadcast` and returns its handle."""
    output = _own_copy(_dense(tensor))
    return _start_broadcast(output, root_rank, name, output)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """As `broadcast`, in place; returns `tensor`."""
    return wait(broadcast_nonblocking_(tensor, root_rank, name))


def broadcast_nonblocking_(tensor: Tensor, root_rank: int, name: str | None = None) -> int:
    """Starts `broadcast_` and returns its handle. The tensor holds the result after `wait`, not earlier."""
    return _start_broadcast(_plain(_dense(tensor)), root_rank, name, tensor)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Returns the tensors of all ranks, concatenated on dimension 0 in order of ranks.

    Args:
        tensor: Of one dimension or more; the first may differ among ranks, the others and the dtype not.
        name: Matches the operation among ranks in place of its order.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor, or `name` not a string.
        ValueError: `tensor` has no dimension, `name` is in flight already, or before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    return wait(allgather_nonblocking(tensor, name))


def allgather_nonblocking(tensor: Tensor, name: str | None = None) -> int:
    """Starts `allgather` and returns its handle."""
    context = current()
    source = _plain(_dense(tensor))
    _check_has_dimensions(source)
    work = context.backend.allgather_concat(source, name=_key(name))
    return context.handles.add(work, _only_result, source)


def neighbor_allreduce(
    tensor: Tensor,
    *,
    self_weight: float | None = None,
    src_weights: Mapping[int, float] | None = None,
    dst_weights: Iterable[int] | Mapping[int, float] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
    **removed: object,
) -> Tensor:
    """Returns the weighted average of this rank's tensor and its in-neighbors'. The input is not changed.

    ``out_i = self_weight_i * x_i + sum_j src_weights_i[j] * dst_weights_j[i] * x_j``. The weights decide:

    - None given: an exchange with all neighbors of the topology, with its weights if it was set with
      `is_weighted`, else the plain mean ``1 / (in-degree + 1)``.
    - `self_weight` and `src_weights`: the same exchange with these weights; an in-neighbor that `src_weights`
      leaves out weighs 0.
    - `dst_weights` too: a dynamic exchange. Whatever the topology is, this rank receives exactly from the
      ranks in `src_weights` and sends exactly to those in `dst_weights`; both may be empty.

    Args:
        tensor: float16, bfloat16, float32, float64, complex64 or complex128; of the same shape and dtype on
            all ranks that exchange.
        self_weight: Weight of this rank's own tensor.
        src_weights: {source rank: weight}.
        dst_weights: {destination rank: weight}, or destination ranks that all weigh 1.
        enable_topo_check: True to check a dynamic exchange first: all ranks of the group must take part, tell
            each other their peers, and raise the same ValueError if two of them disagree. False for the
            fastest exchange; a disagreement then ends in the group's timeout. In an exchange along the
            topology, True makes a sender wait until the receiver has agreed.
        name: Matches the operation among ranks in place of its order. With the check of a dynamic exchange
            the order counts also among named operations.
        **removed: `neighbor_weights` and `send_neighbors` of older scripts, to say what they are called now.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor, a weight is not a real number, a rank not an integer,
            `src_weights` not a dict, or an argument was renamed.
        ValueError: A dtype that has no weighted sums; weights that do not come together; ranks that are out
            of range, given twice, this rank itself, or (without `dst_weights`) no in-neighbors; a weight that
            is not finite; ranks that disagree; before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    reject_unknown_arguments("neighbor_allreduce", removed)
    return wait(
        neighbor_allreduce_nonblocking(
            tensor,
            self_weight=self_weight,
            src_weights=src_weights,
            dst_weights=dst_weights,
            enable_topo_check=enable_topo_check,
            name=name,
        )
    )


def neighbor_allreduce_nonblocking(
    tensor: Tensor,
    *,
    self_weight: float | None = None,
    src_weights: Mapping[int, float] | None = None,
    dst_weights: Iterable[int] | Mapping[int, float] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
    **removed: object,
) -> int:
    """Starts `neighbor_allreduce` and returns its handle; the check of a dynamic exchange is done at once."""
    reject_unknown_arguments("neighbor_allreduce_nonblocking", removed)
    context = current()
    source = _plain(_dense(tensor))
    if source.dtype not in _WEIGHTED_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _WEIGHTED_DTYPES)
        raise ValueError(f"tensor must have one of the dtypes {allowed}, got {source.dtype}")
    exchange = weighted_exchange(context, self_weight, src_weights, dst_weights)
    key = _key(name)
    if enable_topo_check and exchange.is_dynamic:
        verify(context, exchange, source, key)
    confirm = enable_topo_check and not exchange.is_dynamic
    work = context.backend.neighbor_allreduce(source, exchange.plan, name=key, confirm=confirm)
    return context.handles.add(work, _only_result, source)


def neighbor_allgather(
    tensor: Tensor,
    *,
    src_ranks: Iterable[int] | None = None,
    dst_ranks: Iterable[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Tensor:
    """Returns the tensors of the in-neighbors, without this rank's own, concatenated on dimension 0.

    Args:
        tensor: Of one dimension or more; the first may differ among ranks, the others and the dtype not.
        src_ranks: Ranks to receive from, in the order of the result. By default the in-neighbors of the
            topology, ascending.
        dst_ranks: Ranks to send to; given exactly if `src_ranks` is.
        enable_topo_check: As in `neighbor_allreduce`.
        name: As in `neighbor_allreduce`.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor, a rank not an integer, or `name` not a string.
        ValueError: `tensor` has no dimension; only one of `src_ranks` and `dst_ranks` is given; ranks that
            are out of range, given twice or this rank itself; ranks that disagree; before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    return wait(
        neighbor_allgather_nonblocking(
            tensor, src_ranks=src_ranks, dst_ranks=dst_ranks, enable_topo_check=enable_topo_check, name=name
        )
    )


def neighbor_allgather_nonblocking(
    tensor: Tensor,
    *,
    src_ranks: Iterable[int] | None = None,
    dst_ranks: Iterable[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> int:
    """Starts `neighbor_allgather` and returns its handle; the check of a dynamic exchange is done at once."""
    context = current()
    source = _plain(_dense(tensor))
    _check_has_dimensions(source)
    exchange = gathering_exchange(context, src_ranks, dst_ranks)
    key = _key(name)
    if enable_topo_check and exchange.is_dynamic:
        verify(context, exchange, source, key)
    confirm = enable_topo_check and not exchange.is_dynamic
    work = context.backend.neighbor_allgather(source, exchange.plan, name=key, confirm=confirm)
    return context.handles.add(work, _only_result, source)


def poll(handle: int) -> bool:
    """Returns whether an operation is complete, whether well or not; `wait` tells which.

    Args:
        handle: From a nonblocking operation.

    Raises:
        TypeError: `handle` is not an integer.
        ValueError: `handle` is unknown or was waited for already.
        RuntimeError: After `shutdown`.
    """
    return current().handles.poll(handle)


def wait(handle: int) -> Tensor:
    """Waits for an operation, frees its handle and returns its output.

    Args:
        handle: From a nonblocking operation.

    Raises:
        TypeError: `handle` is not an integer.
        ValueError: `handle` is unknown or was waited for already.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation failed.
    """
    return current().handles.wait(handle)


def synchronize(handle: int) -> Tensor:
    """The same as `wait`."""
    return wait(handle)


def barrier() -> None:
    """Returns when all ranks have called it.

    Raises:
        ValueError: Before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if a rank does not come.
    """
    current().group.barrier().wait()


def _start_allreduce(buffer: Tensor, average: bool, name: str | None, target: Tensor) -> int:
    context = current()
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    work = context.backend.allreduce_named(buffer, op, name=_key(name))
    return context.handles.add(work, lambda _: _deliver(buffer, target), buffer)


def _start_broadcast(buffer: Tensor, root_rank: SupportsIndex, name: str | None, target: Tensor) -> int:
    context = current()
    root = check_rank(root_rank, context.size, "root_rank")
    work = context.backend.broadcast_named(buffer, root, name=_key(name))
    return context.handles.add(work, lambda _: _deliver(buffer, target), buffer)


def _only_result(work: dist.Work) -> Tensor:
    return work.get_future().value()[0]


def _deliver(buffer: Tensor, target: Tensor) -> Tensor:
    """Puts an in-place result into the user's tensor, if it could not be computed there."""
    if buffer.data_ptr() != target.data_ptr():
        target.detach().copy_(buffer)
    return target


def _dense(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"tensor must be dense (layout torch.strided), got layout {tensor.layout}")
    return tensor.detach()


def _plain(tensor: Tensor) -> Tensor:
    """The tensor itself if its memory holds its values in order, else a copy that does."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _own_copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def _check_average(tensor: Tensor, average: bool) -> None:
    if average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise PreconditionError(
            f"average must be False for a tensor of integers or bools, got {average!r} with {tensor.dtype}"
        )


def _check_has_dimensions(tensor: Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError("tensor must have at least one dimension to be concatenated on, got a 0-d tensor")


def _key(name: str | None) -> str:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    return name or ""
