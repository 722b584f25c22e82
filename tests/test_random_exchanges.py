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
import networkx as nx
import numpy as np
import pytest
import torch
from fogdist import topology as topologies
from harness import sizes
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
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
        in_place: Whether results overwrite the inputs.
        named: Whether the operation has a name.
        check: enable_topo_check.
        seed: Seed of the inputs.
    """

    kind: str
    matrix: tuple[tuple[float | None, ...], ...]
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    scale: float
    in_place: bool
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
    nodes = size // 2 if kind == "hierarchical" else size
    row = st.tuples(*[weights()] * nodes)
    count = draw(st.integers(1, 4)) if kind != "gather" else 1
    tensor = st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES[1:] if kind == "gather" else SHAPES))
    tensors = draw(st.tuples(*[tensor] * count))
    tiny = all(dtype == torch.float64 for dtype, _ in tensors) and draw(st.booleans())
    return Case(
        kind,
        draw(st.tuples(*[row] * nodes)),
        tensors,
        2.0**-256 if tiny else 1.0,
        draw(st.booleans()) and kind not in ("gossip", "gather"),
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
    sources = {i: matrix[i, node] / 2 for i in reversed(others) if case.matrix[i][node] is not None}
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


def exchange(case: Case, mine: list[Tensor]) -> tuple[list[Tensor], np.ndarray]:
    """Runs a case; returns this rank's results, and the corresponding matrix of ranks."""
    rank, size = fogdist.rank(), fogdist.size()
    given: Any = mine if len(mine) > 1 else mine[0]
    options = {"enable_topo_check": case.check, "name": "case" if case.named else None}
    form = "_nonblocking_" if case.in_place else "_nonblocking"
    if case.kind == "gossip":
        other, matrix = partner(rank, size, case.seed), np.eye(size)
        for r in range(size):
            q = partner(r, size, case.seed)
            if q != r:
                own = weight_matrix(case)[r, r] if case.check else 0.5
                matrix[r, r], matrix[q, r] = own, 0.25 if case.check else 0.5
        if other == rank:
            return [tensor.clone() for tensor in mine], matrix
        pair = (matrix[rank, rank], 0.25) if case.check else (None, None)
        handle = fogdist.pair_gossip_nonblocking(given, other, *pair, name=options["name"])
    elif case.kind == "hierarchical":
        machine, count = fogdist.machine_rank(), fogdist.machine_size()
        arguments, matrix = plan_of(case, machine)
        if case.seed % 2:
            fogdist.set_machine_topology(graph_of(case), is_weighted=True)
            arguments = {}
        else:
            fogdist.set_machine_topology(topologies.FullyConnectedGraph(count))
        function = getattr(fogdist, f"hierarchical_neighbor_allreduce{form}")
        handle = function(given, **arguments, **options)
        matrix = np.kron(matrix, np.full((size // count,) * 2, count / size))
    else:
        arguments = {}
        if case.kind == "dynamic":
            arguments, matrix = plan_of(case, rank)
        else:
            graph = graph_of(case)
            fogdist.set_topology(graph, is_weighted=case.kind == "weighted")
            matrix = weight_matrix(case)
            if case.kind == "own weights":
                arguments, matrix = plan_of(case, rank)
            elif case.kind == "mean":
                matrix = topologies.mixing_matrix(topologies.uniform_weights(graph))
        handle = getattr(fogdist, f"neighbor_allreduce{form}")(given, **arguments, **options)
    result = fogdist.wait(handle)
    return (result if len(mine) > 1 else [result]), matrix


def check_weighted(checks: Checks, label: str, case: Case) -> None:
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
        mine = [tensor.clone() for tensor in inputs[rank]]
        outputs, matrix = exchange(case, mine)
        if case.in_place:
            checks.true(f"{label} in place", all(a is b for a, b in zip(outputs, mine, strict=True)))
        else:
            checks.equal(f"{label} input", mine, inputs[rank])
        results.append(outputs)
    checks.equal(f"{label} bits of two runs", *results)
    for k, (dtype, _) in enumerate(case.tensors):
        each = [tensors[k] for tensors in inputs]
        expected = mix(each, matrix)[rank]
        size_of_terms = mix([tensor.abs() for tensor in each], np.abs(matrix))[rank].real
        output = results[0][k]
        checks.equal(f"{label}[{k}] dtype", output.dtype, dtype)
        checks.equal(f"{label}[{k}] shape", output.shape, expected.shape)
        # Rounded once to the dtype, after a sum in float32 for 16-bit types and in float64 for all others.
        limits = torch.finfo(dtype)
        accumulator = torch.finfo(torch.float32 if dtype in HALVES else torch.float64).eps
        allowed = 0.5 * limits.eps * expected.abs() + 0.5 * limits.smallest_normal * limits.eps
        allowed = allowed * (2 if dtype.is_complex else 1) + 2 * (size + 4) * accumulator * size_of_terms
        if case.kind == "hierarchical":  # the means of machines are rounded to the dtype too
            allowed = allowed + limits.eps * size_of_terms
        worst = ((wide(output) - expected).abs() - allowed).max().item() if output.numel() else -1.0
        checks.true(f"{label}[{k}] is {worst} beyond what rounding allows", worst <= 0)


def check_gathered(checks: Checks, label: str, case: Case) -> None:
    rank, size = fogdist.rank(), fogdist.size()
    ((dtype, shape),) = case.tensors
    inputs = [make_input(r, dtype, ((r * 3 + case.seed) % 4, *shape[1:]), case.seed) for r in range(size)]
    sources = [r for r in range(size) if r != rank and case.matrix[r][rank] is not None]
    destinations = [r for r in range(size) if r != rank and case.matrix[rank][r] is not None]
    options = {"enable_topo_check": case.check, "name": "case" if case.named else None}
    if case.in_place or case.seed % 2:
        sources.reverse()
        output = fogdist.neighbor_allgather(
            inputs[rank], src_ranks=sources, dst_ranks=destinations, **options
        )
    else:
        fogdist.set_topology(graph_of(case))
        output = fogdist.neighbor_allgather(inputs[rank], **options)
    checks.equal(label, output, torch.cat([inputs[rank][:0], *(inputs[r] for r in sources)]))


def run_cases(batch: list[Case]) -> None:
    size = int(os.environ["WORLD_SIZE"])
    with Checks() as checks:
        os.environ["FOG_NODES_PER_MACHINE"] = "2" if size % 2 == 0 else "1"
        try:
            fogdist.init()
            for place, case in enumerate(batch):
                check = check_gathered if case.kind == "gather" else check_weighted
                check(checks, f"case {place}, {case.kind}", case)
        finally:
            del os.environ["FOG_NODES_PER_MACHINE"]


# --- in pytest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", sizes([1, 3, 6], [2, 4, 5, 8]))
def test_random_exchanges(worlds, size):
    @settings(
        max_examples=12,
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
        worlds(size).run(run_cases, batch)

    run()


@pytest.mark.parametrize("size", sizes([4], [2]))
def test_large_tensors(worlds, size):
    generator = np.random.default_rng(size)
    matrix = tuple(tuple(row) for row in generator.uniform(-1, 1, (size, size)).tolist())
    half = tuple(row[: size // 2] for row in matrix[: size // 2])
    tensors = ((torch.float32, (300_001,)), (torch.bfloat16, (70, 100)))
    worlds(size).run(
        run_cases,
        [
            Case(
                kind,
                half if kind == "hierarchical" else matrix,
                tensors,
                1.0,
                seed % 2 == 0,
                False,
                False,
                seed,
            )
            for seed, kind in enumerate(["weighted", "dynamic", "dynamic", "hierarchical", "hierarchical"])
        ],
    )
