"""Tests fog's own operations on tensors of a delegate: the results are the CPU's, by the delegate's messages.

Gloo stands in for NCCL here, as the delegate of CPU tensors: it sends the messages of device::Neighbors. Weighted sums
are torch's operations: for float32 they are computed in float32, and in another order. So their bits differ from the
CPU's, and they are compared with the tolerance of the dtype.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fogdist
import numpy as np
import pytest
import test_hierarchical
import test_neighbor
import test_ops
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from operations import PREMUL_FACTOR, reduce_op, reductions
from reference import COMPLEX, DTYPES, FLOATS, Checks, make_input
from torch import Tensor

WEIGHTED_DTYPES = [*FLOATS, *COMPLEX]


def make_gloo(
    store: dist.Store, rank: int, size: int, options: Any, device: torch.device, eager: bool
) -> dist.Backend:
    return dist.ProcessGroupGloo(dist.PrefixStore(f"gloo {device.type}", store), rank, size, options._timeout)


@contextmanager
def delegating() -> Iterator[None]:
    """Makes Gloo serve CPU tensors in this block, which all ranks must enter and leave together."""
    from fog_pg import _C

    _C.set_delegate_factory("cpu", make_gloo)
    try:
        yield
    finally:
        _C.set_delegate_factory("cpu", None)


def delegated(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function of another test, with Gloo for CPU tensors."""
    with delegating():
        return function(*arguments)


def backend() -> Any:
    """Returns fog's own object of the default group."""
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def result(work: Any) -> list[Tensor]:
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    tensors: list[Tensor] = work.result()
    assert [t.data_ptr() for t in work.get_future().wait()] == [t.data_ptr() for t in tensors]
    return tensors


def random_plan(size: int, rank: int, seed: int, scaled: bool = False, mean: bool = False) -> Any:
    """Returns one rank's plan of a random exchange; some ranks have no peer, and some weights are 0."""
    from fog_pg import _C

    generator = np.random.default_rng([seed, size])
    edges = generator.random((size, size)) < 0.6
    weights = generator.uniform(-1, 1, (size, size)).round(1) if not mean else np.ones((size, size))
    # Powers of two scale without rounding.
    factors = 2.0 ** generator.integers(-2, 3, (size, size)) if scaled else np.ones((size, size))
    others = [r for r in generator.permutation(size).tolist() if r != rank]
    return _C.NeighborPlan(
        rank,
        size,
        float(weights[rank, rank]),
        [(r, float(weights[r, rank])) for r in others if edges[r, rank]],
        [(r, float(factors[rank, r])) for r in others if edges[rank, r]],
        mean=mean,
    )


def special_values() -> None:
    fog, rank, size = backend(), dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        for seed, kind in enumerate(("weights", "scaled", "mean")):
            plan = random_plan(size, rank, seed, kind == "scaled", kind == "mean")
            mine = make_input(rank, torch.float32, (257,), seed)
            # A scaled subnormal number would be rounded before it is sent.
            tiny = 1.0 if kind == "scaled" else 1e-45
            mine[::7] = torch.tensor([float("nan"), float("inf"), -0.0, tiny]).repeat(10)[: mine[::7].numel()]
            (expected,) = result(fog.neighbor_allreduce(mine, plan))
            with delegating():
                (output,) = result(fog.neighbor_allreduce(mine, plan))
                target = torch.full_like(mine, 7)
                result(fog.neighbor_allreduce(mine, plan, output=target, confirm=False))
                result(fog.neighbor_allreduce(mine, plan, output=mine))
            for form, got in (("new", output), ("output", target), ("in place", mine)):
                checks.close(f"{kind} {form}", got, expected)


@pytest.mark.parametrize("size", [1, 3])
def test_special_values_are_those_of_the_cpu(worlds, size):
    worlds(size).run(special_values)


def lists() -> None:
    fog, rank, size = backend(), dist.get_rank(), dist.get_world_size()
    shapes = [(3, 5), (7,), (0,), (1,), (33, 2)]
    with Checks() as checks:
        for seed, layout in enumerate(test_neighbor.LAYOUTS):
            plan = random_plan(size, rank, seed + 50)
            for dtypes in ([torch.float32], [torch.float64, torch.bfloat16, torch.complex64]):
                label = f"{layout} {len(dtypes)}"
                mine: list[Tensor] = []
                for dtype in dtypes:
                    parts = [make_input(rank, dtype, s, k) for k, s in enumerate(shapes)]
                    mine += test_neighbor.laid_out(parts, layout)
                mine = mine[::2] + mine[1::2] if layout == "apart" else mine  # the two dtypes alternate
                kept = [t.clone() for t in mine]
                expected = result(fog.neighbor_allreduce(mine, plan))
                with delegating():
                    checks.close(f"{label} new", result(fog.neighbor_allreduce(mine, plan)), expected)
                    outputs = test_neighbor.laid_out([torch.zeros_like(mine[0])], "gap") + [
                        torch.zeros_like(t) for t in mine[1:]
                    ]
                    result(fog.neighbor_allreduce(mine, plan, output=outputs))
                    checks.close(f"{label} output", outputs, expected)
                    checks.equal(f"{label} input", mine, kept)
                    result(fog.neighbor_allreduce(mine, plan, output=mine))
                checks.close(f"{label} in place", mine, expected)


