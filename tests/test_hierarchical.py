"""Tests the backend's hierarchical_neighbor_allreduce and local_allreduce, with machines that the tests define."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import WorldPool, error_of, on_ranks, sizes
from operations import reduce_op, reductions, verify_reduction
from reference import DTYPES, FLOATS, HALVES, Checks, make_input
from torch import Tensor

SIZES = sizes([1, 4, 6], [2])
# No element, fewer elements than ranks, a size that a message carries inline, and one that fills the ring several
# times.
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (3, 5), (4, 0, 2), (257,), (70_001,)]
STREAMED = (600_001,)

Machines = list[list[int]]


def divisions(size: int) -> list[Machines]:
    """Returns all divisions of the ranks, in order, into equal machines, and one whose machines interleave."""
    found = []
    for local in range(1, size + 1):
        if size % local == 0:
            found.append([list(range(first, first + local)) for first in range(0, size, local)])
    if size % 2 == 0 and size > 2:
        found.append([list(range(size - 1, 0, -2)), list(range(0, size, 2))])
    return found


def machine_of(rank: int, machines: Machines) -> int:
    """Returns the machine of a rank."""
    return next(m for m, ranks in enumerate(machines) if rank in ranks)


def backend(group: dist.ProcessGroup | None = None) -> Any:
    """Returns fog's own object of a group."""
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


# --- between machines --------------------------------------------------------------------------


def promised(
    inputs: Sequence[Tensor], machines: Machines, plan: Any, weights: dict[int, float] | None
) -> Tensor:
    """Returns the exact bits: means are rounded once, in the order of ranks, and summed in the order of the plan.

    Args:
        inputs: The input of each rank.
        machines: The machines.
        plan: The plan of this rank's machine.
        weights: The weights of the sources, with both sides multiplied; None for the plain mean.
    """
    dtype = inputs[0].dtype
    between = torch.float32 if dtype in HALVES else torch.float64
    rounded = [
        (functools.reduce(torch.add, [inputs[r].to(between) for r in ranks]) / len(ranks)).to(dtype)
        for ranks in machines
    ]
    order = [source for source, _ in plan.sources] + [plan.rank]
    total: Tensor
    if weights is None:
        total = functools.reduce(torch.add, [rounded[m].to(between) for m in order]) / len(order)
    else:
        factors = weights | {plan.rank: plan.self_weight}
        terms = [torch.tensor(factors[m], dtype=between) * rounded[m].to(between) for m in order]
        total = functools.reduce(torch.add, terms)
    return total.to(dtype)


def exchanges(streamed: bool) -> None:
    """Compares bits of results, which are therefore the same on all ranks of a machine."""
    from fog_pg import _C

    rank, size = dist.get_rank(), dist.get_world_size()
    cases = [(d, (2_001,)) for d in FLOATS] + [(torch.float32, s) for s in SHAPES]
    if streamed:
        cases = [(torch.float32, STREAMED), (torch.bfloat16, STREAMED)]
    with Checks() as checks:
        for machines, (dtype, shape) in itertools.product(divisions(size), cases):
            machine, count = machine_of(rank, machines), len(machines)
            inputs = [make_input(r, dtype, shape) for r in range(size)]
            others = [(machine + distance) % count for distance in range(1, count)]  # not in ascending order
            weights = {m: 0.3 * (m + 1) for m in others}
            weighted = _C.NeighborPlan(
                machine, count, 0.7, [(m, w / 0.5) for m, w in weights.items()], [(m, 0.5) for m in others]
            )
            ones = [(m, 1.0) for m in others]
            plain = _C.NeighborPlan(machine, count, 1.0, ones, ones, mean=True)
            weights = {m: w / 0.5 * 0.5 for m, w in weights.items()}
            for name, plan, used in (("weighted", weighted, weights), ("mean", plain, None)):
                label, mine = f"{name} {machines} {dtype} {shape}", inputs[rank].clone()
                expected = [promised(inputs, machines, plan, used)]
                work = backend().hierarchical_neighbor_allreduce(mine, machines, plan)
                work.wait()
                checks.equal(label, work.result(), expected)
                checks.equal(f"{label} input", mine, inputs[rank])
                work = backend().hierarchical_neighbor_allreduce(mine, machines, plan, output=mine)
                work.wait()
                checks.true(f"{label} in place", work.result()[0].data_ptr() == mine.data_ptr())
                checks.equal(f"{label} in place", [mine], expected)


@pytest.mark.parametrize("size", SIZES)
def test_every_bit_is_as_promised(worlds: WorldPool, size: int) -> None:
    for streamed in (False, True):
        worlds(size).run(exchanges, streamed)


