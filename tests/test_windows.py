"""Tests of one-sided windows as users call them: by name and as objects, on topologies, and with push-sum.

test_window_backend.py tests windows in memory and between hosts.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import fogdist
import networkx as nx
import pytest
import torch
import torch.distributed as dist
from fogdist import legacy
from fogdist import topology as topologies
from harness import sizes
from reference import COMPLEX, FLOATS, INTEGERS, Checks, make_input, wide
from torch import Tensor

RANKS = 4
# Strongly connected, directed and irregular: rank 0 has three out-neighbors, rank 3 has one.
EDGES = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (3, 1)]


def irregular(size: int) -> nx.DiGraph:
    graph = nx.DiGraph([(i, j) for i, j in EDGES if max(i, j) < size])
    graph.add_nodes_from(range(size))
    return graph


def right_ring(size: int) -> nx.DiGraph:
    return topologies.RingGraph(size, connect_style=2)


def full(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((2, 3), value, dtype=dtype)


def slot(name: str, rank: int) -> Tensor:
    """Returns the contents of an in-neighbor's slot, and resets its version."""
    return fogdist.win_update(name, self_weight=0.0, neighbor_weights={rank: 1.0}, clone=True)


def before() -> int:
    return (fogdist.rank() - 1) % fogdist.size()


def after() -> int:
    return (fogdist.rank() + 1) % fogdist.size()


# --- the functions ------------------------------------------------------------------------------------------


def functions() -> None:
    """On a ring to the right: each rank writes to the next one and gets from the previous one."""
    fogdist.init(right_ring)
    rank, left, right = fogdist.rank(), before(), after()
    x = full(rank)
    with Checks() as checks:
        checks.true("created", fogdist.win_create(x, "w") is True)
        checks.true("not twice", fogdist.win_create(full(7), "w") is False)
        checks.equal("names", fogdist.get_current_created_window_names(), ["w"])
        checks.equal("starts as a copy", slot("w", left), full(rank))
        checks.equal("versions", fogdist.get_win_version("w"), {left: 0})

        fogdist.barrier()
        checks.true("put returns True", fogdist.win_put(x, "w") is True)
        fogdist.barrier()
        checks.equal("x stays", x, full(rank))
        checks.equal("a put is a version", fogdist.get_win_version("w"), {left: 1})
        checks.equal("put", slot("w", left), full(left))
        fogdist.barrier()
        fogdist.neighbor_win_put(full(10 + rank), "w", None, {right: 0.5})
        fogdist.barrier()
        checks.equal("put with a weight", slot("w", left), full((10 + left) / 2))
        fogdist.barrier()
        fogdist.win_accumulate(x, "w", dst_weights={right: 2.0}, require_mutex=True)
        fogdist.neighbor_win_accumulate(full(100), "w", dst_weights=[right])
        fogdist.barrier()
        checks.equal("an accumulate is no version", fogdist.get_win_version("w"), {left: 0})
        checks.equal("accumulate", slot("w", left), full((10 + left) / 2 + 2 * left + 100))
        fogdist.barrier()
        checks.true("get returns True", fogdist.win_get("w") is True)
        checks.equal("a get is a version", fogdist.get_win_version("w"), {left: 1})
        checks.equal("get", slot("w", left), full(left))
        fogdist.neighbor_win_get("w", {left: 3.0}, require_mutex=True)
        checks.equal("get with a weight", slot("w", left), full(3 * left))
        fogdist.barrier()

        clone = fogdist.win_update("w", clone=True)
        checks.equal("the plain mean", clone, full((rank + 3 * left) / 2))
        checks.true("a clone", clone is not x and x.eq(rank).all().item())
        fogdist.barrier()
        result = fogdist.win_update("w", require_mutex=True)
        checks.true("in place", result is x)
        checks.equal("the same mean", x, full((rank + 3 * left) / 2))
        x.fill_(rank)
        update = fogdist.win_update("w", self_weight=2.0, neighbor_weights={left: 10.0}, reset=True)
        checks.equal("weights", update, full(2 * rank + 30 * left))
        checks.equal("reset", slot("w", left), full(0))
        fogdist.barrier()
        x.fill_(rank)
        fogdist.win_accumulate(x, "w")
        fogdist.barrier()
        checks.equal("collected", fogdist.win_update_then_collect("w"), full(rank + left))
        checks.equal("and taken", fogdist.win_update_then_collect("w"), full(rank + left))
        fogdist.barrier()
        checks.true("freed", fogdist.win_free("w") is True)
        checks.equal("no names", fogdist.get_current_created_window_names(), [])
        checks.true("the tensor stays", x.eq(rank + left).all().item())
        checks.true("again", fogdist.win_create(x, "w", zero_init=True))
        checks.equal("zeros at first", slot("w", left), full(0))
        checks.equal("freed all", fogdist.win_free(), True)
        checks.equal("there is none to free", fogdist.win_free(), True)


def test_functions(worlds):
    worlds(RANKS).run(functions)


def default_weights() -> None:
    """By default `win_update` uses the topology: the mean of all slots, or the topology's weights."""
    with Checks() as checks:
        for is_weighted in (False, True):
            graph = irregular(RANKS)
            for i, j in graph.edges:
                graph.edges[i, j]["weight"] = 0.1 * (i + 1)
            graph.add_edges_from([(i, i, {"weight": 0.25}) for i in range(RANKS)])
            fogdist.init(lambda size, graph=graph: graph, is_weighted=is_weighted)
            rank, sources = fogdist.rank(), fogdist.in_neighbor_ranks()
            x = full(rank)
            fogdist.win_create(x, "w")
            fogdist.barrier()
            fogdist.win_put(full(10 + rank), "w")
            fogdist.barrier()
            if is_weighted:
                expected = 0.25 * rank + sum(0.1 * (i + 1) * (10 + i) for i in sources)
            else:
                expected = (rank + sum(10 + i for i in sources)) / (len(sources) + 1)
            checks.close(f"weighted={is_weighted}", fogdist.win_update("w"), full(expected))
            fogdist.barrier()
            fogdist.win_free()