@pytest.mark.parametrize("size", [1, 3])
def test_lists(worlds, size):
    worlds(size).run(lists)


def left_out() -> None:
    """A tensor with weight 0 is left out, even with NaN: that of a neighbor, with 0 on either side, and the own one."""
    from fog_pg import _C

    fog, rank, size = backend(), dist.get_rank(), dist.get_world_size()
    others = [other for other in range(size) if other != rank]
    silent = 0  # the rank whose tensor is NaN
    with Checks() as checks, delegating():
        for dtype, numel in itertools.product(WEIGHTED_DTYPES, (1, 1003)):
            mine = torch.full((numel,), float("nan") if rank == silent else 1.0, dtype=dtype)
            received = [(other, 0.0 if other == silent else 0.5) for other in others]
            own = 0.0 if rank == silent else 0.25
            expected = torch.full_like(mine, own + sum(weight for _, weight in received))
            plan = _C.NeighborPlan(rank, size, own, received, [(other, 1.0) for other in others])
            fresh, place = torch.full_like(mine, float("nan")), mine.clone()
            for given, output in ((mine, fresh), (place, place)):
                result(fog.neighbor_allreduce(given, plan, output=output))
                checks.equal(f"{dtype} {numel}", output, expected)
            sent = [(other, 0.0 if rank == silent else 1.0) for other in others]
            received = [(other, 0.5) for other in others]
            expected = torch.full_like(mine, own + sum(w for other, w in received if other != silent))
            (output,) = result(fog.neighbor_allreduce(mine, _C.NeighborPlan(rank, size, own, received, sent)))
            checks.equal(f"{dtype} {numel} sent with weight 0", output, expected)
            alone = torch.ones(numel, dtype=dtype)
            (output,) = result(fog.neighbor_allreduce(alone, _C.NeighborPlan(rank, size, 0.5, [], [])))
            checks.equal(f"{dtype} {numel} without neighbors", output, alone / 2)


def test_what_has_weight_0_is_left_out(worlds):
    worlds(3).run(left_out)


def rounded_scales() -> None:
    """A sender's weight that is not a power of two rounds its share once more, in the last place."""
    from fog_pg import _C

    fog, rank, size = backend(), dist.get_rank(), dist.get_world_size()
    ring = [((rank - 1) % size, 1.0)], [((rank + 1) % size, 1 / 3)]
    plan = _C.NeighborPlan(rank, size, 2 / 3, *ring)
    with Checks() as checks:
        for dtype in WEIGHTED_DTYPES:
            mine = make_input(rank, dtype, 1000)
            (expected,) = result(fog.neighbor_allreduce(mine, plan))
            with delegating():
                (output,) = result(fog.neighbor_allreduce(mine, plan))
            checks.close(f"{dtype}", output, expected)
        # Push-sum in float32 keeps its mass, except that weights are rounded to float32, as sums are computed in it.
        # This loses at most 3e-8 of the mass in each of the 200 rounds.
        value = make_input(rank, torch.float32, 10_000).abs()
        before = value.double().sum()
        with delegating():
            for _ in range(200):
                result(fog.neighbor_allreduce(value, plan, output=value))
        sums = torch.stack([before, value.double().sum()])
        dist.all_reduce(sums)
        checks.true(f"mass {sums.tolist()}", abs(sums[1] / sums[0] - 1).item() < 1e-5)


def test_weights_of_senders(worlds):
    worlds(4).run(rounded_scales)


