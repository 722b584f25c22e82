"""Tests of machines in fogdist: their ranks, their topology, and averages within one machine and between several."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from fogdist.context import PreconditionError
from fogdist.machines import machines_are_homogeneous
from reference import Checks, make_input, mix, reduce
from torch import Tensor

VARIABLE = "FOG_NODES_PER_MACHINE"
# The number of ranks, and of ranks on each machine.
LAYOUTS = [(2, 2), (4, 2), (6, 2), (6, 3)]


@contextlib.contextmanager
def machines_of(count: int | None, *arguments: Any) -> Iterator[None]:
    """Initializes fogdist with `count` ranks on each machine, and afterwards again without the variable."""
    if count is not None:
        os.environ[VARIABLE] = str(count)
    try:
        fogdist.init(*arguments)
        yield
    finally:
        os.environ.pop(VARIABLE, None)
    fogdist.init()


def mean_matrix(graph: Any) -> np.ndarray:
    return topologies.mixing_matrix(topologies.uniform_weights(graph))


def mix_machines(inputs: list[Tensor], local: int, matrix: np.ndarray) -> list[Tensor]:
    """Returns the result of every rank: the machines' means, rounded to the dtype, and the matrix applied to them."""
    means = [reduce(inputs[first : first + local], "AVG") for first in range(0, len(inputs), local)]
    return [mixed for mixed in mix(means, matrix) for _ in range(local)]


@pytest.mark.parametrize(
    ("machine_of", "expected"),
    [
        ([0, 1, 2], True),
        ([3, 3, 1, 1], True),
        ([0, 0, 1], False),
        ([0, 1, 0, 1], False),
    ],
)
def test_machines_are_homogeneous(machine_of, expected):
    assert machines_are_homogeneous(machine_of) is expected


# --- the ranks of machines ----------------------------------------------------------------------------------


