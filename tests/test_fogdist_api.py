"""Tests of the public functions of fogdist: start and end, topology, collectives, handles, parameters."""

from __future__ import annotations

import ast
import copy
import importlib
import itertools
import math
import pkgutil
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FrameType, MappingProxyType
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
from fogdist.packing import cap_bytes, make_buckets
from fogdist.removed import REMOVED
from harness import init_process_group, on_ranks, sizes
from reference import COMPLEX, FLOATS, INTEGERS, Checks, make_input, reduce
from torch import Tensor

same = topologies.is_equivalent
SIZES = sizes([1, 3], [2, 5])


# --- names --------------------------------------------------------------------------------------------------


# A name that is added here needs a reason that a new user sees; names of BlueFog are in fogdist.bluefog only.
NAMES = """
    DecentralizedDataParallel DecentralizedOptimizer GossipState SharedBatches Tune Window algorithms allreduce_parameters bluefog
    broadcast_optimizer_state broadcast_parameters checkpoint compression consensus_distance empty flight_record gossip_hook
    hierarchical_neighbor_allreduce in_neighbor_machine_ranks in_neighbor_ranks init is_initialized load_machine_topology
    load_topology local_rank local_size machine_rank machine_size membership metrics neighbor_allgather neighbor_allreduce
    out_neighbor_machine_ranks out_neighbor_ranks pair_gossip rank reconfigure set_machine_topology set_topology share_
    shutdown size suspend_detection timeline topology transport
"""


def test_the_public_names():
    assert fogdist.__all__ == NAMES.split()
    for name in fogdist.__all__:
        assert getattr(fogdist, name).__doc__, name


def test_a_name_that_is_gone_says_what_to_write():
    """An attribute and an import of it; what the text names exists."""
    assert set(REMOVED["fogdist"]).isdisjoint(fogdist.__all__)
    for module, names in REMOVED.items():
        for name, instead in names.items():
            for error, statement in (AttributeError, "module.{}"), (ImportError, "from {} import {}"):
                words = (name,) if error is AttributeError else (module, name)
                with pytest.raises(error, match=rf"{module}'.*'{name}' any more: ") as caught:
                    exec(statement.format(*words), {"module": importlib.import_module(module)})
                assert instead in str(caught.value)
            for path in re.findall(r"fogdist[.][.\w]*\w", instead):
                pkgutil.resolve_name(path)


def files_of(call: Callable[[], object]) -> set[str]:
    """Returns the files of fogdist and fog_pg in which a function runs during a call."""
    files = set()

    def notice(frame: FrameType, event: str, argument: object) -> None:
        parts = Path(frame.f_code.co_filename).parts
        if event == "call" and {"fogdist", "fog_pg"} & set(parts[-4:-1]):
            files.add("/".join(parts[-3:]))

    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


@on_ranks(2)
def test_the_way_to_the_backend_is_short() -> None:
    """A reader who follows a call to the extension opens few files."""
    fogdist.init()
    assert len(files_of(lambda: fogdist.neighbor_allreduce(torch.ones(3)))) <= 4
    for order in None, "awc", "atc":
        model = torch.nn.Linear(3, 1)
        adam = torch.optim.AdamW(model.parameters())
        with fogdist.DecentralizedOptimizer(adam, model, order=order) as optimizer:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                files = files_of(optimizer.step)
                assert "fogdist/training/algorithm.py" in files and len(files) <= 10, (order, files)


# Each module of fogdist imports only what is to its left.
LAYERS = """
    lazy warn removed topology launch agreement nested exchange
    static_topology context machines verification arguments compression operations
    windows ops streams memory packing shards parameters consensus observe elastic
    training algorithms tuning decentralized_optimizer ddp checkpoint hook
    __init__ interactive
    bluefog
"""


