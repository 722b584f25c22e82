"""The operations between neighbors: averages and gathers along a topology, or with the peers of one call.

An operation waits and returns its output. With ``async_op=True`` it returns a `torch.distributed.Work` at once, as the
functions of torch.distributed do; `work.wait()` raises the operation's error, and ``work.get_future().value()`` is then the
list of its outputs, which has one entry if the operation was given one tensor. Inputs must not change before that.

Operations that average take one tensor or a list of tensors, of any shapes and dtypes. A list is one exchange, in which
each peer gets one message per dtype, and the output is a list. The averages are new tensors, or are written into `out`:
contiguous tensors like `tensor`, which may be the same ones.

Operations are matched in the order in which ranks call them, or by `name` if all ranks give one: named operations may be
called in different orders. Every operation takes the keyword `group`: by default the group of `init`, else any group with
a fog backend that this rank is in. Ranks are those of the group. Operations work on detached data; only the operators of
`fogdist.ops` are differentiable. Inputs need not be contiguous.

For tensors on a GPU the order of calls counts in any case, and `wait` orders the current stream after the operation
without waiting for the device. With `enable_topo_check`, the ranks compare their calls on the host before each exchange:
docs/device_neighbors.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch.distributed as dist
from torch import Tensor

from fogdist.arguments import Tensors, dense, has_dimensions, key, outputs_of, plain, weighted, weighted_list
from fogdist.compression import Codec, encoding_of
from fogdist.context import Context, PreconditionError, current
from fogdist.machines import homogeneous, machine_exchanges
from fogdist.verification import verify

if TYPE_CHECKING:
    from fogdist.exchange import Exchange

# The number of generated names for the unnamed gossips of a pair. They repeat, because the backend remembers each name.
_GOSSIP_NAMES = 64


def neighbor_allreduce(
    tensor: Tensors,
    *,
    self_weight: float | None = None,
    src_weights: Mapping[int, float] | None = None,
    dst_weights: Iterable[int] | Mapping[int, float] | None = None,
    out: Tensors | None = None,
    async_op: bool = False,
    enable_topo_check: bool = True,
    compression: Codec | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Returns the weighted average of the tensors of this rank and its in-neighbors.

    ``out_i = self_weight_i * x_i + sum_j src_weights_i[j] * dst_weights_j[i] * x_j``. The weights select the exchange:

    - Without weights, the rank exchanges with all neighbors of the topology, with its weights.
    - With `self_weight` and `src_weights`, it is the same exchange with these weights. An in-neighbor that is not in
      `src_weights` has the weight 0.
    - With `dst_weights` too, it is a dynamic exchange, independent of the topology. This rank receives exactly from the
      ranks in `src_weights` and sends exactly to those in `dst_weights`; both may be empty.

    Args:
        tensor: float16, bfloat16, float32, float64, complex64 or complex128; of the same shape and dtype on
            all ranks that exchange. Or a list or tuple of such tensors, which may differ from each other.
        self_weight: Weight of this rank's own tensor.
        src_weights: {source rank: weight}.
        dst_weights: {destination rank: weight}, or destination ranks that all weigh 1.
        out: Gets the averages; by default new tensors.
        async_op: True to return a `torch.distributed.Work` at once; the check of a dynamic exchange is done before.
        enable_topo_check: True to check a dynamic exchange first, with one more allreduce of 16 bytes. All ranks of the
            group must take part, and they raise the same ValueError if two of them disagree. False gives the fastest
            exchange; a disagreement then raises an error at the group's timeout at the latest. In an exchange along
            the topology, whose edges the ranks compared when they set it, True makes a sender wait until the receiver
            has accepted the tensor.
        compression: A codec of `fogdist.compression`, the same on all ranks that exchange. Each rank encodes its tensor
            once; the sum is that of the decoded tensors, and of this rank's own as it is. A list is one message for
            each dtype. On one host this only costs time: docs/compression.md.
        name: Matches the operation among ranks instead of its order. With the check of a dynamic exchange,
            the order still counts among operations of the same name.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor or a list of them, `out` is not like it, a weight is not a real
            number, a rank not an integer, `src_weights` not a dict, or `compression` no codec.
        ValueError: A dtype that has no weighted sums, or that the codec does not take; an empty list; `out` is not contiguous
            or has another shape or dtype; weights that do not come together; ranks that are out of range, given twice, this
            rank itself, or (without `dst_weights`) no in-neighbors; a weight that is not finite; ranks that disagree; before
            `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    context = current(group)
    sources = weighted(tensor) if isinstance(tensor, Tensor) else weighted_list(tensor)
    exchange = context.topology.exchanges.weighted(self_weight, src_weights, dst_weights, enable_topo_check)
    encoding = {} if compression is None else encoding_of(compression)
    output = None if out is None else outputs_of(out, sources)
    if async_op or encoding or exchange.is_verified:
        work = begin_average(context, sources, exchange, key(name), output, encoding)
        return work if async_op else _finished(work, sources, out)
    # A single call of the backend, which makes no Work, because this dominates small exchanges.
    results = context.backend.neighbor_allreduce_blocking(
        sources, exchange.plan, output, key(name), exchange.confirm
    )
    return _given(results, sources, out)


def hierarchical_neighbor_allreduce(
    tensor: Tensors,
    *,
    self_weight: float | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None,
    out: Tensors | None = None,
    async_op: bool = False,
    enable_topo_check: bool = False,
    compression: Codec | None = None,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Returns the weighted average of this machine's mean and its in-neighbor machines' means.

    With ``m_k`` the mean of the tensors of machine k's ranks, every rank of machine k gets
    ``self_weight_k * m_k + sum_j src_machine_weights_k[j] * dst_machine_weights_j[k] * m_j``. All ranks of
    the group take part, and those of one machine must give the same weights. The weights select the exchange:

    - Without weights, a machine exchanges with all neighbors of the machine topology, with its weights.
    - With all three, this machine receives exactly from the machines in `src_machine_weights` and sends exactly to
      those in `dst_machine_weights`, which must be neighbors in the machine topology; both may be empty.

    Args:
        tensor: As in `neighbor_allreduce`; of the same shape and dtype on all ranks of the group.
        self_weight: Weight of this machine's own mean.
        src_machine_weights: {source machine: weight}.
        dst_machine_weights: {destination machine: weight}, or destination machines that all weigh 1.
        out: As in `neighbor_allreduce`.
        async_op: As in `neighbor_allreduce`.
        enable_topo_check: True to check an exchange with weights first, with one more allreduce of 16 bytes: all ranks
            raise the same ValueError if machines, or ranks of one machine, disagree. Along the machine topology it
            works as in `neighbor_allreduce`.
        compression: As in `neighbor_allreduce`, between machines: each rank encodes the slice of its machine's mean
            that it sends. Within a machine nothing is encoded.
        name: As in `neighbor_allreduce`.
        group: The group of ranks; by default that of `init`.

    Raises:
        PreconditionError: The ranks are not spread homogeneously over the machines, or a machine holds one
            rank only; use `neighbor_allreduce` then.
        TypeError: As `neighbor_allreduce`, of machines.
        ValueError: As `neighbor_allreduce`, of machines; only some of the three are given; machines that are no neighbors in
            the machine topology.
        RuntimeError: No weights are given and no machine topology is set; after `shutdown`;
            torch.distributed.DistBackendError if the operation fails in flight.
    """
    context = current(group)
    sources = weighted(tensor) if isinstance(tensor, Tensor) else weighted_list(tensor)
    weights = self_weight, src_machine_weights, dst_machine_weights
    output = None if out is None else outputs_of(out, sources)
    work = begin_between_machines(
        context, sources, weights, enable_topo_check, key(name), output, encoding_of(compression)
    )
    return work if async_op else _finished(work, sources, out)