def numbers(local: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with machines_of(local), Checks() as checks:
        checks.equal("local", (fogdist.local_rank(), fogdist.local_size()), (rank % local, local))
        checks.equal(
            "machine", (fogdist.machine_rank(), fogdist.machine_size()), (rank // local, size // local)
        )
        checks.true("homogeneous", bf.is_homogeneous())
    with Checks() as checks:
        checks.equal("without", (fogdist.local_rank(), fogdist.local_size()), (rank, size))
        checks.equal("without", (fogdist.machine_rank(), fogdist.machine_size()), (0, 1))


@pytest.mark.parametrize(("size", "local"), [*LAYOUTS, (4, 1), (4, 4)])
def test_numbers(worlds, size, local):
    worlds(size).run(numbers, local)


def wrong_variable() -> list[str]:
    errors = []
    fogdist.init(topologies.star)
    for value in ("x", "0", "-2", "3", "8", "2.0"):
        with (
            pytest.raises(ValueError, match=f"{VARIABLE}: got '{value}'; allowed are .*numbers? of ranks"),
            machines_of(value),
        ):
            pass
    with (
        pytest.raises(ValueError, match="same on all ranks") as caught,
        machines_of(2 if fogdist.rank() else None),
    ):
        pass
    errors.append(str(caught.value))
    # A failed init changes nothing.
    star = topologies.star(4)
    assert topologies.is_equivalent(fogdist.load_topology(), star)
    assert fogdist.local_size() == 4
    return errors


def test_wrong_variable(worlds):
    outcomes = worlds(4).run(wrong_variable)
    assert len({tuple(errors) for errors in outcomes}) == 1
    assert f"only on ranks [0]: {VARIABLE}=None" in outcomes[0][0]
    assert f"only on ranks [1, 2, 3]: {VARIABLE}=2" in outcomes[0][0]


def groups_on_machines() -> None:
    rank = dist.get_rank()
    # of three machines, two ranks are on each of 1 and 2, and one is on 0
    across = dist.new_group([1, 2, 4, 5], backend="fog")
    along = dist.new_group([2, 3, 4, 5], backend="fog")
    with machines_of(2), Checks() as checks:
        if rank in (2, 3, 4, 5):
            place = rank - 2
            checks.equal(
                "local", (fogdist.local_rank(group=along), fogdist.local_size(group=along)), (place % 2, 2)
            )
            # Machines are numbered within the group.
            checks.equal("machine", fogdist.machine_rank(group=along), place // 2)
            fogdist.set_machine_topology(topologies.ring(2), group=along)
            x = torch.tensor([float(rank)])
            output = fogdist.hierarchical_neighbor_allreduce(x, group=along)
            checks.equal("mean", output.item(), 3.5)
        if rank in (1, 2, 4, 5):
            checks.equal("local size", fogdist.local_size(group=across), {1: 1, 2: 1, 4: 2, 5: 2}[rank])
            checks.true("not homogeneous", not bf.is_homogeneous(group=across))
            for call in (
                fogdist.machine_rank,
                fogdist.machine_size,
                fogdist.in_neighbor_machine_ranks,
                fogdist.out_neighbor_machine_ranks,
                lambda group: fogdist.set_machine_topology(topologies.ring(3), group=group),
                lambda group: fogdist.hierarchical_neighbor_allreduce(torch.ones(1), group=group),
            ):
                for error in (PreconditionError, AssertionError, ValueError):
                    with pytest.raises(error, match=r"homogeneously.*\[0, 1, 2, 2\]"):
                        call(group=across)
            x = torch.tensor([float(rank)])
            output = bf.allreduce(x, is_hierarchical_local=True, group=across)
            checks.equal("local mean", output.item(), {1: 1.0, 2: 2.0, 4: 4.5, 5: 4.5}[rank])
        dist.barrier()
    if rank in (1, 2, 4, 5):
        dist.destroy_process_group(across)
    if rank in (2, 3, 4, 5):
        dist.destroy_process_group(along)


def test_groups_find_their_ranks_on_the_same_machines(worlds):
    worlds(6).run(groups_on_machines)


# --- the machine topology -----------------------------------------------------------------------------------


def machine_topologies() -> str:
    rank = dist.get_rank()
    machine = rank // 2
    with machines_of(2), Checks() as checks:
        checks.equal("none", fogdist.load_machine_topology(), None)
        checks.equal("none", bf.is_machine_topo_weighted(), False)
        checks.equal(
            "none", (fogdist.in_neighbor_machine_ranks(), fogdist.out_neighbor_machine_ranks()), ([], [])
        )
        for topology, error, message in [
            (None, ValueError, "topology must be .*None"),
            (7, TypeError, "topology.*DiGraph"),
            (topologies.ring(6), ValueError, "as many nodes as machines, 3, got 6"),
            (nx.relabel_nodes(topologies.ring(3), {0: "a"}), ValueError, "node"),
        ]:
            with pytest.raises(error, match=message):
                fogdist.set_machine_topology(topology)
        ring = topologies.ring(3, connect_style=2)
        fogdist.set_machine_topology(ring)
        checks.true("equal", topologies.is_equivalent(fogdist.load_machine_topology(), ring))
        checks.true("weighted", bf.is_machine_topo_weighted())
        checks.equal("in", fogdist.in_neighbor_machine_ranks(), [(machine - 1) % 3])
        checks.equal("out", fogdist.out_neighbor_machine_ranks(), [(machine + 1) % 3])
        fogdist.load_machine_topology().remove_node(0)
        fogdist.in_neighbor_machine_ranks().clear()
        checks.equal("private", fogdist.in_neighbor_machine_ranks(), [(machine - 1) % 3])
        different = topologies.ring(3, connect_style=1) if rank == 4 else ring
        with pytest.raises(ValueError, match="machine topology must be the same") as caught:
            fogdist.set_machine_topology(different)
        checks.equal("kept", fogdist.in_neighbor_machine_ranks(), [(machine - 1) % 3])
        # The topology of ranks is not changed.
        checks.equal("ranks", len(fogdist.load_topology()), 6)
    assert fogdist.load_machine_topology() is None  # init resets it
    return str(caught.value)


def test_machine_topologies(worlds):
    (text,) = set(worlds(6).run(machine_topologies))
    assert "between the ranks [0, 1, 2, 3, 5] and [4]" in text
    assert "only on ranks [4]: edge 0 -> 2 of weight 0.5" in text


# --- averages between machines: tests/test_random_exchanges.py compares them with a matrix -----------------------

ONE = torch.ones(2)
# Wrong arguments on rank 0 of 6. Its machine 0 is part of a directed ring of 3: it receives from 2 and sends to 1.
WRONG_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tensor": 1.0}, TypeError, "tensor"),
    ({"tensor": ONE.int()}, ValueError, "tensor.*int32"),
    ({"tensor": []}, ValueError, "tensor.*empty"),
    ({"self_weight": 0.5}, ValueError, "must be given together"),
    (
        {"src": {1: 0.5}},
        ValueError,
        r"src_machine_weights must name in-neighbors of machine 0.*\[2\], got \[1\]",
    ),
    ({"dst": [2]}, ValueError, r"dst_machine_weights must name out-neighbors of machine 0.*\[1\], got \[2\]"),
    ({"src": {0: 0.5}}, ValueError, "src_machine_weights.*itself"),
    ({"src": [2]}, TypeError, "src_machine_weights.*dict of machines.*list"),
    ({"src": {2: float("nan")}}, ValueError, r"src_machine_weights\[2\].*finite"),
    ({"dst": {1: "1"}}, TypeError, r"dst_machine_weights\[1\].*real"),
    ({"self_weight": True, "src": {}}, TypeError, "self_weight.*bool"),
    ({"name": 1}, TypeError, "name"),
]


def wrong_arguments() -> None:
    with machines_of(2):
        if fogdist.rank() == 0:
            with pytest.raises(
                RuntimeError, match=r"weights or a machine topology.*set_machine_topology\(.*exponential"
            ):
                fogdist.hierarchical_neighbor_allreduce(ONE)
            with pytest.raises(ValueError, match=r"topology \[\], got \[1\]"):
                fogdist.hierarchical_neighbor_allreduce(
                    ONE, self_weight=1.0, src_machine_weights={}, dst_machine_weights=[1]
                )
        fogdist.set_machine_topology(topologies.ring(3, connect_style=2))
        if fogdist.rank() == 0:
            for given, error, message in WRONG_ARGUMENTS:
                arguments: dict[str, Any] = {"tensor": ONE, **given}
                if "src" in arguments or "dst" in arguments:
                    arguments = {
                        "self_weight": 0.5,
                        "src_machine_weights": arguments.pop("src", {}),
                        "dst_machine_weights": arguments.pop("dst", []),
                        **arguments,
                    }
                for is_async in (False, True):
                    with pytest.raises(error, match=message):
                        fogdist.hierarchical_neighbor_allreduce(**arguments, async_op=is_async)
        # None of the calls has sent anything.
        assert fogdist.hierarchical_neighbor_allreduce(ONE).tolist() == [1.0, 1.0]
    for count in (1, None):
        with machines_of(count):
            error = PreconditionError if count == 1 else RuntimeError
            with pytest.raises(error, match="machine"):
                fogdist.hierarchical_neighbor_allreduce(ONE)


def test_wrong_arguments(worlds):
    worlds(6).run(wrong_arguments)


def disagreement(kind: str) -> str:
    with machines_of(2):
        rank = fogdist.rank()
        machine = rank // 2
        fogdist.set_machine_topology(topologies.fully_connected(3))
        x = torch.ones(4)
        good: dict[str, Any] = {
            "self_weight": 0.5,
            "src_machine_weights": {(machine - 1) % 3: 0.5},
            "dst_machine_weights": [(machine + 1) % 3],
        }
        arguments, function = dict(good), fogdist.hierarchical_neighbor_allreduce
        if kind == "machine" and machine == 1:
            arguments["dst_machine_weights"] = [0]
        elif kind == "mates" and rank == 3:
            arguments["self_weight"] = 0.25
        elif kind == "shape" and rank == 3:
            x = torch.ones(5)
        elif kind == "list" and rank == 3:
            x = [torch.ones(4), torch.ones(1)]
        elif kind == "operation" and machine == 2:
            function = fogdist.neighbor_allreduce
            arguments = {"self_weight": 0.5, "src_weights": {}, "dst_weights": []}
        with pytest.raises(ValueError, match="ranks disagree on an exchange with neighbors") as caught:
            function(x, **arguments, enable_topo_check=True)
        assert fogdist.hierarchical_neighbor_allreduce(torch.ones(1), **good).item() == 1.0
        return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        (
            "machine",
            [
                "machine 1 sends to machine 0 (dst_machine_weights), but machine 0 does not receive from machine 1",
                "machine 2 receives from machine 1 (src_machine_weights), but machine 1 does not send to machine 2",
            ],
        ),
        (
            "mates",
            ["ranks 2 and 3 of machine 1 differ in self_weight, src_machine_weights or dst_machine_weights"],
        ),
        ("shape", ["rank 0 sends float32 of shape (4,) to rank 3, which has float32 of shape (5,)"]),
        ("list", ["rank 0 sends 1 tensors to rank 3, which has 2"]),
        ("operation", ["rank 0 calls hierarchical_neighbor_allreduce", "rank 4 calls neighbor_allreduce"]),
    ],
)
def test_disagreements_are_the_same_error_everywhere(worlds, kind, lines):
    (text,) = set(worlds(6).run(disagreement, kind))
    for line in lines:
        assert line in text