@on_ranks(4)
def test_extreme_values() -> None:
    """A float16 mean whose sum would overflow, a float64 too small for float32, and a NaN with weight 0."""
    from fog_pg import _C

    rank = dist.get_rank()
    machines = [[0, 1], [2, 3]]
    machine = rank // 2
    other = 1 - machine

    def call(tensor: Tensor, own: float, theirs: float) -> Tensor:
        plan = _C.NeighborPlan(machine, 2, own, [(other, theirs)], [(other, 1.0)])
        work = backend().hierarchical_neighbor_allreduce(tensor, machines, plan)
        work.wait()
        output: Tensor = work.result()[0]
        return output

    with Checks() as checks:
        large = torch.full((9,), 60_000.0, dtype=torch.float16)
        checks.equal("large", call(large, 0.5, 0.5), large)
        tiny = torch.full((9,), 2.0**-256 * (rank + 1), dtype=torch.float64)
        checks.equal("tiny", call(tiny, 1.0, 1.0), torch.full_like(tiny, 5.0 * 2.0**-256))
        tensor = torch.full((9,), float("nan") if machine == 1 else float(rank))
        own, theirs = (1.0, 0.0) if machine == 0 else (0.0, 1.0)
        checks.equal("NaN", call(tensor, own, theirs), torch.full((9,), 0.5))
        checks.equal("nothing", call(tensor, 0.0, 0.0), torch.zeros(9))


# --- among the ranks of a machine ----------------------------------------------------------------------------


@on_ranks(SIZES)
def test_local_reductions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    unequal = [[list(range(1, size)), [0]]] if size > 2 else []
    with Checks() as checks:
        for machines in [*divisions(size), *unequal]:
            members = machines[machine_of(rank, machines)]
            for dtype in DTYPES:
                for name in reductions(dtype):
                    label = f"{machines} {dtype} {name}"
                    inputs = [make_input(r, dtype, 37) for r in members]
                    tensor = make_input(rank, dtype, 37)
                    backend().local_allreduce(tensor, machines, reduce_op(name)).wait()
                    verify_reduction(checks, label, tensor, inputs, name)
            for numel in (0, 1, 2048, 2049, 70_001, *STREAMED):
                inputs = [make_input(r, torch.float32, numel) for r in members]
                tensor = make_input(rank, torch.float32, (numel, 2))[:, 0]  # not contiguous
                tensor.copy_(inputs[members.index(rank)])
                backend().local_allreduce(tensor, machines, dist.ReduceOp.SUM, name=f"{numel}").wait()
                verify_reduction(checks, f"{machines} of {numel}", tensor, inputs, "SUM")


# --- disagreements; test_machines.py has wrong arguments -----------------------------------------------------------------------


def disagreement(kind: str) -> str:
    """Makes one call on which ranks disagree, in a group that fails with it. Returns the text of the error."""
    from fog_pg import _C

    group = dist.new_group(timeout=timedelta(seconds=2 if kind == "missing" else 20))
    rank = dist.get_rank()
    machines, machine = [[0, 1], [2, 3]], rank // 2
    other = 1 - machine
    tensor: Any = torch.ones(4)
    sources, destinations, own = [(other, 0.5)], [(other, 1.0)], 0.5
    if kind == "machines" and rank == 0:
        machines = [[0, 2], [1, 3]]
    elif kind == "order of machines" and machine == 1:
        machines, sources, destinations, machine = [[2, 3], [0, 1]], [(1, 0.5)], [(1, 1.0)], 0
    elif kind == "dtype" and machine == 1:
        tensor = tensor.double()
    elif kind == "unexpected" and machine == 0:
        sources = []
    elif kind == "missing" and machine == 0:
        destinations = []
    elif kind == "plan" and rank == 1:
        own = 0.25
    elif kind == "operation" and rank == 2:
        work = backend(group).local_allreduce(tensor, machines, dist.ReduceOp.SUM)
        return error_of(work.wait)
    plan = _C.NeighborPlan(machine, 2, own, sources, destinations)
    return error_of(lambda: backend(group).hierarchical_neighbor_allreduce(tensor, machines, plan).wait())


NAME = r"hierarchical_neighbor_allreduce"


@pytest.mark.parametrize(
    ("kind", "everywhere"),
    [
        (
            "machines",
            rf"ranks disagree.*{NAME}\(float32\[4\], 2 machines, layout (\w+)\).*layout (?!\1)\w+\)",
        ),
        ("order of machines", r"layout (\w+)\).*2 machines, layout (?!\1)\w+\)"),
        ("dtype", rf"ranks disagree.*{NAME}\(float(32|64)\[4\].*{NAME}\((?!float\1)float\d+\[4\]"),
        (
            "plan",
            r"ranks disagree: this rank called .*self_weight=0\.\d*5.*rank [01] of the same machine with another",
        ),
        ("operation", "ranks disagree.*local_allreduce"),
    ],
)
def test_disagreements_are_errors_that_name_both_sides(worlds: WorldPool, kind: str, everywhere: str) -> None:
    for text in worlds(4).run(disagreement, kind):
        assert re.search(everywhere, text), text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        # A rank that does not receive may be done before the message comes; the sender learns of it in any case.
        (
            "unexpected",
            r"ranks? [23] called .*(this rank, which does not receive from it|has ended its operation)",
        ),
        ("missing", rf"{NAME}.*timed out.*not there: rank [01]"),
    ],
)
def test_machines_that_disagree_on_an_edge(worlds: WorldPool, kind: str, text: str) -> None:
    for found in worlds(4).run(disagreement, kind)[2:]:
        assert re.search(text, found), found
