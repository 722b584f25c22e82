"""Tests exchanges with neighbors: layouts of tensors and lists, pairs, handles and names, wrong arguments, disagreements.

tests/test_random_exchanges.py compares every form, on random graphs and weights, with a mixing matrix.
"""

from __future__ import annotations

import itertools
import math
import re
from datetime import timedelta
from typing import Any
from unittest import mock

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from fogdist.operations import begin_average
from harness import error_of, on_ranks, sizes
from reference import COMPLEX, FLOATS, Checks, make_input, mix
from torch import Tensor

WEIGHTED_DTYPES = [*FLOATS, *COMPLEX]


@on_ranks(3)
def test_a_neighbor_of_weight_zero_leaves_no_trace() -> None:
    fogdist.init(topologies.fully_connected)
    rank, size = fogdist.rank(), fogdist.size()
    x = torch.full((3,), float("nan") if rank == 1 else float(rank))
    weights = {} if rank == 1 else {r: 1.0 for r in range(size) if r not in (1, rank)}
    output = fogdist.neighbor_allreduce(x, self_weight=1.0, src_weights=weights)
    with Checks() as checks:
        if rank != 1:
            checks.equal("sum", output, torch.full((3,), float(sum(r for r in range(size) if r != 1))))


# --- pairs --------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_gossips_in_flight() -> None:
    fogdist.init()
    rank = fogdist.rank()
    x = torch.tensor([float(rank)])
    store = dist.PrefixStore("gossips", dist.distributed_c10d._get_default_store())
    names = set()

    class Begun:
        """A gossip in flight, which tells rank 1 that somebody waits for it."""

        def __init__(self, work: dist.Work) -> None:
            self._work = work

        def wait(self) -> None:
            store.set("rank 0 waits", "")
            self._work.wait()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._work, name)

    def begin(context: Any, sources: Any, exchange: Any, name: str, output: Any) -> Any:
        names.add(name)
        return Begun(begin_average(context, sources, exchange, name, output))

    if rank == 2:
        # The other pair has more operations in flight than are allowed at once, and uses the same names.
        assert fogdist.pair_gossip(x, 3, name="0").item() == 2.5
    elif rank == 3:
        assert fogdist.pair_gossip(x, 2, name="0").item() == 2.5
    else:
        if rank == 1:  # it begins when rank 0 has as many in flight as there may be
            store.wait(["rank 0 waits"])
        with mock.patch.object(fogdist.operations, "begin_average", begin):
            works = [fogdist.pair_gossip(x + i, 1 - rank, async_op=True) for i in range(150)]
        assert len(names) == 64
        works += [fogdist.pair_gossip(x, 1 - rank, name=str(i), async_op=True) for i in range(2)]
        for work in works:
            work.wait()
        outputs = [work.get_future().value()[0].item() for work in works]
        assert outputs == [0.5 + i for i in range(150)] + [0.5, 0.5]
        # The two ranks have different weights.
        own = 0.25 if rank else 1.0
        assert fogdist.pair_gossip(x + 1, 1 - rank, self_weight=own, pair_weight=0.5).item() == (
            2.0 if rank == 0 else 1.0
        )
    dist.barrier()


# --- tensors of every kind ----------------------------------------------------------------------------------


def strange_tensors() -> None:
    fogdist.init(topologies.fully_connected)
    rank, size = fogdist.rank(), fogdist.size()
    matrix = np.full((size, size), 1 / size)
    base = [make_input(r, torch.complex128, (6, 4)) for r in range(size)]
    views = {
        "transposed": lambda t: t.real.t(),
        "strided": lambda t: t.real[::2, 1:3],
        "expanded": lambda t: t.real[:1].expand(5, 4),
        "conjugate": lambda t: t.conj(),
        "imaginary part of the conjugate": lambda t: t.conj().imag,
        "channels last": lambda t: t.real.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    }
    with Checks() as checks:
        for name, view in views.items():
            inputs = [view(t) for t in base]
            checks.close(name, fogdist.neighbor_allreduce(inputs[rank]), mix(inputs, matrix)[rank])
            everyone = torch.cat([inputs[r] for r in range(size) if r != rank])
            checks.equal(
                f"gathered {name}", fogdist.neighbor_allgather(inputs[rank]), everyone.resolve_conj()
            )
        parameter = torch.nn.Parameter(base[rank].real.clone())
        output = fogdist.neighbor_allreduce(parameter)
        checks.close("parameter", output, mix([t.real for t in base], matrix)[rank])
        checks.true("detached", not output.requires_grad)