def test_every_module_imports_only_what_is_below_it():
    order = LAYERS.split()
    folder = Path(fogdist.__file__).parent
    for file in folder.rglob("*.py"):
        layer = file.relative_to(folder).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fogdist":
                names = (
                    [node.module] if node.module != "fogdist" else [f"fogdist.{a.name}" for a in node.names]
                )
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("fogdist.")]
            for imported in (name.split(".")[1] for name in names):
                assert imported == layer or order.index(imported) < order.index(layer), (file, imported)


# --- start and end ------------------------------------------------------------------------------------------


# The functions of a group, each with arguments that are right after init.
OF_A_GROUP: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        [
            "rank",
            "size",
            "local_rank",
            "local_size",
            "machine_rank",
            "machine_size",
            "is_homogeneous",
            "barrier",
        ],
        (),
    ),
    **dict.fromkeys(["set_topology", "load_topology", "is_topo_weighted", "in_neighbor_ranks"], ()),
    **dict.fromkeys(["out_neighbor_ranks", "load_machine_topology", "is_machine_topo_weighted"], ()),
    **dict.fromkeys(["in_neighbor_machine_ranks", "out_neighbor_machine_ranks"], ()),
    "set_machine_topology": (topologies.ring(2),),
    **dict.fromkeys(["poll", "wait", "win_poll", "win_wait"], (0,)),
    **dict.fromkeys(["allreduce", "allgather", "neighbor_allreduce"], (torch.ones(1),)),
    **dict.fromkeys(["neighbor_allgather", "hierarchical_neighbor_allreduce", "Window"], (torch.ones(1),)),
    **dict.fromkeys(["broadcast", "pair_gossip"], (torch.ones(1), 1)),
    **dict.fromkeys(["win_create", "win_put", "win_accumulate"], (torch.ones(1), "w")),
    **dict.fromkeys(["win_free", "win_get", "win_update", "win_update_then_collect", "win_lock"], ("w",)),
    **dict.fromkeys(["win_associated_p", "get_win_version"], ("w",)),
    "get_current_created_window_names": (),
    "broadcast_parameters": ({}, 0),
    "allreduce_parameters": ({},),
    "InferSourceFromDestinationRanks": ([],),
}


def test_calls_before_init():
    assert not fogdist.is_initialized()
    for name, arguments in OF_A_GROUP.items():
        with pytest.raises(ValueError, match=r"fogdist\.init\(\)"):
            getattr(bf, name)(*arguments)
    fogdist.shutdown()  # does nothing before init


@on_ranks([1, 3])
def test_start_and_end() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    with Checks() as checks:
        with pytest.raises(TypeError, match="topology_fn"):
            fogdist.init(nx.DiGraph())
        with pytest.raises(TypeError, match="DiGraph"):
            fogdist.init(lambda n: "ring")
        checks.true("a failed init is no init", not fogdist.is_initialized())
        fogdist.init()
        checks.equal("size", (fogdist.rank(), fogdist.size()), (rank, size))
        checks.equal("local", (fogdist.local_rank(), fogdist.local_size()), (rank, size))
        checks.equal("machine", (fogdist.machine_rank(), fogdist.machine_size()), (0, 1))
        checks.true("homogeneous", bf.is_homogeneous())
        default = topologies.exponential(size)
        checks.true("default topology", same(fogdist.load_topology(), default))
        checks.true("weighted", bf.is_topo_weighted())
        bf.set_topology(topologies.star(size))
        handle = bf.allreduce_nonblocking(torch.ones(2))
        fogdist.init()
        checks.true("init resets", same(fogdist.load_topology(), default))
        checks.true("init resets weighted", bf.is_topo_weighted())
        checks.equal("init keeps handles", bf.wait(handle), torch.ones(2))
        fogdist.init(topologies.ring)
        checks.true("topology_fn", same(fogdist.load_topology(), topologies.ring(size)))
        stale = bf.allreduce_nonblocking(torch.ones(2))
        bf.shutdown()
        fogdist.shutdown()
        checks.true("shut down", not fogdist.is_initialized())
        checks.true("the user's group stays", dist.is_initialized())
        for call in (fogdist.rank, fogdist.load_topology, bf.barrier, lambda: bf.wait(stale)):
            with pytest.raises(RuntimeError, match="shut down"):
                call()
        fogdist.init()
        checks.equal("again", bf.allreduce(torch.ones(1), average=False).item(), size)
        with pytest.raises(ValueError, match="handle"):
            bf.wait(stale)