def test_default_weights_of_update(worlds):
    worlds(RANKS).run(default_weights)


def kept_share() -> None:
    """`self_weight` is the share of its tensor and of p that the sender keeps."""
    fogdist.init(right_ring)
    rank, left, right = fogdist.rank(), before(), after()
    x = full(rank)
    fogdist.win_create(x, "w", zero_init=True)
    fogdist.turn_on_win_ops_with_associated_p()
    with Checks() as checks:
        fogdist.win_accumulate(x, "w", self_weight=0.25, dst_weights={right: 0.75})
        checks.equal("scaled after it was sent", x, full(0.25 * rank))
        checks.equal("p too", fogdist.win_associated_p("w"), 0.25)
        fogdist.barrier()
        checks.equal("collected", fogdist.win_update_then_collect("w"), full(0.25 * rank + 0.75 * left))
        checks.equal("p of both", fogdist.win_associated_p("w"), 1.0)
        fogdist.barrier()
        other = full(8.0)
        fogdist.win_put(other, "w", 0.5, {right: 0.5})
        checks.equal("of another tensor", other, full(4.0))
        checks.equal("not the window's", x, full(0.25 * rank + 0.75 * left))
        checks.equal("p is the window's", fogdist.win_associated_p("w"), 0.5)
        fogdist.turn_off_win_ops_with_associated_p()
        fogdist.barrier()
        fogdist.win_accumulate(other, "w", 0.0)
        checks.equal("nothing kept", other, full(0))
        fogdist.win_update_then_collect("w")
        checks.equal("p is left alone", fogdist.win_associated_p("w"), 0.5)
        fogdist.turn_on_win_ops_with_associated_p()
        fogdist.win_update_then_collect("w")
        checks.equal("and was in the slot still", fogdist.win_associated_p("w"), 1.0)
        fogdist.turn_off_win_ops_with_associated_p()
        transposed = torch.arange(6.0, dtype=torch.float64).view(3, 2).t()
        expected = transposed * 0.5
        fogdist.win_put(transposed, "w", 0.5)
        checks.equal("of any strides", transposed, expected)
        with pytest.raises(ValueError, match="expanded"):
            fogdist.win_put(torch.ones(1, 3, dtype=torch.float64).expand(2, 3), "w", 0.5)
    fogdist.barrier()
    fogdist.win_free()


def test_the_share_that_the_sender_keeps(worlds):
    worlds(RANKS).run(kept_share)


def scaled(x: Tensor, weight: float) -> Tensor:
    """Returns a copy of `x` after a put with `self_weight`."""
    with fogdist.Window(x.clone()) as window:
        window.put(window.tensor, self_weight=weight)
        return window.tensor


def scaling() -> None:
    fogdist.init()
    with Checks() as checks:
        for dtype in FLOATS + COMPLEX:
            for shape in [(), (0,), (3, 5), (40_001,)]:
                x = make_input(0, dtype, shape)
                close = torch.allclose(
                    wide(scaled(x, 1 / 3)), wide(x) / 3, rtol=torch.finfo(dtype).eps, atol=0
                )
                checks.true(f"{dtype} {shape}", close)
        # Weights are float64: the float32 next to 1/3 is off by 1e-8, and many such products would add mass.
        x = make_input(0, torch.float32, 1_000_000).abs()
        exact = x.double().sum().item() / 3
        checks.true("a double", math.isclose(scaled(x, 1 / 3).double().sum().item(), exact, rel_tol=1e-9))
        for dtype in INTEGERS:
            limits = torch.iinfo(dtype)
            x = torch.tensor([0, 1, 3, 5, limits.max, limits.min], dtype=dtype)
            checks.equal(f"{dtype}: halves to even", scaled(x, 0.5).tolist()[:4], [0, 0, 2, 2])
            checks.equal(f"{dtype}: range", scaled(x, 1e30).tolist()[1:5], [limits.max] * 4)
            checks.equal(f"{dtype}: least", scaled(x, 1e30).tolist()[5], limits.min)
        nothing = torch.tensor([math.nan, math.inf, 1.0])
        checks.equal("zeros of whatever there was", scaled(nothing, 0.0).tolist(), [0.0, 0.0, 0.0])


def test_scaling(worlds):
    worlds(1).run(scaling)


def integer_windows() -> None:
    fogdist.init(right_ring)
    rank, left = fogdist.rank(), before()
    for dtype in (torch.int32, torch.int64, torch.uint8):
        fogdist.win_create(full(10 * rank, dtype), "w", zero_init=True)
        fogdist.win_put(full(10 * rank + 1, dtype), "w")
        fogdist.barrier()
        assert torch.equal(fogdist.win_update_then_collect("w"), full(10 * rank + 10 * left + 1, dtype))
        fogdist.win_free("w")


def test_windows_of_integers(worlds):
    worlds(RANKS).run(integer_windows)


# --- arguments ----------------------------------------------------------------------------------------------


