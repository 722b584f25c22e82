"""A common way to call every collective of c10d, with its inputs, its outputs and the check of its result.

Tests that check the same property of all collectives (types, sizes, layouts, futures, operations in flight, subgroups)
use ``prepare``.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from reference import Checks, make_input, reduce, sum_in_rank_order
from torch import Tensor

# Reductions that are defined for complex, floating and integer types. PREMUL_SUM multiplies by PREMUL_FACTOR first.
PREMUL_FACTOR = 0.375
_COMPLEX_REDUCTIONS = ["SUM", "AVG", "PREMUL_SUM"]
_FLOAT_REDUCTIONS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"]
_BOOL_REDUCTIONS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
_INTEGER_REDUCTIONS = [*_BOOL_REDUCTIONS, "AVG"]

REDUCING = ["all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
MOVING = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
]
COLLECTIVES = REDUCING + MOVING
ROOTED = ["broadcast", "reduce", "gather", "scatter"]
# These return a Future; the others return a Work.
WITHOUT_WORK = ["all_reduce_coalesced", "all_gather_coalesced"]
# Operations on whole tensors that are cut along dimension 0; they have no zero-dimensional form.
CUT_ALONG_ROWS = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]


# Starts an operation; its argument is ``async_op``.
Start = Callable[[bool], "dist.Work | torch.futures.Future | None"]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A collective that is ready to start on this rank.

    Attributes:
        start: Calls the collective with ``async_op`` as argument; returns c10d's result: a Work, a Future for the
            coalesced forms, None for a synchronous call.
        outputs: Tensors that the collective writes on this rank.
        verify: Checks the outputs after the collective is complete, and that its inputs are unchanged.
    """

    start: Start
    outputs: list[Tensor]
    verify: Callable[[Checks, str], None]


def reductions(dtype: torch.dtype) -> list[str]:
    """Returns the names of the reductions that are defined for a dtype."""
    names = _BOOL_REDUCTIONS if dtype == torch.bool else _INTEGER_REDUCTIONS
    if dtype.is_complex:
        names = _COMPLEX_REDUCTIONS
    elif dtype.is_floating_point:
        names = _FLOAT_REDUCTIONS
    return names


def reduce_op(name: str) -> dist.ReduceOp:
    """Returns the ``ReduceOp`` of a name."""
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(PREMUL_FACTOR)
    return getattr(dist.ReduceOp, name)