def test_strange_tensors(worlds):
    worlds(3).run(strange_tensors)


# --- lists of tensors ---------------------------------------------------------------------------------------

LIST_SHAPES: list[tuple[int, ...]] = [(3, 5), (), (700,), (0, 2), (1,), (64, 65)]


def laid_out(tensors: list[Tensor], layout: str) -> list[Tensor]:
    """Returns tensors with the same values at other places in memory.

    Args:
        tensors: Tensors of one dtype.
        layout: "adjacent" in one storage, in order; with a "gap" between them; "backwards" in one storage; "apart",
            each in its own storage; "transposed" if they are matrices.
    """
    if layout == "apart":
        return [t.clone() for t in tensors]
    if layout == "transposed":
        return [t.t().contiguous().t() if t.dim() == 2 else t.clone() for t in tensors]
    gap = 1 if layout == "gap" else 0
    flat = tensors[0].new_empty(3 + sum(t.numel() + gap for t in tensors))
    end, placed = 3, []
    for tensor in reversed(tensors) if layout == "backwards" else tensors:
        placed.append(flat[end : end + tensor.numel()].view(tensor.shape).copy_(tensor))
        end += tensor.numel() + gap
    return placed[::-1] if layout == "backwards" else placed


LAYOUTS = ["adjacent", "gap", "backwards", "apart", "transposed"]


def backend_and_plan(group: dist.ProcessGroup | None = None) -> tuple[Any, Any, np.ndarray]:
    """Returns the backend, and this rank's plan for a directed ring: 0.25 from the previous rank, 0.75 from itself."""
    from fog_pg import _C

    rank, size = dist.get_rank(), dist.get_world_size()
    matrix = 0.75 * np.eye(size)
    for r in range(size):
        matrix[r, (r + 1) % size] += 0.25
    before, after = [((rank - 1) % size, 0.25)], [((rank + 1) % size, 1.0)]
    if size == 1:
        return _backend(group), _C.NeighborPlan(0, 1, 1.0, [], []), matrix
    return _backend(group), _C.NeighborPlan(rank, size, 0.75, before, after), matrix


def _backend(group: dist.ProcessGroup | None) -> Any:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


@on_ranks(sizes([1, 4], [2]))
def test_lists() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    backend, plan, matrix = backend_and_plan()
    with Checks() as checks:
        for layout, dtype in itertools.product(LAYOUTS, WEIGHTED_DTYPES):
            label = f"{layout} {dtype}"
            inputs = [[make_input(r, dtype, s, k) for k, s in enumerate(LIST_SHAPES)] for r in range(size)]
            mine = laid_out(inputs[rank], layout)
            work = backend.neighbor_allreduce(mine, plan)
            work.wait()
            expected = work.result()
            checks.equal(f"{label}: the Future's value", work.get_future().wait(), expected)
            for k, output in enumerate(expected):
                checks.close(f"{label} [{k}]", output, mix([tensors[k] for tensors in inputs], matrix)[rank])
                # Each result equals that of an exchange of the tensor alone.
                work = backend.neighbor_allreduce(mine[k], plan)
                work.wait()
                checks.equal(f"{label} [{k}] alone", work.result(), [output])
                alone = laid_out(inputs[rank], layout)[k]
                backend.neighbor_allreduce(alone, plan, output=alone).wait()
                checks.equal(f"{label} [{k}] alone in place", alone, output)
            checks.equal(f"{label} inputs", mine, inputs[rank])
            for out_layout in LAYOUTS:
                outputs = laid_out([torch.zeros_like(t) for t in mine], out_layout)
                work = backend.neighbor_allreduce(tuple(mine), plan, output=outputs)
                work.wait()
                checks.equal(f"{label} to {out_layout}", outputs, expected)
                same = [a.data_ptr() == b.data_ptr() for a, b in zip(work.result(), outputs, strict=True)]
                checks.true(f"{label} to {out_layout}: the tensors given", all(same))
            checks.equal(f"{label} inputs", mine, inputs[rank])
            backend.neighbor_allreduce(mine, plan, output=mine).wait()
            checks.equal(f"{label} in place", mine, expected)
            # One output takes the place of its tensor, the others do not.
            mine = laid_out(inputs[rank], layout)
            outputs = [mine[0], *(torch.zeros_like(t) for t in mine[1:])]
            backend.neighbor_allreduce(mine, plan, output=outputs).wait()
            checks.equal(f"{label} partly in place", outputs, expected)
            checks.equal(f"{label} partly in place: inputs", mine[1:], inputs[rank][1:])