def wrong_arguments() -> None:
    fogdist.init(right_ring)
    rank, left, right = fogdist.rank(), before(), after()
    far = (rank + 2) % fogdist.size()
    x = full(rank)
    fogdist.win_create(x, "w")
    nothing = x.clone()
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: fogdist.win_free("v"), KeyError, r"name must be .* open window, of \['w'\], got 'v'"),
        (lambda: fogdist.win_update("v"), KeyError, "got 'v'"),
        (lambda: fogdist.win_update_then_collect("v"), KeyError, "got 'v'"),
        (lambda: fogdist.get_win_version("v"), KeyError, "got 'v'"),
        (lambda: fogdist.win_associated_p("v"), KeyError, "got 'v'"),
        (lambda: fogdist.win_put(x, "v"), ValueError, "got 'v'"),
        (lambda: fogdist.win_mutex("v"), ValueError, "got 'v'"),
        (lambda: fogdist.win_lock("v"), ValueError, "got 'v'"),
        (lambda: fogdist.win_put(x, 3), TypeError, "name must be a string, got int"),
        (lambda: fogdist.win_create(x, None), TypeError, "name must be a string, got NoneType"),
        (lambda: fogdist.win_create([1.0], "v"), TypeError, "tensor must be a torch.Tensor, got list"),
        (
            lambda: fogdist.win_put(x, "w", dst_weights={left: 1.0}),
            ValueError,
            rf"dst_weights must name out-.*{left}",
        ),
        (
            lambda: fogdist.win_put(x, "w", dst_weights=[right, right]),
            ValueError,
            "dst_weights must not contain",
        ),
        (lambda: fogdist.win_put(x, "w", dst_weights={99: 1.0}), ValueError, "dst_weights"),
        (
            lambda: fogdist.win_put(x, "w", dst_weights={"1": 1.0}),
            TypeError,
            "dst_weights.* must be an integer",
        ),
        (lambda: fogdist.win_put(x, "w", dst_weights=1), TypeError, "dst_weights must be an iterable"),
        (
            lambda: fogdist.win_put(x, "w", dst_weights={right: math.inf}),
            ValueError,
            rf"dst_weights\[{right}\]",
        ),
        (lambda: fogdist.win_put(x, "w", dst_weights={right: "a"}), TypeError, rf"dst_weights\[{right}\]"),
        (lambda: fogdist.win_put(x, "w", "a"), TypeError, "self_weight must be a real number"),
        (lambda: fogdist.win_put(x, "w", math.nan), ValueError, "self_weight must be finite"),
        (lambda: fogdist.win_put(x, "w", {right: 1.0}), TypeError, "self_weight .* is it dst_weights"),
        (
            lambda: fogdist.win_put(x[0], "w"),
            ValueError,
            r"tensor: got float64\[3\]; allowed is float64\[2, 3\]",
        ),
        (lambda: fogdist.win_put(x.float(), "w"), ValueError, r"tensor: got float32"),
        (lambda: fogdist.win_put(1.0, "w"), TypeError, "tensor must be a torch.Tensor, got float"),
        (
            lambda: fogdist.win_accumulate(x, "w", None, [far]),
            ValueError,
            "dst_weights must name out-neighbors",
        ),
        (lambda: fogdist.win_get("w", {right: 1.0}), ValueError, "src_weights must name in-neighbors"),
        (lambda: fogdist.win_update("w", 0.5), ValueError, "must be given together, got self_weight alone"),
        (lambda: fogdist.win_update("w", None, {}), ValueError, "got neighbor_weights alone"),
        (lambda: fogdist.win_update("w", 0.5, [left]), TypeError, "neighbor_weights must be a dict"),
        (lambda: fogdist.win_update("w", 0.5, {right: 0.5}), ValueError, "neighbor_weights must name in-"),
        (lambda: fogdist.win_update("w", "a", {}), TypeError, "self_weight must be a real number"),
        (lambda: fogdist.win_mutex("w", ranks=[far]).__enter__(), ValueError, f"got rank {far}"),
        (lambda: fogdist.win_mutex("w", ranks=["a"]).__enter__(), TypeError, "ranks"),
        (lambda: fogdist.win_poll(10**9), ValueError, "handle"),
        (lambda: fogdist.win_wait("a"), TypeError, "handle must be an int"),
        (lambda: fogdist.win_put(x, "w", group="world"), TypeError, "group"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    with pytest.warns(UserWarning, match="win_wait: handle"):
        assert fogdist.win_wait(10**9) is False
    with Checks() as checks:
        checks.equal("nothing was sent", slot("w", left), nothing)
        checks.equal("nor scaled", x, nothing)
    with pytest.raises(ValueError, match="ranks disagree on the tensor"):
        fogdist.win_create(torch.ones(1 + rank), "v")
    with pytest.raises(ValueError, match="ranks disagree on the name"):
        fogdist.win_create(torch.ones(1), f"v{rank}")
    assert fogdist.get_current_created_window_names() == ["w"]
    fogdist.win_free()


def test_wrong_arguments(worlds):
    worlds(RANKS).run(wrong_arguments)


def test_the_aliases_have_one_signature():
    for name in ("put", "accumulate", "get"):
        for form in ("", "_nonblocking"):
            assert getattr(fogdist, f"win_{name}{form}") is getattr(fogdist, f"neighbor_win_{name}{form}")
    signature = inspect.signature(fogdist.win_put)
    assert list(signature.parameters)[:5] == ["tensor", "name", "self_weight", "dst_weights", "require_mutex"]
    signature = inspect.signature(fogdist.win_update)
    assert list(signature.parameters)[:6] == [
        "name",
        "self_weight",
        "neighbor_weights",
        "reset",
        "clone",
        "require_mutex",
    ]


# --- handles and mutexes ------------------------------------------------------------------------------------


def window_handles() -> None:
    fogdist.init(right_ring)
    rank, left, right = fogdist.rank(), before(), after()
    x = full(rank)
    fogdist.win_create(x, "w", zero_init=True)
    first = fogdist.win_put_nonblocking(full(rank), "w")
    second = fogdist.win_accumulate_nonblocking(full(1), "w")  # two operations in flight on one window
    average = fogdist.allreduce_nonblocking(full(rank))
    assert len({first, second, average}) == 3
    assert fogdist.win_wait(second) is True
    assert fogdist.wait(first) is True  # windows and collectives share their handles
    assert torch.equal(fogdist.wait(average), full((fogdist.size() - 1) / 2))
    fogdist.barrier()
    assert torch.equal(slot("w", left), full(left + 1))
    fogdist.barrier()
    handle = fogdist.win_get_nonblocking("w", {left: 2.0})
    while not fogdist.win_poll(handle):
        time.sleep(0.001)
    assert fogdist.win_poll(handle) is True
    assert fogdist.win_wait(handle) is True
    assert torch.equal(slot("w", left), full(2 * left))
    fogdist.barrier()
    given = full(2)
    handle = fogdist.win_accumulate_nonblocking(given, "w", 0.5, {right: 0.0})
    if os.environ.get("FOG_LOCAL_LINKS") != "0":
        assert given.eq(1).all()  # on one host the operation was complete at once
    fogdist.win_wait(handle)
    assert given.eq(1).all()
    fogdist.barrier()
    with fogdist.win_lock("w"):
        fogdist.barrier()
        mine = full(8)
        handle = fogdist.win_put_nonblocking(mine, "w", 0.5, {right: 1.0}, require_mutex=True)
        fogdist.barrier()
        # Each rank holds the mutex that the others need, so nothing is sent and nothing is scaled.
        assert fogdist.win_poll(handle) is False
        assert mine.eq(8).all()
        assert slot("w", left).eq(2 * left).all()
        fogdist.barrier()
    while not fogdist.win_poll(handle):
        time.sleep(0.001)
    assert mine.eq(4).all()  # the tensor is scaled once the operation is known to be complete
    fogdist.win_wait(handle)
    assert mine.eq(4).all()
    fogdist.barrier()
    assert slot("w", left).eq(8).all()
    fogdist.win_free()


def test_handles(worlds):
    worlds(RANKS).run(window_handles)


def mutexes(folder: str) -> None:
    """Several ranks increment a count in a file that only the mutex protects."""
    fogdist.init(topologies.FullyConnectedGraph)
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.win_create(full(0), "w")
    path = os.path.join(folder, "count")
    if rank == 0:
        with open(path, "w") as file:
            file.write("0")
    fogdist.barrier()
    if rank < 2:
        # Both ranks take the mutex that rank 1 owns with rank 0.
        how = {"ranks": [1]} if rank == 0 else {"for_self": True, "ranks": [0]}
        for _ in range(200):
            with fogdist.win_mutex("w", **how):
                with open(path) as file:
                    count = int(file.read())
                with open(path, "w") as file:
                    file.write(str(count + 1))
    fogdist.barrier()
    with open(path) as file:
        assert file.read() == "400"
    fogdist.set_topology(topologies.FullyConnectedGraph(size))
    fogdist.win_free()

    fogdist.set_topology(right_ring(size))
    left, right = before(), after()
    window = fogdist.Window(full(rank), zero_init=True)
    with window.mutex(for_self=True):  # of the in-neighbors, which write to this rank
        fogdist.barrier()
        handle = window.put_nonblocking(full(1), require_mutex=True)
        fogdist.barrier()
        assert window.version(left) == 0
        fogdist.barrier()
    fogdist.wait(handle)
    with window.mutex([right]), window.mutex():  # of the out-neighbor, which the thread may take again
        window.put(full(2), require_mutex=True)
    fogdist.barrier()
    assert window.version(left) == 2
    for i in range(20):
        with window.mutex(for_self=True):
            fogdist.barrier()
            handles = [window.put_nonblocking(full(each), require_mutex=True) for each in (1, 2)]
            fogdist.barrier()
        with window.mutex():  # the operations that wait for it need not wait for the end of this block
            window.put(full(3), require_mutex=i % 2 == 0)
        for handle in handles:
            fogdist.wait(handle)
        fogdist.barrier()
        received = window.update(self_weight=0.0, neighbor_weights={left: 1.0}, clone=True)
        assert received.eq(3).all()  # the puts arrived in order
        fogdist.barrier()
    window.put(full(2))
    window.put(full(2))
    fogdist.barrier()
    with pytest.raises(KeyError), window.mutex():
        raise KeyError
    with window.lock():
        assert window.version(left) == 2
    fogdist.barrier()
    with window.lock():
        window.free()  # frees the mutexes too


def test_mutexes(worlds, tmp_path):
    worlds(RANKS).run(mutexes, str(tmp_path))


# --- the object ---------------------------------------------------------------------------------------------


def objects() -> None:
    fogdist.init(irregular)
    rank = fogdist.rank()
    sources, destinations = fogdist.in_neighbor_ranks(), fogdist.out_neighbor_ranks()
    x = full(rank)
    with Checks() as checks:
        with fogdist.Window(x, zero_init=True) as window:
            checks.equal(
                "name", (window.name, fogdist.get_current_created_window_names()), ("window 0", ["window 0"])
            )
            checks.true("tensor", window.tensor is x)
            checks.equal("in", window.in_neighbors, sorted(sources))
            checks.equal("out", window.out_neighbors, sorted(destinations))
            checks.true("repr", "open" in repr(window))
            window.put(x, dst_weights={d: d + 1.0 for d in destinations}, with_p=True)
            fogdist.barrier()
            result = window.update(
                self_weight=1.0,
                neighbor_weights={s: 1.0 for s in sources},
                reset=True,
                clone=True,
                with_p=True,
            )
            checks.equal("put", result, full(rank + sum(s * (rank + 1) for s in sources)))
            checks.equal("p", window.p, 1.0 + len(sources) * (rank + 1))
            window.p = 0.5
            fogdist.barrier()
            window.accumulate(x, self_weight=0.5)
            fogdist.barrier()
            checks.true("collect", window.collect() is x)
            checks.equal("collected", x, full(0.5 * rank + sum(sources)))
            checks.equal("without p", window.p, 0.5)
            fogdist.barrier()
            window.get(src_weights=sources)
            checks.equal("versions", [window.version(s) for s in sources], [1] * len(sources))
            fogdist.wait(window.get_nonblocking())
            fogdist.wait(window.accumulate_nonblocking(x))
            with pytest.raises(ValueError, match="rank"):
                window.version(rank)
            with pytest.raises(ValueError, match="p must be finite"):
                window.p = math.inf
            with fogdist.Window(full(1)) as second, fogdist.Window(full(2), name="named") as third:
                checks.equal("names", (second.name, third.name), ("window 1", "named"))
                with pytest.raises(
                    ValueError, match="name must not be that of an open window of the group, got 'named'"
                ):
                    fogdist.Window(full(1), name="named")
                checks.equal("by name", fogdist.win_update("window 1", 1.0, {}, clone=True), full(1))
            fogdist.barrier()
        checks.equal("all freed", fogdist.get_current_created_window_names(), [])
        checks.true("repr of a closed one", "was freed" in repr(window))
        for call in (
            lambda: window.put(x),
            window.get,
            window.update,
            lambda: window.p,
            window.mutex().__enter__,
        ):
            with pytest.raises(RuntimeError, match="window 'window 0' was freed"):
                call()
        window.free()
        with pytest.raises(ZeroDivisionError), fogdist.Window(full(1)) as failed:
            if rank == 1:
                1 / 0  # noqa: B018
            failed.abandon("was left")
            raise ZeroDivisionError
        checks.equal("none of it stays", fogdist.get_current_created_window_names(), [])
        with pytest.raises(RuntimeError, match="was closed by a ZeroDivisionError|was left"):
            failed.get()
        fogdist.barrier()
        fogdist.Window(full(1)).free()


def test_window_objects(worlds):
    worlds(RANKS).run(objects)


def parameters() -> None:
    """Windows on a model's parameters: the parameters stay the same objects, and training continues in the window."""
    fogdist.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    known = list(model.parameters())
    before_values = [parameter.detach().clone() for parameter in known]
    windows = [fogdist.Window(parameter, name=name) for name, parameter in model.named_parameters()]
    assert all(a is b for a, b in zip(known, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(known, before_values, strict=True))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3) * fogdist.rank()).sum().backward()
        optimizer.step()
        for window in windows:
            window.put(window.tensor)
        fogdist.barrier()
        for window, parameter in zip(windows, known, strict=True):
            inputs = [torch.empty_like(parameter) for _ in range(fogdist.size())]
            dist.all_gather(inputs, parameter.detach())
            fogdist.barrier()
            graph = fogdist.load_topology()
            sources = [inputs[s] for s in graph.predecessors(fogdist.rank()) if s != fogdist.rank()]
            mean = sum(t.double() for t in [*sources, inputs[fogdist.rank()]]) / (len(sources) + 1)
            assert window.update() is parameter
            assert torch.allclose(parameter.double(), mean, rtol=1e-6, atol=1e-7)
        fogdist.barrier()
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in known)
    for window in windows:
        window.free()