def _with(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(options, name, value)
    return options


# c10d's functions, as `prepare` calls them, of a group that c10d does not know: a rank of a `VirtualWorld`.
OF_BACKEND = types.SimpleNamespace(
    get_rank=lambda group: group.rank(),
    get_world_size=lambda group: group.size(),
    all_reduce=lambda tensor, op, group, **_: group.allreduce(
        [tensor], _with(dist.AllreduceOptions(), reduceOp=op)
    ),
    all_reduce_coalesced=lambda tensors, op, group, **_: group.allreduce_coalesced(
        tensors, _with(dist.AllreduceCoalescedOptions(), reduceOp=op)
    ),
    reduce=lambda tensor, op, group, group_dst, **_: group.reduce(
        [tensor], _with(dist.ReduceOptions(), reduceOp=op, rootRank=group_dst)
    ),
    reduce_scatter=lambda output, tensors, op, group, **_: group.reduce_scatter(
        [output], [tensors], _with(dist.ReduceScatterOptions(), reduceOp=op)
    ),
    reduce_scatter_tensor=lambda output, tensor, op, group, **_: group._reduce_scatter_base(
        output, tensor, _with(dist.ReduceScatterOptions(), reduceOp=op)
    ),
    broadcast=lambda tensor, group, group_src, **_: group.broadcast(
        [tensor], _with(dist.BroadcastOptions(), rootRank=group_src)
    ),
    all_gather=lambda outputs, tensor, group, **_: group.allgather([outputs], [tensor]),
    all_gather_into_tensor=lambda output, tensor, group, **_: group._allgather_base(output, tensor),
    all_gather_coalesced=lambda lists, tensors, group, **_: group.allgather_coalesced(lists, tensors),
    gather=lambda tensor, outputs, group, group_dst, **_: group.gather(
        [outputs] if outputs else [], [tensor], _with(dist.GatherOptions(), rootRank=group_dst)
    ),
    scatter=lambda output, tensors, group, group_src, **_: group.scatter(
        [output], [tensors] if tensors else [], _with(dist.ScatterOptions(), rootRank=group_src)
    ),
    all_to_all=lambda outputs, tensors, group, **_: group.alltoall(outputs, tensors),
    all_to_all_single=lambda output, tensor, group, **_: group.alltoall_base(
        output, tensor, [], [], dist.AllToAllOptions()
    ),
)


def _adds_in_rank_order() -> bool:
    """Returns whether the order of addition is the ranks'. Of several hosts, it is that of a ring; of two ranks, any."""
    world = dist.group.WORLD
    hosts = [0] if world is None else getattr(world._get_backend(torch.device("cpu")), "hosts", [0])
    return len(set(hosts)) == 1 or len(hosts) == 2


def verify_reduction(checks: Checks, label: str, actual: Tensor, inputs: list[Tensor], name: str) -> None:
    """Checks a reduced tensor, bit for bit if it is exact or the order of addition is promised, as on the CPU."""
    dtype = inputs[0].dtype
    if name == "SUM" and actual.is_cpu and _adds_in_rank_order():
        checks.equal(label, actual, sum_in_rank_order(inputs))
    elif name in ("MIN", "MAX"):
        checks.equal(label, actual, reduce(inputs, name).to(dtype))
    else:
        checks.close(label, actual, reduce(inputs, name, PREMUL_FACTOR))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def prepare(
    operation: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    seed: int = 0,
    root: int = 0,
    reduction: str = "SUM",
    group: dist.ProcessGroup | None = None,
    c10d: Any = dist,
    source: Callable[[Tensor], Tensor] = _same,
    destination: Callable[[Tensor], Tensor] = _same,
) -> Prepared:
    """Prepares one collective on the calling rank.

    Args:
        operation: One of ``COLLECTIVES``.
        dtype: Dtype of all tensors.
        shape: Shape of the part that one rank sends to, or receives from, one rank.
        seed: Seed of the values.
        root: Rank in the group, for rooted operations.
        reduction: Name of the ReduceOp, for reducing operations.
        group: The group, by default the world.
        c10d: What has the functions: ``torch.distributed``, or ``OF_BACKEND`` for ranks that it does not know.
        source: Makes the tensor to pass from an input, with the same values, perhaps in another layout.
        destination: The same for outputs.

    Returns:
        The prepared operation.
    """
    rank, size = c10d.get_rank(group), c10d.get_world_size(group)
    ranks = range(size)
    op = reduce_op(reduction)
    inputs: list[tuple[Tensor, Tensor]] = []

    def part(giver: int, getter: int = 0) -> Tensor:
        return make_input(giver, dtype, shape, 64 * seed + getter)

    def given(values: Tensor) -> Tensor:
        inputs.append((source(values), values.clone()))
        return inputs[-1][0]

    def empty(parts: int | None = None) -> Tensor:
        whole = shape if parts is None else (parts * shape[0], *shape[1:])
        return destination(torch.zeros(whole, dtype=dtype))

    options: dict[str, object] = {}
    expected: list[Tensor] = []
    getters: list[int] = []  # of parts that are reduced, one for each output
    call: tuple[object, ...]
    match operation:
        case "all_reduce":
            outputs, getters = [source(part(rank))], [0]
            call = outputs[0], op
        case "all_reduce_coalesced":
            outputs, getters = [source(part(rank, k)) for k in range(3)], [0, 1, 2]
            call = outputs, op
        case "reduce":
            tensor = source(part(rank))
            # The other ranks' tensors are undefined afterwards.
            outputs, getters = ([tensor], [0]) if rank == root else ([], [])
            call, options = (tensor,), {"op": op, "group_dst": root}
        case "reduce_scatter":
            outputs, getters = [empty()], [rank]
            call = outputs[0], [given(part(rank, k)) for k in ranks], op
        case "reduce_scatter_tensor":
            outputs, getters = [empty()], [rank]
            call = outputs[0], given(torch.cat([part(rank, k) for k in ranks])), op
        case "broadcast":
            outputs, expected = [source(part(rank))], [part(root)]
            call, options = (outputs[0],), {"group_src": root}
        case "all_gather":
            outputs, expected = [empty() for _ in ranks], [part(r) for r in ranks]
            call = outputs, given(part(rank))
        case "all_gather_into_tensor":
            outputs, expected = [empty(size)], [torch.cat([part(r) for r in ranks])]
            call = outputs[0], given(part(rank))
        case "all_gather_coalesced":
            lists = [[empty() for _ in range(3)] for _ in ranks]
            outputs = [output for of_rank in lists for output in of_rank]
            expected = [part(r, k) for r in ranks for k in range(3)]
            call = lists, [given(part(rank, k)) for k in range(3)]
        case "gather":
            outputs = [empty() for _ in ranks] if rank == root else []
            expected = [part(r) for r in ranks] if rank == root else []
            call, options = (given(part(rank)), outputs or None), {"group_dst": root}
        case "scatter":
            outputs, expected = [empty()], [part(root, rank)]
            parts = [given(part(rank, k)) for k in ranks] if rank == root else None
            call, options = (outputs[0], parts), {"group_src": root}
        case "all_to_all":
            outputs, expected = [empty() for _ in ranks], [part(r, rank) for r in ranks]
            call = outputs, [given(part(rank, k)) for k in ranks]
        case "all_to_all_single":
            outputs, expected = [empty(size)], [torch.cat([part(r, rank) for r in ranks])]
            call = outputs[0], given(torch.cat([part(rank, k) for k in ranks]))
        case _:
            raise ValueError(f"operation must be one of {COLLECTIVES}, not {operation!r}")

    def start(is_async: bool) -> dist.Work | torch.futures.Future | None:
        return getattr(c10d, operation)(*call, group=group, async_op=is_async, **options)

    def verify(checks: Checks, label: str) -> None:
        for output, getter in zip(outputs, getters, strict=operation in REDUCING):
            verify_reduction(checks, label, output, [part(r, getter) for r in ranks], reduction)
        if operation in MOVING:
            checks.equal(label, outputs, expected)
        for tensor, values in inputs:
            checks.equal(f"{label}: its input", tensor, values)

    return Prepared(start, outputs, verify)
