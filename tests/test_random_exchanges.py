"""Compares every form of exchange on random graphs, weights, dtypes and shapes with the mixing matrix in float64.

Hypothesis draws the cases in pytest's process, and the ranks of a world run them in batches. The cases are the same in
every run.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import networkx as nx
import numpy as np
import pytest
import torch
from fogdist import topology as topologies
from harness import WorldPool, sizes
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference import DTYPES as ALL_DTYPES
from reference import HALVES, Checks, make_input, mix, wide
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 5), (4, 0, 2), (257,), (2000,)]
KINDS = ["mean", "weighted", "own weights", "dynamic", "gossip", "gather", "hierarchical"]
BATCH = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One exchange, as all ranks know it.

    Attributes:
        kind: One of KINDS.
        matrix: Weight of the edge from row to column, None if there is none; between machines if they exchange.
        tensors: (dtype, shape) of each tensor; a single one is not passed as a list.
        scale: Factor of the inputs.
        in_place: Whether results overwrite the inputs, or other tensors.
        blocking: Whether the call waits for its result, instead of a handle.
        local: The number of ranks on a machine.
        named: Whether the operation has a name.
        check: enable_topo_check.
        seed: Seed of the inputs.
    """

    kind: str
    matrix: tuple[tuple[float | None, ...], ...]
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    scale: float
    in_place: bool
    blocking: bool
    local: int
    named: bool
    check: bool
    seed: int


def weights() -> st.SearchStrategy[float | None]:
    """Draws no edge, special weights, and other weights that can be halved exactly."""
    return st.one_of(
        st.none(),
        st.sampled_from([0.0, 1.0, -1.0, 0.5]),
        st.floats(-2, 2).map(lambda weight: weight if abs(weight) > 1e-9 else 0.0),
    )


@st.composite
def cases(draw: st.DrawFn, size: int) -> Case:
    kind = draw(st.sampled_from(KINDS if size in (2, 4, 6, 8) else KINDS[:-1]))
    local = draw(st.sampled_from([2, 3] if size == 6 else [2]))
    nodes = size // local if kind == "hierarchical" else size
    row = st.tuples(*[weights()] * nodes)
    count = draw(st.integers(1, 4)) if kind != "gather" else 1
    gathered = kind == "gather"
    tensor = st.tuples(
        st.sampled_from(ALL_DTYPES if gathered else DTYPES),
        st.sampled_from(SHAPES[1:] if gathered else SHAPES),
    )
    tensors = draw(st.tuples(*[tensor] * count))
    tiny = all(dtype == torch.float64 for dtype, _ in tensors) and draw(st.booleans())
    return Case(
        kind,
        draw(st.tuples(*[row] * nodes)),
        tensors,
        2.0**-256 if tiny else 1.0,
        draw(st.booleans()) and kind not in ("gossip", "gather"),
        draw(st.booleans()),
        local,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


# --- in the ranks -------------------------------------------------------------------------------------------


def graph_of(case: Case) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(case.matrix)))
    graph.add_weighted_edges_from(
        (i, j, weight)
        for i, row in enumerate(case.matrix)
        for j, weight in enumerate(row)
        if weight is not None
    )
    return graph


def weight_matrix(case: Case) -> np.ndarray:
    return np.array([[0.0 if weight is None else weight for weight in row] for row in case.matrix])


def partner(rank: int, size: int, seed: int) -> int:
    """Returns the rank with which a rank gossips, or the rank itself if it has no partner."""
    order = np.random.default_rng(seed).permutation(size).tolist()
    place = order.index(rank) ^ 1
    return order[place] if place < size else rank


def plan_of(case: Case, node: int) -> tuple[Any, np.ndarray]:
    """Returns the keyword arguments of a call on a node, and the corresponding matrix."""
    matrix, others = weight_matrix(case), [i for i in range(len(case.matrix)) if i != node]
    # The sources' weights are halved and the destinations' are 2, both exactly.
    # The order of a dict does not matter, so the ranks of a machine have different ones.
    order = others[:: 1 if fogdist.rank() % 2 else -1]
    sources = {i: matrix[i, node] / 2 for i in order if case.matrix[i][node] is not None}
    destinations = {i: 2.0 for i in others if case.matrix[node][i] is not None}
    if case.kind == "own weights":  # about every third in-neighbor is left out
        kept = np.array(
            [[(i + j + case.seed) % 3 != 0 or i == j for j in range(len(matrix))] for i in range(len(matrix))]
        )
        chosen = {i: matrix[i, node] for i in sources if kept[i, node]}
        return {"self_weight": matrix[node, node], "src_weights": chosen}, matrix * kept
    if case.kind == "dynamic":
        return {
            "self_weight": matrix[node, node],
            "src_weights": sources,
            "dst_weights": destinations,
        }, matrix
    return (
        {
            "self_weight": matrix[node, node],
            "src_machine_weights": sources,
            "dst_machine_weights": destinations,
        },
        matrix,
    )