def local_reductions() -> None:
    fog, rank, size = backend(), dist.get_rank(), dist.get_world_size()
    unsigned = (torch.uint16, torch.uint32, torch.uint64)
    with Checks() as checks:
        for machines, dtype in itertools.product(test_hierarchical.divisions(size), DTYPES):
            for name, shape in itertools.product(reductions(dtype), [(), (5, 7), (1001,)]):
                label = f"{machines} {dtype} {name} {shape}"
                mine = make_input(rank, dtype, shape)
                other = mine.clone()
                with delegating():
                    if dtype in unsigned and name in ("MIN", "MAX", "AVG"):
                        try:
                            fog.local_allreduce(other, machines, reduce_op(name))
                            checks.true(f"{label} raises", False)
                        except ValueError as error:
                            checks.true(f"{label}: {error}", "local_allreduce: op" in str(error))
                        continue
                    result(fog.local_allreduce(other, machines, reduce_op(name), name=""))
                result(fog.local_allreduce(mine, machines, reduce_op(name)))
                if (name == "PREMUL_SUM" and dtype in (torch.float16, torch.bfloat16)) or (
                    dtype.is_complex and name in ("AVG", "PRODUCT")
                ):
                    # the means are rounded before they are sent, and torch divides differently
                    checks.close(label, other, mine)
                else:
                    checks.equal(label, other, mine)
    assert PREMUL_FACTOR != 1


@pytest.mark.parametrize("size", [1, 4])
def test_local_reductions(worlds, size):
    worlds(size).run(local_reductions)


def gathers() -> None:
    fog, rank, size = backend(), dist.get_rank(), dist.get_world_size()
    with Checks() as checks:
        for seed, dtype in enumerate(DTYPES):
            for shape in [(rank,), (rank + 1, 3), (4, 0), ((rank * 7) % 3, 2, 5)]:
                label = f"{dtype} {shape}"
                plan = random_plan(size, rank, seed + 90)
                mine = make_input(rank, dtype, shape, seed)
                expected = result(fog.neighbor_allgather(mine, plan))
                everything = result(fog.allgather_concat(mine))
                with delegating():
                    checks.equal(f"{label} neighbors", result(fog.neighbor_allgather(mine, plan)), expected)
                    named = result(fog.allgather_concat(mine, name="all"))
                    checks.equal(f"{label} all", named, everything)
        strided = make_input(rank, torch.float32, (3, 4)).t()
        with delegating():
            (output,) = result(fog.allgather_concat(strided))
        checks.equal("strided", output[4 * rank : 4 * rank + 4], strided.contiguous())


@pytest.mark.parametrize("size", [1, 3])
def test_gathers(worlds, size):
    worlds(size).run(gathers)


def named_collectives() -> None:
    fog, rank, size = backend(), dist.get_rank(), dist.get_world_size()
    with Checks() as checks, delegating():
        total = make_input(rank, torch.float32, (4, 3)).t()  # not contiguous
        expected = sum(make_input(r, torch.float32, (4, 3)).t().double() for r in range(size))
        result(fog.allreduce_named(total, dist.ReduceOp.SUM, name="sum"))
        checks.close("sum", total, expected.float())
        sent = make_input(rank, torch.int64, (2, 5)).t()
        result(fog.broadcast_named(sent, size - 1))
        checks.equal("broadcast", sent, make_input(size - 1, torch.int64, (2, 5)).t())


@pytest.mark.parametrize("size", [1, 3])
def test_named_collectives(worlds, size):
    worlds(size).run(named_collectives)


def in_flight() -> None:
    fog, rank, size = backend(), dist.get_rank(), dist.get_world_size()
    plans = [random_plan(size, rank, seed) for seed in range(8)]
    inputs = [make_input(rank, torch.float32, 100 + seed, seed) for seed in range(8)]
    expected = [result(fog.neighbor_allreduce(x, plan)) for x, plan in zip(inputs, plans, strict=True)]
    with Checks() as checks, delegating():
        works = [fog.neighbor_allreduce(x, plan) for x, plan in zip(inputs, plans, strict=True)]
        numbers = [
            work._get_sequence_number() if hasattr(work, "_get_sequence_number") else None for work in works
        ]
        checks.equal("numbers", numbers, sorted(numbers, key=lambda n: n or 0))
        for place in (5, 0, 7, 2, 1, 3, 6, 4):
            checks.close(f"[{place}]", result(works[place]), expected[place])


def test_several_in_flight(worlds):
    worlds(3).run(in_flight)


# Functions of other test files: autograd, torch.compile, and tensors of every layout.
@pytest.mark.parametrize(
    "function",
    [test_neighbor.strange_tensors, test_ops.gradients, test_ops.complex_gradients, test_ops.compiled],
    ids=lambda function: function.__name__,
)
def test_what_the_cpu_is_tested_with(worlds, function):
    worlds(3).run(delegated, function)