def test_windows_on_parameters(worlds):
    worlds(RANKS).run(parameters)


# --- groups and topologies ----------------------------------------------------------------------------------


def frozen_topology() -> None:
    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    handler = Lines()
    logging.getLogger("fogdist").addHandler(handler)
    fogdist.init(right_ring)
    size = fogdist.size()
    everybody = dist.new_group(backend="fog")
    fogdist.win_create(full(0), "w")
    with Checks() as checks:
        checks.equal("refused", fogdist.set_topology(topologies.StarGraph(size)), False)
        checks.true("said why", len(lines) == 1 and "'w'" in lines[0])
        same = topologies.IsTopologyEquivalent
        checks.true("as it was", same(fogdist.load_topology(), right_ring(size)))
        checks.equal("the same one", fogdist.set_topology(right_ring(size)), True)
        checks.equal("with weights", fogdist.set_topology(right_ring(size), is_weighted=True), False)
        checks.equal(
            "of another group", fogdist.set_topology(topologies.StarGraph(size), group=everybody), True
        )
        fogdist.init()
        checks.true("init keeps it", same(fogdist.load_topology(), right_ring(size)))
        checks.true(
            "of this group only",
            same(fogdist.load_topology(group=everybody), topologies.ExponentialGraph(size)),
        )
        checks.equal("and the window", fogdist.get_current_created_window_names(), ["w"])
        fogdist.win_put(full(3), "w")
        fogdist.barrier()
        checks.equal("which works", slot("w", before()), full(3))
        fogdist.win_create(full(0), "w", group=everybody)
        checks.equal(
            "refused there", fogdist.set_topology(topologies.StarGraph(size), group=everybody), False
        )
        fogdist.win_free(group=everybody)
        checks.equal("free there", fogdist.set_topology(topologies.StarGraph(size), group=everybody), True)
        fogdist.win_free()
        checks.equal("free", fogdist.set_topology(topologies.StarGraph(size)), True)
        fogdist.init()
        checks.true("reset", same(fogdist.load_topology(), topologies.ExponentialGraph(size)))
    logging.getLogger("fogdist").removeHandler(handler)
    dist.destroy_process_group(everybody)