def exchange(case: Case, mine: list[Tensor], out: list[Tensor] | None) -> tuple[list[Tensor], np.ndarray]:
    """Runs a case; returns this rank's results, and the corresponding matrix of ranks."""
    rank, size = fogdist.rank(), fogdist.size()
    given: Any = mine if len(mine) > 1 else mine[0]
    options: dict[str, Any] = {"name": "case" if case.named else None, "async_op": not case.blocking}
    options["out"] = out[0] if out is not None and len(mine) == 1 else out
    if case.kind != "gossip":
        options["enable_topo_check"] = case.check
    if case.kind == "gossip":
        other, matrix = partner(rank, size, case.seed), np.eye(size)
        for r in range(size):
            q = partner(r, size, case.seed)
            if q != r:
                own = weight_matrix(case)[r, r] if case.check else 0.5
                matrix[r, r], matrix[q, r] = own, 0.25 if case.check else 0.5
        if other == rank:
            alone = [tensor.clone() for tensor in mine] if out is None else out
            return [mean.copy_(tensor) for mean, tensor in zip(alone, mine, strict=True)], matrix
        if case.check:
            options |= {"self_weight": matrix[rank, rank], "pair_weight": 0.25}
        result = fogdist.pair_gossip(given, other, **options)
    elif case.kind == "hierarchical":
        machine, count = fogdist.machine_rank(), fogdist.machine_size()
        arguments, matrix = plan_of(case, machine)
        if case.seed % 2:
            bf.set_machine_topology(graph_of(case), is_weighted=True)
            arguments = {}
        else:
            fogdist.set_machine_topology(topologies.fully_connected(count))
        result = fogdist.hierarchical_neighbor_allreduce(given, **arguments, **options)
        matrix = np.kron(matrix, np.full((size // count,) * 2, count / size))
    else:
        arguments = {}
        if case.kind == "dynamic":
            arguments, matrix = plan_of(case, rank)
        else:
            graph = graph_of(case)
            bf.set_topology(graph, is_weighted=case.kind == "weighted")
            matrix = weight_matrix(case)
            if case.kind == "own weights":
                arguments, matrix = plan_of(case, rank)
            elif case.kind == "mean":
                matrix = topologies.mixing_matrix(topologies.uniform_weights(graph))
        result = fogdist.neighbor_allreduce(given, **arguments, **options)
    if not case.blocking:
        result.wait()
        return out or result.get_future().value(), matrix
    return (result if len(mine) > 1 else [result]), matrix


def check_weighted(checks: Checks, label: str, case: Case, there: torch.device) -> None:
    rank, size = fogdist.rank(), fogdist.size()
    inputs = [
        [
            make_input(r, dtype, shape, case.seed + k) * case.scale
            for k, (dtype, shape) in enumerate(case.tensors)
        ]
        for r in range(size)
    ]
    results = []
    for run in range(2):
        time.sleep(0.001 * ((rank + run) % 3))  # ranks arrive in another order
        mine = [tensor.clone().to(there) for tensor in inputs[rank]]
        # The second run writes beside its input.
        out = None if not case.in_place else [torch.empty_like(each) for each in mine] if run else mine
        outputs, matrix = exchange(case, mine, out)
        checks.equal(f"{label} device", {tensor.device.type for tensor in outputs}, {there.type})
        if out is not None:
            checks.true(f"{label} out", all(a is b for a, b in zip(outputs, out, strict=True)))
        if out is not mine:
            checks.equal(f"{label} input", [tensor.cpu() for tensor in mine], inputs[rank])
        results.append([tensor.cpu() for tensor in outputs])
    checks.equal(f"{label} bits of two runs", *results)
    for k, (dtype, _) in enumerate(case.tensors):
        each = [tensors[k] for tensors in inputs]
        expected = mix(each, matrix)[rank]
        size_of_terms = mix([tensor.abs() for tensor in each], np.abs(matrix))[rank].real
        output = results[0][k]
        checks.equal(f"{label}[{k}] dtype", output.dtype, dtype)
        checks.equal(f"{label}[{k}] shape", output.shape, expected.shape)
        # Rounded once to the dtype, after a sum in float32 for 16-bit types and in float64 for all others; a device
        # sums other types than the 16-bit ones in themselves.
        limits = torch.finfo(dtype)
        wider = torch.float32 if dtype in HALVES else torch.float64 if there.type == "cpu" else dtype
        accumulator = torch.finfo(wider).eps
        allowed = 0.5 * limits.eps * expected.abs() + 0.5 * limits.smallest_normal * limits.eps
        allowed = allowed * (2 if dtype.is_complex else 1) + 2 * (size + 4) * accumulator * size_of_terms
        if case.kind == "hierarchical":  # the means of machines are rounded to the dtype too
            allowed = allowed + limits.eps * size_of_terms
        worst = ((wide(output) - expected).abs() - allowed).max().item() if output.numel() else -1.0
        checks.true(f"{label}[{k}] is {worst} beyond what rounding allows", worst <= 0)


def check_gathered(checks: Checks, label: str, case: Case, there: torch.device) -> None:
    rank, size = fogdist.rank(), fogdist.size()
    ((dtype, shape),) = case.tensors
    inputs = [make_input(r, dtype, ((r * 3 + case.seed) % 4, *shape[1:]), case.seed) for r in range(size)]
    sources = [r for r in range(size) if r != rank and case.matrix[r][rank] is not None]
    destinations = [r for r in range(size) if r != rank and case.matrix[rank][r] is not None]
    options = {"enable_topo_check": case.check, "name": "case" if case.named else None}
    if case.in_place or case.seed % 2:
        sources.reverse()
        options |= {"src_ranks": sources, "dst_ranks": destinations}
    else:
        bf.set_topology(graph_of(case))
    output = fogdist.neighbor_allgather(inputs[rank].to(there), **options)
    checks.equal(label, output.cpu(), torch.cat([inputs[rank][:0], *(inputs[r] for r in sources)]))


def run_cases(batch: list[Case], device: str = "cpu") -> None:
    """Runs cases on a type of device."""
    there = torch.device("cpu")
    if device != "cpu":
        from device_worlds import place as place_on

        there = place_on(device)
    local = 0
    with Checks() as checks:
        try:
            for place, case in enumerate(batch):
                if local != (local := case.local if case.kind == "hierarchical" else local or 1):
                    os.environ["FOG_NODES_PER_MACHINE"] = str(local)
                    fogdist.init()
                label = f"case {place}, {case.kind}"
                if case.kind == "gather":
                    check_gathered(checks, label, case, there)
                else:
                    check_weighted(checks, label, case, there)
        finally:
            del os.environ["FOG_NODES_PER_MACHINE"]


# --- in pytest ----------------------------------------------------------------------------------------------


def check_random(
    worlds: WorldPool, size: int, examples: int, function: Any = run_cases, *arguments: Any
) -> None:
    """Draws batches of cases and lets a world of this size run them by a function."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # A failure costs a world, so the first failing batch is shown as it is.
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(st.lists(cases(size), min_size=BATCH, max_size=BATCH))
    def run(batch: list[Case]) -> None:
        worlds(size).run(function, batch, *arguments)  # after a failure, a new world

    run()


@pytest.mark.parametrize("size", sizes([1, 3, 6], [2, 4, 5, 8]))
def test_random_exchanges(worlds, size):
    check_random(worlds, size, 24)


def large_cases(size: int) -> list[Case]:
    """Returns an exchange of each kind, of tensors that go in several parts and of other sizes."""
    matrix = tuple(map(tuple, np.random.default_rng(size).uniform(-1, 1, (size, size)).tolist()))
    half = tuple(row[: size // 2] for row in matrix[: size // 2])
    tensors = ((torch.float32, (300_001,)), (torch.bfloat16, (70, 100)))
    return [
        Case(
            kind,
            half if kind == "hierarchical" else matrix,
            tensors[:1] if kind == "gather" else tensors,
            1.0,
            in_place=seed % 2 == 0 and kind != "gather",
            blocking=seed % 3 == 0,
            local=2,
            named=False,
            check=False,
            seed=seed,
        )
        for seed, kind in enumerate([*KINDS, "dynamic", "hierarchical"])
        if kind != "hierarchical" or size % 2 == 0
    ]


@pytest.mark.parametrize("size", sizes([4], [2]))
def test_large_tensors(worlds, size):
    worlds(size).run(run_cases, large_cases(size))