def wrong_arguments() -> None:
    """The errors come before anything is sent, so the other rank takes no part."""
    from fog_pg import _C

    fog, rank = backend(), dist.get_rank()
    plan = _C.NeighborPlan(rank, 2, 0.5, [(1 - rank, 0.5)], [(1 - rank, 1.0)])
    x = torch.ones(3)
    with Checks() as checks, delegating():
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("got dtype int32", lambda: fog.neighbor_allreduce(torch.ones(2, dtype=torch.int32), plan)),
            ("tensor: got an empty list", lambda: fog.neighbor_allreduce([], plan)),
            (r"tensor[1]: got a tensor on meta", lambda: fog.neighbor_allreduce([x, x.to("meta")], plan)),
            ("output: got shape", lambda: fog.neighbor_allreduce(x, plan, output=torch.ones(4))),
            ("output: shares memory", lambda: fog.neighbor_allreduce(x[:2], plan, output=x[1:])),
            (
                "output: got a tensor whose elements share",
                lambda: fog.neighbor_allreduce(x, plan, output=torch.ones(1).expand(3)),
            ),
            (
                "plan: got a plan for rank",
                lambda: fog.neighbor_allreduce(x, _C.NeighborPlan(0, 3, 1.0, [], [])),
            ),
            ("got a tensor of layout", lambda: fog.neighbor_allgather(x.to_sparse(), plan)),
            ("without dimensions", lambda: fog.allgather_concat(torch.tensor(1.0))),
            ("machines: rank 1 is missing", lambda: fog.local_allreduce(x, [[0]], dist.ReduceOp.SUM)),
            (
                "got AVG for dtype bool",
                lambda: fog.allreduce_named(torch.ones(1, dtype=torch.bool), dist.ReduceOp.AVG),
            ),
            ("root: got rank 2", lambda: fog.broadcast_named(x, 2)),
        ]
        if rank == 0:
            for message, call in calls:
                try:
                    call()
                    checks.true(f"{message}: raises", False)
                except ValueError as error:
                    checks.true(f"{message}: {error}", message in str(error))
        checks.equal("untouched", x, torch.ones(3))
        # The backend still works.
        checks.equal("after", result(fog.neighbor_allreduce(x, plan)), [torch.ones(3)])


def test_wrong_arguments(worlds):
    worlds(2).run(wrong_arguments)


def disagreement(kind: str) -> str:
    from fog_pg import _C

    fog, rank = backend(), dist.get_rank()
    plan = _C.NeighborPlan(rank, 2, 0.5, [(1 - rank, 0.5)], [(1 - rank, 1.0)])
    x = torch.ones(3 + rank) if kind == "shape" else torch.ones(3, dtype=[torch.float32, torch.float64][rank])
    with delegating():
        try:
            if kind == "columns":
                fog.neighbor_allgather(torch.ones(2, 2 + rank), plan)
            else:
                fog.neighbor_allreduce(x, plan, confirm=True)
        except dist.DistBackendError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["shape", "dtype", "columns"])
def test_ranks_that_disagree(new_world, kind):
    # The check is made before the delegate's messages, with `confirm`, or if ranks exchange numbers of rows.
    for text in new_world(2).run(disagreement, kind):
        assert "ranks disagree" in text


def lost_peer() -> str:
    from fog_pg import _C

    fog, rank = backend(), dist.get_rank()
    plan = _C.NeighborPlan(rank, 2, 0.5, [(1 - rank, 0.5)], [(1 - rank, 1.0)])
    with delegating():
        fog.neighbor_allreduce(torch.ones(2), plan, confirm=False).wait()  # connects the delegate
        dist.barrier()
        if rank == 1:
            os._exit(0)  # this ends Gloo's connection
        try:
            fog.neighbor_allreduce(torch.ones(2), plan, confirm=False).wait()
        except dist.DistBackendError as error:
            return str(error)
    return "no error"


def test_failures_name_the_operation(new_world):
    found, lost = new_world(2).run_raw(lost_peer)
    assert (found.state, lost.state) == ("returned", "died"), found
    assert re.search(r"neighbor_allreduce #\d+ of group", found.value), found.value


def along_topology_on_any_device() -> None:
    """The operators have kernels for all devices, because torch.compile traces them for tensors of other devices."""
    fogdist.init(topologies.RingGraph)
    for operation in (
        torch.ops.fog.neighbor_allreduce.default,
        torch.ops.fog.neighbor_allreduce_along_topology.default,
    ):
        for key in ("CPU", "CUDA", "PrivateUse1"):
            assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(operation.name(), key), (
                operation,
                key,
            )


def test_operators_serve_every_device(worlds):
    worlds(2).run(along_topology_on_any_device)
