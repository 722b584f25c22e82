"""Tests of fogdist on any group: each group has its own ranks and topology, and handles belong to no group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from fogdist.context import current
from harness import on_ranks
from reference import Checks, make_input, mix

# The ranks of the group have other numbers than in the world.
MEMBERS = [1, 2, 3]
same = topologies.is_equivalent


def mean_matrix(graph: Any) -> np.ndarray:
    return topologies.mixing_matrix(topologies.uniform_weights(graph))


@on_ranks(4)
def test_every_operation() -> None:
    fogdist.init(topologies.star)
    group = dist.new_group(MEMBERS, backend="fog")
    if dist.get_rank() not in MEMBERS:
        with pytest.raises(ValueError, match="group must contain this rank"):
            fogdist.rank(group=group)
        dist.barrier()
        return
    rank, size = fogdist.rank(group=group), fogdist.size(group=group)
    inputs = [make_input(r, torch.float64, 6) for r in range(size)]
    with Checks() as checks:
        names = ["rank", "size", "local_rank", "local_size", "machine_rank", "machine_size", "is_homogeneous"]
        numbers = [getattr(bf, name)(group=group) for name in names]
        checks.equal("numbers", numbers, [dist.get_rank(group), 3, rank, 3, 0, 1, True])
        default = fogdist.load_topology(group=group)
        checks.true("default", same(default, topologies.exponential(size)))
        ring = topologies.ring(size, connect_style=2)
        fogdist.set_topology(ring, group=group)
        checks.equal("in", fogdist.in_neighbor_ranks(group=group), [(rank - 1) % size])
        checks.equal("out", fogdist.out_neighbor_ranks(group=group), [(rank + 1) % size])
        checks.equal("weighted", (bf.is_topo_weighted(group=group), bf.is_topo_weighted()), (True, True))
        world = fogdist.load_topology()
        checks.true("the world's stays", same(world, topologies.star(4)))

        mine = inputs[rank]
        average = mix(inputs, topologies.mixing_matrix(ring))[rank]
        checks.close("along the topology", fogdist.neighbor_allreduce(mine, group=group), average)
        before, after = (rank - 1) % size, (rank + 1) % size
        weights = {"self_weight": 0.5, "src_weights": {before: 0.5}, "dst_weights": [after]}
        checks.close("dynamic", fogdist.neighbor_allreduce(mine, **weights, group=group), average)
        checks.equal("gathered", fogdist.neighbor_allgather(mine, group=group), inputs[(rank - 1) % size])
        checks.equal("allgather", bf.allgather(mine, group=group), torch.cat(inputs))
        checks.close("allreduce", bf.allreduce(mine, group=group), sum(inputs) / size)
        checks.close("allreduce_", bf.allreduce_(mine.clone(), False, group=group), sum(inputs))
        checks.equal("broadcast", bf.broadcast(mine, 2, group=group), inputs[2])
        checks.equal("broadcast_", bf.broadcast_(mine.clone(), 0, group=group), inputs[0])
        if rank != 0:
            pair = fogdist.pair_gossip(mine, 3 - rank, group=group)
            checks.close("pair_gossip", pair, (inputs[1] + inputs[2]) / 2)
        infer = bf.InferSourceFromDestinationRanks, bf.InferDestinationFromSourceRanks
        checks.equal("inferred sources", infer[0]([after], group=group), [before])
        checks.equal("inferred destinations", infer[1]([before], group=group), [after])
        dist.barrier(group)
    dist.barrier()
    dist.destroy_process_group(group)


@on_ranks(3)
def test_handles_of_several_groups() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    first, second = dist.new_group(backend="fog"), dist.new_group(backend="fog")
    # Each rank waits in its own order, and the groups differ in the order of calls.
    calls = [(None, 1.0), (first, 2.0), (second, 3.0), (first, 4.0)]
    handles = [
        (bf.allreduce_nonblocking(torch.full((5,), rank * factor), False, group=group), factor)
        for group, factor in calls
    ]
    assert len({handle for handle, _ in handles}) == len(calls)
    for handle, factor in handles[rank % 3 :] + handles[: rank % 3]:
        while not bf.poll(handle):
            pass
        assert bf.wait(handle).tolist() == [factor * sum(range(size))] * 5
        for used in (bf.poll, bf.wait, bf.synchronize):
            with pytest.raises(ValueError, match=f"handle.*{handle}"):
                used(handle)
    # The same name is used in several groups.
    named = [bf.allreduce_nonblocking(torch.ones(2), name="same", group=g) for g in (None, first, second)]
    assert [bf.wait(handle).tolist() for handle in named] == [[1.0, 1.0]] * 3
    dist.destroy_process_group(first)
    dist.destroy_process_group(second)


@on_ranks(2)
def test_groups_come_and_go() -> None:
    import fogdist.context

    fogdist.init()
    x = torch.tensor([float(fogdist.rank())])
    for _ in range(5):
        group = dist.new_group(backend="fog")
        fogdist.set_topology(topologies.star(fogdist.size()), group=group)
        fogdist.neighbor_allreduce(x, group=group)
        context = current(group)
        assert current(group) is context
        dist.destroy_process_group(group)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"group must be .* destroyed"):
                fogdist.neighbor_allreduce(x, group=group)
    # A destroyed group that is never used again is forgotten when another group is used.
    dropped = dist.new_group(backend="fog")
    fogdist.rank(group=dropped)
    dist.destroy_process_group(dropped)
    last = dist.new_group(backend="fog")
    fogdist.rank(group=last)
    known = len(fogdist.context._session.contexts)
    fogdist.init()
    assert list(fogdist.context._session.contexts) == [last]
    # An operation in flight in a destroyed group fails, and waiting for its handle raises the error.
    if fogdist.rank() == 0:
        handle = bf.allreduce_nonblocking(x, group=last)
    dist.destroy_process_group(last)
    if fogdist.rank() == 0:
        with pytest.raises(dist.DistBackendError, match="allreduce"):
            bf.wait(handle)
    fogdist.init()
    assert not fogdist.context._session.contexts
    assert known == 1


@on_ranks(3)
def test_init_forgets_topologies_of_groups() -> None:
    fogdist.init()
    size = fogdist.size()
    group = dist.new_group(backend="fog")
    fogdist.set_topology(topologies.star(size), group=group)
    fogdist.init()
    default = topologies.exponential(size)
    assert same(fogdist.load_topology(group=group), default)
    assert not bf.is_topo_weighted(group=group)
    # Gossip continues across init, wherever a rank calls init.
    rank, x = fogdist.rank(), torch.tensor([float(fogdist.rank())])
    handles = []
    for step in range(4):
        if step == 2 * rank:
            fogdist.init()
        if rank < 2:
            handles += [bf.pair_gossip_nonblocking(x, 1 - rank, group=g) for g in (group, None)]
    if rank == 2:
        fogdist.init()
    assert [bf.wait(handle).item() for handle in handles] == [0.5] * len(handles)
    # The group of init, passed explicitly, is the same group.
    assert current(dist.group.WORLD) is current()
    dist.destroy_process_group(group)


@on_ranks(2)
def test_strange_groups() -> None:
    fogdist.init()
    for group, error, message in [
        ("world", TypeError, "group.*ProcessGroup.*str"),
        (0, TypeError, "group.*ProcessGroup.*int"),
        (dist.GroupMember.NON_GROUP_MEMBER, ValueError, "group must contain this rank"),
    ]:
        for call in (fogdist.rank, fogdist.set_topology, bf.barrier, bf.is_homogeneous):
            with pytest.raises(error, match=message):
                call(group=group)
        with pytest.raises(error, match=message):
            fogdist.neighbor_allreduce(torch.ones(1), group=group)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="group must have the backend fog.*gloo"):
        bf.allreduce(torch.ones(1), group=gloo)
    dist.destroy_process_group(gloo)


def wrapped_group() -> None:
    fogdist.init()
    group = dist.new_group(backend="fog")
    assert fogdist.neighbor_allreduce(torch.ones(2), group=group).tolist() == [1.0, 1.0]
    alone = torch.ops.fog.neighbor_allreduce(torch.ones(2), 1.0, [], [], [], [], group.group_name)
    assert alone.tolist() == [1, 1]


def test_the_wrapper_of_debug_mode_is_peeled(new_world):
    new_world(2, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}).run(wrapped_group)


# --- ranks with different topologies ------------------------------------------------------------------------


WEIGHT = 1 / 3
DIFFERENT = {
    "edges": [
        "between the ranks [0, 2, 3] and [1]:",
        f"only on ranks [0, 2, 3]: edge 1 -> 2 of weight {WEIGHT}",
        "only on ranks [1]: edge 3 -> 1 of weight 0.25",
    ],
    "is_weighted": ["only on ranks [0, 1, 2]: is_weighted=False", "only on ranks [3]: is_weighted=True"],
    "all": ["between the ranks [0] and [1] and [2] and [3]:", "only on ranks [3]: edge 0 -> 1"],
    "many": ["only on ranks [0]:", "and 11 more"],
}


@on_ranks(4, kind=DIFFERENT)
def test_different_topologies_are_an_error_everywhere(kind: str) -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.set_topology(topologies.star(size))
    graph, is_weighted = topologies.ring(size), False
    if kind == "edges" and rank == 1:
        graph.remove_edge(1, 2)
        graph.add_edge(3, 1, weight=0.25)
    elif kind == "is_weighted":
        is_weighted = rank == 3
    elif kind == "all":
        graph = topologies.fully_connected(size)
        graph.remove_edge(rank, (rank + 1) % size)
    elif kind == "many":
        graph = topologies.fully_connected(size) if rank == 0 else graph
    with pytest.raises(ValueError, match="topology must be the same on all ranks") as caught:
        bf.set_topology(graph, is_weighted)
    for line in DIFFERENT[kind]:
        assert line in str(caught.value)
    assert same(fogdist.load_topology(), topologies.star(size))
    assert fogdist.neighbor_allreduce(torch.ones(1)).tolist() == [1.0]


@on_ranks(3)
def test_the_order_of_edges_does_not_count() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    ring = topologies.ring(size)
    # The same edges in another order on every rank, NumPy's numbers, and a missing weight, which means 1.
    edges = list(ring.edges(data="weight"))
    np.random.default_rng(rank).shuffle(edges)
    graph = type(ring)()
    graph.add_nodes_from(np.random.default_rng(rank).permutation(size))
    graph.add_weighted_edges_from((int(i), int(j), np.float64(w)) for i, j, w in edges)
    fogdist.set_topology(graph)
    unweighted = type(ring)([(0, 1), (1, 0)] if rank else [(1, 0), (0, 1)])
    unweighted.add_nodes_from(range(size))
    if rank == 1:
        unweighted[0][1]["weight"] = 1
    bf.set_topology(unweighted)


@on_ranks(4)
def test_init_with_different_topologies() -> None:
    fogdist.init()
    rank = fogdist.rank()
    with pytest.raises(ValueError, match=r"(?s)topology must .*only on ranks \[0\]: .*is_weighted=True"):
        bf.init(topologies.ring, is_weighted=rank == 0)
    # The topology is unchanged.
    assert fogdist.neighbor_allreduce(torch.ones(1)).item() == 1.0
    fogdist.shutdown()
    with pytest.raises(ValueError, match="topology must be the same"):
        fogdist.init(topologies.ring if rank else topologies.fully_connected)
    assert not fogdist.is_initialized()


def one_rank_stays_away() -> str:
    fogdist.init()
    group = dist.new_group(backend="fog", timeout=timedelta(seconds=1))
    if fogdist.rank() == 1:  # the error is found before anything is sent
        with pytest.raises(TypeError, match="topology must be a networkx.DiGraph"):
            fogdist.set_topology(7, group=group)
        return ""
    with pytest.raises(dist.DistBackendError) as caught:
        fogdist.set_topology(topologies.ring(fogdist.size()), group=group)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named(new_world):
    first, _, third = new_world(3).run(one_rank_stays_away)
    for text in (first, third):
        assert "while all ranks compare their topology" in text
        assert "rank 1" in text
