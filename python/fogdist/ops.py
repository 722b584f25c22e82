"""Exchanges that torch.compile traces and autograd differentiates: `torch.ops.fog`.

`torch.ops.fog.neighbor_allreduce` takes peers and weights as plain lists,
`torch.ops.fog.neighbor_allreduce_along_topology` takes them from the topology of a group when it runs. Both
wait for the result. `import fogdist` registers them; they need `fogdist.init` when they run, not when they
are traced. ::

    neighbor_allreduce(Tensor tensor, float self_weight, int[] src_ranks, float[] src_weights,
                       int[] dst_ranks, float[] dst_weights, str group_name="") -> Tensor
    neighbor_allreduce_along_topology(Tensor tensor, str group_name="") -> Tensor

`group_name` is the attribute of that name of a ProcessGroup, "" the group of `fogdist.init`. Sums and errors
are those of `fogdist.neighbor_allreduce`:
``out_i = self_weight_i x_i + sum_j src_weight_i[j] dst_weight_j[i] x_j``.

The derivative is the adjoint exchange, along reversed edges: rank j's gradient is
``self_weight_j g_j + sum_i src_weight_i[j] dst_weight_j[i] g_i``. Rank i, which received, scales the gradient that it
sends back by its source weight, and rank j, which sent, scales it by its destination weight. So the derivative is the
same operation with sources and destinations exchanged, and it is differentiable any number of times. Backward is an
exchange like forward: all ranks that exchanged forward must run it, in the same order. If a tensor needs no gradient on
one rank, or no loss of a rank depends on the output, its neighbors wait until the group's timeout. Along the topology,
backward uses the topology that is set when it runs: change it between steps, not between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.arguments import WEIGHTED_DTYPES, weighted
from fogdist.context import Context, current
from fogdist.exchange import RANKS, Exchange, Peers, check_weight
from fogdist.topology import check_neighbor_ranks

if TYPE_CHECKING:
    from fog_pg._C import NeighborPlan


def _neighbor_allreduce(
    tensor: Tensor,
    self_weight: float,
    src_ranks: list[int],
    src_weights: list[float],
    dst_ranks: list[int],
    dst_weights: list[float],
    group_name: str = "",
) -> Tensor:
    context = _context(group_name)
    own = check_weight(self_weight, "self_weight")
    sources = _peers(context, src_ranks, src_weights, "src")
    destinations = _peers(context, dst_ranks, dst_weights, "dst")
    exchange = Exchange(RANKS, context.rank, context.size, own, sources, destinations)
    return _exchange(context, tensor, exchange.plan)


def _along_topology(tensor: Tensor, group_name: str = "") -> Tensor:
    context = _context(group_name)
    return _exchange(context, tensor, context.topology.along.plan)


def _against_topology(tensor: Tensor, group_name: str = "") -> Tensor:
    context = _context(group_name)
    forward = context.topology.along
    # The weight of the mean belongs to the receiver of the forward pass, which scales its gradient by it here.
    share = 1.0 / (len(forward.sources) + 1) if forward.mean else 1.0
    reverse = Exchange(
        RANKS,
        context.rank,
        context.size,
        share * forward.self_weight,
        forward.destinations,
        tuple((source, share * weight) for source, weight in forward.sources),
    )
    return _exchange(context, tensor, reverse.plan)


def _context(group_name: str) -> Context:
    if not group_name:
        return current()
    try:
        # The function by which torch's own operators resolve a group's name.
        resolve: Callable[[str], dist.ProcessGroup] = vars(dist.distributed_c10d)["_resolve_process_group"]
        group = resolve(group_name)
    except (RuntimeError, KeyError):
        raise ValueError(f"group_name must be that of a process group, got {group_name!r}") from None
    return current(group)


def _peers(context: Context, ranks: list[int], weights: list[float], side: str) -> Peers:
    if len(ranks) != len(weights):
        raise ValueError(f"{side}_weights must be as many as {side}_ranks, {len(ranks)}, got {len(weights)}")
    peers = check_neighbor_ranks(ranks, context.rank, context.size, f"{side}_ranks")
    checked = [check_weight(weight, f"{side}_weights[{place}]") for place, weight in enumerate(weights)]
    return tuple(sorted(zip(peers, checked, strict=True)))


def _exchange(context: Context, tensor: Tensor, plan: NeighborPlan) -> Tensor:
    return context.backend.neighbor_allreduce_blocking(weighted(tensor), plan)[0]


def _fake(tensor: Tensor, *_: object) -> Tensor:
    if tensor.dtype not in WEIGHTED_DTYPES:
        raise ValueError(f"tensor must have a floating-point or complex dtype, got {tensor.dtype}")
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _reverse_exchange(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    self_weight, src_ranks, src_weights, dst_ranks, dst_weights, group_name = ctx.arguments
    reverse = torch.ops.fog.neighbor_allreduce(
        gradient, self_weight, dst_ranks, dst_weights, src_ranks, src_weights, group_name
    )
    return reverse, None, None, None, None, None, None


def _reverse_topology(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.fog._neighbor_allreduce_against_topology(gradient, *ctx.arguments), None


def _forward_topology(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.fog.neighbor_allreduce_along_topology(gradient, *ctx.arguments), None


# The last one is the adjoint of the second. It is a separate operator because the topology is known only at run time:
# a derivative that torch.compile traces would hold the topology of the time of tracing as constants.
for _schema, _kernel, _backward in (
    (
        (
            "neighbor_allreduce(Tensor tensor, float self_weight, int[] src_ranks, float[] src_weights, "
            'int[] dst_ranks, float[] dst_weights, str group_name="") -> Tensor'
        ),
        _neighbor_allreduce,
        _reverse_exchange,
    ),
    (
        'neighbor_allreduce_along_topology(Tensor tensor, str group_name="") -> Tensor',
        _along_topology,
        _reverse_topology,
    ),
    (
        '_neighbor_allreduce_against_topology(Tensor tensor, str group_name="") -> Tensor',
        _against_topology,
        _forward_topology,
    ),
):
    _name, _, _signature = _schema.partition("(")
    _operation = torch.library.custom_op(f"fog::{_name}", _kernel, mutates_args=(), schema=f"({_signature}")
    _operation.register_fake(_fake)
    _operation.register_autograd(_backward, setup_context=_keep_arguments)
