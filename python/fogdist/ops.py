"""The exchange that torch.compile traces and autograd differentiates: `torch.ops.fog.neighbor_allreduce`.

It takes peers and weights as plain lists, and waits for the result. `import fogdist` registers it; it needs
`fogdist.init` when it runs, not when it is traced. ::

    neighbor_allreduce(Tensor tensor, float self_weight, int[] src_ranks, float[] src_weights,
                       int[] dst_ranks, float[] dst_weights, str group_name="") -> Tensor

`group_name` is the attribute of that name of a ProcessGroup, "" the group of `fogdist.init`. Sums and errors
are those of `fogdist.neighbor_allreduce`:
``out_i = self_weight_i x_i + sum_j src_weight_i[j] dst_weight_j[i] x_j``. `fogdist.topology.Topology.peers` gives a topology's.

The derivative is the adjoint exchange, along reversed edges: rank j's gradient is
``self_weight_j g_j + sum_i src_weight_i[j] dst_weight_j[i] g_i``. Rank i, which received, scales the gradient that it
sends back by its source weight, and rank j, which sent, scales it by its destination weight. So the derivative is the
same operation with sources and destinations exchanged, and it is differentiable any number of times. Backward is an
exchange like forward: all ranks that exchanged forward must run it, in the same order. If a tensor needs no gradient on
one rank, or no loss of a rank depends on the output, its neighbors wait until the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.arguments import WEIGHTED_DTYPES, weighted
from fogdist.context import Context, current
from fogdist.exchange import RANKS, Exchange, Peers, check_weight
from fogdist.topology import check_neighbor_ranks


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
    return context.backend.neighbor_allreduce_blocking(weighted(tensor), exchange.plan)[0]


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


_operation = torch.library.custom_op(
    "fog::neighbor_allreduce",
    _neighbor_allreduce,
    mutates_args=(),
    schema=(
        "(Tensor tensor, float self_weight, int[] src_ranks, float[] src_weights, int[] dst_ranks, "
        'float[] dst_weights, str group_name="") -> Tensor'
    ),
)
_operation.register_fake(_fake)
_operation.register_autograd(_reverse_exchange, setup_context=_keep_arguments)