@on_ranks(2)
def test_lists_in_flat_memory_are_not_copied() -> None:
    """Counts exchanges and copies in an exchange of a list, as the profiler sees them."""
    backend, plan, _ = backend_and_plan()
    halves = [torch.ones(s, dtype=torch.float16) for s in LIST_SHAPES]

    def calls(tensors: list[Tensor], outputs: list[Tensor] | None) -> tuple[int, int]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            backend.neighbor_allreduce(tensors, plan, output=outputs).wait()
        names = [event.name for event in profile.events()]
        return names.count("fog:neighbor_allreduce"), names.count("aten::copy_")

    adjacent, apart = [laid_out([torch.ones(s) for s in LIST_SHAPES], how) for how in ("adjacent", "apart")]
    places = laid_out([torch.zeros(s) for s in LIST_SHAPES], "adjacent")
    with Checks() as checks:
        checks.equal("views of a flat buffer", calls(adjacent, None), (1, 0))
        checks.equal("with places for the results", calls(adjacent, places), (1, 0))
        checks.equal("storages of their own", calls(apart, None), (1, len(apart)))
        checks.equal("two dtypes", calls(adjacent + laid_out(halves, "adjacent"), None), (2, 0))


@on_ranks(2)
def test_wrong_lists() -> None:
    backend, plan, _ = backend_and_plan()
    base, other = torch.ones(8), torch.ones(4)
    pair = [base[:4], base[4:]]
    calls: list[tuple[Any, Any, type[Exception], str]] = [
        ([], None, ValueError, "empty list"),
        ([base, base.int()], None, ValueError, "int32"),
        ([base, base.to_sparse()], None, ValueError, r"tensor\[1\]: got a tensor of layout"),
        (pair, [base], ValueError, "output: got 1 tensors; allowed is one for each of the 2"),
        (pair, [torch.ones(4), torch.ones(5)], ValueError, r"output\[1\]: got shape \[5\]"),
        (pair, [torch.ones(4), torch.ones(4).half()], ValueError, r"output\[1\]: got dtype float16"),
        (pair, [torch.ones(1).expand(4), torch.ones(4)], ValueError, r"output\[0\].*elements share memory"),
        (pair, pair[::-1], ValueError, r"output\[1\]: shares memory with tensor\[0\]"),
        (pair, [other, other], ValueError, r"output\[1\]: shares memory with output\[0\]"),
        (base[:4], base[3:7], ValueError, "output: shares memory with tensor"),
        ([base, None], None, TypeError, "incompatible function arguments"),
    ]
    for tensors, outputs, error, message in calls:
        with pytest.raises(error, match=message):
            backend.neighbor_allreduce(tensors, plan, output=outputs)
    # None of the calls has sent anything.
    work = backend.neighbor_allreduce(pair, plan, output=[torch.zeros(4), pair[1]])
    work.wait()
    assert [t.tolist() for t in work.result()] == [[1.0] * 4] * 2
    backend.neighbor_allreduce(base[::2], plan, output=base[1::2]).wait()  # input and output only interleave
    assert base[1::2].tolist() == [1.0] * 4


