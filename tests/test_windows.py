"""Tests of one-sided windows: what slots hold, by every interface and way, and the forms of the calls.

test_window_guarantees.py tests ranks that race, hold mutexes, are busy, end or die.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import time
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import networkx as nx
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from fogdist.bluefog.common import topology_util
from fogdist.bluefog.deprecation import RENAMED
from harness import error_of, on_ranks
from reference import COMPLEX, FLOATS, INTEGERS, Checks, make_input, wide
from torch import Tensor
from window_interfaces import (
    INTERFACES,
    LIMIT,
    SHORT,
    SIZE,
    WAYS,
    AnyWindow,
    WorldsByWay,
    backend,
    create,
    full,
    others,
    right_ring,
    slot,
)

# Sizes around the limits at which another algorithm is used, in float64 elements.
NUMELS = [0, 1, 1000, 4096, 4097, 300_001]


def irregular(size: int) -> nx.DiGraph:
    """Returns a directed graph of 3 ranks in which rank 0 has two out-neighbors and rank 2 two in-neighbors."""
    assert size == 3
    return nx.DiGraph([(0, 1), (0, 2), (1, 2), (2, 0)])


def before() -> int:
    return (dist.get_rank() - 1) % dist.get_world_size()


def after() -> int:
    return (dist.get_rank() + 1) % dist.get_world_size()


# --- contents of windows ------------------------------------------------------------------------------------


def operations(interface: str) -> None:
    """Each rank sends its number; all values are small integers, so sums are exact."""
    with Checks() as checks:
        for numel in NUMELS[INTERFACES.index(interface) :: len(INTERFACES)]:
            operations_on(interface, numel, checks)


def operations_on(interface: str, numel: int, checks: Checks) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = full(rank, numel)
    window = AnyWindow(interface, mine)

    def slots(label: str, expected: Callable[[int], float], versions: int = 0) -> None:
        """Checks the slots and their versions, between two barriers."""
        dist.barrier()
        found = [window.version(other) for other in others()]
        checks.equal(f"{interface} {numel} {label}: versions", found, [versions] * (size - 1))
        for other in others():
            what = f"{interface} {numel} {label}: slot {other}"
            checks.equal(what, window.slot(other), full(expected(other), numel))
            checks.equal(f"{what} has a new version", window.version(other), 0)
        dist.barrier()

    slots("at first", lambda other: 0)
    window.put(mine, {other: 10.0 + other for other in others()})
    slots("a put", lambda other: other * (10 + rank), versions=1)
    slots("what was read stays", lambda other: other * (10 + rank))
    window.accumulate(mine)
    window.accumulate(full(100, numel))
    slots("accumulate after put", lambda other: other * (11 + rank) + 100)
    window.put(full(7, numel))
    slots("put after accumulate", lambda other: 7, versions=1)
    taken = window.update(2.0, reset=True, clone=True)
    checks.equal("a clone", taken, full(2 * rank + 7 * (size - 1), numel))
    checks.true("leaves the tensor", taken is not mine and torch.equal(mine, full(rank, numel)))
    slots("taken", lambda other: 0)
    window.accumulate(mine)
    slots("accumulate into a slot that was taken", lambda other: other)
    window.get({other: 3.0 for other in others()})
    slots("get", lambda other: 3 * other, versions=1)
    window.accumulate(full(1, numel))
    slots("accumulate after get", lambda other: 3 * other + 1)
    window.put(full(math.nan, numel), {others()[0]: 0.0})
    dist.barrier()
    # rank 0 writes to rank 1, and all others to rank 0
    for other in others():
        zeroed = rank == (1 if other == 0 else 0)
        expected = full(0 if zeroed else 3 * other + 1, numel)
        checks.equal("a weight of 0 sends zeros", window.slot(other), expected)
    mine.fill_(math.nan)
    result = window.update(0.0, dict.fromkeys(others(), 0.5))
    checks.true("in place", result is mine and window.tensor is mine)
    checks.true("whatever it was", not result.isnan().any().item())
    dist.barrier()
    window.free()


def copies_at_first(interface: str) -> None:
    rank = dist.get_rank()
    window = AnyWindow(interface, full(rank), zero_init=False)
    assert all(window.slot(other).eq(rank).all() for other in others())
    dist.barrier()
    window.accumulate(full(0.5))
    dist.barrier()
    assert all(window.slot(other).eq(rank + 0.5).all() for other in others())
    dist.barrier()
    window.free()


def every_dtype() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [(other, 1.0) for other in others()]
    with Checks() as checks:
        for dtype in INTEGERS + FLOATS + COMPLEX:
            inputs = [make_input(r, dtype, (1037,)) for r in range(size)]
            window = create(inputs[rank].clone(), zero_init=True)
            window.put(inputs[rank], everyone).wait()
            window.accumulate(inputs[rank], everyone).wait()

            def times(weight: int, other: int) -> Tensor:
                if dtype in INTEGERS:  # torch has no arithmetic for unsigned integers
                    return torch.from_numpy(inputs[other].numpy() * weight)
                return (wide(inputs[other]) * weight).to(dtype)  # exact before it is rounded

            dist.barrier()
            for other in others():
                checks.equal(f"{dtype} sum", slot(window, other), times(2, other))
            dist.barrier()
            window.put(inputs[rank], [(other, 3.0) for other in others()]).wait()
            dist.barrier()
            for other in others():
                checks.equal(f"{dtype} whole weight", slot(window, other), times(3, other))
            dist.barrier()
            window.free()
        small = torch.tensor([-7, -5, -2, 0, 1, 2, 3, 5], dtype=torch.int32)
        least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
        window = create(small.clone(), zero_init=True)
        for weight, expected in [
            (0.5, [-4, -2, -1, 0, 0, 1, 2, 2]),  # halves are rounded to even
            (1e30, [least, least, least, 0, most, most, most, most]),
        ]:
            window.put(small, [(other, weight) for other in others()]).wait()
            dist.barrier()
            for other in others():
                checks.equal(f"integers by {weight}", slot(window, other).tolist(), expected)
            dist.barrier()
        window.free()


def p_goes_with_the_value(interface: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    window = AnyWindow(interface, full(0))
    assert window.p == 1.0
    window.p = 2.0 + rank
    for weight in (0.25, 0.5):
        window.accumulate(full(1), dict.fromkeys(others(), weight), p=True)
    window.accumulate(full(1))
    dist.barrier()
    window.update(0.5, dict.fromkeys(others(), 2.0), reset=True, p=True)
    found = window.p
    assert found == 0.5 * (2 + rank) + sum(2 * 0.75 * (2 + other) for other in others())
    dist.barrier()
    window.update(1.0, reset=True, p=True)
    assert window.p == found  # the slots were taken before
    window.p = 1.0
    dist.barrier()
    window.put(full(1), dict.fromkeys(others(), 0.5), p=True)
    window.put(full(1))  # leaves p unchanged
    dist.barrier()
    window.get()  # leaves p unchanged too
    window.update(1.0, reset=True)  # leaves p unchanged too
    assert window.p == 1.0
    window.update(1.0, reset=True, p=True)
    assert window.p == 1.0 + 0.5 * (size - 1)
    dist.barrier()
    window.free()


def the_share_that_the_sender_keeps(interface: str) -> None:
    """When an operation is complete, the tensor and p hold the share that `keep` gives."""
    mine = full(8, 20_000)
    window = AnyWindow(interface, mine)
    with Checks() as checks:
        started = window.write("accumulate", mine, keep=0.5, p=True)
        end = time.monotonic() + LIMIT
        while not started.done():
            assert time.monotonic() < end
            time.sleep(0.0001)
        checks.equal("by the time it is complete", mine, full(4, 20_000))
        checks.equal("and p", window.p, 0.5)
        started.wait()
        checks.equal("once", (mine[0].item(), window.p), (4.0, 0.5))
        dist.barrier()
        for other in others():
            checks.equal("it was sent before", window.slot(other), full(8, 20_000))
        table = full(1, 40_000).cumsum(0).view(20_000, 2)
        column, expected = table[:, 1], table.clone()
        expected[:, 1] *= 0.25
        dist.barrier()
        window.put(column, keep=0.25)
        checks.equal("of a column", table, expected)
        checks.equal("p is not sent", window.p, 0.5)
        dist.barrier()
        for other in others():
            checks.equal("a column", window.slot(other), expected[:, 1] * 4)
        dist.barrier()
        given = full(8, 20_000)
        with window.hold(others(), own=True):
            dist.barrier()
            if interface != "name":
                failed = error_of(lambda: window.put(given, keep=0.5, mutex=True, p=True, timeout=SHORT))
                checks.true("a put that fails", "timed out" in failed)
            started = window.write("put", given, keep=0.5, mutex=True, p=True)
            checks.true("waits for the mutex", not started.done())
            checks.equal("nothing is kept of it before", (given[0].item(), window.p), (8.0, 0.5))
            dist.barrier()
        started.wait()
        checks.equal("then", given, full(4, 20_000))
        checks.equal("and p then", window.p, 0.25)
        window.put(given, keep=0.0)
        checks.equal("nothing kept", given, full(0, 20_000))
        with pytest.raises(ValueError, match="self_weight.* (got|finite)"):
            window.put(given, keep=math.nan)
        with pytest.raises(ValueError, match="share memory|expanded"):
            window.put(full(1, 1).expand(20_000), keep=0.5)
        dist.barrier()
        window.free()


def parameters(interface: str) -> None:
    """A parameter stays that parameter, and training goes on in the window."""
    layer = torch.nn.Linear(3, 2)
    weight = layer.weight
    view, at_first = weight.detach()[1:], weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    window = AnyWindow(interface, weight)
    assert layer.weight is weight and weight.requires_grad and weight.is_leaf
    assert torch.equal(weight, at_first)
    dist.barrier()
    window.put(torch.ones_like(weight))
    dist.barrier()
    assert window.update(0.0) is weight
    assert view.eq(len(others())).all()
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert weight.eq(len(others()) - 1).all()
    dist.barrier()
    window.get()
    assert window.slot(others()[0]).eq(len(others()) - 1).all()
    weight.data = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="has other memory than when the window was made"):
        window.update(1.0)
    dist.barrier()
    window.free()


def disagreements() -> None:
    rank, group = dist.get_rank(), backend()
    every, without = others(), [other for other in others() if {rank, other} != {0, 1}]
    dtype = torch.int64 if rank else torch.float32
    fewer_in, fewer_out = without if rank == 1 else every, without if rank == 0 else every
    for tensor, name, into, out, message in [
        (full(1), f"a{rank}", every, every, "disagree on the name .* rank 0 has 'a0', rank 1 has 'a1'"),
        (full(1, rank + 1), "a", every, every, r"rank 0 has float64\[1\], rank 1 has float64\[2\]"),
        (full(1, dtype=dtype), "a", every, every, r"rank 0 has float32\[5\], rank 1 has int64\[5\]"),
        (full(1), "a", fewer_in, every, "rank 1 is among the out_neighbors of rank 0"),
        (full(1), "a", every, fewer_out, "rank 1 is not among the out_neighbors of rank 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            group.create_window(tensor, name, into, out)
    create(full(1), "a").free()  # nothing of the refused windows is left
    dist.all_reduce(torch.ones(3))


def transports() -> None:
    """A window says how it reaches each neighbor, which hosts and environment decide."""
    between = "rma" if os.environ.get("FOG_BETWEEN_HOSTS") == "rma" else "messages"
    hosts, linked = backend().hosts, os.environ.get("_FOG_LOCAL_LINKS") != "0"
    here = {rank: linked and hosts[rank] == hosts[dist.get_rank()] for rank in others()}
    window = create(full(0))
    ways = {rank: "shared memory" if mapped else between for rank, mapped in here.items()}
    assert {rank: window.transport_to(rank) for rank in others()} == ways
    assert window.transport == " and ".join(sorted({*ways.values()}, reverse=True))
    window.free()


def writes_and_signals() -> None:
    """On a ring, each rank writes its part to the next one, and goes on when it has the part of the previous one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = before(), after()
    mine = torch.zeros(size, 10_000, dtype=torch.int64)
    window = create(mine, zero_init=True)
    mine[rank] = rank + 1
    dist.barrier()
    for turn in range(5):
        for step in range(size - 1):
            part = (rank - step) % size
            window.write(mine[part] + turn * (step == 0), right, part * 10_000)
            window.signal(right)
            window.wait_signal(left).wait()
            assert mine[(left - step) % size].eq((left - step) % size + 1 + turn).all()
        mine[rank] = rank + 1
        dist.barrier()
    waiting = window.wait_signal(left)
    assert not waiting.is_completed()
    dist.barrier()
    window.signal(right).wait()
    waiting.wait()
    message = error_of(window.wait_signal(left, timeout=SHORT).wait)
    assert "wait_signal of window 'w'" in message and f"waiting for a signal of rank {left}" in message
    message = r"put: tensor: got int64\[2\] for element .*; window 'w' is int64\[3, 10000\]"
    with pytest.raises(ValueError, match=message):
        window.write(torch.zeros(2, dtype=torch.int64), right, size * 10_000 - 1)
    mapped = window.map_remote(left)
    assert (mapped is not None) == (window.transport_to(left) == "shared memory")
    assert mapped is None or mapped[left].eq(left + 1).all()
    dist.barrier()
    window.free()


