"""Averages between machines: each machine exchanges the mean of its ranks, and all its ranks get the same result.

Forms, handles, names, groups and lists are those of `fogdist.neighbor_collectives`. The machine topology defines the
neighbors: `fogdist.set_machine_topology`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor

from fogdist.arguments import Average, Tensors, key
from fogdist.compression import Codec, encoding_of
from fogdist.context import PreconditionError, current, handles
from fogdist.exchange import reject_unknown_arguments
from fogdist.machines import homogeneous, machine_exchanges
from fogdist.verification import verify

_RENAMED = {
    "neighbor_machine_weights": "src_machine_weights",
    "send_neighbor_machines": "dst_machine_weights",
}


@overload
def hierarchical_neighbor_allreduce(
    tensor: Tensor,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None,
    enable_topo_check: bool = False,
    compression: Codec | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
    **removed: object,
) -> Tensor: ...
@overload
def hierarchical_neighbor_allreduce(
    tensor: Sequence[Tensor],
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None,
    enable_topo_check: bool = False,
    compression: Codec | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
    **removed: object,
) -> list[Tensor]: ...
def hierarchical_neighbor_allreduce(
    tensor: Tensors,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None,
    enable_topo_check: bool = False,
    compression: Codec | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
    **removed: object,
) -> Tensor | list[Tensor]:
    """Returns the weighted average of this machine's mean and its in-neighbor machines' means.

    With ``m_k`` the mean of the tensors of machine k's ranks, every rank of machine k gets
    ``self_weight_k * m_k + sum_j src_machine_weights_k[j] * dst_machine_weights_j[k] * m_j``. All ranks of
    the group take part, and those of one machine must give the same weights. The input is not changed. The
    weights select the exchange:

    - Without weights, a machine exchanges with all neighbors of the machine topology, with its weights if it was set
      with `is_weighted`, else with the plain mean over this machine and its in-neighbors.
    - With all three, this machine receives exactly from the machines in `src_machine_weights` and sends exactly to
      those in `dst_machine_weights`, which must be neighbors in the machine topology; both may be empty.

    Args:
        tensor: As in `neighbor_allreduce`; of the same shape and dtype on all ranks of the group.
        self_weight: Weight of this machine's own mean.
        src_machine_weights: {source machine: weight}.
        dst_machine_weights: {destination machine: weight}, or destination machines that all weigh 1.
        enable_topo_check: True to check an exchange with weights first, with one more allreduce of 16 bytes: all ranks
            raise the same ValueError if machines, or ranks of one machine, disagree. Along the machine topology it
            works as in `neighbor_allreduce`.
        compression: As in `neighbor_allreduce`, between machines: each rank encodes the slice of its machine's mean
            that it sends. Within a machine nothing is encoded.
        name: As in `neighbor_allreduce`.
        group: The group of ranks; by default that of `init`.
        **removed: `neighbor_machine_weights` and `send_neighbor_machines` of older scripts; the error names the new
            arguments.

    Raises:
        PreconditionError: The ranks are not spread homogeneously over the machines, or a machine holds one
            rank only; use `neighbor_allreduce` then.
        TypeError: `tensor` is not a dense torch.Tensor or a list of them, a weight is not a real number, a
            machine not an integer, `src_machine_weights` not a dict, or an argument was renamed.
        ValueError: A dtype that has no weighted sums; an empty list; only some of the three are given;
            machines that are out of range, given twice, this machine itself, or no neighbors in the machine
            topology; a weight that is not finite; machines that disagree; before `init`.
        RuntimeError: No weights are given and no machine topology is set; after `shutdown`;
            torch.distributed.DistBackendError if the operation fails in flight.
    """
    reject_unknown_arguments("hierarchical_neighbor_allreduce", removed, _RENAMED)
    weights = self_weight, src_machine_weights, dst_machine_weights
    encoding = encoding_of(compression)
    return _wait(*_start(tensor, False, *weights, enable_topo_check, name, group, encoding))


def hierarchical_neighbor_allreduce_nonblocking(
    tensor: Tensors,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None,
    enable_topo_check: bool = False,
    compression: Codec | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
    **removed: object,
) -> int:
    """Starts `hierarchical_neighbor_allreduce` and returns its handle; a check is done at once."""
    reject_unknown_arguments("hierarchical_neighbor_allreduce_nonblocking", removed, _RENAMED)
    weights = self_weight, src_machine_weights, dst_machine_weights
    encoding = encoding_of(compression)
    return start_between_machines(tensor, False, *weights, enable_topo_check, name, group, encoding)


@overload
def hierarchical_neighbor_allreduce_(
    tensor: Tensor,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None,
    enable_topo_check: bool = False,
    compression: Codec | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor: ...
@overload
def hierarchical_neighbor_allreduce_(
    tensor: Sequence[Tensor],
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None,
    enable_topo_check: bool = False,
    compression: Codec | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]: ...
def hierarchical_neighbor_allreduce_(
    tensor: Tensors,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None,
    enable_topo_check: bool = False,
    compression: Codec | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor | list[Tensor]:
    """As `hierarchical_neighbor_allreduce`, in place: writes the average into `tensor` and returns it.

    Raises:
        ValueError: Also for an expanded tensor, which has no memory for each element.
    """
    weights = self_weight, src_machine_weights, dst_machine_weights
    encoding = encoding_of(compression)
    return _wait(*_start(tensor, True, *weights, enable_topo_check, name, group, encoding))


def hierarchical_neighbor_allreduce_nonblocking_(
    tensor: Tensors,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None,
    enable_topo_check: bool = False,
    compression: Codec | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Starts `hierarchical_neighbor_allreduce_` and returns its handle; the result is there after `wait`."""
    weights = self_weight, src_machine_weights, dst_machine_weights
    encoding = encoding_of(compression)
    return start_between_machines(tensor, True, *weights, enable_topo_check, name, group, encoding)