def start_without_a_group() -> list[float]:
    import fog_pg  # noqa: F401  registers "fog" also where the entry point is not installed

    results = []
    for _ in range(2):
        fogdist.init()
        results.append(bf.allreduce(torch.tensor([float(fogdist.rank())])).item())
        fogdist.shutdown()
        assert not dist.is_initialized()
    return results


@pytest.mark.parametrize("size", [1, 2])
def test_init_makes_the_group_and_shutdown_destroys_it(new_world, size):
    assert new_world(size, initialize=False).run(start_without_a_group) == [[(size - 1) / 2] * 2] * size


def start_beside(backend: str) -> None:
    import fog_pg  # noqa: F401

    init_process_group(30.0, backend)
    for _ in range(2):
        fogdist.init()
        assert bf.allgather(torch.tensor([fogdist.rank()])).tolist() == list(range(fogdist.size()))
        fogdist.shutdown()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size()


def test_init_beside_a_group_of_another_backend(new_world):
    new_world(2, initialize=False).run(start_beside, "gloo")


def group_destroyed_by_the_user() -> None:
    fogdist.init()
    dist.barrier()
    dist.destroy_process_group()
    assert not fogdist.is_initialized()
    with pytest.raises(RuntimeError, match="destroyed"):
        fogdist.rank()
    init_process_group(30.0)
    fogdist.init()
    assert bf.allreduce(torch.ones(1)).item() == 1.0


def test_a_group_that_the_user_destroys(new_world):
    new_world(2).run(group_destroyed_by_the_user)


# --- topology -----------------------------------------------------------------------------------------------


@on_ranks(3)
def test_topologies_set_and_loaded() -> None:
    fogdist.init()
    size, rank = fogdist.size(), fogdist.rank()
    with Checks() as checks:
        for topology, error, message in [
            ("rong", ValueError, "name must be one of ring, .*'rong'"),
            (7, TypeError, "topology.*DiGraph"),
            (topologies.one_peer(topologies.fully_connected(4)), ValueError, "one round"),
            (topologies.ring(size).to_undirected(), TypeError, "DiGraph"),
            (topologies.ring(size + 1), ValueError, "topology must have as many nodes as ranks"),
            (nx.relabel_nodes(topologies.ring(size), {0: "a"}), ValueError, "node"),
        ]:
            with pytest.raises(error, match=message):
                fogdist.set_topology(topology)
        infinite = topologies.ring(size)
        nx.set_edge_attributes(infinite, float("inf"), "weight")
        with pytest.raises(ValueError, match="weight"):
            fogdist.set_topology(infinite)
        checks.true("unweighted infinity", bf.set_topology(infinite))
        nx.set_edge_attributes(infinite, 1.0, "weight")
        if size > 1:
            with pytest.raises(ValueError, match="each column of topology must sum to 1"):
                fogdist.set_topology(infinite)
        fogdist.set_topology(topologies.Topology.from_graph("a star", topologies.star(size)))

        # A star's weights differ from the plain mean, which a graph without weights stands for.
        x = torch.tensor([float(rank == 0)], dtype=torch.float64)
        graph = topologies.star(size)
        plain = nx.DiGraph(list(graph.edges))
        for set_it, is_weighted, weight in [
            (lambda: bf.set_topology(graph), False, 1 / 2),
            (lambda: fogdist.set_topology(graph), True, 1 / size),
            (lambda: fogdist.set_topology("star"), True, 1 / size),
            (lambda: fogdist.set_topology(plain), False, 1 / 2),
        ]:
            set_it()
            checks.equal("is_topo_weighted", bf.is_topo_weighted(), is_weighted)
            if rank != 0:
                expected = torch.tensor([weight], dtype=torch.float64)
                checks.close(f"weighted={is_weighted}", fogdist.neighbor_allreduce(x), expected)
            else:
                fogdist.neighbor_allreduce(x)

        # Neighbors have the order of the graph, without self loops.
        graph = nx.DiGraph()
        graph.add_nodes_from(reversed(range(size)))
        graph.add_edges_from((i, j) for i, j in itertools.product(reversed(range(size)), repeat=2))
        fogdist.set_topology(graph)
        others = [r for r in reversed(range(size)) if r != rank]
        checks.equal("in-neighbors", fogdist.in_neighbor_ranks(), others)
        checks.equal("out-neighbors", fogdist.out_neighbor_ranks(), others)
        fogdist.in_neighbor_ranks().clear()
        fogdist.load_topology().remove_node(0)
        graph.remove_edges_from(list(graph.edges))
        checks.equal(
            "copies are private",
            (fogdist.in_neighbor_ranks(), fogdist.load_topology().size()),
            (others, size**2),
        )
        fogdist.set_topology()
        default = topologies.exponential(size)
        checks.true("default topology", same(fogdist.load_topology(), default))