def pair_gossip(
    tensor: Tensors,
    target_rank: int,
    *,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    out: Tensors | None = None,
    async_op: bool = False,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Returns the weighted average of the tensors of this rank and one other rank.

    Both ranks must call it, each with the other as its target; no other ranks take part. Its order counts only
    among the gossips of this pair, so other ranks may gossip more often or not at all (Boyd, Ghosh, Prabhakar
    and Shah, "Randomized gossip algorithms", IEEE Transactions on Information Theory 52, 2006).

    Args:
        tensor: As in `neighbor_allreduce`; the same shapes and dtypes on both ranks.
        target_rank: The other rank.
        self_weight: Weight of this rank's tensor; by default both weigh 1/2.
        pair_weight: Weight of the other rank's tensor; given exactly if `self_weight` is.
        out: As in `neighbor_allreduce`.
        async_op: As in `neighbor_allreduce`. Up to 64 unnamed gossips with one rank may be in flight. A further one first
            waits for the oldest of them.
        name: Matches the operation of the two ranks in place of its order.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor or a list of them, `target_rank` not an integer, a
            weight not a real number, or `name` not a string.
        ValueError: `target_rank` is out of range or this rank itself; only one weight is given, or one that
            is not finite; a dtype that has no weighted sums; `name` is in flight already; before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    context = current(group)
    sources = weighted(tensor) if isinstance(tensor, Tensor) else weighted_list(tensor)
    output = None if out is None else outputs_of(out, sources)
    exchange = context.topology.exchanges.gossip(target_rank, self_weight, pair_weight)
    ((peer, _),) = exchange.sources
    # The pair has its own names, because in the group's order of calls ranks that do not gossip would count too.
    pair = f"pair_gossip {min(context.rank, peer)} {max(context.rank, peer)}"
    if given := key(name):
        work = begin_average(context, sources, exchange, f"{pair}: {given}", output)
    else:
        gossips = context.gossips
        unnamed = f"{pair} #{gossips.begun[peer] % _GOSSIP_NAMES}"
        if unnamed in gossips.in_flight:
            gossips.in_flight.pop(unnamed).wait()
        work = begin_average(context, sources, exchange, unnamed, output)
        gossips.begun[peer] += 1
        if async_op:
            gossips.keep(unnamed, work)
    return work if async_op else _finished(work, sources, out)


def neighbor_allgather(
    tensor: Tensor,
    *,
    src_ranks: Iterable[SupportsIndex] | None = None,
    dst_ranks: Iterable[SupportsIndex] | None = None,
    async_op: bool = False,
    enable_topo_check: bool = True,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Returns the tensors of the in-neighbors, without this rank's own, concatenated on dimension 0.

    It has no `out`, because the size of the result is known only when the messages have arrived.

    Args:
        tensor: Of one dimension or more; the first may differ among ranks, the others and the dtype not.
        src_ranks: Ranks to receive from, in the order of the result. By default the in-neighbors of the
            topology, ascending.
        dst_ranks: Ranks to send to; given exactly if `src_ranks` is.
        async_op: As in `neighbor_allreduce`.
        enable_topo_check: As in `neighbor_allreduce`.
        name: As in `neighbor_allreduce`.
        group: The group of ranks; by default that of `init`.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor, a rank not an integer, or `name` not a string.
        ValueError: `tensor` has no dimension; only one of `src_ranks` and `dst_ranks` is given; ranks that
            are out of range, given twice or this rank itself; ranks that disagree; before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if the operation fails in flight.
    """
    context = current(group)
    source = has_dimensions(plain(dense(tensor)))
    exchange = context.topology.exchanges.gathering(src_ranks, dst_ranks, enable_topo_check)
    unique = key(name)
    if exchange.is_verified:
        verify(context, exchange, [source], unique)
    work = context.backend.neighbor_allgather(source, exchange.plan, name=unique, confirm=exchange.confirm)
    return work if async_op else _finished(work, source, None)


def begin_average(
    context: Context,
    sources: Tensors,
    exchange: Exchange,
    name: str,
    output: Tensors | None = None,
    encoding: Mapping[str, Any] = {},
) -> dist.Work:
    """Begins an exchange of weighted averages, after the collective check if it was asked for.

    Args:
        context: The group.
        sources: One tensor or a list of them, as of `weighted`.
        exchange: The peers and weights.
        name: Name of the operation, or "".
        output: As of `outputs_of`; None for new tensors.
        encoding: The arguments of the backend for a codec: `fogdist.compression.encoding_of`.
    """
    if exchange.is_verified:
        verify(context, exchange, [sources] if isinstance(sources, Tensor) else sources, name)
    return context.backend.neighbor_allreduce(
        sources, exchange.plan, output=output, name=name, confirm=exchange.confirm, **encoding
    )


def begin_between_machines(
    context: Context,
    sources: Tensors,
    weights: tuple[Any, Any, Any],
    enable_topo_check: bool,
    name: str,
    output: Tensors | None,
    encoding: Mapping[str, Any],
) -> dist.Work:
    """Begins `hierarchical_neighbor_allreduce` with its three weights; the other arguments are those of `begin_average`."""
    if len(homogeneous(context).machines[0]) == 1:
        raise PreconditionError(
            "hierarchical_neighbor_allreduce needs more than one rank on each machine, got "
            f"{len(context.machines)} machines of 1 rank; neighbor_allreduce is the same there"
        )
    exchange = machine_exchanges(context).weighted(*weights, enable_topo_check)
    if exchange.is_verified:
        verify(context, exchange, [sources] if isinstance(sources, Tensor) else sources, name)
    return context.backend.hierarchical_neighbor_allreduce(
        sources,
        context.machines,
        exchange.plan,
        output=output,
        name=name,
        confirm=exchange.confirm,
        **encoding,
    )


def _finished(work: dist.Work, sources: Tensors, out: Tensors | None) -> Tensor | list[Tensor]:
    work.wait()
    return _given(work.get_future().value(), sources, out)


def _given(results: list[Tensor], sources: Tensors, out: Tensors | None) -> Tensor | list[Tensor]:
    """Returns what the caller gets: `out` itself if there is one, else a tensor for a tensor and a list for a list."""
    if out is not None:
        return out if isinstance(out, Tensor) else list(out)
    return results[0] if isinstance(sources, Tensor) else results