def _start(
    tensors: Tensors,
    in_place: bool,
    self_weight: float | None,
    src_machine_weights: Mapping[int, float] | None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None,
    enable_topo_check: bool,
    name: str | None,
    group: dist.ProcessGroup | None,
    encoding: Mapping[str, Any],
) -> tuple[Average, dist.Work]:
    context = homogeneous(current(group))
    if len(context.machines[0]) == 1:
        raise PreconditionError(
            "hierarchical_neighbor_allreduce needs more than one rank on each machine, got "
            f"{len(context.machines)} machines of 1 rank; neighbor_allreduce is the same there"
        )
    average = Average(tensors, in_place)
    exchange = machine_exchanges(context).weighted(
        self_weight, src_machine_weights, dst_machine_weights, enable_topo_check
    )
    unique = key(name)
    if exchange.is_verified:
        verify(context, exchange, average.sources, unique)
    return average, context.backend.hierarchical_neighbor_allreduce(
        average.given,
        context.machines,
        exchange.plan,
        output=average.output,
        name=unique,
        confirm=exchange.confirm,
        **encoding,
    )


def _wait(average: Average, work: dist.Work) -> Tensor | list[Tensor]:
    work.wait()
    return average.finish(work)


def start_between_machines(
    tensors: Tensors,
    in_place: bool,
    self_weight: float | None,
    src_machine_weights: Mapping[int, float] | None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None,
    enable_topo_check: bool,
    name: str | None,
    group: dist.ProcessGroup | None,
    encoding: Mapping[str, Any],
) -> int:
    """Starts `hierarchical_neighbor_allreduce`, whose arguments these are, and returns its handle.

    Args:
        in_place: Whether the averages are written into the tensors.
        encoding: The arguments of the backend for a codec: `fogdist.compression.encoding_of`.
    """
    weights = self_weight, src_machine_weights, dst_machine_weights
    average, work = _start(tensors, in_place, *weights, enable_topo_check, name, group, encoding)
    return handles().add(work, average.finish, *average.sources)