CONTENTS = [
    operations,
    copies_at_first,
    every_dtype,
    p_goes_with_the_value,
    the_share_that_the_sender_keeps,
    parameters,
    disagreements,
    transports,
    writes_and_signals,
]


def by_every_interface(promise: Callable[..., None]) -> None:
    """Runs a promise, by every interface if it has such a parameter."""
    for arguments in [[each] for each in INTERFACES] if inspect.signature(promise).parameters else [[]]:
        promise(*arguments)


@pytest.mark.parametrize("promise", CONTENTS, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_contents(world_of: WorldsByWay, way: str, promise: Callable[..., None]) -> None:
    world_of(way).run(by_every_interface, promise)


def scaled(x: Tensor, weight: float) -> Tensor:
    """Returns a copy of `x` after a put with `self_weight`."""
    with fogdist.Window(x.clone()) as window:
        window.put(window.tensor, dst_weights=[], self_weight=weight)
        return window.tensor


@on_ranks(SIZE)
def test_scaling() -> None:
    fogdist.init()
    with Checks() as checks:
        for dtype in FLOATS + COMPLEX:
            for shape in [(), (0,), (3, 5), (40_001,)]:
                x, eps = make_input(0, dtype, shape), torch.finfo(dtype).eps
                close = torch.allclose(wide(scaled(x, 1 / 3)), wide(x) / 3, rtol=eps, atol=0)
                checks.true(f"{dtype} {shape}", close)
        # Weights are float64: the float32 next to 1/3 is off by 1e-8, and many such products would add mass.
        x = make_input(0, torch.float32, 1_000_000).abs()
        exact = x.double().sum().item() / 3
        checks.true("a double", math.isclose(scaled(x, 1 / 3).double().sum().item(), exact, rel_tol=1e-9))
        nothing = torch.tensor([math.nan, math.inf, 1.0])
        checks.equal("zeros of whatever there was", scaled(nothing, 0.0).tolist(), [0.0, 0.0, 0.0])


# --- forms of the calls -------------------------------------------------------------------------------------


@on_ranks(SIZE)
def test_functions() -> None:
    """What only functions that take names have, on a ring to the right."""
    fogdist.init(right_ring)
    rank, left, right = fogdist.rank(), before(), after()
    x = full(rank)
    names, versions = bf.get_current_created_window_names, bf.get_win_version
    collect = bf.win_update_then_collect
    with Checks() as checks:
        checks.equal("created", bf.win_create(x, "w", zero_init=True), True)
        checks.equal("not twice", bf.win_create(full(7), "w"), False)
        checks.equal("names and versions", (names(), versions("w")), (["w"], {left: 0}))
        dist.barrier()
        checks.equal("put", bf.win_put(x, "w"), True)
        bf.neighbor_win_put(full(10 + rank), "w", None, {right: 0.5})
        bf.neighbor_win_accumulate(full(100), "w", dst_weights=[right])
        dist.barrier()
        checks.equal("two puts", versions("w"), {left: 2})
        for _ in range(2):  # the first call leaves zeros
            checks.equal("collected", collect("w"), full(rank + (10 + left) / 2 + 100))
        dist.barrier()
        x.fill_(rank)
        handles = [
            bf.win_put_nonblocking(full(rank), "w"),
            bf.win_accumulate_nonblocking(full(1), "w"),
            bf.win_get_nonblocking("w", {left: 0.0}),
            bf.allreduce_nonblocking(full(rank)),  # windows and collectives share their handles
        ]
        checks.equal("different handles", len({*handles}), 4)
        checks.equal("waited for", [bf.win_wait(each) for each in handles[:2]], [True, True])
        checks.equal("by the other function", bf.wait(handles[2]), True)
        checks.equal("a collective", bf.wait(handles[3]), full((fogdist.size() - 1) / 2))
        dist.barrier()
        bf.turn_on_win_ops_with_associated_p()
        bf.win_accumulate(full(0), "w", 0.25, {right: 0.75})
        bf.turn_off_win_ops_with_associated_p()
        dist.barrier()
        collect("w")
        checks.equal("p stays in its slot", bf.win_associated_p("w"), 0.25)
        bf.turn_on_win_ops_with_associated_p()
        collect("w")
        bf.turn_off_win_ops_with_associated_p()
        checks.equal("and is collected", bf.win_associated_p("w"), 1.0)
        dist.barrier()
        checks.equal("freed", bf.win_free("w"), True)
        checks.equal("freed all of none", (names(), bf.win_free()), ([], True))


@on_ranks(SIZE)
def test_default_weights_of_update() -> None:
    """By default `win_update` uses the topology: the mean of all slots, or the topology's weights."""
    with Checks() as checks:
        for is_weighted in (False, True):
            graph = irregular(SIZE)
            for i, j in graph.edges:
                graph.edges[i, j]["weight"] = 0.1 * (i + 1)
            graph.add_edges_from([(i, i, {"weight": 0.25}) for i in range(SIZE)])
            fogdist.init()
            bf.set_topology(graph, is_weighted)
            rank, sources = fogdist.rank(), fogdist.in_neighbor_ranks()
            x = full(rank)
            bf.win_create(x, "w")
            dist.barrier()
            bf.win_put(full(10 + rank), "w")
            dist.barrier()
            if is_weighted:
                expected = 0.25 * rank + sum(0.1 * (i + 1) * (10 + i) for i in sources)
            else:
                expected = (rank + sum(10 + i for i in sources)) / (len(sources) + 1)
            checks.close(f"weighted={is_weighted}", bf.win_update("w"), full(expected))
            dist.barrier()
            bf.win_free()


@on_ranks(SIZE)
def test_window_objects() -> None:
    """What only objects have: names of their own, blocks, and an end that says why."""
    fogdist.init(irregular)
    rank, names = fogdist.rank(), bf.get_current_created_window_names
    x = full(rank)
    with Checks() as checks:
        with fogdist.Window(x, zero_init=True) as window:
            checks.equal("name", (window.name, names()), ("window 0", ["window 0"]))
            checks.true("tensor and repr", window.tensor is x and "open" in repr(window))
            checks.equal("in", window.in_neighbors, sorted(fogdist.in_neighbor_ranks()))
            checks.equal("out", window.out_neighbors, sorted(fogdist.out_neighbor_ranks()))
            window.accumulate(x, with_p=True)
            dist.barrier()
            checks.true("collect", window.collect() is x)
            checks.equal("collected", x, full(rank + sum(window.in_neighbors)))
            checks.equal("without p", window.p, 1.0)
            window.collect(with_p=True)
            checks.equal("with p", window.p, 1.0 + len(window.in_neighbors))
            with pytest.raises(ValueError, match="rank"):
                window.version(rank)
            with pytest.raises(ValueError, match="p must be finite"):
                window.p = math.inf
            with fogdist.Window(full(1)) as second, fogdist.Window(full(2), name="named") as third:
                checks.equal("names", (second.name, third.name), ("window 1", "named"))
                with pytest.raises(ValueError, match="name must not be that of an open window .* 'named'"):
                    fogdist.Window(full(1), name="named")
                checks.equal("by name", bf.win_update("window 1", 1.0, {}, clone=True), full(1))
            dist.barrier()
        checks.equal("all freed", names(), [])
        checks.true("repr of a closed one", "was freed" in repr(window))
        calls = [lambda: window.put(x), window.get, window.update, lambda: window.p, window.mutex().__enter__]
        for call in calls:
            with pytest.raises(RuntimeError, match="window 'window 0' was freed"):
                call()
        window.free()
        with pytest.raises(ZeroDivisionError), fogdist.Window(full(1)) as failed:
            if rank == 1:
                1 / 0  # noqa: B018
            failed.abandon("was left")
            raise ZeroDivisionError
        checks.equal("none of it stays", names(), [])
        with pytest.raises(RuntimeError, match="was closed by a ZeroDivisionError|was left"):
            failed.get()
        dist.barrier()
        fogdist.Window(full(1)).free()


@on_ranks(SIZE)
def test_windows_freeze_the_topology() -> None:
    fogdist.init(right_ring)
    size = fogdist.size()
    everybody = dist.new_group(backend="fog")
    bf.win_create(full(0), "w")
    with Checks() as checks:
        with pytest.raises(RuntimeError, match="the topology stays .* windows: 'w'; free them first"):
            fogdist.set_topology(topologies.star(size))
        with unittest.TestCase().assertLogs("fogdist") as logs:
            checks.equal("refused", bf.set_topology(topologies.star(size)), False)
        checks.true("said why", len(logs.output) == 1 and "'w'" in logs.output[0])
        same = topologies.is_equivalent
        checks.true("as it was", same(fogdist.load_topology(), right_ring(size)))
        fogdist.set_topology(right_ring(size))
        checks.equal("without weights", bf.set_topology(right_ring(size)), False)
        checks.equal("of another group", bf.set_topology(topologies.star(size), group=everybody), True)
        fogdist.init()
        checks.true("init keeps it", same(fogdist.load_topology(), right_ring(size)))
        checks.true(
            "of this group only",
            same(fogdist.load_topology(group=everybody), topologies.exponential(size)),
        )
        checks.equal("and the window", bf.get_current_created_window_names(), ["w"])
        bf.win_put(full(3), "w")
        dist.barrier()
        checks.equal("which works", bf.win_update("w", 0.0, {before(): 1.0}, clone=True), full(3))
        bf.win_create(full(0), "w", group=everybody)
        checks.equal("refused there", bf.set_topology(topologies.star(size), group=everybody), False)
        bf.win_free(group=everybody)
        checks.equal("free there", bf.set_topology(topologies.star(size), group=everybody), True)
        bf.win_free()
        checks.equal("free", bf.set_topology(topologies.star(size)), True)
        fogdist.init()
        checks.true("reset", same(fogdist.load_topology(), topologies.exponential(size)))
    dist.destroy_process_group(everybody)


@on_ranks(SIZE)
def test_windows_of_any_group() -> None:
    fogdist.init(right_ring)
    members = [2, 0]  # the ranks of the group have other numbers than in the world
    group = dist.new_group(members, backend="fog")
    bf.win_create(full(dist.get_rank()), "w", zero_init=True)
    if dist.get_rank() in members:
        fogdist.set_topology(right_ring(2), group=group)
        rank = fogdist.rank(group=group)
        left = right = 1 - rank
        x = full(10 * rank)
        assert bf.win_create(x, "w", zero_init=True, group=group)
        bf.win_put(x, "w", dst_weights={right: 0.5}, group=group)
        dist.barrier(group)
        assert bf.get_win_version("w", group=group) == {left: 1}
        assert torch.equal(bf.win_update("w", 1.0, {left: 1.0}, group=group), full(10 * rank + 5 * left))
        dist.barrier(group)
        for mutex in (bf.win_mutex("w", group=group), bf.win_lock("w", group=group)):
            with mutex:
                pass
        assert bf.get_current_created_window_names(group=group) == ["w"]
    dist.barrier()
    assert bf.win_update("w", 0.0, {before(): 1.0}).eq(0).all()  # the world's window is another one
    if dist.get_rank() in members:
        bf.win_free("w", group=group)
        kept = fogdist.Window(full(1), group)
        dist.destroy_process_group(group)
        with pytest.raises(dist.DistBackendError, match="destroyed"):
            kept.put(full(2))
        with pytest.raises(RuntimeError, match="destroyed"):
            bf.win_free(group=group)
        kept.free()
    bf.win_free()


@on_ranks(SIZE)
def test_windows_end_with_the_session() -> None:
    for number in range(3):
        fogdist.init()
        bf.win_create(full(number), "w", zero_init=True)  # the previous window of this name is gone
        bf.win_put(full(number), "w")
        dist.barrier()
        assert bf.win_update("w").eq(number).all()
        dist.barrier()
        fogdist.shutdown()


@on_ranks(1, interface=INTERFACES)
def test_a_group_of_one(interface: str) -> None:
    window = AnyWindow(interface, full(3), zero_init=False)
    window.put(window.tensor, keep=0.5)
    window.accumulate(window.tensor)
    window.get()
    with window.hold([]):
        assert window.update(2.0, p=True).eq(3).all()
    assert window.p == 2.0
    window.free()


# --- arguments ----------------------------------------------------------------------------------------------


@on_ranks(SIZE)
def test_wrong_arguments_of_functions() -> None:
    fogdist.init(right_ring)
    rank, left, right = fogdist.rank(), before(), after()
    put, update, x = bf.win_put, bf.win_update, full(rank)
    bf.win_create(x, "w")
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        *(
            (
                lambda name=name: getattr(bf, name)("v"),
                KeyError,
                r"name must be .* open window, of \['w'\], got 'v'",
            )
            for name in [
                "win_free",
                "win_update",
                "win_update_then_collect",
                "win_associated_p",
                "get_win_version",
            ]
        ),
        (lambda: put(x, "v"), KeyError, "got 'v'"),
        (lambda: put(x, 3), TypeError, "name must be a string, got int"),
        (lambda: bf.win_create(x, None), TypeError, "name must be a string, got NoneType"),
        (lambda: bf.win_create([1.0], "v"), TypeError, "tensor must be a torch.Tensor, got list"),
        (lambda: put(x, "w", None, [left]), ValueError, rf"dst_weights must name out-.*{left}"),
        (lambda: put(x, "w", None, 1), TypeError, "dst_weights must be an iterable"),
        (lambda: put(x, "w", None, {right: math.inf}), ValueError, rf"dst_weights\[{right}\]"),
        (lambda: put(x, "w", math.nan), ValueError, "self_weight must be finite"),
        (lambda: put(x, "w", True), TypeError, "self_weight.*bool"),
        (lambda: put(x, "w", None, {right: 1.0}, 1), TypeError, "require_mutex.*1"),
        (lambda: update("w", None, None, 1), TypeError, "reset.*1"),
        (lambda: update("w", None, None, False, "yes"), TypeError, "clone.*'yes'"),
        (lambda: bf.win_mutex("w", [1]).__enter__(), TypeError, r"for_self.*\[1\]"),
        (lambda: put(x[:4], "w"), ValueError, r"tensor: got float64\[4\]; allowed is float64\[5\]"),
        (lambda: put(1.0, "w"), TypeError, "tensor must be a torch.Tensor, got float"),
        (lambda: bf.win_accumulate(x, "w", None, [left]), ValueError, "must name out-neighbors"),
        (lambda: bf.win_get("w", {right: 1.0}), ValueError, "src_weights must name in-neighbors"),
        (lambda: update("w", 0.5), ValueError, "must be given together, got self_weight alone"),
        (lambda: update("w", None, {}), ValueError, "got neighbor_weights alone"),
        (lambda: update("w", 0.5, [left]), TypeError, "neighbor_weights must be a dict"),
        (lambda: update("w", 0.5, {right: 0.5}), ValueError, "neighbor_weights must name in-"),
        (lambda: bf.win_mutex("w", ranks=["a"]).__enter__(), TypeError, "ranks"),
        (lambda: bf.win_poll(10**9), ValueError, "handle"),
        (lambda: bf.win_wait("a"), TypeError, "handle must be an int"),
        (lambda: put(x, "w", group="world"), TypeError, "group"),
        (lambda: fogdist.Window(x, "v"), TypeError, "name is a keyword: name='v'"),
        (lambda: bf.win_get("w", require_mutex=1), TypeError, "require_mutex.*1"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    with pytest.warns(UserWarning, match="win_wait: handle"):
        assert bf.win_wait(10**9) is False
    assert x.eq(rank).all() and bf.get_win_version("w") == {left: 0}  # nothing was sent or scaled
    with pytest.raises(ValueError, match="ranks disagree on the name"):
        bf.win_create(torch.ones(1), f"v{rank}")
    assert bf.get_current_created_window_names() == ["w"]
    bf.win_free()


@on_ranks(SIZE)
def test_wrong_arguments_of_the_backend() -> None:
    rank, left, right, group = dist.get_rank(), before(), after(), backend()
    good = {"tensor": full(1), "name": "w", "in_neighbors": [left], "out_neighbors": [right]}
    for change, message in [
        ({"tensor": torch.ones(2, 2).t()}, "not contiguous"),
        ({"tensor": torch.ones(2, dtype=torch.bool)}, "tensor: got dtype bool; windows allow"),
        ({"tensor": torch.ones(2).to_sparse()}, "tensor"),
        ({"in_neighbors": [rank]}, f"in_neighbors: got rank {rank}; .* except {rank}"),
        ({"in_neighbors": [3]}, "in_neighbors: got rank 3; allowed are ranks 0 to 2"),
        ({"out_neighbors": [right, right]}, f"out_neighbors: got rank {right} more than once"),
        ({"timeout": timedelta(0)}, "timeout: got 0 ms; allowed is more than 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            group.create_window(**(good | change))
    window = group.create_window(**good)
    to = [(right, 1.0)]
    hold = window.hold([right])
    elsewhere = ThreadPoolExecutor(1)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: window.put(full(1), to + to), "more than once"),
        (lambda: window.update(math.nan, []), "self_weight: got nan"),
        (lambda: window.version(5), "rank: got rank 5"),
        (lambda: window.hold([rank]), f"got rank {rank}"),
        (elsewhere.submit(hold.release).result, "some mutexes of window 'w' are not locked by this thread"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    hold.release()
    hold.release()  # does nothing
    assert window.version(left) == 0
    dist.barrier()
    window.put(full(1, 10)[::2], to).wait()  # the tensor of a put may be non-contiguous
    window.free()
    assert re.search("of window 'w' of group .* the window was freed", error_of(lambda: window.version(left)))
    window.free()  # a second call does nothing


# --- older names; test_bluefog_door.py calls them as scripts of their versions did -------------------------------


@pytest.mark.parametrize("old", RENAMED)
def test_an_older_name_warns_and_says_the_new_one(old):
    modules = [module for module in (bf, topology_util) if RENAMED[old] in module.__all__]
    assert modules
    for module in modules:
        with pytest.warns(DeprecationWarning, match=rf"\.{old} is now called .*\.{RENAMED[old]};") as record:
            found = getattr(module, old)
        assert record[0].filename == __file__ and found is getattr(module, RENAMED[old])