@on_ranks(SIZES)
def test_inferred_neighbors() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    with Checks() as checks:
        for seed in range(5):
            adjacency = np.random.default_rng(seed).random((size, size)) < 0.5
            np.fill_diagonal(adjacency, False)
            destinations, sources = np.flatnonzero(adjacency[rank]), np.flatnonzero(adjacency[:, rank])
            matrix = (adjacency + np.eye(size)) / (adjacency + np.eye(size)).sum(axis=0)
            checks.equal("sources", bf.InferSourceFromDestinationRanks(destinations), sources.tolist())
            checks.equal(
                "destinations", bf.InferDestinationFromSourceRanks(list(sources)), destinations.tolist()
            )
            ranks, got = bf.InferSourceFromDestinationRanks(destinations, construct_adjacency_matrix=True)
            checks.true("matrix", ranks == sources.tolist() and np.array_equal(got, matrix))
            ranks, got = bf.InferDestinationFromSourceRanks(sources, construct_adjacency_matrix=True)
            checks.true("matrix", ranks == destinations.tolist() and np.array_equal(got, matrix))
        for infer in (bf.InferSourceFromDestinationRanks, bf.InferDestinationFromSourceRanks):
            for ranks, error in itertools.product([[rank], [size]], (ValueError, AssertionError)):
                with pytest.raises(error, match="_ranks"):
                    infer(ranks)
            with pytest.raises(TypeError, match="integer"):
                infer([0.5])


# --- collectives --------------------------------------------------------------------------------------------


@on_ranks(SIZES)
def test_collectives() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    dtypes = [torch.int64, torch.bfloat16, torch.float32, torch.complex128]
    views: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t[0, 0],
    ]
    names = ["allreduce", "allreduce_", "broadcast", "broadcast_"]
    with Checks() as checks:
        for name, dtype, view in itertools.product(names, dtypes, views):
            inputs = [make_input(r, dtype, (5, 4)) for r in range(size)]
            if name.startswith("broadcast"):
                cases = [(root, inputs[root]) for root in {0, size - 1}]
            else:
                cases = [(False, reduce(inputs, "SUM"))]
                cases += [] if dtype == torch.int64 else [(True, reduce(inputs, "AVG"))]
            starting = f"{name.rstrip('_')}_nonblocking{'_' * name.endswith('_')}"
            for (argument, expected), form in itertools.product(cases, (name, starting)):
                label = f"{form}({argument}) {dtype}"
                memory = inputs[rank].clone()
                tensor = view(memory)
                output = getattr(bf, form)(tensor, argument)
                output = output if form == name else bf.wait(output)
                checks.close(label, output, view(expected))
                if name.endswith("_"):
                    checks.true(f"{label} in place", output is tensor)
                else:
                    checks.equal(f"{label} input", memory, inputs[rank])
                    checks.true(f"{label} alias", output.data_ptr() != tensor.data_ptr())
        for dtype, rest in itertools.product([torch.bool, *INTEGERS, *FLOATS, *COMPLEX], [(), (3,), (2, 0)]):
            inputs = [make_input(r, dtype, ((3 * r + 1) % 4, *rest)) for r in range(size)]
            checks.equal(f"allgather {dtype} {rest}", bf.allgather(inputs[rank]), torch.cat(inputs))

        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        checks.equal("no gradient", bf.allreduce(parameter).requires_grad, False)
        bf.allreduce_(parameter)
        checks.equal("leaf", parameter.detach(), torch.full((3,), (size - 1) / 2))
        checks.true("still a leaf", parameter.requires_grad and parameter.is_leaf)
        conjugate = torch.tensor([complex(rank, 1.0)]).conj()
        checks.equal("conjugate", bf.allreduce_(conjugate), torch.tensor([complex((size - 1) / 2, -1.0)]))