def test_windows_freeze_the_topology(worlds):
    worlds(RANKS).run(frozen_topology)


def windows_of_groups() -> None:
    fogdist.init(right_ring)
    members = [3, 1, 2]  # the ranks of the group have other numbers than in the world
    group = dist.new_group(members, backend="fog")
    fogdist.win_create(full(dist.get_rank()), "w", zero_init=True)
    if dist.get_rank() in members:
        fogdist.set_topology(right_ring(3), group=group)
        rank = fogdist.rank(group=group)
        left, right = (rank - 1) % 3, (rank + 1) % 3
        x = full(10 * rank)
        assert fogdist.win_create(x, "w", zero_init=True, group=group)
        fogdist.win_put(x, "w", dst_weights={right: 0.5}, group=group)
        fogdist.barrier(group=group)
        assert fogdist.get_win_version("w", group=group) == {left: 1}
        assert torch.equal(fogdist.win_update("w", 1.0, {left: 1.0}, group=group), full(10 * rank + 5 * left))
        fogdist.barrier(group=group)
        for mutex in (fogdist.win_mutex("w", group=group), fogdist.win_lock("w", group=group)):
            with mutex:
                pass
        assert fogdist.get_current_created_window_names(group=group) == ["w"]
    fogdist.barrier()
    assert torch.equal(slot("w", before()), full(0))  # the world's window is another one
    if dist.get_rank() in members:
        fogdist.win_free("w", group=group)
        kept = fogdist.Window(full(1), group)
        dist.destroy_process_group(group)
        with pytest.raises(dist.DistBackendError, match="destroyed"):
            kept.put(full(2))
        with pytest.raises(RuntimeError, match="destroyed"):
            fogdist.win_free(group=group)
        kept.free()
    fogdist.win_free()