@on_ranks(2, kind=["number", "split", "order", "a later dtype", "one tensor"])
def test_lists_that_differ(kind: str) -> None:
    """Rank 1 passes another list than rank 0, with as many elements."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    backend, plan, _ = backend_and_plan(group)
    tensors = [torch.ones(4), torch.ones(2, 3), torch.ones(2)]
    if dist.get_rank() == 1:
        tensors = {
            "number": [torch.ones(10), torch.ones(2)],
            "split": [torch.ones(5), torch.ones(5), torch.ones(2)],
            "order": [torch.ones(2, 3), torch.ones(4), torch.ones(2)],
            "a later dtype": [torch.ones(4), torch.ones(2, 3), torch.ones(2).double()],
            "one tensor": [torch.ones(12)],
        }[kind]
    # With two dtypes the call itself may raise: it begins two operations, and the first may have failed by then.
    text = error_of(lambda: backend.neighbor_allreduce(tensors, plan, name="a list").wait())
    call = r"neighbor_allreduce\(float32\[\d+\]"
    assert re.search(rf"ranks disagree.*{call}.*{call}", text) and "list of 3 tensors, layout" in text, text


# --- names --------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_name_in_flight_is_rejected() -> None:
    fogdist.init()
    go, x = torch.zeros(1), torch.ones(3)
    if fogdist.rank() == 0:  # rank 1 does not call an operation of this name before it gets `go`
        first = fogdist.neighbor_allreduce(x, out=x, name="same", async_op=True)
        with pytest.raises(ValueError, match="same"):
            fogdist.neighbor_allreduce(x, out=x, name="same", async_op=True)
        bf.broadcast(go, 0, name="go")
    else:
        bf.broadcast(go, 0, name="go")
        first = fogdist.neighbor_allreduce(x, out=x, name="same", async_op=True)
    first.wait()
    assert x.tolist() == [1.0] * 3
    assert fogdist.neighbor_allreduce(torch.ones(3), name="same").tolist() == [1.0] * 3


# --- wrong arguments ----------------------------------------------------------------------------------------

ONE = torch.ones(2)


def by(sources: Any, destinations: Any = None, own: Any = 1.0) -> dict[str, Any]:
    """Returns the weights of a call."""
    return {"self_weight": own, "src_weights": sources, "dst_weights": destinations}


# Wrong arguments on rank 0 of a unidirectional ring of 3, whose only in-neighbor is rank 2. test_exchange.py has more
# weights that are no numbers.
WRONG_ARGUMENTS: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "neighbor_allreduce": [
        ({"tensor": [1.0]}, TypeError, r"tensor\[0\].*float"),
        ({"tensor": torch.ones(2, dtype=torch.int64)}, ValueError, "float32.*int64"),
        ({"tensor": ONE.to_sparse()}, TypeError, "tensor.*dense"),
        ({"tensor": []}, ValueError, "tensor.*empty list"),
        ({"tensor": (ONE, ONE.int())}, ValueError, r"tensor\[1\].*int32"),
        ({"tensor": {"a": ONE}}, TypeError, "tensor.*dict"),
        ({"self_weight": 0.5}, ValueError, "given together, got self_weight alone"),
        ({"src_weights": {}}, ValueError, "given together, got src_weights alone"),
        ({"dst_weights": [1]}, ValueError, "dst_weights"),
        (by({}, own="1"), TypeError, "self_weight.*str"),
        (by({}, own=10**400), ValueError, "self_weight.*finite"),
        (by({1: 1.0}), ValueError, "src_weights.*in-neighbors"),
        (by({0: 1.0}), ValueError, "src_weights.*itself"),
        (by({3: 1.0}), ValueError, r"src_weights.*\[0, 2\]"),
        (by({}, 1), TypeError, "dst_weights"),
        (by({}, [1, 1]), ValueError, "twice"),
        (by({}, [0]), ValueError, "itself"),
        (by({}, [-1]), ValueError, "dst_weights"),
        (by({}, {1: None}), TypeError, "dst_weights"),
        ({"name": 3}, TypeError, "name"),
        ({"out": torch.ones(1).expand(2)}, ValueError, "out.*contiguous"),
        ({"out": torch.ones(3)}, ValueError, "output"),
        ({"out": [ONE]}, TypeError, "out.*list"),
        ({"out": "out"}, TypeError, "out.*str"),
        ({"tensor": [ONE, ONE], "out": [ONE]}, TypeError, "out must have as many.*2, got 1"),
    ],
    "neighbor_allgather": [
        ({"tensor": torch.tensor(1.0)}, ValueError, "dimension"),
        ({"src_ranks": [1]}, ValueError, "given together, got src_ranks alone"),
        ({"dst_ranks": []}, ValueError, "given together, got dst_ranks alone"),
        ({"src_ranks": [1, 1], "dst_ranks": []}, ValueError, "src_ranks.*twice"),
        ({"src_ranks": [], "dst_ranks": [0]}, ValueError, "dst_ranks.*itself"),
        ({"src_ranks": ["1"], "dst_ranks": []}, TypeError, "src_ranks.*integer"),
    ],
    "pair_gossip": [
        ({"target_rank": 0}, ValueError, "target_rank.*itself"),
        ({"target_rank": 3}, ValueError, "target_rank"),
        ({"target_rank": "1"}, TypeError, "target_rank"),
        ({"target_rank": 1, "self_weight": 0.5}, ValueError, "given together, got self_weight alone"),
        ({"target_rank": 1, "pair_weight": 0.5}, ValueError, "given together, got pair_weight alone"),
        ({"target_rank": 1, "self_weight": 1, "pair_weight": math.nan}, ValueError, "pair_weight.*finite"),
        ({"target_rank": 1, "tensor": ONE.int()}, ValueError, "tensor.*int32"),
        ({"target_rank": 1, "name": 1}, TypeError, "name"),
    ],
}


@on_ranks(3)
def test_wrong_arguments() -> None:
    fogdist.init(lambda size: topologies.ring(size, connect_style=2))
    if fogdist.rank() == 0:
        for operation, calls in WRONG_ARGUMENTS.items():
            for is_async, (arguments, error, message) in itertools.product((False, True), calls):
                with pytest.raises(error, match=message):
                    getattr(fogdist, operation)(**{"tensor": ONE, "async_op": is_async, **arguments})
    # None of the calls has sent anything.
    assert fogdist.neighbor_allreduce(ONE).tolist() == [1.0, 1.0]


# --- ranks that disagree ------------------------------------------------------------------------------------


def disagreement(kind: str) -> tuple[str, str]:
    fogdist.init()
    rank = fogdist.rank()
    x = torch.ones(4)
    peers = {"src_weights": {(rank - 1) % 3: 0.5}, "dst_weights": [(rank + 1) % 3]}
    error, function, arguments = "", fogdist.neighbor_allreduce, {"self_weight": 0.5, **peers}
    if kind == "edges" and rank == 0:
        arguments |= {"dst_weights": [2], "src_weights": {1: 1.0}}
    elif kind == "shape" and rank == 1:
        x = torch.ones(2, 2)
    elif kind == "operation" and rank == 1:
        function, arguments = fogdist.neighbor_allgather, {"src_ranks": [0], "dst_ranks": [2]}
    elif kind == "gathered" and rank != 3:
        function, arguments = (
            fogdist.neighbor_allgather,
            {"src_ranks": [(rank - 1) % 3], "dst_ranks": [(rank + 1) % 3]},
        )
        x = torch.ones(rank + 1, 5 if rank == 2 else 4)
    try:
        function(x, **arguments)
    except ValueError as raised:
        error = str(raised)
    # The group still works.
    return error, str(fogdist.neighbor_allreduce(torch.ones(1), self_weight=0.5, **peers).item())


@pytest.mark.parametrize(
    ("kind", "fragments"),
    [
        (
            "edges",
            [
                "rank 0 sends to rank 2 (dst_weights), but rank 2 does not receive",
                "rank 1 receives from rank 0 (src_weights), but rank 0 does not send",
                "rank 2 sends to rank 0 (dst_weights), but rank 0 does not receive",
                "rank 0 receives from rank 1 (src_weights), but rank 1 does not send",
            ],
        ),
        (
            "shape",
            [
                "rank 0 sends float32 of shape (4,) to rank 1, which has float32 of shape (2, 2)",
                "rank 1 sends float32 of shape (2, 2) to rank 2, which has float32 of shape (4,)",
            ],
        ),
        ("operation", ["rank 0 calls neighbor_allreduce", "rank 1 calls neighbor_allgather"]),
        ("gathered", ["rank 1 sends float32 of shape (2, 4) to rank 2, which has float32 of shape (3, 5)"]),
    ],
)
def test_disagreements_are_the_same_error_everywhere(worlds, kind, fragments):
    outcomes = worlds(3).run(disagreement, kind)
    assert len({error for error, _ in outcomes}) == 1
    for fragment in fragments:
        assert fragment in outcomes[0][0]
    assert {after for _, after in outcomes} == {"1.0"}


def unchecked_disagreement(kind: str) -> str:
    fogdist.init()
    group = dist.new_group(backend="fog", timeout=timedelta(seconds=1))
    rank, size = fogdist.rank(), fogdist.size()
    before, after = (rank - 1) % size, (rank + 1) % size
    arguments: dict[str, Any] = {"self_weight": 0.5, "src_weights": {before: 0.5}, "dst_weights": [after]}
    if kind == "missing" and rank == 2:
        arguments["dst_weights"] = []
    elif kind == "unexpected" and rank == 0:
        arguments["src_weights"] = {}
    elif kind == "static" and rank == 1:
        arguments = {}
    elif kind == "checked":
        arguments["enable_topo_check"] = rank == 1
    try:
        fogdist.neighbor_allreduce(torch.ones(4), **{"enable_topo_check": False, **arguments}, group=group)
        # Ranks whose exchange succeeded learn of the failure here. The first barrier may begin before the failure is
        # known.
        for _ in range(2):
            dist.barrier(group)
    except dist.DistBackendError as error:
        return str(error)
    finally:
        dist.barrier()  # no rank leaves before the others have seen their errors
    return ""


@pytest.mark.parametrize("kind", ["missing", "unexpected", "static", "checked"])
def test_a_disagreement_without_the_check_ends(new_world, kind):
    texts = new_world(3).run(unchecked_disagreement, kind)
    assert all("group '1'" in text for text in texts), texts
    assert any("neighbor_allreduce" in text for text in texts), texts