@on_ranks(SIZES)
def test_broadcast_is_differentiable() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    with Checks() as checks:
        for root in {0, size - 1}:
            x = torch.full((3,), float(rank), dtype=torch.float64, requires_grad=True)
            output = bf.broadcast(x, root)
            (output.square() * (rank + 1)).sum().backward()
            checks.equal("output", output.detach(), torch.full((3,), float(root), dtype=torch.float64))
            # The gradient arrives at the root, as the sum over all ranks of (r + 1) * 2 * root.
            expected = size * (size + 1) * float(root) if rank == root else 0.0
            checks.equal("gradient", x.grad, torch.full((3,), expected, dtype=torch.float64))
        with torch.no_grad():
            checks.true("no gradient", not bf.broadcast(x, 0).requires_grad)
        handle = bf.broadcast_nonblocking(x, 0)
        checks.true("nor nonblocking", not bf.wait(handle).requires_grad)


X, INTS = torch.ones(2), torch.ones(2, dtype=torch.int64)
# Calls on rank 0 of 2.
WRONG: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("allreduce", (INTS,), ValueError, "average.*int64"),
    ("allreduce_", (INTS,), AssertionError, "average.*int64"),
    ("allreduce", (INTS > 0,), PreconditionError, "average.*bool"),
    ("allreduce", (3.0,), TypeError, "tensor.*float"),
    ("allreduce", (X.to_sparse(),), TypeError, "dense"),
    ("allreduce_", (torch.ones(1).expand(3),), ValueError, "memory for each.*expanded"),
    ("broadcast", (INTS, 2), ValueError, "root_rank.*2"),
    ("broadcast", (INTS, -1), ValueError, "root_rank.*-1"),
    ("broadcast_", (INTS, 0.5), TypeError, "root_rank"),
    ("broadcast_", (torch.ones(8).unfold(0, 4, 2), 0), ValueError, "memory for each"),
    ("allgather", (torch.tensor(1),), ValueError, "dimension"),
    ("allreduce_nonblocking", (X, True, 1), TypeError, "is_hierarchical_local.*True or False.*1"),
    ("allreduce_", (X, "misplaced"), TypeError, "average.*True or False.*'misplaced'"),
    ("broadcast", (X, True), TypeError, "root_rank.*bool"),
    ("broadcast_parameters", ([X], True), TypeError, "root_rank.*bool"),
    ("allgather", (X, True), TypeError, "name.*bool"),
    ("barrier", ("name",), TypeError, "positional"),
    ("pair_gossip", (X, True), TypeError, "target_rank.*bool"),
    ("pair_gossip", (X, 1, "name", 0.5), TypeError, "self_weight.*str"),
    ("win_create", (X, "name", "zero"), TypeError, "zero_init.*'zero'"),
    ("win_create", (X, True), TypeError, "name.*bool"),
    ("wait", (True,), TypeError, "handle.*bool"),
    ("init", (fogdist.topology.ring, 1), TypeError, "is_weighted.*1"),
    ("set_topology", (fogdist.topology.ring(2), 1), TypeError, "is_weighted.*1"),
    ("InferSourceFromDestinationRanks", ([1], "yes"), TypeError, "construct_adjacency_matrix.*'yes'"),
    ("StarGraph", (4, False), TypeError, "center_rank.*bool"),
]