def test_windows_of_any_group(worlds):
    worlds(RANKS).run(windows_of_groups)


def alone() -> None:
    fogdist.init()
    x = full(3)
    fogdist.win_create(x, "w")
    fogdist.win_put(x, "w", 0.5)
    fogdist.win_accumulate(x, "w")
    fogdist.win_get("w")
    with fogdist.win_mutex("w"), fogdist.win_lock("w"):
        assert fogdist.win_update_then_collect("w").eq(1.5).all()
    assert fogdist.win_update("w").eq(1.5).all()
    assert fogdist.get_win_version("w") == {}
    fogdist.win_free()


def test_a_group_of_one(worlds):
    worlds(1).run(alone)


# --- push-sum -----------------------------------------------------------------------------------------------


def mass(seconds: float, numel: int, dtype: torch.dtype, seed: int) -> tuple[float, float, float]:
    """Ranks accumulate at random times, with shares that sum to one; returns the final values of this rank."""
    fogdist.init(irregular)
    rank = fogdist.rank()
    chance = random.Random(seed + rank)
    x = torch.full((numel,), float(rank + 1), dtype=dtype)
    fogdist.win_create(x, "w", zero_init=True)
    fogdist.turn_on_win_ops_with_associated_p()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        shares = [chance.random() for _ in range(1 + len(fogdist.out_neighbor_ranks()))]
        own, *others = (share / sum(shares) for share in shares)
        weights = dict(zip(fogdist.out_neighbor_ranks(), others, strict=True))
        fogdist.win_accumulate(x, "w", own, weights, require_mutex=chance.random() < 0.3)
        if chance.random() < 0.5:
            fogdist.win_update_then_collect("w", require_mutex=chance.random() < 0.3)
        if chance.random() < 0.2:
            time.sleep(chance.random() * 1e-3)
    fogdist.barrier()
    fogdist.win_update_then_collect("w")
    fogdist.turn_off_win_ops_with_associated_p()
    p = fogdist.win_associated_p("w")
    fogdist.barrier()
    fogdist.win_free()
    return x.double().min().item(), x.double().max().item(), p