# --- sums within a machine ----------------------------------------------------------------------------------


def local_sums(local: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    first = rank // local * local
    with machines_of(local), Checks() as checks:
        inputs = [make_input(r, torch.float32, (3, 4)) for r in range(size)]
        for average in (False, True):
            expected = reduce(inputs[first : first + local], "AVG" if average else "SUM")
            for function in ("allreduce", "allreduce_"):
                for form in (function, f"{function.rstrip('_')}_nonblocking{'_' * function.endswith('_')}"):
                    label = f"{form} average={average}"
                    tensor = inputs[rank].clone()
                    output = getattr(bf, form)(tensor, average, True, "a name" if average else None)
                    if isinstance(output, int):
                        output = bf.wait(output)
                    checks.close(label, output, expected)
                    if function.endswith("_"):
                        checks.true(f"{label} in place", output is tensor)
                    else:
                        checks.equal(f"{label} input", tensor, inputs[rank])
        with pytest.raises(PreconditionError, match="average"):
            bf.allreduce(torch.ones(2).int(), is_hierarchical_local=True)
        # Machines do not wait for each other: only the first one calls this.
        if rank < local:
            total = bf.allreduce(torch.ones(1), False, is_hierarchical_local=True, name=f"first of {local}")
            checks.equal("alone", total.item(), local)
        checks.equal("together", bf.allreduce(torch.ones(1), False).item(), size)


@pytest.mark.parametrize(("size", "local"), [(4, 1), (6, 3)])
def test_local_sums(worlds, size, local):
    worlds(size).run(local_sums, local)