@on_ranks(2)
def test_wrong_arguments() -> None:
    fogdist.init()
    if fogdist.rank() == 0:
        for name, arguments, error, message in WRONG:
            with pytest.raises(error, match=message):
                getattr(bf, name)(*arguments)


@on_ranks(4)
def test_named_operations_in_different_orders() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    calls = {
        "sum": lambda n: bf.allreduce_nonblocking(torch.ones(4) * rank, False, name=n),
        "other sum": lambda n: bf.allreduce_nonblocking_(torch.ones(5) * rank, False, name=n),
        "root": lambda n: bf.broadcast_nonblocking(torch.tensor([rank]), size - 1, n),
        "all": lambda n: bf.allgather_nonblocking(torch.tensor([rank]), n),
        "neighbors": lambda n: bf.neighbor_allgather_nonblocking(torch.tensor([rank]), name=n),
    }
    order = list(calls)[rank:] + list(calls)[:rank]
    waiting = {name: calls[name](name) for name in order}
    results = {name: bf.wait(handle).tolist() for name, handle in waiting.items()}
    total = float(sum(range(size)))
    assert results == {
        "sum": [total] * 4,
        "other sum": [total] * 5,
        "root": [size - 1],
        "all": list(range(size)),
        "neighbors": sorted(fogdist.in_neighbor_ranks()),
    }


# --- buckets ------------------------------------------------------------------------------------------------


def test_the_size_of_buckets():
    for device, least in (("cpu", 4), ("meta", 25)):
        tensors = [torch.empty(1 << 18, device=device) for _ in range(3 * least)]
        assert [len(bucket.places) for bucket in make_buckets(tensors)] == [least] * 3
    for cap, size in [(None, None), (8, 8 << 20), (1e-3, 1048), (1e-9, 1), (np.float32(2), 2 << 20)]:
        assert cap_bytes(cap) == size
    for wrong in [0, -1, math.inf, math.nan]:
        with pytest.raises(ValueError, match="bucket_cap_mb.*above 0"):
            cap_bytes(wrong)
    with pytest.raises(TypeError, match=r"bucket_cap_mb.*str"):
        cap_bytes("8")


# --- parameters ---------------------------------------------------------------------------------------------


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4).double()
    )
    model.tied = model[0]
    model[1].num_batches_tracked.fill_(seed)
    return model


@on_ranks(SIZES)
def test_parameters() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    with Checks() as checks:
        for root in {0, size - 1}:
            expected = make_model(root).state_dict()
            model = make_model(rank)
            state = model.state_dict()
            shuffled = OrderedDict(reversed(state.items())) if rank % 2 else state
            fogdist.broadcast_parameters(shuffled, root)
            for name, value in model.state_dict().items():
                checks.equal(f"dict {name}", value, expected[name])
            model = make_model(rank)
            fogdist.broadcast_parameters(list(model.named_parameters()), root)
            fogdist.broadcast_parameters(list(model.buffers()), np.int64(root))
            for name, value in model.state_dict().items():
                checks.equal(f"lists {name}", value, expected[name])
            model = make_model(rank)
            fogdist.broadcast_parameters(model.named_parameters(), root)
            fogdist.broadcast_parameters(model.buffers(), root)
            for name, value in model.state_dict().items():
                checks.equal(f"iterators {name}", value, expected[name])
        model = make_model(rank)
        fogdist.allreduce_parameters(dict(model.named_parameters()))
        models = [dict(make_model(r).named_parameters()) for r in range(size)]
        for name, value in model.named_parameters():
            checks.close(f"average {name}", value.detach(), reduce([m[name].detach() for m in models], "AVG"))
            checks.true(f"leaf {name}", value.is_leaf and value.requires_grad)
        for wrong in (torch.ones(2), "abc", 3, [("a", 1)], MappingProxyType({"a": 1.0}), [torch.ones(1), 2]):
            for call in (lambda p: fogdist.broadcast_parameters(p, 0), fogdist.allreduce_parameters):
                with pytest.raises(ValueError, match="params"):
                    call(wrong)
        state = {**make_model(rank).state_dict(), "extra": [rank]}
        fogdist.allreduce_parameters(state)
        states = [make_model(r).state_dict() for r in range(size)]
        for name, value in states[0].items():
            mean = reduce([each[name] for each in states], "AVG") if value.is_floating_point() else value
            checks.close(f"average {name}", state[name], mean)
        checks.equal("average extra", state["extra"], [0])
        with pytest.raises(ValueError, match="root_rank"):
            fogdist.broadcast_parameters({}, size)
        fogdist.broadcast_parameters({}, 0)
        fogdist.broadcast_parameters([], 0)