@pytest.mark.parametrize("dtype, accuracy", [(torch.float64, 1e-11), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("numel", [1, 3000])
def test_mass_is_conserved(worlds, dtype, accuracy, numel):
    results = worlds(RANKS).run(mass, 0.5, numel, dtype, numel)
    assert math.fsum(p for _, _, p in results) == pytest.approx(RANKS, rel=1e-11)
    for place in (0, 1):  # all elements of a tensor are equal, so the sum of each must be conserved
        total = math.fsum(result[place] for result in results)
        assert total == pytest.approx(sum(range(1, RANKS + 1)), rel=accuracy)


def push_sum(slow: int, pause: float) -> tuple[int, float, float]:
    """Asynchronous average consensus: each rank has its own speed, until the slowest has done its 100 rounds."""
    fogdist.init(irregular)
    rank = fogdist.rank()
    destinations = fogdist.out_neighbor_ranks()
    share = 1.0 / (len(destinations) + 1)
    x = torch.full((100,), float(rank), dtype=torch.float64)
    fogdist.turn_on_win_ops_with_associated_p()
    fogdist.win_create(x, "w", zero_init=True)
    rounds, done = 0, None
    while done is None or not fogdist.poll(done):
        fogdist.win_accumulate(x, "w", share, {destination: share for destination in destinations})
        time.sleep(pause * (10 if rank == slow else 1))
        fogdist.win_update_then_collect("w", require_mutex=False)
        rounds += 1
        if rounds == 100:
            done = fogdist.allreduce_nonblocking(torch.ones(1))
    fogdist.wait(done)
    fogdist.barrier()
    fogdist.win_update_then_collect("w")
    estimate = x / fogdist.win_associated_p("w")
    fogdist.turn_off_win_ops_with_associated_p()
    fogdist.barrier()
    fogdist.win_free()
    return rounds, estimate.min().item(), estimate.max().item()


@pytest.mark.parametrize("slow", [0, 3])
def test_push_sum_reaches_the_average_whatever_the_speeds(worlds, slow):
    results = worlds(RANKS).run(push_sum, slow, 2e-4)
    for rounds, least, most in results:
        assert rounds >= 100
        assert least == pytest.approx((RANKS - 1) / 2, abs=1e-12)
        assert most == pytest.approx((RANKS - 1) / 2, abs=1e-12)


# The snippet of BlueFog 0.1's README, with that version's names and arguments; only its imports are replaced.
SNIPPET = """
import bluefog.torch as bf
from bluefog.common import topology_util

bf.init()

# Setup the topology for communication
bf.set_topology(topology_util.PowerTwoRingGraph(bf.size()))
outdegree = len(bf.out_neighbor_ranks())
indegree = len(bf.in_neighbor_ranks())

# Create the buffer for neighbors.
x = torch.Tensor([bf.rank(), 1.0])
bf.win_create(x, name="x_buff", zero_init=True)

for _ in range(100):
   bf.win_accumulate(
      x, name="x_buff",
      dst_weights={rank: 1.0 / (outdegree + 1)
                   for rank in bf.out_neighbor_ranks()},
      require_mutex=True)
   x.div_(1+outdegree)
   bf.win_sync_then_collect(name="x_buff")

bf.barrier()
# Do not forget to sync at last!
bf.win_sync_then_collect(name="x_buff")
print(f"{bf.rank()}: Average value of all ranks is {x[0]/x[-1]}")
"""
IMPORTS = {
    "import bluefog.torch as bf": "import fogdist as bf",
    "from bluefog.common import topology_util": "from fogdist import topology as topology_util",
}


def until_all_have(rounds: int) -> Iterator[None]:
    """Yields until all ranks have done at least `rounds` rounds."""
    for _ in range(rounds):
        yield
    done = fogdist.allreduce_nonblocking(torch.ones(1))
    while not fogdist.poll(done):
        yield
    fogdist.wait(done)


def snippet(loop: str, slow: int, pause: float) -> tuple[float, float]:
    """Runs the snippet with another loop, and one rank slowed down tenfold.

    Returns:
        This rank's estimate of the average, and the average over all ranks together.
    """
    warnings.simplefilter("ignore", DeprecationWarning)
    text = SNIPPET.replace("range(100)", loop)
    for theirs, ours in IMPORTS.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    names: dict[str, Any] = {"torch": torch, "until_all_have": until_all_have}
    accumulate = fogdist.win_accumulate

    def slowed(*arguments: Any, **options: Any) -> bool:
        time.sleep(pause * (10 if fogdist.rank() == slow else 1))
        return accumulate(*arguments, **options)

    with mock.patch.object(fogdist, "win_accumulate", slowed):
        exec(text, names)
    x = names["x"]
    together = fogdist.allreduce(x.double(), average=False)
    fogdist.win_free()
    return (x[0] / x[-1]).item(), (together[0] / together[-1]).item()


@pytest.mark.parametrize("size", sizes([2, 4], [8]))
@pytest.mark.parametrize("loop", ["range(100)", "until_all_have(100)"], ids=["as written", "until all have"])
def test_the_snippet_of_bluefog(worlds, loop, size):
    """The snippet as published conserves the sums exactly; at uneven speeds it cannot do more.

    A rank that has done its 100 rounds sends nothing any more, and accumulate does not wait. So a rank that is ten
    times slower does its last 90 rounds alone, and gives away all but (1/(outdegree+1))**90 of its mass. With an
    outdegree of 3 this is 0 in float32, and its estimate is 0/0. With an outdegree of 1 its estimate stays as it was
    after the tenth round. If all ranks go on until the slowest has done its rounds, every rank ends at the average.
    """
    results = worlds(size).run(snippet, loop, 1, 2e-4)
    average = (size - 1) / 2
    for estimate, together in results:
        assert together == pytest.approx(average, rel=1e-4)
        if loop != "range(100)":
            assert estimate == pytest.approx(average, rel=1e-4)


# --- the end ------------------------------------------------------------------------------------------------


def end_in_any_order(how: str) -> None:
    fogdist.init()
    windows = [fogdist.Window(full(number)) for number in range(3)]
    everyone = dict.fromkeys(fogdist.out_neighbor_ranks(), 1.0)
    # The put into the second window waits for a mutex, the others are complete.
    with windows[1].lock():
        fogdist.barrier()
        handles = [
            window.put_nonblocking(full(1), dst_weights=everyone, require_mutex=True) for window in windows
        ]
        fogdist.barrier()
    if how == "free":
        for window in windows:
            window.free()
        assert all(fogdist.win_wait(handle) for handle in handles)
        fogdist.shutdown()
    elif how == "shutdown":
        fogdist.shutdown()
        for window in windows:
            with pytest.raises(RuntimeError, match="ended when fogdist was shut down"):
                window.put(full(1))
            window.free()
        with pytest.raises(RuntimeError, match="shut down"):
            fogdist.win_free()
    elif how == "destroy":
        dist.destroy_process_group()
        for window in windows:
            with pytest.raises(RuntimeError):
                window.put(full(1))
            window.free()
        fogdist.shutdown()
        return
    elif how == "some free":
        windows[1].free()
        fogdist.shutdown()
    assert windows[0].tensor.shape == (2, 3)


@pytest.mark.parametrize("how", ["free", "shutdown", "some free", "destroy", "exit"])
def test_the_end_in_any_order(new_world, how):
    new_world(3, finalizing=None).run(end_in_any_order, how)


def shut_down_and_start_again() -> None:
    for number in range(3):
        fogdist.init()
        fogdist.win_create(full(number), "w", zero_init=True)  # the previous window of this name is gone
        fogdist.win_put(full(number), "w")
        fogdist.barrier()
        assert all(slot("w", rank).eq(number).all() for rank in fogdist.in_neighbor_ranks())
        fogdist.barrier()
        fogdist.shutdown()


def test_windows_end_with_the_session(worlds):
    worlds(3).run(shut_down_and_start_again)


def lose_a_neighbor() -> None:
    fogdist.init(topologies.FullyConnectedGraph)
    rank = fogdist.rank()
    x = full(rank)
    fogdist.win_create(x, "w", zero_init=True)
    fogdist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while True:
        try:
            fogdist.win_put(x, "w", self_weight=0.5)
        except dist.DistBackendError as error:
            assert "'w'" in str(error) and "rank 1" in str(error)
            break
        x.fill_(rank)  # the loss is not known yet, so the put has scaled the tensor
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert x.eq(rank).all()  # the failed put has not scaled it
    handle = fogdist.win_put_nonblocking(x, "w")
    while not fogdist.win_poll(handle):
        time.sleep(0.001)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        fogdist.win_wait(handle)
    other = 2 - rank
    assert fogdist.win_put(x, "w", skip_lost=True)
    assert fogdist.win_accumulate(x, "w", skip_lost=True)
    assert fogdist.win_get("w", skip_lost=True)
    while not slot("w", other).eq(10 + other).all():
        assert fogdist.win_put(full(10 + rank), "w", dst_weights=[other])
        assert time.monotonic() < deadline
        time.sleep(0.001)
    fogdist.win_put(
        full(10 + rank), "w", dst_weights=[other]
    )  # the other rank's win_get, which would replace this value, is done by now
    fogdist.win_update("w", 1.0, {1: 1.0, other: 1.0})
    fogdist.win_free()


def test_a_lost_neighbor(new_world):
    world = new_world(3, finalizing=None)
    outcomes = world.run_raw(lose_a_neighbor)
    assert [outcome.state for outcome in outcomes] == ["returned", "died", "returned"], "\n".join(
        map(str, outcomes)
    )


# --- older names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", legacy.RENAMED)
def test_an_older_name_warns_and_says_the_new_one(old):
    new, adapter = legacy.RENAMED[old]
    modules = [module for module in (fogdist, topologies) if new in module.__all__]
    assert modules and old not in fogdist.__all__
    for module in modules:
        with pytest.warns(
            DeprecationWarning, match=rf"{module.__name__}\.{old} is now called .*\.{new};"
        ) as record:
            found = getattr(module, old)
        assert record[0].filename == __file__
        assert callable(found) and (adapter is not None or found is getattr(module, new))


def test_names_that_never_were():
    for module in (fogdist, topologies):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'win_fence'"):
            module.win_fence  # noqa: B018
    with pytest.raises(AttributeError):  # operations are not topologies
        topologies.win_sync  # noqa: B018


def older_names() -> None:
    """Uses the older names as their scripts did, with arguments by position."""
    warnings.simplefilter("ignore", DeprecationWarning)
    fogdist.init(topologies.PowerTwoRingGraph)
    fogdist.set_topology(right_ring(fogdist.size()))
    rank, left, right = fogdist.rank(), before(), after()
    with Checks() as checks:
        fogdist.win_create(full(rank), "w", True)
        checks.equal(
            "put", fogdist.win_wait(fogdist.win_put_async(full(rank), "w", {right: 2.0}, True)), True
        )
        fogdist.win_wait(fogdist.win_accumulate_async(full(1), "w", {right: 1.0}))
        fogdist.barrier()
        checks.equal(
            "win_sync", fogdist.win_sync("w", 1.0, {left: 1.0}, False, True), full(rank + 2 * left + 1)
        )
        checks.equal("default", fogdist.win_sync("w", clone=True), full((rank + 2 * left + 1) / 2))
        checks.equal("reset", fogdist.win_sync("w", 0.0, {left: 1.0}, True, True), full(2 * left + 1))
        checks.equal("then collect", fogdist.win_sync_then_collect("w"), full(rank))
        fogdist.barrier()
        fogdist.win_wait(fogdist.win_get_async("w", {left: 1.0}))
        checks.equal("get", slot("w", left), full(left))
        fogdist.barrier()
        fogdist.win_free("w")
        mean = full((fogdist.size() - 1) / 2)
        checks.equal("allreduce", fogdist.synchronize(fogdist.allreduce_async(full(rank), True, "a")), mean)
        fogdist.synchronize(fogdist.allreduce_async_(x := full(rank), True, "a"))
        checks.equal("allreduce_", x, mean)
        checks.equal("broadcast", fogdist.synchronize(fogdist.broadcast_async(full(rank), 1, "b")), full(1))
        fogdist.synchronize(fogdist.broadcast_async_(x := full(rank), 2, "b"))
        checks.equal("broadcast_", x, full(2))
        gathered = fogdist.synchronize(fogdist.allgather_async(full(rank), "c"))
        checks.equal("allgather", gathered, torch.cat([full(r) for r in range(fogdist.size())]))
        checks.equal(
            "gather", fogdist.synchronize(fogdist.neighbor_allgather_async(full(rank), "d")), full(left)
        )
        handle = fogdist.neighbor_allreduce_async(full(rank), 0.5, {left: 0.25}, "e")
        checks.equal("neighbor_allreduce", fogdist.synchronize(handle), full(0.5 * rank + 0.25 * left))


def test_older_names_work_as_they_did(worlds):
    worlds(RANKS).run(older_names)