@on_ranks(3)
def test_parameters_that_differ_are_an_error_everywhere() -> None:
    fogdist.init()
    alike = {"a": torch.zeros(2), "b": torch.zeros(2, 3), "c": torch.zeros(4)}
    others = [alike | {"b": torch.zeros(3, 2)}, alike | {"b": torch.zeros(2, 3).double()}, {**alike}]
    del others[2]["b"]
    for different in others:
        params = different if fogdist.rank() == 1 else alike
        before = copy.deepcopy(params)
        for call in (lambda p: fogdist.broadcast_parameters(p, 0), fogdist.allreduce_parameters):
            with pytest.raises(
                ValueError, match=r"(?s)params .*ranks \[0, 2\] and \[1\].* \[0, 2\]: item 1 'b'"
            ):
                call(params)
        assert all(torch.equal(params[name], before[name]) for name in before)


def make_optimizer(
    name: str, rank: int, steps: int
) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    torch.manual_seed(rank)
    parameters = [
        torch.nn.Parameter(torch.randn(3, 2)),
        torch.nn.Parameter(torch.randn(5, dtype=torch.float64)),
    ]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5 + rank}]
    # BlueFog's broadcast failed for options that are None, such as foreach.
    options: dict[str, Any] = {"SGD": {"momentum": 0.9}, "Adagrad": {}}.get(name, {"amsgrad": True})
    optimizer = getattr(torch.optim, name)(groups, lr=0.1 * (rank + 1), foreach=None, **options)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer, parameters


def flat_state(state: Any, path: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {k: v for key, item in state.items() for k, v in flat_state(item, f"{path}.{key}").items()}
    if isinstance(state, (list, tuple)):
        return {k: v for key, item in enumerate(state) for k, v in flat_state(item, f"{path}.{key}").items()}
    return {path: state}


@on_ranks([1, 3])
def test_optimizer_state() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    with Checks() as checks:
        for name, root in itertools.product(["SGD", "Adam", "AdamW", "Adagrad"], {0, size - 1}):
            # The root has taken steps or not; the others have taken another number of steps, or none.
            for root_steps in (0, 3):
                optimizer, _ = make_optimizer(name, rank, root_steps if rank == root else rank % 2 * 2)
                fogdist.broadcast_optimizer_state(optimizer, root)
                expected = flat_state(make_optimizer(name, root, root_steps)[0].state_dict())
                got = flat_state(optimizer.state_dict())
                checks.equal(f"{name} keys", sorted(got), sorted(expected))
                for path, value in expected.items():
                    checks.equal(f"{name} {path}", got.get(path), value)
        optimizer, parameters = make_optimizer("Adam", rank, 0)
        with pytest.raises(ValueError, match="LBFGS"):
            fogdist.broadcast_optimizer_state(torch.optim.LBFGS(parameters), 0)
        with pytest.raises(TypeError, match="Optimizer"):
            fogdist.broadcast_optimizer_state(optimizer.state_dict(), 0)
        if size > 1:
            if rank == 0:
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
            with pytest.raises(ValueError, match=r"(?s)optimizer.*\[0\]: parameter group 2"):
                fogdist.broadcast_optimizer_state(optimizer, 0)
